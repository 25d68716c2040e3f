"""Simulates the live queue from now on, as in `orc forecast`, on any cluster."""

from __future__ import annotations

import time
from collections import Counter, deque
from collections.abc import Iterator, Sequence
from pathlib import Path

from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.scheduling.base.job_updates import replace_job
from orchestrator.scheduling.base.migration import can_be_stopped, make_migration
from orchestrator.scheduling.policies.registry import make_index
from orchestrator.scheduling.reports.forecast import (
    QueueSimulation,
    SimulatedAttempt,
    estimate_saved_step,
)
from orchestrator.service.commands.simulate import (
    Outcome,
    Simulated,
    compute_training_time_alone_s,
    make_report,
)
from orchestrator.service.server.submissions import (
    SubmissionRequest,
    make_submission_events_of_request,
)
from orchestrator.service.server.sweeps.trials import ComingTrials, list_remaining_trials
from orchestrator.specs.attempt import AttemptStatus, StopCause
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State


def simulate_queue(
    state: State,
    cluster: ClusterSpec,
    *,
    is_live: bool,
    more_jobs: Sequence[JobSpec] = (),
    coming_trials: ComingTrials,
    home: Path,
) -> Simulated:
    """Simulate the live jobs together with `more_jobs`, submitted now; return the result, with
    times in seconds from now.

    Running jobs keep their progress; usage, age, drains, maintenance and guarantees are taken from
    the state. With `is_live` the nodes are those of the state, and `cluster` gives only the policy.
    Else running jobs on devices that the cluster lacks end, and resume from their saved step.
    `coming_trials` are trials that live sweeps have yet to submit. A job whose end depends on an
    unknown duration has no end in the result. Raises SpecError where no job is live.
    """
    live = sorted(state.live_jobs, key=lambda job: job.order)
    if not live and not more_jobs:
        raise SpecError("no job runs or waits", source="queue", hint="submit one, or play a trace")
    now_s = state.at_s
    saved = dict[str, int | None]()
    if is_live:
        state = replace(state, policy=cluster.policy)
    else:
        state, saved = move_state_and_find_saved_steps(state, cluster)
    coming = FutureSubmissions(state, more_jobs, coming_trials, home)
    play = QueueSimulation(
        state,
        make_index(state),
        {},
        0,
        saved_step_by_job_id=saved,
        list_submissions=coming.iterate_due,
    )
    play.run_until_ended([job.id for job in live])
    jobs = [*live, *coming.jobs]
    stints: dict[str, list[SimulatedAttempt]] = {job.id: [] for job in jobs}
    for stint in play.stints:
        stints.setdefault(stint.job.id, []).append(stint)
    devices = sum(node.devices for node in state.nodes)
    outcomes = tuple(
        _find_job_outcome(
            job,
            stints[job.id],
            now_s,
            devices,
            cluster.launch_cost,
            knows_end=play.knows_end(job.id),
        )
        for job in jobs
    )
    # a job that somebody holds starts in no play: it is no unfinished one
    pairs = zip(jobs, outcomes, strict=True)
    counted = [
        outcome for job, outcome in pairs if outcome.ended_at_s is not None or job.held_by is None
    ]
    report = make_report(Trace(name="queue", arrivals=()), cluster, counted)
    return Simulated(report=report | {"devices": devices}, outcomes=outcomes, decisions_s=())


def move_state_and_find_saved_steps(
    state: State, cluster: ClusterSpec
) -> tuple[State, dict[str, int | None]]:
    """Return (state of the scheduler on another cluster, {job id: saved step or None} of jobs that
    lose their devices).
    """
    nodes = make_idle_nodes(cluster)
    index = make_index(state)
    devices = {
        (node.name, node.device.name, device) for node in nodes for device in range(node.devices)
    }
    names = {node.name: node.device.name for node in state.nodes}
    saved: dict[str, int | None] = {}
    for job in index.running.values():
        attempt = job.attempts[-1]
        used = {
            (part.node, names.get(part.node), device)
            for part in attempt.placement
            for device in part.devices
        }
        if used <= devices or attempt.status is AttemptStatus.ENDED:
            continue
        end_s = index.estimate_end_s(job, attempt)
        saved[job.id] = (
            estimate_saved_step(index, job, attempt, end_s, state.at_s)
            if can_be_stopped(job)
            else None
        )
        if attempt.status is not AttemptStatus.STOPPING:
            why = "moved to the other cluster"
            job, _ = make_migration(job, StopCause.MAINTENANCE, why, state.at_s)
            state = replace_job(state, job)
    policy = cluster.policy
    return replace(
        state, nodes=nodes, declared=nodes, policy=policy, reservations=(), suspensions=()
    ), saved


