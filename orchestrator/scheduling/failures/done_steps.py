"""How far a training came by the steps that the guard counted, against those that its job declares."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.job_record import Job


def is_before_last_step(
    job: Job, attempt: Attempt, evidence: Evidence, *, default: bool = False
) -> bool:
    """Return whether the training ended before the last of its declared steps; the default where nobody knows."""
    most = most_steps_done(job, attempt, evidence)
    steps = job.spec.optimizer_steps
    if most is None or steps is None:
        return default
    return most < steps


def most_steps_done(job: Job, attempt: Attempt, evidence: Evidence) -> int | None:
    """Return the most steps of the whole training that can be done by now; None where no guard counted.

    A script counts its steps anew in each attempt. Where the step of its checkpoint is unknown, each attempt may have
    gone on from the end of the one before.
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


def describe_done(job: Job, attempt: Attempt, evidence: Evidence) -> str:
    """Return how many of the declared steps were made, as text; "" where nobody knows, or all were."""
    if not is_before_last_step(job, attempt, evidence):
        return ""
    resumed = job.spec.is_script and attempt.number > 1
    least = "at most " if resumed else ""
    return f" after {least}{most_steps_done(job, attempt, evidence)} of {job.spec.optimizer_steps} steps"


def made_no_step(evidence: Evidence) -> bool:
    """Return whether backward passes were made and no optimizer step: fp16's scaler passes over steps that overflow."""
    beats = evidence.heartbeats
    return any(beat.backwards for beat in beats) and not any(beat.steps_done for beat in beats)
