"""Laws of the queue: an index adds nothing to its state, reservations hold, no job starves, load is used."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.scheduling.reports.forecast import make_forecast
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass import quotas
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Action, Launch
from orchestrator.specs.attempt import Attempt, Evidence, RankEnd
from orchestrator.specs.cluster import Node
from orchestrator.specs.events import (
    CancelRequested,
    Event,
    Finished,
    NodesSeen,
    Released,
    Submitted,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State
from tests.examples import examples
from tests.scheduling.factories import node
from tests.scheduling.invariants import violations
from tests.scheduling.test_properties import UNSHRUNK, random_event
from tests.scheduling.transition import history
from tests.scheduling.world import MemoryJournal, backend_of, play, random_scenario

SUCCESS = Evidence(ranks=(RankEnd(rank=0, exit_code=0),))
LAUNCH_S = 30.0
SEEDS = st.integers(0, 2**32)


def script(seconds: dict[int, float], **fields: object) -> JobSpec:
    """A script that needs so many seconds of training on so many devices."""
    speeds = {str(count): f"{length_s / 10}s" for count, length_s in seconds.items()}
    spec = {
        "name": "job",
        "command": "python train.py",
        "global_batch_size": 8,
        "steps": 10,
        "speeds": speeds,
    }
    return JobSpec.model_validate(spec | fields)


def seen(*nodes: Node) -> NodesSeen:
    return NodesSeen(nodes=nodes, declared=nodes, at_s=0.0)


def submitted(number: int, spec: JobSpec, at_s: float = 1.0) -> Submitted:
    return Submitted(job_id=f"job-{number}", order=number, spec=spec, at_s=at_s)


def gone(number: int, at_s: float, attempt: int = 1) -> tuple[Event, ...]:
    """The job has ended well and its devices are free."""
    job_id = f"job-{number}"
    return (
        Finished(job_id=job_id, number=attempt, evidence=SUCCESS, at_s=at_s),
        Released(job_id=job_id, number=attempt, at_s=at_s),
    )


def played(*events: Event) -> tuple[State, dict[str, Attempt]]:
    """The state after all events, and every launch by job. No law may be broken on the way."""
    transitions = history(events)
    assert violations(transitions) == []
    launches = (action for t in transitions for action in t.actions if isinstance(action, Launch))
    return transitions[-1].after, {launch.job.id: launch.attempt for launch in launches}


@settings(UNSHRUNK, max_examples=examples(100, 20))
@given(SEEDS)
def test_an_index_says_what_its_state_says(seed: int) -> None:
    """Carried along or made anew for each event: the same states, actions and time to wake."""
    draw = random.Random(seed)
    scheduler = Scheduler(State())
    for _ in range(draw.randint(1, 60)):
        event = random_event(draw, scheduler.state, with_updates=seed % 2 == 0)
        anew = step(scheduler.state, event)
        actions = scheduler.step(event)
        assert (scheduler.state, actions) == anew
        assert scheduler.wake_at_s() == Scheduler(scheduler.state).wake_at_s()


@pytest.mark.parametrize("seed", [3, 4])
def test_an_index_says_what_its_state_says_in_a_whole_night(seed: int) -> None:
    """A move to a faster plan is decided between two passes, beside what the last one reserved."""
    scenario, journal = random_scenario(random.Random(seed)), MemoryJournal()
    play(scenario, journal, backend_of(scenario))
    scheduler = Scheduler(State())
    for event in journal.events:
        anew = step(scheduler.state, event)
        actions = scheduler.step(event)
        assert (scheduler.state, actions) == anew


@pytest.mark.parametrize("seed", range(10))
def test_what_is_promised_to_those_whom_nobody_could_pass_changes_no_start(seed: int) -> None:
    """Decided upon in order, every one of them, or only those ahead of somebody who could start: the same launches."""
    draw = random.Random(seed)
    state, _ = step(State(), seen(node("a", devices=4), node("b", devices=4)))
    for number in range(1, 40):
        now_s = 50.0 * number
        running = [job.order for job in state.jobs.values() if job.attempts]
        come = submitted(number, script({2 ** draw.randint(0, 3): draw.uniform(10, 1000)}), now_s)
        goes = gone(draw.choice(running), now_s) if running and draw.random() < 0.6 else ()
        for event in (come, *goes):
            in_order = launches_in(decided_in_order(state, event))
            state, actions = step(state, event)
            assert launches_in(actions) == in_order


def decided_in_order(state: State, event: Event) -> Sequence[Action]:
    """Return the decisions of `step` where no job is put off."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(quotas, "fits_no_idle_devices", lambda *_: False)
        return step(state, event)[1]


def launches_in(actions: Sequence[Action]) -> list[Launch]:
    return [action for action in actions if isinstance(action, Launch)]


