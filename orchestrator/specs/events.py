"""Events: what has happened to a job, an attempt (one launch of a job) or a node, as the journal stores it."""

from __future__ import annotations

from typing import Literal

from orchestrator.specs.attempt import Evidence, Pace
from orchestrator.specs.cluster import Node
from orchestrator.specs.fault import Fault
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.observation import Observation
from orchestrator.specs.policy import UNSHARED, PolicySpec


@frozen
class RequestKey:
    """Idempotency key of a submission: a repeated one is recognised by it."""

    name: str  # unique per sender
    digest: str  # SHA-256 of the request


@frozen
class Submitted:
    job_id: str
    order: int  # number among all submissions ever: 1, 2, 3 ...
    spec: JobSpec
    at_s: float
    fault: Fault | None = None
    array: str | None = None  # id of the first job of its array
    satisfied: tuple[str, ...] = ()  # ids of dependencies that had already ended as required
    request: RequestKey | None = None  # idempotency key of its submission
    retry_of: str | None = None  # id of the ended job that is submitted again
    continues_from: str | None = None  # id of the job whose newest checkpoint it starts from
    continues_step: int = 0  # of that checkpoint
    more: bool = (
        False  # another submission follows in the same commit: both are decided upon with it
    )
    unreadable: str = ""  # why its row could not be read: only the id is known, and it never starts
    type: Literal["submitted"] = "submitted"


@frozen
class CancelRequested:
    job_id: str
    reason: str = ""  # of the service's own; "" where somebody asked
    at_s: float
    type: Literal["cancel_requested"] = "cancel_requested"


@frozen
class RetryRequested:
    """A person released a job that waited for an answer, with the changes in `spec`."""

    job_id: str
    spec: JobSpec  # with that
    at_s: float
    type: Literal["retry_requested"] = "retry_requested"


@frozen
class UpdateRequested:
    """A person changed an unfinished job: its hold, priority, deadline or time limit."""

    job_id: str
    spec: JobSpec  # with these
    # the user who holds it: a running attempt is asked to save and end; None: nobody
    held_by: str | None = None
    at_s: float
    type: Literal["update_requested"] = "update_requested"


@frozen
class DrainRequested:
    """A person drained a node: it takes no new attempts. With `undo` it takes them again."""

    node: str
    undo: bool = False
    at_s: float
    type: Literal["drain_requested"] = "drain_requested"


@frozen
class NodesSeen:
    """The live nodes of the whole cluster; a node that is missing here is gone.

    `declared` are the nodes of the cluster file, and `policy` is its sharing policy.
    """

    nodes: tuple[Node, ...]
    declared: tuple[Node, ...] = ()
    policy: PolicySpec = UNSHARED
    at_s: float
    type: Literal["nodes_seen"] = "nodes_seen"


@frozen
class Started:
    """Every rank of an attempt has a running process."""

    job_id: str
    number: int
    at_s: float
    type: Literal["started"] = "started"


@frozen
class PaceReported:
    """A running attempt reported a new training speed."""

    job_id: str
    number: int
    pace: Pace
    at_s: float
    type: Literal["paced"] = "paced"


@frozen
class Finished:
    """Every process of an attempt has ended."""

    job_id: str
    number: int
    evidence: Evidence
    at_s: float
    type: Literal["finished"] = "finished"


@frozen
class Released:
    """The devices of an ended attempt report their memory free again."""

    job_id: str
    number: int
    at_s: float
    type: Literal["released"] = "released"


@frozen
class Observed:
    """Observations (predicted and measured outcomes) were imported from elsewhere, or from an earlier home folder."""

    observations: tuple[Observation, ...]
    at_s: float
    type: Literal["observed"] = "observed"


@frozen
class TimerFired:
    """The time of `Scheduler.wake_at_s` has come."""

    at_s: float
    type: Literal["woke"] = "woke"


Event = (
    Submitted
    | CancelRequested
    | RetryRequested
    | UpdateRequested
    | DrainRequested
    | NodesSeen
    | Started
    | PaceReported
    | Finished
    | Released
    | Observed
    | TimerFired
)
