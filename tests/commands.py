"""Commands of `orc`, forked from a server that has imported them: by itself, each takes a second to import them.

A process that reads its variables when it starts (the loader's, the interpreter's) is started afresh where they differ
from the server's.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import os
import selectors
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from functools import cache
from pathlib import Path
from typing import IO, Never

IMPORTED = (
    "orchestrator.cli",
    "orchestrator.service.client.client",
    "orchestrator.service.terminal.sweep_tables",
)
READ_AT_START = ("LD_", "PYTHON", "MALLOC_", "LC_", "LANG")
COMMAND_S = 240.0
REQUEST_BYTES = 2**17


class CommandServer:
    """A process that forks commands; it ends with the process that started it."""

    def __init__(
        self, path: Path, prefix: Sequence[str] = (), env: Mapping[str, str] | None = None
    ) -> None:
        """Start it at the socket `path`, which does not exist; `prefix` is as nsenter."""
        self._path, self._env = path, _without_ours(os.environ if env is None else env)
        program = [*prefix, sys.executable, "-P", __file__, str(path)]
        self._process = subprocess.Popen(
            program, env=self._env, stdin=subprocess.PIPE, stdout=subprocess.PIPE
        )
        assert self._process.stdout is not None
        assert self._process.stdout.readline() == b"ready\n"

    def can_run(self, env: Mapping[str, str]) -> bool:
        """Return whether a fork can have these variables."""
        return _read_at_start(env) == _read_at_start(self._env)

    def run(
        self,
        arguments: Sequence[str],
        *,
        env: Mapping[str, str],
        cwd: Path | None = None,
        stdin: str = "",
    ) -> subprocess.CompletedProcess[str]:
        """Return the end of `orc ARGUMENTS` with exactly these variables. After COMMAND_S it is killed."""
        with contextlib.ExitStack() as stack:
            files = [stack.enter_context(tempfile.TemporaryFile("w+")) for _ in range(3)]
            files[0].write(stdin)
            files[0].seek(0)
            connection = stack.enter_context(socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET))
            connection.connect(str(self._path))
            request = json.dumps([list(arguments), dict(env), str(cwd or Path.cwd())]).encode()
            socket.send_fds(connection, [request], [file.fileno() for file in files])
            code = int(connection.recv(64) or -signal.SIGKILL)
            return subprocess.CompletedProcess(
                ["orc", *arguments], code, _text(files[1]), _text(files[2])
            )


def run_orc(
    arguments: Sequence[str], *, env: Mapping[str, str], cwd: Path | None = None, stdin: str = ""
) -> subprocess.CompletedProcess[str]:
    """Return the end of `orc ARGUMENTS` with exactly these variables, by this session's server where it can."""
    if _server().can_run(env):
        return _server().run(arguments, env=env, cwd=cwd, stdin=stdin)
    fresh = [sys.executable, "-m", "orchestrator.cli", *arguments]
    return subprocess.run(
        fresh,
        env=env,
        cwd=cwd,
        input=stdin,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
        check=False,
    )


@cache
def _server() -> CommandServer:
    return CommandServer(Path(tempfile.mkdtemp(prefix="orc-commands-")) / "socket")


def _text(file: IO[str]) -> str:
    file.seek(0)
    return file.read()


def _without_ours(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if not name.startswith("ORC_")}


def _read_at_start(env: Mapping[str, str]) -> dict[str, str]:
    return {name: value for name, value in env.items() if name.startswith(READ_AT_START)}


def serve(path: str) -> None:
    """Fork a process for each connection at `path`, until the standard input ends."""
    for module in IMPORTED:
        importlib.import_module(module)
    gc.collect()
    gc.freeze()  # what is imported is looked through in no collection of a fork
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)
    with (
        socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener,
        selectors.DefaultSelector() as selector,
    ):
        listener.bind(path)
        listener.listen()
        selector.register(listener, selectors.EVENT_READ)
        selector.register(sys.stdin, selectors.EVENT_READ)
        print("ready", flush=True)
        while all(key.fileobj is listener for key, _ in selector.select()):
            connection, _ = listener.accept()
            if os.fork() == 0:
                selector.close()
                listener.close()
                _answer(connection)
            connection.close()
    Path(path).unlink()


def _answer(connection: socket.socket) -> Never:
    """Run the command in a child, and send its exit code."""
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    request, descriptors, *_ = socket.recv_fds(connection, REQUEST_BYTES, 3)
    if (pid := os.fork()) == 0:
        connection.close()
        for number, descriptor in enumerate(descriptors):
            os.dup2(descriptor, number)
            os.close(descriptor)
        _run(*json.loads(request))
    signal.signal(signal.SIGALRM, lambda *_: os.kill(pid, signal.SIGKILL))
    signal.alarm(int(COMMAND_S))
    connection.send(str(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])).encode())
    os._exit(0)


def _run(arguments: list[str], env: dict[str, str], cwd: str) -> Never:
    os.chdir(cwd)
    os.environ.clear()
    os.environ.update(env)
    sys.stdin, sys.stdout, sys.stderr = open(0), open(1, "w"), open(2, "w")  # noqa: SIM115 - they end with the process
    sys.argv = ["orc", *arguments]
    from orchestrator.cli import main

    code: object = 0
    try:
        main()
    except SystemExit as end:
        code = end.code
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code if isinstance(code, int) else int(code is not None))


if __name__ == "__main__":
    serve(sys.argv[1])
