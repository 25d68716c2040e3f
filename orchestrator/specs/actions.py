"""Actions: what the scheduler tells the backend or the tracker to do."""

from __future__ import annotations

from orchestrator.specs.attempt import Attempt, make_attempt_name
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State


@frozen
class Launch:
    """Start an attempt. The backend answers with Started, then Finished; a failed launch gets Finished alone."""

    job: Job
    attempt: Attempt


@frozen
class Stop:
    """End an attempt: SIGTERM, then SIGKILL after `grace_s` seconds. The backend answers with Finished."""

    job_id: str
    number: int
    grace_s: float

    @property
    def name(self) -> str:
        return make_attempt_name(self.job_id, self.number)


@frozen
class Record:
    """Send the current record of a job to the experiment tracker, and that of `attempt` unless
    None.
    """

    job: Job
    attempt: Attempt | None = None


@frozen
class Archive:
    """Store the final record of a job for good: the job has ended, its devices are free, and the
    scheduler dropped it.
    """

    job: Job


Action = Launch | Stop | Record | Archive
Transition = tuple[State, tuple[Action, ...]]  # what an event leads to
