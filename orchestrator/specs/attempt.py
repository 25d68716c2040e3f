"""Attempts (one launch of a job each), what remains after one ended (Evidence), and its diagnosis (Failure).

Standard library only.
"""

from __future__ import annotations

from typing import NamedTuple

from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import WITHOUT_SECONDS, MemoryEstimate, OwnSettings
from orchestrator.specs.settings import Change
from orchestrator.specs.str_enum import StrEnum


@frozen
class NodeDevices:
    """The devices that an attempt uses on one node, by index."""

    node: str
    devices: tuple[int, ...]


Device = tuple[str, int]  # node name, device index
Placement = tuple[NodeDevices, ...]  # all or nothing; ranks are numbered in this order


def count_devices(placement: Placement) -> int:
    """Return the number of devices on all nodes together."""
    return sum(len(part.devices) for part in placement)


def list_devices_of(placement: Placement) -> tuple[Device, ...]:
    """Return the devices of a placement in the order of their ranks."""
    return tuple((part.node, index) for part in placement for index in part.devices)


def format_placement(placement: Placement) -> str:
    """Return a placement as `node:0,1 other:0`."""
    return " ".join(f"{part.node}:{','.join(map(str, part.devices))}" for part in placement)


VERSIONS = (
    "torch_version",
    "python_version",
    "cuda_version",
    "driver_version",
    "device_model",
)  # of heartbeats
PROBE_STEPS = 2  # in the second step, optimizer states and activations are there together
LEARNED_STEPS = 20  # after which an attempt of a recovered job tells the peak that it measured


class Restart(NamedTuple):
    """The rule by which a job restarts after one kind of failure."""

    budget: str  # field of the job's `retries` that counts this restart
    refutes_plan: bool = False  # the plan itself is to blame and is not tried again
    at_once: bool = False  # restarts without a back-off, since waiting would change nothing


class Shortage(NamedTuple):
    """A lack, such as of disk space, that may end by itself: the job waits without devices, each
    time twice as long.

    The wait uses up no restart budget.
    """

    missing: str  # a noun without article, as in "waits 60 s for space"
    first_s: float = 60.0
    longest_s: float = 1800.0
    total_s: float = 43_200.0  # an end so long after the first one is final


class FailureKind(StrEnum):
    """The reason why an attempt failed, and how its job continues; a kind with neither `restart`
    nor `shortage` ends the job.
    """

    _value_: str
    restart: Restart | None
    shortage: Shortage | None

    def __new__(cls, word: str, goes_on: Restart | Shortage | None = None) -> FailureKind:
        kind = str.__new__(cls, word)
        kind._value_ = word
        kind.restart = goes_on if isinstance(goes_on, Restart) else None
        kind.shortage = goes_on if isinstance(goes_on, Shortage) else None
        return kind

    # A device had too little memory for the plan.
    DEVICE_OOM = "device_oom", Restart(budget="oom", refutes_plan=True, at_once=True)
    # The node had too little memory, or shared memory, for the processes.
    HOST_OOM = "host_oom", Restart(budget="oom", refutes_plan=True, at_once=True)
    # Other processes took the device's memory; the plan is not to blame.
    MEMORY_CONTENTION = "memory_contention", Restart(budget="node")
    NODE_LOST = (
        "node_lost",
        Restart(budget="node"),
    )  # node, device or launcher gone; the plan is not to blame
    PREEMPTED = (
        "preempted",
        Restart(budget="preemption", at_once=True),
    )  # the ranks got a signal from outside
    # the scheduler ended them: the job resumes elsewhere or later, at no cost to a budget
    MOVED = "moved"
    HUNG = "hung", Restart(budget="hang")  # no progress within the job's limits
    STARTUP = (
        "startup",
        Restart(budget="startup"),
    )  # not launched, or ended before the first step without a proven bug
    # Nothing explains the end, and it had trained: `scheduling/failures/verdict.py` says how the
    # job goes on.
    UNKNOWN = "unknown", Restart(budget="unknown")
    # it ran past the cap of its virtual device; what it needs is unknown
    GUARD_ABSENT = "guard_absent"
    DISK_FULL = "disk_full", Shortage(missing="space")  # for checkpoints or logs
    USER_ERROR = "user_error"  # the program itself is wrong
    CANCELLED = "cancelled"  # a user cancelled the job
    PROBED = "probed"  # a probe was ended after it had measured its plan
    TIME_LIMIT = "time_limit"  # the job's `time_limit` was over, so it saved and ended


