"""Laws of probing: a script of unknown memory is measured twice, at no cost to its budgets, and then runs what fits."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest

from orchestrator.memory.calibration.calibrate import (
    PROBES_MAX,
    calibrate,
    select_observations_to_keep,
)
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.options.asks import apply_permissions
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Launch
from orchestrator.specs.attempt import (
    PROBE_STEPS,
    Attempt,
    Evidence,
    FailureKind,
    Heartbeat,
    OomReport,
    RankEnd,
)
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import (
    Event,
    Finished,
    NodesSeen,
    Released,
    RetryRequested,
    Submitted,
    TimerFired,
)
from orchestrator.specs.fault import Fault, FaultKind
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.profile import MeasuredLine, Source
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.specs.state import State
from tests.scheduling.world import CLUSTERS

MIB = 2**20
KNOBS = {
    "micro_batch_size": {"flag": "--batch", "default": 64},
    "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
    "output_dir": {"flag": "--output"},
}

DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 2,
}


def unknown(name: str = "unknown", **fields: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": name,
            "command": "python train.py",
            "global_batch_size": 64,
            "knobs": KNOBS,
            **fields,
        }
    )


class Night:
    """A device of 512 MiB, on which a script needs `fixed` MiB and `sample` MiB per sample of its micro-batch."""

    def __init__(
        self,
        fixed: int = 40,
        sample: int = 12,
        *,
        floor: int = 0,
        forward: float = 0.0,
        is_carried: bool = True,
    ) -> None:
        """`floor`: MiB of a moment without samples. `forward`: MiB of a sample when a forward pass ends; 0: unknown.

        `is_carried`: one Scheduler decides all night, else one is made for each event.
        """
        self.fixed, self.sample, self.is_carried = fixed, sample, is_carried
        self.floor, self.forward = floor, forward
        self.scheduler, self.launched, self.at_s = Scheduler(State()), list[Attempt](), 0.0
        nodes = make_idle_nodes(CLUSTERS[0])
        self.tell(NodesSeen(nodes=nodes, declared=nodes, at_s=0.0))

    def tell(self, event: Event) -> None:
        if not self.is_carried:
            self.scheduler = Scheduler(self.state)
        actions = self.scheduler.step(event)
        self.launched += [action.attempt for action in actions if isinstance(action, Launch)]

    @property
    def state(self) -> State:
        return self.scheduler.state

    def submit(self, spec: JobSpec, fault: Fault | None = None) -> None:
        order = self.state.submitted + 1
        self.tell(
            Submitted(
                job_id=f"{spec.name}-{order}", order=order, spec=spec, fault=fault, at_s=self.tick()
            )
        )

    def tick(self) -> float:
        self.at_s += 1000.0
        return self.at_s

    def end(self, evidence: Evidence | None = None) -> Attempt:
        """End the newest attempt by `evidence`, or as the world would, and return it."""
        attempt = self.launched[-1]
        ending = evidence or self.truth(attempt)
        self.tell(
            Finished(
                job_id=attempt.job_id, number=attempt.number, evidence=ending, at_s=self.tick()
            )
        )
        self.tell(Released(job_id=attempt.job_id, number=attempt.number, at_s=self.tick()))
        return attempt

    def peak_bytes(self, micro: int) -> int:
        return max(self.floor, self.fixed + self.sample * micro) * MIB

    def truth(self, attempt: Attempt) -> Evidence:
        micro = attempt.plan.micro_batch_size
        peak = self.peak_bytes(micro)
        if peak > 512 * MIB:
            room = 512 * MIB - attempt.plan.micro_batch_size  # no two batches leave the same bytes
            report = OomReport(
                rank=0,
                step=0,
                phase="backward",
                requested_bytes=MIB,
                live_bytes=room,
                capacity_bytes=512 * MIB,
            )
            return Evidence(ranks=(RankEnd(rank=0, exit_code=OOM_EXIT_CODE),), ooms=(report,))
        steps = PROBE_STEPS if attempt.probe else 10
        beat = Heartbeat(
            rank=0,
            step=steps,
            steps_done=steps,
            step_s=0.5,
            peak_bytes=peak,
            forward_bytes=int((self.fixed + self.forward * micro) * MIB) if self.forward else 0,
            phase="optimizer",
            at_s=self.at_s,
        )
        code = -15 if attempt.probe else 0
        return Evidence(
            ranks=(RankEnd(rank=0, exit_code=code),), heartbeats=(beat,), stopped=attempt.probe
        )

    def job(self, job_id: str = "unknown-1") -> Job:
        return self.state.jobs[job_id]


@pytest.mark.parametrize("seed", range(20))
def test_probes_see_memory_per_sample_below_peaks_that_have_no_samples(seed: int) -> None:
    draw = random.Random(seed)
    fixed, sample = draw.randint(20, 90), draw.randint(2, 12)
    # of an optimizer's update, a loader or an evaluation
    floor, forward = fixed + draw.randint(0, 150), sample * draw.uniform(0.8, 1)
    night = Night(fixed=fixed, sample=sample, floor=floor, forward=forward)
    night.submit(unknown())
    while night.launched[-1].probe:
        night.end()
    real = night.launched[-1]
    peak = night.peak_bytes(real.plan.micro_batch_size)
    assert peak <= 512 * MIB
    assert 0.9 <= real.estimate.allocated_bytes / peak <= 1.1
    assert len(night.launched) <= 1 + PROBES_MAX


class LateNight(Night):
    """A night on which training needs `later` times the bytes per sample that probes see."""

    later = 1.0

    def truth(self, attempt: Attempt) -> Evidence:
        probed = self.sample
        if not attempt.probe:
            self.sample *= self.later
        evidence = super().truth(attempt)
        self.sample = probed
        return evidence


@pytest.mark.parametrize("seed", range(40))
def test_failures_of_a_probed_script_lead_to_the_largest_micro_batch_that_fits(seed: int) -> None:
    draw = random.Random(seed)
    fixed, sample = draw.randint(10, 150), draw.choice([1, 2, 4, 8, 20])
    floor = draw.choice([0, 100, 200, 300, 400])
    forward = draw.choice([0.0, 0.8 * sample])
    night = LateNight(fixed, sample, floor=floor, forward=forward)
    night.later = draw.choice([1, 2, 4, 10])
    fitting = [
        micro
        for micro in (1, 2, 4, 8, 16, 32, 64)
        if max(floor, fixed + sample * night.later * micro) <= 512
    ]
    night.submit(unknown())
    while night.end() is not night.launched[-1]:
        assert len(night.launched) <= PROBES_MAX + 7
    last = night.launched[-1]
    assert not last.probe
    assert last.plan.micro_batch_size == fitting[-1]


def test_two_probes_tell_the_largest_micro_batch_that_fits_and_the_first_real_attempt_runs_it() -> (
    None
):
    night = Night(fixed=40, sample=12)
    night.submit(unknown())
    probes = [night.end(), night.end()]
    real = night.launched[-1]
    assert [(launch.probe, launch.plan.micro_batch_size) for launch in (*probes, real)] == [
        (True, 1),
        (True, 8),
        (False, 32),
    ]
    assert real.estimate.source is Source.PROBED
    assert real.estimate.allocated_bytes == (40 + 12 * 32) * MIB
    assert [launch.plan.gradient_accumulation_steps for launch in night.launched] == [2, 2, 2]
    assert real.plan.global_batch_size == 64
    night.end()
    assert len(night.launched) == 3


def test_a_bug_met_in_a_probe_ends_the_job() -> None:
    night = Night()
    night.submit(unknown())
    bug = Evidence(
        ranks=(
            RankEnd(
                rank=0, exit_code=1, log_tail="Traceback (most recent call last):\nKeyError: 'x'"
            ),
        )
    )
    assert night.end(bug).probe
    assert len(night.launched) == 1
    assert night.state.jobs == {}, "it has failed"


def test_a_probe_that_ends_before_it_is_stopped_needs_to_leave_nothing() -> None:
    night = Night()
    night.submit(unknown())
    ended = replace(night.truth(night.launched[-1]), stopped=False, missing_artifacts=("model.pt",))
    night.end(replace(ended, ranks=(RankEnd(rank=0, exit_code=0),)))
    assert night.job().attempts[0].failure.kind is FailureKind.PROBED  # type: ignore[union-attr]


def test_probes_take_as_few_devices_as_the_job_will() -> None:
    night = Night()
    nodes = make_idle_nodes(CLUSTERS[2])
    night.tell(NodesSeen(nodes=nodes, declared=nodes, at_s=night.tick()))
    night.submit(unknown(gpus={"min": 1, "max": 4}))
    assert night.launched[-1].plan.world_size == 1


def test_a_probe_that_runs_out_of_memory_at_the_smallest_micro_batch_is_an_answer() -> None:
    night = Night(fixed=600)
    night.submit(unknown())
    night.end()
    job = next(iter(night.state.jobs.values()), None)
    assert len(night.launched) == 1
    assert job is None, "nothing is lighter: it has failed"


def test_where_the_second_probe_runs_out_of_memory_the_first_one_is_what_runs() -> None:
    night = Night(fixed=40, sample=300)
    night.submit(unknown())
    night.end()
    night.end()
    assert [(launch.probe, launch.plan.micro_batch_size) for launch in night.launched] == [
        (True, 1),
        (True, 2),
        (False, 1),
    ]


@pytest.mark.parametrize(
    "end",
    [
        Evidence(
            ranks=(
                RankEnd(rank=0, exit_code=1, log_tail="ValueError: more than 1 value per channel"),
            )
        ),
        Evidence(nodes_lost=("one",)),
        Evidence(launch_error="no port"),
        Evidence(ranks=(RankEnd(rank=0, exit_code=-9),), hung_for_s=700.0),
    ],
    ids=["one sample", "node", "startup", "hang"],
)
def test_whatever_else_becomes_of_a_probe_uses_up_no_budget_and_the_job_begins_as_it_would_alone(
    end: Evidence,
) -> None:
    night = Night()
    budgets = {"oom": 0, "node": 0, "startup": 0, "hang": 0, "preemption": 0}
    night.submit(unknown(retries=budgets))
    night.end(end)
    assert night.job().status is JobStatus.RUNNING
    assert [(launch.probe, launch.plan.micro_batch_size) for launch in night.launched] == [
        (True, 1),
        (False, 64),
    ]


@pytest.mark.parametrize(
    "fields",
    [
        {"probe": "never"},
        {"profile": {"parameters": 1000, "activations_per_sample": "1MiB"}},
        {"trains": {"decoder": DECODER}},
        {"knobs": {key: knob for key, knob in KNOBS.items() if key != "output_dir"}},
        {"knobs": {key: knob for key, knob in KNOBS.items() if key != "micro_batch_size"}},
        {
            "knobs": {
                key: knob for key, knob in KNOBS.items() if key != "gradient_accumulation_steps"
            }
        },
        {"global_batch_size": 2},
    ],
    ids=[
        "never",
        "known",
        "of a known model",
        "no folder of its own",
        "no micro-batch",
        "no accumulation",
        "two micro-batches",
    ],
)
def test_a_job_that_is_known_or_cannot_be_measured_is_not_probed(fields: dict[str, object]) -> None:
    night = Night()
    night.submit(unknown(**fields))
    assert not night.launched[-1].probe


def test_a_rehearsed_failure_is_met_by_the_training_not_by_a_probe() -> None:
    night = Night()
    night.submit(unknown(), Fault(kind=FaultKind.OOM, rank=0, step=1))
    night.submit(unknown())
    assert not night.launched[-1].probe


def test_a_family_that_was_probed_is_not_probed_again_and_the_next_job_is_planned_with_what_was_learned() -> (
    None
):
    night = Night()
    night.submit(unknown())
    night.submit(unknown())
    for _ in range(3):
        night.end()
    assert night.launched[-1].job_id == "unknown-2"
    assert (night.launched[-1].probe, night.launched[-1].plan.micro_batch_size) == (False, 32)


def test_a_probe_that_ends_by_itself_is_no_success() -> None:
    night = Night()
    night.submit(unknown())
    night.end(
        replace(
            night.truth(night.launched[-1]), stopped=False, ranks=(RankEnd(rank=0, exit_code=0),)
        )
    )
    first = night.job().attempts[0]
    assert first.failure is not None
    assert (first.failure.kind, night.launched[-1].probe) == (FailureKind.PROBED, True)


def test_a_telling_repeated_begins_no_probe() -> None:
    night = Night()
    night.submit(unknown())
    night.end()
    attempt, launched = night.launched[0], len(night.launched)
    night.tell(Released(job_id=attempt.job_id, number=attempt.number, at_s=night.tick()))
    night.tell(Submitted(job_id="unknown-1", order=1, spec=unknown(), at_s=night.tick()))
    assert len(night.launched) == launched


def test_an_index_made_anew_decides_the_same() -> None:
    decisions = []
    for is_carried in (True, False):
        night = Night(is_carried=is_carried)
        night.submit(unknown())
        night.submit(unknown("other"))
        for _ in range(6):
            night.end()
        decisions.append([(launch.name, launch.probe, launch.plan) for launch in night.launched])
    assert decisions[0] == decisions[1]


def test_what_was_probed_is_a_line_and_is_still_known_after_many_outcomes() -> None:
    night = Night(fixed=30, sample=7)
    night.submit(unknown())
    night.end()
    night.end()
    observations = night.state.observations
    later = [
        replace(observations[0], probe=False, job=f"later-{n}", at_s=1e6 + n) for n in range(100)
    ]
    newest = select_observations_to_keep((*observations, *later))
    factors = calibrate(newest, device="small", family="unknown")
    assert factors.line == MeasuredLine(
        fixed_bytes=30 * MIB, sample_bytes=7 * MIB, is_of_one_rank=True
    )


def test_what_one_rank_was_measured_to_hold_gets_the_buckets_of_ddp_on_several() -> None:
    line = MeasuredLine(fixed_bytes=80 * MIB, sample_bytes=MIB, is_of_one_rank=True)
    spec, two = (
        unknown(gpus={"min": 1, "max": 2}),
        group_equal_nodes(make_idle_nodes(CLUSTERS[1]))[0].hardware,
    )
    for measured, added in ((line, 20 * MIB), (replace(line, is_of_one_rank=False), 0)):
        candidates = find_frontier(
            read_plan_request(spec.model_copy(update={"measured": measured})), two
        ).candidates
        fixed = {
            candidate.plan.layout.dp: candidate.estimate.allocated_bytes
            - candidate.plan.micro_batch_size * MIB
            for candidate in candidates
        }
        assert fixed == {1: 80 * MIB, 2: 80 * MIB + added}


@pytest.mark.parametrize("seed", range(40))
def test_a_script_whose_own_settings_fit_is_never_refused(seed: int) -> None:
    """The law holds for mixtures of the default micro-batch, accumulation, global batch and need."""
    draw = random.Random(seed)
    for _ in range(5):
        micro, accumulation = (
            draw.choice((1, 2, 3, 4, 6, 8, 16, 32, 64)),
            draw.choice((1, 1, 2, 3, 4, 6)),
        )
        batch = micro * accumulation * draw.choice((1, 1, 2, 3))
        sample = draw.randint(1, max(1, 500 // micro - 1))
        night = Night(fixed=draw.randint(1, max(1, 510 - micro * sample)), sample=sample)
        accumulate = {
            "gradient_accumulation_steps": {"flag": "--accumulate", "default": accumulation}
        }
        knobs = {"micro_batch_size": {"flag": "--batch", "default": micro}, **accumulate}
        if draw.random() < 0.2:
            del knobs["gradient_accumulation_steps"]
            batch = micro
        if draw.random() < 0.8:
            knobs["output_dir"] = KNOBS["output_dir"]
        night.submit(unknown(global_batch_size=batch, knobs=knobs))
        while (
            night.launched
            and (job := night.state.jobs.get("unknown-1"))
            and job.status is JobStatus.RUNNING
        ):
            night.end()  # bounded by the job's retries
        tried = [(attempt.probe, attempt.plan.micro_batch_size) for attempt in night.launched]
        case = (micro, accumulation, batch, night.fixed, night.sample, tried)
        assert night.launched, case
        assert not night.launched[-1].probe, case
        assert night.fixed + night.sample * night.launched[-1].plan.micro_batch_size <= 512, case


def test_bytes_that_ran_out_alike_under_two_micro_batches_end_a_job_that_has_only_its_batch() -> (
    None
):
    """The first forward pass of a detector that builds its anchors asks for the same bytes whatever the batch."""
    night = Night()
    knobs = {name: knob for name, knob in KNOBS.items() if name != "output_dir"}
    night.submit(unknown(knobs=knobs))
    report = OomReport(
        rank=0,
        step=0,
        phase="startup",
        requested_bytes=9,
        live_bytes=500 * MIB,
        capacity_bytes=512 * MIB,
    )
    burst = Evidence(ranks=(RankEnd(rank=0, exit_code=OOM_EXIT_CODE),), ooms=(report,))
    micro = [night.end(burst).plan.micro_batch_size for _ in range(2)]
    assert micro[0] > micro[1] > 1
    assert len(night.launched) == 2, "halved once, and never again"
    assert night.state.jobs == {}, "it has failed"


def test_a_job_that_only_a_smaller_batch_would_save_holds_nothing_asks_and_goes_on_with_what_is_allowed() -> (
    None
):
    night = Night(fixed=40, sample=30)
    micro = {"micro_batch_size": {"flag": "--batch", "default": 16}}
    other = {"micro_batch_size": {"flag": "--batch", "default": 1}}
    night.submit(unknown(global_batch_size=16, knobs=micro))
    night.submit(unknown("other", global_batch_size=1, knobs=other))
    night.end()
    job = night.job()
    assert (job.status, describe_status(job)) == (JobStatus.QUEUED, f"asks: {job.asks}")
    assert "`orc retry unknown-1 --global-batch-size 8`" in job.asks
    assert job.answer == (("global_batch_size", 8),)
    assert night.launched[-1].job_id == "other-2", "who waited has its device"
    night.end()
    night.tell(
        RetryRequested(
            job_id="unknown-1", spec=apply_permissions(job.spec, None, 8), at_s=night.tick()
        )
    )
    assert night.end().plan.global_batch_size == 8
    assert "unknown-1" not in night.state.jobs, "it has ended"
    night.submit(unknown("third", global_batch_size=16, knobs=micro))
    night.end()
    night.tell(TimerFired(at_s=night.at_s + 7 * 86_400.0))
    assert not night.state.jobs, "it has failed without an answer"
    assert [attempt.plan.global_batch_size for attempt in night.launched] == [16, 1, 8, 16]


def test_what_is_allowed_is_less_than_what_was_asked_for_and_something() -> None:
    spec = unknown(global_batch_size=16)
    for allowed in ((None, None), (None, 17)):
        with pytest.raises(SpecError):
            apply_permissions(spec, *allowed)
    numeric = apply_permissions(spec, "numeric", None)
    assert numeric.degrade.allow == "numeric"
    with pytest.raises(SpecError):
        apply_permissions(numeric, "numeric", None)
