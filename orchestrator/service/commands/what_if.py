"""The live queue as it is beside another: on another cluster, in another order, or with more jobs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.service.commands.simulate import Outcome, Report, from_now, from_queue, simulate
from orchestrator.service.server.trials import trials_of
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

JOBS_MAX = 200  # that are played: a page waits for both plays
DEVICES_MAX = 1024  # of the other cluster


@dataclass(frozen=True, slots=True, kw_only=True)
class Fate:
    """A job, now and then; `now` is None for one of another queue."""

    name: str
    is_submitted: bool
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


def what_if(
    state: State,
    present: ClusterSpec,
    other: ClusterSpec,
    more: Sequence[JobSpec],
    to_come: Mapping[str, Sequence[JobSpec]],
    home: Path,
) -> WhatIf:
    """The queue played on both clusters, on the other one with `more` jobs. `to_come` are trials of live sweeps.

    Raises SpecError where nothing can be played, and beyond JOBS_MAX and DEVICES_MAX.
    """
    trace, unknown = from_queue(state, to_come)
    sweeps = sum(spec.trial.sweep.trials - 1 for spec in more if spec.trial is not None)
    count = len(trace.arrivals) + len(more) + sweeps + sum(map(len, trace.trials.values()))
    if count > JOBS_MAX:
        hint = "play it with `orc simulate --queue now`"
        raise SpecError("too many jobs for a page", path="queue", got=count, allowed=f"{JOBS_MAX}", hint=hint)
    devices = sum(node.devices * node.count for node in other.nodes)
    if devices > DEVICES_MAX:
        raise SpecError("too many devices for a page", path="nodes", got=devices, allowed=f"{DEVICES_MAX}")
    now = simulate(trace, present, seed=0)
    then = simulate(_with(trace, more, state.at_s, home), other, seed=0)
    live = [job.id for job in sorted(state.jobs.values(), key=lambda one: one.order) if not job.status.ended]
    known = [job_id for job_id in live if job_id not in unknown]
    later = {one.trial: one for one in now.outcomes[len(known) :]}  # trials of sweeps
    befores = chain(now.outcomes[: len(known)], (later.get(one.trial) for one in then.outcomes[len(known) :]))
    return WhatIf(
        now=now.report,
        then=then.report,
        late_now=_late(now.outcomes),
        late_then=_late(then.outcomes),
        fates=tuple(
            Fate(
                name=known[index] if index < len(known) else _name(after),
                is_submitted=index < len(known),
                now=before,
                then=after,
            )
            for index, (before, after) in enumerate(zip(befores, then.outcomes, strict=True))
        ),
        unknown=unknown,
    )


def _with(trace: Trace, more: Sequence[JobSpec], now_s: float, home: Path) -> Trace:
    """The trace with jobs that are submitted now as well, sweeps with all their trials.

    Raises SpecError for a job of unknown length, and for a sweep without Optuna.
    """
    arrivals, to_come = [*trace.arrivals], dict[str, tuple[Arrival, ...]](trace.trials)
    for number, spec in enumerate(more):
        if spec.optimizer_steps is None:
            raise SpecError("the length of the job is unknown", source=spec.name, path="steps", hint="say `steps`")
        sweep = f"{spec.name}#{number}"  # no id has the sign
        specs = (spec,) if spec.trial is None else trials_of(spec, sweep, home)
        first, *rest = (from_now(one, now_s) for one in specs)
        arrivals.append(first)
        if spec.trial is not None:
            to_come[sweep] = tuple(rest)
    return replace(trace, arrivals=tuple(arrivals), trials=to_come)


def _name(one: Outcome) -> str:
    return one.name if one.trial is None else f"{one.name}, trial {one.trial[1]}"


def _late(outcomes: Sequence[Outcome]) -> int:
    return sum(one.deadline_s is not None and not one.in_time for one in outcomes)
