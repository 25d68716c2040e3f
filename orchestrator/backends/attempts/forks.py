"""Forks ranks from a process that has imported torch and the guard (training/guard/fork_server.py), where that is safe.

One server stands for each set of what a process inherits: user, interpreter, variables, limits, cgroup, namespaces.
Any doubt is a reason to start the rank plainly. Standard library only.
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, BinaryIO

from orchestrator.backends.attempts.process_census import MARK
from orchestrator.backends.attempts.system_metrics import read_total_and_available_bytes
from orchestrator.backends.environment import INHERITED, select_matching
from orchestrator.specs.command_line import Env
from orchestrator.training.guard.fork_server import GUARD, read_peer_user_id

SERVER = GUARD.with_name("fork_server.py")
HOOKS = str(GUARD.with_name("inherited"))  # PYTHONPATH of a guarded script
OWN_PROGRAM = ["-m", "orchestrator.training.main"]  # of our engines: it begins with torch
# Variables that nothing reads while torch is imported: each rank has its own.
# tests/backends/test_forks.py traces them.
LATE = {
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"),
    *("GLOO_SOCKET_IFNAME", "TORCH_EXTENSIONS_DIR", "CUDA_VISIBLE_DEVICES"),
    *("ORC_GUARD", "ORC_RANK", MARK),
}
# A server has these in common with its ranks.
EARLY = (*INHERITED, "PYTHONUNBUFFERED", "ACCELERATE_USE_CPU", "DS_ACCELERATOR")
# lines of /proc/self/status that a child inherits
STATUS = ("Uid", "Gid", "Groups", "Umask", "Cap", "NoNewPrivs", "Seccomp", "Cpus_", "Mems_", "SigI")
ROOM = "/" * 16384  # for the variables of a rank
FILLER = " " * 8192  # for its command
SERVERS_MAX = 4  # of one user, with the same limits, cgroup and namespaces
AVAILABLE_MIN = 0.1  # of the machine's memory: with less, no server is started
START_S = 10.0  # of the server's interpreter
SCRIPT_BYTES_MAX = 2**20
MESSAGE_BYTES_MAX = 2**16


class ForkedRank:
    """A rank's process that the fork server forked, with those methods of Popen that the launcher
    uses.
    """

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection = connection
        self.pid = pid
        self.returncode: int | None = None

    def __str__(self) -> str:
        return "forked"

    def wait(self) -> int:
        """Wait for the end of the process. Return its exit code; after a signal, minus the signal's
        number.
        """
        with self._connection:
            message = self._connection.recv(MESSAGE_BYTES_MAX)
            # without its holder, the kernel kills it
            code = json.loads(message)["code"] if message else -signal.SIGKILL
            self.returncode = int(code)
        return self.returncode


def fork_rank_or_explain(
    argv: Sequence[str],
    env: Env,
    workdir: str,
    log: BinaryIO,
    until_s: float,
) -> ForkedRank | str:
    """Fork a rank from the fork server, and return its process; a reason (text) where that is not
    possible.

    Such a rank must be started as a new interpreter instead. Waits until `until_s` of the monotonic
    clock.
    """
    why = _explain_why_not_forked(argv, env, workdir)
    if why:
        return why
    late = {name: text for name, text in env.items() if name in LATE}
    early = {name: text for name, text in env.items() if name not in LATE}
    message = json.dumps({"argv": list(argv), "workdir": workdir, "env": late}).encode()
    connection = socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET)
    connection.settimeout(START_S)
    try:
        why = _connect_to_server_or_explain(connection, argv[0], early)
        if why:
            connection.close()
            return why
        connection.settimeout(max(0.1, until_s - time.monotonic()))
        socket.send_fds(connection, [message], [log.fileno()])
        answer = json.loads(connection.recv(MESSAGE_BYTES_MAX))
        if "pid" not in answer:
            connection.close()
            return str(answer.get("why", "the fork ended"))
        connection.settimeout(None)
        connection.send(b"go")
        return ForkedRank(connection, int(answer["pid"]))
    except (OSError, ValueError, subprocess.SubprocessError) as error:
        connection.close()
        return f"the server did not answer: {type(error).__name__}: {error}"


def restore_signals() -> None:
    """Unblock SIGINT in this process: workers of Ray block it, and child processes would inherit
    that.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_SETMASK, ())


