"""What do out-of-memory errors mean that a script caught and went on after?"""

from __future__ import annotations

from orchestrator.specs.attempt import Evidence, OomReport

LOST_SHARE_MAX = 0.1  # of a rank's steps: a script that skips more than that trains something else


def refuting(evidence: Evidence) -> OomReport | None:
    """The caught error that shows the plan to be too much; None where training went on well after each.

    It did not where no step was completed since, or where more than a tenth of the rank's steps was lost: each error
    counts as a step.
    """
    return next((report for report in evidence.caught if _is_refuting(evidence, report)), None)


def _is_refuting(evidence: Evidence, report: OomReport) -> bool:
    steps_done = _steps_done(evidence, report.rank)
    return steps_done <= report.steps_done or report.count > LOST_SHARE_MAX * (steps_done + report.count)


def losses(evidence: Evidence) -> tuple[int, int] | None:
    """(errors, steps completed) of the rank that caught most; None where none caught any."""
    worst = max(evidence.caught, key=lambda report: report.count, default=None)
    return None if worst is None else (worst.count, _steps_done(evidence, worst.rank))


def _steps_done(evidence: Evidence, rank: int) -> int:
    return max((beat.steps_done for beat in evidence.heartbeats if beat.rank == rank), default=0)
