"""Random draws of simulated worlds, which depend on their seed alone."""

from __future__ import annotations

import random


def stream(seed: int, *what: str) -> random.Random:
    """Return a random generator that depends only on the seed and on `what`, not on the order of events."""
    return random.Random("/".join((str(seed), *what)))
