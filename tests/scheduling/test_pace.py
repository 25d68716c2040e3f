"""The observed pace of a running attempt counts before that of its family and the prediction."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.backends.attempts.progress import PACE_STEPS, Progress
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.scheduling.scheduling_pass.index import estimate_end_beyond_s
from orchestrator.scheduling.step import step
from orchestrator.specs.attempt import LEARNED_STEPS, Pace
from orchestrator.specs.events import PaceReported
from orchestrator.specs.run import AttemptFolder
from orchestrator.specs.state import State
from tests.scheduling.factories import node, script_spec
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted

JOB = script({2: 100.0})  # ten steps of ten seconds


def paced(steps_done: int, step_s: float, at_s: float, number: int = 1) -> PaceReported:
    pace = Pace(steps_done=steps_done, step_s=step_s, at_s=at_s)
    return PaceReported(job_id="job-1", number=number, pace=pace, at_s=at_s)


def end_s(state: State) -> float:
    job = state.jobs["job-1"]
    assert job.last is not None
    return make_index(state).estimate_end_s(job, job.last)


def test_the_end_of_what_runs_follows_its_own_steps() -> None:
    """Four steps in 80 seconds, not in 40: the other six take 120 more."""
    state, _ = played(seen(node(devices=2)), submitted(1, JOB, 0.0))
    assert end_s(state) == pytest.approx(LAUNCH_S + 100.0)
    state, _ = step(state, paced(4, 20.0, 80.0))
    assert end_s(state) == pytest.approx(200.0)
    assert make_forecast(state)["job-1"].end_s == pytest.approx(200.0)


def test_a_job_is_promised_devices_for_when_they_will_really_be_free() -> None:
    state, _ = played(
        seen(node(devices=2)), submitted(1, JOB, 0.0), paced(4, 20.0, 80.0), submitted(2, JOB, 81.0)
    )
    assert make_forecast(state)["job-2"].start_s == pytest.approx(200.0)


def test_late_and_repeated_paces_change_nothing() -> None:
    state, _ = played(seen(node(devices=2)), submitted(1, JOB, 0.0), paced(4, 20.0, 80.0))
    for event in (paced(4, 20.0, 80.0), paced(2, 5.0, 40.0), paced(4, 5.0, 90.0, number=2)):
        after, actions = step(state, event)
        assert (after.jobs["job-1"], actions) == (state.jobs["job-1"], ())
    ended, _ = played(seen(node(devices=2)), submitted(1, JOB, 0.0), gone(1, 50.0)[0])
    after, actions = step(ended, paced(4, 20.0, 80.0))
    assert (after.jobs["job-1"], actions) == (ended.jobs["job-1"], ())


def test_what_should_have_ended_is_expected_to_take_longer_and_longer() -> None:
    assert estimate_end_beyond_s(10.0, 100.0, 50.0) == 110.0
    assert estimate_end_beyond_s(10.0, 100.0, 110.0) == 135.0
    assert estimate_end_beyond_s(10.0, 100.0, 134.0) == 135.0
    assert estimate_end_beyond_s(10.0, 0.0, 1e9) > 1e9
    state, _ = played(seen(node(devices=2)), submitted(1, JOB, 0.0), submitted(2, JOB, 140.0))
    assert end_s(state) == pytest.approx((LAUNCH_S + 100.0) * 1.25)


def test_a_pace_is_told_once_it_differs(tmp_path: Path) -> None:
    """The pace is that of the slowest rank, without any rank's first steps."""
    folder = AttemptFolder(tmp_path)
    progress = Progress(script_spec(), folder, 2, (0, 1), tmp_path)

    def beat(rank: int, steps_done: int, step_s: float) -> None:
        fields = {"rank": rank, "step": steps_done, "steps_done": steps_done, "step_s": step_s}
        fields |= {"peak_bytes": 0, "phase": "training", "at_s": 1.0}
        folder.heartbeat(rank).parent.mkdir(exist_ok=True)
        folder.heartbeat(rank).write_text(json.dumps(fields))

    for steps_done, step_s, expected in (
        (2, 9.0, None),
        (PACE_STEPS, 1.05, None),
        (PACE_STEPS, 1.5, 1.5),
    ):
        beat(0, steps_done, 1.0)
        beat(1, steps_done, step_s)
        progress.find_hung_for_s(0.0, 0.0)
        pace = progress.find_changed_pace(1.0, 77.0)
        assert (pace and pace.step_s) == expected
    assert progress.find_changed_pace(1.5, 78.0) is None


def test_a_peak_is_told_once_after_enough_steps_and_never_beside_a_caught_error(
    tmp_path: Path,
) -> None:
    folder, learned = AttemptFolder(tmp_path), LEARNED_STEPS
    beat = {"rank": 0, "step_s": 5.0, "peak_bytes": 7, "phase": "forward", "at_s": 0.0}

    def peak_of(progress: Progress, steps: int) -> int | None:
        folder.heartbeat(0).write_text(json.dumps(beat | {"step": steps, "steps_done": steps}))
        progress.find_hung_for_s(0.0, 0.0)
        pace = progress.find_changed_pace(5.0, at_s=90.0)
        return None if pace is None else pace.peak_bytes

    progress = Progress(script_spec(), folder, 1, [0], tmp_path, includes_peak=True)
    assert [peak_of(progress, steps) for steps in (learned - 1, learned, learned + 1)] == [
        None,
        7,
        None,
    ]
    assert peak_of(Progress(script_spec(), folder, 1, [0], tmp_path), learned) is None
    folder.caught(0).write_text("{}")
    assert (
        peak_of(Progress(script_spec(), folder, 1, [0], tmp_path, includes_peak=True), learned)
        is None
    )
