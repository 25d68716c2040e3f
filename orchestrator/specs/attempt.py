"""Attempts, what is left of them (Evidence), and what that means (Failure). Standard library only."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, OwnSettings
from orchestrator.specs.settings import Change
from orchestrator.specs.str_enum import StrEnum


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeDevices:
    """Devices of one node, by index."""

    node: str
    devices: tuple[int, ...]


Placement = tuple[NodeDevices, ...]  # all or nothing; ranks are numbered in this order


VERSIONS = ("torch_version", "python_version", "cuda_version", "driver_version", "device_model")  # of heartbeats
PROBE_STEPS = 2  # in the second step, optimizer states and activations are there together
LEARNED_STEPS = 20  # after which an attempt of a recovered job tells the peak that it measured


class Restart(NamedTuple):
    """How a job goes on after a failure."""

    budget: str  # the field of the job's `retries` that it uses up
    refutes_plan: bool = False  # the plan itself is to blame and is not tried again
    at_once: bool = False  # waiting would change nothing; else the restart backs off


class FailureKind(StrEnum):
    """Why an attempt did not finish, and how its job goes on. A kind without `restart` is final."""

    _value_: str
    restart: Restart | None

    def __new__(cls, word: str, restart: Restart | None = None) -> FailureKind:
        kind = str.__new__(cls, word)
        kind._value_, kind.restart = word, restart
        return kind

    # A device had too little memory for the plan.
    DEVICE_OOM = "device_oom", Restart(budget="oom", refutes_plan=True, at_once=True)
    # The node had too little memory, or shared memory, for the processes.
    HOST_OOM = "host_oom", Restart(budget="oom", refutes_plan=True, at_once=True)
    # Other processes took the device's memory; the plan is not to blame.
    MEMORY_CONTENTION = "memory_contention", Restart(budget="node")
    NODE_LOST = "node_lost", Restart(budget="node")  # node, device or launcher gone; the plan is not to blame
    PREEMPTED = "preempted", Restart(budget="preemption", at_once=True)  # the ranks were asked to end from outside
    MOVED = "moved"  # the scheduler asked them to end: the job goes on elsewhere or later, at no cost to a budget
    HUNG = "hung", Restart(budget="hang")  # no progress within the job's limits
    STARTUP = "startup", Restart(budget="startup")  # it could not be launched, or made no step and need not be wrong
    # Nothing explains the end, and it had trained: `scheduling/failures/verdict.py` says how the job goes on.
    UNKNOWN = "unknown", Restart(budget="unknown")
    GUARD_ABSENT = "guard_absent"  # it ran past the cap of its virtual device; what it needs is unknown
    DISK_FULL = "disk_full"  # no space for checkpoints or logs
    USER_ERROR = "user_error"  # the program itself is wrong
    CANCELLED = "cancelled"  # the user asked for the end
    PROBED = "probed"  # the attempt was ended after it had measured what its plan needs
    TIME_LIMIT = "time_limit"  # the job's `time_limit` is over: it was asked to save and end


class Cause(StrEnum):
    """What a line of a log says, before other evidence confirms or denies it."""

    NOT_OOM = "not_oom"  # looks like memory and is not
    HANG = "hang"
    DEVICE_OOM = "gpu_oom"
    DEVICE_OOM_SUSPECT = "gpu_oom_suspect"  # only if the device was nearly full
    SHARED_MEMORY = "shm"
    HOST_OOM = "host_oom"
    HOST_OOM_SUSPECT = "host_oom_suspect"  # only if a kernel counter rose
    DISK_FULL = "disk_full"
    HARDWARE = "hardware"  # a device, its link or its driver is broken, lost or busy
    PREEMPTED = "preempted"  # a launcher or a batch system names a signal, a time limit or a preemption
    NODE_LOST = "node_lost"  # another node or a batch system's own part is gone
    TIMEOUT = "timeout"  # a rank waited in vain for others: look at the other ranks
    PROGRAM = "user_error"  # an error that no other place and no later time would spare
    SECONDARY = "secondary"  # a survivor's complaint: look at the other ranks


class Phase(StrEnum):
    """Where a program stood: which of its settings can change what it needs there."""

    STARTUP = "startup"  # imports, data, weights onto the device
    ENCODING = "encoding"  # data made ready by a model, before training
    TRAINING = "training"  # forward and backward
    OPTIMIZER = "optimizer"
    EVALUATION = "evaluation"
    CHECKPOINTING = "checkpointing"


@dataclass(frozen=True, slots=True, kw_only=True)
class Ending:
    """How an attempt ended that nothing explains: what another end of the same cause would look like."""

    signature: str  # `KeyError in train.py:step, forward`, or `exit code 3, startup`
    step: int | None  # optimizer steps completed before it; None: the program counts none
    elapsed_s: float  # since its launch
    is_own: bool  # the program's own: a mistake in its code or its arguments
    may_pass: bool  # what the operating system or a network refused: the same may succeed later


@dataclass(frozen=True, slots=True, kw_only=True)
class Verdict:
    """How a job goes on after an end that nothing explains, or on a full disk."""

    row: int  # of the table in docs/reference/failures-and-retries.md
    wait_s: float | None  # before the next attempt; None: there is none
    budget: str = ""  # the field of the job's `retries` that it uses up; "": none
    elsewhere: bool = False  # the next attempt waits for other devices, as long as others could hold the job


class Extent(StrEnum):
    """How much of a place a failure of hardware concerns."""

    DEVICE = "device"
    NODE = "node"


@dataclass(frozen=True, slots=True, kw_only=True)
class Failure:
    """What the evidence means, in a sentence, with the lines that show it."""

    kind: FailureKind
    reason: str
    rank: int | None = None
    phase: Phase | None = None  # None where nothing tells
    excerpt: str = ""
    ending: Ending | None = None  # None where something explains the end
    verdict: Verdict | None = None  # of such an end
    broken: Extent | None = None  # what the hardware or its driver named as broken


@dataclass(frozen=True, slots=True, kw_only=True)
class OomReport:
    """The guard's account of one rank's out-of-memory exception."""

    rank: int
    step: int  # optimizer steps completed before it
    phase: str  # startup, forward, backward or optimizer
    requested_bytes: int | None  # None where the message does not say
    live_bytes: int
    capacity_bytes: int
    foreign_bytes: int = 0  # held on the device by other processes
    overhead_bytes: int = 0  # held by context and communicators: of the capacity, but nothing that a tensor can have
    pass_done: float | None = None  # share of the forward or backward pass that was done; None: unknown
    injected: bool = False  # raised by `orc rehearse`: says nothing about the plan
    message: str = ""
    steps_done: int = 0  # optimizer steps completed before it in this attempt
    count: int = 1  # of such errors of this rank so far


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorReport:
    """The guard's account of the exception that ended a rank."""

    rank: int
    step: int
    phase: str
    type: str  # qualified name of the exception
    traceback: str


