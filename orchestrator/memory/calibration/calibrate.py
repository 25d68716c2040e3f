"""Calibration of memory predictions by measurements: a factor on the activations, and a safety margin.

Parameters, gradients, optimizer states and buffers follow from counting; what a model keeps for its backward pass
follows from its code, and is the same under every engine. So a measurement corrects the activations alone, for the
whole (device, family). A plan that shards better then rightly saves little where activations are the trouble. Each
engine's own terms are counted with different precision. So the remaining error, measured over corrected peak, is kept
by engine. From it follow the margin and the probability that a plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from statistics import median, median_high
from typing import NamedTuple

from orchestrator.memory.calibration.belief import (
    ActivationFactorBelief,
    believe_activation_factor,
    find_largest_fitting_factor,
)
from orchestrator.memory.calibration.correction import (
    compute_activation_factor_of_peak,
    correct_device_bytes,
    correct_peak_bytes,
)
from orchestrator.memory.engines.overhead import (
    SUPPOSED_OVERHEAD,
    MeasuredOverhead,
    measure_overhead,
)
from orchestrator.specs.choices import Engine, Offload, OffloadTarget, ZeroStage
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.frozen import frozen
from orchestrator.specs.group_values import group_values
from orchestrator.specs.mechanics import Mechanics
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MeasuredLine, MemoryEstimate, OwnSettings, Source
from orchestrator.specs.replace import replace

# A plan fits where it does so with this probability.
CONFIDENCE = 0.99
EVEN = 0.5
# The room that a plan must leave where nothing was measured, by where its profile comes from. 240
# plans on virtual
# devices were drawn at random (tests/memory/test_fits.py, 2026-11-22). The closed form falls short
# of 60 by 0.7 % at
# most, a trace of the other 180 by 1.6 %; its bar is 3 % (tests/memory/test_traced.py). What is
# declared or assumed is
# trusted no more than the closed form. On CUDA, memory.estimate.FRAGMENTATION falls short of the
# worst of 11 replayed
# allocator traces by 4.8 % (1.132 against 1.08), so that MARGIN holds whatever the source is.
MARGIN = 1.05
# Mean error of predictions of published trainings that others collected and nobody here had looked
# at: 24.5 % of 50, of 35 sources (commit 1334597, 2026-11-29).
REPORTED_ERROR = 1.24
DECLARED = (Source.DECLARED, Source.DECLARED_MEMORY)
MARGINS: Mapping[Source, float] = {
    Source.CLOSED_FORM: MARGIN,
    Source.TRACED: 1.03,
    Source.DECLARED: MARGIN,
    Source.DECLARED_MEMORY: MARGIN,
    Source.PROBED: MARGIN,
    Source.ASSUMED: MARGIN,
}
# So many outcomes is that worth. With 8, of families whose errors have the spread that MARGIN
# supposes, 98.4 to 99.2 %
# stay within the margin after 0 to 32 outcomes; of families of about six times that spread, 95 %
# after 8 and 98.6 %
# after 32 (4,000 draws each, 2026-11). A plain conformal quantile gave 94 % and 89 % after 8: it
# cannot say
# 99 % before 99.
PRIOR_OUTCOMES = 8
# Beyond such a factor on its activations an outcome is no measure of the profile: it is that of
# another model, or what
# grew is no activation at all. For other jobs it counts as this much.
CORRECTION_MAX = 10.0
# An outcome further above the median than so many spreads counts as if it were there (Hampel's
# rule: Hampel 1974, JASA
# 69:383, section 4); 1.4826 makes the median absolute deviation of a normal distribution its
# spread.
OUTLIER_SPREADS = 3.0
DEVIATION_TO_SPREAD = 1.4826

# of a probability: beyond, sums of angles are noise, and a tail may turn negative
ROUNDING_DIGITS = 12
PROBES_MAX = 4  # of a job; two where they tell the bytes of a sample
SLOPE_MIN = 1.01  # slopes of probes are alike within that
# newest outcomes of each (device, engine, family, torch version) that count and are kept
WINDOW = 32
OBSERVATIONS_MAX = 1000  # kept in all, newest: more than a cluster's families need


@dataclass(frozen=True)
class PredictionErrors:
    """The prediction errors of one engine that remain after correction: measured over corrected
    peak memory.
    """

    ratios: tuple[float, ...] = ()  # measured over corrected peak
    spent: int = 0  # of them, those that set the correction: they prove no precision
    supposed: float = MARGIN  # the margin before anything was measured: one of MARGINS

    def compute_probability_within(self, ratio: float) -> float:
        """Return the probability that the measured peak is at most `ratio` times the corrected
        prediction.

        The logarithm of a ratio is taken as normal around 0. The outcomes give its spread,
        beginning with PRIOR_OUTCOMES of the spread that `supposed` means. So the next one follows
        Student's t (Gelman et al. 2013, Bayesian Data Analysis, sections 2.6 and 3.2). More than
        one outcome beyond `ratio` is no outlier but a pattern. The probability is then bounded by
        the rank of the others, as in split conformal prediction (Vovk et al. 2005, Algorithmic
        Learning in a Random World, section 2.2).
        """
        if ratio <= 0:
            return 0.0
        share = round(
            _compute_student_cdf(math.log(ratio) / self.spread, self._freedom), ROUNDING_DIGITS
        )
        beyond = sum(ratio > ratio for ratio in self.ratios)
        return min(share, 1 - max(0, beyond - 1) / (len(self.ratios) + 1))

    @cached_property
    def margin(self) -> float:
        """The factor on a corrected prediction that covers the measured peak with probability
        CONFIDENCE.
        """
        pattern = sorted(self.ratios)[-2:-1]  # one of them may be an outlier
        return max((math.exp(self.spread * _compute_student_quantile(self._freedom)), *pattern))

    @cached_property
    def spread(self) -> float:
        """Standard deviation of the log ratios (measured over predicted), computed from the
        positive ones.

        It is at least that of all outcomes. A symmetric distribution has half of its variance above
        its centre. Needing less than predicted is no risk.
        """
        supposed = compute_prior_spread(self.supposed)
        if not self.ratios:
            return supposed
        logs = _drop_outliers([math.log(ratio) for ratio in self.ratios], supposed)
        variance = 2 * sum(max(0.0, log) ** 2 for log in logs) / len(logs)
        blended = (PRIOR_OUTCOMES * supposed**2 + len(logs) * variance) / self._freedom
        return math.sqrt(max(variance, blended))

    @property
    def _freedom(self) -> int:
        return PRIOR_OUTCOMES + len(self.ratios) - self.spent


@frozen
class RefutedPlan:
    """A plan that ran out of memory, with the bytes that it needs at least."""

    plan: Plan
    predicted_bytes: int  # allocated, before correction
    needed_bytes: int  # allocated


@frozen
class ProvenPlan:
    """A plan under which trainings finished, with their highest measured peak."""

    plan: Plan
    predicted_bytes: int  # allocated, before correction
    measured_bytes: int  # allocated


class StepKind(NamedTuple):
    """A kind of plans that share one correction of their predicted step time."""

    place: tuple[Engine, Offload, OffloadTarget]  # whose loop it is, and where its state lives
    # how ranks share state, whether in a pipeline, and whether layers are compiled
    shared: tuple[type[Mechanics], ZeroStage, bool, bool]


def get_step_kind(plan: Plan) -> StepKind:
    """Return the kind of plan by which `Calibration.step_factors` is keyed."""
    mechanics = plan.mechanics
    shared = (type(mechanics), mechanics.stage, plan.layout.pp > 1, plan.compiled)
    return StepKind((plan.engine, plan.offload, plan.offload_target), shared)


def get_step_time_correction(plan: Plan, *factors_by_kind: Mapping[StepKind, float]) -> float:
    """Return the factor (measured over predicted step time) for the plan, from the first of
    `factors_by_kind` that has one.

    1 where none has. Within one mapping, the plan's own kind comes first. Else it is the median
    over kinds that differ only in how ranks shard state. Else other engines count: a slow machine
    slows all of them, and an unmeasured plan is no faster for it. Host offload is an exception: its
    speed says nothing about plans without it.
    """
    kind = get_step_kind(plan)
    for factors in factors_by_kind:
        alike = [factor for other, factor in factors.items() if other.place == kind.place]
        if alike:
            return factors.get(kind, median(alike))
    for factors in factors_by_kind:
        elsewhere = [
            factor for other, factor in factors.items() if other.place[1:] == kind.place[1:]
        ]
        if elsewhere:
            return median(elsewhere)
    return 1.0


@frozen
class Calibration:
    """Measured errors of the predictions for one model family on one kind of device."""

    correction: float = 1.0  # on the activations; never below 1
    # of a job that ran out of memory itself: what its activations may be
    belief: ActivationFactorBelief | None = None
    errors: Mapping[Engine, PredictionErrors] = field(default_factory=dict)
    refuted: tuple[RefutedPlan, ...] = ()
    proven: tuple[ProvenPlan, ...] = ()
    step_factors: Mapping[StepKind, float] = field(
        default_factory=dict
    )  # measured / predicted seconds of a step
    line: MeasuredLine | None = None  # of a script that was probed
    # whether anything of the family ran here before, or a probe ran out of memory
    is_seen: bool = False
    overhead: MeasuredOverhead = (
        SUPPOSED_OVERHEAD  # of the device, whatever family it was measured with
    )
    # settings of the script to which outcomes are relative; None: no script
    relative_to: OwnSettings | None = None

    def get_engine_errors(self, engine: Engine, source: Source) -> PredictionErrors:
        """Return the engine's prediction errors for profiles of this source; assumed errors before
        any measurement.
        """
        return _replace_supposed_margin(self.errors.get(engine, SUPPOSED), MARGINS[source])

    def compute_activation_factor(self, plan: Plan, estimate: MemoryEstimate) -> float:
        """Return the factor on the plan's predicted activations: from the plan's own measured peak
        if it ran, else the family's.
        """
        proven = self._find_proven_plan(plan, estimate)
        return (
            self.correction
            if proven is None
            else compute_activation_factor_of_peak(estimate.moments, proven.measured_bytes)
        )

    def get_plan_errors(self, plan: Plan, estimate: MemoryEstimate) -> PredictionErrors:
        """Return the prediction errors by which the plan is judged.

        A plan that already ran varies as much as an unmeasured plan.
        """
        if self._find_proven_plan(plan, estimate) is None:
            return self.get_engine_errors(plan.engine, estimate.source)
        return _replace_supposed_margin(SUPPOSED, MARGINS[estimate.source])

    def _find_proven_plan(self, plan: Plan, estimate: MemoryEstimate) -> ProvenPlan | None:
        return next(
            (
                row
                for row in self.proven
                if row.plan == plan and row.predicted_bytes == estimate.allocated_bytes
            ),
            None,
        )

    def has_run_out(self, plan: Plan, estimate: MemoryEstimate, capacity_bytes: int) -> bool:
        """Return whether this plan already ran out of memory at this capacity, although predicted
        no higher than now.
        """
        allocated_bytes = capacity_bytes - (estimate.device_bytes - estimate.allocated_bytes)
        return any(
            row.plan == plan
            and row.predicted_bytes <= estimate.allocated_bytes
            and allocated_bytes < row.needed_bytes
            for row in self.refuted
        )


SUPPOSED = PredictionErrors()
UNMEASURED = Calibration()


def calibrate(
    observations: Iterable[Observation], *, device: str, family: str, job_key: str = ""
) -> Calibration:
    """Return the calibration of predictions for a model family on a kind of device.

    `job_key` names the job to plan. `observations` come oldest first, as
    `select_observations_to_keep` returns them. The correction is the upper median of the observed
    factors, none above CORRECTION_MAX: one outlier among three or more does not move it out of the
    others' range. A job that ran out of memory uses the median of its belief instead. Outcomes
    under another torch than the newest do not count, but plans that ran out stay excluded. Outcomes
    of a script also do not count if they were predicted relative to other settings than the newest.
    """
    of_device = [outcome for outcome in observations if outcome.device == device]
    of_family = [outcome for outcome in of_device if outcome.family == family]
    relative_to = _find_newest_settings(of_family, job_key)
    if relative_to is not None:
        of_family = [outcome for outcome in of_family if outcome.relative_to in (None, relative_to)]
    counted = [outcome for outcome in _select_newest_torch(of_family) if not outcome.probe]
    observed = [
        compute_activation_factor_of_peak(outcome.moments, outcome.measured_bytes)
        for outcome in counted[-WINDOW:]
    ]
    factors = [min(CORRECTION_MAX, factor) for factor in observed]
    believed = _make_belief(counted, job_key)
    correction = max(1.0, median_high(factors) if factors else 1.0)
    if believed is not None:
        correction = max(correction, believed.compute_quantile(EVEN))
    by_engine = {
        engine: [outcome for outcome in counted if outcome.plan.engine is engine][-WINDOW:]
        for engine in {outcome.plan.engine for outcome in counted}
    }
    ratios = group_values(
        (get_step_kind(outcome.plan), outcome.step_ratio)
        for outcome in counted
        if outcome.step_ratio is not None
    )
    return Calibration(
        correction=correction,
        belief=believed,
        errors={
            engine: _make_errors(outcomes, correction) for engine, outcomes in by_engine.items()
        },
        refuted=tuple(
            RefutedPlan(
                plan=outcome.plan,
                predicted_bytes=outcome.predicted_bytes,
                needed_bytes=outcome.measured_bytes,
            )
            for outcome in of_family
            if outcome.ran_out and not outcome.probe
        ),
        proven=_list_proven_plans(counted),
        step_factors={kind: median(of_kind[-WINDOW:]) for kind, of_kind in ratios.items()},
        line=_fit_probe_line(of_family),
        is_seen=any(outcome.ran_out or not outcome.probe for outcome in of_family),
        overhead=get_measured_overhead(of_device, device),
        relative_to=relative_to,
    )


def _find_newest_settings(
    family_outcomes: Sequence[Observation], job_key: str
) -> OwnSettings | None:
    """Return the script's default settings in the newest informative outcome; None without one.

    Outcomes of a job that ran out of memory itself come first. An outcome that needed no more than
    was assumed is not informative: a job with other settings assumes anew.
    """
    telling = [
        outcome
        for outcome in family_outcomes
        if outcome.probe or outcome.ran_out or outcome.measured_bytes > outcome.predicted_bytes
    ]
    of_job = [outcome for outcome in telling if _is_failure_of_job(outcome, job_key)]
    return next(
        (
            outcome.relative_to
            for outcome in reversed(of_job or telling)
            if outcome.relative_to is not None
        ),
        None,
    )


def get_measured_overhead(observations: Iterable[Observation], device: str) -> MeasuredOverhead:
    """Return the memory outside the allocator on a kind of device, measured under its newest torch."""
    return measure_overhead(
        _select_newest_torch([outcome for outcome in observations if outcome.device == device])
    )


def _list_proven_plans(outcomes: Sequence[Observation]) -> tuple[ProvenPlan, ...]:
    """Return each plan under which a training finished and none ran out of memory, with its largest
    measured peak.
    """
    peaks: dict[tuple[Plan, int], int] = {}
    for outcome in outcomes:
        key = (outcome.plan, outcome.predicted_bytes)
        peaks[key] = max(peaks.get(key, 0), outcome.measured_bytes)
    ended = dict.fromkeys(
        (outcome.plan, outcome.predicted_bytes) for outcome in outcomes if outcome.finished
    )
    burst = {outcome.plan for outcome in outcomes if outcome.ran_out}
    return tuple(
        ProvenPlan(plan=plan, predicted_bytes=predicted, measured_bytes=peaks[plan, predicted])
        for plan, predicted in ended
        if plan not in burst
    )


def _fit_probe_line(family_outcomes: Sequence[Observation]) -> MeasuredLine | None:
    """Return the line through the newest probes' peaks at the two largest micro-batch sizes; None
    where it is not known yet.

    A peak in the optimizer's update, a loader or an evaluation hides what samples need. The slope
    is then below that of the bytes at the end of a forward pass, or both peaks are alike. Up to
    PROBES_MAX probes (short measuring runs) are waited for in that case. The slope is never 0: so a
    failure teaches what samples need. With 0 it would say that no micro-batch fits.
    """
    probed = {
        outcome.plan.micro_batch_size: outcome
        for outcome in family_outcomes
        if outcome.probe and not outcome.ran_out
    }
    if len(probed) < 2:
        return None
    (few, least), (more, most) = sorted(probed.items())[-2:]
    sample_bytes = max(0, most.measured_bytes - least.measured_bytes) // (more - few)
    forward_bytes = (most.forward_bytes - least.forward_bytes) // (more - few)
    # Peaks that are alike may hide so much: it is all that is known where no forward pass was seen.
    alike_bytes = int((SLOPE_MIN - 1) * most.measured_bytes / more)
    # A forward pass that was seen tells what samples need, however little that is.
    is_unseen = most.forward_bytes == 0 and sample_bytes < alike_bytes
    is_hidden = is_unseen or SLOPE_MIN * sample_bytes < forward_bytes
    if is_hidden and len(probed) < PROBES_MAX:
        return None
    sample_bytes = max(sample_bytes, forward_bytes, alike_bytes)
    return MeasuredLine(
        fixed_bytes=max(0, most.measured_bytes - more * sample_bytes),
        sample_bytes=sample_bytes,
        is_of_one_rank=all(outcome.plan.layout.dp == 1 for outcome in probed.values()),
    )


def select_observations_to_keep(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """Return the observations to store, oldest first: the newest WINDOW per key, each plan's newest
    failure, and all probes.

    Each attempt (launch of a job) counts once. Order and repetition do not matter, so outcomes can
    be imported again.
    """
    ordered = sorted(
        observations,
        key=lambda outcome: (outcome.at_s, outcome.job, outcome.number, outcome.measured_bytes),
    )
    once = {(outcome.job, outcome.number): outcome for outcome in ordered}
    newest_first = sorted(
        once.values(), key=lambda outcome: (outcome.at_s, outcome.job, outcome.number), reverse=True
    )
    counts: dict[tuple[str, ...], int] = {}
    failed: set[tuple[str, str, Plan, int]] = set()
    probed: dict[
        tuple[str, str], set[int]
    ] = {}  # micro-batches that were probed, by device and family
    newest = []
    for outcome in newest_first:
        if outcome.probe:
            micros = probed.setdefault((outcome.device, outcome.family), set())
            if len(micros) < PROBES_MAX and outcome.plan.micro_batch_size not in micros:
                newest.append(outcome)
                micros.add(outcome.plan.micro_batch_size)
            continue
        key = (outcome.device, outcome.plan.engine, outcome.family, outcome.torch_version)
        counts[key] = counts.get(key, 0) + 1
        failure = (outcome.device, outcome.family, outcome.plan, outcome.predicted_bytes)
        if counts[key] <= WINDOW or (outcome.ran_out and failure not in failed):
            newest.append(outcome)
        if outcome.ran_out:
            failed.add(failure)
    return tuple(reversed(newest[:OBSERVATIONS_MAX]))


def estimate_needed_bytes(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration) -> int:
    """Return the free bytes that the plan needs on each device: its corrected estimate times the
    safety margin.
    """
    margin = calibrated.get_plan_errors(plan, estimate).margin
    if has_unmeasured_cache(estimate):
        margin = max(margin, MARGIN)
    return math.ceil(
        correct_device_bytes(estimate, calibrated.compute_activation_factor(plan, estimate))
        * margin
    )


def estimate_fit_probability(
    plan: Plan, estimate: MemoryEstimate, calibrated: Calibration, capacity_bytes: int
) -> float:
    """Return the probability (0 to 1) that the plan fits `capacity_bytes` per device; 0 where it
    already ran out there.
    """
    if calibrated.has_run_out(plan, estimate, capacity_bytes):
        return 0.0
    if calibrated.belief is not None and calibrated._find_proven_plan(plan, estimate) is None:
        return calibrated.belief.compute_probability_within(
            find_largest_fitting_factor(estimate, capacity_bytes)
        )
    room = capacity_bytes / max(
        1, correct_device_bytes(estimate, calibrated.compute_activation_factor(plan, estimate))
    )
    share = calibrated.get_plan_errors(plan, estimate).compute_probability_within(room)
    return (
        min(share, SUPPOSED.compute_probability_within(room))
        if has_unmeasured_cache(estimate)
        else share
    )


def rests_on_measurements(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration) -> bool:
    """Return whether a prediction rests on measurements, and not only on what a job file says of
    its script.

    Our own trainings are counted or traced. A script, its declared model included, counts as
    measured once an attempt of its family has ended.
    """
    is_said = estimate.source not in (Source.ASSUMED, Source.PROBED)
    if not is_said or (get_engine_facts(plan.engine).is_ours and estimate.source not in DECLARED):
        return True
    return bool(calibrated.proven or calibrated.refuted)


def estimate_reported_fit_probability(
    plan: Plan, estimate: MemoryEstimate, calibrated: Calibration, capacity_bytes: int
) -> float | None:
    """Return the probability that an unmeasured plan fits, by REPORTED_ERROR; None for a measured
    plan.

    The mean of absolute values of a normal distribution is its spread times the square root of 2 /
    pi.
    """
    if rests_on_measurements(plan, estimate, calibrated):
        return None
    expected = correct_device_bytes(estimate, calibrated.compute_activation_factor(plan, estimate))
    spread = math.log(REPORTED_ERROR) * math.sqrt(math.pi / 2)
    return _compute_student_cdf(
        math.log(capacity_bytes / max(1, expected)) / spread, PRIOR_OUTCOMES
    )


def estimate_needed_bytes_range(
    plan: Plan, estimate: MemoryEstimate, calibrated: Calibration
) -> tuple[int, int]:
    """Return (least, most) bytes that an unmeasured plan probably needs, by REPORTED_ERROR."""
    expected = correct_device_bytes(estimate, calibrated.compute_activation_factor(plan, estimate))
    return int(expected / REPORTED_ERROR), math.ceil(expected * REPORTED_ERROR)


def has_unmeasured_cache(estimate: MemoryEstimate) -> bool:
    """Return whether the allocator reserves more bytes than it allocates; measured peaks are
    allocated bytes.
    """
    return estimate.reserved_bytes > estimate.allocated_bytes


def _select_newest_torch(observations: Sequence[Observation]) -> list[Observation]:
    versions = [outcome.torch_version for outcome in observations if outcome.torch_version]
    return [outcome for outcome in observations if outcome.torch_version in ("", *versions[-1:])]


def _make_belief(outcomes: Sequence[Observation], job_key: str) -> ActivationFactorBelief | None:
    """Return the distribution of the job's activation factor; None where it never ran out of
    memory.
    """
    burst = [outcome for outcome in outcomes if _is_failure_of_job(outcome, job_key)]
    trained = [outcome for outcome in outcomes if not outcome.ran_out]
    of_job = [outcome for outcome in trained if outcome.job == job_key]
    return (
        believe_activation_factor(
            burst, of_job, [outcome for outcome in trained if outcome.job != job_key][-WINDOW:]
        )
        if burst
        else None
    )


def _is_failure_of_job(outcome: Observation, job_key: str) -> bool:
    return outcome.ran_out and outcome.job == job_key


def _make_errors(outcomes: Sequence[Observation], correction: float) -> PredictionErrors:
    """Return the prediction errors of these outcomes, without those that ran out below their
    prediction.
    """
    ratios = []
    spent = 0
    for outcome in outcomes:
        ratio = outcome.measured_bytes / max(
            1, correct_peak_bytes(outcome.predicted_bytes, outcome.moments, correction)
        )
        if ratio > 0 and not (outcome.ran_out and ratio <= 1.0):
            ratios.append(ratio)
            spent = spent or int(
                1.0
                < correction
                == compute_activation_factor_of_peak(outcome.moments, outcome.measured_bytes)
            )
    return PredictionErrors(tuple(ratios), spent)


def _drop_outliers(log_ratios: Sequence[float], supposed_spread: float) -> list[float]:
    middle = median_high(log_ratios)
    spread = DEVIATION_TO_SPREAD * median_high(abs(log - middle) for log in log_ratios)
    fence = max(0.0, middle) + OUTLIER_SPREADS * max(spread, supposed_spread)
    return [min(log, fence) for log in log_ratios]


def _compute_student_cdf(value: float, degrees_of_freedom: int) -> float:
    """Return Student's distribution function at `value`, for a whole number of degrees of freedom
    from 2 on.

    Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(value, math.sqrt(degrees_of_freedom))
    square = math.cos(angle) ** 2
    odd = degrees_of_freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for below in range(2 + odd, degrees_of_freedom - 1, 2):
        term *= square * (below - 1) / below
        total += term
    part = math.sin(angle) * total
    return 0.5 + ((angle + part) / math.pi if odd else part / 2)


@cache
def _compute_student_quantile(degrees_of_freedom: int) -> float:
    """Return the value at which Student's distribution function reaches CONFIDENCE."""
    # 6.96 with 2 degrees of freedom
    low = 0.0
    high = 10.0
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (
            (middle, high)
            if _compute_student_cdf(middle, degrees_of_freedom) < CONFIDENCE
            else (low, middle)
        )
    return high


def compute_prior_spread(margin: float) -> float:
    """Return the standard deviation of log ratios of which CONFIDENCE stay below `margin`."""
    return math.log(margin) / _compute_student_quantile(PRIOR_OUTCOMES)


@lru_cache(maxsize=1024)
def _replace_supposed_margin(errors: PredictionErrors, margin: float) -> PredictionErrors:
    return errors if errors.supposed == margin else replace(errors, supposed=margin)
