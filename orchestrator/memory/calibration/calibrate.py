"""What has reality said about our predictions? A factor on the activations, and how much room is enough.

Parameters, gradients, optimizer states and buffers follow from counting; what a model keeps for its backward pass
follows from its code, and is the same under every engine. So a measurement corrects the activations alone, for the
whole (device, family): a plan that shards better is then rightly seen to save little where activations are the
trouble. How precisely an engine's own terms are counted differs, so what is left over, the ratio of the measured to
the corrected peak, is told apart by engine. From it follow the margin and the probability that a plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache, cached_property, lru_cache
from statistics import median, median_high
from typing import NamedTuple

from orchestrator.memory.calibration.belief import Belief, belief, factor_within
from orchestrator.memory.calibration.correction import corrected_bytes, corrected_peak, observed_correction
from orchestrator.memory.engines.overhead import SUPPOSED_OVERHEAD, Overhead, measured_overhead
from orchestrator.specs.choices import Engine, Offload, OffloadTarget, ZeroStage
from orchestrator.specs.mechanics import Mechanics
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MeasuredLine, MemoryEstimate, OwnSettings, Source
from orchestrator.specs.replace import replace

# A plan fits where it does so with this probability.
CONFIDENCE = 0.99
EVEN = 0.5
# The room that a plan must leave where nothing was measured, by where its profile comes from. 240 plans on virtual
# devices were drawn at random (tests/memory/test_fits.py, 2026-11-22). The closed form falls short of 60 by 0.7 % at
# most, a trace of the other 180 by 1.6 %; its bar is 3 % (tests/memory/test_traced.py). What is declared or assumed is
# trusted no more than the closed form. On CUDA, memory.estimate.FRAGMENTATION falls short of the worst of 11 replayed
# allocator traces by 4.8 % (1.132 against 1.08), so that MARGIN holds whatever the source is.
MARGIN = 1.05
MARGINS: Mapping[Source, float] = {
    Source.CLOSED_FORM: MARGIN,
    Source.TRACED: 1.03,
    Source.DECLARED: MARGIN,
    Source.PROBED: MARGIN,
    Source.ASSUMED: MARGIN,
}
# So many outcomes is that worth. With 8, of families whose errors have the spread that MARGIN supposes, 98.4 to 99.2 %
# stay within the margin after 0 to 32 outcomes; of families of about six times that spread, 95 % after 8 and 98.6 %
# after 32 (4,000 draws each, 2026-11). A plain conformal quantile gave 94 % and 89 % after 8: it cannot say
# 99 % before 99.
PRIOR_OUTCOMES = 8
# Beyond such a factor on its activations an outcome is no measure of the profile: it is that of another model, or what
# grew is no activation at all. For other jobs it counts as this much.
CORRECTION_MAX = 10.0
# An outcome further above the median than so many spreads counts as if it were there (Hampel's rule: Hampel 1974, JASA
# 69:383, section 4); 1.4826 makes the median absolute deviation of a normal distribution its spread.
OUTLIER_SPREADS = 3.0
DEVIATION_TO_SPREAD = 1.4826

ROUNDING_DIGITS = 12  # of a probability: beyond, sums of angles are noise, and a tail may turn negative
WINDOW = 32  # newest outcomes of each (device, engine, family, torch version) that count and are kept
OBSERVATIONS_MAX = 1000  # kept in all, newest: more than a cluster's families need


@dataclass(frozen=True)
class Errors:
    """How far measured peaks of one engine lie above the corrected predictions."""

    ratios: tuple[float, ...] = ()  # measured over corrected peak
    spent: int = 0  # of them, those that set the correction: they prove no precision
    supposed: float = MARGIN  # the margin before anything was measured: one of MARGINS

    def within(self, room: float) -> float:
        """The probability that a peak stays within `room` times the corrected one.

        The logarithm of a ratio is taken as normal around 0. The outcomes tell its spread, beginning with
        PRIOR_OUTCOMES of the spread that `supposed` means. So the next one follows Student's t (Gelman et al. 2013,
        Bayesian Data Analysis, sections 2.6 and 3.2). More than one outcome beyond `room` is no outlier but a pattern.
        The share is then bounded by the rank of the others, as in split conformal prediction (Vovk et al. 2005,
        Algorithmic Learning in a Random World, section 2.2).
        """
        if room <= 0:
            return 0.0
        share = round(_student(math.log(room) / self.spread, self._freedom), ROUNDING_DIGITS)
        beyond = sum(ratio > room for ratio in self.ratios)
        return min(share, 1 - max(0, beyond - 1) / (len(self.ratios) + 1))

    @cached_property
    def margin(self) -> float:
        """The least room within which a peak stays with probability CONFIDENCE."""
        pattern = sorted(self.ratios)[-2:-1]  # one of them may be an outlier
        return max((math.exp(self.spread * _student_quantile(self._freedom)), *pattern))

    @cached_property
    def spread(self) -> float:
        """Of the logarithms, from how far they go above 0; not below that of the outcomes, however few they are.

        A symmetric distribution has half of its variance above its centre. What needed less than predicted is no risk.
        """
        supposed = prior_spread(self.supposed)
        if not self.ratios:
            return supposed
        logs = _without_outliers([math.log(ratio) for ratio in self.ratios], supposed)
        variance = 2 * sum(max(0.0, one) ** 2 for one in logs) / len(logs)
        blended = (PRIOR_OUTCOMES * supposed**2 + len(logs) * variance) / self._freedom
        return math.sqrt(max(variance, blended))

    @property
    def _freedom(self) -> int:
        return PRIOR_OUTCOMES + len(self.ratios) - self.spent


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuted:
    """A plan that ran out of memory: as predicted, it needs `needed_bytes` at least."""

    plan: Plan
    predicted_bytes: int  # allocated, before correction
    needed_bytes: int  # allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class Proven:
    """A plan under which trainings came to their end: the same training took `measured_bytes` at most."""

    plan: Plan
    predicted_bytes: int  # allocated, before correction
    measured_bytes: int  # allocated


class StepKind(NamedTuple):
    """What plans have in common whose steps are off by the same factor."""

    place: tuple[Engine, Offload, OffloadTarget]  # whose loop it is, and where its state lives
    shared: tuple[type[Mechanics], ZeroStage, bool]  # how ranks share state, and whether in a pipeline


def step_kind(plan: Plan) -> StepKind:
    """Return the plan's key in `Calibration.step_factors`."""
    mechanics = plan.mechanics
    shared = (type(mechanics), mechanics.stage, plan.layout.pp > 1)
    return StepKind((plan.engine, plan.offload, plan.offload_target), shared)


