"""Traces: the jobs that `orc simulate` submits, with their times."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import field

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace


@frozen
class Arrival:
    """A job of a trace, with the time of its submission."""

    at_s: float
    spec: JobSpec
    deadline_s: float | None = None  # on the same clock


@frozen
class Trace:
    """Job arrivals in order of time; the first is at 0 s."""

    name: str
    arrivals: tuple[Arrival, ...]
    trials: Mapping[str, tuple[Arrival, ...]] = field(
        default_factory=dict
    )  # trials submitted later, by sweep id
    # the first arrival, in seconds since 1970; None: the trace has no date
    begins_s: float | None = None


def make_trace(name: str, arrivals: list[Arrival]) -> Trace:
    """Return the trace of these arrivals, sorted by time and shifted so that the first is at 0
    s.
    """
    if not arrivals:
        raise SpecError("the trace has no job", source=name)
    arrivals.sort(key=lambda arrival: arrival.at_s)
    begin_s = arrivals[0].at_s
    return Trace(
        name=name,
        arrivals=tuple(
            replace(
                arrival,
                at_s=arrival.at_s - begin_s,
                deadline_s=None if arrival.deadline_s is None else arrival.deadline_s - begin_s,
            )
            for arrival in arrivals
        ),
    )
