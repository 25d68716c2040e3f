"""Pareto front of plans by step time, device bytes, number of GPUs and trust (how proven a kind of plan is)."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from orchestrator.specs.choices import Offload
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate


class TimedPlan(NamedTuple):
    """A plan with its step time and trust, before its memory is estimated."""

    plan: Plan
    step_s: float
    at_least_bytes: int  # of a device
    rank: float  # of trust, less being better


class CostedPlan(NamedTuple):
    """A plan with everything that a frontier compares; `needed_bytes` are per device."""

    plan: Plan
    step_s: float
    estimate: MemoryEstimate
    needed_bytes: float
    rank: float


def get_device_bytes(_plan: Plan, estimate: MemoryEstimate) -> int:
    """Return the estimate's `device_bytes`."""
    return estimate.device_bytes


def find_pareto_front(
    timed_plans: Iterable[TimedPlan],
    estimate: Callable[[Plan], MemoryEstimate],
    limit_bytes: float,
    needed_bytes_of: Callable[[Plan, MemoryEstimate], float] = get_device_bytes,
) -> list[CostedPlan]:
    """Return the plans that no other beats or equals in step time, device bytes, GPUs and trust,
    fastest first.

    `needed_bytes_of` returns a plan's bytes per device, never fewer than estimated; infinity leaves
    the plan out. No plan in the result needs more than `limit_bytes`. Of plans that are equal in
    all four the simplest stays: the torch engine before DeepSpeed, no offload before offload, less
    sharding before more. With fewer GPUs first, the plan that beats another comes before it, except
    among equally fast ones. On a staircase of step times upwards and bytes downwards one step
    decides (Kung et al. 1975, JACM 22(4)); each rank of trust has its own. Most plans are beaten by
    their lower bounds of bytes already, and are never estimated.
    """
    ordered = sorted(timed_plans, key=_sort_key)
    unbeaten: list[CostedPlan] = []
    stairs = {rank: Staircase() for rank in sorted({entry.rank for entry in ordered})}
    for entry in ordered:
        below = stairs[entry.rank].compute_bytes_to_beat(entry.step_s, limit_bytes)
        if entry.at_least_bytes > below:
            continue
        estimated = estimate(entry.plan)
        needed_bytes = needed_bytes_of(entry.plan, estimated)
        assert entry.at_least_bytes <= needed_bytes, (entry, estimated)
        if needed_bytes > below or needed_bytes == inf:
            continue
        for rank, staircase in stairs.items():
            if rank >= entry.rank:
                staircase.add(entry.step_s, needed_bytes)
        costed = CostedPlan(entry.plan, entry.step_s, estimated, needed_bytes, entry.rank)
        if unbeaten and _equals_but_for_bytes(unbeaten[-1], costed):
            unbeaten.pop()  # as fast as this entry, and it needs more
        unbeaten.append(costed)
    return sorted(unbeaten, key=_make_speed_sort_key)


class Staircase:
    """The lowest memory need at each step time, over the plans added so far."""

    def __init__(self) -> None:
        self._times: list[float] = []
        self._least: list[float] = []

    def compute_bytes_to_beat(self, step_s: float, limit_bytes: float) -> float:
        """Return the largest memory need with which a plan of this step time is beaten by no added
        plan; at most `limit_bytes`.
        """
        count = bisect_right(self._times, step_s)
        return min(limit_bytes, self._least[count - 1] - 1) if count else limit_bytes

    def add(self, step_s: float, needed_bytes: float) -> None:
        """Add a plan with this step time and memory need, unless an added plan beats it."""
        if needed_bytes > self.compute_bytes_to_beat(step_s, inf):
            return
        begin = bisect_left(self._times, step_s)
        end = begin
        while end < len(self._least) and self._least[end] >= needed_bytes:
            end += 1
        self._times[begin:end] = [step_s]
        self._least[begin:end] = [needed_bytes]


def _equals_but_for_bytes(first: CostedPlan, second: CostedPlan) -> bool:
    is_alike = first.step_s == second.step_s and first.rank == second.rank
    return is_alike and first.plan.world_size == second.plan.world_size


def _sort_key(timed: TimedPlan) -> tuple[object, ...]:
    plan = timed.plan
    return (
        plan.world_size,
        timed.step_s,
        timed.rank,
        get_engine_facts(plan.engine).simplicity,
        plan.offload is not Offload.NONE,
        plan.activation_offload,
        plan.zero_stage,
        plan.activation_checkpointing,
        plan.gradient_accumulation_steps,
    )


def _make_speed_sort_key(costed: CostedPlan) -> tuple[float, float, int, float]:
    return (costed.step_s, costed.needed_bytes, costed.plan.world_size, costed.rank)