class Cause(StrEnum):
    """The cause that one log line suggests, before other evidence confirms or refutes it."""

    NOT_OOM = "not_oom"  # resembles an out-of-memory error, but is none
    HANG = "hang"
    DEVICE_OOM = "gpu_oom"
    DEVICE_OOM_SUSPECT = "gpu_oom_suspect"  # only if the device was nearly full
    SHARED_MEMORY = "shm"
    HOST_OOM = "host_oom"
    HOST_OOM_SUSPECT = "host_oom_suspect"  # only if a kernel counter rose
    DISK_FULL = "disk_full"
    HARDWARE = "hardware"  # a device, its link or its driver is broken, lost or busy
    # a launcher or a batch system names a signal, a time limit or a preemption
    PREEMPTED = "preempted"
    NODE_LOST = "node_lost"  # another node or a batch system's own part is gone
    TIMEOUT = "timeout"  # a rank waited in vain for others: examine the other ranks
    PROGRAM = "user_error"  # an error that would recur on any device at any time
    SECONDARY = "secondary"  # a consequence of another rank's failure: examine the other ranks
    RAISED = "raised"  # an exception that no rule knows
    DEFERRED = "deferred"  # an exception that points at the error of another process


class Phase(StrEnum):
    """The phase of the program in which it failed. It decides which settings can lower the memory needed there."""

    STARTUP = "startup"  # imports, data, weights onto the device
    ENCODING = "encoding"  # a model prepares data, before training
    TRAINING = "training"  # forward and backward
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINTING = "checkpointing"


@frozen
class Ending:
    """Features of an unexplained end of an attempt, by which later ends with the same cause are
    recognised.
    """

    signature: str  # `KeyError in train.py:step, forward`, or `exit code 3, startup`
    step: int | None  # optimizer steps completed before it; None: the program reports none
    elapsed_s: float  # since its launch
    is_own: bool  # the program is to blame: a mistake in its code or its arguments
    may_pass: bool  # the operating system or a network refused something that may succeed later


@frozen
class Verdict:
    """How a job continues after an unexplained end or a shortage: whether, when and where it runs
    again.
    """

    row: int  # of the tables in docs/reference/failures-and-retries.md
    wait_s: float | None  # before the next attempt; None: there is none
    budget: str = ""  # the field of the job's `retries` that it uses up; "": none
    # the next attempt waits for other devices, as long as others could hold the job
    elsewhere: bool = False


class Extent(StrEnum):
    """How much hardware a failure concerns: one device or the whole node."""

    DEVICE = "device"
    NODE = "node"


class FaultSubject(StrEnum):
    """The thing that an exception or an exit code names as wrong; it selects the advice to the
    user.
    """

    MODULE = "module"  # a library that is missing, or of another version
    DATA = "data"  # a sample, a file or a checkpoint that is broken
    PATH = "path"  # a file or a folder that is not there
    PERMISSION = "permission"  # a right or a key that is missing
    SERVICE = "service"  # a hub, a network or a port
    DEVICE = "device"  # a card or its driver
    NUMBERS = "numbers"  # the training diverged
    ARGUMENTS = "arguments"
    COMMAND = "command"  # no such program, or it may not be executed
    PERSON = "person"  # somebody at a terminal, whom it asked
    LEFT_EARLY = "left_early"  # exit 0 without its results or its steps


@frozen
class Failure:
    """The diagnosis of a failed attempt: its kind, a sentence for people, and the log lines that show it."""

    kind: FailureKind
    reason: str
    rank: int | None = None
    phase: Phase | None = None  # None where unknown
    excerpt: str = ""
    ending: Ending | None = None  # None where something explains the end
    verdict: Verdict | None = None  # of such an end, or of a shortage
    broken: Extent | None = None  # what the hardware or its driver named as broken
    # nothing explains the end, and memory was nearly full, or had run out in the step that it ended in
    near_limit: bool = False
    about: FaultSubject | None = None  # None where it names nothing but the program


