"""Laws of `orc watch` and of completion: a terminal sees the queue as it changes; a shell is offered job ids."""

from __future__ import annotations

import os
import pty
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.server.daemon import serve_http
from tests.service.services import TOKEN
from tests.service.worlds import World

SEEN_S = 60.0
WATCH = [sys.executable, "-m", "orchestrator.cli", "watch"]


@pytest.fixture
def home(tmp_path: Path) -> Iterator[tuple[World, Path]]:
    """A service with one job, and the home folder that leads to it."""
    world = World(tmp_path)
    world.submit()
    with serve_http(world.app) as port:
        (tmp_path / "token").write_text(TOKEN)
        write_service_file(tmp_path, port)
        yield world, tmp_path
    world.journal.close()


def environment(home: Path) -> dict[str, str]:
    return {**os.environ, "ORC_HOME": str(home), "TERM": "xterm", "COLUMNS": "80", "LINES": "24"}


def read_until(terminal: int, wanted: str) -> str:
    """Return the output of the terminal until it has shown this text."""
    shown, end_s = "", time.monotonic() + SEEN_S
    while wanted not in shown:
        ready, _, _ = select.select([terminal], [], [], max(0.0, end_s - time.monotonic()))
        assert ready, (wanted, shown[-2000:])
        shown += os.read(terminal, 65536).decode(errors="replace")
    return shown


def test_a_terminal_sees_a_job_that_is_submitted_while_it_watches_and_ctrl_c_ends_well(
    home: tuple[World, Path],
) -> None:
    world, folder = home
    terminal, slave = pty.openpty()
    watching = subprocess.Popen(
        [*WATCH, "--every", "0.2"],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        env=environment(folder),
        preexec_fn=lambda: signal.signal(
            signal.SIGINT, signal.SIG_DFL
        ),  # a job of a shell may ignore it
    )
    try:
        assert "1 of 2 busy" in read_until(terminal, "lm-1")
        world.submit()
        read_until(terminal, "lm-2")
        watching.send_signal(signal.SIGINT)
        assert watching.wait(timeout=SEEN_S) == 0
    finally:
        watching.kill()
        watching.wait()
        os.close(slave)
        os.close(terminal)


def test_a_file_gets_the_queue_once_within_80_columns(home: tuple[World, Path]) -> None:
    _, folder = home
    ended = subprocess.run(
        WATCH, env=environment(folder), capture_output=True, text=True, timeout=SEEN_S
    )
    assert ended.returncode == 0, ended.stderr
    assert "1 running, 0 waiting" in ended.stdout
    assert "lm-1" in ended.stdout
    assert max(map(len, ended.stdout.splitlines())) <= 80


def complete(home: Path, typed: str) -> list[str]:
    """The words that bash is offered for a command line."""
    variables = {
        "_ORC_COMPLETE": "complete_bash",
        "COMP_WORDS": typed,
        "COMP_CWORD": str(len(typed.split(" ")) - 1),
    }
    program = [sys.executable, "-c", "from orchestrator.cli import app; app(prog_name='orc')"]
    env = environment(home) | variables
    return subprocess.run(
        program, env=env, capture_output=True, text=True, timeout=SEEN_S, check=False
    ).stdout.split()


def test_the_shell_completes_job_ids_and_offers_none_without_a_service(
    home: tuple[World, Path], tmp_path_factory: pytest.TempPathFactory
) -> None:
    world, folder = home
    world.submit()
    assert complete(folder, "orc show l") == ["lm-1", "lm-2"]
    assert complete(folder, "orc cancel lm-2") == ["lm-2"]
    assert complete(folder, "orc show x") == []
    assert complete(tmp_path_factory.mktemp("empty"), "orc show l") == []
