"""State: everything on which the scheduler decides, rebuilt from the journal of events."""

from __future__ import annotations

from dataclasses import field

from pydantic import InstanceOf

from orchestrator.specs.attempt import Placement
from orchestrator.specs.cluster import Node
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.observation import Observation
from orchestrator.specs.policy import UNSHARED, PolicySpec
from orchestrator.specs.suspension import Suspension, UnexplainedEnd


@frozen
class Reservation:
    """Devices reserved for a waiting job, from its expected start to its expected end."""

    job_id: str
    start_s: float
    end_s: float
    placement: Placement


@frozen
class Demand:
    """Device-seconds of recently submitted jobs by the jobs' duration, decayed to `at_s`."""

    since_s: float  # time of the first submission counted
    at_s: float
    device_s: tuple[float, ...]  # by job length: 1 to 2 seconds, 2 to 4, 4 to 8 ...


@frozen
class Usage:
    """Device-seconds of a user's finished attempts, decayed to `at_s`."""

    user: str
    device_s: float
    at_s: float


@frozen
class RunLength:
    """How long an ended attempt took; unknown durations of other jobs are predicted from these."""

    family: str
    device: str  # DeviceSpec.name
    probe: bool
    # of a probe, launch included, or of a training with all its attempts; None: it did not end well
    seconds: float | None
    step_ratio: float | None  # measured / predicted seconds of a step, where no speed is predicted


@frozen
class Credit:
    """Device-seconds that may be spent, as of a time; negative in debt. See
    scheduling/base/credit.py.
    """

    fund: str  # name of a Fund
    device_s: float
    at_s: float


@frozen
class UnreadableDevice:
    """A device that the driver cannot read, and since when, in seconds since 1970."""

    node: str
    device: int
    since_s: float


@frozen
class State:
    """Everything that a scheduler decision reads. It is immutable: each event makes a new state.

    A job that has ended and released all its devices is removed (see Archive).
    """

    jobs: InstanceOf[Jobs] = field(default_factory=Jobs)
    submitted: int = 0  # number of jobs ever submitted
    nodes: tuple[Node, ...] = ()  # alive
    declared: tuple[Node, ...] = ()  # nodes of the cluster file, live or not
    observations: tuple[Observation, ...] = ()
    runs: tuple[RunLength, ...] = ()  # newest, oldest first
    reservations: tuple[Reservation, ...] = ()  # reservations of the last decision round, in order
    # when somebody has left room for shorter jobs long enough, as of the last decision
    reevaluate_at_s: float | None = None
    demand: Demand | None = None  # None: no submission since the cluster was first reported
    drained: tuple[str, ...] = ()  # names of drained nodes, sorted
    policy: PolicySpec = UNSHARED
    usage: tuple[Usage, ...] = ()  # by user, sorted
    credits: tuple[Credit, ...] = ()  # by fund; one that is not there is full
    ends: tuple[UnexplainedEnd, ...] = ()  # unexplained ends of the last day, oldest first
    suspensions: tuple[Suspension, ...] = ()  # including past ones, until an attempt trains there
    unreadable: tuple[
        UnreadableDevice, ...
    ] = ()  # also of nodes that went away so, as long as they are declared
    at_s: float = 0.0

    def __post_init__(self) -> None:
        if not isinstance(self.jobs, Jobs):  # any mapping is welcome
            object.__setattr__(self, "jobs", Jobs(self.jobs.values()))

    @property
    def live_jobs(self) -> list[Job]:
        """Jobs that have not ended, in the order of submission."""
        return [job for job in self.jobs.values() if not job.status.ended]
