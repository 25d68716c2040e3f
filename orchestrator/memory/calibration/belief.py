"""A probability distribution of how far a job that ran out of memory exceeds its predicted activations, as a factor.

An out-of-memory error is a lower bound. The capacity of a device may say nothing of how far a pass comes. The share of
its activations that was there is uniform then, and its whole need follows Pareto's law of index 1 above the bound. What
the guard (our hook in each rank) saw of the pass narrows that down.

Samples differ, so that a later pass may need more than the one that failed. A training that fails at step k + 1 exceeds
its bound about once in k + 1 steps; the excesses to come are counted by that rate, and their logarithms are exponential
(peaks over a threshold: Pickands 1975, Annals of Statistics 3:119).
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from orchestrator.memory.calibration.correction import compute_activation_factor_of_peak
from orchestrator.specs.observation import Observation
from orchestrator.specs.profile import MemoryEstimate

# Of the logarithm of a factor. Chosen before the jobs of `make bench-recovery` were drawn, and
# fitted to none of them:
# layers differ, and what the loss holds comes last, so that a share of a forward pass is off by a
# quarter; backward
# and optimizer follow the peak of the forward pass; a measured step differs from the next by its
# samples.
FORWARD_SPREAD = 0.25
PEAK_SPREAD = 0.1
MEASURED_SPREAD = 0.1
# of Student's t, whose tails are wider than a normal distribution's: samples may be of any length
FREEDOM = 4
DONE_MIN = 0.02  # of a forward pass: below, its share says little
# of the logarithm: up to 600 times the bound
STEPS = 320
STEP = 0.02
# Mean excess of the logarithm of a sample's bytes, equally likely each: from texts packed to nearly
# one length to audio
# of any. Chosen before the draws of `make bench-recovery` that judge it, and fitted to none of
# them.
EXCESSES = (0.05, 0.1, 0.2, 0.4)
STEPS_SUPPOSED = 1000  # still to come, where their number is unknown


@dataclass(frozen=True, slots=True)
class ActivationFactorBelief:
    """The probabilities of a job's activation factor (true over predicted activation bytes).

    `shares[i]` is the probability that the factor is at most `least` x exp(i x STEP).
    """

    least: float
    shares: tuple[float, ...]

    def compute_probability_within(self, factor: float) -> float:
        """Return the probability that the activations are at most `factor` times the predicted
        ones.
        """
        if factor < self.least:
            return 0.0
        return self.shares[min(STEPS - 1, int(math.log(factor / self.least) / STEP))]

    def compute_quantile(self, probability: float) -> float:
        """Return the smallest factor that the true factor does not exceed with this probability."""
        return self.least * math.exp(STEP * min(STEPS - 1, bisect_right(self.shares, probability)))


def believe_activation_factor(
    out_of_memory: Sequence[Observation],
    without_failure: Sequence[Observation],
    of_other_jobs: Sequence[Observation],
) -> ActivationFactorBelief:
    """Return the distribution of the activation factor of a job that ran out of memory.

    `out_of_memory` are the job's observations that ran out, `without_failure` its others.
    `of_other_jobs` are observations of other jobs in its family.
    """
    bounds = [
        compute_activation_factor_of_peak(observations.moments, observations.measured_bytes)
        for observations in out_of_memory
    ]
    least = max(bounds)
    logs = [
        math.log(factor / least)
        for factor in _list_observed_factors(of_other_jobs)
        if factor > least
    ]
    clues = []
    for bound, failure in zip(bounds, out_of_memory, strict=True):
        for share, spread in _guess_live_share(failure):
            clues.append((math.log(bound / least) - math.log(share), spread))
    clues += [
        (math.log(max(factor, least) / least), MEASURED_SPREAD)
        for factor in _list_observed_factors(without_failure)
    ]
    weights = []
    for step in range(STEPS):
        x = step * STEP
        weight = math.exp(-x) + sum(
            _compute_student_density((x - log) / MEASURED_SPREAD) / MEASURED_SPREAD for log in logs
        )
        weights.append(
            weight
            * math.prod(_compute_student_density((x - centre) / spread) for centre, spread in clues)
        )
    total = sum(weights)
    newest = out_of_memory[-1]
    beyond = math.log(bounds[-1] / least)
    return ActivationFactorBelief(
        least,
        tuple(
            weight_sum
            / total
            * _compute_probability_of_no_larger_pass(newest, step * STEP - beyond)
            for step, weight_sum in enumerate(accumulate(weights))
        ),
    )


def find_largest_fitting_factor(estimate: MemoryEstimate, capacity_bytes: float) -> float:
    """Return the largest activation factor with which the estimate fits `capacity_bytes` of one
    device.
    """
    overhead = max(1.0, estimate.reserved_bytes / max(1, estimate.allocated_bytes))
    allocated = estimate.allocated_bytes + (capacity_bytes - estimate.device_bytes) / overhead
    return min(
        (
            (allocated - moment.counted_bytes) / moment.activation_bytes
            for moment in estimate.moments
            if moment.activation_bytes > 0
        ),
        default=math.inf if estimate.device_bytes <= capacity_bytes else 0.0,
    )


def _compute_probability_of_no_larger_pass(failure: Observation, log_factor: float) -> float:
    """Return the probability that no later pass needs more than exp(`log_factor`) times the bytes
    of the failed pass.

    Whether samples differ at all has even odds beforehand. Equal samples fail in the first step.
    Others fail at their rate, of which only the magnitude is unknown: its mean is 1 / ln(steps)
    where its logarithm is uniform.
    """
    left = STEPS_SUPPOSED if failure.steps_left is None else failure.steps_left
    first = 1 / math.log(max(left, 3))
    differ = 1.0 if failure.steps_done else first / (1 + first)
    rate = left / (failure.steps_done + 1) if failure.steps_done else left * first
    none = sum(math.exp(-rate * math.exp(-log_factor / excess)) for excess in EXCESSES) / len(
        EXCESSES
    )
    return 1 - differ + differ * none


def _list_observed_factors(observations: Sequence[Observation]) -> list[float]:
    return [
        compute_activation_factor_of_peak(observation.moments, observation.measured_bytes)
        for observation in observations
    ]


def _guess_live_share(failure: Observation) -> list[tuple[float, float]]:
    """Return [(share of the pass's activations that was live at the failure, standard deviation of
    its logarithm)].

    It follows from the phase that the guard reported. The list is empty where the guard reported
    none.
    """
    if failure.phase == "forward" and failure.pass_done is not None:
        return [(max(DONE_MIN, failure.pass_done), FORWARD_SPREAD)]
    return [(1.0, PEAK_SPREAD)] if failure.phase in ("backward", "optimizer") else []


def _compute_student_density(value: float) -> float:
    """Return Student's density without its constant (Gelman et al. 2013, Bayesian Data Analysis,
    appendix A).
    """
    return float((1 + value * value / FREEDOM) ** (-(FREEDOM + 1) / 2))
