"""Times of day (start windows, deadlines) with their time zone, converted to seconds since 1970."""

from __future__ import annotations

import re
from datetime import UTC, date, datetime, time, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

from orchestrator.specs.frozen import frozen

DAY_MIN = 24 * 60
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
# How far the next opening may be. A window of one day a week can lie in the hour that a spring
# night leaves out. No
# zone has changed its clocks on the same weekday of two consecutive weeks.
LOOKED_AHEAD_DAYS = 16
ALLOWED_WINDOW = "22:00-08:00, with a zone and days if you like: 22:00-08:00 Europe/Berlin mon-fri"
ALLOWED_DEADLINE = "08:00, 08:00 Europe/Berlin, 2026-11-23T08:00 or 2026-11-23T08:00+01:00"
_TIME = r"([01]?[0-9]|2[0-3]):([0-5][0-9])"
_SPAN = re.compile(rf"{_TIME}-(?:{_TIME}|24:00)")
_DAY_LIST = re.compile(r"[a-z]{3}(-[a-z]{3})?(,[a-z]{3}(-[a-z]{3})?)*")


@frozen
class Window:
    """Daily hours, such as 22:00-08:00, optionally of some weekdays: `days` are those on which they
    begin.
    """

    opens_min: int  # minutes since midnight
    closes_min: int  # at most DAY_MIN; not after `opens_min`: on the next day
    days: tuple[int, ...] = tuple(range(7))  # 0: Monday
    zone: str | None = None  # of the IANA database; None: not given yet, counts as UTC

    def __str__(self) -> str:
        """Return the hours as a job file has them."""
        zone = "" if self.zone is None else f" {self.zone}"
        days = "" if len(self.days) == len(DAYS) else " " + ",".join(DAYS[day] for day in self.days)
        return f"{_format_clock(self.opens_min)}-{_format_clock(self.closes_min)}{zone}{days}"

    def is_open_at(self, at_s: float) -> bool:
        """Return whether the local time at `at_s` (seconds since 1970) is within these hours.

        Where clocks go back, both runs of the repeated hour count alike. The hour that is skipped
        when they go forward belongs to no window.
        """
        local = datetime.fromtimestamp(at_s, _load_zone(self.zone))
        minute = local.hour * 60 + local.minute
        if self.closes_min > self.opens_min:
            return local.weekday() in self.days and self.opens_min <= minute < self.closes_min
        is_late = minute >= self.opens_min
        is_early = minute < self.closes_min
        return (is_late and local.weekday() in self.days) or (
            is_early and (local.weekday() - 1) % 7 in self.days
        )

    def shift_to_start_at(self, at_s: float) -> Window:
        """Return the same hours in seconds since `at_s` (a time since 1970) instead of since 1970,
        to the minute.

        Later clock changes are ignored.
        """
        local = datetime.fromtimestamp(at_s, _load_zone(self.zone))
        epoch = datetime.fromtimestamp(0.0, UTC)
        days, opens_min = divmod(self.opens_min - local.hour * 60 - local.minute, DAY_MIN)
        later = days + epoch.weekday() - local.weekday()
        return Window(
            opens_min=opens_min,
            closes_min=(opens_min + self.closes_min - self.opens_min) % DAY_MIN or DAY_MIN,
            days=tuple(sorted((day + later) % len(DAYS) for day in self.days)),
        )

    def find_first_opening(self, from_s: float) -> tuple[float, float]:
        """Return (begin, end) of the first opening that ends after `from_s`, all in seconds since
        1970.
        """
        today = datetime.fromtimestamp(from_s, _load_zone(self.zone)).date()
        return next(span for span in _list_spans(self, today) if span[1] > from_s)


