"""The simulated world in which things fail: hidden true memory peaks, every fault, all from one seed."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from benchmarks.draws import stream
from benchmarks.measured import PacedBackend
from orchestrator.backends.simulated.process import SIGTERM, SimulatedProcess
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import (
    LEARNED_STEPS,
    Attempt,
    AttemptStatus,
    ErrorReport,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    RankEnd,
)
from orchestrator.specs.cluster import ClusterSpec, Node, make_idle_nodes
from orchestrator.specs.events import Event, NodesSeen, PaceReported, Released
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.run import OOM_EXIT_CODE

Span = tuple[float, float]  # drawn from evenly

SIGKILL = -9  # exit code of a rank that this signal ended
OOM_WORDS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB."
SURVIVORS_WORDS = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31337"
)
STEP_FACTORS = (0.7, 1.5)  # true / predicted step time over families
# of the logarithm of true / predicted peak over families: mostly within a factor of two
PEAK_SPREAD = 0.4
NODE_DOWN_S = (30.0, 900.0)
REPEAT_S = (0.0, 120.0)
OOM_WITHIN_STEPS = 3  # the peak of a training comes in its first steps
FOREIGN_S = (10.0, 300.0)  # how long another process keeps the memory that it took

REHEARSED = {
    FaultKind.OOM: FailureKind.DEVICE_OOM,
    # a SIGKILL without a kernel counter says no more than this
    FaultKind.KILL: FailureKind.PREEMPTED,
    FaultKind.NODE: FailureKind.NODE_LOST,
    FaultKind.PREEMPT: FailureKind.PREEMPTED,
    FaultKind.HANG: FailureKind.HUNG,
}


@dataclass(slots=True, kw_only=True)
class FaultyProcess(SimulatedProcess):
    """The true course of an attempt that may fail, with its memory."""

    peak_bytes: int  # true allocated peak
    capacity_bytes: int  # available for tensors on the smallest of its devices

    @property
    def fault(self) -> Fault | None:
        """The injected failure, which only the first attempt meets; None without one."""
        return self.job.fault if self.attempt.number == 1 else None


@frozen
class Symptom:
    """Traces of an ending: exit codes of the failing and the other ranks, last log text, and the guard's report."""

    exit_code: int | None
    others: int | None = SIGTERM
    last_words: str = ""
    error: str | None = None  # type of the exception that the guard reports
    unwatched: tuple[str, ...] = ()  # processes that trained without the guard, on a virtual device


SYMPTOMS = {
    None: Symptom(exit_code=0, others=0),
    FailureKind.DEVICE_OOM: Symptom(exit_code=OOM_EXIT_CODE, last_words=OOM_WORDS),
    FailureKind.MEMORY_CONTENTION: Symptom(exit_code=OOM_EXIT_CODE, last_words=OOM_WORDS),
    FailureKind.HOST_OOM: Symptom(exit_code=SIGKILL),
    FailureKind.NODE_LOST: Symptom(exit_code=None),
    FailureKind.PREEMPTED: Symptom(exit_code=SIGTERM),
    FailureKind.HUNG: Symptom(exit_code=SIGKILL, others=SIGKILL),
    FailureKind.DISK_FULL: Symptom(
        exit_code=1, last_words="OSError: [Errno 28] No space left on device", error="OSError"
    ),
    FailureKind.USER_ERROR: Symptom(
        exit_code=1, last_words="ValueError: 3 labels for 2 classes", error="ValueError"
    ),
    FailureKind.GUARD_ABSENT: Symptom(
        exit_code=0, others=0, unwatched=("python -I: nothing told it of the guard",)
    ),
    FailureKind.CANCELLED: Symptom(exit_code=SIGTERM),
    FailureKind.PROBED: Symptom(exit_code=SIGTERM),
}


