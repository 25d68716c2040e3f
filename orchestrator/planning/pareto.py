"""Which plans does no other plan beat? Step time, device bytes and GPUs, compared over all plans at once."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable
from typing import NamedTuple

from orchestrator.specs.plan import Engine, Offload, Plan


class Costed(NamedTuple):
    """What a frontier compares of a plan, besides its GPUs."""

    plan: Plan
    step_s: float
    device_bytes: int


def pareto(costed: Iterable[Costed]) -> list[Costed]:
    """Those that no other beats or equals in step time, device bytes and GPUs at once, the fastest first.

    Of plans that are equal in all three the simplest stays: the torch engine before DeepSpeed, no offload before
    offload, less sharding before more. With fewer GPUs first, what beats a plan has come before it: on a staircase of
    step times upwards and bytes downwards one step decides (Kung et al. 1975, JACM 22(4)).
    """
    kept: list[Costed] = []
    times: list[float] = []
    least: list[int] = []
    for one in sorted(costed, key=_order):
        at = bisect_right(times, one.step_s)
        if at and least[at - 1] <= one.device_bytes:
            continue
        begin = bisect_left(times, one.step_s)
        end = begin
        while end < len(least) and least[end] >= one.device_bytes:
            end += 1
        times[begin:end], least[begin:end] = [one.step_s], [one.device_bytes]
        kept.append(one)
    return sorted(kept, key=_fastest_first)


def _order(costed: Costed) -> tuple[object, ...]:
    plan = costed.plan
    return (
        plan.world_size,
        costed.step_s,
        costed.device_bytes,
        plan.engine is Engine.DEEPSPEED,
        plan.offload is not Offload.NONE,
        plan.zero_stage,
        plan.activation_checkpointing,
        plan.gradient_accumulation_steps,
    )


def _fastest_first(costed: Costed) -> tuple[float, int, int]:
    return (costed.step_s, costed.device_bytes, costed.plan.world_size)
