"""A job with a `start_window` starts within it, and ends within it if it can; no other job waits for it."""

from __future__ import annotations

from datetime import datetime
from zoneinfo import ZoneInfo

import pytest

from orchestrator.scheduling.base.migration import MOVE_GRACE_S
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.base.start_windows import StartHours
from orchestrator.scheduling.reports.forecast import make_forecast, make_quick_forecast
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.scheduling.scheduling_pass import decide
from orchestrator.scheduling.step import step
from orchestrator.specs.events import Event, TimerFired
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import elastic, left, moving
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted

HOUR_S = 3600.0
NIGHT = "22:00-08:00 UTC"  # the world begins at midnight


def nightly(seconds: dict[int, float], between: str = NIGHT) -> JobSpec:
    return script(seconds, start_window=between)


def folded(*events: Event) -> State:
    state = State()
    for event in events:
        state, _ = step(state, event)
    return state


def test_a_job_waits_for_its_hours_and_is_woken_when_they_begin() -> None:
    events = [seen(node()), submitted(1, nightly({1: HOUR_S}), 12 * HOUR_S)]
    state, launches = played(*events)
    assert launches == {}
    assert Scheduler(state).wake_at_s() == 22 * HOUR_S
    assert (
        describe_status(state.jobs["job-1"])
        == "waits for Thu 22:00 UTC (start_window 22:00-08:00 UTC)"
    )
    _, launches = played(*events, TimerFired(at_s=22 * HOUR_S))
    assert launches["job-1"].launched_at_s == 22 * HOUR_S


def test_any_event_after_the_opening_starts_it() -> None:
    """The timer may be late: whatever is heard first will do."""
    _, launches = played(
        seen(node(devices=2)),
        submitted(1, nightly({1: HOUR_S}), 12 * HOUR_S),
        submitted(2, script({1: 10 * HOUR_S}), 13 * HOUR_S),
        gone(2, 22.5 * HOUR_S)[0],
    )
    assert launches["job-1"].launched_at_s == 22.5 * HOUR_S


@pytest.mark.parametrize(
    ("hours", "begins"), [(1.0, 6.0), (3.0, 22.0), (12.0, 6.0)], ids=["fits", "next", "longer"]
)
def test_it_ends_within_its_hours_if_it_can(hours: float, begins: float) -> None:
    """A job of one hour fits at six, one of three waits, and one of twelve, which no night holds, starts."""
    _, launches = played(
        seen(node()),
        submitted(1, nightly({1: hours * HOUR_S}), 6 * HOUR_S),
        TimerFired(at_s=22 * HOUR_S),
    )
    assert launches["job-1"].launched_at_s == begins * HOUR_S


def test_what_is_promised_for_tonight_leaves_the_day_to_others() -> None:
    """Both devices belong to the night from 22:00 on: a gang of 3 h comes before it, one of 5.5 h after it.

    Without a promise the one from 14:00 on would wait for the night to end, and short jobs would keep it waiting.
    """
    events = [
        seen(node(devices=2)),
        submitted(1, script({2: HOUR_S}, start_window=NIGHT, priority=1), 12 * HOUR_S),
        submitted(2, script({1: 2 * HOUR_S - LAUNCH_S}), 12 * HOUR_S),
        submitted(3, script({2: 3 * HOUR_S}), 12.1 * HOUR_S),
        submitted(4, script({2: 5.5 * HOUR_S}), 12.2 * HOUR_S),
        submitted(5, script({1: 8 * HOUR_S}), 12.3 * HOUR_S),
    ]
    state, launches = played(*events)
    assert [*launches] == ["job-2"]
    begins_s = {reservation.job_id: reservation.start_s for reservation in state.reservations}
    assert begins_s["job-1"] == 22 * HOUR_S
    assert begins_s["job-3"] == 14 * HOUR_S
    forecasts = make_quick_forecast(state)
    assert [forecasts[f"job-{number}"].start_s / HOUR_S for number in (2, 3, 1)] == [
        12.0,
        14.0,
        22.0,
    ]
    assert forecasts["job-4"].start_s == 23 * HOUR_S + LAUNCH_S
    assert [*played(*events, *gone(2, 14 * HOUR_S))[1]] == ["job-2", "job-3"]


def test_two_nights_on_the_same_devices_follow_one_another() -> None:
    """The second is short enough to end before the first begins, and may not start before that all the same."""
    state, _ = played(
        seen(node(devices=1)),
        submitted(1, nightly({1: 2 * HOUR_S}), 12 * HOUR_S),
        submitted(2, nightly({1: HOUR_S}), 12 * HOUR_S),
    )
    spans = sorted((reservation.start_s, reservation.end_s) for reservation in state.reservations)
    assert spans[0][0] == 22 * HOUR_S
    assert spans[1][0] == spans[0][1]


def test_it_starts_now_where_no_later_hours_are_as_long_as_these_were() -> None:
    """Two days are one span where clocks skip the closed hour, and its rest holds no 24.5 h."""
    at_s = datetime(2026, 3, 8, 1, 1, tzinfo=ZoneInfo("America/New_York")).timestamp()
    spec = nightly({1: 24.5 * HOUR_S}, "02:50-02:10 America/New_York")
    _, launches = played(seen(node()), submitted(1, spec, at_s), TimerFired(at_s=at_s + 2 * HOUR_S))
    assert launches["job-1"].launched_at_s == at_s


