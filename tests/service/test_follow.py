"""Laws of `orc run` while a job runs: a terminal has a bar with the time that is left, a file has plain lines."""

from __future__ import annotations

import dataclasses
import io
import re
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from rich.console import Console
from rich.progress import Progress

from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.terminal import follow
from orchestrator.service.terminal.follow import follow_job as follow_job
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.parse import parse_job
from orchestrator.specs.run import JobFolder, write_json
from orchestrator.specs.units import format_seconds
from tests.backends.ray_jobs import until
from tests.service.services import TOKEN
from tests.service.worlds import World

SEEN_S = 30.0
LEFT = format_seconds(75 * 2.0)


FAULT = Fault(kind=FaultKind.OOM, rank=0, step=1)
ASKING = """\
name: lm
command: python train.py
global_batch_size: 16
knobs: {micro_batch_size: {flag: --batch, default: 16}}
profile: {parameters: 1000, layers: 1, activations_per_sample: 1MiB}
"""  # once its only plan ran out of memory, a smaller batch is left


@pytest.fixture
def idle_world(tmp_path: Path) -> Iterator[World]:
    """A service without jobs."""
    world = World(tmp_path)
    with serve_http(world.app) as port:
        (tmp_path / "token").write_text(TOKEN)
        write_service_file(tmp_path, port)
        yield world
    world.journal.close()


@pytest.fixture
def world(idle_world: World) -> World:
    """A service with one running job, whose first rank has done 25 of 100 steps at 2 s each."""
    idle_world.submit()
    idle_world.turn_until("running")
    folder = JobFolder(idle_world.home, "lm-1").attempt(1)
    folder.path.mkdir(parents=True)
    beat = Heartbeat(
        rank=0, step=25, steps_done=25, phase="training", peak_bytes=2**20, step_s=2.0, at_s=1.0
    )
    write_json(folder.heartbeat(0), beat)
    return idle_world


def shown(world: World, wanted: str, *, is_terminal: bool) -> str:
    """Return the output until the end of the job, which is cancelled once `wanted` was printed."""
    printed = io.StringIO()
    console = Console(file=printed, force_terminal=is_terminal, width=100)
    with closing(Client(world.home)) as client:
        following = threading.Thread(
            target=follow_job, args=(client, "lm-1", console), kwargs={"may_ask": True}, daemon=True
        )
        following.start()
        until(lambda: wanted in printed.getvalue(), wanted, SEEN_S)
        world.controller.cancel_jobs(["lm-1"])
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


def test_a_file_has_a_plain_line_with_the_time_that_is_left(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(follow, "PLAIN_EVERY_S", 0.0)
    text = shown(world, "left", is_terminal=False)
    assert f"lm-1: {LEFT} left · step 25/100" in text
    assert "\x1b" not in text
    assert "━" not in text


def turn_until_it_asks(world: World) -> None:
    """Play the world until lm-1 is submitted, has run out of memory, and asks."""

    def asks() -> bool:
        world.controller.run_once(10.0)
        job = world.controller.find_job("lm-1")
        return job is not None and bool(job.asks)

    until(asks, "lm-1 asks", SEEN_S)


def test_a_rehearsal_ends_with_its_verdict_where_the_job_asks(
    idle_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    codes: list[int] = []
    spec = parse_job(ASKING, "job.yaml")

    def rehearse() -> None:
        codes.append(follow.run_to_end(spec, FAULT, idle_world.home, as_json=False))

    rehearsal = threading.Thread(target=rehearse, daemon=True)
    rehearsal.start()
    turn_until_it_asks(idle_world)
    rehearsal.join(SEEN_S)
    assert codes == [1]
    text = capsys.readouterr().out
    assert text.count("lm-1: did not recover: no plan of the same training is left") == 1
    assert "lm-1: cancelled: cancelled after attempt 1: device_oom" in text


def test_a_run_says_once_that_its_job_waits_for_an_answer_and_goes_on(idle_world: World) -> None:
    with closing(Client(idle_world.home)) as client:
        client.submit_job(
            parse_job(ASKING, "job.yaml").model_dump(mode="json"), dataclasses.asdict(FAULT)
        )
    turn_until_it_asks(idle_world)
    text = shown(
        idle_world,
        "lm-1: waits for your answer; Ctrl-C leaves the job in the queue",
        is_terminal=False,
    )
    assert text.count("waits for your answer") == 1
    assert "did not recover" not in text


def test_a_second_run_of_a_live_job_is_told_of_the_first(
    idle_world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    spec = parse_job(ASKING, "job.yaml")
    with closing(Client(idle_world.home)) as client:
        client.submit_job(spec.model_dump(mode="json"), dataclasses.asdict(FAULT))
    turn_until_it_asks(idle_world)
    second = threading.Thread(
        target=follow.run_to_end, args=(spec, FAULT, idle_world.home, False), daemon=True
    )
    second.start()

    def has_second() -> bool:
        idle_world.controller.run_once(10.0)
        return idle_world.controller.find_job("lm-2") is not None

    until(has_second, "lm-2 is submitted", SEEN_S)
    printed = capsys.readouterr().err
    assert "lm-1 is queued and has this name: what follows is one more job" in printed


def test_a_line_of_progress_that_says_nothing_new_is_not_printed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(follow, "PLAIN_EVERY_S", 0.0)
    printed = io.StringIO()
    console = Console(file=printed, width=100)
    with Progress(console=console, disable=True) as bar:
        task = bar.add_task("lm-1", total=None, said="")
        for step in (1, 1, 1, 2, 2, 1):
            job = {
                "id": "lm-1",
                "status": "running",
                "progress": {
                    "step": step,
                    "max_steps": 3,
                    "step_s": 2.0,
                    "peak_bytes": 2**20,
                    "left_s": None,
                    "loss": None,
                },
            }
            follow._update_bar_or_print_line(job, bar, task, console, 0.0)  # type: ignore[arg-type]
    steps = re.findall(r"step (\d)/3", printed.getvalue())
    assert steps == ["1", "2", "1"]
