"""Do two lists of numbers have the same order?"""

from __future__ import annotations

import statistics
from collections.abc import Sequence


def spearman(first: Sequence[float], second: Sequence[float]) -> float:
    """Rank correlation; equal values share their rank."""
    return statistics.correlation(_ranks(first), _ranks(second))


def _ranks(values: Sequence[float]) -> list[float]:
    return [sum(other < one for other in values) + (values.count(one) - 1) / 2 for one in values]
