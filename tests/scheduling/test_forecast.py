"""The range of a forecast holds as often as it says, and it narrows and widens with what was measured."""

from __future__ import annotations

import random
from collections.abc import Callable
from math import exp, inf
from statistics import fmean

import pytest

from benchmarks.measured import Arrival, MeasuredBackend, misjudge
from benchmarks.scheduler import cluster_of
from benchmarks.trace_files import job_spec_from_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.forecast import (
    SUPPOSED_SPREAD,
    QueueSimulation,
    _compute_remaining_duration_quantile_s,
    add_measured_paces,
    estimate_duration_log_spread,
    make_forecast,
    make_quick_forecast,
)
from orchestrator.service.commands.simulate import FOREVER_S, NullJournal, list_outcomes
from orchestrator.service.server.controller import Controller
from orchestrator.specs.attempt import Evidence, Pace, RankEnd
from orchestrator.specs.events import (
    Event,
    Finished,
    NodesSeen,
    PaceReported,
    Released,
    Started,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Resume
from tests.scheduling import factories
from tests.scheduling.factories import job, observation
from tests.scheduling.test_queue import gone, node, played, script, seen, submitted


def rigid(draw: random.Random) -> JobSpec:
    return job_spec_from_trace(
        "job", {draw.choice((1, 2, 4)): 1.0}, draw.randint(500, 5000)
    ).model_copy(update={"resume": Resume()})


def movable(draw: random.Random) -> JobSpec:
    return job_spec_from_trace("job", {1: 1.0, 2: 0.55, 4: 0.3}, draw.randint(500, 5000))


@pytest.mark.long
@pytest.mark.parametrize("kind", [rigid, pytest.param(movable, marks=pytest.mark.long)])
def test_eight_of_ten_jobs_start_and_end_within_what_was_told_of_them(
    kind: Callable[[random.Random], JobSpec],
) -> None:
    """A full queue on eight devices, lengths as wrong as is supposed where nothing was measured."""
    starts, ends = list[bool](), list[bool]()
    for seed in range(16):
        draw = random.Random(seed)
        jobs = tuple(Arrival(at_s=0.0, spec=kind(draw)) for _ in range(24))
        trace, cluster = (
            misjudge(Trace(name="night", arrivals=jobs), SUPPOSED_SPREAD, seed),
            cluster_of(1, 10.0),
        )
        backend = MeasuredBackend(trace.arrivals, cluster)
        controller = Controller(NullJournal(), backend, backend.current_time_s)
        controller.run_once(0.0)
        controller.submit_all([(arrival.spec, None) for arrival in trace.arrivals])
        expected, begun_s = make_forecast(controller.state), backend.current_time_s()
        ids = list(controller.state.jobs)
        while controller.state.jobs:
            controller.run_once(FOREVER_S)
        for job_id, outcome in zip(
            ids, list_outcomes(trace, cluster, backend.processes), strict=True
        ):
            prediction = expected[job_id]
            assert prediction.start_range_s is not None
            assert prediction.end_range_s is not None
            assert outcome.started_at_s is not None
            assert outcome.ended_at_s is not None
            ends.append(
                prediction.end_range_s[0] <= outcome.ended_at_s <= prediction.end_range_s[1]
            )
            if prediction.start_s > begun_s:
                starts.append(
                    prediction.start_range_s[0]
                    <= outcome.started_at_s
                    <= prediction.start_range_s[1]
                )
    assert len(starts) > 200
    assert 0.7 <= fmean(starts) <= 0.9
    assert 0.7 <= fmean(ends) <= 0.9


def test_who_is_placed_ends_when_decisions_to_come_would_have_it_end() -> None:
    """Jobs are placed one after the other, as `orc submit` does: gangs and priorities, some bound to their hours.

    Exceptions are jobs that leave room for shorter ones, or that are passed by jobs which end in time.
    """
    off_h = []
    for seed in range(20):
        draw = random.Random(seed)
        queue: list[Event] = [seen(node("a", devices=4), node("b", devices=4))]
        for number in range(1, 20):
            hours = draw.choice(
                (
                    {},
                    {},
                    {},
                    {"start_window": "22:00-08:00 UTC"},
                    {"start_window": "12:00-14:00 UTC"},
                )
            )
            spec = script(
                {2 ** draw.randint(0, 3): draw.uniform(600, 14400)},
                priority=draw.randint(0, 1),
                **hours,
            )
            queue.append(submitted(number, spec, 8 * 3600.0 + 600 * number))
        state, _ = played(*queue)
        forecasts = make_quick_forecast(state)
        plays = QueueSimulation(
            state, make_index(state), dict.fromkeys(state.jobs, 0.0), 0
        ).run_until_ended([*forecasts])
        off_h += [
            abs(forecasts[job_id].end_s - play.end_s) / 3600 for job_id, play in plays.items()
        ]
    assert len(off_h) > 300
    assert fmean(error_h < 1.0 for error_h in off_h) > 0.9, sorted(off_h)[-50:]


def test_what_comes_after_others_is_expected_when_the_last_of_them_has_ended() -> None:
    """The forecast follows the chain; an independent job is expected beside it."""
    chain = [
        script({1: 100.0}),
        script({1: 300.0}),
        script({1: 50.0}, depends_on=["job-1", "job-2"]),
    ]
    chain += [script({2: 80.0}, depends_on=["job-3"]), script({1: 20.0})]
    events: list[Event] = [
        seen(node(devices=4)),
        *(submitted(i, spec, 0.0) for i, spec in enumerate(chain, 1)),
    ]
    state, _ = played(*events)
    forecasts = make_forecast(state)
    assert [forecasts[f"job-{number}"].start_s for number in range(1, 6)] == [
        0.0,
        0.0,
        330.0,
        410.0,
        0.0,
    ]
    for number, at_s in ((5, 50.0), (1, 130.0), (2, 330.0), (3, 410.0)):
        events += gone(number, at_s)
    _, launches = played(*events)
    assert {job_id: attempt.launched_at_s for job_id, attempt in launches.items()} == {
        job_id: expected.start_s for job_id, expected in forecasts.items()
    }
    later_range = forecasts["job-4"].start_range_s
    assert later_range is not None
    assert later_range[0] < 410.0 < later_range[1]


def test_who_pauses_after_a_failure_is_expected_when_the_pause_is_over() -> None:
    lost = Evidence(ranks=(RankEnd(rank=0, exit_code=None),), nodes_lost=("node",))
    failed = [
        Finished(job_id="job-1", number=1, evidence=lost, at_s=50.0),
        Released(job_id="job-1", number=1, at_s=50.0),
    ]
    state, _ = played(seen(node(devices=1)), submitted(1, script({1: 100.0})), *failed)
    job = state.jobs["job-1"]
    assert job.not_before_s > 50.0
    assert make_forecast(state)["job-1"].start_s == job.not_before_s


def test_of_what_runs_where_nobody_looks_no_end_is_expected() -> None:
    """The node of one job is gone; another job waits for the night."""
    night = script({1: 20.0}, start_window="22:00-06:00")
    state, _ = played(
        seen(node("a", devices=1), node("b", devices=1)),
        submitted(1, script({1: 100.0})),
        NodesSeen(nodes=(node("b", devices=1),), at_s=10.0),
        submitted(2, night, 11.0),
    )
    forecasts = make_forecast(state)
    assert state.jobs["job-1"].attempts[0].placement[0].node == "a"
    assert (forecasts["job-1"].end_s, forecasts["job-1"].end_range_s) == (inf, None)
    assert forecasts["job-2"].start_range_s == (state.at_s, state.at_s)


def test_measured_steps_of_the_family_set_the_range() -> None:
    asking = job()
    exact = [observation(number=number, step_ratio=1.5) for number in range(1, 33)]
    wild = [observation(number=number, step_ratio=exp((-1) ** number)) for number in range(1, 33)]
    assert estimate_duration_log_spread((), asking) == pytest.approx(SUPPOSED_SPREAD)
    assert estimate_duration_log_spread(exact, asking) < 0.4 * SUPPOSED_SPREAD
    assert estimate_duration_log_spread(wild, asking) > 4 * SUPPOSED_SPREAD


def test_on_virtual_devices_no_end_is_told_before_a_step_was_measured_and_then_for_twins_too() -> (
    None
):
    virtual = factories.node(devices=1)
    spec = factories.decoder_spec(gpus=1)
    queue: list[Event] = [seen(virtual), submitted(1, spec), submitted(2, spec)]
    state, _ = played(*queue)
    expected = make_forecast(state)
    assert [expected[job_id].knows_end for job_id in ("job-1", "job-2")] == [False, False]
    assert not expected["job-2"].knows_start
    queue.append(Started(job_id="job-1", number=1, at_s=2.0))
    pace = Pace(steps_done=20, step_s=1.0, at_s=25.0)
    queue.append(PaceReported(job_id="job-1", number=1, pace=pace, at_s=25.0))
    state, _ = played(*queue)
    paced = make_forecast(add_measured_paces(state))
    assert [paced[job_id].knows_end for job_id in ("job-1", "job-2")] == [True, True]
    steps = spec.optimizer_steps
    assert steps is not None
    assert paced["job-1"].end_s == pytest.approx(25.0 + (steps - 20) * 1.0)
    assert paced["job-2"].end_s - paced["job-2"].start_s > 0.9 * steps


def test_what_runs_is_expected_to_end_later_than_now() -> None:
    """The job took twice its expected time and goes on."""
    state, _ = played(seen(node(devices=2)), submitted(1, script({2: 100.0})))
    late, _ = played(
        seen(node(devices=2)),
        submitted(1, script({2: 100.0})),
        Started(job_id="job-1", number=1, at_s=250.0),
    )
    early_range, late_range = (
        make_forecast(snapshot)["job-1"].end_range_s for snapshot in (state, late)
    )
    assert early_range is not None
    assert late_range is not None
    assert early_range[0] < make_forecast(state)["job-1"].end_s < early_range[1]
    assert late_range[0] >= 250.0


def test_the_shares_of_a_length_are_those_of_its_distribution() -> None:
    assert _compute_remaining_duration_quantile_s(100.0, 0.0, 0.2, 0.5) == pytest.approx(100.0)
    assert _compute_remaining_duration_quantile_s(100.0, 0.0, 0.2, 0.1) == pytest.approx(
        100.0 * exp(-1.2816 * 0.2), rel=1e-3
    )
    assert _compute_remaining_duration_quantile_s(100.0, 110.0, 0.2, 0.001) == pytest.approx(
        110.0, rel=1e-2
    )
