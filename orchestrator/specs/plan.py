"""A plan: how one job is cut over devices. Standard library only, since training processes read it too."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.choices import ParallelLayout
from orchestrator.specs.engines import why_illegal
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.plan_fields import PlanFields


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan(PlanFields):
    """A legal way to run a job. An illegal combination raises IllegalPlan and is never constructed."""

    def __post_init__(self) -> None:
        reason = why_illegal(self)
        if reason:
            raise IllegalPlan(reason)


def share_heads(heads: int, kv_heads: int, layout: ParallelLayout) -> bool:
    """Return whether context-parallel ranks can share the heads of a tensor-parallel rank.

    Each gets as many heads of queries. Each gets as many of keys and values, or as many ranks share one of them.
    """
    queries, kv = heads // layout.tp, kv_heads // layout.tp
    if heads % layout.tp or kv_heads % layout.tp or queries % layout.cp:
        return False
    return kv % layout.cp == 0 or layout.cp % kv == 0