def test_more_devices_are_taken_where_only_they_end_it_in_time() -> None:
    both = {1: 10.2 * HOUR_S, 2: 10.1 * HOUR_S, 4: 9.5 * HOUR_S}
    _, launches = played(seen(node(devices=4)), submitted(1, nightly(both), 22 * HOUR_S))
    assert launches["job-1"].plan.world_size == 4
    _, launches = played(seen(node(devices=4)), submitted(1, script(both), 22 * HOUR_S))
    assert launches["job-1"].plan.world_size == 1


def test_what_is_of_unknown_length_starts_within_its_hours_only() -> None:
    spec = JobSpec(name="job", command="python train.py", global_batch_size=8, start_window=NIGHT)
    _, launches = played(seen(node()), submitted(1, spec, 9 * HOUR_S), TimerFired(at_s=31 * HOUR_S))
    assert launches["job-1"].launched_at_s == 31 * HOUR_S


def test_by_day_the_devices_are_for_others_who_leave_them_by_the_evening() -> None:
    state, launches = played(
        seen(node(devices=1)),
        submitted(1, nightly({1: HOUR_S}), 12 * HOUR_S),
        submitted(2, script({1: 5 * HOUR_S}), 13 * HOUR_S),
    )
    assert set(launches) == {"job-2"}
    assert [(reservation.job_id, reservation.start_s) for reservation in state.reservations] == [
        ("job-1", 22 * HOUR_S)
    ]
    _, launches = played(
        seen(node(devices=1)),
        submitted(1, nightly({1: HOUR_S}), 12 * HOUR_S),
        submitted(2, script({1: 12 * HOUR_S}), 13 * HOUR_S),
    )
    assert launches == {}


def test_a_forecast_knows_the_hours() -> None:
    state = folded(seen(node(devices=1)), submitted(1, nightly({1: HOUR_S}), 12 * HOUR_S))
    expected = make_forecast(state)["job-1"]
    assert (expected.start_s, expected.end_s) == (22 * HOUR_S, 22 * HOUR_S + LAUNCH_S + HOUR_S)


@pytest.mark.parametrize(
    ("day", "late"), [("2026-03-28", 9), ("2026-10-24", 11)], ids=["forward", "back"]
)
def test_clocks_that_change_make_a_night_shorter_or_longer(day: str, late: int) -> None:
    """A job of ten and a half hours starts only in the long night; one of just under nine in both."""
    ten = (
        datetime.fromisoformat(f"{day}T22:00").replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    )
    begun = []
    for hours in (8.9, 9.9, 10.9):
        spec = nightly({1: hours * HOUR_S}, "22:00-08:00 Europe/Berlin")
        _, launches = played(seen(node()), submitted(1, spec, ten + 1))
        begun.append("job-1" in launches)
    assert begun == ([True, False, True] if late == 9 else [True, True, True])


@pytest.mark.parametrize(
    ("fields", "leaves"),
    [({}, True), ({"stays": True}, False), ({"resume": {}}, False)],
    ids=["saved", "stays", "not saved"],
)
def test_who_can_be_saved_leaves_when_its_hours_end_and_goes_on_at_the_next(
    fields: dict[str, object], leaves: bool
) -> None:
    """Twelve hours of work, which came at 07:00 of 22:00-08:00."""
    closes_s = 32 * HOUR_S - MOVE_GRACE_S
    spec = elastic({1: 12 * HOUR_S}, start_window=NIGHT, **fields)
    came = [seen(node(devices=1)), submitted(1, spec, 31 * HOUR_S)]
    state, launches = played(*came, TimerFired(at_s=closes_s))
    assert launches["job-1"].launched_at_s == 31 * HOUR_S
    assert (moving(state) == {"job-1": "stopped at the end of its hours (22"}) is leaves
    if leaves:
        _, launches = played(
            *came,
            TimerFired(at_s=closes_s),
            *left(1, closes_s + 10.0, at_step=1),
            TimerFired(at_s=46 * HOUR_S),
        )
        assert launches["job-1"].number == 2
        assert launches["job-1"].launched_at_s == 46 * HOUR_S


def test_hours_that_end_are_awaited() -> None:
    spec = elastic({1: 12 * HOUR_S}, start_window=NIGHT)
    scheduler = Scheduler(State())
    for event in (seen(node(devices=1)), submitted(1, spec, 31 * HOUR_S)):
        scheduler.step(event)
    assert scheduler.wake_at_s() == 32 * HOUR_S - MOVE_GRACE_S


def test_an_end_that_is_not_foreseen_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    """A planted bug: a job that starts within its hours may end at any time."""
    monkeypatch.setattr(
        decide, "make_start_hours", lambda spec, *_, **__: StartHours(spec.start_window)
    )
    with pytest.raises(AssertionError, match="could end within it"):
        test_it_ends_within_its_hours_if_it_can(3.0, 22.0)
