"""A StrEnum as in enum, which interpreters before Python 3.11 lack.

Standard library only: the guard imports it in the process of a script, whatever its interpreter.
"""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):  # noqa: UP042 - Python 3.10 has no other
    """Enumeration of strings whose members print as their values."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # of typeshed: as enum.StrEnum
