"""Laws of `orc run` while a job runs: a terminal has a bar with the time that is left, a file has plain lines."""

from __future__ import annotations

import io
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.service.server.client import Client
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.lifecycle import write_service_file
from orchestrator.service.terminal import follow
from orchestrator.service.terminal.follow import follow as follow_job
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.run import JobFolder, write_json
from orchestrator.specs.units import format_seconds
from tests.backends.ray_jobs import until
from tests.service.services import TOKEN
from tests.service.worlds import World

SEEN_S = 30.0
LEFT = format_seconds(75 * 2.0)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    """A service with one running job, whose first rank has done 25 of 100 steps at 2 s each."""
    world = World(tmp_path)
    world.submit()
    world.turn_until("running")
    folder = JobFolder(tmp_path, "lm-1").attempt(1)
    folder.path.mkdir(parents=True)
    beat = Heartbeat(rank=0, step=25, steps_done=25, phase="training", peak_bytes=2**20, step_s=2.0, at_s=1.0)
    write_json(folder.heartbeat(0), beat)
    with serve_http(world.app) as port:
        (tmp_path / "token").write_text(TOKEN)
        write_service_file(tmp_path, port)
        yield world
    world.journal.close()


def shown(world: World, wanted: str, *, is_terminal: bool) -> str:
    """Return the output until the end of the job, which is cancelled once `wanted` was printed."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=is_terminal, width=100)
    with closing(Client(world.home)) as client:
        following = threading.Thread(target=follow_job, args=(client, "lm-1", console), daemon=True)
        following.start()
        until(lambda: wanted in printed.getvalue(), wanted, SEEN_S)
        world.controller.cancel(["lm-1"])
        world.turn_until("cancelled")
        following.join(SEEN_S)
        assert not following.is_alive()
    return printed.getvalue()


def test_a_terminal_shows_a_bar_of_the_steps_and_the_time_that_is_left(world: World) -> None:
    text = shown(world, "left", is_terminal=True)
    bar = next(line for line in text.splitlines() if "left" in line)
    plain = re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", bar)
    assert f"{LEFT} left · step 25/100" in plain
    full = plain.count("━") + plain.count("╸") + plain.count("╺")
    assert full >= follow.BAR_WIDTH - 1
    assert "lm-1: cancelled" in text


def test_a_file_has_a_plain_line_with_the_time_that_is_left(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(follow, "PLAIN_EVERY_S", 0.0)
    text = shown(world, "left", is_terminal=False)
    assert f"lm-1: {LEFT} left · step 25/100" in text
    assert "\x1b" not in text
    assert "━" not in text
