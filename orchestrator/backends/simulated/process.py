"""A simulated attempt, and the evidence that each kind of ending leaves."""

from __future__ import annotations

import random
from dataclasses import dataclass

from orchestrator.specs.attempt import (
    LEARNED_STEPS,
    PROBE_STEPS,
    Attempt,
    Device,
    ErrorReport,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    Pace,
    RankEnd,
    devices_in,
)
from orchestrator.specs.events import Finished, PaceReported, Released, Started
from orchestrator.specs.fault import Fault
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import OOM_EXIT_CODE

# exit codes of ranks that a signal ended
SIGKILL = -9
SIGTERM = -15
OOM_WORDS = "torch.OutOfMemoryError: CUDA out of memory. Tried to allocate 26.00 MiB."
SURVIVORS_WORDS = (
    "RuntimeError: [gloo/transport/tcp/pair.cc:534] Connection closed by peer [127.0.0.1]:31337"
)


@dataclass(slots=True, kw_only=True)
class Process:
    """The true course of a simulated attempt; classification must find `ending` in the evidence."""

    job: Job
    attempt: Attempt
    first_step: int
    step_s: float  # true seconds per step
    peak_bytes: int  # true allocated peak
    capacity_bytes: int  # available for tensors on the smallest of its devices
    launched_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    released_at_s: float | None = None
    evidence: Evidence | None = None
    ending: FailureKind | None = None

    @property
    def last_step(self) -> int:
        """The step at which the training ends, or is ended."""
        if self.attempt.probe:
            return PROBE_STEPS
        steps = self.job.spec.optimizer_steps
        return self.job.spec.training.max_steps if steps is None else steps

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(part.node for part in self.attempt.placement)

    @property
    def devices(self) -> tuple[Device, ...]:
        """(node, device index) of every rank."""
        return devices_in(self.attempt.placement)

    @property
    def fault(self) -> Fault | None:
        """The injected failure, which only the first attempt meets; None without one."""
        return self.job.fault if self.attempt.number == 1 else None

    def started(self) -> Started:
        assert self.started_at_s is not None, self.attempt.name
        return Started(job_id=self.job.id, number=self.attempt.number, at_s=self.started_at_s)

    def paced(self, steps_done: int, at_s: float) -> PaceReported:
        peak_bytes = (
            min(self.peak_bytes, self.capacity_bytes) if steps_done >= LEARNED_STEPS else None
        )
        return PaceReported(
            job_id=self.job.id,
            number=self.attempt.number,
            pace=Pace(steps_done=steps_done, step_s=self.step_s, at_s=at_s, peak_bytes=peak_bytes),
            at_s=at_s,
        )

    def finished(self) -> Finished:
        assert self.evidence is not None, self.attempt.name
        assert self.ended_at_s is not None, self.attempt.name
        return Finished(
            job_id=self.job.id,
            number=self.attempt.number,
            evidence=self.evidence,
            at_s=self.ended_at_s,
        )

    def released(self) -> Released:
        assert self.released_at_s is not None, self.attempt.name
        return Released(job_id=self.job.id, number=self.attempt.number, at_s=self.released_at_s)


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
    process: Process,
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


def _oom_report(process: Process, ending: FailureKind | None, rank: int, step: int) -> OomReport:
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
