"""Lengths that nobody told: learned from what ended here, else not known on any surface."""

from __future__ import annotations

from math import inf

import pytest

from orchestrator.scheduling import transitions
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.forecast import make_forecast, make_quick_forecast
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.server.forecasts import list_expected_jobs
from orchestrator.specs.attempt import Evidence, Heartbeat, RankEnd
from orchestrator.specs.events import Finished, Released, Started
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_drain import maintained, why
from tests.scheduling.test_elastic import elastic
from tests.scheduling.test_probe import unknown
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted
from tests.scheduling.world import (
    CALM,
    CLUSTERS,
    MemoryJournal,
    Scenario,
    backend_of,
    play,
    stranger,
)
from tests.scheduling.world import script as world_script

HOUR_S = 3600.0


def untold(name: str = "untold", **fields: object) -> JobSpec:
    """A script of which nobody said how long a step takes, and that is not probed."""
    return unknown(name, **{"steps": 200, "probe": "never"} | fields)


def trained(number: int, seconds: float, step_s: float, from_s: float = 1.0) -> tuple[object, ...]:
    """The job started after a launch, trained so long in steps of so many seconds, and succeeded."""
    job_id, end_s = f"job-{number}", from_s + LAUNCH_S + seconds
    beat = Heartbeat(
        rank=0,
        step=200,
        steps_done=200,
        step_s=step_s,
        peak_bytes=2**20,
        phase="optimizer",
        at_s=end_s,
    )
    evidence = Evidence(ranks=(RankEnd(rank=0, exit_code=0),), heartbeats=(beat,))
    return (
        Started(job_id=job_id, number=1, at_s=from_s + LAUNCH_S),
        Finished(job_id=job_id, number=1, evidence=evidence, at_s=end_s),
        Released(job_id=job_id, number=1, at_s=end_s),
    )


def closing(after_s: float) -> object:
    return seen(maintained("a", (after_s, after_s + HOUR_S)))


@pytest.mark.parametrize("probe", ["auto", "never"])
@pytest.mark.parametrize("steps", [200, None])
def test_a_script_starts_at_once_ten_hours_before_a_maintenance(
    probe: str, steps: int | None
) -> None:
    _, launches = played(closing(10 * HOUR_S), submitted(1, untold(probe=probe, steps=steps)))
    assert "job-1" in launches


@pytest.mark.parametrize(("hours", "starts"), [(1.5, False), (2.5, True)])
def test_with_nothing_learned_a_maintenance_must_be_two_hours_away(
    hours: float, starts: bool
) -> None:
    state, launches = played(closing(hours * HOUR_S), submitted(1, untold(steps=None)))
    assert ("job-1" in launches) is starts
    assert starts or "`time_limit` bounds it" in why(state, "job-1")


def test_a_time_limit_bounds_a_length_that_nobody_told() -> None:
    _, launches = played(closing(1.5 * HOUR_S), submitted(1, untold(time_limit="1h")))
    assert "job-1" in launches


@pytest.mark.parametrize(("trained_s", "starts"), [(60.0, True), (4 * HOUR_S, False)])
def test_what_ended_here_says_whether_a_job_ends_before_a_maintenance(
    trained_s: float, starts: bool
) -> None:
    """Nine of ten are to end in time: of a minute after one of a minute, not of hours after one of hours."""
    opens = closing(8 * HOUR_S)
    first = (submitted(1, script({1: trained_s})), *trained(1, trained_s, trained_s / 10))
    state, launches = played(opens, *first, submitted(2, untold("other", steps=None), 6 * HOUR_S))
    assert ("job-2" in launches) is starts
    assert starts or "`time_limit` bounds it" in why(state, "job-2")


def test_a_script_takes_as_long_for_a_step_as_its_last_run() -> None:
    """An hour for 200 steps: 400 take two."""
    first = (submitted(1, untold()), *trained(1, HOUR_S, 18.0))
    state, launches = played(
        seen(node(devices=1)), *first, submitted(2, untold(steps=400), 2 * HOUR_S)
    )
    start_s = launches["job-2"].launched_at_s
    assert make_forecast(state)["job-2"].end_s - start_s == pytest.approx(2 * HOUR_S + LAUNCH_S)


