"""Out-of-memory errors of an attempt: fatal ones, and those that its script caught."""

from __future__ import annotations

from orchestrator.specs.attempt import Evidence, OomReport
from orchestrator.specs.job_record import Job

LOST_SHARE_MAX = 0.1  # of a rank's steps: a script that skips more than that trains something else


def list_oom_reports(evidence: Evidence) -> tuple[OomReport, ...]:
    """Return the ranks' out-of-memory reports: fatal ones, else caught ones, else those read from
    logs.
    """
    log_reports = (finding.oom for end in evidence.ranks for finding in end.findings[:1])
    return (
        evidence.ooms
        or evidence.caught
        or tuple(report for report in log_reports if report is not None)
    )


def oom_needed_bytes(report: OomReport) -> int:
    """Return the least allocated bytes with which the reported allocation would have succeeded."""
    at_least = report.live_bytes + (report.requested_bytes or 0)
    return (
        at_least
        if report.foreign_bytes
        else max(at_least, report.capacity_bytes - report.overhead_bytes + 1)
    )


def min_loaded_bytes(job: Job, device: str) -> int | None:
    """Return the least bytes that the script needs before its first forward pass; None where no
    attempt showed it.

    An attempt shows it by running out of memory at startup with micro-batch 1, since no batch
    lowers weights and states.
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
    """Return the first caught error that shows that the plan is too large; None where training
    recovered from all.

    An error shows it where no step was completed after it, or where the rank lost more than a tenth
    of its steps, at one step per error. Errors before the first step do not count: scripts find a
    fitting batch that way.
    """
    return next((report for report in evidence.caught if _is_refuting(evidence, report)), None)


def _is_refuting(evidence: Evidence, report: OomReport) -> bool:
    steps_done = _steps_done(evidence, report.rank)
    if steps_done > report.steps_done == 0:
        return False
    return steps_done <= report.steps_done or report.count > LOST_SHARE_MAX * (
        steps_done + report.count
    )


def count_caught_errors(evidence: Evidence) -> int:
    """Return how many out-of-memory errors the script caught and survived."""
    fatal = {report.rank for report in evidence.ooms}
    return sum(report.count - (report.rank in fatal) for report in evidence.caught)


def count_errors_and_steps(evidence: Evidence) -> tuple[int, int] | None:
    """Return (errors, completed steps) of the rank that caught most errors; None where none caught
    any.
    """
    worst = max(evidence.caught, key=lambda report: report.count, default=None)
    return None if worst is None else (worst.count, _steps_done(evidence, worst.rank))


def describe_caught_errors(evidence: Evidence) -> str:
    """Return text with the number of caught errors and of completed steps; "" where none was
    caught.
    """
    lost = count_errors_and_steps(evidence)
    if lost is None:
        return ""
    errors, steps = lost
    return f"the script caught {errors} out-of-memory error{'s' * (errors > 1)} and completed {steps} steps"


def _steps_done(evidence: Evidence, rank: int) -> int:
    return max((beat.steps_done for beat in evidence.heartbeats if beat.rank == rank), default=0)
