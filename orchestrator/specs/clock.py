"""When is it ten at night? Times that clocks on the wall show, as seconds since the epoch."""

from __future__ import annotations

import re
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta
from functools import lru_cache
from itertools import pairwise
from zoneinfo import ZoneInfo

DAY_MIN = 24 * 60
DAYS = ("mon", "tue", "wed", "thu", "fri", "sat", "sun")
# How far the next opening may be: a window of one day a week can lie in the hour that a spring night leaves out, and no
# zone has changed its clocks on the same day of two weeks that follow each other.
LOOKED_AHEAD_DAYS = 16
ALLOWED_WINDOW = "22:00-08:00, with a zone and days if you like: 22:00-08:00 Europe/Berlin mon-fri"
_TIME = r"([01]?[0-9]|2[0-3]):([0-5][0-9])"
_SPAN = re.compile(rf"{_TIME}-(?:{_TIME}|24:00)")
_DAY_LIST = re.compile(r"[a-z]{3}(-[a-z]{3})?(,[a-z]{3}(-[a-z]{3})?)*")


@dataclass(frozen=True, slots=True, kw_only=True)
class Window:
    """Hours that come back each day, or on some days of the week: those on which they begin."""

    opens_min: int  # minutes since midnight
    closes_min: int  # at most DAY_MIN; not after `opens_min`: on the next day
    days: tuple[int, ...] = tuple(range(7))  # 0: Monday
    zone: str | None = None  # of the IANA database; None: nobody has said yet, and it counts as UTC

    def __str__(self) -> str:
        """As a job file says it."""
        zone = "" if self.zone is None else f" {self.zone}"
        days = "" if len(self.days) == len(DAYS) else " " + ",".join(DAYS[day] for day in self.days)
        return f"{_clock(self.opens_min)}-{_clock(self.closes_min)}{zone}{days}"

    def holds(self, at_s: float) -> bool:
        """Whether clocks in the zone show a time within it at this moment.

        Where they are put back, the hour that comes twice is in it both times or neither; the hour that is left out
        when they are put forward is nobody's.
        """
        local = datetime.fromtimestamp(at_s, _zone(self.zone))
        minute = local.hour * 60 + local.minute
        if self.closes_min > self.opens_min:
            return local.weekday() in self.days and self.opens_min <= minute < self.closes_min
        is_late, is_early = minute >= self.opens_min, minute < self.closes_min
        return (is_late and local.weekday() in self.days) or (is_early and (local.weekday() - 1) % 7 in self.days)

    def span(self, from_s: float) -> tuple[float, float]:
        """From when to when it is open next, or now: the first span that ends after `from_s`."""
        today = datetime.fromtimestamp(from_s, _zone(self.zone)).date()
        return next(one for one in _spans(self, today) if one[1] > from_s)


def parse_window(text: object) -> Window:
    """The window that `22:00-08:00 Europe/Berlin mon-fri` says, its parts in any order. Raises ValueError."""
    words = text.split() if isinstance(text, str) else []
    spans = [match for word in words if (match := _SPAN.fullmatch(word))]
    if len(spans) != 1:
        raise ValueError(f"expected hours such as {ALLOWED_WINDOW}")
    opens_min = int(spans[0][1]) * 60 + int(spans[0][2])
    closes_min = DAY_MIN if spans[0][3] is None else int(spans[0][3]) * 60 + int(spans[0][4])
    days: tuple[int, ...] | None = None
    zone: str | None = None
    for word in words:
        if word == spans[0][0]:
            continue
        if word[:3].lower() in DAYS and _DAY_LIST.fullmatch(word.lower()):
            if days is not None:
                raise ValueError(f"days are said twice: {word!r}; write mon-fri, or sat,sun")
            days = _days(word.lower())
        elif zone is not None:
            raise ValueError(f"expected one time zone, not {zone!r} and {word!r}")
        else:
            zone = known_zone(word)
    window = Window(opens_min=opens_min, closes_min=closes_min, zone=zone)
    if opens_min == closes_min or (days in (None, window.days) and closes_min - opens_min == DAY_MIN):
        raise ValueError(f"{spans[0][0]} is all day: leave `between` out, or say 00:00-24:00 and days")
    return window if days is None else Window(opens_min=opens_min, closes_min=closes_min, days=days, zone=zone)