@frozen
class Deadline:
    """A time of day by which a job should be done: on `day`, or at its next occurrence where `day` is None."""

    time_s: float  # since midnight
    day: str | None = None  # 2026-11-23
    zone: str | None = None  # of the IANA database; None: not given yet, counts as UTC

    def __str__(self) -> str:
        """Return the deadline as a job file has it."""
        day = "" if self.day is None else f"{self.day}T"
        zone = "" if self.zone is None else f" {self.zone}"
        moment = datetime.min + timedelta(seconds=self.time_s)
        return f"{day}{moment.time().isoformat() if moment.second or moment.microsecond else f'{moment:%H:%M}'}{zone}"

    def compute_due_s(self, after_s: float) -> float:
        """Return when a job submitted at `after_s` is due, in seconds since 1970. With a `day`, it may be past."""
        zone = _load_zone(self.zone)
        today = datetime.fromtimestamp(after_s, zone).date()
        days = (
            [today, today + timedelta(days=1)]
            if self.day is None
            else [date.fromisoformat(self.day)]
        )
        midnights = (datetime(day.year, day.month, day.day) for day in days)
        moments_s = [
            (midnight + timedelta(seconds=self.time_s)).replace(tzinfo=zone).timestamp()
            for midnight in midnights
        ]
        return next((at_s for at_s in moments_s if at_s > after_s), moments_s[-1])


def parse_deadline(text: object) -> Deadline:
    """Return the deadline in text: `08:00`, `08:00 Europe/Berlin` or an ISO date and time. Raises ValueError."""
    parts = text.split() if isinstance(text, str) else []
    zone = check_time_zone(parts[1]) if len(parts) == 2 else None
    try:
        if not 1 <= len(parts) <= 2:
            raise ValueError
        if "T" not in parts[0]:
            return Deadline(
                time_s=_compute_seconds_since_midnight(time.fromisoformat(parts[0])), zone=zone
            )
        moment = datetime.fromisoformat(parts[0])
        if moment.tzinfo is not None:
            if zone is not None:
                raise ValueError
            moment = moment.astimezone(UTC)
            zone = "UTC"
    except ValueError:
        raise ValueError(f"expected a deadline such as {ALLOWED_DEADLINE}") from None
    return Deadline(
        time_s=_compute_seconds_since_midnight(moment.time()),
        day=moment.date().isoformat(),
        zone=zone,
    )


def make_deadline(at_s: float) -> Deadline:
    """Return the deadline at this time (seconds since 1970), to the microsecond."""
    return parse_deadline(datetime.fromtimestamp(at_s, UTC).isoformat())


def _compute_seconds_since_midnight(moment: time) -> float:
    if moment.tzinfo is not None:
        raise ValueError
    return moment.hour * 3600 + moment.minute * 60 + moment.second + moment.microsecond / 1e6


def parse_window(text: object) -> Window:
    """Return the hours in a text such as `22:00-08:00 Europe/Berlin mon-fri`, in any order. Raises
    ValueError.
    """
    parts = text.split() if isinstance(text, str) else []
    spans = [match for word in parts if (match := _SPAN.fullmatch(word))]
    if len(spans) != 1:
        raise ValueError(f"expected hours such as {ALLOWED_WINDOW}")
    opens_min = int(spans[0][1]) * 60 + int(spans[0][2])
    closes_min = DAY_MIN if spans[0][3] is None else int(spans[0][3]) * 60 + int(spans[0][4])
    days: tuple[int, ...] | None = None
    zone: str | None = None
    for word in parts:
        if word == spans[0][0]:
            continue
        if word[:3].lower() in DAYS and _DAY_LIST.fullmatch(word.lower()):
            if days is not None:
                raise ValueError(f"days are said twice: {word!r}; write mon-fri, or sat,sun")
            days = _parse_days(word.lower())
        elif zone is not None:
            raise ValueError(f"expected one time zone, not {zone!r} and {word!r}")
        else:
            zone = check_time_zone(word)
    window = Window(opens_min=opens_min, closes_min=closes_min, zone=zone)
    if opens_min == closes_min or (
        days in (None, window.days) and closes_min - opens_min == DAY_MIN
    ):
        raise ValueError(
            f"{spans[0][0]} is all day: leave `start_window` out, or say 00:00-24:00 and days"
        )
    return (
        window
        if days is None
        else Window(opens_min=opens_min, closes_min=closes_min, days=days, zone=zone)
    )