def step_factor(plan: Plan, *sources: Mapping[StepKind, float]) -> float:
    """Return measured over predicted seconds of the plan's step by the first source that tells it; 1 where none does.

    A source tells that of the plan's kind, or else the median of those that differ in how ranks share state alone.
    Where none does, other engines' tell: what makes a machine slow makes all of them slow, and a plan that nobody
    measured is no faster for it. State on the host is another matter: how fast it comes says nothing of plans without.
    """
    kind = step_kind(plan)
    for factors in sources:
        alike = [factor for other, factor in factors.items() if other.place == kind.place]
        if alike:
            return factors.get(kind, median(alike))
    for factors in sources:
        elsewhere = [factor for other, factor in factors.items() if other.place[1:] == kind.place[1:]]
        if elsewhere:
            return median(elsewhere)
    return 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What outcomes say of the predictions for one family on one kind of device."""

    correction: float = 1.0  # on the activations; never below 1
    belief: Belief | None = None  # of a job that ran out of memory itself: what its activations may be
    errors: Mapping[Engine, Errors] = field(default_factory=dict)
    refuted: tuple[Refuted, ...] = ()
    proven: tuple[Proven, ...] = ()
    step_factors: Mapping[StepKind, float] = field(default_factory=dict)  # measured / predicted seconds of a step
    line: MeasuredLine | None = None  # of a script that was probed
    is_seen: bool = False  # whether anything of the family ran here before, or a probe ran out of memory
    overhead: Overhead = SUPPOSED_OVERHEAD  # of the device, whatever family it was measured with
    relative_to: OwnSettings | None = None  # the settings of a script that all of this is told by; None: of no script

    def errors_of(self, engine: Engine, source: Source) -> Errors:
        """Those of the engine, where the profile has this source; before it was measured, what is supposed."""
        return _supposing(self.errors.get(engine, SUPPOSED), MARGINS[source])

    def correction_of(self, plan: Plan, estimate: MemoryEstimate) -> float:
        """That on the activations of this plan: of its own peak where it is proven, else of the whole family."""
        proven = self._proof_of(plan, estimate)
        return self.correction if proven is None else observed_correction(estimate.moments, proven.measured_bytes)

    def judging(self, plan: Plan, estimate: MemoryEstimate) -> Errors:
        """The errors by which this plan is judged: where it is proven, it varies as what was never measured may."""
        if self._proof_of(plan, estimate) is None:
            return self.errors_of(plan.engine, estimate.source)
        return _supposing(SUPPOSED, MARGINS[estimate.source])

    def _proof_of(self, plan: Plan, estimate: MemoryEstimate) -> Proven | None:
        return next(
            (one for one in self.proven if one.plan == plan and one.predicted_bytes == estimate.allocated_bytes), None
        )

    def refutes(self, plan: Plan, estimate: MemoryEstimate, capacity_bytes: int) -> bool:
        """Whether this very plan, predicted to need no more than now, has burst as much memory as this."""
        allocated_bytes = capacity_bytes - (estimate.device_bytes - estimate.allocated_bytes)
        return any(
            one.plan == plan and one.predicted_bytes <= estimate.allocated_bytes and allocated_bytes < one.needed_bytes
            for one in self.refuted
        )


SUPPOSED = Errors()
UNMEASURED = Calibration()


def calibration(observations: Iterable[Observation], *, device: str, family: str, job: str = "") -> Calibration:
    """What the outcomes of a family on a kind of device say; `job` (a Job.key) is the one that asks.

    `observations` come oldest first, as `remembered` gives them. The correction is the upper median of the factors
    observed, none above CORRECTION_MAX: one outlier among three or more does not move it out of the others' range. A
    job that ran out of memory is held to the median of the belief about it since. Outcomes under another torch than
    the newest do not count, but refuted plans stay refuted. Outcomes of a script do not count either where they were
    predicted relative to other settings than the newest.
    """
    of_device = [seen for seen in observations if seen.device == device]
    of_family = [seen for seen in of_device if seen.family == family]
    relative_to = _told_by(of_family, job)
    if relative_to is not None:
        of_family = [seen for seen in of_family if seen.relative_to in (None, relative_to)]
    counted = [seen for seen in _of_newest_torch(of_family) if not seen.probe]
    observed = [observed_correction(seen.moments, seen.measured_bytes) for seen in counted[-WINDOW:]]
    factors = [min(CORRECTION_MAX, factor) for factor in observed]
    believed = _belief(counted, job)
    correction = max(1.0, median_high(factors) if factors else 1.0)
    if believed is not None:
        correction = max(correction, believed.quantile(EVEN))
    by_engine = {
        engine: [seen for seen in counted if seen.plan.engine is engine][-WINDOW:]
        for engine in {seen.plan.engine for seen in counted}
    }
    ratios: dict[StepKind, list[float]] = {}
    for seen in counted:
        if seen.step_ratio is not None:
            ratios.setdefault(step_kind(seen.plan), []).append(seen.step_ratio)
    return Calibration(
        correction=correction,
        belief=believed,
        errors={engine: _errors(seen, correction) for engine, seen in by_engine.items()},
        refuted=tuple(
            Refuted(plan=seen.plan, predicted_bytes=seen.predicted_bytes, needed_bytes=seen.measured_bytes)
            for seen in of_family
            if seen.ran_out and not seen.probe
        ),
        proven=_proven(counted),
        step_factors={kind: median(of_kind[-WINDOW:]) for kind, of_kind in ratios.items()},
        line=_line(of_family),
        is_seen=any(seen.ran_out or not seen.probe for seen in of_family),
        overhead=overhead_of(of_device, device),
        relative_to=relative_to,
    )


def _told_by(of_family: Sequence[Observation], job: str) -> OwnSettings | None:
    """The settings that the newest telling outcome is relative to, of the job itself where it ran out of memory.

    An outcome that needed no more than was assumed tells nothing: a job with other settings assumes anew.
    """
    telling = [seen for seen in of_family if seen.probe or seen.ran_out or seen.measured_bytes > seen.predicted_bytes]
    own = [seen for seen in telling if _ran_out_itself(seen, job)]
    return next((seen.relative_to for seen in reversed(own or telling) if seen.relative_to is not None), None)


def overhead_of(observations: Iterable[Observation], device: str) -> Overhead:
    """What a kind of device holds beside the allocator, as outcomes under the newest torch there measured it."""
    return measured_overhead(_of_newest_torch([seen for seen in observations if seen.device == device]))


def _proven(counted: Sequence[Observation]) -> tuple[Proven, ...]:
    """The largest peak of each plan that ended a training and never ran out of memory."""
    peaks: dict[tuple[Plan, int], int] = {}
    for seen in counted:
        key = (seen.plan, seen.predicted_bytes)
        peaks[key] = max(peaks.get(key, 0), seen.measured_bytes)
    ended = dict.fromkeys((seen.plan, seen.predicted_bytes) for seen in counted if seen.finished)
    burst = {seen.plan for seen in counted if seen.ran_out}
    return tuple(
        Proven(plan=plan, predicted_bytes=predicted, measured_bytes=peaks[plan, predicted])
        for plan, predicted in ended
        if plan not in burst
    )


def _line(of_family: Sequence[Observation]) -> MeasuredLine | None:
    """Through the peaks of the newest probes at two micro-batches; None where there are none."""
    probed = [seen for seen in of_family if seen.probe and not seen.ran_out]
    peaks = {seen.plan.micro_batch_size: seen.measured_bytes for seen in probed}
    if len(peaks) < 2:
        return None
    (few, least_bytes), (more, most_bytes) = sorted(peaks.items())[:2]
    sample_bytes = max(0, most_bytes - least_bytes) // (more - few)
    return MeasuredLine(
        fixed_bytes=max(0, least_bytes - few * sample_bytes),
        sample_bytes=sample_bytes,
        is_of_one_rank=all(seen.plan.layout.dp == 1 for seen in probed),
    )


def remembered(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """What is worth keeping, oldest first: the newest WINDOW of each key, the newest failure of each plan, and probes.

    Each attempt counts once, and neither order nor repetition matters: so outcomes can be imported again.
    """
    ordered = sorted(observations, key=lambda seen: (seen.at_s, seen.job, seen.number, seen.measured_bytes))
    once = {(seen.job, seen.number): seen for seen in ordered}
    newest_first = sorted(once.values(), key=lambda seen: (seen.at_s, seen.job, seen.number), reverse=True)
    counts: dict[tuple[str, ...], int] = {}
    failed: set[tuple[str, str, Plan, int]] = set()
    probed: dict[tuple[str, str], set[int]] = {}  # micro-batches that were probed, by device and family
    kept = []
    for seen in newest_first:
        if seen.probe:
            micros = probed.setdefault((seen.device, seen.family), set())
            if len(micros) < 2 and seen.plan.micro_batch_size not in micros:
                kept.append(seen)
                micros.add(seen.plan.micro_batch_size)
            continue
        key = (seen.device, seen.plan.engine, seen.family, seen.torch_version)
        counts[key] = counts.get(key, 0) + 1
        failure = (seen.device, seen.family, seen.plan, seen.predicted_bytes)
        if counts[key] <= WINDOW or (seen.ran_out and failure not in failed):
            kept.append(seen)
        if seen.ran_out:
            failed.add(failure)
    return tuple(reversed(kept[:OBSERVATIONS_MAX]))


def plan_needed_bytes(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration) -> int:
    """Free bytes that one device must have for the plan: its corrected estimate and the margin."""
    margin = calibrated.judging(plan, estimate).margin
    if _has_unmeasured_cache(estimate):
        margin = max(margin, MARGIN)
    return math.ceil(corrected_bytes(estimate, calibrated.correction_of(plan, estimate)) * margin)


def plan_fit_probability(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration, capacity_bytes: int) -> float:
    """The probability that the plan runs within `capacity_bytes` of one device; 0 where the family saw it fail."""
    if calibrated.refutes(plan, estimate, capacity_bytes):
        return 0.0
    if calibrated.belief is not None and calibrated._proof_of(plan, estimate) is None:
        return calibrated.belief.within(factor_within(estimate, capacity_bytes))
    room = capacity_bytes / max(1, corrected_bytes(estimate, calibrated.correction_of(plan, estimate)))
    share = calibrated.judging(plan, estimate).within(room)
    return min(share, SUPPOSED.within(room)) if _has_unmeasured_cache(estimate) else share


def _has_unmeasured_cache(estimate: MemoryEstimate) -> bool:
    """Peaks are measured as allocated bytes: they say nothing about the allocator around them."""
    return estimate.reserved_bytes > estimate.allocated_bytes


def _of_newest_torch(observations: Sequence[Observation]) -> list[Observation]:
    told = [seen.torch_version for seen in observations if seen.torch_version]
    return [seen for seen in observations if seen.torch_version in ("", *told[-1:])]


def _belief(counted: Sequence[Observation], job: str) -> Belief | None:
    """What is believed of the job; None where it never ran out of memory."""
    burst = [seen for seen in counted if _ran_out_itself(seen, job)]
    trained = [seen for seen in counted if not seen.ran_out]
    own = [seen for seen in trained if seen.job == job]
    return belief(burst, own, [seen for seen in trained if seen.job != job][-WINDOW:]) if burst else None


def _ran_out_itself(seen: Observation, job: str) -> bool:
    return seen.ran_out and seen.job == job


def _errors(outcomes: Sequence[Observation], correction: float) -> Errors:
    """Of all outcomes but those that ran out of memory within what is predicted by now: these say nothing."""
    ratios, spent = [], 0
    for seen in outcomes:
        ratio = seen.measured_bytes / max(1, corrected_peak(seen.predicted_bytes, seen.moments, correction))
        if ratio > 0 and not (seen.ran_out and ratio <= 1.0):
            ratios.append(ratio)
            spent = spent or int(1.0 < correction == observed_correction(seen.moments, seen.measured_bytes))
    return Errors(tuple(ratios), spent)


def _without_outliers(logs: Sequence[float], supposed: float) -> list[float]:
    middle = median_high(logs)
    spread = DEVIATION_TO_SPREAD * median_high(abs(one - middle) for one in logs)
    fence = max(0.0, middle) + OUTLIER_SPREADS * max(spread, supposed)
    return [min(one, fence) for one in logs]


def _student(value: float, freedom: int) -> float:
    """Student's distribution function for a whole number of degrees of freedom of at least 2.

    Abramowitz and Stegun 1964, Handbook of Mathematical Functions, 26.7.3 and 26.7.4.
    """
    angle = math.atan2(value, math.sqrt(freedom))
    square = math.cos(angle) ** 2
    odd = freedom % 2
    term = total = math.cos(angle) if odd else 1.0
    for below in range(2 + odd, freedom - 1, 2):
        term *= square * (below - 1) / below
        total += term
    part = math.sin(angle) * total
    return 0.5 + ((angle + part) / math.pi if odd else part / 2)


@cache
def _student_quantile(freedom: int) -> float:
    """Where Student's distribution function reaches CONFIDENCE."""
    low, high = 0.0, 10.0  # 6.96 with 2 degrees of freedom
    while high - low > 1e-12:
        middle = (low + high) / 2
        low, high = (middle, high) if _student(middle, freedom) < CONFIDENCE else (low, middle)
    return high


def prior_spread(margin: float) -> float:
    """Of the logarithms of ratios, before anything was measured, where `margin` then holds CONFIDENCE of them."""
    return math.log(margin) / _student_quantile(PRIOR_OUTCOMES)


@lru_cache(maxsize=1024)
def _supposing(errors: Errors, margin: float) -> Errors:
    return errors if errors.supposed == margin else replace(errors, supposed=margin)
