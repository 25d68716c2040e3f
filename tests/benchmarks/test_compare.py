"""Laws of the ranks in the benchmark of comparisons."""

from __future__ import annotations

import pytest

from benchmarks.compare import FOUR, TWELVE, rank_correlation


def test_the_rank_correlation_is_spearmans() -> None:
    from scipy.stats import spearmanr

    pairs = [(1.0, 10.0), (2.0, 9.0), (3.0, 30.0), (4.0, 30.0), (5.0, 50.0)]
    assert rank_correlation(pairs) == pytest.approx(spearmanr(*zip(*pairs, strict=True)).statistic)
    assert rank_correlation([(1, 1), (2, 2), (3, 3)]) == pytest.approx(1)
    assert rank_correlation([(1, 3), (2, 2), (3, 1)]) == pytest.approx(-1)


def test_twelve_strategies_differ() -> None:
    assert len({tuple(pins.items()) for pins in TWELVE}) == 12
    assert all(strategy in TWELVE for strategy in FOUR)
