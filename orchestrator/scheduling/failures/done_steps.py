"""How many optimizer steps of a training were done, compared with the number that its job declares."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.job_record import Job


def is_before_last_step(
    job: Job, attempt: Attempt, evidence: Evidence, *, if_unknown: bool = False
) -> bool:
    """Return whether the training ended before the last step that its job declares; `if_unknown`
    where nobody knows.
    """
    most = find_max_steps_done(job, attempt, evidence)
    steps = job.spec.optimizer_steps
    if most is None or steps is None:
        return if_unknown
    return most < steps


def made_all_declared_steps(job: Job, attempt: Attempt, evidence: Evidence) -> bool:
    """Return whether every rank made all optimizer steps that the job declares; False where nobody
    knows.

    An attempt without a step also counts if an earlier attempt made all of them: it began with that
    attempt's last checkpoint.
    """
    if _reached_last_step(job, attempt, evidence):
        return True
    beats = evidence.heartbeats
    if len(beats) < attempt.plan.world_size or any(b.steps_done + b.backwards > 0 for b in beats):
        return False
    return any(
        _reached_last_step(job, entry, entry.facts)
        for entry in job.attempts[: attempt.number - 1]
        if not entry.probe
    )


def _reached_last_step(job: Job, attempt: Attempt, evidence: Evidence) -> bool:
    """Return whether this attempt's own count of steps proves that every rank made the last one."""
    steps = job.spec.optimizer_steps
    beats = evidence.heartbeats
    if steps is None or len(beats) < attempt.plan.world_size:
        return False
    before = count_steps_before_attempt(job, attempt)
    if before is None:
        before = _count_restored_steps(job, attempt, evidence)
    return before is not None and before + min(beat.step for beat in beats) >= steps


def count_steps_before_attempt(job: Job, attempt: Attempt) -> int | None:
    """Return how many steps of the training were done before this attempt, if its own count starts
    at 0 after them.

    It is 0 where the attempt counts from the beginning of the training. None where the step of the
    checkpoint from which it continued is unknown.
    """
    earlier = [entry for entry in job.attempts[: attempt.number - 1] if not entry.probe]
    # our engines count from the beginning of the training
    if not job.spec.is_script or not (earlier or job.continues_from):
        return 0
    return earlier[-1].facts.checkpoint_step if earlier else job.continues_step or None


def _count_restored_steps(job: Job, attempt: Attempt, evidence: Evidence) -> int | None:
    """Return how many steps of the training came before this attempt, as the state of its optimizer
    counts them; None where that is unknown.

    The job's first attempt with a step tells where the count began, since a training may start with
    the optimizer of another one. An optimizer that began there again proves a new start only where
    no checkpoint was given: a script may restore its weights alone.
    """
    if job.continues_from is not None:
        return None
    first = evidence
    for entry in job.attempts[: attempt.number - 1]:
        if not entry.probe and any(beat.steps_done for beat in entry.facts.heartbeats):
            first = entry.facts
            break
    start = _find_least_restored_step(first)
    restored = _find_least_restored_step(evidence)
    if start is None or restored is None or restored < start:
        return None
    if restored == start and first is not evidence and evidence.resumed:
        return None
    return restored - start


def _find_least_restored_step(evidence: Evidence) -> int | None:
    """Return the least count with which an optimizer of any rank began; None where one has none."""
    least = None
    for beat in evidence.heartbeats:
        if beat.restored_steps is None:
            return None
        least = min(beat.restored_steps, beat.restored_steps if least is None else least)
    return least


def find_max_steps_done(job: Job, attempt: Attempt, evidence: Evidence) -> int | None:
    """Return an upper bound of the optimizer steps that the whole training has done; None where
    none is known.

    A script counts its steps anew in each attempt. Where the step of its checkpoint is unknown,
    each attempt may have gone on from the end of the one before. An attempt that a signal ended may
    have made steps that no heartbeat counted. The next attempt's optimizer may count them.
    """
    if not any(beat.torch_version for beat in evidence.heartbeats):
        return None
    done: int | None = job.continues_step
    if job.continues_from is not None and not done and job.spec.is_script:
        return None
    for entry in job.attempts[: attempt.number - 1]:
        if entry.probe:
            continue
        if entry.facts.checkpoint_step is not None:
            done = entry.facts.checkpoint_step
        elif not job.spec.is_script or _ended_by_itself(entry.facts):
            done = _find_max_steps_after_attempt(job, done, entry.facts)
        else:
            done = None
    if done is None:
        done = _count_restored_steps(job, attempt, evidence)
    return done if attempt.probe else _find_max_steps_after_attempt(job, done, evidence)


def _find_max_steps_after_attempt(
    job: Job, steps_before: int | None, evidence: Evidence
) -> int | None:
    """Return an upper bound of the training's steps after an attempt, which began with
    `steps_before` steps done.

    None where `steps_before` is None.
    """
    if steps_before is None:
        return None
    last = max((beat.step for beat in evidence.heartbeats), default=0)
    # our engines count from the beginning of the training
    counted = steps_before + last if job.spec.is_script else max(steps_before, last)
    return max(counted, evidence.checkpoint_step or 0)


def _ended_by_itself(evidence: Evidence) -> bool:
    """Return whether no signal ended any rank, so that each rank's last heartbeat counts all of its
    steps.
    """
    for end in evidence.ranks:
        if end.exit_code is None or min(end.exit_code, end.root_exit_code or 0) < 0:
            return False
    return bool(evidence.ranks)


def describe_done_steps(job: Job, attempt: Attempt, evidence: Evidence) -> str:
    """Return text such as ` after 80 of 100 steps`; "" where all steps were done.

    Where the number is unknown, it is "" unless the job demands all steps.
    """
    if not is_before_last_step(job, attempt, evidence):
        is_unknown = find_max_steps_done(job, attempt, evidence) is None
        if (
            is_unknown
            and job.spec.success.steps == "all"
            and not made_all_declared_steps(job, attempt, evidence)
        ):
            return f"; nothing tells whether all of its {job.spec.optimizer_steps} steps were made"
        return ""
    resumed = job.spec.is_script and attempt.number > 1
    least = "at most " if resumed else ""
    return (
        f" after {least}{find_max_steps_done(job, attempt, evidence)} of "
        f"{job.spec.optimizer_steps} steps"
    )


def made_no_optimizer_step(evidence: Evidence) -> bool:
    """Return whether the program ran backward passes but no optimizer step.

    That happens under fp16, where the gradient scaler skips steps that overflow.
    """
    beats = evidence.heartbeats
    return any(beat.backwards for beat in beats) and not any(beat.steps_done for beat in beats)
