"""What has reality said about our predictions? A factor on the activations, and how much room is enough.

Parameters, gradients, optimizer states and buffers follow from counting; what a model keeps for its backward pass
follows from its code, and is the same under every engine. So a measurement corrects the activations alone, for the
whole (device, family): a plan that shards better is then rightly seen to save little where activations are the
trouble. How precisely an engine's own terms are counted differs, so what is left over, the ratio of the measured to
the corrected peak, is kept by engine. From those ratios follow the margin and the probability that a plan fits.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist, median, median_high

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.plan import Engine, Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes, Source
from orchestrator.specs.state import Observation

# A plan fits where it does so with this probability.
CONFIDENCE = 0.99
# The room that a plan must leave where nothing was measured. The closed form falls short of 132 plans on virtual
# devices by 2.1 % at most (tests/bench/memory.py, 2026-11); on CUDA, memory.estimate.FRAGMENTATION falls short of the
# worst of 11 replayed allocator traces by 4.8 % (1.132 against 1.08).
MARGIN = 1.05
# The same as a distribution of measured / predicted before any outcome: log-normal, one half above the prediction,
# MARGIN its quantile at CONFIDENCE.
PRIOR = NormalDist(0.0, math.log(MARGIN) / NormalDist().inv_cdf(CONFIDENCE))
# An outcome further from the median than this many spreads counts as if it were there (Hampel's rule: Hampel 1974,
# JASA 69:383, section 4); 1.4826 makes the median absolute deviation of a normal distribution its spread.
OUTLIER_SPREADS = 3.0
DEVIATION_TO_SPREAD = 1.4826

WINDOW = 32  # newest outcomes of each (device, engine, family, torch version) that count and are kept
OBSERVATIONS_MAX = 2000  # kept in all, newest: more than a cluster's families need
assert (1 + WINDOW) * (1 - CONFIDENCE) < 1, "Calibration.margin takes the largest ratio to be within it"


@dataclass(frozen=True, slots=True, kw_only=True)
class Refuted:
    """A plan that ran out of memory: as predicted, it needs `needed_bytes` at least."""

    plan: Plan
    predicted_bytes: int  # allocated, before correction
    needed_bytes: int  # allocated


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What outcomes say of the predictions for one family on one kind of device."""

    correction: float = 1.0  # on the activations; never below 1
    ratios: Mapping[Engine, tuple[float, ...]] = field(default_factory=dict)  # measured / corrected peak
    refuted: tuple[Refuted, ...] = ()
    step_factors: Mapping[Engine, float] = field(default_factory=dict)  # measured / predicted seconds of a step

    def margin(self, engine: Engine) -> float:
        """The least room, over the corrected peak, within which a share CONFIDENCE of outcomes lies.

        It is max(largest ratio, quantile of PRIOR at 1 - (1 - CONFIDENCE) (1 + n)), since the step of `within` at the
        largest of fewer than 99 ratios is higher than 1 - CONFIDENCE.
        """
        ratios = self.ratios.get(engine, ())
        prior = PRIOR.inv_cdf(1 - (1 - CONFIDENCE) * (1 + len(ratios)))
        return max((math.exp(prior), *ratios))

    def within(self, engine: Engine, room: float) -> float:
        """Share of outcomes whose peak stays within `room` times the corrected one.

        Split conformal prediction (Vovk et al. 2005, Algorithmic Learning in a Random World, section 2.2) counts the
        ratios seen, and for the outcome to come one more, of which nothing is known: (#{ratio <= room} + 0) / (n + 1).
        Here that one is drawn from PRIOR: the mean of a Dirichlet process with one prior observation (Ferguson 1973,
        Annals of Statistics 1:209, theorem 1).
        """
        ratios = self.ratios.get(engine, ())
        return (_prior_share(room) + sum(ratio <= room for ratio in ratios)) / (1 + len(ratios))

    def refutes(self, plan: Plan, estimate: MemoryEstimate, capacity_bytes: int) -> bool:
        """Whether this very plan, predicted to need no more than now, has burst as much memory as this."""
        allocated_bytes = capacity_bytes - (estimate.device_bytes - estimate.allocated_bytes)
        return any(
            one.plan == plan and one.predicted_bytes <= estimate.allocated_bytes and allocated_bytes < one.needed_bytes
            for one in self.refuted
        )


