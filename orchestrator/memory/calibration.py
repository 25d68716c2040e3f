"""What reality has said about our predictions, as one factor on the activations of a (device, family).

Parameters, gradients, optimizer states and buffers follow from counting; what a model keeps for its backward pass
follows from its code, and is the same under every engine. So a measurement corrects the activations alone: a plan that
shards better is then rightly seen to save little where activations are the trouble.
"""

from __future__ import annotations

import math
from collections.abc import Iterable

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.profile import MemoryEstimate, Source
from orchestrator.specs.state import Observation


def observed_correction(estimate: MemoryEstimate, measured_bytes: int) -> float:
    """The least factor on the activations under which some moment of the estimate reaches `measured_bytes`.

    At least 1: a plan that needed less than predicted says nothing about the plans that are still to come, and a wrong
    "fits" costs an attempt where a wrong "too big" costs speed.
    """
    factors = (
        (measured_bytes - moment.counted_bytes) / moment.activation_bytes
        for moment in estimate.moments
        if moment.activation_bytes > 0
    )
    return max(1.0, min(factors, default=1.0))


def correction(observations: Iterable[Observation], *, device: str, family: str) -> float:
    """The largest factor of all matching observations, and never less than 1.

    The largest, because one refuted plan must stay refuted: with a mean, kinder observations could talk its corrected
    peak back under the capacity that it burst.
    """
    matching = (seen.correction for seen in observations if (seen.device, seen.family) == (device, family))
    return max(1.0, max(matching, default=1.0))


def corrected_allocated_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Allocated peak of the estimate with its activations times `correction`; never below the estimate itself."""
    if correction <= 1.0:
        return estimate.allocated_bytes
    grown = (moment.counted_bytes + correction * moment.activation_bytes for moment in estimate.moments)
    return max(estimate.allocated_bytes, math.ceil(max(grown, default=0.0)))


def predicted_peak_bytes(attempt: Attempt) -> int | None:
    """Allocated peak that was expected of the attempt at its launch; None where nothing was known of its memory yet."""
    if attempt.estimate.source is Source.ASSUMED and attempt.correction <= 1.0:
        return None
    return corrected_allocated_bytes(attempt.estimate, attempt.correction)


def corrected_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Device bytes of the estimate with its activations times `correction`; never below the estimate itself.

    The allocator's overhead grows with what it holds; context and communicators stay.
    """
    growth = corrected_allocated_bytes(estimate, correction) - estimate.allocated_bytes
    overhead = estimate.reserved_bytes / max(1, estimate.allocated_bytes)
    return estimate.device_bytes + math.ceil(growth * max(1.0, overhead))
