"""A frozen noun with other values in some of its fields. Standard library only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import fields
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dataclasses import replace  # so that mypy knows the fields of each noun
else:

    def replace(noun: Any, /, **changes: Any) -> Any:
        """What `dataclasses.replace` returns of a frozen dataclass with slots, whose values are taken as they are.

        Deciding on an event makes some ten such copies. This copies slot by slot, where the other hands all fields to
        an `__init__` that has each set by `object.__setattr__`: 3.0 us for an Attempt instead of 8.6, 2.1 for a Job
        instead of 3.5, 1.7 for a State instead of 3.1 (python 3.11, one Xeon core, 2026-11).
        """
        kind = type(noun)
        copy, slots = _slots_of(kind)
        new = object.__new__(kind)
        for read, write in copy:
            write(new, read(noun))
        for name, value in changes.items():
            slots[name](new, value)
        return new


__all__ = ["replace"]

Read = Callable[[object], object]
Write = Callable[[object, object], None]


@cache
def _slots_of(kind: type) -> tuple[Sequence[tuple[Read, Write]], dict[str, Write]]:
    """What reads and what writes each field; and what writes it, by its name."""
    slots = {one.name: getattr(kind, one.name) for one in fields(kind)}
    copy = [(slot.__get__, slot.__set__) for slot in slots.values()]
    return copy, {name: slot.__set__ for name, slot in slots.items()}
