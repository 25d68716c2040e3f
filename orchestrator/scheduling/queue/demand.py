"""Recent use of devices by short jobs, and the headroom: free devices that longer jobs must leave
for them.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from math import exp, frexp

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.placement.availability import AvailabilityProfile
from orchestrator.specs.state import Demand

LENGTHS = 24  # powers of two: the longest begins at 97 days
NOBODY = (0.0,) * (LENGTHS + 1)


def record_demand(demand: Demand | None, at_s: float, length_s: float, device_s: float) -> Demand:
    """Return the demand with a submitted job added, which needs `length_s` seconds and `device_s`
    device-seconds.
    """
    if demand is None:
        demand = Demand(since_s=at_s, at_s=at_s, device_s=(0.0,) * LENGTHS)
    share = exp((demand.at_s - at_s) / tuning.TUNING.memory_s)
    device_seconds = [share * class_s for class_s in demand.device_s]
    device_seconds[min(LENGTHS - 1, frexp(max(1.0, length_s))[1] - 1)] += device_s
    return Demand(since_s=demand.since_s, at_s=at_s, device_s=tuple(device_seconds))


def devices_used_by_shorter_jobs(demand: Demand | None, at_s: float) -> tuple[float, ...]:
    """Return the average numbers of devices that recent jobs used: those shorter than 1, 2, 4, 8
    ... seconds.
    """
    if demand is None:
        return NOBODY
    counted_s = tuning.TUNING.memory_s * (
        1.0 - exp(-max(tuning.TUNING.least_s, at_s - demand.since_s) / tuning.TUNING.memory_s)
    )
    share = exp((demand.at_s - at_s) / tuning.TUNING.memory_s) / counted_s
    return tuple(accumulate((share * class_s for class_s in demand.device_s), initial=0.0))


def leaves_headroom_from_s(
    wanted: Sequence[float], pool: AvailabilityProfile, devices: int, seconds: float
) -> float:
    """Return when a job on `devices` for `seconds` would leave enough free devices for much shorter
    jobs.

    `wanted` is the result of `devices_used_by_shorter_jobs`. The time is in seconds since 1970.
    Enough are as many whole devices as those shorter jobs used lately.
    """
    shorter_s = tuning.TUNING.short * seconds
    others = wanted[min(LENGTHS, max(0, frexp(shorter_s)[1] - 1))]
    return pool.held_at_most_from_s(pool.group.devices - int(others) - devices) - shorter_s
