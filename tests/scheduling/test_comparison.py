"""Laws of a comparison: every strategy is a row, whatever became of it, and the verdict follows from the rows."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.planning.picture import Mark
from orchestrator.scheduling.reports.comparison import Comparison, make_comparison
from orchestrator.scheduling.reports.comparison_rows import (
    LossCurve,
    Outcome,
    describe_strategy,
    parse_loss_curve,
)
from orchestrator.scheduling.reports.intervals import (
    compute_geometric_mean_interval,
    compute_geometric_mean_ratio_interval,
)
from orchestrator.scheduling.step import step
from orchestrator.specs.attempt import (
    AttemptStatus,
    Evidence,
    Failure,
    FailureKind,
    Heartbeat,
    RankEnd,
)
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.job.sections import Member
from orchestrator.specs.job.trainer import Knobs
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.state import State
from tests.scheduling.factories import DEVICE, MIB, attempt, decoder_spec, job, node, script_spec

PRICED = DEVICE.model_copy(update={"price_per_hour": 3.6})
STATE, _ = step(State(), NodesSeen(nodes=(replace(node(), device=PRICED),), at_s=0.0))
ON_ONE = Plan(engine=Engine.TORCH, micro_batch_size=8)
ON_TWO = Plan(
    engine=Engine.DEEPSPEED,
    layout=ParallelLayout(dp=2),
    zero_stage=ZeroStage.GRADIENTS,
    micro_batch_size=4,
)


def measured_job(
    number: int,
    plan: Plan,
    step_s: float,
    kind: FailureKind | None = None,
    peak_bytes: int = 90 * MIB,
) -> Job:
    """A job of one attempt of 10 seconds."""
    beats = (
        Heartbeat(
            rank=0,
            step=5,
            steps_done=5,
            step_s=step_s,
            peak_bytes=peak_bytes,
            phase="forward",
            at_s=9.0,
        ),
    )
    ended_attempt = replace(
        attempt(job_id=f"lm-{number}"),
        plan=plan,
        status=AttemptStatus.ENDED,
        ended_at_s=10.0,
        evidence=Evidence(ranks=(RankEnd(rank=0, exit_code=0),), heartbeats=beats),
        failure=None if kind is None else Failure(kind=kind, reason="it failed"),
    )
    status = JobStatus.SUCCEEDED if kind is None else JobStatus.FAILED
    return replace(compared(number), attempts=(ended_attempt,), status=status)


def compared(number: int, **changes: object) -> Job:
    member = Member(number=number - 1, of=2, max_concurrent=1, compared=True)
    member_job = job(decoder_spec(member=member, **changes), f"lm-{number}", number)
    return replace(member_job, array="lm-1")


def refused(number: int, pins: dict[str, object], **changes: object) -> Job:
    return replace(
        compared(number, plan=pins, **changes), status=JobStatus.REFUSED, reason="no plan fits"
    )


def of(*jobs: Job, curves: dict[str, LossCurve] | None = None) -> Comparison:
    return make_comparison(STATE, jobs, curves or {})


def test_a_row_has_what_was_predicted_and_measured_and_what_it_cost() -> None:
    curve = LossCurve(losses={1: 3.0, 2: 2.5}, tokens=(512, 512))
    (row,) = of(measured_job(1, ON_TWO, 0.5), curves={"lm-1": curve}).rows
    assert (row.predicted_peak_bytes, row.peak_bytes, row.predicted_step_s, row.step_s) == (
        100 * MIB,
        90 * MIB,
        0.1,
        0.5,
    )
    assert (row.samples_per_s, row.tokens_per_s, row.loss) == (16.0, 1024.0, 2.5)
    assert (row.device_s, row.money) == (20.0, pytest.approx(0.02))
    assert row.mfu is not None
    assert 0 < row.mfu < 1


def test_twice_as_fast_is_twice_the_utilisation_and_a_second_device_is_half() -> None:
    slow, fast, wide = of(
        measured_job(1, ON_ONE, 0.4), measured_job(2, ON_ONE, 0.2), measured_job(3, ON_TWO, 0.2)
    ).rows
    assert slow.mfu is not None
    assert fast.mfu == pytest.approx(2 * slow.mfu)
    assert wide.mfu == pytest.approx(slow.mfu)


def test_the_verdict_has_the_time_of_each_and_which_costs_and_needs_least() -> None:
    verdict = of(
        measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4, peak_bytes=45 * MIB)
    ).verdict
    assert verdict.split(". ") == [
        "ZeRO-2 on 2 has the shortest step: 0.4 s",
        "plain on 1 takes 1.50x",
        "plain on 1 costs least: 0.75x the device-seconds of ZeRO-2 on 2 a step",
        "ZeRO-2 on 2 needs least memory: 45.00 MiB",
        "plain on 1 needs most: 90.00 MiB, 2.00x.",
    ]


def test_step_times_that_differ_by_little_are_called_the_same() -> None:
    verdict = of(
        measured_job(1, ON_TWO, 0.402),
        measured_job(2, replace(ON_TWO, zero_stage=ZeroStage.OPTIMIZER), 0.4),
    ).verdict
    assert "ZeRO-2 on 2 takes 1.00x, about as long." in verdict
    assert verdict.endswith("All need about the same memory: 90.00 MiB.")


def test_the_verdict_tells_whether_losses_agree_up_to_rounding() -> None:
    jobs = measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4)
    for last, sentence in (
        (2.01, "Losses agree: they differ by at most 0.01 "),
        (2.1, "The losses of ZeRO-2 on 2 differ"),
    ):
        curves = {
            "lm-1": LossCurve(losses={1: 3.0, 2: 2.0}),
            "lm-2": LossCurve(losses={1: 3.0, 2: last}),
        }
        assert sentence in of(*jobs, curves=curves).verdict


def test_what_memory_excludes_is_a_row_and_told_with_its_bytes() -> None:
    long_text = {"text": ["corpus.txt"], "sequence_length": 8192}
    big = {"micro_batch": 8, "activation_checkpointing": "none", "zero_stage": 0, "tp": 2, "pp": 1}
    result = of(
        measured_job(1, ON_ONE, 0.6),
        measured_job(2, ON_TWO, 0.4, FailureKind.DEVICE_OOM, 256 * MIB),
        refused(3, big, global_batch_size=8, data=long_text),
        refused(4, {"engine": "torch", "zero_stage": 1, "pp": 2}),
    )
    assert [row.outcome for row in result.rows] == [
        Outcome.FINISHED,
        Outcome.OUT_OF_MEMORY,
        Outcome.DOES_NOT_FIT,
        Outcome.NO_SUCH_PLAN,
    ]
    assert [row.ooms for row in result.rows] == [0, 1, 0, 0]
    assert result.rows[2].needed_bytes is not None
    assert result.rows[2].needed_bytes > 256 * MIB
    only, ran_out, not_there = result.verdict.split(". ")
    assert only == "Only plain on 1 finished"
    assert ran_out == "ZeRO-2 on 2 ran out of memory: 256.00 MiB of 256.00 MiB"
    assert not_there.startswith("tp2 on 2 does not fit: ")
    assert not_there.endswith(" of 256.00 MiB.")
    assert of(refused(1, big, global_batch_size=8, data=long_text)).verdict.startswith(
        "No strategy finished. "
    )


def test_the_distance_is_the_largest_between_curves_at_the_same_step() -> None:
    curves = {
        "lm-1": LossCurve(losses={1: 3.0, 2: 2.0, 3: 1.0}),
        "lm-2": LossCurve(losses={1: 3.0, 2: 2.25}),
        "lm-3": LossCurve(losses={}),
    }
    result = of(
        measured_job(1, ON_ONE, 0.6),
        measured_job(2, ON_TWO, 0.4),
        measured_job(3, ON_TWO, 0.4),
        curves=curves,
    )
    assert [row.loss_distance for row in result.rows] == [0.0, 0.25, None]


def test_a_picture_has_each_strategy_predicted_and_where_it_finished_measured() -> None:
    picture = of(
        measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4, FailureKind.DEVICE_OOM)
    ).picture
    assert picture is not None
    assert picture.capacity_bytes == 256 * MIB
    assert [(point.mark, point.step_s, point.label) for point in picture.points] == [
        (Mark.PREDICTED, 0.1, ""),
        (Mark.MEASURED, 0.6, "1"),
        (Mark.PREDICTED, 0.1, ""),
        (Mark.REFUTED, 0.4, "2"),
    ]


def test_a_comparison_is_complete_when_every_job_has_ended() -> None:
    assert of(measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4)).is_complete
    waiting = of(measured_job(1, ON_ONE, 0.6), compared(2))
    assert not waiting.is_complete
    assert waiting.verdict.endswith("1 of 2 have not ended.")


@pytest.mark.parametrize(
    ("plan", "name"),
    [
        (ON_ONE, "plain on 1"),
        (
            replace(ON_ONE, activation_checkpointing=ActivationCheckpointing.FULL),
            "checkpointing on 1",
        ),
        (replace(ON_ONE, layout=ParallelLayout(dp=2)), "DDP on 2"),
        (
            replace(ON_ONE, layout=ParallelLayout(dp=4), zero_stage=ZeroStage.GRADIENTS),
            "ZeRO-2 (FSDP2) on 4",
        ),
        (
            replace(ON_ONE, layout=ParallelLayout(dp=4), zero_stage=ZeroStage.PARAMETERS),
            "ZeRO-3 (FSDP2) on 4",
        ),
        (replace(ON_ONE, layout=ParallelLayout(tp=2)), "tp2 on 2"),
        (replace(ON_TWO, offload=Offload.OPTIMIZER), "ZeRO-2 + optimizer on host on 2"),
    ],
)
def test_a_strategy_is_named_by_what_it_shards_and_its_devices(plan: Plan, name: str) -> None:
    assert describe_strategy(plan) == name


def test_strategies_of_one_name_are_told_apart_by_the_cut_of_their_batch() -> None:
    result = of(
        measured_job(1, ON_ONE, 0.6),
        measured_job(2, replace(ON_ONE, micro_batch_size=4, gradient_accumulation_steps=2), 0.7),
    )
    assert [row.strategy for row in result.rows] == [
        "plain on 1 (micro 8x1)",
        "plain on 1 (micro 4x2)",
    ]
    other = of(
        measured_job(1, ON_ONE, 0.6),
        measured_job(2, replace(ON_ONE, micro_batch_size=4, gradient_accumulation_steps=2), 0.7),
        measured_job(3, ON_TWO, 0.4),
    )
    assert all("(micro " in row.strategy for row in other.rows), "on every row or on none"


def test_a_curve_survives_broken_lines() -> None:
    lines = [
        '{"step": 1, "loss": 2.5, "tokens": 8}',
        '{"step": 2, "loss": NaN}',
        "[]",
        '{"step": 3, "lo',
    ]
    assert parse_loss_curve(lines) == LossCurve(losses={1: 2.5}, tokens=(8,))


def test_of_many_strategies_that_do_not_fit_three_are_named() -> None:
    long = {"text": ["corpus.txt"], "sequence_length": 8192}
    jobs = [
        refused(n, {"tp": 2, "micro_batch": 8 * n, "pp": 1}, global_batch_size=8 * n, data=long)
        for n in (1, 2, 3, 4)
    ]
    verdict = of(*jobs).verdict
    assert verdict.count(" of 256.00 MiB)") == 3
    assert verdict.endswith(" and 1 more do not fit.")


def repeated(number: int, plan: Plan, *steps_s: float) -> list[Job]:
    """Return jobs of one strategy, which have the same pins."""
    pins = {"micro_batch_size": plan.micro_batch_size, "dp": plan.layout.dp}
    spec = decoder_spec(plan=pins)
    jobs = [
        measured_job(number + 10 * repeat, plan, step_s) for repeat, step_s in enumerate(steps_s)
    ]
    return [replace(job, spec=job.spec.model_copy(update={"plan": spec.plan})) for job in jobs]


def test_repeats_of_a_strategy_are_one_row_with_the_interval_of_their_mean() -> None:
    row, _ = of(*repeated(1, ON_ONE, 0.5, 0.6, 0.7), *repeated(2, ON_TWO, 0.4, 0.4, 0.4)).rows
    assert (row.repeats, row.steps_s, row.device_s) == (3, (0.5, 0.6, 0.7), 30.0)
    assert row.step_s == pytest.approx((0.5 * 0.6 * 0.7) ** (1 / 3))
    assert row.step_within_s is not None
    assert 0 < row.step_within_s[0] < 0.5 < 0.7 < row.step_within_s[1]


def test_no_difference_is_claimed_within_intervals_and_one_beyond_them_is() -> None:
    noisy = of(*repeated(1, ON_ONE, 0.5, 0.6, 0.7), *repeated(2, ON_TWO, 0.4, 0.5, 0.6))
    assert "plain on 1 takes 1.21x (0.74x to 1.96x), not told apart by 3 repeats." in noisy.verdict
    clear = of(*repeated(1, ON_ONE, 0.60, 0.61, 0.62), *repeated(2, ON_TWO, 0.40, 0.41, 0.42))
    assert "plain on 1 takes 1.49x (1.41x to 1.57x). " in clear.verdict
    assert not [note for note in clear.notes if "noise" in note]


def test_below_three_repeats_a_warning_says_so() -> None:
    once = of(measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4))
    assert any("Measured once" in note for note in once.notes)


def test_what_differs_beside_the_strategies_is_said() -> None:
    notes = of(measured_job(1, ON_ONE, 0.6), measured_job(2, ON_TWO, 0.4)).notes
    assert any("micro_batch_size (8, 4)" in note for note in notes)
    alike = of(
        measured_job(1, replace(ON_ONE, micro_batch_size=4), 0.6), measured_job(2, ON_TWO, 0.4)
    ).notes
    assert not any("micro_batch_size" in note for note in alike)


def test_a_rank_that_ended_before_it_trained_has_no_peak() -> None:
    beat = Heartbeat(
        rank=0, step=0, steps_done=0, step_s=None, peak_bytes=21, phase="startup", at_s=1.0
    )
    failed = measured_job(1, ON_ONE, 0.6, FailureKind.USER_ERROR)
    ended = replace(
        failed.attempts[0],
        evidence=Evidence(ranks=(RankEnd(rank=0, exit_code=1),), heartbeats=(beat,)),
    )
    assert of(replace(failed, attempts=(ended,))).rows[0].peak_bytes is None


def test_the_intervals_are_those_of_scipy_and_never_negative() -> None:
    import numpy as np
    from scipy import stats

    slow, fast = (0.5, 0.9, 0.7), (0.4, 0.41, 0.42, 0.44)
    low, high = compute_geometric_mean_interval(slow) or (0.0, 0.0)
    logs = np.log(slow)
    expected = stats.t.interval(0.95, 2, loc=logs.mean(), scale=stats.sem(logs))
    assert (np.log(low), np.log(high)) == pytest.approx(expected, rel=1e-3)
    welch = stats.ttest_ind(np.log(slow), np.log(fast), equal_var=False)
    low, high = compute_geometric_mean_ratio_interval(slow, fast) or (0.0, 0.0)
    whole = stats.t.ppf(0.975, int(welch.df)) / stats.t.ppf(0.975, welch.df)
    half = (welch.confidence_interval().high - welch.confidence_interval().low) / 2
    assert np.log(high / low) / 2 == pytest.approx(whole * half, rel=1e-3)
    assert (low < 1 < high) == (welch.pvalue > 0.05)
    assert compute_geometric_mean_ratio_interval((0.2, 0.2), (0.1, 0.1)) == pytest.approx(
        (2.0, 2.0)
    )
    assert (compute_geometric_mean_interval((0.1, 1.0)) or (0.0,))[0] > 0
    assert (
        compute_geometric_mean_interval((0.1,))
        is compute_geometric_mean_ratio_interval((0.1, 0.2), (0.1,))
        is None
    )


@pytest.mark.parametrize("is_script", [False, True])
def test_rows_of_two_learning_rates_are_told_apart_and_losses_are_compared_within_each(
    *, is_script: bool
) -> None:
    jobs = []
    for number, (plan, rate) in enumerate(
        [(ON_ONE, 1e-3), (ON_ONE, 1e-4), (ON_TWO, 1e-3), (ON_TWO, 1e-4)], 1
    ):
        measured = measured_job(number, plan, 1.0)
        training = replace(measured.spec.training, learning_rate=rate)
        pins = (("dp", plan.layout.dp),)
        spec = measured.spec.model_copy(update={"training": training, "plan": pins})
        if is_script:
            knobs = Knobs.model_validate({"learning_rate": {"flag": "--lr", "default": rate}})
            spec = script_spec().model_copy(update={"knobs": knobs, "plan": pins})
        jobs.append(replace(measured, spec=spec))
    losses = {"lm-1": 2.0, "lm-2": 3.0, "lm-3": 2.001, "lm-4": 3.002}
    curves = {job_id: LossCurve(losses={5: loss}) for job_id, loss in losses.items()}
    view = make_comparison(STATE, jobs, curves)
    assert [row.learning_rate for row in view.rows] == [1e-3, 1e-4, 1e-3, 1e-4]
    assert len({row.strategy for row in view.rows}) == 4
    assert [row.loss_distance for row in view.rows] == pytest.approx([0, 0, 0.001, 0.002])
    assert view.setup.provenance["learning_rate"] == "0.001, 0.0001"


@pytest.mark.parametrize(
    ("stated", "has_knob", "precision"),
    [
        (Precision.FP32, False, None),
        (Precision.BF16, False, "bf16"),
        (Precision.FP32, True, "fp32"),
    ],
)
def test_a_comparison_of_scripts_names_no_precision_that_nobody_stated(
    *, stated: Precision, has_knob: bool, precision: str | None
) -> None:
    knobs = Knobs.model_validate({"precision": {"flag": "--dtype", "default": "fp32"}})
    spec = script_spec(precision=stated, knobs=knobs if has_knob else Knobs())
    jobs = [
        replace(measured_job(number, replace(plan, precision=stated), 1.0), spec=spec)
        for number, plan in enumerate((ON_ONE, ON_TWO), 1)
    ]
    rows = make_comparison(STATE, jobs, {}).rows
    assert [row.settings.get("precision") for row in rows] == [precision] * 2
