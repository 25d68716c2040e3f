"""Laws of calibration: the influence of one outcome, of many, and when a plan counts as fitting."""

from __future__ import annotations

import math
import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.calibration.calibrate import (
    CONFIDENCE,
    CORRECTION_MAX,
    MARGIN,
    MARGINS,
    SUPPOSED,
    UNMEASURED,
    WINDOW,
    Calibration,
    PredictionErrors,
    _compute_student_cdf,
    _compute_student_quantile,
    calibrate,
    estimate_fit_probability,
    estimate_needed_bytes,
    get_step_kind,
    get_step_time_correction,
    select_observations_to_keep,
)
from orchestrator.memory.calibration.correction import (
    compute_activation_factor_of_peak,
    correct_device_bytes,
    select_worst_moments,
)
from orchestrator.specs.choices import Engine, Offload, ParallelLayout, ZeroStage
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes, Source
from tests.examples import examples
from tests.scheduling.factories import DEVICE, MIB, observation

PLAN = Plan(engine=Engine.TORCH, micro_batch_size=8)
OTHER_ENGINE = Plan(engine=Engine.DEEPSPEED, micro_batch_size=8)
SHARDED = replace(PLAN, layout=ParallelLayout(dp=2), zero_stage=ZeroStage.PARAMETERS)
PRECISE = (1.0, 1.0, 0.995, 1.002, 0.998, 1.001, 1.0, 0.99)

corrections = st.floats(1.0, 3.0)
ratios = st.floats(0.7, 1.5)
outcomes = st.lists(
    st.tuples(corrections, ratios, st.booleans(), st.sampled_from((PLAN, OTHER_ENGINE))),
    max_size=WINDOW // 2,
)


def estimate(
    counted: int = 60 * MIB, activations: int = 40 * MIB, overhead: int = 1
) -> MemoryEstimate:
    """`overhead` is what the allocator holds over what it gives out."""
    total = counted + activations
    return MemoryEstimate(
        moment="backward",
        by_cause=(("parameters", counted), ("activations", activations)),
        allocated_bytes=total,
        reserved_bytes=overhead * total,
        device_bytes=overhead * total,
        moments=(
            MomentBytes(name="backward", counted_bytes=counted, activation_bytes=activations),
        ),
    )


def learn(stored: list[Observation], job: str = "") -> Calibration:
    return calibrate(
        select_observations_to_keep(stored), device=DEVICE.name, family="lm", job_key=job
    )


def margin_of(stored: list[Observation]) -> float:
    return learn(stored).get_engine_errors(Engine.TORCH, Source.DECLARED).margin


def observe(ratios: tuple[float, ...], first: int = 1) -> list[Observation]:
    return [
        observation(ratio=ratio, number=number, at_s=float(number))
        for number, ratio in enumerate(ratios, start=first)
    ]


def sample(rows: list[tuple[float, float, bool, Plan]]) -> list[Observation]:
    return [
        observation(
            correction=factor,
            ratio=ratio,
            ran_out=ran_out,
            plan=plan,
            number=number,
            at_s=float(number),
        )
        for number, (factor, ratio, ran_out, plan) in enumerate(rows, start=1)
    ]


def test_without_outcomes_the_margin_is_the_documented_one() -> None:
    assert SUPPOSED.margin == pytest.approx(MARGIN)
    assert SUPPOSED.compute_probability_within(MARGIN) == pytest.approx(CONFIDENCE)
    assert SUPPOSED.compute_probability_within(1.0) == pytest.approx(0.5)


@given(outcomes)
@settings(max_examples=examples(60), deadline=None)
def test_the_margin_is_the_least_that_covers_the_stated_share(
    rows: list[tuple[float, float, bool, Plan]],
) -> None:
    beliefs = learn(sample(rows))
    for engine in (Engine.TORCH, Engine.DEEPSPEED):
        errors = beliefs.get_engine_errors(engine, Source.DECLARED)
        assert errors.compute_probability_within(errors.margin * (1 + 1e-9)) >= CONFIDENCE
        assert errors.compute_probability_within(errors.margin * (1 - 1e-6)) < CONFIDENCE


