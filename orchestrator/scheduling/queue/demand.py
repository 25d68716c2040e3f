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


def add_to_demand(
    demand: Demand | None, at_s: float, job_duration_s: float, job_device_s: float
) -> Demand:
    """Return the recent demand for devices with a submitted job added.

    The job takes `job_duration_s` seconds and `job_device_s` device-seconds.
    """
    if demand is None:
        demand = Demand(since_s=at_s, at_s=at_s, device_s=(0.0,) * LENGTHS)
    share = exp((demand.at_s - at_s) / tuning.TUNING.memory_s)
    device_seconds = [share * class_s for class_s in demand.device_s]
    device_seconds[min(LENGTHS - 1, frexp(max(1.0, job_duration_s))[1] - 1)] += job_device_s
    return Demand(since_s=demand.since_s, at_s=at_s, device_s=tuple(device_seconds))


def compute_average_devices_by_duration_class(
    demand: Demand | None, at_s: float
) -> tuple[float, ...]:
    """Return how many devices recent jobs used on average: those shorter than 1 s, than 2 s, 4 s, 8
    s and so on.
    """
    if demand is None:
        return NOBODY
    counted_s = tuning.TUNING.memory_s * (
        1.0 - exp(-max(tuning.TUNING.least_s, at_s - demand.since_s) / tuning.TUNING.memory_s)
    )
    share = exp((demand.at_s - at_s) / tuning.TUNING.memory_s) / counted_s
    return tuple(accumulate((share * class_s for class_s in demand.device_s), initial=0.0))


def leaves_enough_headroom_from_s(
    average_devices: Sequence[float],
    pool: AvailabilityProfile,
    job_device_count: int,
    job_duration_s: float,
) -> float:
    """Return when a job with these devices and duration would leave enough free devices for much
    shorter jobs.

    Enough are as many whole devices as those shorter jobs used lately. `average_devices` is the
    result of `compute_average_devices_by_duration_class`. The time is in seconds since 1970.
    """
    shorter_s = tuning.TUNING.short * job_duration_s
    others = average_devices[min(LENGTHS, max(0, frexp(shorter_s)[1] - 1))]
    return (
        pool.find_held_at_most_from_s(pool.group.devices - int(others) - job_device_count)
        - shorter_s
    )