def test_nothing_is_promised_while_no_node_is_there() -> None:
    """A cancelled job gets no promise either; waiting jobs are promised devices again when the node is back."""
    here = node(devices=1)
    nightly = script({1: 1000.0}, start_window="22:00-08:00 UTC")
    events = [
        seen(here),
        submitted(1, nightly, 43_200.0),  # at noon
        submitted(2, nightly, 43_201.0),
        NodesSeen(nodes=(), declared=(here,), at_s=43_202.0),
        CancelRequested(job_id="job-1", at_s=43_203.0),
        NodesSeen(nodes=(here,), declared=(here,), at_s=43_204.0),
    ]
    promised = [
        [reservation.job_id for reservation in played(*events[:count])[0].reservations]
        for count in (3, 4, 5, 6)
    ]
    assert promised == [["job-1", "job-2"], [], [], ["job-2"]]


def test_a_long_job_does_not_keep_the_short_ones_waiting_that_come_with_it() -> None:
    long, short = script({1: 5000.0}), script({1: 10.0})
    _, launches = played(
        seen(node(devices=1)),
        submitted(1, short),
        submitted(2, long),
        submitted(3, short),
        *gone(1, 50.0),
    )
    assert list(launches) == ["job-1", "job-3"]


def test_nobody_who_comes_after_a_job_was_due_goes_before_it() -> None:
    """However short: so many come that the device is never idle, and still the long job runs."""
    long, short = script({1: 1000.0}), script({1: 10.0})
    aging_limit_s = 1.0 + tuning.TUNING.aging_factor * (LAUNCH_S + 1000.0)
    events: list[Event] = [seen(node(devices=1)), submitted(1, short), submitted(2, long)]
    state = State()
    number, started = 2, []
    for event in events:
        state, actions = step(state, event)
        started += [action.job.id for action in actions if isinstance(action, Launch)]
    while "job-2" not in started:
        number += 1
        assert number < 1000, "starved"
        now_s = state.at_s + 40.0
        running = int(started[-1].split("-")[1])
        for event in (submitted(number, short, now_s), *gone(running, now_s)):
            state, actions = step(state, event)
            started += [action.job.id for action in actions if isinstance(action, Launch)]
    assert state.at_s <= aging_limit_s + 2 * 40.0


DUE_S = 1.0 + tuning.TUNING.aging_factor * (LAUNCH_S + 1000.0)


@pytest.mark.parametrize(
    ("waiting", "at_s", "first"),
    [
        pytest.param((1000.0, 1900.0), 50.0, "job-4", id="the larger, so that both end together"),
        pytest.param((300.0, 1000.0, 1900.0), 50.0, "job-3", id="a small one before both"),
        pytest.param(
            (1000.0, 2200.0), 50.0, "job-3", id="the smaller where it is less than half as large"
        ),
        pytest.param(
            (1000.0, 1900.0, *[1000.0] * 6),
            50.0,
            "job-3",
            id="the smaller where others will end later",
        ),
        pytest.param((1000.0, 1900.0), DUE_S, "job-3", id="who is due"),
    ],
)
def test_of_the_largest_that_wait_the_larger_goes_first_until_another_is_due(
    waiting: tuple[float, ...], at_s: float, first: str
) -> None:
    jobs = [script({1: seconds}) for seconds in (90_000.0, 10.0, *waiting)]
    come = [submitted(number, spec) for number, spec in enumerate(jobs, 1)]
    _, launches = played(seen(node(devices=2)), *come, *gone(2, at_s))
    assert list(launches) == ["job-1", "job-2", first]


def test_where_no_two_can_run_side_by_side_or_the_cluster_is_shared_the_smaller_goes_first() -> (
    None
):
    jobs = [script({1: seconds}, user="ada") for seconds in (90_000.0, 10.0, 1000.0, 1900.0)]
    first, *come = [submitted(number, spec) for number, spec in enumerate(jobs, 1)]
    _, launches = played(seen(node(devices=1)), *come, *gone(2, 50.0))
    assert list(launches) == ["job-2", "job-3"]
    here, policy = (node(devices=2),), PolicySpec(teams=[{"name": "all", "users": ["ada"]}])
    shared = NodesSeen(nodes=here, declared=here, policy=policy, at_s=0.0)
    _, launches = played(shared, first, *come, *gone(2, 50.0))
    assert list(launches) == ["job-1", "job-2", "job-3"]


def test_a_short_job_fills_the_gap_before_a_promise_and_a_longer_one_does_not() -> None:
    wide, gap, longer = script({2: 100.0}), script({1: 20.0}), script({1: 600.0})
    events = [
        seen(node(devices=2)),
        submitted(1, script({1: 100.0})),
        submitted(2, wide),
        submitted(3, longer),
    ]
    state, launches = played(*events)
    assert set(launches) == {"job-1"}
    (promise, *_) = state.reservations
    assert (promise.job_id, promise.start_s) == ("job-2", 1.0 + LAUNCH_S + 100.0)
    _, launches = played(*events, submitted(4, gap, 2.0))
    assert set(launches) == {"job-1", "job-4"}


