"""Finds out why a program cannot start on this machine, with the same lookup as exec."""

from __future__ import annotations

import errno
import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import NamedTuple

from orchestrator.specs.command_line import Env

EXEC_ERRORS = (
    errno.ENOENT,
    errno.EACCES,
    errno.ENOEXEC,
    errno.ENOTDIR,
)  # the same again, however often it is tried
INTERPRETER_TIMEOUT_S = 30.0
SHEBANG_BYTES_MAX = 256  # BINPRM_BUF_SIZE of Linux (include/uapi/linux/binfmts.h)
PYTHON = re.compile(r"python[0-9.]*")


class Problem(NamedTuple):
    """Why a program does not start: the problem, the paths tried, and a hint."""

    what: str
    tried: str  # the path, or the PATH searched
    hint: str

    def __str__(self) -> str:
        return f"{self.what}: tried {self.tried}; {self.hint}"


def find_start_problem(program: str, workdir: str, env: Env) -> Problem | None:
    """Return why executing `program` in `workdir` fails, or why its Python cannot start; None where
    it starts.

    Only Python interpreters are run as a test: the program itself, or the one in its first line.
    """
    if not Path(workdir).is_dir():
        return Problem(
            "the folder does not exist", workdir, "`workdir` is where the job runs on its node"
        )
    file = _find_program(program, workdir, env)
    if isinstance(file, Problem):
        return file
    interpreter = read_interpreter(file)
    if interpreter is not None and not PYTHON.fullmatch(
        file.name
    ):  # pyenv's `python` is a script of a shell
        named = _find_program(interpreter, workdir, env)
        if isinstance(named, Problem):
            what = f"the first line of {file} names an interpreter that is not there"
            return Problem(
                what, named.tried, "install the program again in an environment that exists"
            )
        file = named
    return _find_interpreter_problem(file, workdir, env) if PYTHON.fullmatch(file.name) else None


def _find_program(program: str, workdir: str, env: Env) -> Path | Problem:
    """Return the file that exec would run, or the problem where there is none."""
    if "/" not in program:
        search = env.get("PATH", os.defpath)
        file = shutil.which(program, path=search)
        if file is None:
            return Problem(
                f"no program {program!r} on the PATH",
                search,
                "write the program's path, or its folder in `env: {PATH: ...}`",
            )
        return Path(file)
    path = Path(workdir) / program
    if path.is_dir():
        return Problem("the program is a folder", str(path), "write the path of a file in it")
    if not path.exists():
        return Problem(
            "the program does not exist",
            str(path),
            f"a relative path starts at `workdir`, here {workdir}",
        )
    if not os.access(path, os.X_OK):
        return Problem(
            "the program is not executable",
            str(path),
            f"`chmod +x {path}`, or name its interpreter first",
        )
    return path


def read_interpreter(script: Path) -> str | None:
    """Return the interpreter in a script's first line ("#!"); None without such a line. `env` in
    that line is resolved.
    """
    try:
        with script.open("rb") as opened:
            first = opened.read(SHEBANG_BYTES_MAX).partition(b"\n")[0]
    except OSError:  # it may be executed and not read
        return None
    argv = first[2:].decode(errors="replace").split() if first.startswith(b"#!") else []
    if argv and Path(argv[0]).name == "env":
        argv = [word for word in argv[1:] if not word.startswith("-") and "=" not in word]
    return argv[0] if argv else None


def _find_interpreter_problem(python: Path, workdir: str, env: Env) -> Problem | None:
    hint = "name the interpreter of an environment that works on this machine"
    try:
        ended = subprocess.run(
            [str(python), "-c", ""],
            cwd=workdir,
            env=dict(env),
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.PIPE,
            timeout=INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except subprocess.TimeoutExpired:
        return None  # slow is not wrong
    except OSError as error:
        other = " (another machine's, or no program)" if error.errno == errno.ENOEXEC else ""
        return Problem(
            f"the interpreter cannot be started: {error.strerror}{other}", str(python), hint
        )
    if ended.returncode == 0:
        return None
    last = ended.stderr.decode(errors="replace").strip().rpartition("\n")[2]
    message = f": {last}" if last else ""
    return Problem(
        f"the interpreter ends with code {ended.returncode} at `-c ''`{message}", str(python), hint
    )
