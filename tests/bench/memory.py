"""How well is memory predicted? The closed form over the full matrix of real ranks."""

from __future__ import annotations

import tempfile
from pathlib import Path

from orchestrator.planning.frontier import MARGIN
from tests.bench.figure import Figure, at_most, informs
from tests.memory.matrix import full, table


def figures() -> list[Figure]:
    """Mean and worst error of the predicted allocated peak, and plans that would not have fitted as promised."""
    with tempfile.TemporaryDirectory() as folder:
        found = full(Path(folder))
    errors = [row.error for row in found]
    mean = sum(map(abs, errors)) / len(errors)
    short = [row for row in found if row.measured_bytes > row.predicted_bytes * MARGIN]
    if short:
        print(table(short))
    return [
        at_most("mean error of the predicted peak, either way", 100 * mean, "%", 5),
        informs("largest overestimate", 100 * max(errors), "%"),
        informs("largest underestimate", max(0.0, -100 * min(errors)), "%"),
        at_most(f"plans called fitting that did not fit, of {len(found)}", len(short), "plans", 0),
    ]
