"""Actions: what the scheduler tells the backend or the tracker to do."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.attempt import Attempt, attempt_name
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State


@dataclass(frozen=True, slots=True, kw_only=True)
class Launch:
    """Start an attempt. The backend answers with Started, then Finished; a failed launch gets Finished alone."""

    job: Job
    attempt: Attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Stop:
    """End an attempt: SIGTERM, then SIGKILL after `grace_s` seconds. The backend answers with Finished."""

    job_id: str
    number: int
    grace_s: float

    @property
    def name(self) -> str:
        return attempt_name(self.job_id, self.number)


@dataclass(frozen=True, slots=True, kw_only=True)
class Record:
    """Send the current record of a job, and of `attempt` unless None, to the experiment tracker."""

    job: Job
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """Store the final record of a job for good. It has ended, its devices are free, and the scheduler dropped it."""

    job: Job


Action = Launch | Stop | Record | Archive
Transition = tuple[State, tuple[Action, ...]]  # what an event leads to
