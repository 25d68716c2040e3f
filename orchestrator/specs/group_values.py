"""Groups values by key. Standard library only."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TypeVar

Key = TypeVar("Key")
Value = TypeVar("Value")


def group_values(pairs: Iterable[tuple[Key, Value]]) -> dict[Key, list[Value]]:
    """Return {key: list of its values}; keys and values are in the order in which they come."""
    groups: dict[Key, list[Value]] = {}
    for key, value in pairs:
        groups.setdefault(key, []).append(value)
    return groups