class FutureSubmissions:
    """Jobs that are submitted during a simulation: new ones at its start, and trials when their
    sweeps allow them.
    """

    def __init__(
        self,
        state: State,
        more_jobs: Sequence[JobSpec],
        coming_trials: ComingTrials,
        home: Path,
    ) -> None:
        """Prepare the submissions. Raises SpecError for a new job of unknown duration, or one that
        the service would refuse.
        """
        self.jobs: list[Job] = []
        self._begins: list[Submitted] = []
        self._trials = {sweep: deque(specs) for sweep, specs in coming_trials.items()}
        for spec in more_jobs:
            if spec.optimizer_steps is None:
                raise SpecError(
                    "the length of the job is unknown",
                    source=spec.name,
                    path="steps",
                    hint="say `steps`",
                )
        request = SubmissionRequest([(spec, None) for spec in more_jobs])
        for event in make_submission_events_of_request(
            request, state, state.submitted, state.at_s, state.jobs.get
        ):
            first = event.spec
            if first.trial is not None and event.array is not None:
                first, *rest = list_remaining_trials(first, event.array, home)
                self._trials[event.array] = deque(rest)
            self._begins.append(self._record_job(replace(event, spec=first)))

    def iterate_due(self, scheduler_state: State) -> Iterator[Submitted]:
        """Yield the submissions that are due in this state of the scheduler."""
        begins = self._begins
        self._begins = []
        yield from begins
        live = Counter(job.array for job in scheduler_state.live_jobs if job.spec.trial is not None)
        order = scheduler_state.submitted + len(begins)
        for sweep, rest in self._trials.items() if not begins else ():
            while (
                rest and (trial := rest[0].trial) is not None and live[sweep] < trial.max_concurrent
            ):
                spec = rest.popleft()
                if (
                    spec.deadline is not None
                    and spec.deadline.compute_due_s(scheduler_state.at_s) <= scheduler_state.at_s
                ):
                    rest.clear()
                    break
                order += 1
                live[sweep] += 1
                spec = spec.model_copy(update={"trial": trial.model_copy(update={"of": sweep})})
                name = f"{spec.name}-{order}"
                yield self._record_job(
                    Submitted(
                        job_id=name, order=order, spec=spec, at_s=scheduler_state.at_s, array=sweep
                    )
                )

    def _record_job(self, event: Submitted) -> Submitted:
        """Record the job of a submission, and return the submission."""
        spec = event.spec
        job = Job(
            id=event.job_id,
            spec=spec,
            order=event.order,
            submitted_at_s=event.at_s,
            array=event.array,
            deadline_s=spec.deadline.compute_due_s(event.at_s) if spec.deadline else None,
        )
        self.jobs.append(job)
        return event


def _find_job_outcome(
    job: Job,
    simulated_attempts: Sequence[SimulatedAttempt],
    now_s: float,
    device_count: int,
    launch_cost_s: float,
    *,
    knows_end: bool,
) -> Outcome:
    """Return what became of a job in the simulation, with times in seconds after `now_s`.

    Without `knows_end` its end is unknown.
    """
    attempts = tuple(
        SimulatedProcess(
            job=stint.job,
            attempt=stint.attempt,
            first_step=0,
            step_s=stint.attempt.step_s,
            launched_at_s=max(0.0, stint.launched_at_s - now_s),
            started_at_s=max(0.0, stint.launched_at_s + launch_cost_s - now_s),
            ended_at_s=None if stint.ended_at_s is None else stint.ended_at_s - now_s,
        )
        for stint in simulated_attempts
    )
    done = next(
        (stint for stint in reversed(simulated_attempts) if stint.is_done and knows_end), None
    )
    arrival = Arrival(at_s=0.0, spec=job.spec)
    return Outcome(
        name=job.spec.name,
        submitted_at_s=max(0.0, job.submitted_at_s - now_s),
        started_at_s=attempts[0].launched_at_s if attempts else None,
        ended_at_s=None if done is None or done.ended_at_s is None else done.ended_at_s - now_s,
        alone_s=launch_cost_s + compute_training_time_alone_s(arrival, device_count, attempts),
        deadline_s=None if job.deadline_s is None else job.deadline_s - now_s,
        attempts=attempts,
        guaranteed=job.spec.guarantee is not None,
        starts_by_s=None if job.starts_by_s is None else job.starts_by_s - now_s,
        trial=None if job.spec.trial is None else (job.array, job.spec.trial.number),
        job_id=job.id,
    )


def advance_to_now(state: State) -> State:
    """Return the state with its time set to the current time."""
    return replace(state, at_s=max(state.at_s, time.time()))
