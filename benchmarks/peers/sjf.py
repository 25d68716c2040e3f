"""The sjf policy: shortest job first (Smith 1956, Naval Research Logistics Quarterly 3:59) with EASY backfill."""

from __future__ import annotations

from benchmarks.peers.easy import EasyPolicy
from orchestrator.specs.job_record import Job


class SjfPolicy(EasyPolicy):
    """Jobs start by remaining run time, shortest first. Long jobs may starve while short ones come."""

    def rank(self, job: Job) -> float:
        """Return the job's remaining seconds of work, launch included."""
        return self._index.options.find_remaining_work(job).duration_s
