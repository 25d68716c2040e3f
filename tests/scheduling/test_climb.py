"""A recovered job moves once to a faster plan that fits by what it measured, where that pays."""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import pytest

from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Action, Launch, Stop
from orchestrator.specs.attempt import (
    LEARNED_STEPS,
    Attempt,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    Pace,
    RankEnd,
)
from orchestrator.specs.events import Finished, PaceReported, Released, Started, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.specs.state import State
from tests.scheduling.test_recovery import NODES, ran_out

TRUE = 2.0  # activations, beside the prediction
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2760,
    "num_hidden_layers": 32,
}
LONG = JobSpec.model_validate(
    {
        "name": "lm",
        "global_batch_size": 64,
        "precision": "bf16",
        "model": {"decoder": SIZES | {"num_attention_heads": 8}},
        "data": {"text": ["text"], "sequence_length": 8192},
        "training": {"max_steps": 5000},
    }
)


@dataclass
class Play:
    """A job, played event by event; an attempt fails where its activations, TRUE times as large, do not fit."""

    spec: JobSpec = LONG
    scheduler: Scheduler = field(default_factory=lambda: Scheduler(State(nodes=NODES)))
    at_s: float = 0.0
    true: float = TRUE

    def __post_init__(self) -> None:
        self.actions = self.scheduler.step(
            Submitted(job_id="lm-1", order=1, spec=self.spec, at_s=0.0)
        )

    @property
    def attempt(self) -> Attempt:
        return self.scheduler.state.jobs["lm-1"].attempts[-1]

    def end(self, evidence: Evidence) -> None:
        """End the attempt and free its devices."""
        number, self.at_s = self.attempt.number, self.at_s + 100.0
        self.scheduler.step(
            Finished(job_id="lm-1", number=number, evidence=evidence, at_s=self.at_s)
        )
        self.actions = self.scheduler.step(
            Released(job_id="lm-1", number=number, at_s=self.at_s + 1)
        )

    def fail(self) -> bool:
        """End the attempt where it runs out of memory, in a pass whose progress nobody knows; else return False."""
        evidence = ran_out(self.attempt, self.true)
        if evidence is None:
            return False
        blind = tuple(replace(report, phase="forward", pass_done=None) for report in evidence.ooms)
        self.end(replace(evidence, ooms=blind))
        return True

    def recover(self) -> Attempt:
        """Return the first attempt that fits."""
        while self.fail():
            pass
        return self.attempt

    def learn(self, steps: int = LEARNED_STEPS, peak_bytes: int | None = -1) -> tuple[Action, ...]:
        """Report the pace, by default with the true peak."""
        attempt, self.at_s = self.attempt, self.at_s + 50.0
        self.scheduler.step(Started(job_id="lm-1", number=attempt.number, at_s=self.at_s))
        peak_bytes = self.peak_bytes() if peak_bytes == -1 else peak_bytes
        pace = Pace(
            steps_done=steps, step_s=attempt.step_s, at_s=self.at_s + 1, peak_bytes=peak_bytes
        )
        return self.scheduler.step(
            PaceReported(job_id="lm-1", number=attempt.number, pace=pace, at_s=self.at_s + 1)
        )

    def peak_bytes(self) -> int:
        return max(
            moment.counted_bytes + round(self.true * moment.activation_bytes)
            for moment in self.attempt.estimate.moments
        )

    def leave(self, step: int = LEARNED_STEPS) -> Attempt:
        """End the attempt as asked, saved; return the next one."""
        beat = Heartbeat(
            rank=0,
            step=step,
            steps_done=step,
            step_s=self.attempt.step_s,
            peak_bytes=self.peak_bytes(),
            phase="forward",
            at_s=self.at_s,
        )
        ends = (RankEnd(rank=0, exit_code=-15),)
        self.end(Evidence(ranks=ends, heartbeats=(beat,), stopped=True, checkpoint_step=step))
        return next(action.attempt for action in self.actions if isinstance(action, Launch))


def test_a_recovered_job_goes_on_with_a_faster_plan_that_fits_by_what_it_measured() -> None:
    play = Play()
    slow = play.recover()
    (stop,) = play.learn()
    assert stop == Stop(job_id="lm-1", number=slow.number, grace_s=stop.grace_s)
    fast = play.leave()
    assert fast.plan == play.scheduler.state.jobs["lm-1"].attempts[slow.number - 1].climbs_to
    assert fast.step_s < slow.step_s
    assert fast.plan.global_batch_size == slow.plan.global_batch_size
    assert fast.plan not in play.scheduler.state.jobs["lm-1"].refuted
    assert fast.placement == slow.placement
    assert ran_out(fast, TRUE) is None
    assert fast.change
    reason = play.scheduler.state.jobs["lm-1"].reason
    assert "goes on with" in reason
    assert "fits by the peak of 20 steps" in reason


def test_a_job_climbs_once() -> None:
    play = Play()
    play.recover()
    play.learn()
    play.leave()
    assert play.learn() == ()


def test_a_faster_plan_that_fails_gives_way_to_the_one_that_was_left() -> None:
    play = Play()
    slow = play.recover()
    play.learn()
    fast = play.leave()
    report = OomReport(
        rank=0,
        step=30,
        phase="backward",
        requested_bytes=1,
        live_bytes=80 * 2**30,
        capacity_bytes=80 * 2**30,
    )
    play.end(
        Evidence(
            ranks=(RankEnd(rank=0, exit_code=OOM_EXIT_CODE),), ooms=(report,), checkpoint_step=20
        )
    )
    assert fast.plan in play.scheduler.state.jobs["lm-1"].refuted
    assert play.attempt.plan == slow.plan


@pytest.mark.parametrize("steps_left", [0, 10, 40])
def test_a_job_stays_where_the_steps_left_do_not_pay_for_the_move(steps_left: int) -> None:
    play = Play()
    play.recover()
    assert play.learn(steps=LONG.training.max_steps - steps_left) == ()


def test_a_job_that_never_ran_out_of_memory_stays() -> None:
    play = Play(true=0.5)
    play.recover()
    assert play.attempt.number == 1
    assert play.learn() == ()


def test_a_job_that_told_no_peak_stays() -> None:
    play = Play()
    play.recover()
    assert play.learn(peak_bytes=None) == ()


def test_a_job_whose_peak_leaves_no_room_stays() -> None:
    play = Play()
    play.recover()
    around = play.attempt.estimate.device_bytes - play.attempt.estimate.allocated_bytes
    assert play.learn(peak_bytes=NODES[0].device.memory - around) == ()


def test_moving_up_uses_no_retry() -> None:
    play = Play()
    slow = play.recover()
    play.learn()
    play.leave()
    job = play.scheduler.state.jobs["lm-1"]
    failure = job.attempts[slow.number - 1].failure
    assert job.status is JobStatus.RUNNING
    assert failure is not None
    assert failure.kind is FailureKind.MOVED
