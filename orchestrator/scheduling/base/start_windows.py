"""Start windows: the hours of the day in which a job may start."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from math import inf

from orchestrator.scheduling.base.migration import MOVE_GRACE_S, saves_on_request
from orchestrator.specs.clock import Window, format_local_time
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.pending import Facts

SPANS = 8  # that are looked at: those of a week and one more, as some are shorter than others


@dataclass(frozen=True, slots=True)
class StartHours:
    """The times at which an attempt of a job may start: its start window, and when it must have
    ended.

    `start_window: 22:00-08:00` leaves the devices to others by day. An attempt that can end before
    the window closes starts only where it does, and a plan that ends in time is preferred. A job
    longer than its window on every plan, or of unknown duration, starts within the window. It is
    saved two minutes before the window closes, and resumes at the next opening. A job that cannot
    be saved, or that has `stays`, runs on after the close. Restarts follow the same rule.
    """

    window: Window | None
    must_end: bool = False  # whether the attempt must also end within the window
    by_s: float = inf  # latest end
    needs_s: float = inf  # of a window that is left, at most: what is saved when it closes goes on

    def find_first_start_s(self, earliest_s: float, attempt_duration_s: float) -> float:
        """Return the first time, `earliest_s` or later, at which an attempt of this duration may
        start.

        Times are seconds since 1970; infinity means that it may never start.
        """
        start_s = self._find_first_open_s(earliest_s, attempt_duration_s)
        return start_s if start_s + attempt_duration_s <= self.by_s else inf

    def _find_first_open_s(self, earliest_s: float, attempt_duration_s: float) -> float:
        """Return the first time, `earliest_s` or later, at which the start window is open for an
        attempt of this duration.
        """
        if self.window is None:
            return earliest_s
        for _ in range(SPANS):
            opens_s, closes_s = self.window.find_first_opening(earliest_s)
            start_s = max(opens_s, earliest_s)
            if not self.must_end or start_s + min(attempt_duration_s, self.needs_s) <= closes_s:
                return start_s
            earliest_s = closes_s
        return inf


ALWAYS = StartHours(None)


def make_start_hours(
    spec: JobSpec,
    durations_s: Iterable[float],
    now_s: float,
    end_by_s: float = inf,
    least_left_s: float = inf,
) -> StartHours:
    """Return the times at which an attempt may start that takes one of `durations_s` and must end
    by `end_by_s`.

    A job that is saved when its window closes may start if at least `least_left_s` seconds of the
    window are left.
    """
    if spec.start_window is None:
        return ALWAYS if end_by_s == inf else StartHours(None, by_s=end_by_s)
    within = StartHours(spec.start_window, must_end=True)
    ends = spec.optimizer_steps is not None and any(
        within.find_first_start_s(now_s, length_s) < inf for length_s in durations_s
    )
    if not ends and leaves_at_close(spec):
        return StartHours(spec.start_window, must_end=True, by_s=end_by_s, needs_s=least_left_s)
    return StartHours(spec.start_window, must_end=ends, by_s=end_by_s)


def leaves_at_close(spec: JobSpec) -> bool:
    """Return whether the job is saved and stopped when its start window closes; it resumes when the
    window next opens.
    """
    return spec.start_window is not None and not spec.stays and saves_on_request(spec)


def compute_window_leave_at_s(spec: JobSpec, launched_s: float) -> float:
    """Return when a job launched at `launched_s` must leave its devices because its start window
    closes.

    The time is in seconds since 1970; infinity for a job that runs on.
    """
    if spec.start_window is None or not leaves_at_close(spec):
        return inf
    return spec.start_window.find_first_opening(launched_s)[1] - MOVE_GRACE_S


def find_next_window_opening_s(spec: JobSpec, after_s: float) -> float:
    """Return when the job's start window next opens after `after_s`, in seconds since 1970;
    infinity without a window.
    """
    if spec.start_window is None:
        return inf
    opens_s, closes_s = spec.start_window.find_first_opening(after_s)
    return opens_s if opens_s > after_s else spec.start_window.find_first_opening(closes_s)[0]


def may_start_at(spec: JobSpec, at_s: float) -> bool:
    """Return whether the job may start at this time: its start window is open, or it has none."""
    return spec.start_window is None or spec.start_window.find_first_opening(at_s)[0] <= at_s


def make_start_window_facts(spec: JobSpec, start_s: float) -> Facts:
    """Return the facts (start time, window) for the sentence that says why a job waits for its
    start window.
    """
    assert spec.start_window is not None, spec.name
    start = format_local_time(start_s, spec.start_window.zone)
    return (("start", start), ("window", str(spec.start_window)))