UNMEASURED = Calibration()


def calibration(observations: Iterable[Observation], *, device: str, family: str, job: str = "") -> Calibration:
    """What the outcomes of a family on a kind of device say; `job` (a Job.key) is the one that asks.

    `observations` come oldest first, as `remembered` gives them. The correction is the upper median of the factors
    observed, so that one outlier among two or more others does not take it out of their range; but a job that ran out
    of memory itself is held to what it needed then. Outcomes under another torch than the newest do not count, save
    that what was refuted stays refuted.
    """
    of_family = [seen for seen in observations if (seen.device, seen.family) == (device, family)]
    counted = _of_newest_torch(of_family)
    factors = [observed_correction(seen.moments, seen.measured_bytes) for seen in counted[-WINDOW:]]
    own = (observed_correction(seen.moments, seen.measured_bytes) for seen in counted if _ran_out_itself(seen, job))
    correction = max(1.0, median_high(factors) if factors else 1.0, *own)
    by_engine = {
        engine: [seen for seen in counted if seen.plan.engine is engine][-WINDOW:]
        for engine in {seen.plan.engine for seen in counted}
    }
    return Calibration(
        correction=correction,
        ratios={engine: _ratios(seen, correction) for engine, seen in by_engine.items()},
        refuted=tuple(
            Refuted(plan=seen.plan, predicted_bytes=seen.predicted_bytes, needed_bytes=seen.measured_bytes)
            for seen in of_family
            if seen.ran_out
        ),
        step_factors={
            engine: median(ratios)
            for engine, outcomes in by_engine.items()
            if (ratios := [seen.step_ratio for seen in outcomes if seen.step_ratio is not None])
        },
    )


def remembered(observations: Iterable[Observation]) -> tuple[Observation, ...]:
    """What is worth keeping, oldest first: the newest WINDOW of each key, and the newest failure of each plan.

    Each attempt counts once, and neither order nor repetition matters: so outcomes can be imported again.
    """
    once = {(seen.job, seen.number): seen for seen in sorted(observations, key=lambda seen: (seen.at_s, repr(seen)))}
    newest_first = sorted(once.values(), key=lambda seen: (seen.at_s, seen.job, seen.number), reverse=True)
    counts: dict[tuple[str, ...], int] = {}
    failed: set[tuple[str, str, Plan, int]] = set()
    kept = []
    for seen in newest_first:
        key = (seen.device, seen.plan.engine, seen.family, seen.torch_version)
        counts[key] = counts.get(key, 0) + 1
        failure = (seen.device, seen.family, seen.plan, seen.predicted_bytes)
        if counts[key] <= WINDOW or (seen.ran_out and failure not in failed):
            kept.append(seen)
        if seen.ran_out:
            failed.add(failure)
    return tuple(reversed(kept[:OBSERVATIONS_MAX]))


def observed_correction(moments: Sequence[MomentBytes], measured_bytes: int) -> float:
    """The least factor on the activations under which some moment reaches `measured_bytes`.

    At least 1: a plan that needed less than predicted says nothing about the plans that are still to come, and a wrong
    "fits" costs an attempt where a wrong "too big" costs speed.
    """
    factors = (
        (measured_bytes - moment.counted_bytes) / moment.activation_bytes
        for moment in moments
        if moment.activation_bytes > 0
    )
    return max(1.0, min(factors, default=1.0))


def corrected_allocated_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Allocated peak of the estimate with its activations times `correction`; never below the estimate itself."""
    return _corrected_peak(estimate.allocated_bytes, estimate.moments, correction)


def corrected_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Device bytes of the estimate with its activations times `correction`; never below the estimate itself.

    The allocator's overhead grows with what it holds; context and communicators stay.
    """
    growth = corrected_allocated_bytes(estimate, correction) - estimate.allocated_bytes
    overhead = estimate.reserved_bytes / max(1, estimate.allocated_bytes)
    return estimate.device_bytes + math.ceil(growth * max(1.0, overhead))