def _explain_why_not_forked(argv: Sequence[str], env: Env, workdir: str) -> str:
    """Return why a rank may not be forked from a server that has imported torch; "" where it
    may.
    """
    if len(argv) < 5 or argv[1] != str(GUARD) or argv[3] != "--" or not os.path.isabs(argv[0]):
        return "it is no Python program under the guard, or its interpreter has flags"
    if env.get("PYTHONPATH", "") not in ("", HOOKS):
        return "PYTHONPATH has folders of its own"
    others = env.keys() - LATE - select_matching(env, EARLY).keys()
    if others:
        return f"nothing is known of who reads {min(others)}"
    try:
        settings = json.loads(Path(argv[2]).read_text())
        if settings.get("fault_kind") == "node":
            return "it is to kill its launcher"
        is_virtual = settings["virtual_capacity_bytes"] is not None
        if is_virtual or list(argv[4:6]) == OWN_PROGRAM:
            return ""  # the guard imports torch before anything of the program
        script = Path(workdir, argv[4])
        if not script.is_file():
            return "its program is no file"
        with script.open("rb") as file:
            is_first = begins_with_torch(file.read(SCRIPT_BYTES_MAX))
    except (OSError, ValueError, SyntaxError, KeyError, RecursionError) as error:
        return f"{type(error).__name__}: {error}"
    return "" if is_first else "something precedes the script's import of torch"


def begins_with_torch(script: bytes) -> bool:
    """Return whether a script imports torch before any statement that could set an environment
    variable. Raises SyntaxError.

    Only the script's docstring and imports from the standard library may precede the import of
    torch.
    """
    module = ast.parse(script)
    first = 0 if ast.get_docstring(module) is None else 1
    for statement in module.body[first:]:
        if isinstance(statement, ast.Import):
            names = [alias.name for alias in statement.names]
        elif isinstance(statement, ast.ImportFrom):
            names = ["." * statement.level + (statement.module or "")]
        else:
            return False
        for name in names:
            top = name.partition(".")[0]
            if top == "torch":
                return True
            if top not in sys.stdlib_module_names:
                return False
    return False


def _connect_to_server_or_explain(connection: socket.socket, interpreter: str, env: Env) -> str:
    """Connect the socket to the fork server of this interpreter and these variables, started if
    needed; return "" then.

    Returns the reason where there can be no server. Raises OSError.
    """
    prefix = f"orc-forks-{_compute_digest_of_parts(_list_inherited_state())}-"
    name = prefix + _compute_digest_of_parts([interpreter, *sorted(env.items())])
    try:
        connection.connect("\0" + name)
    except ConnectionRefusedError:
        why = _start_server_or_explain(name, prefix, interpreter, env)
        if why:
            return why
        connection.connect("\0" + name)
    return "" if read_peer_user_id(connection) == os.geteuid() else "another user has its name"


def _start_server_or_explain(
    socket_name: str, socket_prefix: str, interpreter: str, env: Env
) -> str:
    """Start a fork server, wait until it can be reached, and return ""; or return the reason where
    there can be none.

    `socket_prefix` begins the socket names of all servers for the same inherited process state.
    """
    listed = Path("/proc/net/unix").read_text().split()
    if len({word for word in listed if word.startswith(f"@{socket_prefix}")}) >= SERVERS_MAX:
        return f"{SERVERS_MAX} servers stand already"
    total, available = read_total_and_available_bytes()
    if available < AVAILABLE_MIN * total:
        return "memory is short"
    ended = subprocess.run(
        [interpreter, str(SERVER), socket_name, FILLER],
        cwd="/",
        env={**env, MARK: ROOM},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
        preexec_fn=restore_signals,
        timeout=START_S,
        check=False,
    )
    return f"the server ended with code {ended.returncode}" if ended.returncode else ""


def _compute_digest_of_parts(parts: list[Any]) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:24]


def _list_inherited_state() -> list[str]:
    """Return the texts of what a child process inherits apart from variables and descriptors.

    They are user, signals, cgroup, limits, namespaces and priority.
    """
    process = Path("/proc/self")
    lines = (process / "status").read_text().splitlines()
    status = [line for line in lines if line.startswith(STATUS)]
    files = [(process / name).read_text() for name in ("cgroup", "limits", "oom_score_adj")]
    spaces = sorted(f"{path.name} {os.readlink(path)}" for path in (process / "ns").iterdir())
    order = f"{os.getpriority(os.PRIO_PROCESS, 0)} {os.sched_getscheduler(0)}"
    return [*status, *files, *spaces, order]
