"""Enumerations of strings, as enum.StrEnum, which interpreters before Python 3.11 do not have.

Standard library only: the guard brings these into the process of a script, whose interpreter is its own.
"""

from __future__ import annotations

from enum import Enum


class StrEnum(str, Enum):  # noqa: UP042 - Python 3.10 has no other
    """String enumeration whose members print as their values."""

    __str__ = str.__str__
    __format__ = str.__format__  # type: ignore[assignment]  # of typeshed: as enum.StrEnum