def evidence_of(
    process: FaultyProcess,
    ending: FailureKind | None,
    *,
    step: int,
    checkpoint_step: int | None,
    nodes_lost: tuple[str, ...],
    draw: random.Random,
    at_s: float,
) -> Evidence:
    """Return the evidence of an attempt that ended with `ending` after `step`; `draw` picks the failing rank."""
    lost = nodes_lost if ending is FailureKind.NODE_LOST else ()
    stopped = ending in (FailureKind.CANCELLED, FailureKind.PROBED)
    if process.started_at_s is None:
        why = "the launcher did not answer" if ending is FailureKind.STARTUP else None
        return Evidence(launch_error=why, nodes_lost=lost, stopped=stopped)
    symptom = SYMPTOMS[ending]
    ranks = range(process.attempt.plan.world_size)
    culprit = draw.choice(ranks)
    last_words = dict.fromkeys(ranks, SURVIVORS_WORDS if symptom.exit_code != 0 else "") | {
        culprit: symptom.last_words
    }
    steps_done = step - process.first_step
    return Evidence(
        ranks=tuple(
            RankEnd(
                rank=rank,
                exit_code=symptom.exit_code if rank == culprit else symptom.others,
                log_tail=last_words[rank],
            )
            for rank in ranks
        ),
        ooms=(_oom_report(process, ending, culprit, step),)
        if symptom.exit_code == OOM_EXIT_CODE
        else (),
        errors=_error_reports(symptom, culprit, step),
        heartbeats=tuple(
            Heartbeat(
                rank=rank,
                step=step,
                steps_done=steps_done,
                step_s=process.step_s if steps_done else None,
                peak_bytes=min(process.peak_bytes, process.capacity_bytes),
                phase="optimizer",
                at_s=at_s,
            )
            for rank in ranks
        ),
        nodes_lost=lost,
        first_ended_rank=draw.choice((culprit, None)) if ending else None,
        host_oom_kills=int(ending is FailureKind.HOST_OOM),
        hung_for_s=process.job.spec.hang_timeout if ending is FailureKind.HUNG else None,
        stopped=stopped,
        checkpoint_step=checkpoint_step,
        unwatched=symptom.unwatched,
        virtual=bool(symptom.unwatched),
    )


def _error_reports(symptom: Symptom, rank: int, step: int) -> tuple[ErrorReport, ...]:
    if symptom.error is None:
        return ()
    return (
        ErrorReport(
            rank=rank, step=step, phase="forward", type=symptom.error, traceback=symptom.last_words
        ),
    )