def known_zone(name: str) -> str:
    """The name of a time zone. Raises ValueError where the IANA database of this machine does not have it."""
    try:
        ZoneInfo(name)
    except (KeyError, OSError, ValueError):
        raise ValueError(f"{name!r} is no time zone, nor days; zones are called Europe/Berlin or UTC") from None
    return name


def local_text(at_s: float, zone: str | None) -> str:
    """The moment for people: `Tue 22:00 Europe/Berlin`."""
    return f"{datetime.fromtimestamp(at_s, _zone(zone)):%a %H:%M} {zone or 'UTC'}"


def _days(word: str) -> tuple[int, ...]:
    found = set[int]()
    for part in word.split(","):
        names = part.split("-")
        wrong = [name for name in names if name not in DAYS]
        if wrong:
            raise ValueError(f"{wrong[0]!r} is no day; days are {', '.join(DAYS)}")
        first, last = DAYS.index(names[0]), DAYS.index(names[-1])
        found |= {day % 7 for day in range(first, last + 1 if last >= first else last + 8)}
    return tuple(sorted(found))


def _clock(minutes: int) -> str:
    return f"{minutes // 60:02}:{minutes % 60:02}"


def _zone(name: str | None) -> ZoneInfo:
    return ZoneInfo(name or "UTC")  # which remembers its zones


@lru_cache(maxsize=1024)
def _spans(window: Window, today: date) -> tuple[tuple[float, float], ...]:
    """When it is open, from about yesterday on, in order.

    Nothing changes but where clocks show its opening or closing time, or are put forward or back.
    """
    zone, first = _zone(window.zone), today - timedelta(days=8)  # as far back as an open window may have begun
    dates = [first + timedelta(days=day) for day in range(LOOKED_AHEAD_DAYS + 9)]
    bounds = {at_s for day in dates for at_s in _bounds(window, day, zone)}
    bounds |= {at_s for day, after in pairwise(dates) if (at_s := _change_s(day, after, zone)) is not None}
    spans: list[tuple[float, float]] = []
    for begin_s, end_s in pairwise(sorted(bounds)):
        if not window.holds(begin_s):
            continue
        if spans and spans[-1][1] == begin_s:
            spans[-1] = (spans[-1][0], end_s)
        else:
            spans.append((begin_s, end_s))
    return tuple(spans)


def _bounds(window: Window, day: date, zone: ZoneInfo) -> set[float]:
    """The moments at which clocks show the opening or the closing time; both, where they show it twice."""
    midnight = datetime(day.year, day.month, day.day)
    return {
        (midnight + timedelta(minutes=minutes)).replace(tzinfo=zone, fold=fold).timestamp()
        for minutes in (window.opens_min, window.closes_min)
        for fold in (0, 1)
    }


def _change_s(day: date, after: date, zone: ZoneInfo) -> float | None:
    """When clocks are put forward or back on this day; None: they are not."""
    low, high = (
        int(datetime(one.year, one.month, one.day, tzinfo=zone).timestamp()) for one in (day, after)
    )  # seconds: the IANA database knows no parts of them
    offset = _offset(low, zone)
    if _offset(high, zone) == offset:
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if _offset(middle, zone) == offset else (low, middle)
    return float(high)


def _offset(at_s: float, zone: ZoneInfo) -> timedelta:
    offset = datetime.fromtimestamp(at_s, UTC).astimezone(zone).utcoffset()
    assert offset is not None, zone
    return offset
