"""Laws of one job: its attempts, its budgets, its status, and what is told of them."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.calibration.correction import correct_device_bytes
from orchestrator.scheduling.base.time_limits import compute_total_run_time_s
from orchestrator.scheduling.options.job_options import make_calibration_for_job
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Archive, Launch, Record, Stop
from orchestrator.specs.attempt import Attempt, AttemptStatus, Failure, FailureKind
from orchestrator.specs.events import CancelRequested, Finished, TimerFired
from orchestrator.specs.job_record import Job, JobStatus
from tests.scheduling.transition import Law, Transition, attempts, devices, of

# Said once more, on purpose: which budget pays for which failure. What is not in GOES_ON is never
# tried again.
BUDGET_OF = {
    FailureKind.DEVICE_OOM: "oom",
    FailureKind.HOST_OOM: "oom",
    FailureKind.MEMORY_CONTENTION: "node",
    FailureKind.NODE_LOST: "node",
    FailureKind.PREEMPTED: "preemption",
    FailureKind.HUNG: "hang",
    FailureKind.STARTUP: "startup",
    FailureKind.UNKNOWN: "unknown",
}


MOVED = FailureKind.MOVED


GOES_ON = (
    *BUDGET_OF,
    MOVED,
    *(kind for kind in FailureKind if kind.shortage),
)  # the others cost no budget


OUT_OF_MEMORY = (FailureKind.DEVICE_OOM, FailureKind.HOST_OOM)


def _final_ends(t: Transition) -> Iterator[str]:
    for job in t.before.jobs.values():
        after = t.after.jobs.get(job.id)
        if after is None:
            yield f"{job.id} was lost"
        elif job.status.ended and (
            after.status is not job.status or len(after.attempts) != len(job.attempts)
        ):
            yield f"{job.id} ended twice: {job.status}, then {after.status}"


def _one_gang_per_device(t: Transition) -> Iterator[str]:
    holders: dict[tuple[str, int], str] = {}
    for attempt in attempts(t.after):
        if not attempt.released:
            for device in devices(attempt):
                if device in holders:
                    yield f"{attempt.name} and {holders[device]} hold {device[0]}:{device[1]} together"
                holders[device] = attempt.name


def _ran_before(job: Job, attempt: Attempt) -> bool:
    """A plan that trained within its memory is tried again, whatever the family has taught since."""
    return any(
        earlier.plan == attempt.plan
        and earlier.evidence
        and any(b.steps_done for b in earlier.evidence.heartbeats)
        for earlier in job.attempts[: attempt.number - 1]
    )


def _is_last_resort(job: Job, attempt: Attempt) -> bool:
    """A job that ran out of memory tries what may fit, however unlikely, before it is given up."""
    burst = any(
        earlier.failure and earlier.failure.kind is FailureKind.DEVICE_OOM
        for earlier in job.attempts[: attempt.number - 1]
    )
    return burst and (attempt.fit_probability or 0.0) > 0.0


def _is_bounded(attempt: Attempt) -> bool:
    """A second probe is bounded by what the first one measured, not by what is assumed of the script."""
    return attempt.probe and attempt.number > 1


def _launches(t: Transition) -> Iterator[str]:
    """A launch is a new attempt of a queued job, as wide as its plan, on nodes that live, for the batch asked."""
    nodes = {node.name: node for node in t.before.nodes} | {
        node.name: node for node in t.after.nodes
    }
    launched = set()
    for launch in of(Launch, t.actions):
        attempt, job = launch.attempt, t.after.jobs[launch.job.id]
        launched.add(attempt.name)
        gang = devices(attempt)
        if attempt.plan.global_batch_size != job.spec.global_batch_size and not attempt.probe:
            yield f"{attempt.name} trains with batch {attempt.plan.global_batch_size}, not {job.spec.global_batch_size}"
        if len(set(gang)) != attempt.plan.world_size or len(gang) != attempt.plan.world_size:
            yield f"{attempt.name} has {len(set(gang))} devices for {attempt.plan.world_size} ranks"
        if any(name not in nodes or not 0 <= index < nodes[name].devices for name, index in gang):
            yield f"{attempt.name} is placed on devices that are not there"
        elif not (
            _ran_before(job, attempt) or _is_last_resort(job, attempt) or _is_bounded(attempt)
        ) and correct_device_bytes(attempt.estimate, attempt.correction) > min(
            nodes[name].device.memory for name, _ in gang
        ):
            yield f"{attempt.name} is predicted not to fit its devices"
        if not job.spec.gpus.min <= attempt.plan.world_size <= job.spec.gpus.max:
            yield f"{attempt.name} takes {attempt.plan.world_size} devices, outside of what its job allows"
        if job.last != attempt or attempt.number != len(job.attempts):
            yield f"{attempt.name} is launched but is not its job's newest attempt"
    for attempt in attempts(t.after):
        job_before = t.before.jobs.get(attempt.job_id)
        if (
            job_before is None or len(job_before.attempts) < attempt.number
        ) and attempt.name not in launched:
            yield f"{attempt.name} began without a launch"


def _one_attempt_at_a_time(t: Transition) -> Iterator[str]:
    for job in t.after.jobs.values():
        if sum(attempt.status is not AttemptStatus.ENDED for attempt in job.attempts) > 1:
            yield f"{job.id} runs twice at the same time"
        if [attempt.number for attempt in job.attempts] != list(range(1, len(job.attempts) + 1)):
            yield f"{job.id} numbers its attempts wrongly"


def _refuted_stay_refuted(t: Transition) -> Iterator[str]:
    for launch in of(Launch, t.actions):
        for earlier in launch.job.attempts[: launch.attempt.number - 1]:
            kind = earlier.failure.kind if earlier.failure else None
            if kind in OUT_OF_MEMORY and earlier.plan == launch.attempt.plan:
                yield f"{launch.attempt.name} repeats the plan that ran out of memory in {earlier.name}"
            if kind is FailureKind.DEVICE_OOM and earlier.device == launch.attempt.device:
                correction = make_calibration_for_job(
                    t.after, launch.job, earlier.device
                ).correction
                needed = correct_device_bytes(launch.attempt.estimate, launch.attempt.correction)
                if needed >= correct_device_bytes(earlier.estimate, correction):
                    yield f"{launch.attempt.name} needs no less memory than {earlier.name}, which had too little"


def _no_launch_for_the_unwanted(t: Transition) -> Iterator[str]:
    for launch in of(Launch, t.actions):
        job = t.after.jobs[launch.job.id]
        if job.cancelling:
            yield f"{launch.attempt.name} is launched although its job is cancelled"
        if job.status is not JobStatus.RUNNING:
            yield f"{launch.attempt.name} is launched although its job is {job.status}"
    for job in t.after.jobs.values():
        if job.status is JobStatus.REFUSED and job.attempts:
            yield f"{job.id} was refused after it ran"
        for attempt in job.attempts[:-1]:
            failure = attempt.failure
            is_over = (
                failure is not None
                and failure.verdict is not None
                and failure.verdict.wait_s is None
            )
            if failure is None or ((failure.kind not in GOES_ON or is_over) and not attempt.probe):
                kind = failure.kind if failure else "success"
                yield f"{job.id} was tried again after {kind}"


def _cancels_are_obeyed(t: Transition) -> Iterator[str]:
    if not isinstance(t.event, CancelRequested) or t.event.job_id not in t.before.jobs:
        return
    before, after = t.before.jobs[t.event.job_id], t.after.jobs[t.event.job_id]
    if before.status is JobStatus.QUEUED and after.status is not JobStatus.CANCELLED:
        yield f"{after.id} waits on although it is cancelled"
    if before.status is JobStatus.RUNNING and not before.cancelling:
        stopped = [(stop.job_id, stop.number) for stop in of(Stop, t.actions)]
        if before.last is None or stopped != [(before.id, before.last.number)]:
            yield f"{after.id} runs on although it is cancelled"


def _status_agrees(t: Transition) -> Iterator[str]:
    for job in t.after.jobs.values():
        live = bool(job.last and job.last.status is not AttemptStatus.ENDED)
        if live != (job.status is JobStatus.RUNNING):
            yield f"{job.id} is {job.status} with {'a' if live else 'no'} live attempt"
        succeeded = bool(
            job.last and job.last.status is AttemptStatus.ENDED and job.last.failure is None
        )
        if succeeded != (job.status is JobStatus.SUCCEEDED):
            yield f"{job.id} is {job.status} but its last attempt {'succeeded' if succeeded else 'did not succeed'}"


def _everything_is_recorded(t: Transition) -> Iterator[str]:
    """The tracker hears of every new status of a job that has begun or ended, and of every end of an attempt."""
    recorded = {(record.job.id, record.job.status) for record in of(Record, t.actions)}
    ended = {
        record.attempt.name
        for record in of(Record, t.actions)
        if record.attempt and record.attempt.evidence
    }
    for job in t.after.jobs.values():
        before = t.before.jobs.get(job.id)
        is_new = before is None or before.status is not job.status
        if is_new and (job.attempts or job.status.ended) and (job.id, job.status) not in recorded:
            yield f"{job.id} became {job.status} and no record says so"
    attempts_before = {attempt.name: attempt for attempt in attempts(t.before)}
    for attempt in attempts(t.after):
        news = (
            attempt.evidence is not None
            and attempt.name in attempts_before
            and attempts_before[attempt.name].evidence is None
        )
        if news and attempt.name not in ended:
            yield f"{attempt.name} ended and no record says so"


def _budgets_are_used(t: Transition) -> Iterator[str]:
    """No job is given up after a failure while the budget of that failure lasts."""
    for job in t.after.jobs.values():
        before = t.before.jobs.get(job.id)
        if before and before.status is JobStatus.RUNNING and job.status is JobStatus.FAILED:
            failures = [
                attempt.failure for attempt in job.attempts if attempt.failure and not attempt.probe
            ]
            if not failures or (failures[-1].verdict and failures[-1].verdict.wait_s is None):
                continue
            if (
                job.spec.time_limit is not None
                and compute_total_run_time_s(job, t.after.at_s) >= job.spec.time_limit - 1e-6
            ):
                continue
            budget = _budget_of(failures[-1])
            used = sum(_budget_of(failure) == budget for failure in failures)
            if budget and used <= getattr(job.spec.retries, budget):
                yield f"{job.id} was given up after {failures[-1].kind} with retries.{budget} left"


def _budget_of(failure: Failure) -> str | None:
    return BUDGET_OF.get(failure.kind) if failure.verdict is None else failure.verdict.budget


def _archived_for_good(t: Transition) -> Iterator[str]:
    """A job is handed to the archive once, when it has ended and given everything back, and the state forgets it."""
    handed = [archive.job for archive in of(Archive, t.actions)]
    for job in handed:
        if not job.status.ended or not all(attempt.released for attempt in job.attempts):
            yield f"{job.id} was archived although it is {job.status} or holds devices"
        if job.id in t.state.jobs:
            yield f"{job.id} was archived and is still remembered"
    for job in t.state.jobs.values():
        if job.status.ended and all(attempt.released for attempt in job.attempts):
            yield f"{job.id} has ended and released everything, and is still remembered"


def _waking_ends(t: Transition) -> Iterator[str]:
    wake_s = Scheduler(t.state).wake_at_s()
    if wake_s is not None and wake_s <= t.after.at_s:
        yield f"asks to be woken at {wake_s}, which is over at {t.after.at_s}"
    if isinstance(t.event, TimerFired) and t.after.at_s < t.before.at_s:
        yield "time ran backwards"


def _probes(t: Transition) -> Iterator[str]:
    """A job of unknown memory need starts with at most two probes, which make no progress."""
    for launch in of(Launch, t.actions):
        before = launch.job.attempts[: launch.attempt.number - 1]
        if not launch.attempt.probe:
            continue
        spec = launch.job.spec
        if len(before) >= 2 or not all(earlier.probe for earlier in before):
            yield f"{launch.attempt.name} probes what has been tried {len(before)} times"
        if not spec.is_script or spec.profile is not None or spec.probe == "never":
            yield f"{launch.attempt.name} probes what is known, or not to be probed"
        micro = launch.attempt.plan.micro_batch_size
        if any(earlier.plan.micro_batch_size >= micro for earlier in before):
            yield f"{launch.attempt.name} probes micro-batch {micro} after one that was no smaller"
        observations = [
            observation
            for observation in t.before.observations
            if observation.family == spec.family_name and not observation.probe
        ]
        own_settings = (
            None,
            launch.attempt.relative_to,
        )  # outcomes relative to other settings of the script do not count
        if any(
            observation.device == launch.attempt.device and observation.relative_to in own_settings
            for observation in observations
        ):
            yield f"{launch.attempt.name} probes although its family has run here"
    for attempt in attempts(t.after):
        if attempt.probe and attempt.evidence is not None and attempt.evidence.checkpoint_step:
            yield f"{attempt.name} is a probe and counts as progress"


def _a_held_job_never_starts(t: Transition) -> Iterator[str]:
    """A held job is promised no devices and leaves those that it has."""
    held_ids = {job.id for job in t.after.jobs.values() if job.held_by is not None}
    yield from (
        f"{launch.attempt.name} is launched and held"
        for launch in of(Launch, t.actions)
        if launch.job.id in held_ids
    )
    yield from (
        f"{reservation.job_id} is held and promised devices"
        for reservation in t.after.reservations
        if reservation.job_id in held_ids
    )
    for job in (t.after.jobs[job_id] for job_id in held_ids):
        if job.last and job.last.status in (AttemptStatus.LAUNCHING, AttemptStatus.RUNNING):
            yield f"{job.last.name} is held and not asked to end"


def _limits_are_kept(t: Transition) -> Iterator[str]:
    """No attempt runs past its job's limit: it is asked to end then, and the job ends with it."""
    for job in t.after.jobs.values():
        if job.spec.time_limit is None or job.last is None:
            continue
        left_s = job.spec.time_limit - compute_total_run_time_s(job, t.after.at_s)
        if left_s <= 0 and job.last.status is AttemptStatus.RUNNING:
            yield f"{job.last.name} runs on {-left_s} s past the limit of its job"
        wake_s = Scheduler(t.state).wake_at_s()
        if job.last.status is AttemptStatus.RUNNING and (
            wake_s is None or wake_s > t.after.at_s + left_s + 1e-6
        ):
            yield f"{job.last.name} would run past its limit in a quiet night: woken at {wake_s}"
        if left_s <= 0 and job.status is JobStatus.QUEUED and isinstance(t.event, Finished):
            yield f"{job.id} goes on past its limit"


LAWS: tuple[Law, ...] = (
    _a_held_job_never_starts,
    _limits_are_kept,
    _final_ends,
    _one_gang_per_device,
    _launches,
    _one_attempt_at_a_time,
    _refuted_stay_refuted,
    _no_launch_for_the_unwanted,
    _cancels_are_obeyed,
    _probes,
    _status_agrees,
    _everything_is_recorded,
    _budgets_are_used,
    _archived_for_good,
    _waking_ends,
)
