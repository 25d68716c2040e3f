"""Out-of-memory errors of an attempt: fatal ones, and those that its script caught."""

from __future__ import annotations

from orchestrator.specs.attempt import Evidence, OomReport
from orchestrator.specs.job_record import Job

LOST_SHARE_MAX = 0.1  # of a rank's steps: a script that skips more than that trains something else


def list_best_oom_reports(evidence: Evidence) -> tuple[OomReport, ...]:
    """Return the ranks' out-of-memory reports: the fatal ones; if none, the caught ones; if none,
    those read from logs.
    """
    log_reports = (finding.oom for end in evidence.ranks for finding in end.findings[:1])
    return (
        evidence.ooms
        or evidence.caught
        or tuple(report for report in log_reports if report is not None)
    )


def compute_oom_needed_bytes(report: OomReport) -> int:
    """Return a lower bound of the allocated bytes that the reported allocation needed in order to
    succeed.
    """
    at_least = report.live_bytes + (report.requested_bytes or 0)
    return (
        at_least
        if report.foreign_bytes
        else max(at_least, report.capacity_bytes - report.overhead_bytes + 1)
    )


def find_min_startup_bytes(job: Job, device_kind: str) -> int | None:
    """Return a lower bound of the bytes that the script needs before its first forward pass.

    Attempts show it that ran out of memory at startup with micro-batch 1, since no batch lowers
    weights and states. None where no attempt on this kind of device did.
    """
    needed = list[int]()
    for attempt in job.attempts if job.spec.is_script else ():
        if attempt.device != device_kind or attempt.plan.micro_batch_size > 1:
            continue
        for report in attempt.facts.ooms:
            if report.phase == "startup":
                needed.append(compute_oom_needed_bytes(report))
    return max(needed, default=None)


def find_refuting_report(evidence: Evidence) -> OomReport | None:
    """Return the first caught out-of-memory error that shows that the plan is too large; None if no
    error does.

    An error shows it where no step was completed after it, or where the rank lost more than a tenth
    of its steps, at one step per error. Errors before the first step do not count: scripts find a
    fitting batch that way.
    """
    return next(
        (report for report in evidence.caught if _shows_plan_too_large(evidence, report)), None
    )


def _shows_plan_too_large(evidence: Evidence, report: OomReport) -> bool:
    """Return whether this caught out-of-memory error shows that the plan is too large, as
    `find_refuting_report` says.
    """
    steps_done = _count_steps_of_rank(evidence, report.rank)
    if steps_done > report.steps_done == 0:
        return False
    return steps_done <= report.steps_done or report.count > LOST_SHARE_MAX * (
        steps_done + report.count
    )


def count_caught_errors(evidence: Evidence) -> int:
    """Return how many out-of-memory errors the script caught and survived, in all ranks together."""
    fatal = {report.rank for report in evidence.ooms}
    return sum(report.count - (report.rank in fatal) for report in evidence.caught)


def count_caught_errors_and_steps(evidence: Evidence) -> tuple[int, int] | None:
    """Return (caught out-of-memory errors, completed steps) of the rank with most errors; None
    where none caught any.
    """
    worst = max(evidence.caught, key=lambda report: report.count, default=None)
    return None if worst is None else (worst.count, _count_steps_of_rank(evidence, worst.rank))


def describe_caught_errors(evidence: Evidence) -> str:
    """Return text with the numbers of caught out-of-memory errors and of completed steps; "" where
    none was caught.
    """
    lost = count_caught_errors_and_steps(evidence)
    if lost is None:
        return ""
    errors, steps = lost
    return f"the script caught {errors} out-of-memory error{'s' * (errors > 1)} and completed {steps} steps"


def _count_steps_of_rank(evidence: Evidence, rank: int) -> int:
    """Return how many optimizer steps this rank has completed; 0 without a heartbeat."""
    return max((beat.steps_done for beat in evidence.heartbeats if beat.rank == rank), default=0)
