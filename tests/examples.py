"""The number of cases of a property that a run draws."""

from __future__ import annotations

from hypothesis import Phase, settings

SHORT = 8


def phases() -> tuple[Phase, ...]:
    """Return the phases of a property with named examples: `make test` runs these alone, whatever else it would draw.

    What is drawn follows from the test's text, so that a changed line can cost seconds. No failing example is shrunk.
    """
    return (Phase.explicit, Phase.generate) if is_long() else (Phase.explicit,)


def is_long() -> bool:
    """Return whether this is a run of `make test-long`."""
    return settings.get_current_profile_name() == "new"


def examples(count: int, short: int = SHORT) -> int:
    """Return `count` for `make test-long`, and at most `short` for `make test`, which draws the same ones each time."""
    return count if is_long() else min(count, short)
