"""How many devices do short jobs keep busy? What was submitted in the last hours tells how much room they need."""

from __future__ import annotations

from math import exp, log2

from orchestrator.scheduling.availability import Pool
from orchestrator.specs.state import Demand

MEMORY_S = 6 * 3600.0  # what was asked for counts exp(-age / MEMORY_S)
LEAST_S = 3600.0  # over which a first burst is taken to spread
# Of a job's length: jobs shorter than that find room beside it, and what else is held for so long counts as held beside
# it. On six shaken inputs of traces/plans/base.csv (8 x 8 devices, 260 s launches; 2026-11) mean completion is 1,335 s
# (1,283 to 1,407) with a quarter; on five of them 1,378 s with a tenth and 1,419 s with a half. Without room it is
# 1,914 s (1,263 to 3,271): two jobs of three hours hold all devices together.
SHORT = 0.25
LENGTHS = 24  # powers of two: the longest begins at 97 days


def asked(demand: Demand | None, at_s: float, length_s: float, device_s: float) -> Demand:
    """What is remembered once a job of this length and so many device-seconds was submitted."""
    if demand is None:
        demand = Demand(since_s=at_s, at_s=at_s, device_s=(0.0,) * LENGTHS)
    kept = exp((demand.at_s - at_s) / MEMORY_S)
    device_seconds = [kept * one for one in demand.device_s]
    device_seconds[min(LENGTHS - 1, int(log2(max(1.0, length_s))))] += device_s
    return Demand(since_s=demand.since_s, at_s=at_s, device_s=tuple(device_seconds))


def devices_wanted(demand: Demand | None, at_s: float, shorter_s: float) -> float:
    """Devices that jobs shorter than this kept busy on average."""
    if demand is None or shorter_s < 2.0:
        return 0.0
    lengths = min(LENGTHS, int(log2(shorter_s)))
    counted_s = MEMORY_S * (1.0 - exp(-max(LEAST_S, at_s - demand.since_s) / MEMORY_S))
    return sum(demand.device_s[:lengths]) * exp((demand.at_s - at_s) / MEMORY_S) / counted_s


def room_from_s(demand: Demand | None, at_s: float, pool: Pool, devices: int, seconds: float) -> float:
    """From when on so many devices can be held for so long with room left for what is much shorter.

    What is held for as long as such jobs matter leaves as many devices as they wanted lately, or is nothing but this.
    """
    shorter_s = SHORT * seconds
    wanted = devices_wanted(demand, at_s, shorter_s)
    return pool.held_until_s(pool.group.devices - wanted - devices) - shorter_s
