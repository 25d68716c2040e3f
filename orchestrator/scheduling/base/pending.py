"""Why a queued job waits, as one of a few codes. `Job.reason` has the full sentence."""

from __future__ import annotations

from orchestrator.specs.job_record import Job
from orchestrator.specs.pending import Pending


def get_pending_code(job: Job, at_s: float) -> Pending:
    """Return the code of the reason for which a queued job waits at `at_s`; DEVICES where no
    decision has set one.
    """
    if job.held_by is not None:
        return Pending.HELD
    if job.waits_for:
        return Pending.DEPENDENCY
    if job.not_before_s > at_s:
        return Pending.BACK_OFF
    return job.pending or Pending.DEVICES
