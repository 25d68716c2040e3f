"""Laws of hours that come back each day: what the clocks of a zone show decides, also when they are changed."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from zoneinfo import ZoneInfo

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.specs.clock import (
    DAYS,
    Deadline,
    Window,
    format_local_time,
    make_deadline,
    parse_deadline,
    parse_window,
)
from tests.examples import examples

ZONES = (
    "UTC",
    "Europe/Berlin",
    "America/New_York",
    "Australia/Lord_Howe",
    "Africa/Cairo",
    "Asia/Kathmandu",
)
# clocks forward, back, and by half an hour; at midnight; and a day on which nothing happens
CHANGES = [
    datetime(2026, 3, 29, 1, tzinfo=UTC),
    datetime(2026, 10, 25, 1, tzinfo=UTC),
    datetime(2026, 3, 8, 7, tzinfo=UTC),
    datetime(2026, 11, 1, 6, tzinfo=UTC),
    datetime(2026, 4, 4, 15, tzinfo=UTC),
    datetime(2026, 4, 23, 22, tzinfo=UTC),
    datetime(2026, 7, 1, 12, tzinfo=UTC),
]
MINUTES = st.integers(0, 1439)
MOMENTS = st.builds(
    lambda change, offset_s: change.timestamp() + offset_s,
    st.sampled_from(CHANGES),
    st.integers(-3 * 86400, 3 * 86400),
)
WINDOWS = st.builds(
    lambda opens, length, days, zone: Window(
        opens_min=opens,
        closes_min=(opens + length) % 1440 or 1440,
        days=tuple(sorted(days)),
        zone=zone,
    ),
    MINUTES,
    st.integers(1, 1439),
    st.sets(st.integers(0, 6), min_size=1),
    st.sampled_from(ZONES),
)
QUICK = settings(max_examples=examples(300))


def shows(window: Window, at_s: float) -> bool:
    """Return whether a wall clock shows a time of the window, counted from the day on which it began."""
    local = datetime.fromtimestamp(at_s, ZoneInfo(window.zone or "UTC"))
    shown = local.hour * 60 + local.minute
    length = (window.closes_min - window.opens_min) % 1440 or 1440
    return any(
        (local - timedelta(days=ago)).weekday() in window.days
        and 0 <= shown + ago * 1440 - window.opens_min < length
        for ago in (0, 1)
    )


@QUICK
@given(WINDOWS, MOMENTS)
def test_it_is_open_exactly_while_clocks_show_its_hours(window: Window, at_s: float) -> None:
    opens_s, closes_s = window.find_first_opening(at_s)
    assert (opens_s <= at_s < closes_s) == shows(window, at_s) == window.is_open_at(at_s)
    assert shows(window, opens_s)
    assert shows(window, closes_s - 1)
    assert not shows(window, opens_s - 1) or opens_s <= at_s - 7 * 86400
    assert not shows(window, closes_s)


@QUICK
@given(WINDOWS, MOMENTS)
def test_nothing_of_it_is_missed_between_now_and_the_next_opening(
    window: Window, at_s: float
) -> None:
    opens_s, _ = window.find_first_opening(at_s)
    step_s = max(60.0, (opens_s - at_s) / 200)
    moments = (at_s + number * step_s for number in range(200))
    assert not any(shows(window, moment) for moment in moments if moment < opens_s)


@QUICK
@given(WINDOWS, st.integers(-3, 3), st.integers(0, 2 * 86400))
def test_hours_counted_from_a_moment_are_the_same_hours(
    window: Window, days: int, later_s: int
) -> None:
    """The law needs clocks that do not change: in July those of Cairo, New York and Lord Howe do not."""
    begin_s = CHANGES[-1].timestamp() + days * 86400
    assert window.shift_to_start_at(begin_s).is_open_at(later_s) == window.is_open_at(
        begin_s + later_s
    )


@QUICK
@given(WINDOWS)
def test_a_window_survives_the_round_trip_through_its_text(window: Window) -> None:
    assert parse_window(str(window)) == window


@pytest.mark.parametrize(
    ("day", "hours"),
    [("2026-03-28", 9), ("2026-10-24", 11), ("2026-07-01", 10)],
    ids=["forward", "back", "summer"],
)
def test_a_night_is_as_long_as_it_is(day: str, hours: int) -> None:
    """A night from ten to eight has nine hours when clocks go forward, and eleven when they go back."""
    evening = (
        datetime.fromisoformat(f"{day}T20:00").replace(tzinfo=ZoneInfo("Europe/Berlin")).timestamp()
    )
    opens_s, closes_s = parse_window("22:00-08:00 Europe/Berlin").find_first_opening(evening)
    assert (opens_s, closes_s) == (evening + 2 * 3600, evening + (2 + hours) * 3600)


def test_days_are_those_on_which_it_begins() -> None:
    window = parse_window("fri 22:00-08:00 Europe/Berlin")
    monday = datetime(2026, 6, 1, 12, tzinfo=UTC).timestamp()
    opens_s, closes_s = window.find_first_opening(monday)
    assert format_local_time(opens_s, window.zone) == "Fri 22:00 Europe/Berlin"
    assert format_local_time(closes_s, window.zone) == "Sat 08:00 Europe/Berlin"


def test_a_weekend_is_one_span() -> None:
    opens_s, closes_s = parse_window("00:00-24:00 sat,sun UTC").find_first_opening(0.0)
    assert (opens_s, closes_s) == (2 * 86400.0, 4 * 86400.0)  # 1970 began on a Thursday


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("22:00", "22:00-08:00"),
        (22, "22:00-08:00"),
        ("25:00-08:00", "22:00-08:00"),
        ("22:00-08:00 Europe/Belin", "'Europe/Belin' is no time zone"),
        ("22:00-08:00 mon-fry", "'fry' is no day; days are mon, tue"),
        ("22:00-08:00 mon tue", "days are said twice"),
        ("22:00-08:00 UTC Europe/Berlin", "one time zone"),
        ("22:00-22:00", "is all day"),
        ("00:00-24:00 mon-sun", "is all day"),
    ],
)
def test_a_mistake_is_one_clear_error(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_window(text)


@QUICK
@given(MOMENTS, st.integers(0, 86399), st.sampled_from(ZONES))
def test_a_deadline_is_the_next_time_that_clocks_show_it(
    at_s: float, time_s: int, zone: str
) -> None:
    deadline = Deadline(time_s=time_s, zone=zone)
    due_s = deadline.compute_due_s(at_s)
    assert at_s < due_s <= at_s + 25 * 3600
    local = datetime.fromtimestamp(due_s, ZoneInfo(zone))
    shown_s = local.hour * 3600 + local.minute * 60 + local.second
    assert shown_s == time_s or abs(shown_s - time_s) <= 3600  # an hour that clocks leave out
    assert parse_deadline(str(deadline)) == deadline


@given(st.integers(0, 2_000_000_000_000_000))
def test_a_deadline_survives_the_round_trip_through_its_text(microseconds: int) -> None:
    deadline = make_deadline(microseconds / 1e6)
    assert parse_deadline(str(deadline)) == deadline
    assert deadline.compute_due_s(0.0) == pytest.approx(microseconds / 1e6, abs=1e-6)


@pytest.mark.parametrize(
    ("text", "due"),
    [
        ("08:00 Europe/Berlin", "2026-07-02T06:00+00:00"),
        ("23:30 Europe/Berlin", "2026-07-01T21:30+00:00"),
        ("2026-11-23T08:00 Europe/Berlin", "2026-11-23T07:00+00:00"),
        ("2026-11-23T08:00+02:00", "2026-11-23T06:00+00:00"),
        ("2026-11-23T08:00", "2026-11-23T08:00+00:00"),
    ],
)
def test_a_deadline_has_several_forms(text: str, due: str) -> None:
    noon = datetime(2026, 7, 1, 12, tzinfo=UTC).timestamp()
    assert parse_deadline(text).compute_due_s(noon) == datetime.fromisoformat(due).timestamp()


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (8, "2026-11-23T08:00"),
        ("tomorrow", "2026-11-23T08:00"),
        ("25:00", "2026-11-23T08:00"),
        ("08:00 Berlin", "'Berlin' is no time zone"),
        ("2026-11-23T08:00+01:00 Europe/Berlin", "expected a deadline"),
    ],
)
def test_a_mistaken_deadline_is_one_clear_error(text: object, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_deadline(text)


def test_days_may_go_round_the_week() -> None:
    assert [DAYS[day] for day in parse_window("22:00-08:00 fri-mon").days] == [
        "mon",
        "fri",
        "sat",
        "sun",
    ]
