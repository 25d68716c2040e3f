"""Plan: the settings of one run (parallelism, batch, precision, memory savings). Standard library only.

Training processes read it too.
"""

from __future__ import annotations

from orchestrator.specs.choices import ParallelLayout
from orchestrator.specs.engines import find_plan_violation
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan_fields import PlanFields


@frozen
class Plan(PlanFields):
    """The legal settings of one run: parallelism, batch, precision and so on. An illegal set raises IllegalPlan."""

    def __post_init__(self) -> None:
        reason = find_plan_violation(self)
        if reason:
            raise IllegalPlan(reason)


def can_share_heads(heads: int, kv_heads: int, layout: ParallelLayout) -> bool:
    """Return whether context-parallel ranks can split the attention heads of a tensor-parallel
    rank.

    They must divide the query heads evenly. They must also divide the key-value heads, or be a
    multiple of them.
    """
    queries = heads // layout.tp
    kv = kv_heads // layout.tp
    if heads % layout.tp or kv_heads % layout.tp or queries % layout.cp:
        return False
    return kv % layout.cp == 0 or layout.cp % kv == 0
