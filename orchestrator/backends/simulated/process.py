"""A simulated attempt, and the evidence that it leaves."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.attempt import (
    PROBE_STEPS,
    Attempt,
    Device,
    Evidence,
    FailureKind,
    Heartbeat,
    RankEnd,
    list_devices_of,
)
from orchestrator.specs.events import Finished, Released, Started
from orchestrator.specs.job_record import Job

SIGTERM = -15  # exit code of a rank that this signal ended


@dataclass(slots=True, kw_only=True)
class SimulatedProcess:
    """The true course of a simulated attempt. The scheduler must conclude `ending` from its
    evidence alone.
    """

    job: Job
    attempt: Attempt
    first_step: int
    step_s: float  # true seconds per step
    launched_at_s: float
    started_at_s: float | None = None
    ended_at_s: float | None = None
    released_at_s: float | None = None
    evidence: Evidence | None = None
    ending: FailureKind | None = None

    @property
    def last_step(self) -> int:
        """The step at which the training ends by itself, or the probe is over."""
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
        return list_devices_of(self.attempt.placement)

    def make_started_event(self) -> Started:
        assert self.started_at_s is not None, self.attempt.name
        return Started(job_id=self.job.id, number=self.attempt.number, at_s=self.started_at_s)

    def make_finished_event(self) -> Finished:
        assert self.evidence is not None, self.attempt.name
        assert self.ended_at_s is not None, self.attempt.name
        return Finished(
            job_id=self.job.id,
            number=self.attempt.number,
            evidence=self.evidence,
            at_s=self.ended_at_s,
        )

    def make_released_event(self) -> Released:
        assert self.released_at_s is not None, self.attempt.name
        return Released(job_id=self.job.id, number=self.attempt.number, at_s=self.released_at_s)


def make_evidence(
    process: SimulatedProcess,
    ending: FailureKind | None,
    step: int,
    checkpoint_step: int | None,
    at_s: float,
) -> Evidence:
    """Return the evidence that an attempt leaves which finished, or was ended by the service, after
    `step`.
    """
    stopped = ending is not None
    if process.started_at_s is None:
        return Evidence(stopped=stopped)
    ranks = range(process.attempt.plan.world_size)
    steps_done = step - process.first_step
    return Evidence(
        ranks=tuple(RankEnd(rank=rank, exit_code=SIGTERM if stopped else 0) for rank in ranks),
        heartbeats=tuple(
            Heartbeat(
                rank=rank,
                step=step,
                steps_done=steps_done,
                step_s=process.step_s if steps_done else None,
                peak_bytes=0,
                phase="optimizer",
                at_s=at_s,
            )
            for rank in ranks
        ),
        stopped=stopped,
        checkpoint_step=checkpoint_step,
    )
