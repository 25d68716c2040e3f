"""Out-of-memory errors of an attempt: those that ended it, and those that its script caught."""

from __future__ import annotations

from orchestrator.specs.attempt import Evidence, OomReport

LOST_SHARE_MAX = 0.1  # of a rank's steps: a script that skips more than that trains something else


def oom_reports(evidence: Evidence) -> tuple[OomReport, ...]:
    """Return the reports of ranks that ran out of device memory: by the guard, or else by their logs."""
    log_reports = (finding.oom for end in evidence.ranks for finding in end.findings[:1])
    return evidence.ooms or evidence.caught or tuple(report for report in log_reports if report is not None)


def oom_needed_bytes(report: OomReport) -> int:
    """Return the least that the rank would have needed, in allocated bytes."""
    at_least = report.live_bytes + (report.requested_bytes or 0)
    return at_least if report.foreign_bytes else max(at_least, report.capacity_bytes - report.overhead_bytes + 1)


def find_refuting_report(evidence: Evidence) -> OomReport | None:
    """Return the caught error that shows the plan to be too much; None where training went on well after each.

    An error counts where no step was completed since, or where more than a tenth of the rank's steps was lost, each
    error being a step. Errors before the first step are how a script finds a batch that fits.
    """
    return next((report for report in evidence.caught if _is_refuting(evidence, report)), None)


def _is_refuting(evidence: Evidence, report: OomReport) -> bool:
    steps_done = _steps_done(evidence, report.rank)
    if steps_done > report.steps_done == 0:
        return False
    return steps_done <= report.steps_done or report.count > LOST_SHARE_MAX * (steps_done + report.count)


def caught_count(evidence: Evidence) -> int:
    """Return the number of errors that the script caught: all that were raised, but for those that ended a rank."""
    fatal = {report.rank for report in evidence.ooms}
    return sum(report.count - (report.rank in fatal) for report in evidence.caught)


def losses(evidence: Evidence) -> tuple[int, int] | None:
    """Return (errors, steps completed) of the rank that caught most; None where none caught any."""
    worst = max(evidence.caught, key=lambda report: report.count, default=None)
    return None if worst is None else (worst.count, _steps_done(evidence, worst.rank))


def caught_in_words(evidence: Evidence) -> str:
    """Return how many errors the script caught beside the steps that it completed; "" where it caught none."""
    lost = losses(evidence)
    if lost is None:
        return ""
    errors, steps = lost
    return f"the script caught {errors} out-of-memory error{'s' * (errors > 1)} and completed {steps} steps"


def _steps_done(evidence: Evidence, rank: int) -> int:
    return max((beat.steps_done for beat in evidence.heartbeats if beat.rank == rank), default=0)
