"""The edf policy: earliest deadline first (Liu and Layland 1973, JACM 20:46) with EASY backfill."""

from __future__ import annotations

from math import inf

from benchmarks.peers.easy import EasyPolicy
from orchestrator.specs.job_record import Job


class EdfPolicy(EasyPolicy):
    """Jobs start by deadline; jobs without one come last. Nothing is preempted for a deadline."""

    def rank(self, job: Job) -> float:
        """Return the deadline in seconds since 1970; infinity where the job has none."""
        return inf if job.deadline_s is None else job.deadline_s
