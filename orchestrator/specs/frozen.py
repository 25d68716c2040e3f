"""The decorator for immutable classes whose fields are given by name. Standard library only."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING, TypeVar

Noun = TypeVar("Noun")

if TYPE_CHECKING:  # the interpreter of a script may be Python 3.10, which lacks it
    from typing import dataclass_transform

    @dataclass_transform(frozen_default=True, kw_only_default=True, field_specifiers=(field,))
    def frozen(kind: type[Noun], /) -> type[Noun]:
        """Return the class as a frozen dataclass with slots and keyword-only fields."""

else:
    frozen = dataclass(frozen=True, slots=True, kw_only=True)
