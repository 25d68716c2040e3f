"""Job: a submitted job with its status, attempts and dependencies."""

from __future__ import annotations

from enum import StrEnum

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.fault import Fault
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.pending import Facts, Pending
from orchestrator.specs.plan import Plan


class JobStatus(StrEnum):
    """Status of a job: QUEUED and RUNNING alternate, then one of the four final values."""

    QUEUED = "queued"
    RUNNING = "running"
    SUCCEEDED = "succeeded"
    FAILED = "failed"
    REFUSED = "refused"  # no plan can fit: no attempt was made
    CANCELLED = "cancelled"

    @property
    def ended(self) -> bool:
        return self not in (JobStatus.QUEUED, JobStatus.RUNNING)


@frozen
class Job:
    """A submitted job with its status, its attempts (launches) and its dependencies."""

    id: str
    spec: JobSpec
    order: int  # number of its submission, which breaks ties of priority
    submitted_at_s: float
    status: JobStatus = JobStatus.QUEUED
    reason: str = ""  # why it ended, or what its last event said; "": as `pending` says
    pending: Pending | None = None  # why it waits, as the last decision on it had it
    facts: Facts = ()  # of that wait
    not_before_s: float = 0.0  # end of the back-off after a failure
    array: str | None = None  # id of the first job of its array
    waits_for: tuple[Dependency, ...] = ()  # unfinished dependencies
    deadline_s: float | None = None  # when it should be done, in seconds since 1970
    starts_by_s: float | None = None  # time from which its promised speed is due; None: no promise
    cancelling: bool = False
    held_by: str | None = None  # user who holds it from starting until it is released
    retry_of: str | None = None  # id of the ended job that it retries
    # id of the job whose newest checkpoint it starts from; None: step 0
    continues_from: str | None = None
    continues_step: int = 0  # of that checkpoint
    asks: str = ""  # question to a person; until the answer it waits for no devices
    answer: Facts = ()  # what would let it go on, as the API takes it
    asks_until_s: float = 0.0  # when it fails without an answer
    cancel_reason: str = ""  # the service's reason for cancelling; "" if a person cancelled
    attempts: tuple[Attempt, ...] = ()
    refuted: frozenset[Plan] = frozenset()  # ran out of memory: never tried again
    fault: Fault | None = None
    # why its row could not be read; only an operator can end such a placeholder
    unreadable: str = ""

    @property
    def key(self) -> str:
        """The job's name across home folders; its id alone counts from 1 in each home."""
        return f"{self.id}@{self.submitted_at_s!r}"

    @property
    def user(self) -> str:
        """The owner of the job; "" where none was given."""
        return self.spec.user or ""

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None

    @property
    def trained(self) -> list[Attempt]:
        """The attempts that were no probes, earliest first."""
        return [attempt for attempt in self.attempts if not attempt.probe]

    @property
    def ran_s(self) -> float:
        """Seconds of all ended attempts together."""
        return sum(
            attempt.end_or(attempt.launched_at_s) - attempt.launched_at_s
            for attempt in self.attempts
        )
