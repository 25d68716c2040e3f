"""The live queue as it is beside another: on another cluster, in another order, or with more jobs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.service.commands.simulate import Outcome, Report, from_queue, simulate
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.state import State

JOBS_MAX = 200  # that are played: a page waits for both plays
DEVICES_MAX = 1024  # of the other cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """A job, now and then; `now` is None for one that is not submitted."""

    name: str
    now: Outcome | None
    then: Outcome


@dataclass(frozen=True, slots=True, kw_only=True)
class WhatIf:
    """Both plays, in seconds from now, and the jobs of unknown length, which neither has."""

    now: Report
    then: Report
    late_now: int
    late_then: int
    fates: tuple[Fate, ...]
    unknown: tuple[str, ...]


def what_if(state: State, present: ClusterSpec, other: ClusterSpec, more: Sequence[JobSpec]) -> WhatIf:
    """The queue played on both clusters, on the other one with `more` jobs.

    Raises SpecError where nothing can be played, and beyond JOBS_MAX and DEVICES_MAX.
    """
    trace, unknown = from_queue(state)
    count = len(trace.arrivals) + len(more)
    if count > JOBS_MAX:
        hint = "play it with `orc simulate --queue now`"
        raise SpecError("too many jobs for a page", path="queue", got=count, allowed=f"{JOBS_MAX}", hint=hint)
    devices = sum(node.devices * node.count for node in other.nodes)
    if devices > DEVICES_MAX:
        raise SpecError("too many devices for a page", path="nodes", got=devices, allowed=f"{DEVICES_MAX}")
    now = simulate(trace, present, seed=0)
    then = simulate(_with(trace, more), other, seed=0)
    known = [job.id for job in sorted(state.jobs.values(), key=lambda one: one.order) if not job.status.ended]
    names = [*(job_id for job_id in known if job_id not in unknown), *(spec.name for spec in more)]
    befores: tuple[Outcome | None, ...] = (*now.outcomes, *([None] * len(more)))
    return WhatIf(
        now=now.report,
        then=then.report,
        late_now=_late(now.outcomes),
        late_then=_late(then.outcomes),
        fates=tuple(
            Fate(name=name, now=before, then=after)
            for name, before, after in zip(names, befores, then.outcomes, strict=True)
        ),
        unknown=unknown,
    )


def _with(trace: Trace, more: Sequence[JobSpec]) -> Trace:
    """The trace with jobs that are submitted now as well. Raises SpecError for one of unknown length."""
    for spec in more:
        if spec.optimizer_steps is None:
            raise SpecError("the length of the job is unknown", source=spec.name, path="steps", hint="say `steps`")
    at_s = trace.arrivals[-1].at_s
    return replace(trace, arrivals=(*trace.arrivals, *(Arrival(at_s=at_s, spec=spec) for spec in more)))


def _late(outcomes: Sequence[Outcome]) -> int:
    return sum(one.deadline_s is not None and not one.in_time for one in outcomes)
