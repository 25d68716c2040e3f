"""Corrections of a memory estimate by a factor on its activation bytes."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.memory.engines.moments import ACTIVATIONS
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.profile import MemoryEstimate, MomentBytes, Source
from orchestrator.specs.replace import replace


def compute_activation_factor_of_peak(moments: Sequence[MomentBytes], measured_bytes: int) -> float:
    """Return the smallest factor on the activations with which some moment reaches
    `measured_bytes`; at least 1.

    A plan that needed less than predicted says nothing about later plans. A wrong "fits" costs an
    attempt; a wrong "too big" costs only speed.
    """
    factors = (
        (measured_bytes - moment.counted_bytes) / moment.activation_bytes
        for moment in moments
        if moment.activation_bytes > 0
    )
    return max(1.0, min(factors, default=1.0))


def correct_estimate(estimate: MemoryEstimate, activation_factor: float) -> MemoryEstimate:
    """Return the estimate at its highest peak when activations are multiplied by the factor.

    Where another moment of the step then has the highest peak, its bytes beside activations stand
    as one entry.
    """
    allocated_bytes = correct_allocated_bytes(estimate, activation_factor)
    if allocated_bytes == estimate.allocated_bytes:
        return estimate
    worst = max(
        estimate.moments,
        key=lambda moment: moment.counted_bytes + activation_factor * moment.activation_bytes,
    )
    counted = tuple((cause, count) for cause, count in estimate.by_cause if cause != ACTIVATIONS)
    if worst.name != estimate.moment or sum(count for _, count in counted) != worst.counted_bytes:
        counted = (("all that is counted", worst.counted_bytes),)
    growth = correct_device_bytes(estimate, activation_factor) - estimate.device_bytes
    return replace(
        estimate,
        moment=worst.name,
        by_cause=((ACTIVATIONS, allocated_bytes - worst.counted_bytes), *counted),
        allocated_bytes=allocated_bytes,
        reserved_bytes=estimate.reserved_bytes + growth,
        device_bytes=estimate.device_bytes + growth,
    )


def correct_device_bytes(estimate: MemoryEstimate, activation_factor: float) -> int:
    """Return the estimate's device bytes with activations multiplied by the factor; never less than
    the estimate.

    The allocator's overhead grows with its bytes; the bytes of context and communicators stay the
    same.
    """
    growth = correct_allocated_bytes(estimate, activation_factor) - estimate.allocated_bytes
    overhead = estimate.reserved_bytes / max(1, estimate.allocated_bytes)
    return estimate.device_bytes + math.ceil(growth * max(1.0, overhead))


def correct_allocated_bytes(estimate: MemoryEstimate, activation_factor: float) -> int:
    """Return the estimate's allocated peak with activations multiplied by the factor; never less
    than the estimate.
    """
    return correct_peak_bytes(estimate.allocated_bytes, estimate.moments, activation_factor)


def correct_peak_bytes(
    predicted_bytes: int, moments: Sequence[MomentBytes], activation_factor: float
) -> int:
    """Return the highest allocated bytes over these moments, with activations multiplied by the
    factor; at least `predicted_bytes`.
    """
    if activation_factor <= 1.0:
        return predicted_bytes
    grown = (
        moment.counted_bytes + activation_factor * moment.activation_bytes for moment in moments
    )
    return max(predicted_bytes, math.ceil(max(grown, default=0.0)))


def rests_on_facts(estimate: MemoryEstimate, activation_factor: float) -> bool:
    """Return whether the estimate rests on facts, and is no mere assumption.

    The estimate for a script that declares nothing does so only after the script has failed once.
    """
    return estimate.source is not Source.ASSUMED or activation_factor > 1.0


def get_predicted_peak_bytes(attempt: Attempt) -> int | None:
    """Return the allocated peak that was predicted at the attempt's launch; None where its memory
    was unknown.
    """
    if not rests_on_facts(attempt.estimate, attempt.correction):
        return None
    return correct_allocated_bytes(attempt.estimate, attempt.correction)


def select_worst_moments(moments: Iterable[MomentBytes]) -> tuple[MomentBytes, ...]:
    """Return each moment that is the highest one for some activation factor of at least 1, without
    duplicates.
    """
    worst: list[MomentBytes] = []
    total = -1
    for moment in sorted(
        set(moments),
        key=lambda moment: (moment.activation_bytes, moment.counted_bytes),
        reverse=True,
    ):
        if moment.counted_bytes + moment.activation_bytes > total:
            total = moment.counted_bytes + moment.activation_bytes
            worst.append(moment)
    return tuple(worst)
