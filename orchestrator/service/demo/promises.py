"""Expected results of the demo's jobs."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.service.views.records import JobView

Promise = tuple[str, Callable[[JobView], bool]]  # as a sentence, and as a check


def list_attempt_outcomes(job: JobView) -> list[str]:
    """Return the outcome of each attempt of the job as text, first attempt first."""
    return [attempt["outcome"] for attempt in job["attempts"]]


def has_fitted(job: JobView) -> bool:
    """Return whether the job's first attempt succeeded."""
    return job["status"] == "succeeded" and list_attempt_outcomes(job) == ["succeeded"]


def has_recovered(job: JobView) -> bool:
    """Return whether the job succeeded after out-of-memory failures alone, all with the same global
    batch size.
    """
    failed = list_attempt_outcomes(job)[:-1]
    batches = {attempt["settings"]["global_batch_size"] for attempt in job["attempts"]}
    return job["status"] == "succeeded" and set(failed) == {"device_oom"} and len(batches) == 1


def has_recovered_at_once(job: JobView) -> bool:
    """Return whether the job succeeded after exactly one out-of-memory failure."""
    return has_recovered(job) and len(job["attempts"]) == 2


def has_resumed(job: JobView) -> bool:
    """Return whether the job succeeded after exactly one out-of-memory failure, and resumed from a
    checkpoint.
    """
    return has_recovered_at_once(job) and (job["attempts"][0]["checkpoint_step"] or 0) > 0


def has_stopped_with_traceback(job: JobView) -> bool:
    """Return whether the script's own error ended the job, and its traceback is recorded."""
    failure = job["attempts"][-1]["failure"] if job["attempts"] else None
    shown = failure["excerpt"] if failure else ""
    return (
        job["status"] == "failed"
        and list_attempt_outcomes(job) == ["unknown", "user_error"]
        and "KeyError: 'labels'" in shown
    )


def was_refused(job: JobView) -> bool:
    """Return whether the job was refused before any attempt, with a reason that names a plan which
    would fit.
    """
    return job["status"] == "refused" and not job["attempts"] and "would fit" in job["reason"]


PROMISES: dict[str, Promise] = {
    "fits.yaml": ("is planned to fit, and does", has_fitted),
    "wrong_profile.yaml": (
        "runs out of memory once, resumes from its checkpoint with a cheaper plan, ends",
        has_resumed,
    ),
    "foreign.yaml": (
        "runs out of memory once, finishes degraded through its knobs, unmodified",
        has_recovered_at_once,
    ),
    "bug.yaml": (
        "ends twice at the same step, then stops with its own traceback",
        has_stopped_with_traceback,
    ),
    "never_fits.yaml": ("is refused before anything starts", was_refused),
}
SHORT = ("fits.yaml", "wrong_profile.yaml")  # what `orc demo` runs without --all