@frozen
class OomReport:
    """An out-of-memory report of one rank, written by the guard (our hook inside its process). Sizes are in bytes."""

    rank: int
    step: int  # optimizer steps completed before it
    phase: str  # startup, forward, backward or optimizer
    requested_bytes: int | None  # None where the message lacks it
    live_bytes: int
    capacity_bytes: int
    foreign_bytes: int = 0  # used on the device by other processes
    overhead_bytes: int = 0  # used by context and communicators, so that no tensor can have them
    # done share of the forward or backward pass, 0 to 1; None: unknown
    pass_done: float | None = None
    injected: bool = False  # by `orc rehearse`: says nothing about the plan
    message: str = ""
    steps_done: int = 0  # optimizer steps completed before it in this attempt
    count: int = 1  # number of such errors of this rank so far


@frozen
class ErrorReport:
    """The exception that ended a rank, as the guard (our hook inside each rank's process) wrote it."""

    rank: int
    step: int
    phase: str
    type: str  # qualified name of the exception
    traceback: str
    # names of the types that it derives from, the nearest first: they say whose fault an unknown type is
    bases: tuple[str, ...] = ()


@frozen
class Heartbeat:
    """The newest progress report of a rank. Each report replaces the one before it."""

    rank: int
    step: int  # optimizer steps completed, from the job's beginning where the engine knows it
    steps_done: int  # optimizer steps completed in this attempt
    step_s: float | None  # median of recent steps
    peak_bytes: int  # highest allocated so far
    phase: str
    at_s: float
    loss: float | None = None
    torch_version: str = ""  # "" before the program has imported it
    python_version: str = ""
    cuda_version: str = ""  # that torch was built for; "" without CUDA
    driver_version: str = ""
    device_model: str = ""  # as its driver names it; "" before the rank has used it
    device_uuid: str = ""  # the same; of a MIG instance its own
    reserved_bytes: int = 0  # that PyTorch's CUDA allocator held, highest so far; 0 without CUDA
    # free, or held by PyTorch's allocator; the least so far; None without CUDA
    allocator_room_bytes: int | None = None
    pid: int = 0
    backwards: int = 0  # backward passes completed in this attempt
    live_bytes: int = 0  # allocated at `at_s`
    forward_bytes: int = 0  # allocated at the end of a forward pass, the most of PROBE_STEPS
    # ranks of the largest process group it joined; 0: none, None: unknown
    group_size: int | None = None
    signal: int = 0  # SIGTERM or SIGINT that reached a handler of the program; 0: none
    # what makes a sample's result depend on the others of its micro-batch, in a few words each
    mixing: tuple[str, ...] = ()
    # optimizer steps before this attempt, as the state of its optimizer counts; None: it has no count
    restored_steps: int | None = None
    step_at_s: float = 0.0  # when the last step was done, in seconds since 1970; 0: none was


@frozen
class Finding:
    """A log line that suggests a cause of failure, with its rank and its position in the log."""

    cause: Cause
    line: str
    rank: int | None = None  # rank that wrote it, where a shared log tells
    log: str = ""  # file name of the log
    offset: int = 0  # of the line in its file, in bytes
    phase: Phase | None = None
    excerpt: str = ""  # the traceback that ends with this line
    oom: OomReport | None = None  # byte counts in the line
    is_exception: bool = False  # it ended its rank as far as the log tells; else a line beside it


@frozen
class RankEnd:
    """The end of one rank's process. `exit_code` is the exit code, or minus the signal number; None
    if unknown.

    Where the process was a launcher (torchrun), `root_rank` is the rank that the launcher saw fail
    first, with its exit code.
    """

    rank: int
    exit_code: int | None
    log_tail: str = ""
    findings: tuple[Finding, ...] = ()  # of its whole log: the decisive one, then others in order
    root_rank: int | None = None
    root_exit_code: int | None = None