@given(
    outcomes,
    st.integers(1, 2**36),
    st.integers(0, 2**36),
    st.integers(1, 2**37),
    st.integers(0, 2**36),
)
@settings(max_examples=examples(60), deadline=None)
def test_fit_probability_never_rises_with_needed_bytes_nor_falls_with_capacity(
    rows: list[tuple[float, float, bool, Plan]],
    counted: int,
    more: int,
    capacity_bytes: int,
    room: int,
) -> None:
    beliefs = learn(sample(rows))
    for overhead in (1, 2):
        light, heavy = estimate(counted, 1000, overhead), estimate(counted + more, 1000, overhead)
        here = estimate_fit_probability(PLAN, light, beliefs, capacity_bytes)
        assert 0.0 <= here <= 1.0
        assert estimate_fit_probability(PLAN, heavy, beliefs, capacity_bytes) <= here
        assert estimate_fit_probability(PLAN, light, beliefs, capacity_bytes + room) >= here


@given(outcomes, st.integers(1, 2**37))
@settings(max_examples=examples(60), deadline=None)
def test_plans_called_fitting_fit_with_the_stated_share(
    rows: list[tuple[float, float, bool, Plan]], capacity_bytes: int
) -> None:
    beliefs = learn([outcome for outcome in sample(rows) if not outcome.ran_out])
    for overhead in (1, 2):
        prediction = estimate(overhead=overhead)
        share = estimate_fit_probability(PLAN, prediction, beliefs, capacity_bytes)
        assert (share >= CONFIDENCE - 1e-9) == (
            estimate_needed_bytes(PLAN, prediction, beliefs) <= capacity_bytes
        )


@given(outcomes, st.integers(0, 2**36))
@settings(max_examples=examples(60), deadline=None)
def test_no_outcome_shrinks_an_estimate(
    rows: list[tuple[float, float, bool, Plan]], activations: int
) -> None:
    prediction = estimate(activations=activations)
    assert (
        correct_device_bytes(prediction, learn(sample(rows)).correction) >= prediction.device_bytes
    )


@given(outcomes, st.integers(1, 2**36), st.lists(ratios, max_size=WINDOW))
@settings(max_examples=examples(60), deadline=None)
def test_a_refuted_plan_never_fits_the_capacity_that_it_exceeded(
    rows: list[tuple[float, float, bool, Plan]], burst_bytes: int, kinder: list[float]
) -> None:
    prediction = estimate()
    failed = observation(
        job="burst",
        number=1,
        at_s=0.0,
        ran_out=True,
        plan=PLAN,
        measured_bytes=burst_bytes + 1,
        torch_version="2.10",
    )
    after = [
        observation(ratio=ratio, number=100 + number, at_s=100.0 + number)
        for number, ratio in enumerate(kinder)
    ]
    beliefs = learn([failed, *sample(rows), *after])
    assert estimate_fit_probability(PLAN, prediction, beliefs, burst_bytes) == 0.0
    assert beliefs.has_run_out(PLAN, prediction, burst_bytes)
    lighter = estimate(counted=prediction.allocated_bytes - 40 * MIB - 1)
    assert not learn([failed]).has_run_out(PLAN, lighter, burst_bytes), (
        "a smaller model of the family is another matter"
    )


@given(outcomes, st.integers(1, 2**31))
@settings(max_examples=examples(60), deadline=None)
def test_a_plan_that_completed_a_training_fits_the_same_capacity_again(
    rows: list[tuple[float, float, bool, Plan]], measured_bytes: int
) -> None:
    prediction, plan = estimate(), replace(PLAN, micro_batch_size=4)
    ended = observation(
        job="ended", number=1, at_s=200.0, plan=plan, measured_bytes=measured_bytes, finished=True
    )
    beliefs = learn([*sample(rows), ended])
    took_bytes = max(measured_bytes, prediction.allocated_bytes)
    needed = estimate_needed_bytes(plan, prediction, beliefs)
    assert took_bytes < needed <= 1.001 * MARGIN * took_bytes
    assert estimate_fit_probability(plan, prediction, beliefs, needed) >= CONFIDENCE
    assert correct_device_bytes(
        prediction, beliefs.compute_activation_factor(plan, prediction)
    ) == pytest.approx(took_bytes, abs=1)
    larger = estimate(activations=41 * MIB)
    assert beliefs.get_plan_errors(plan, larger) == beliefs.get_engine_errors(
        plan.engine, larger.source
    ), "another training"


