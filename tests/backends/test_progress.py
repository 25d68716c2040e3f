"""Laws of the watchdog's counter: it reads a log once, as it grows, and knows where it began."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.attempts.progress import LogCounter, Progress
from orchestrator.backends.attempts.script_output import (
    find_newest_checkpoint,
    find_results,
    iterate_lost_state,
)
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.patterns import LinePattern
from orchestrator.specs.run import AttemptFolder, JobFolder, write_json

BEAT = Heartbeat(rank=0, step=0, steps_done=0, step_s=None, peak_bytes=0, phase="startup", at_s=1.0)


def script(**changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {"name": "j", "command": "./train.sh", "global_batch_size": 1, **changes}
    )


def test_a_counter_follows_a_growing_log_over_half_lines_and_progress_bars(tmp_path: Path) -> None:
    log, counter = tmp_path / "rank0.log", LogCounter(LinePattern(r"step (\d+)"))
    for text, counts in (
        (b"loading\nste", None),
        (b"p 7\nste", (7, 7)),
        (b"p 12", (7, 7)),
        (b"8\rstep 129\r", (7, 129)),
        (b"no news\n", (7, 129)),
    ):
        with log.open("ab") as file:
            file.write(text)
        counter.read_new_lines([log, tmp_path / "none"])
        assert counter.first_and_last_number == counts


def test_a_log_that_talks_without_counting_is_no_progress(tmp_path: Path) -> None:
    """LatentSync tells of every error that it swallows, for ever."""
    folder = AttemptFolder(tmp_path)
    spec = script(progress=r"Steps: (\d+)", hang_timeout="0s", startup_timeout="1h")
    progress = Progress(spec, folder, 1, (0,), tmp_path)
    folder.log(0).write_text("INFO - retry\n")
    assert progress.find_hung_for_s(0.0, 0.0) is None, "it may still be starting"
    folder.log(0).write_text("INFO - retry\nSteps: 1\n")
    assert progress.find_hung_for_s(0.0, 0.0) is None, "a step"
    folder.log(0).write_text("INFO - retry\nSteps: 1\n" + "INFO - retry\n" * 9)
    assert progress.find_hung_for_s(0.0, 0.0) is not None
    silent = Progress(script(hang_timeout="0s"), folder, 1, (0,), tmp_path)
    assert silent.find_hung_for_s(0.0, 0.0) is None
    folder.log(0).write_text("x" * 1000)
    assert silent.find_hung_for_s(0.0, 0.0) is None, (
        "without a counter, growth is all there is to see"
    )


def test_a_log_that_talks_beside_a_device_that_has_stopped_computing_is_no_progress(
    tmp_path: Path,
) -> None:
    folder = AttemptFolder(tmp_path)
    talking = Progress(script(hang_timeout="60s"), folder, 1, (0,), tmp_path)
    folder.log(0).write_text("INFO - retry\n")
    assert talking.find_hung_for_s(59.0, 0.0) is None
    folder.log(0).write_text("INFO - retry\n" * 2)
    assert talking.find_hung_for_s(61.0, 0.0) == 61.0
    counted = Progress(
        script(progress=r"step (\d+)", hang_timeout="60s"), folder, 1, (0,), tmp_path
    )
    folder.log(0).write_text("step 1\n")
    assert counted.find_hung_for_s(61.0, 0.0) is None, (
        "who counts may well leave the device to itself"
    )


@pytest.mark.parametrize("torch_version", [None, "", "2.13.0"])
def test_a_program_that_nobody_sees_train_is_at_work_while_it_takes_processor_time(
    torch_version: str | None, tmp_path: Path
) -> None:
    """A process may train where no guard reported torch. A guard that watches torch and sees no step is believed."""
    folder = AttemptFolder(tmp_path)
    if torch_version is not None:
        beat = Heartbeat(
            rank=0,
            step=0,
            steps_done=0,
            step_s=None,
            peak_bytes=0,
            phase="startup",
            at_s=1.0,
            torch_version=torch_version,
        )
        write_json(folder.heartbeat(0), beat)
    progress = Progress(script(startup_timeout="100s"), folder, 1, (0,), tmp_path)
    assert progress.find_hung_for_s(0.0, 0.0) is None
    for cpu_s, works in ((20.0, True), (24.0, False), (30.0, True), (30.5, False)):
        progress._since_s -= 200.0  # since when nothing else moved
        hangs = progress.find_hung_for_s(0.0, cpu_s) is not None
        assert hangs is (bool(torch_version) or not works), cpu_s
    assert (progress.find_hung_for_s(150.0, 99.0) is not None) or torch_version, (
        "a device that computed stands idle"
    )


def test_a_backward_pass_is_progress_unless_memory_runs_out_again_and_again(tmp_path: Path) -> None:
    """A first step of many micro-batches, or an optimizer that is not PyTorch's."""
    folder = AttemptFolder(tmp_path)
    progress = Progress(script(startup_timeout="100s"), folder, 1, (0,), tmp_path)
    rows = (
        (1, False, False),
        (2, False, False),
        (2, False, True),
        (3, True, False),
        (4, True, True),
    )
    for backwards, caught, hangs in rows:
        write_json(folder.heartbeat(0), replace(BEAT, torch_version="2.13.0", backwards=backwards))
        if caught:
            folder.caught(0).touch()
        assert (progress.find_hung_for_s(0.0, 0.0) is not None) is hangs
        progress._since_s -= 200.0


