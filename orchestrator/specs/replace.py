"""Copies an immutable object with some fields changed. Standard library only."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace  # so that mypy knows the fields of each noun
else:

    def replace(object_to_copy: Any, /, **changes: Any) -> Any:
        """Return a copy with these fields changed, as `dataclasses.replace` does; the copy's
        `__post_init__` runs, if any.

        Deciding on an event makes some ten such copies. An object with slots is copied slot by
        slot. `dataclasses` hands all fields to an `__init__` that sets each by
        `object.__setattr__`. An Attempt takes 3.0 us instead of 8.6, a Job 2.1 instead of 3.5, a
        State 1.7 instead of 3.1 (python 3.11, one Xeon core, 2026-11).
        """
        kind = type(object_to_copy)
        access = _find_slots(kind)
        if access is None:
            return dataclasses.replace(object_to_copy, **changes)
        copy, slots, judge = access
        new = object.__new__(kind)
        for read, write in copy:
            write(new, read(object_to_copy))
        for name, value in changes.items():
            slots[name](new, value)
        if judge is not None:
            judge(new)
        return new


__all__ = ["replace"]

Read = Callable[[object], object]
Write = Callable[[object, object], None]
Judge = Callable[[object], None]


@cache
def _find_slots(
    kind: type,
) -> tuple[Sequence[tuple[Read, Write]], dict[str, Write], Judge | None] | None:
    """Return how to copy a class with slots, or None for a class without slots.

    The parts are (reader and writer of each field, writers by name, `__post_init__` or None).
    """
    fields = dataclasses.fields(kind)
    if not all(
        field.init and hasattr(getattr(kind, field.name, None), "__set__") for field in fields
    ):
        return None
    slots = {field.name: getattr(kind, field.name) for field in fields}
    copy = [(slot.__get__, slot.__set__) for slot in slots.values()]
    return (
        copy,
        {name: slot.__set__ for name, slot in slots.items()},
        getattr(kind, "__post_init__", None),
    )
