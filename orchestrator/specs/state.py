"""State: everything known. Events: what happened. Actions: what to do."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import StrEnum
from typing import Literal

from pydantic import InstanceOf

from orchestrator.specs.attempt import Attempt, Evidence, Pace, Placement, attempt_name
from orchestrator.specs.cluster import Node
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import Dependency, JobSpec
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.plan import Plan
from orchestrator.specs.policy import UNSHARED, PolicySpec
from orchestrator.specs.profile import MomentBytes, OwnSettings


class JobStatus(StrEnum):
    """QUEUED <-> RUNNING, then one of the four ends; an end is final."""

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
    """One job and everything that has become of it."""

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
    attempts: tuple[Attempt, ...] = ()
    refuted: frozenset[Plan] = frozenset()  # ran out of memory: never tried again
    fault: Fault | None = None

    @property
    def key(self) -> str:
        """Its name in every home: ids alone begin anew in each."""
        return f"{self.id}@{self.submitted_at_s!r}"

    @property
    def user(self) -> str:
        """Whose job it is; "" where nobody said."""
        return self.spec.user or ""

    @property
    def last(self) -> Attempt | None:
        return self.attempts[-1] if self.attempts else None


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """What was predicted of one attempt, and what reality answered."""

    job: str  # Job.key
    number: int  # of the attempt
    device: str  # DeviceSpec.name
    family: str
    torch_version: str  # that it ran under; "" where no rank told
    plan: Plan
    moments: tuple[MomentBytes, ...]  # as predicted, before any correction: those that can become the worst
    predicted_bytes: int  # allocated, before any correction
    measured_bytes: int  # allocated; where it ran out of memory: what it needed at least
    ran_out: bool
    step_ratio: float | None  # measured / predicted seconds of a step, where both are known
    at_s: float  # when it ended
    probe: bool = False  # nothing was predicted: it tells what a micro-batch needs
    phase: str = ""  # where it ran out of memory, in the guard's words; "" elsewhere, or where nobody told
    pass_done: float | None = None  # share of that forward or backward pass that was done; None: unknown
    steps_done: int = 0  # that it completed in this attempt before it ran out of memory
    steps_left: int | None = None  # of the training at that point; None: unknown, or it did not run out
    finished: bool = False  # it ended the training, and did at least half of it
    overhead_bytes: int | None = None  # that its worst device held beside PyTorch's allocator; None: not told
    relative_to: OwnSettings | None = None  # as of its attempt


@dataclass(frozen=True, slots=True, kw_only=True)
class Reservation:
    """Devices that are promised to a waiting job, for as long as it is expected to need them."""

    job_id: str
    start_s: float
    end_s: float
    placement: Placement


@dataclass(frozen=True, slots=True, kw_only=True)
class Demand:
    """What was asked for lately: device-seconds of submitted jobs by their length, as they counted at a time."""

    since_s: float  # of the first of them
    at_s: float
    device_s: tuple[float, ...]  # of jobs of 1 to 2 seconds, of 2 to 4, of 4 to 8 ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Usage:
    """What attempts of a user that gave their devices back had used, as it counted at a time."""

    user: str
    device_s: float
    at_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class State:
    """Everything that a decision may need. Replaced, never changed.

    A job that has ended and given back all its devices is no part of it any more: see Archive.
    """

    jobs: InstanceOf[Jobs] = field(default_factory=Jobs)
    submitted: int = 0  # jobs ever submitted: the order of the newest
    nodes: tuple[Node, ...] = ()  # alive
    declared: tuple[Node, ...] = ()  # promised by the cluster file, there or not
    observations: tuple[Observation, ...] = ()
    reservations: tuple[Reservation, ...] = ()  # of whom somebody might have passed at the last decision, in order
    reevaluate_at_s: float | None = (
        None  # when somebody has left room for shorter jobs long enough, as of the last decision
    )
    demand: Demand | None = None  # None: nothing was submitted since the cluster was seen
    drained: tuple[str, ...] = ()  # nodes that take nothing new, in the order of their names
    policy: PolicySpec = UNSHARED
    usage: tuple[Usage, ...] = ()  # of each user, by name
    at_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, Jobs):  # any mapping is welcome
            object.__setattr__(self, "jobs", Jobs(self.jobs.values()))


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    job_id: str
    order: int  # among all submissions ever: 1, 2, 3 ...
    spec: JobSpec
    at_s: float
    fault: Fault | None = None
    array: str | None = None  # id of the first job of its array
    satisfied: tuple[str, ...] = ()  # ids of jobs that it comes after, and that have ended before as it wants
    type: Literal["submitted"] = "submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    job_id: str
    at_s: float
    type: Literal["cancel_requested"] = "cancel_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """This node shall take nothing new; or again what comes, with `undo`."""

    node: str
    undo: bool = False
    at_s: float
    type: Literal["drain_requested"] = "drain_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class NodesSeen:
    """The whole live cluster; a node that is not in it is gone.

    `declared` is what the cluster file promises, `policy` how it says that the cluster is shared.
    """

    nodes: tuple[Node, ...]
    declared: tuple[Node, ...] = ()
    policy: PolicySpec = UNSHARED
    at_s: float
    type: Literal["nodes_seen"] = "nodes_seen"


@dataclass(frozen=True, slots=True, kw_only=True)
class Started:
    """Every rank's process of an attempt runs."""

    job_id: str
    number: int
    at_s: float
    type: Literal["started"] = "started"


@dataclass(frozen=True, slots=True, kw_only=True)
class PaceReported:
    """A running attempt trains at another speed than was known."""

    job_id: str
    number: int
    pace: Pace
    at_s: float
    type: Literal["paced"] = "paced"


@dataclass(frozen=True, slots=True, kw_only=True)
class Finished:
    """Every process of an attempt is gone."""

    job_id: str
    number: int
    evidence: Evidence
    at_s: float
    type: Literal["finished"] = "finished"


@dataclass(frozen=True, slots=True, kw_only=True)
class Released:
    """The devices of an ended attempt report their memory free again."""

    job_id: str
    number: int
    at_s: float
    type: Literal["released"] = "released"


@dataclass(frozen=True, slots=True, kw_only=True)
class Observed:
    """Outcomes that were measured elsewhere, or in an earlier life of this home."""

    observations: tuple[Observation, ...]
    at_s: float
    type: Literal["observed"] = "observed"


@dataclass(frozen=True, slots=True, kw_only=True)
class TimerFired:
    """The time that `Scheduler.wake_at_s` named has come."""

    at_s: float
    type: Literal["woke"] = "woke"


Event = (
    Submitted
    | CancelRequested
    | DrainRequested
    | NodesSeen
    | Started
    | PaceReported
    | Finished
    | Released
    | Observed
    | TimerFired
)


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
    """Tell the tracker how this job, and this attempt of it, stand now."""

    job: Job
    attempt: Attempt | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Archive:
    """The job has ended, its devices are free, and the state has forgotten it: keep how it stands, for good."""

    job: Job


Action = Launch | Stop | Record | Archive
