"""What reality has said about our predictions, as one factor per (device, engine, family)."""

from __future__ import annotations

import math
from collections.abc import Iterable

from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.state import Observation


def correction(observations: Iterable[Observation], *, device: str, engine: str, family: str) -> float:
    """The largest measured / predicted of all matching observations, and never less than 1.

    The largest, because one refuted plan must stay refuted: with a mean, kinder observations could talk its corrected
    peak back under the capacity that it burst. At least 1, because a plan that needed less than predicted says nothing
    about the plans that are still to come, and a wrong "fits" costs an attempt where a wrong "too big" costs speed.
    """
    ratios = (
        observation.measured_bytes / observation.predicted_bytes
        for observation in observations
        if (observation.device, observation.engine, observation.family) == (device, engine, family)
        and observation.predicted_bytes > 0
    )
    return max(1.0, max(ratios, default=1.0))


def corrected_bytes(estimate: MemoryEstimate, correction: float) -> int:
    """Device bytes of the estimate times the correction, rounded up; never below the estimate itself."""
    return math.ceil(estimate.device_bytes * max(1.0, correction))