def test_an_end_that_nothing_tells_is_not_known_on_any_surface() -> None:
    """Nor when a job starts that waits for it; what needs no such end is told."""
    state, _ = played(
        seen(node("a", devices=1), node("b", devices=1)),
        submitted(1, untold(steps=None)),
        submitted(2, script({1: 100.0})),
        submitted(3, script({2: 100.0}, gpus=2), 2.0),
    )
    assert "job-1" in {job.id for job in state.jobs.values() if job.status is JobStatus.RUNNING}
    for ranged in (True, False):
        rows = {row["id"]: row for row in list_expected_jobs(state, 2.0, with_ranges=ranged)}
        assert (rows["job-1"]["end_s"], rows["job-3"]["start_s"]) == (None, None)
        assert (rows["job-1"]["end_range_s"], rows["job-3"]["end_s"]) == (None, None)
        assert rows["job-2"]["end_s"] == pytest.approx(1.0 + LAUNCH_S + 100.0)


def test_seven_jobs_of_minutes_are_forecast_to_end_in_minutes() -> None:
    """Seven own scripts of 20 to 200 steps on two devices: from the first end on, within three times the truth."""
    steps = (20, 40, 60, 80, 120, 160, 200)
    scripts = [stranger(world_script(f"own-{count}", steps=count)) for count in steps]
    ratios = list[float]()
    for seed in (0, 4, 5):
        scenario = Scenario(
            cluster=CLUSTERS[1],
            jobs=tuple((0.0, spec, None) for spec in scripts),
            cancels=(),
            hazards=CALM,
            repeat_chance=0.0,
            seed=seed,
        )
        journal, backend = MemoryJournal(), backend_of(scenario)
        play(scenario, journal, backend)
        true_s = max(process.ended_at_s or inf for process in backend.processes.values())
        scheduler = Scheduler(State())
        for event in journal.events:
            scheduler.step(event)
            state = scheduler.state
            if isinstance(event, Finished) and len(state.jobs) == len(steps):
                expected = make_forecast(state)
                if all(row.knows_end for row in expected.values()) and len(expected) == len(steps):
                    ratios.append(max(row.end_s for row in expected.values()) / true_s)
    assert len(ratios) >= 3
    assert all(1 / 3 < ratio < 3 for ratio in ratios), ratios


def test_an_index_made_anew_has_learned_the_same_lengths() -> None:
    """Carried along or made anew from the state: the same options and the same expected ends."""
    events = (
        seen(node(devices=2)),
        submitted(1, untold()),
        submitted(2, untold("other")),
        *trained(1, HOUR_S, 18.0),
        submitted(3, untold("third"), 5000.0),
    )
    scheduler = Scheduler(State())
    for event in events:
        scheduler.step(event)
    assert scheduler.state.runs
    assert (
        scheduler.list_expected_end_s_by_job_id()
        == Scheduler(scheduler.state).list_expected_end_s_by_job_id()
    )
    assert make_quick_forecast(scheduler.state)["job-2"].knows_end


def test_a_length_that_is_never_learned_is_noticed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(transitions, "add_run_length", lambda runs, *_: runs)
    with pytest.raises(AssertionError):
        test_a_script_takes_as_long_for_a_step_as_its_last_run()


# ------------------------------------------------------------------------------ urgent parents


def family(priority: str = "high") -> tuple[object, ...]:
    """A device is taken; a middle job, a parent and its child wait."""
    child = script({1: 60.0}, priority=priority, depends_on=["job-3"])
    return (
        seen(node(devices=1)),
        submitted(1, script({1: 100.0})),
        submitted(2, script({1: 50.0}, priority=5), 2.0),
        submitted(3, script({1: 500.0}), 3.0),
        submitted(4, child, 4.0),
    )


def test_the_parent_of_an_urgent_job_is_urgent() -> None:
    """Without the child a job of middle priority is before it."""
    _, launches = played(*family(), *gone(1, 200.0))
    assert "job-3" in launches
    assert "job-2" not in launches
    _, launches = played(*family("normal"), *gone(1, 200.0))
    assert "job-2" in launches


def test_so_is_the_parent_of_the_parent() -> None:
    grandchild = script({1: 60.0}, priority="high", depends_on=["job-4"])
    state, launches = played(*family("normal"), submitted(5, grandchild, 5.0), *gone(1, 200.0))
    assert "job-3" in launches
    assert make_index(state).get_priority(state.jobs["job-3"]) == 100


def test_a_running_parent_of_an_urgent_job_is_not_stopped_for_less() -> None:
    """A job of middle priority would stop it, were it not for the child."""
    for priority, stopped in (("normal", True), ("high", False)):
        child = script({1: 60.0}, priority=priority, depends_on=["job-1"])
        state, _ = played(
            seen(node(devices=1)),
            submitted(1, elastic({1: 36000.0})),
            submitted(2, child, 2.0),
            submitted(3, script({1: 600.0}, priority=5), 1000.0),
        )
        assert bool(state.jobs["job-1"].attempts[-1].moved_for) is stopped