@dataclass(frozen=True, slots=True, kw_only=True)
class Heartbeat:
    """A rank's last sign of life."""

    rank: int
    step: int  # optimizer steps completed, counted from the job's beginning where the engine knows it
    steps_done: int  # optimizer steps completed in this attempt
    step_s: float | None  # median of recent steps
    peak_bytes: int  # allocated, highest so far
    phase: str
    at_s: float
    loss: float | None = None
    torch_version: str = ""  # "" before the program has imported it
    python_version: str = ""
    cuda_version: str = ""  # that torch was built for; "" without CUDA
    driver_version: str = ""
    device_model: str = ""  # as its driver names it; "" before the rank has used it
    reserved_bytes: int = 0  # that PyTorch's CUDA allocator held, highest so far; 0 without CUDA
    allocator_room_bytes: int | None = None  # free, or held by PyTorch's allocator; the least so far; None without CUDA
    pid: int = 0
    backwards: int = 0  # backward passes completed in this attempt
    live_bytes: int = 0  # allocated at `at_s`
    group_size: int | None = None  # ranks of the largest process group it joined; 0: none, by no library; None: unknown


@dataclass(frozen=True, slots=True, kw_only=True)
class Finding:
    """A line of a log that names a cause."""

    cause: Cause
    line: str
    rank: int | None = None  # that wrote it, where a log of several tells
    log: str = ""  # name of its file
    offset: int = 0  # of the line in its file, in bytes
    phase: Phase | None = None
    excerpt: str = ""  # the traceback that it ends
    oom: OomReport | None = None  # what it says in bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class RankEnd:
    """How one rank's process ended: exit code, or minus the signal number; None if unknown.

    Where the process was a launcher (torchrun), `root_rank` is the rank that it saw fail first, with its exit code.
    """

    rank: int
    exit_code: int | None
    log_tail: str = ""
    findings: tuple[Finding, ...] = ()  # of its whole log: the one that counts, then others as they came
    root_rank: int | None = None
    root_exit_code: int | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """Raw facts at the end of an attempt. Deciding what they mean is `scheduling.classify`."""

    ranks: tuple[RankEnd, ...] = ()
    ooms: tuple[OomReport, ...] = ()
    caught: tuple[OomReport, ...] = ()  # the last one that each rank raised, even if caught
    errors: tuple[ErrorReport, ...] = ()
    heartbeats: tuple[Heartbeat, ...] = ()
    nodes_lost: tuple[str, ...] = ()  # nodes, or their launchers, that went away
    first_ended_rank: int | None = None  # the rank that ended first, where one was seen
    host_oom_kills: int = 0  # how far the kernel's oom_kill counters rose
    hung_for_s: float | None = None  # set where the watchdog ended it
    launch_error: str | None = None  # set where no rank ever ran
    no_program: bool = False  # because exec failed: no such program or folder, or none that the node can run
    stopped: bool = False  # we ended it (cancel)
    missing_artifacts: tuple[str, ...] = ()  # promised by `success`, not found
    finished: bool = False  # its own last words and all artifacts are there, however its processes ended
    lost: tuple[str, ...] = ()  # what a restarted script did not take up again
    checkpoint_step: int | None = None  # newest complete checkpoint
    unmatched: tuple[str, ...] = ()  # newest files of a script's output, where `resume.checkpoints` matches nothing
    free_before_bytes: tuple[int, ...] = ()  # on the device of each rank, just before its launch; () where not told
    unwatched: tuple[str, ...] = ()  # processes that trained without the guard, and why: its peaks and steps miss them
    virtual: bool = False  # its devices are only as large as the guard holds them


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """How fast an attempt was seen to train."""

    steps_done: int  # optimizer steps completed in this attempt
    step_s: float  # median of recent steps of its slowest rank
    at_s: float
    peak_bytes: int | None = None  # allocated, highest so far of its worst rank; None before LEARNED_STEPS


