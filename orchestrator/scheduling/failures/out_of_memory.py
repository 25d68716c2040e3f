"""Out-of-memory errors of an attempt: fatal ones, and those that its script caught."""

from __future__ import annotations

from orchestrator.specs.attempt import Evidence, OomReport
from orchestrator.specs.job_record import Job

LOST_SHARE_MAX = 0.1  # of a rank's steps: a script that skips more than that trains something else


def oom_reports(evidence: Evidence) -> tuple[OomReport, ...]:
    """Return the out-of-memory reports of ranks: from the guard, or else from their logs."""
    log_reports = (finding.oom for end in evidence.ranks for finding in end.findings[:1])
    return (
        evidence.ooms
        or evidence.caught
        or tuple(report for report in log_reports if report is not None)
    )


def oom_needed_bytes(report: OomReport) -> int:
    """Return the least allocated bytes that the rank would have needed."""
    at_least = report.live_bytes + (report.requested_bytes or 0)
    return (
        at_least
        if report.foreign_bytes
        else max(at_least, report.capacity_bytes - report.overhead_bytes + 1)
    )


def loaded_bytes(job: Job, device: str) -> int | None:
    """Return the least bytes that a script loads before its first forward pass; None where no attempt showed it.

    An attempt shows it that ran out of memory there at micro-batch 1: no batch lowers weights and states.
    """
    needed = list[int]()
    for attempt in job.attempts if job.spec.is_script else ():
        if attempt.device != device or attempt.plan.micro_batch_size > 1:
            continue
        for report in attempt.facts.ooms:
            if report.phase == "startup":
                needed.append(oom_needed_bytes(report))
    return max(needed, default=None)


def find_refuting_report(evidence: Evidence) -> OomReport | None:
    """Return the caught error that proves the plan too large; None where training went on well after each.

    An error counts where no step was completed since, or where the rank lost more than a tenth of its steps, at one
    step per error. Errors before the first step are how a script finds a fitting batch.
    """
    return next((report for report in evidence.caught if _is_refuting(evidence, report)), None)


def _is_refuting(evidence: Evidence, report: OomReport) -> bool:
    steps_done = _steps_done(evidence, report.rank)
    if steps_done > report.steps_done == 0:
        return False
    return steps_done <= report.steps_done or report.count > LOST_SHARE_MAX * (
        steps_done + report.count
    )


def caught_count(evidence: Evidence) -> int:
    """Return how many out-of-memory errors the script caught, without those that ended a rank."""
    fatal = {report.rank for report in evidence.ooms}
    return sum(report.count - (report.rank in fatal) for report in evidence.caught)


def losses(evidence: Evidence) -> tuple[int, int] | None:
    """Return (errors, completed steps) of the rank that caught most errors; None where none caught any."""
    worst = max(evidence.caught, key=lambda report: report.count, default=None)
    return None if worst is None else (worst.count, _steps_done(evidence, worst.rank))


def caught_in_words(evidence: Evidence) -> str:
    """Return text on how many errors the script caught, and in how many steps; "" where it caught none."""
    lost = losses(evidence)
    if lost is None:
        return ""
    errors, steps = lost
    return f"the script caught {errors} out-of-memory error{'s' * (errors > 1)} and completed {steps} steps"


def _steps_done(evidence: Evidence, rank: int) -> int:
    return max((beat.steps_done for beat in evidence.heartbeats if beat.rank == rank), default=0)
