"""Action: something to do, as the scheduler decided."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.attempt import Attempt, attempt_name
from orchestrator.specs.job_record import Job


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start this attempt. The backend answers with Started and Finished; a failed launch is a Finished too."""

    job: Job
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End this attempt: SIGTERM, `grace_s` seconds, SIGKILL. The backend answers with Finished."""

    job_id: str
    number: int
    grace_s: float

    @property
    def name(self) -> str:
        return attempt_name(self.job_id, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Send the present record of this job, and of this attempt of it, to the tracker."""

    job: Job
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Keep the record of a job for good: it has ended, its devices are free, and the state has dropped it."""

    job: Job


Action = Launch | Stop | Record | Archive