def test_a_plan_with_a_success_and_an_out_of_memory_failure_is_judged_as_the_others() -> None:
    ended = [
        observation(correction=20.0, number=number, at_s=float(number), finished=True)
        for number in (1, 2)
    ]
    assert estimate_needed_bytes(PLAN, estimate(), learn(ended)) < 910 * MIB
    burst = observation(correction=21.0, job="burst", number=1, at_s=0.0, ran_out=True)
    assert estimate_needed_bytes(PLAN, estimate(), learn([burst, *ended])) > 910 * MIB


@given(
    st.lists(st.floats(1.0, 1.2), min_size=2, max_size=WINDOW - 1),
    st.floats(1.0, 1e6),
    st.integers(0, WINDOW),
    st.data(),
)
@settings(max_examples=examples(60), deadline=None)
def test_one_outlier_leaves_the_correction_within_the_range_of_the_others(
    factors: list[float], outlier: float, place: int, data: st.DataObject
) -> None:
    place = min(place, len(factors))
    mixed = [*factors[:place], outlier, *factors[place:]]
    ran_out = data.draw(st.booleans())
    stored = [
        observation(
            correction=factor,
            number=number,
            at_s=float(number),
            ran_out=ran_out and number == place,
        )
        for number, factor in enumerate(mixed)
    ]
    expected = [
        compute_activation_factor_of_peak(outcome.moments, outcome.measured_bytes)
        for outcome in stored
        if outcome.number != place
    ]
    assert min(expected) <= learn(stored).correction <= max(expected)


@pytest.mark.parametrize("outlier", [1.2, 20.0, 1e6])
def test_one_outlier_among_eight_precise_outcomes_widens_the_margin_to_8_percent_at_most(
    outlier: float,
) -> None:
    precise = observe(PRECISE)
    before = margin_of(precise)
    after = margin_of([*precise, observation(ratio=outlier, number=99, at_s=99.0)])
    assert before < after <= 1.08


def test_a_second_outcome_like_it_is_a_pattern() -> None:
    twice = [observation(ratio=1.5, number=number, at_s=float(number)) for number in (98, 99)]
    assert margin_of([*observe(PRECISE), *twice]) == pytest.approx(1.5, rel=1e-6)


@given(
    st.lists(
        st.tuples(corrections, ratios, st.just(False), st.just(PLAN)),
        min_size=1,
        max_size=WINDOW // 4,
    )
)
@settings(max_examples=examples(60), deadline=None)
def test_more_outcomes_of_the_same_spread_never_widen_the_margin(
    rows: list[tuple[float, float, bool, Plan]],
) -> None:
    """Each outcome came twice at least: alone, one might be an outlier."""
    some, more = learn(sample(rows * 2)), learn(sample(rows * 4))
    assert more.correction == some.correction
    assert more.get_engine_errors(Engine.TORCH, Source.DECLARED).margin <= some.get_engine_errors(
        Engine.TORCH, Source.DECLARED
    ).margin * (1 + 1e-12)


@pytest.mark.parametrize("spread", [0.005, 0.0168, 0.1])
def test_fit_probabilities_are_nearly_the_observed_frequencies(spread: float) -> None:
    """Drawn from a seed: errors that are as precise as supposed, more precise, and far less."""
    draw, fits, families = random.Random(7), 0, 1000
    for _ in range(families):
        errors = PredictionErrors(tuple(math.exp(draw.gauss(0.0, spread)) for _ in range(16)))
        fits += math.exp(draw.gauss(0.0, spread)) <= errors.margin
    assert fits / families >= 0.965


@pytest.mark.parametrize(
    ("freedom", "quantile"), [(2, 6.965), (3, 4.541), (8, 2.896), (9, 2.821), (40, 2.423)]
)
def test_students_quantiles_are_those_of_the_tables(freedom: int, quantile: float) -> None:
    assert _compute_student_quantile(freedom) == pytest.approx(quantile, abs=5e-4)
    assert _compute_student_cdf(-quantile, freedom) == pytest.approx(0.01, abs=2e-5)


def test_the_margin_falls_with_precise_outcomes_and_rises_with_others() -> None:
    margins = [margin_of(observe(PRECISE[:1] * count)) for count in (0, 1, 4, 16, WINDOW)]
    assert margins == sorted(margins, reverse=True)
    assert margins[0] == pytest.approx(1.05)
    assert margins[-1] < 1.02
    scattered = [
        observation(ratio=ratio, number=number, moments=())
        for number, ratio in enumerate((0.8, 1.3, 1.1, 0.9))
    ]
    assert margin_of(scattered) > 1.3


