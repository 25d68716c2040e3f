"""The corpus of failures: lines that people reported, and lines of programs that run well."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import yaml

_HERE = Path(__file__).parent / "failures"
REPORTED: list[dict[str, Any]] = yaml.safe_load((_HERE / "reported.yaml").read_text())
ORDINARY: list[dict[str, str]] = yaml.safe_load((_HERE / "ordinary.yaml").read_text())
_SHARED = Path(__file__).parents[3] / "shared" / "reference"  # optional
REAL_LOGS = _SHARED / "failures"  # whole logs
# ends of programs of others, with what an operator accepts
STRANGERS = [
    _HERE / "ends.yaml",
    *(_SHARED / "strangers" / name for name in ("logs.yaml", "logs2.yaml")),
]


def names() -> list[str]:
    """Return a distinct name for each reported failure."""
    return [
        f"{number}-{report['from'].partition(',')[0]}" for number, report in enumerate(REPORTED)
    ]