def _oom_report(
    process: FaultyProcess, ending: FailureKind | None, rank: int, step: int
) -> OomReport:
    """Return the report of a failed allocation; on a crowded device, of one within the predicted memory."""
    attempt = process.attempt
    needed_bytes = max(process.peak_bytes, process.capacity_bytes + 1)
    foreign_bytes = 0
    if ending is FailureKind.MEMORY_CONTENTION:
        needed_bytes = min(
            process.peak_bytes, int(attempt.correction * attempt.estimate.allocated_bytes)
        )
        foreign_bytes = max(1, process.capacity_bytes - needed_bytes + 1)
    requested_bytes = max(1, needed_bytes // 20)
    return OomReport(
        rank=rank,
        step=step,
        phase="forward",
        requested_bytes=requested_bytes,
        live_bytes=needed_bytes - requested_bytes,
        capacity_bytes=process.capacity_bytes,
        foreign_bytes=foreign_bytes,
        injected=process.fault is not None,
        message=OOM_WORDS,
    )


class FaultyBackend(PacedBackend):
    """A simulated cluster in which attempts, nodes and messages fail."""

    startup_s: Span = (2.0, 20.0)  # from launch to the first step
    # from the end of the last process until devices report their memory free
    release_s: Span = (0.5, 5.0)

    def __init__(
        self,
        cluster: ClusterSpec,
        *,
        seed: int,
        hazards: Mapping[FailureKind, float],
        repeat_chance: float,
    ) -> None:
        """`hazards` are chances per attempt (user errors: per job), `repeat_chance` that of an event told twice.

        True step times and peaks are drawn for each family.
        """
        own_causes = {FailureKind.DEVICE_OOM, FailureKind.CANCELLED}
        assert not own_causes & set(hazards), hazards
        super().__init__(cluster)
        self._seed = seed
        self._hazards = hazards
        self._repeat_chance = repeat_chance
        self._nodes = make_idle_nodes(cluster)
        self._policy = cluster.policy
        self._memory_bytes = {node.name: node.device.memory for node in self._nodes}
        self._down: set[str] = set()
        # by our attempts, by node and device
        self._used_bytes: Counter[tuple[str, int]] = Counter()
        # held by other processes, by node and device
        self._foreign_bytes: dict[tuple[str, int], int] = {}
        self._watched: set[str] = set()
        self._told_nodes: tuple[Node, ...] | None = None
        self._nodes_changed = True
        self._repeats = self._stream("repeats")
        self._outbox.clear()  # the nodes are told when they are asked for

    def _factors(self, job: Job) -> tuple[float, float]:
        draw = self._stream("hidden", job.spec.family_name)
        return draw.uniform(*STEP_FACTORS), draw.lognormvariate(0.0, PEAK_SPREAD)

    def _compute_true_step_s(self, job: Job, attempt: Attempt) -> float:
        return attempt.step_s * self._factors(job)[0]

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Watch an attempt and repeat its events; start it if it never began."""
        self._watched.add(attempt.name)
        process = self.processes.get(attempt.name)
        if process is None and attempt.status is AttemptStatus.ENDED:
            self._emit(Released(job_id=job.id, number=attempt.number, at_s=self._now_s))
        elif process is None:
            super().adopt(job, attempt)
        else:
            self._retell(process)

    def stop(self, action: Stop) -> None:
        """End an attempt within its grace period; it may end by itself before."""
        process = self.processes.get(action.name)
        if process is not None and process.evidence is None:
            delay_s = action.grace_s * self._stream("stop", action.name).uniform(0.0, 1.0)
            self._schedule(delay_s, partial(self._end_now, process, FailureKind.CANCELLED))

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        """Advance the clock to the next events, at most `timeout_s`, and return them."""
        self._tell_nodes()
        return super().await_events(timeout_s)

    def close(self) -> None:
        """Drop listeners and undelivered events; running attempts continue."""
        self._watched.clear()
        self._outbox.clear()
        self._told_nodes = None
        self._nodes_changed = True

    def _make_process(self, job: Job, attempt: Attempt) -> FaultyProcess:
        process = super()._make_process(job, attempt)
        estimate = attempt.estimate
        around_bytes = estimate.device_bytes - estimate.allocated_bytes
        memory_bytes = min(self._memory_bytes[part.node] for part in attempt.placement)
        faulty = FaultyProcess(
            job=job,
            attempt=attempt,
            first_step=process.first_step,
            step_s=process.step_s,
            launched_at_s=process.launched_at_s,
            peak_bytes=round(estimate.allocated_bytes * self._factors(job)[1]),
            capacity_bytes=memory_bytes - around_bytes,
        )
        self._hold(faulty, faulty.peak_bytes)
        return faulty

    def _schedule_course(self, process: SimulatedProcess) -> None:
        """Schedule the start and the end of an attempt."""
        starting_s, ending, step = self._fate(process)
        if self._down.intersection(process.nodes):
            self._schedule(starting_s, partial(self._end_now, process, FailureKind.NODE_LOST))
        elif ending is FailureKind.STARTUP:
            self._schedule(starting_s, partial(self._end_now, process, FailureKind.STARTUP))
        else:
            self._schedule(starting_s, partial(self._start_attempt, process))
            running_s = (step - process.first_step) * process.step_s
            if ending is FailureKind.HUNG:
                running_s += process.job.spec.hang_timeout
            self._schedule(starting_s + running_s, partial(self._meet, process, ending, step))

    def _fate(self, process: SimulatedProcess) -> tuple[float, FailureKind | None, int]:
        """Return (seconds until it starts, how it ends by itself, step after which it ends)."""
        assert isinstance(process, FaultyProcess)
        draw = self._stream("fate", process.attempt.name)
        return (draw.uniform(*self.startup_s), *self._destiny(process, draw))

    def _destiny(
        self, process: FaultyProcess, fate: random.Random
    ) -> tuple[FailureKind | None, int]:
        first_step = process.first_step
        last_step = process.last_step
        step = fate.randint(first_step, max(first_step, last_step - 1))
        fault = process.fault
        if fault is not None:
            return REHEARSED[fault.kind], max(first_step, min(fault.step, last_step))
        if self._chance(FailureKind.STARTUP) > fate.random():
            return FailureKind.STARTUP, first_step
        if process.peak_bytes > process.capacity_bytes:
            return FailureKind.DEVICE_OOM, min(
                first_step + fate.randrange(OOM_WITHIN_STEPS), last_step
            )
        bug = self._stream("user error", process.job.id)
        if self._chance(FailureKind.USER_ERROR) > bug.random():  # at the same step in every attempt
            return FailureKind.USER_ERROR, max(
                first_step, bug.randint(0, max(0, process.last_step - 1))
            )
        for kind in FailureKind:
            if (
                kind not in (FailureKind.STARTUP, FailureKind.USER_ERROR)
                and self._chance(kind) > fate.random()
            ):
                return kind, step
        return None, last_step

    def _paced(self, process: SimulatedProcess, steps_done: int) -> PaceReported:
        assert isinstance(process, FaultyProcess)
        report = super()._paced(process, steps_done)
        if steps_done < LEARNED_STEPS:
            return report
        peak_bytes = min(process.peak_bytes, process.capacity_bytes)
        return replace(report, pace=replace(report.pace, peak_bytes=peak_bytes))

    def _start_attempt(self, process: SimulatedProcess) -> None:
        super()._start_attempt(process)
        is_learned = any(ran_out_of_memory(attempt) for attempt in process.job.attempts)
        if process.evidence is None and is_learned:
            self._schedule(
                LEARNED_STEPS * process.step_s, partial(self._pace, process, LEARNED_STEPS)
            )

    def _meet(self, process: SimulatedProcess, ending: FailureKind | None, step: int) -> None:
        """End the attempt as decided; a lost node ends every attempt on it."""
        if process.evidence is not None:
            return
        if process.attempt.probe and ending is None:
            ending = FailureKind.PROBED
        if ending is not FailureKind.NODE_LOST:
            self._end_attempt(process, ending, step)
            return
        lost = self._stream("node", process.attempt.name).choice(process.nodes)
        self._down.add(lost)
        self._nodes_changed = True
        self._schedule(
            self._stream("down", process.attempt.name).uniform(*NODE_DOWN_S),
            partial(self._return, lost),
        )
        for other in [*self.processes.values()]:
            if lost in other.nodes:
                self._end_now(other, FailureKind.NODE_LOST)

    def _return(self, node: str) -> None:
        self._down.discard(node)
        self._nodes_changed = True

    def _end_now(self, process: SimulatedProcess, ending: FailureKind) -> None:
        """End the attempt after the steps that its running time allows."""
        self._end_attempt(process, ending, self._compute_reached_step(process))

    def _end_attempt(
        self, process: SimulatedProcess, ending: FailureKind | None, step: int
    ) -> None:
        is_first = process.evidence is None
        super()._end_attempt(process, ending, step)
        if is_first and ending is FailureKind.MEMORY_CONTENTION:
            assert process.evidence is not None
            self._crowd(process, process.evidence.ooms[0].foreign_bytes)

    def _make_evidence(
        self,
        process: SimulatedProcess,
        ending: FailureKind | None,
        *,
        step: int,
        checkpoint_step: int | None,
    ) -> Evidence:
        assert isinstance(process, FaultyProcess)
        return self._symptoms(
            process,
            ending,
            step=step,
            checkpoint_step=checkpoint_step,
            nodes_lost=tuple(name for name in process.nodes if name in self._down),
            draw=self._stream("evidence", process.attempt.name),
            at_s=self._now_s,
        )

    _symptoms = staticmethod(evidence_of)  # tests show other symptoms

    def _compute_seconds_until_release(self, process: SimulatedProcess) -> float:
        return self._stream("release", process.attempt.name).uniform(*self.release_s)

    def _release_devices(self, process: SimulatedProcess) -> None:
        assert isinstance(process, FaultyProcess)
        self._hold(process, -process.peak_bytes)
        self._tell_nodes()
        super()._release_devices(process)

    def _crowd(self, process: SimulatedProcess, foreign_bytes: int) -> None:
        """Let a foreign process occupy memory of the attempt's first device for a while."""
        device = process.devices[0]
        self._foreign_bytes[device] = foreign_bytes
        self._nodes_changed = True
        leaves_s = self._stream("foreign", process.attempt.name).uniform(*FOREIGN_S)
        self._schedule(leaves_s, partial(self._uncrowd, device))

    def _uncrowd(self, device: tuple[str, int]) -> None:
        self._foreign_bytes.pop(device, None)
        self._nodes_changed = True

    def _hold(self, process: SimulatedProcess, more_bytes: int) -> None:
        """Account for memory that an attempt takes from its devices, or gives back."""
        if more_bytes:
            self._used_bytes.update(dict.fromkeys(process.devices, more_bytes))
            self._nodes_changed = True

    def _retell(self, process: SimulatedProcess) -> None:
        """Repeat the process's events to a new listener, since an earlier one may have lost them."""
        if process.started_at_s is not None:
            self._emit(process.make_started_event())
        if process.evidence is not None:
            self._emit(process.make_finished_event())
        if process.released_at_s is not None:
            self._emit(process.make_released_event())

    def _emit(self, event: Event) -> None:
        if f"{event.job_id}-{event.number}" not in self._watched:
            return
        super()._emit(event)
        if self._repeat_chance and self._repeats.random() < self._repeat_chance:
            self._schedule(self._repeats.uniform(*REPEAT_S), partial(self._tell_again, event))

    def _tell_again(self, event: Event) -> None:
        super()._emit(event)

    def _tell_nodes(self) -> None:
        """The live cluster, where it changed since it was last told."""
        if not self._nodes_changed:
            return
        self._nodes_changed = False
        nodes = self._live_nodes()
        if nodes != self._told_nodes:
            self._told_nodes = nodes
            event = NodesSeen(
                nodes=nodes, declared=self._nodes, policy=self._policy, at_s=self._now_s
            )
            self._outbox.append(event)

    def _live_nodes(self) -> tuple[Node, ...]:
        """Every node that is up, with what a newcomer could take of each device now."""
        used = self._used_bytes
        foreign = self._foreign_bytes
        return tuple(
            replace(
                node,
                free_bytes=tuple(
                    max(
                        0,
                        memory_bytes - used[node.name, index] - foreign.get((node.name, index), 0),
                    )
                    for index, memory_bytes in enumerate(node.free_bytes)
                ),
            )
            for node in self._nodes
            if node.name not in self._down
        )

    def _chance(self, kind: FailureKind) -> float:
        return self._hazards.get(kind, 0.0)

    def _schedule(self, delay_s: float, happen: Callable[[], object]) -> None:
        super()._schedule(delay_s, partial(self._do, happen))

    def _do(self, happen: Callable[[], object]) -> None:
        happen()
        self._tell_nodes()

    def _stream(self, *what: str) -> random.Random:
        return stream(self._seed, *what)
