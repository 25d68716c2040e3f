"""Event: something that has happened to a job, an attempt or a node."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from orchestrator.specs.attempt import Evidence, Pace
from orchestrator.specs.cluster import Node
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.observation import Observation
from orchestrator.specs.policy import UNSHARED, PolicySpec


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestKey:
    """The name of a submission, by which a repeated one is recognised."""

    name: str  # unique among those of one sender
    digest: str  # SHA-256 of what was asked


@dataclass(frozen=True, slots=True, kw_only=True)
class Submitted:
    job_id: str
    order: int  # among all submissions ever: 1, 2, 3 ...
    spec: JobSpec
    at_s: float
    fault: Fault | None = None
    array: str | None = None  # id of the first job of its array
    satisfied: tuple[str, ...] = ()  # ids of jobs that it comes after, and that have ended before as it wants
    request: RequestKey | None = None  # what its submission was sent under
    retry_of: str | None = None  # id of the ended job that is submitted again
    continues_from: str | None = None  # id of the job with whose newest checkpoint it begins
    continues_step: int = 0  # of that checkpoint
    unreadable: str = ""  # why its row could not be read: the job is known by its id alone, and never starts
    type: Literal["submitted"] = "submitted"


@dataclass(frozen=True, slots=True, kw_only=True)
class CancelRequested:
    job_id: str
    reason: str = ""  # of the service's own; "" where somebody asked
    at_s: float
    type: Literal["cancel_requested"] = "cancel_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class RetryRequested:
    """A job that waits for an answer goes on with what a person allows."""

    job_id: str
    spec: JobSpec  # with that
    at_s: float
    type: Literal["retry_requested"] = "retry_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class UpdateRequested:
    """A job that has not ended is held, or not, and has another priority, deadline or time limit from now on."""

    job_id: str
    spec: JobSpec  # with these
    held_by: str | None = None  # the user who holds it: a running attempt is asked to save and end; None: nobody
    at_s: float
    type: Literal["update_requested"] = "update_requested"


@dataclass(frozen=True, slots=True, kw_only=True)
class DrainRequested:
    """A node shall take nothing new from now on; with `undo` it takes attempts again."""

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
    """A running attempt trains at another speed than the last one reported."""

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
