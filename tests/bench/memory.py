"""How well is memory predicted? The closed form over the full matrix of real ranks. `python -m tests.bench.memory`."""

from __future__ import annotations

import json
import tempfile
from pathlib import Path
from typing import Any

from orchestrator.planning.frontier import MARGIN
from tests.memory.matrix import full


def figures() -> list[dict[str, Any]]:
    """Mean and worst error of the predicted allocated peak, and plans that would not have fitted as promised."""
    with tempfile.TemporaryDirectory() as folder:
        found = full(Path(folder))
    errors = [row.error for row in found]
    mean = sum(map(abs, errors)) / len(errors)
    short = sum(row.measured_bytes > row.predicted_bytes * MARGIN for row in found)
    return [
        _figure("mean |error| of the predicted peak", 100 * mean, "%", 5.0, mean <= 0.05),
        _figure("largest overestimate", 100 * max(errors), "%", None, True),
        _figure("largest underestimate", -100 * min(errors), "%", 100 * (MARGIN - 1), short == 0),
        _figure(f"plans called fitting that did not fit, of {len(found)}", short, "plans", 0, short == 0),
    ]


def _figure(name: str, value: float, unit: str, bar: float | None, holds: bool) -> dict[str, Any]:
    return {"figure": name, "value": round(value, 3), "unit": unit, "bar": bar, "holds": holds}


if __name__ == "__main__":
    for figure in figures():
        print(json.dumps(figure))