def test_a_checkpoint_that_grows_is_progress_and_an_old_one_is_not(tmp_path: Path) -> None:
    """The step after it may be long in coming: a large checkpoint takes longer than many steps."""
    spec = script(progress=r"step (\d+)", hang_timeout="60s", startup_timeout="60s")
    checkpoint = tmp_path / "checkpoint-4"
    checkpoint.mkdir()
    shard = checkpoint / "shard-1.pt"
    shard.touch()
    for age_s, hangs in ((10, False), (300, True)):
        progress = Progress(spec, AttemptFolder(tmp_path / "attempt"), 1, (0,), tmp_path)
        assert progress.find_hung_for_s(0.0, 0.0) is None
        progress._since_s -= 200.0  # since when nothing moved
        for path in (checkpoint, shard):
            os.utime(path, (time.time() - age_s, time.time() - age_s))
        assert (progress.find_hung_for_s(0.0, 0.0) is not None) is hangs


def test_success_is_what_this_attempt_left(tmp_path: Path) -> None:
    spec = script(
        success={"artifacts": ["assets/*.pth"], "log": "^Saved: yes"}, workdir=str(tmp_path)
    )
    jobs = JobFolder(tmp_path / "home", "j")
    folder = jobs.attempt(2)
    folder.path.mkdir(parents=True)
    (tmp_path / "assets").mkdir()
    (tmp_path / "assets/old.pth").write_text("x")
    folder.guard.write_text("{}")
    os.utime(tmp_path / "assets/old.pth", ns=(1, 1))
    assert find_results(spec, jobs, folder, (0,)).absent == (
        "assets/*.pth",
        "a log line '^Saved: yes'",
    )
    (tmp_path / "assets/new.pth").write_text("x")
    folder.log(0).write_text("it is not\nSaved: yes\n")
    assert find_results(spec, jobs, folder, (0,)).absent == ()


def test_the_newest_checkpoint_is_by_step_not_by_time_and_whole(tmp_path: Path) -> None:
    spec = script(resume={"checkpoints": "run-*/c-*.pt", "step": r"c-(\d+)\.pt"})
    for name in ("run-b/c-9.pt", "run-a/c-10.pt", "run-b/c-8.pt"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("x")
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "run-a/c-10.pt")
    (tmp_path / "run-a/c-10.pt").write_text("")
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "run-b/c-9.pt")


def test_a_restart_tells_what_it_lost() -> None:
    spec = script(resume={"step": r"c-(\d+)", "loses": ["the optimizer"]})
    assert list(iterate_lost_state(spec, None, (1, 5), 9)) == [], (
        "it was not to go on from anything"
    )
    assert list(iterate_lost_state(spec, "c-7", (8, 9), 7)) == ["the optimizer"]
    began_again = "everything: it began at 1 again, after 7, with c-7 there"
    assert list(iterate_lost_state(spec, "c-7", (1, 9), None)) == ["the optimizer", began_again]
