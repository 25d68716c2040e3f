"""Reads flags from the --help of a command. Only `orc init --run-help` runs it."""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

from orchestrator.service.commands.init.script_flags import Flag, Script
from orchestrator.service.commands.init.typed_command import TypedCommand
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.trainer import is_python
from orchestrator.specs.replace import replace

LIMIT_S = 20.0
TEXT_MAX = 2**20  # characters of the help that are read
# A line that begins with flags, as argparse, click and typer write it: `  -b, --batch-size INT
# text (default: 8)`.
LINE = re.compile(
    r"^[\s│]*((?:-{1,2}[A-Za-z][\w.-]*(?:[ =][<\[{A-Z][^\s,]*)?(?:,\s*|\s+/\s*|\s(?=-))?)+)(.*)$"
)
DEFAULT = re.compile(r"default[:=]?\s*([^\s)\],]+)")


def add_flags_of_help(script: Script, typed: TypedCommand) -> Script:
    """Return the script with the flags added that its --help prints. Raises SpecError where that
    fails.

    The command runs for 20 s at most, with an empty HOME and no CUDA device, and without a network
    where `unshare` allows it.
    """
    names = script.flags_by_name
    return replace(
        script,
        flags=(
            *script.flags,
            *(
                flag
                for flag in parse_help_flags(_run_command_with_help(typed))
                if flag.name not in names
            ),
        ),
    )


def _run_command_with_help(typed: TypedCommand) -> str:
    python = sys.executable if typed.command[0] in ("python", "python3") else typed.command[0]
    before, name = (
        typed.command[typed.arguments - 2 : typed.arguments] if typed.arguments > 1 else ("", "")
    )
    program = (
        [python, *(["-m"] if before == "-m" else []), name]
        if is_python(python)
        else [*typed.command[:1], name]
    )
    offline = ["unshare", "--user", "--net", "--map-root-user"] if shutil.which("unshare") else []
    if (
        offline
        and subprocess.run(
            [*offline, "true"], capture_output=True, timeout=LIMIT_S, check=False
        ).returncode
    ):
        offline = []
    with (
        tempfile.TemporaryDirectory() as home,
        (Path(home) / "help").open("w+", errors="replace") as output,
    ):
        env = {
            "PATH": "/usr/bin:/bin",
            "HOME": home,
            "CUDA_VISIBLE_DEVICES": "",
            "COLUMNS": "200",
            "TERM": "dumb",
        }
        process = subprocess.Popen(
            [*offline, *filter(None, program), "--help"],
            cwd=typed.folder,
            env=env | {"HF_HUB_OFFLINE": "1", "NO_COLOR": "1"},
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            code: int | None = process.wait(LIMIT_S)
        except subprocess.TimeoutExpired:
            code = None
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        output.seek(0)
        text = output.read(TEXT_MAX)
    if code != 0:
        reason = (
            f"no end within {LIMIT_S:.0f} s"
            if code is None
            else text.strip().rpartition("\n")[2][:200]
        )
        raise SpecError(
            "its --help failed", source="orc init", got=reason, hint="leave out --run-help"
        )
    return text


def parse_help_flags(help_text: str) -> Iterator[Flag]:
    """Yield the flags in a help text. A flag without a placeholder for a value is a switch."""
    lines = help_text[:TEXT_MAX].splitlines()
    for index, line in enumerate(lines):
        match = LINE.match(line)
        if match is None:
            continue
        names = re.findall(r"(?<![\w-])-{1,2}[A-Za-z][\w.-]*", match[1])
        has_value = re.search(r"[ =][<\[{A-Z]", match[1]) is not None
        following = (
            lines[index + 1] if index + 1 < len(lines) and not LINE.match(lines[index + 1]) else ""
        )
        default = DEFAULT.search(f"{match[2]} {following}")
        name = max(names, key=len)
        yield Flag(
            name=name,
            kind="value" if has_value else "switch",
            default=default[1].strip("'\"")
            if default and has_value and default[1] != "None"
            else None,
            also_called=tuple(other for other in names if other != name),
        )