def test_outcomes_below_their_prediction_add_no_risk() -> None:
    assert margin_of(observe((0.4, 0.9, 0.6, 0.99, 0.2))) < MARGIN


def test_where_the_allocator_is_not_measured_the_margin_never_falls_below_the_documented_one() -> (
    None
):
    precise = learn(observe(PRECISE * 3))
    assert precise.get_engine_errors(Engine.TORCH, Source.DECLARED).margin < MARGIN
    prediction = estimate(overhead=2)
    assert estimate_needed_bytes(PLAN, prediction, precise) >= MARGIN * prediction.device_bytes


def test_engines_share_the_correction_of_activations_but_not_the_precision_of_their_own_terms() -> (
    None
):
    stored = [observation(correction=2.0, number=number, at_s=float(number)) for number in range(3)]
    beliefs = learn(stored)
    assert beliefs.correction == pytest.approx(2.0)
    assert beliefs.get_engine_errors(Engine.TORCH, Source.DECLARED).margin < MARGIN
    assert beliefs.get_engine_errors(Engine.DEEPSPEED, Source.DECLARED).margin == pytest.approx(
        MARGIN
    )
    far = [
        observation(correction=2.0, ratio=1.5, number=number, at_s=9.0, plan=OTHER_ENGINE)
        for number in (7, 8)
    ]
    after = learn([*stored, *far])
    assert after.get_engine_errors(Engine.TORCH, Source.DECLARED) == beliefs.get_engine_errors(
        Engine.TORCH, Source.DECLARED
    )
    assert after.get_engine_errors(Engine.DEEPSPEED, Source.DECLARED).margin > 1.4


def test_the_outcome_that_sets_the_correction_is_no_proof_of_precision() -> None:
    beliefs = learn([observation(correction=4.0, ran_out=True)])
    assert (beliefs.correction, beliefs.get_engine_errors(Engine.TORCH, Source.DECLARED)) == (
        4.0,
        PredictionErrors(),
    )
    beliefs = learn([observation(correction=4.0)])
    assert beliefs.correction == 4.0
    assert beliefs.get_engine_errors(Engine.TORCH, Source.DECLARED).margin == pytest.approx(MARGIN)


def test_a_trace_needs_a_smaller_margin_than_other_profiles_on_virtual_devices_only() -> None:
    for source in Source:
        prediction = replace(estimate(), source=source)
        room = MARGINS[source]
        assert estimate_needed_bytes(PLAN, prediction, UNMEASURED) == pytest.approx(
            room * prediction.device_bytes
        )
        assert (
            estimate_fit_probability(
                PLAN, prediction, UNMEASURED, estimate_needed_bytes(PLAN, prediction, UNMEASURED)
            )
            >= CONFIDENCE
        )
        allocator = replace(estimate(overhead=2), source=source)
        assert estimate_needed_bytes(PLAN, allocator, UNMEASURED) == pytest.approx(
            MARGIN * allocator.device_bytes
        )
    assert min(MARGINS.values()) == MARGINS[Source.TRACED] < MARGIN


def test_an_outcome_more_than_ten_times_off_corrects_other_jobs_by_ten_and_its_own_in_full() -> (
    None
):
    (failed,) = stored = [observation(correction=400.0, job="mine", ran_out=True)]
    assert learn(stored).correction == CORRECTION_MAX
    of_job = learn(stored, job="mine")
    assert of_job.belief is not None
    assert (
        of_job.correction
        > of_job.belief.least
        == compute_activation_factor_of_peak(failed.moments, failed.measured_bytes)
        > 300
    )
    assert learn([*stored, *observe(PRECISE)]).correction < 1.1


def test_a_job_is_held_to_its_own_failure() -> None:
    failed = observation(correction=5.0, job="mine", ran_out=True, at_s=50.0)
    stored = [*observe(PRECISE), failed]
    assert learn(stored).correction < 1.1
    of_job = learn(stored, job="mine")
    assert of_job.belief is not None
    assert of_job.correction > of_job.belief.least == 5.0


def test_outcomes_of_other_devices_families_and_older_torches_do_not_count() -> None:
    far = observation(correction=3.0)
    for changed in ({"device": "b"}, {"family": "g"}):
        for other in (far, observation(correction=3.0, ran_out=True), observation(step_ratio=2.0)):
            assert learn([replace(other, **changed)]) == UNMEASURED
    newer = observation(number=2, at_s=2.0, torch_version="2.12")
    assert learn([far, newer]).correction == 1.0
    assert learn([far, replace(newer, torch_version="")]).correction == pytest.approx(3.0)