@frozen
class Evidence:
    """Raw facts collected at the end of an attempt (one launch of a job). `scheduling.classify` diagnoses them."""

    ranks: tuple[RankEnd, ...] = ()
    ooms: tuple[OomReport, ...] = ()
    caught: tuple[
        OomReport, ...
    ] = ()  # the last out-of-memory error of each rank, even if the script caught it
    errors: tuple[ErrorReport, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    nodes_lost: tuple[str, ...] = ()  # nodes that disappeared, or whose launchers did
    first_ended_rank: int | None = None  # rank that ended first; None: unknown
    host_oom_kills: int = 0  # increase of the kernel's oom_kill counters
    disk_full: bool = False  # no exit code could be written at once: the disk had no room
    hung_for_s: float | None = None  # set if the watchdog ended it
    launch_error: str | None = None  # set if no rank ever ran
    # exec failed: the program or folder is missing, or the node cannot run it
    no_program: bool = False
    stopped: bool = False  # the service ended it (cancel)
    missing_artifacts: tuple[str, ...] = ()  # required by `success`, but absent
    # its log reports success and all artifacts exist, however its processes ended
    finished: bool = False
    lost: tuple[str, ...] = ()  # state that a restarted script did not restore
    checkpoint_step: int | None = None  # newest complete checkpoint
    resumed: bool = False  # its script was given a checkpoint to go on from
    unmatched: tuple[
        str, ...
    ] = ()  # newest files of a script's output, where `resume.checkpoints` matches nothing
    free_before_bytes: tuple[
        int, ...
    ] = ()  # free on each rank's device just before launch; (): unknown
    unwatched: tuple[
        str, ...
    ] = ()  # processes that trained without the guard, and why: no peaks or steps of them
    # mean share of the time in which its devices ran a kernel, 0 to 100, as their driver said; None: unknown
    busy_percent: float | None = None
    virtual: bool = False  # on virtual devices, whose size only the guard enforces
    unread: tuple[
        str, ...
    ] = ()  # what it left that could not be read, or was not evaluated; each a sentence
    collect_error: str | None = None  # nothing that it left could be read: the error


NO_EVIDENCE = Evidence()


@frozen
class Pace:
    """Measured training speed of a running attempt."""

    steps_done: int  # optimizer steps completed in this attempt
    step_s: float  # median of recent steps of the slowest rank
    at_s: float
    peak_bytes: int | None = None  # highest allocated so far of any rank; None before LEARNED_STEPS


class AttemptStatus(StrEnum):
    """Status of an attempt: LAUNCHING, RUNNING, ENDED; STOPPING comes before ENDED where the scheduler stops it."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


class StopCause(StrEnum):
    """Why the scheduler or a person stopped an attempt whose job goes on."""

    GROWTH = "growth"  # it goes on with more devices
    GAIN = "gain"  # others gain more than it loses
    PRIORITY = "priority"
    DEADLINE = "deadline"  # of another job
    GUARANTEE = "guarantee"  # of another job
    OWNER = "owner"  # a team takes back what is its own
    MAINTENANCE = "maintenance"
    WINDOW = "window"  # the hours of its `start_window` end
    FASTER_PLAN = "faster_plan"
    TIME_LIMIT = "time_limit"
    PERSON = "person"


@frozen
class Attempt:
    """An attempt: one launch of a job, with its plan, devices and outcome.

    `number` counts from 1. It is also a fencing token (epoch): only the attempt with the largest
    number may write.
    """

    job_id: str
    number: int
    plan: Plan
    placement: Placement
    device: str  # DeviceSpec.name
    estimate: MemoryEstimate  # as predicted, before correction
    correction: float  # measured / predicted activations of the family, at launch
    step_s: float  # as predicted
    busy_share: float | None = None  # of a step in which a device runs kernels, as predicted
    # free bytes required per device, corrected and with margin; None: measured before
    needed_bytes: int | None = None
    fit_probability: float | None = None  # on its devices; None: memory unknown, or measured before
    change: tuple[Change, ...] = ()  # differences of the plan from the attempt before
    change_reason: str = ""
    # script settings to which an assumed estimate is relative; None: none
    relative_to: OwnSettings | None = None
    # only measures: trains PROBE_STEPS into a separate folder, and is then ended
    probe: bool = False
    status: AttemptStatus = AttemptStatus.LAUNCHING
    moved_for: str = ""  # why the scheduler ended it to migrate the job
    stop_cause: StopCause | None = None  # the code of that; None of versions that kept none
    leaves_by_s: float | None = None  # latest end, if the scheduler asked it to end
    held_placement: Placement = ()  # devices reserved for the next attempt while this one ends
    climbs_to: Plan | None = None  # faster plan for the next attempt, which fits by measurement
    over_limit: bool = False  # ended because the job's time limit was over
    launched_at_s: float
    started_at_s: float | None = None  # when every rank's process ran; None: not yet, or never
    ended_at_s: float | None = None
    pace: Pace | None = None  # last reported speed; None: none reported
    released: bool = False  # its devices report their memory free again
    evidence: Evidence | None = None
    failure: Failure | None = None

    @property
    def predicted_step_s(self) -> float | None:
        """Predicted seconds of a step; None where nothing was known of its time."""
        return None if self.estimate.source in WITHOUT_SECONDS else self.step_s

    def end_or(self, otherwise_s: float) -> float:
        """Return when the attempt ended, in seconds since 1970; `otherwise_s` where it has not
        ended.
        """
        return otherwise_s if self.ended_at_s is None else self.ended_at_s

    @property
    def facts(self) -> Evidence:
        """The evidence that the attempt left at its end; empty evidence before the end."""
        return self.evidence or NO_EVIDENCE

    @property
    def heartbeats(self) -> tuple[Heartbeat, ...]:
        """The last heartbeats of the attempt's ranks, from its evidence; () before it has ended."""
        return self.facts.heartbeats

    @property
    def name(self) -> str:
        return make_attempt_name(self.job_id, self.number)

    @property
    def outcome(self) -> str:
        """The way the attempt ended: `succeeded` or the kind of its failure; before its end its
        status, such as `running`.
        """
        if self.status is not AttemptStatus.ENDED:
            return self.status.value
        return self.failure.kind.value if self.failure else "succeeded"

    @property
    def peak_bytes(self) -> int | None:
        """The maximum allocated peak of any rank; None where no rank reported one, or the attempt
        failed before training.
        """
        if self.facts.unwatched:
            return None
        beats = self.heartbeats
        if self.failure is not None and not self.facts.ooms:
            beats = tuple(
                beat for beat in beats if beat.steps_done > 0 or beat.phase != Phase.STARTUP
            )
        return max((beat.peak_bytes for beat in beats), default=None)

    @property
    def forward_bytes(self) -> int:
        """The maximum over ranks of bytes allocated at the end of a forward pass in the first
        steps; 0 where no rank reported it.
        """
        return max((beat.forward_bytes for beat in self.heartbeats), default=0)

    @property
    def reserved_bytes(self) -> int | None:
        """The maximum over ranks of bytes that PyTorch's CUDA allocator reserved, cache included;
        None without a report.
        """
        return max((beat.reserved_bytes for beat in self.heartbeats), default=0) or None

    @property
    def measured_step_s(self) -> float | None:
        """Measured seconds per optimizer step on the slowest rank; None where no rank reported a
        step time.
        """
        return max((beat.step_s for beat in self.heartbeats if beat.step_s), default=None)

    @property
    def torch_version(self) -> str:
        """The torch version that the ranks reported; "" where none did."""
        return self.versions.get("torch_version", "")

    @property
    def versions(self) -> dict[str, str]:
        """{program or device: version or model} as the ranks reported them; unreported ones are
        left out.
        """
        newest = {
            name: max((getattr(beat, name) for beat in self.heartbeats), default="")
            for name in VERSIONS
        }
        return {name: text for name, text in newest.items() if text}


def make_attempt_name(job_id: str, number: int) -> str:
    """Return the attempt's name, job id and number, such as `gpt2-3`. It is unique in one journal (the event log)."""
    return f"{job_id}-{number}"
