"""Expected results of the demo's jobs."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.service.views.records import JobView

Promise = tuple[str, Callable[[JobView], bool]]  # as a sentence, and as a check


def outcomes(job: JobView) -> list[str]:
    """Return the outcome of each attempt (launch) of the job."""
    return [attempt["outcome"] for attempt in job["attempts"]]


def fitted(job: JobView) -> bool:
    """Return whether the first attempt succeeded."""
    return job["status"] == "succeeded" and outcomes(job) == ["succeeded"]


def recovered(job: JobView) -> bool:
    """Return whether the job succeeded after out-of-memory failures alone, with one global batch."""
    failed = outcomes(job)[:-1]
    batches = {attempt["settings"]["global_batch_size"] for attempt in job["attempts"]}
    return job["status"] == "succeeded" and set(failed) == {"device_oom"} and len(batches) == 1


def recovered_at_once(job: JobView) -> bool:
    """Return whether the job recovered after one out-of-memory failure."""
    return recovered(job) and len(job["attempts"]) == 2


def resumed(job: JobView) -> bool:
    """Return whether the job recovered at once, from a checkpoint."""
    return recovered_at_once(job) and (job["attempts"][0]["checkpoint_step"] or 0) > 0


def stopped_with_traceback(job: JobView) -> bool:
    """Return whether the script's own error ended the job, and is shown."""
    failure = job["attempts"][-1]["failure"] if job["attempts"] else None
    shown = failure["excerpt"] if failure else ""
    return (
        job["status"] == "failed"
        and outcomes(job) == ["unknown", "user_error"]
        and "KeyError: 'labels'" in shown
    )


def refused(job: JobView) -> bool:
    """Return whether the job was refused before an attempt, with what would fit."""
    return job["status"] == "refused" and not job["attempts"] and "would fit" in job["reason"]


PROMISES: dict[str, Promise] = {
    "fits.yaml": ("is planned to fit, and does", fitted),
    "wrong_profile.yaml": (
        "runs out of memory once, resumes from its checkpoint with a cheaper plan, ends",
        resumed,
    ),
    "foreign.yaml": (
        "runs out of memory once, finishes degraded through its knobs, unmodified",
        recovered_at_once,
    ),
    "bug.yaml": (
        "ends twice at the same step, then stops with its own traceback",
        stopped_with_traceback,
    ),
    "never_fits.yaml": ("is refused before anything starts", refused),
}
SHORT = ("fits.yaml", "wrong_profile.yaml")  # what `orc demo` runs without --all
