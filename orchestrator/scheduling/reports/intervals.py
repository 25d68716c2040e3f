"""95 % intervals of step times over repeats, computed on logarithms, so that no limit is negative."""

from __future__ import annotations

from collections.abc import Sequence
from math import exp, log, sqrt
from statistics import fmean, variance

# Student's t at 97.5 % for 1, 2, 3 ... degrees of freedom: the mean lies within so many standard
# errors (95 %)
STUDENT = (
    *(12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262),
    *(2.228, 2.201, 2.179, 2.160, 2.145, 2.131, 2.120, 2.110, 2.101),
)
# of a strategy: two of them have so many degrees of freedom together
REPEATS_MAX = 1 + len(STUDENT) // 2

Interval = tuple[float, float]


def compute_geometric_mean_interval(values: Sequence[float]) -> Interval | None:
    """Return the 95 % interval of the geometric mean of positive numbers, by Student's t.

    None for fewer than two numbers.
    """
    if len(values) < 2:
        return None
    mean, square = _compute_mean_and_squared_error_of_logs(values)
    half = STUDENT[len(values) - 2] * sqrt(square)
    return exp(mean - half), exp(mean + half)


def compute_geometric_mean_ratio_interval(
    numerators: Sequence[float], denominators: Sequence[float]
) -> Interval | None:
    """Return the 95 % interval of the ratio of two geometric means; None where either has fewer
    than two values.

    It is Welch's t (Welch 1947, Biometrika 34:28) on logarithms, its degrees of freedom rounded
    down.
    """
    if min(len(numerators), len(denominators)) < 2:
        return None
    mean, square = _compute_mean_and_squared_error_of_logs(numerators)
    other_mean, other_square = _compute_mean_and_squared_error_of_logs(denominators)
    total = square + other_square
    half = 0.0
    if total > 0:
        freedom = total**2 / (
            square**2 / (len(numerators) - 1) + other_square**2 / (len(denominators) - 1)
        )
        half = STUDENT[max(1, min(int(freedom + 1e-9), len(STUDENT))) - 1] * sqrt(total)
    return exp(mean - other_mean - half), exp(mean - other_mean + half)


def _compute_mean_and_squared_error_of_logs(values: Sequence[float]) -> tuple[float, float]:
    """Return (mean of the logarithms, square of its standard error)."""
    logs = [log(value) for value in values]
    return fmean(logs), variance(logs) / len(logs)
