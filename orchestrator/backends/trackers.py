"""Registry of trackers, by their names in a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.backends.jsonl.tracker import JsonLinesTracker
from orchestrator.backends.mlflow.tracker import tracker_of
from orchestrator.backends.ports import Lookups, Tracker
from orchestrator.specs.errors import SpecError, find_closest_word

# Each is made for a home.
TRACKERS: Mapping[str, Callable[[Path, Lookups], Tracker]] = {
    "mlflow": tracker_of,
    "jsonl": JsonLinesTracker,
}


def check_trackers(names: Sequence[str], source: str) -> None:
    """Raise SpecError at a name that no tracker has; `source` is the cluster file with the names."""
    for name in names:
        if name not in TRACKERS:
            near = find_closest_word(name, TRACKERS)
            hint = f"did you mean {near!r}?" if near else ""
            raise SpecError(
                "no such tracker",
                source=source,
                path="trackers",
                got=name,
                allowed=", ".join(TRACKERS),
                hint=hint,
            )