def test_what_was_promised_to_a_cancelled_job_is_open_again() -> None:
    _, launches = played(
        seen(node(devices=2)),
        submitted(1, script({1: 1000.0})),
        submitted(2, script({2: 100.0})),
        submitted(3, script({1: 5000.0})),
        CancelRequested(job_id="job-2", at_s=5.0),
    )
    assert list(launches) == ["job-1", "job-3"]


@pytest.mark.parametrize(("others", "devices"), [(0, 4), (8, 1)])
def test_the_more_jobs_there_are_the_fewer_devices_each_takes(others: int, devices: int) -> None:
    """Four devices make it twice as fast: alone it takes them; where others wait for them it does not."""
    elastic = script({1: 1000.0, 2: 700.0, 4: 500.0})
    crowd = [submitted(2 + number, elastic, 2.0) for number in range(1, others + 1)]
    _, launches = played(
        seen(node(devices=4)),
        submitted(1, script({4: 10.0})),
        submitted(2, elastic),
        *crowd,
        *gone(1, 60.0),
    )
    assert launches["job-2"].plan.world_size == devices


def test_a_forecast_says_what_then_happens() -> None:
    """Every job starts when and as wide as forecast at its submission, if durations are exact and no job follows."""
    jobs = [script({2: 50.0}), script({2: 80.0}), script({1: 30.0}), script({1: 300.0})]
    events: list[Event] = [
        seen(node(devices=2)),
        *(submitted(i, spec, 0.0) for i, spec in enumerate(jobs, 1)),
    ]
    state, launches = played(*events)
    forecasts = make_forecast(state)
    assert set(forecasts) == {"job-1", "job-2", "job-3", "job-4"}
    for _ in range(len(jobs)):
        running = {
            j.id: j for j in state.jobs.values() if j.last is not None and j.last.ended_at_s is None
        }
        if not running:
            break
        first = min(running, key=lambda job_id: forecasts[job_id].end_s)
        for event in gone(int(first.split("-")[1]), forecasts[first].end_s):
            state, actions = step(state, event)
            launches |= {
                action.job.id: action.attempt for action in actions if isinstance(action, Launch)
            }
    assert {job_id: attempt.launched_at_s for job_id, attempt in launches.items()} == {
        job_id: expected.start_s for job_id, expected in forecasts.items()
    }


def test_without_a_price_the_first_job_would_take_everything(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    elastic = script({1: 1000.0, 4: 900.0})
    _, launches = played(seen(node(devices=4)), submitted(1, elastic), submitted(2, elastic))
    assert launches["job-1"].plan.world_size == 1
    monkeypatch.setattr(tuning, "TUNING", tuning.Tuning(price_alone=0.0))
    _, launches = played(seen(node(devices=4)), submitted(1, elastic), submitted(2, elastic))
    assert launches["job-1"].plan.world_size == 4


@pytest.mark.parametrize(("objective", "devices"), [("completion", 2), ("makespan", 1)])
def test_for_the_makespan_a_job_takes_the_devices_that_waste_least(
    objective: str, devices: int
) -> None:
    """Another job runs on two of the four devices."""
    here, half_as_long = (node(devices=4),), script({1: 1000.0, 2: 600.0})
    aiming = NodesSeen(nodes=here, declared=here, policy=PolicySpec(objective=objective), at_s=0.0)
    _, launches = played(aiming, submitted(1, script({2: 1000.0})), submitted(2, half_as_long))
    assert launches["job-2"].plan.world_size == devices


def test_a_running_service_takes_another_objective_at_once() -> None:
    """A desk that was carried along decides as one that is made anew."""
    here, narrow = (node(devices=4),), script({1: 1000.0, 2: 600.0})
    events: list[Event] = [seen(*here), submitted(1, script({2: 1000.0}))]
    events += [
        NodesSeen(nodes=here, declared=here, policy=PolicySpec(objective="makespan"), at_s=1.0)
    ]
    _, launches = played(*events, submitted(2, narrow))
    assert launches["job-2"].plan.world_size == 1


def test_a_gang_is_promised_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: promises that keep nobody out are seen by the law of reservations."""
    monkeypatch.setattr(AvailabilityProfile, "reserve", lambda *_, **__: None)
    events = [
        seen(node(devices=2)),
        submitted(1, script({1: 100.0})),
        submitted(2, script({2: 100.0})),
        submitted(3, script({1: 4000.0}), 2.0),
    ]
    assert any("holds devices until" in breach for breach in violations(history(events)))
