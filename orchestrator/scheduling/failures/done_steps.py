"""How many optimizer steps of a training were done, compared with the number that its job declares."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.job_record import Job


def is_before_last_step(
    job: Job, attempt: Attempt, evidence: Evidence, *, default: bool = False
) -> bool:
    """Return whether the training ended before its last declared step; `default` where that is
    unknown.
    """
    most = max_steps_done(job, attempt, evidence)
    steps = job.spec.optimizer_steps
    if most is None or steps is None:
        return default
    return most < steps


def max_steps_done(job: Job, attempt: Attempt, evidence: Evidence) -> int | None:
    """Return the most optimizer steps that the whole training can have done; None where no guard
    counted steps.

    A script counts its steps from 0 in each attempt. Where the step of its checkpoint is unknown,
    each attempt is assumed to have continued from the end of the one before.
    """
    if not any(beat.torch_version for beat in evidence.heartbeats):
        return None
    done = job.continues_step
    if job.continues_from is not None and not done and job.spec.is_script:
        return None
    for entry in (*job.attempts[: attempt.number - 1], attempt):
        entry_evidence = evidence if entry is attempt else entry.facts
        if entry.probe:
            continue
        last = max((beat.step for beat in entry_evidence.heartbeats), default=0)
        saved = entry_evidence.checkpoint_step
        # our engines count from the beginning of the training
        done = done + last if job.spec.is_script else max(done, last)
        if saved is not None and entry is not attempt:
            done = saved
        elif saved is not None:
            done = max(done, saved)
    return done


def describe_done_steps(job: Job, attempt: Attempt, evidence: Evidence) -> str:
    """Return text such as ` after 80 of 100 steps`; "" where the number is unknown or all steps
    were done.
    """
    if not is_before_last_step(job, attempt, evidence):
        return ""
    resumed = job.spec.is_script and attempt.number > 1
    least = "at most " if resumed else ""
    return f" after {least}{max_steps_done(job, attempt, evidence)} of {job.spec.optimizer_steps} steps"


def made_no_optimizer_step(evidence: Evidence) -> bool:
    """Return whether the program ran backward passes but no optimizer step.

    That happens under fp16, where the gradient scaler skips steps that overflow.
    """
    beats = evidence.heartbeats
    return any(beat.backwards for beat in beats) and not any(beat.steps_done for beat in beats)
