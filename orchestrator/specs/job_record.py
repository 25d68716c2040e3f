"""Job: a submitted job with its status, its attempts and its dependencies."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan


class JobStatus(StrEnum):
    """Status of a job: QUEUED and RUNNING alternate, then one of the four final values."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"  # no plan can fit: nothing was started
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """A submitted job with its status, its attempts (launches) and its dependencies."""

    id: str
    spec: JobSpec
    order: int  # position of its submission: breaks ties of priority
    submitted_at_s: float
    status: JobStatus = JobStatus.QUEUED
    reason: str = ""  # why it waits, or why it ended
    not_before_s: float = 0.0  # back-off after a failure that was not its own
    array: str | None = None  # id of the first job of its array
    waits_for: tuple[Dependency, ...] = ()  # of those that it comes after, the ones that have not ended
    deadline_s: float | None = None  # by when it should be done
    starts_by_s: float | None = None  # from when on it has the speed that it is promised; None: it is promised none
    cancelling: bool = False
    held_by: str | None = None  # the user who holds it: it does not start until it is released
    retry_of: str | None = None  # id of the ended job that it retries
    continues_from: str | None = None  # id of the job with whose newest checkpoint it begins; None: from step 0
    continues_step: int = 0  # of that checkpoint
    asks: str = ""  # what a person has to allow before it goes on; meanwhile it waits for no devices
    asks_until_s: float = 0.0  # when it fails without an answer
    cancel_reason: str = ""  # of the service's own; "" where somebody asked
    attempts: tuple[Attempt, ...] = ()
    refuted: frozenset[Plan] = frozenset()  # ran out of memory: never tried again
    fault: Fault | None = None
    unreadable: str = ""  # why its row could not be read: it stands in for a job that only an operator can end

    @property
    def key(self) -> str:
        """The job's name across home folders. Ids alone start anew in each home."""
        return f"{self.id}@{self.submitted_at_s!r}"

    @property
    def user(self) -> str:
        """The owner of the job; "" where none was named."""
        return self.spec.user or ""

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None
