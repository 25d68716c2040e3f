"""One measured number beside what was promised."""

from __future__ import annotations

import sys
import time
from typing import TypedDict

BEGAN_S = time.monotonic()


class Figure(TypedDict):
    """`bar` is the promise in words ("at most 1.3"), empty where the number only informs."""

    figure: str
    value: float
    unit: str
    bar: str
    holds: bool


def at_most(figure: str, value: float, unit: str, limit: float) -> Figure:
    """The figure with its bar `limit`, which it may reach but not pass."""
    return Figure(
        figure=figure, value=value, unit=unit, bar=f"at most {limit:g}", holds=value <= limit
    )


def at_least(figure: str, value: float, unit: str, limit: float) -> Figure:
    """The figure with its bar `limit`, which it must reach."""
    return Figure(
        figure=figure, value=value, unit=unit, bar=f"at least {limit:g}", holds=value >= limit
    )


def informs(figure: str, value: float, unit: str) -> Figure:
    """A figure without a bar."""
    return Figure(figure=figure, value=value, unit=unit, bar="", holds=True)


def say(what: str) -> None:
    """One line of progress, beside the table."""
    print(f"{time.monotonic() - BEGAN_S:6.0f} s  {what} ...", file=sys.stderr, flush=True)