def check_time_zone(name: str) -> str:
    """Return the time zone's name unchanged. Raises ValueError if this machine's IANA database
    lacks it.
    """
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise ValueError(
            f"{name!r} is no time zone, nor days; zones are called Europe/Berlin or UTC"
        ) from None
    return name


def format_local_time(at_s: float, zone: str | None) -> str:
    """Return a time (seconds since 1970) as text for people: `Tue 22:00 Europe/Berlin`."""
    return f"{datetime.fromtimestamp(at_s, _load_zone(zone)):%a %H:%M} {zone or 'UTC'}"


def _parse_days(days_text: str) -> tuple[int, ...]:
    days = set[int]()
    for part in days_text.split(","):
        names = part.split("-")
        wrong = [name for name in names if name not in DAYS]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no day; days are {', '.join(DAYS)}")
        first = DAYS.index(names[0])
        last = DAYS.index(names[-1])
        days |= {day % 7 for day in range(first, last + 1 if last >= first else last + 8)}
    return tuple(sorted(days))


def _format_clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _load_zone(name: str | None) -> ZoneInfo:
    return ZoneInfo(name or "UTC")  # which remembers its zones


@lru_cache(maxsize=1024)
def _list_spans(window: Window, today: date) -> tuple[tuple[float, float], ...]:
    """Return (opening, closing) times of the hours, in seconds since 1970, from before yesterday to
    LOOKED_AHEAD_DAYS on.

    The hours open and close only where clocks show one of their two times, or are put forward or
    back.
    """
    # as far back as an open window may have begun
    zone = _load_zone(window.zone)
    first = today - timedelta(days=8)
    dates = [first + timedelta(days=day) for day in range(LOOKED_AHEAD_DAYS + 9)]
    bounds = set()
    for day in dates:
        bounds.update(_list_bounds(window, day, zone))
    bounds |= {
        at_s
        for day, after in pairwise(dates)
        if (at_s := _find_clock_change_s(day, after, zone)) is not None
    }
    spans: list[tuple[float, float]] = []
    for begin_s, end_s in pairwise(sorted(bounds)):
        if not window.is_open_at(begin_s):
            continue
        if spans and spans[-1][1] == begin_s:
            spans[-1] = (spans[-1][0], end_s)
        else:
            spans.append((begin_s, end_s))
    return tuple(spans)


def _list_bounds(window: Window, day: date, zone: ZoneInfo) -> set[float]:
    """Return the times at which clocks show the opening or the closing time on this day; twice
    where an hour is repeated.
    """
    midnight = datetime(day.year, day.month, day.day)
    return {
        (midnight + timedelta(minutes=minutes)).replace(tzinfo=zone, fold=fold).timestamp()
        for minutes in (window.opens_min, window.closes_min)
        for fold in (0, 1)
    }


def _find_clock_change_s(day: date, next_day: date, zone: ZoneInfo) -> float | None:
    """Return when clocks are put forward or back on this day, in seconds since 1970; None on a day
    without a change.
    """
    low, high = (
        int(datetime(bound.year, bound.month, bound.day, tzinfo=zone).timestamp())
        for bound in (day, next_day)
    )  # seconds: the IANA database knows no parts of them
    offset = _get_utc_offset(low, zone)
    if _get_utc_offset(high, zone) == offset:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _get_utc_offset(middle, zone) == offset else (low, middle)
    return float(high)


def _get_utc_offset(at_s: float, zone: ZoneInfo) -> timedelta:
    offset = datetime.fromtimestamp(at_s, UTC).astimezone(zone).utcoffset()
    assert offset is not None, zone
    return offset
