"""How far a training came by the steps that the guard counted, against those that its job declares."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, Evidence
from orchestrator.specs.job_record import Job


def is_before_last_step(
    job: Job, attempt: Attempt, evidence: Evidence, *, default: bool = False
) -> bool:
    """Return whether the training ended before the last of its declared steps; the default where nobody knows."""
    done = steps_done(job, attempt, evidence)
    steps = job.spec.optimizer_steps
    return default if done is None or steps is None else done < steps


def steps_done(job: Job, attempt: Attempt, evidence: Evidence) -> int | None:
    """Return the steps of the whole training that are done; None where the step that it went on from is unknown.

    A script counts its steps anew in each attempt.
    """
    if not any(beat.torch_version for beat in evidence.heartbeats):
        return None
    last = max(beat.step for beat in evidence.heartbeats)
    earlier = [entry for entry in job.attempts if entry.number < attempt.number and not entry.probe]
    if job.spec.is_script and not earlier and job.continues_from is None:
        return last
    saved = [job.continues_step, evidence.checkpoint_step or 0]
    saved += [
        entry.evidence.checkpoint_step or 0 for entry in earlier if entry.evidence is not None
    ]
    if not job.spec.is_script:
        # it may have gone on from the checkpoint of its last step
        return max(last, *saved)
    begin = max(saved[:1] + saved[2:])
    return begin + last if begin else None


def describe_done(job: Job, attempt: Attempt, evidence: Evidence) -> str:
    """Return how many of the declared steps were made, as text; "" where nobody knows, or all were."""
    if not is_before_last_step(job, attempt, evidence):
        return ""
    return f" after {steps_done(job, attempt, evidence)} of {job.spec.optimizer_steps} steps"


def made_no_step(evidence: Evidence) -> bool:
    """Return whether backward passes were made and no optimizer step: fp16's scaler passes over steps that overflow."""
    beats = evidence.heartbeats
    return any(beat.backwards for beat in beats) and not any(beat.steps_done for beat in beats)
