"""Which plans does no other plan beat? Step time, device bytes and GPUs, compared over all plans at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterable
from math import inf
from typing import NamedTuple

from orchestrator.specs.choices import Offload
from orchestrator.specs.engines import facts_of
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate


class Timed(NamedTuple):
    """What a frontier knows of a plan, besides its GPUs, before its memory is estimated."""

    plan: Plan
    step_s: float
    at_least_bytes: int  # of a device


class Costed(NamedTuple):
    """What a frontier compares of a plan, besides its GPUs: `needed_bytes` of a device follow from the estimate."""

    plan: Plan
    step_s: float
    estimate: MemoryEstimate
    needed_bytes: float


def device_bytes(_plan: Plan, estimate: MemoryEstimate) -> int:
    """As estimated."""
    return estimate.device_bytes


def pareto(
    timed: Iterable[Timed],
    estimate: Callable[[Plan], MemoryEstimate],
    most_bytes: float,
    needed: Callable[[Plan, MemoryEstimate], float] = device_bytes,
) -> list[Costed]:
    """Those that no other beats or equals in step time, device bytes and GPUs at once, the fastest first.

    `needed` tells the bytes, never fewer than estimated, and infinitely many of a plan to leave out; none needs more
    than `most_bytes`. Of plans that are equal in all three the simplest stays: the torch engine before DeepSpeed, no
    offload before offload, less sharding before more. With fewer GPUs first, what beats a plan has come before it, save
    among equally fast ones. On a staircase of step times upwards and bytes downwards one step decides (Kung et al.
    1975, JACM 22(4)). Most plans are beaten even if they need no more than the least that they can, and are never
    estimated.
    """
    kept: list[Costed] = []
    times: list[float] = []
    least: list[float] = []
    for one in sorted(timed, key=_order):
        at = bisect_right(times, one.step_s)
        below = min(most_bytes, least[at - 1] - 1) if at else most_bytes
        if one.at_least_bytes > below:
            continue
        estimated = estimate(one.plan)
        needed_bytes = needed(one.plan, estimated)
        assert one.at_least_bytes <= needed_bytes, (one, estimated)
        if needed_bytes > below or needed_bytes == inf:
            continue
        begin = bisect_left(times, one.step_s)
        end = begin
        while end < len(least) and least[end] >= needed_bytes:
            end += 1
        times[begin:end], least[begin:end] = [one.step_s], [needed_bytes]
        if kept and kept[-1].step_s == one.step_s and kept[-1].plan.world_size == one.plan.world_size:
            kept.pop()  # as fast as this one, and it needs more
        kept.append(Costed(one.plan, one.step_s, estimated, needed_bytes))
    return sorted(kept, key=_fastest_first)


def _order(timed: Timed) -> tuple[object, ...]:
    plan = timed.plan
    return (
        plan.world_size,
        timed.step_s,
        facts_of(plan.engine).simplicity,
        plan.offload is not Offload.NONE,
        plan.activation_offload,
        plan.zero_stage,
        plan.activation_checkpointing,
        plan.gradient_accumulation_steps,
    )


def _fastest_first(costed: Costed) -> tuple[float, float, int]:
    return (costed.step_s, costed.needed_bytes, costed.plan.world_size)
