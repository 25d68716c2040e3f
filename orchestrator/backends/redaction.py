"""Hides the values of a job's secrets and variables in evidence and records."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass, replace
from typing import Any

from orchestrator.specs.attempt import Evidence
from orchestrator.specs.job.spec import JobSpec

SHORTEST_HIDDEN = 4  # characters; hiding "1" would leave no text readable

Hide = Callable[[str], str]


def hider(spec: JobSpec, environment: Mapping[str, str]) -> Hide:
    """A function that replaces the values of the job's secrets and variables in a text by their names."""
    return _hider([*_secrets(spec, environment), *((value, name) for name, value in spec.env)])


def without_secrets(evidence: Evidence, spec: JobSpec, environment: Mapping[str, str]) -> Evidence:
    """The evidence with the values of the job's secrets replaced by their names: a program may have printed them."""
    return _hidden(evidence, _hider(_secrets(spec, environment)))


def _secrets(spec: JobSpec, environment: Mapping[str, str]) -> list[tuple[str, str]]:
    return [(environment.get(name, ""), name) for name in spec.secrets]


def _hidden(said: Any, hide: Hide) -> Any:
    if type(said) is str:  # an enumeration is no text
        return hide(said)
    if type(said) is tuple:
        return tuple(_hidden(one, hide) for one in said)
    if is_dataclass(said) and not isinstance(said, type):
        return replace(said, **{field.name: _hidden(getattr(said, field.name), hide) for field in fields(said)})
    return said


def _hider(values: list[tuple[str, str]]) -> Hide:
    values = values + [(json.dumps(value)[1:-1], name) for value, name in values]  # as they stand in JSON
    longest_first = sorted((pair for pair in values if len(pair[0]) >= SHORTEST_HIDDEN), key=lambda p: -len(p[0]))

    def hide(text: str) -> str:
        for value, name in longest_first:
            text = text.replace(value, f"[{name}]")
        return text

    return hide
