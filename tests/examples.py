"""The number of cases of a property that a run draws."""

from __future__ import annotations

from hypothesis import settings

SHORT = 8


def examples(count: int, short: int = SHORT) -> int:
    """Return `count` for `make test-long`, and at most `short` for `make test`, which draws the same ones each time."""
    return count if settings.get_current_profile_name() == "new" else min(count, short)
