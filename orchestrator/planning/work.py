"""A limit on how many plans one decision examines. It is a count, not a time, so that a replay
decides alike anywhere.
"""

from __future__ import annotations

from orchestrator.specs.errors import SpecError

# A 405B model on 4,096 devices with a batch of 2,048 samples looks at 38,000, which takes 2.4 s
# (one Xeon core,
# 2026-11).
PLANS_MAX = 65_536
# in the search after each change by which a job without a plan would fit
OTHER_PLANS_MAX = PLANS_MAX // 4
ALL_OTHER_PLANS_MAX = 2 * PLANS_MAX  # in all of these searches, of which none begins beyond it


class TooManyPlans(SpecError):
    """The job allows more plans than one decision may examine."""


class PlanCounter:
    """Counts the plans, and the ways to share devices, that one search has examined."""

    def __init__(self, plans_max: int = PLANS_MAX) -> None:
        self.looked = 0
        self._plans_max = plans_max

    def count_examined(self, count: int = 1) -> None:
        """Add `count` to the examined plans. Raises TooManyPlans beyond the limit."""
        if self.looked + count > self._plans_max:
            raise TooManyPlans(
                "too many plans to choose from",
                path="plan",
                got=f"more than {self._plans_max:,}",
                allowed=f"{self._plans_max:,} plans that a decision looks at",
                hint="pin settings, such as `plan: {tp: 8, pp: 4, micro_batch: 1}`, allow fewer numbers of devices "
                "(`gpus`), or take a global batch with fewer divisors",
            )
        self.looked += count
