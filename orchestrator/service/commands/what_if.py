"""What-if comparison of the live queue: simulated as it is, and with another cluster, order or more jobs."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain
from pathlib import Path

from orchestrator.service.commands.live_queue import simulate_queue
from orchestrator.service.commands.simulate import Outcome, Report
from orchestrator.service.server.sweeps.trials import ComingTrials
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.state import State

JOBS_MAX = 200  # that are played: a page waits for both plays
DEVICES_MAX = 1024  # of the other cluster


@frozen
class Fate:
    """What becomes of a job without the change (`now`; None for an added job) and with the change
    (`then`).
    """

    name: str
    is_submitted: bool
    now: Outcome | None
    then: Outcome


@frozen
class WhatIf:
    """The results of two simulations, without and with a change, and the jobs whose end is unknown.

    Times are in seconds from now.
    """

    now: Report
    then: Report
    late_now: int
    late_then: int
    fates: tuple[Fate, ...]
    unknown: tuple[str, ...]


def compare_queues(
    state: State,
    present_cluster: ClusterSpec,
    other_cluster: ClusterSpec,
    more_jobs: Sequence[JobSpec],
    coming_trials: ComingTrials,
    home: Path,
) -> WhatIf:
    """Simulate the queue as it is, and on the other cluster with the jobs in `more_jobs`; return
    both results.

    `coming_trials` are trials that live sweeps have yet to submit. Where the other cluster has the
    nodes of the present one, both simulations have the state's nodes, with their drains. Raises
    SpecError without a job to simulate, and beyond JOBS_MAX and DEVICES_MAX.
    """
    live = sorted(state.live_jobs, key=lambda job: job.order)
    sweeps = sum(spec.trial.sweep.trials - 1 for spec in more_jobs if spec.trial is not None)
    count = len(live) + len(more_jobs) + sweeps + sum(map(len, coming_trials.values()))
    if count > JOBS_MAX:
        hint = "play it with `orc simulate --queue now`"
        raise SpecError(
            "too many jobs for a page", path="queue", got=count, allowed=f"{JOBS_MAX}", hint=hint
        )
    devices = other_cluster.device_count
    if devices > DEVICES_MAX:
        raise SpecError(
            "too many devices for a page", path="nodes", got=devices, allowed=f"{DEVICES_MAX}"
        )
    if not live:
        raise SpecError("no job runs or waits", source="queue", hint="submit one, or play a trace")
    is_live = other_cluster.model_copy(update={"policy": present_cluster.policy}) == present_cluster
    now = simulate_queue(
        state, present_cluster, is_live=True, coming_trials=coming_trials, home=home
    )
    then = simulate_queue(
        state,
        other_cluster,
        is_live=is_live,
        more_jobs=more_jobs,
        coming_trials=coming_trials,
        home=home,
    )
    later = {outcome.trial: outcome for outcome in now.outcomes[len(live) :]}  # trials of sweeps
    befores = chain(
        now.outcomes[: len(live)],
        (later.get(outcome.trial) for outcome in then.outcomes[len(live) :]),
    )
    return WhatIf(
        now=now.report,
        then=then.report,
        late_now=_count_late(now.outcomes),
        late_then=_count_late(then.outcomes),
        fates=tuple(
            Fate(
                name=live[index].id if index < len(live) else _get_outcome_name(other_outcome),
                is_submitted=index < len(live),
                now=present_outcome,
                then=other_outcome,
            )
            for index, (present_outcome, other_outcome) in enumerate(
                zip(befores, then.outcomes, strict=True)
            )
        ),
        unknown=tuple(
            job.id
            for job, outcome in zip(live, now.outcomes, strict=False)
            if outcome.ended_at_s is None and not job.held_by
        ),
    )


def _get_outcome_name(outcome: Outcome) -> str:
    return outcome.name if outcome.trial is None else f"{outcome.name}, trial {outcome.trial[1]}"


def _count_late(outcomes: Sequence[Outcome]) -> int:
    return sum(outcome.deadline_s is not None and not outcome.in_time for outcome in outcomes)
