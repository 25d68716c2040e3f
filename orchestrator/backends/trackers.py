"""Registry of trackers, by their names in a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.backends.jsonl.tracker import JsonLinesTracker
from orchestrator.backends.mlflow.tracker import make_tracker
from orchestrator.backends.ports import Lookups, Tracker
from orchestrator.specs.errors import SpecError, suggest_word

# Each is made for a home.
TRACKERS: Mapping[str, Callable[[Path, Lookups], Tracker]] = {
    "mlflow": make_tracker,
    "jsonl": JsonLinesTracker,
}


def check_trackers(tracker_names: Sequence[str], source: str) -> None:
    """Raise SpecError for the first name that no tracker has. `source` is the cluster file's name,
    for the error.
    """
    for name in tracker_names:
        if name not in TRACKERS:
            raise SpecError(
                "no such tracker",
                source=source,
                path="trackers",
                got=name,
                allowed=", ".join(TRACKERS),
                hint=suggest_word(name, TRACKERS),
            )
