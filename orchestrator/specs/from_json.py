"""Builds objects from the JSON form that `dataclasses.asdict` gives. Standard library only."""

from __future__ import annotations

from dataclasses import is_dataclass
from enum import Enum
from typing import Any, TypeVar, get_args, get_origin, get_type_hints

from orchestrator.specs.json_object import JsonObject

Noun = TypeVar("Noun")


def from_json(kind: type[Noun], data: JsonObject) -> Noun:
    """Return an object of the class `kind` from its JSON, with enumerations, tuples and nested
    objects restored.
    """
    kinds = get_type_hints(kind)
    return kind(**{name: _parse_field_value(kinds[name], value) for name, value in data.items()})


def _parse_field_value(kind: Any, value: Any) -> Any:
    """Return a field's value of type `kind`, or of one of the types in a union, from its JSON."""
    for part in (kind, *get_args(kind)):
        if isinstance(value, list) and get_origin(part) is tuple:
            return tuple(_parse_field_value(get_args(part)[0], item) for item in value)
        if isinstance(value, dict) and isinstance(part, type) and is_dataclass(part):
            return from_json(part, value)
        if value is not None and isinstance(part, type) and issubclass(part, Enum):
            return part(value)
    return value
