"""Hides the values of a job's secrets and variables in records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping

from orchestrator.specs.job.spec import JobSpec

SHORTEST_HIDDEN = 4  # characters; hiding "1" would leave no text readable

Hide = Callable[[str], str]


def hider(spec: JobSpec, environment: Mapping[str, str]) -> Hide:
    """A function that replaces the values of the job's secrets and variables in a text by their names."""
    values = [(environment.get(name, ""), name) for name in spec.secrets] + [(value, name) for name, value in spec.env]
    values += [(json.dumps(value)[1:-1], name) for value, name in values]  # as they stand in JSON
    longest_first = sorted((pair for pair in values if len(pair[0]) >= SHORTEST_HIDDEN), key=lambda p: -len(p[0]))

    def hide(text: str) -> str:
        for value, name in longest_first:
            text = text.replace(value, f"[{name}]")
        return text

    return hide