def needed_bytes(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration) -> int:
    """Free bytes that one device must have for the plan: its corrected estimate and the margin."""
    margin = calibrated.margin(plan.engine)
    if _has_unmeasured_overhead(estimate):
        margin = max(margin, MARGIN)
    return math.ceil(corrected_bytes(estimate, calibrated.correction) * margin)


def fit_probability(plan: Plan, estimate: MemoryEstimate, calibrated: Calibration, capacity_bytes: int) -> float:
    """The probability that the plan runs within `capacity_bytes` of one device; 0 where the family saw it fail."""
    if calibrated.refutes(plan, estimate, capacity_bytes):
        return 0.0
    room = capacity_bytes / max(1, corrected_bytes(estimate, calibrated.correction))
    share = calibrated.within(plan.engine, room)
    return min(share, _prior_share(room)) if _has_unmeasured_overhead(estimate) else share


def is_known(estimate: MemoryEstimate, correction: float) -> bool:
    """Whether the estimate is a prediction: of a script that declares nothing it is not, before it failed once."""
    return estimate.source is not Source.ASSUMED or correction > 1.0


def predicted_peak_bytes(attempt: Attempt) -> int | None:
    """Allocated peak that was expected of the attempt at its launch; None where nothing was known of its memory yet."""
    if not is_known(attempt.estimate, attempt.correction):
        return None
    return corrected_allocated_bytes(attempt.estimate, attempt.correction)


def lasting(moments: Iterable[MomentBytes]) -> tuple[MomentBytes, ...]:
    """The moments that can be the worst at some factor on the activations of at least 1, each once."""
    found: list[MomentBytes] = []
    total = -1
    for moment in sorted(set(moments), key=lambda one: (one.activation_bytes, one.counted_bytes), reverse=True):
        if moment.counted_bytes + moment.activation_bytes > total:
            total = moment.counted_bytes + moment.activation_bytes
            found.append(moment)
    return tuple(found)


def _corrected_peak(predicted_bytes: int, moments: Sequence[MomentBytes], correction: float) -> int:
    if correction <= 1.0:
        return predicted_bytes
    grown = (moment.counted_bytes + correction * moment.activation_bytes for moment in moments)
    return max(predicted_bytes, math.ceil(max(grown, default=0.0)))


def _prior_share(room: float) -> float:
    return PRIOR.cdf(math.log(room)) if room > 0 else 0.0


def _has_unmeasured_overhead(estimate: MemoryEstimate) -> bool:
    """Peaks are measured as allocated bytes: they say nothing about the allocator around them, so PRIOR stands."""
    return estimate.reserved_bytes > estimate.allocated_bytes


def _of_newest_torch(observations: Sequence[Observation]) -> list[Observation]:
    told = [seen.torch_version for seen in observations if seen.torch_version]
    return [seen for seen in observations if seen.torch_version in ("", *told[-1:])]


def _ran_out_itself(seen: Observation, job: str) -> bool:
    return seen.ran_out and seen.job == job


def _ratios(outcomes: Sequence[Observation], correction: float) -> tuple[float, ...]:
    """Measured over corrected peak, outliers drawn in, ascending.

    Left out is what says nothing about precision: the outcome that set the correction, and one that ran out of memory
    within what is predicted by now.
    """
    sets_it = next(
        (
            seen
            for seen in outcomes
            if correction > 1.0 and observed_correction(seen.moments, seen.measured_bytes) == correction
        ),
        None,
    )
    ratios = []
    for seen in outcomes:
        ratio = seen.measured_bytes / max(1, _corrected_peak(seen.predicted_bytes, seen.moments, correction))
        if seen is not sets_it and ratio > 0 and not (seen.ran_out and ratio <= 1.0):
            ratios.append(ratio)
    return _without_outliers(ratios)


def _without_outliers(ratios: Sequence[float]) -> tuple[float, ...]:
    if not ratios:
        return ()
    logs = sorted(map(math.log, ratios))
    middle = median_high(logs)
    spread = DEVIATION_TO_SPREAD * median_high(abs(one - middle) for one in logs)
    fence = middle + OUTLIER_SPREADS * max(spread, PRIOR.stdev)
    return tuple(math.exp(min(one, fence)) for one in logs)