class AttemptStatus(StrEnum):
    """LAUNCHING -> RUNNING -> ENDED, with STOPPING in between where we asked for the end."""

    LAUNCHING = "launching"
    RUNNING = "running"
    STOPPING = "stopping"
    ENDED = "ended"


@dataclass(frozen=True, slots=True, kw_only=True)
class Attempt:
    """A launch of a job. `number` counts from 1 and is also the fencing epoch: a larger one wins."""

    job_id: str
    number: int
    plan: Plan
    placement: Placement
    device: str  # DeviceSpec.name
    estimate: MemoryEstimate  # as predicted, before correction
    correction: float  # measured / predicted of the family so far, at launch
    step_s: float  # as predicted
    needed_bytes: int | None = None  # that a device had to have free: corrected, with its margin; None: measured before
    fit_probability: float | None = None  # on the devices that it got; None: nothing was known, or measured before
    change: tuple[Change, ...] = ()  # against the attempt before
    change_reason: str = ""
    relative_to: OwnSettings | None = None  # where the estimate assumes what is known of a script's own settings
    probe: bool = False  # only to be measured: it trains PROBE_STEPS, into a folder of its own, and is ended
    status: AttemptStatus = AttemptStatus.LAUNCHING
    moved_for: str = ""  # why we asked for its end, to go on otherwise
    leaves_by_s: float | None = None  # when it has ended at the latest, where we asked for that
    held_placement: Placement = ()  # devices that are kept for the attempt after it, while it leaves
    climbs_to: Plan | None = None  # that the next attempt takes: it is faster, and fits by what was measured
    over_limit: bool = False  # we asked for its end because the job's time limit was over
    launched_at_s: float
    started_at_s: float | None = None  # when every rank's process ran; None: not yet, or never
    ended_at_s: float | None = None
    pace: Pace | None = None  # as last told while it ran; None: as was expected
    released: bool = False  # its devices report their memory free again
    evidence: Evidence | None = None
    failure: Failure | None = None

    def end_or(self, otherwise_s: float) -> float:
        """Return when it ended, in seconds since 1970; `otherwise_s` where it has not."""
        return otherwise_s if self.ended_at_s is None else self.ended_at_s

    @property
    def name(self) -> str:
        return attempt_name(self.job_id, self.number)

    @property
    def peak_bytes(self) -> int | None:
        """The allocated peak of the worst rank; None where no rank reported one, or it failed before it trained."""
        if self.evidence is None or self.evidence.unwatched:
            return None
        beats = self.evidence.heartbeats
        if self.failure is not None and not self.evidence.ooms:
            beats = tuple(beat for beat in beats if beat.steps_done or beat.phase != Phase.STARTUP)
        return max((beat.peak_bytes for beat in beats), default=None)

    @property
    def reserved_bytes(self) -> int | None:
        """Most bytes that PyTorch's CUDA allocator held on a rank; it gives some back where memory gets scarce."""
        peaks = [beat.reserved_bytes for beat in self.evidence.heartbeats] if self.evidence else []
        return max(peaks, default=0) or None

    @property
    def measured_step_s(self) -> float | None:
        """Measured seconds per optimizer step of the slowest rank; None where no rank reported any."""
        steps = [beat.step_s for beat in self.evidence.heartbeats if beat.step_s] if self.evidence else []
        return max(steps, default=None)

    @property
    def torch_version(self) -> str:
        """Version of torch under which the ranks ran; "" where no rank reported it."""
        return self.versions.get("torch_version", "")

    @property
    def versions(self) -> dict[str, str]:
        """Versions under which the ranks ran, and the model of their devices; without what no rank reported."""
        beats = self.evidence.heartbeats if self.evidence else ()
        newest = {name: max((getattr(beat, name) for beat in beats), default="") for name in VERSIONS}
        return {name: text for name, text in newest.items() if text}


def attempt_name(job_id: str, number: int) -> str:
    """Return the attempt's name, such as `gpt2-3`; it is unique in one journal."""
    return f"{job_id}-{number}"