def test_steps_are_corrected_by_the_median_of_their_kind() -> None:
    taken = [
        observation(number=number, at_s=float(number), step_ratio=ratio)
        for number, ratio in enumerate((1.2, 9.0, 1.3, None, 1.1, 1.4))
    ]
    assert learn(taken).step_factors == {get_step_kind(PLAN): 1.3}


def test_a_slow_offload_makes_no_other_plan_of_its_engine_look_slow() -> None:
    offloaded = replace(SHARDED, engine=Engine.DEEPSPEED, offload=Offload.OPTIMIZER)
    factors = learn([observation(plan=offloaded, step_ratio=3.0)]).step_factors
    assert get_step_time_correction(replace(offloaded, micro_batch_size=2), factors) == 3.0
    assert get_step_time_correction(replace(offloaded, offload=Offload.NONE), factors) == 1.0


def test_unmeasured_mechanics_take_the_median_of_those_of_their_engine_and_the_own_ones_come_first() -> (
    None
):
    whole, gradients_cut = (
        replace(SHARDED, zero_stage=ZeroStage.NONE),
        replace(SHARDED, zero_stage=ZeroStage.GRADIENTS),
    )
    measured = ((whole, 1.2), (SHARDED, 1.6), (OTHER_ENGINE, 5.0))
    family = learn(
        [
            observation(plan=plan, step_ratio=ratio, number=number)
            for number, (plan, ratio) in enumerate(measured)
        ]
    )
    factors = family.step_factors
    assert [
        get_step_time_correction(plan, factors) for plan in (whole, SHARDED, gradients_cut)
    ] == [
        1.2,
        1.6,
        pytest.approx(1.4),
    ]
    assert get_step_time_correction(SHARDED, {get_step_kind(whole): 0.9}, factors) == 0.9
    assert get_step_time_correction(OTHER_ENGINE, {get_step_kind(whole): 0.9}, factors) == 5.0
    assert get_step_time_correction(OTHER_ENGINE, {get_step_kind(whole): 0.9}) == 0.9, (
        "no engine is faster for not being measured"
    )
    assert get_step_time_correction(PLAN, {}) == 1.0


@given(outcomes, st.integers(0, 2**32))
@settings(max_examples=examples(60), deadline=None)
def test_neither_order_nor_repetition_of_outcomes_matters(
    rows: list[tuple[float, float, bool, Plan]], seed: int
) -> None:
    stored = sample(rows * 4)
    newest = select_observations_to_keep(stored)
    shuffled = random.Random(seed).sample(stored, len(stored))
    assert select_observations_to_keep([*shuffled, *newest]) == newest
    assert (
        select_observations_to_keep([*select_observations_to_keep(shuffled[::2]), *shuffled])
        == newest
    )


def test_stored_outcomes_are_bounded_by_key_and_every_refuted_plan_stays() -> None:
    early = [
        observation(
            number=number,
            at_s=float(number),
            ran_out=True,
            plan=replace(PLAN, gradient_accumulation_steps=1 + number % 3),
        )
        for number in range(30)
    ]
    late = observe((1.0,) * 100, first=100)
    newest = select_observations_to_keep([*early, *late])
    assert len(newest) == WINDOW + 3
    assert newest[-WINDOW:] == tuple(late[-WINDOW:])
    assert {outcome.plan for outcome in newest if outcome.ran_out} == {
        outcome.plan for outcome in early
    }


@given(
    st.lists(st.tuples(st.integers(0, 1000), st.integers(0, 1000)), max_size=8),
    st.floats(1.0, 50.0),
)
def test_the_lasting_moments_reach_every_peak(
    moments: list[tuple[int, int]], factor: float
) -> None:
    def peak(moments: tuple[MomentBytes, ...]) -> float:
        return max(
            (moment.counted_bytes + factor * moment.activation_bytes for moment in moments),
            default=0.0,
        )

    every = tuple(
        MomentBytes(name=str(number), counted_bytes=counted, activation_bytes=activations)
        for number, (counted, activations) in enumerate(moments)
    )
    assert peak(select_worst_moments(every)) == peak(every)
