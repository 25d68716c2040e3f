"""Corrections of a memory estimate by a factor on its activations."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

from orchestrator.memory.engines.moments import ACTIVATIONS
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.profile import MemoryEstimate, MomentBytes, Source
from orchestrator.specs.replace import replace


def observed_correction(moments: Sequence[MomentBytes], measured_bytes: int) -> float:
    """Return the smallest activation factor with which some peak point reaches `measured_bytes`; at least 1.

    A plan that needed less than predicted says nothing about later plans. A wrong "fits" costs an attempt; a wrong "too
    big" costs only speed.
    """
    factors = (
        (measured_bytes - moment.counted_bytes) / moment.activation_bytes
        for moment in moments
        if moment.activation_bytes > 0
    )
    return max(1.0, min(factors, default=1.0))


def corrected(estimate: MemoryEstimate, correction: float) -> MemoryEstimate:
    """Return the estimate at its highest peak, with activations times `correction`.

    Where that is another point of the step than estimated, all counted bytes become one entry.
    """
    allocated_bytes = corrected_allocated_bytes(estimate, correction)
    if allocated_bytes == estimate.allocated_bytes:
        return estimate
    worst = max(
        estimate.moments,
        key=lambda moment: moment.counted_bytes + correction * moment.activation_bytes,
    )
    counted = tuple((cause, count) for cause, count in estimate.by_cause if cause != ACTIVATIONS)
    if worst.name != estimate.moment or sum(count for _, count in counted) != worst.counted_bytes:
        counted = (("all that is counted", worst.counted_bytes),)
    growth = corrected_bytes(estimate, correction) - estimate.device_bytes
    return replace(
        estimate,
        moment=worst.name,
        by_cause=((ACTIVATIONS, allocated_bytes - worst.counted_bytes), *counted),
        allocated_bytes=allocated_bytes,
        reserved_bytes=estimate.reserved_bytes + growth,
        device_bytes=estimate.device_bytes + growth,
    )


def corrected_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Return the estimate's device bytes with activations times `correction`; never below the estimate itself.

    The allocator's overhead grows with what it holds; context and communicators stay.
    """
    growth = corrected_allocated_bytes(estimate, correction) - estimate.allocated_bytes
    overhead = estimate.reserved_bytes / max(1, estimate.allocated_bytes)
    return estimate.device_bytes + math.ceil(growth * max(1.0, overhead))


def corrected_allocated_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Return the estimate's allocated peak with activations times `correction`; never below the estimate itself."""
    return corrected_peak(estimate.allocated_bytes, estimate.moments, correction)


def corrected_peak(predicted_bytes: int, moments: Sequence[MomentBytes], correction: float) -> int:
    """Return the highest allocated bytes over these peak points, with activations times `correction`.

    Never returns less than `predicted_bytes`.
    """
    if correction <= 1.0:
        return predicted_bytes
    grown = (moment.counted_bytes + correction * moment.activation_bytes for moment in moments)
    return max(predicted_bytes, math.ceil(max(grown, default=0.0)))


def is_known(estimate: MemoryEstimate, correction: float) -> bool:
    """Return whether the estimate is a real prediction.

    For a script that declares nothing, only after it failed once.
    """
    return estimate.source is not Source.ASSUMED or correction > 1.0


def predicted_peak_bytes(attempt: Attempt) -> int | None:
    """Return the allocated peak predicted for the attempt at its launch; None where its memory was unknown."""
    if not is_known(attempt.estimate, attempt.correction):
        return None
    return corrected_allocated_bytes(attempt.estimate, attempt.correction)


def worst_moments(moments: Iterable[MomentBytes]) -> tuple[MomentBytes, ...]:
    """Return the peak points that are the highest at some activation factor of at least 1, without duplicates."""
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
