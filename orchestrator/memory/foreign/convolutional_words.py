"""The language in which a convolutional net is described: words for operations, and what makes parts of them."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal, NamedTuple


@dataclass(frozen=True, slots=True)
class Branches:
    """Parts that take in the same; what they return is summed, laid side by side or multiplied with what came in.

    `frozen`: one part, whose weights are not trained.
    """

    how: Literal["sum", "cat", "gate", "frozen"]
    parts: tuple[Part, ...]


@dataclass(frozen=True, slots=True)
class Each:
    """A part that sees several maps with the same weights; what it returns is joined, pixel after pixel."""

    maps: tuple[int, ...]
    part: Part


@dataclass(frozen=True, slots=True)
class Regions:
    """So many regions of every image, cut out of several maps to so many pixels a side."""

    maps: tuple[int, ...]
    count: int
    side: int


# Words for operations, such as "conv64k7s2 bn relu" (their rules: memory/foreign/convolutional.py), or parts, one after
# the other.
Part = str | Branches | Each | Regions | tuple["Part", ...]


class Word(NamedTuple):
    """An operation, its channels or its kernel, and k(ernel), s(tride), p(adding), g(roups), d(ilation) and b(ias)."""

    name: str
    number: int
    kernel: tuple[int, int]
    stride: int
    padding: tuple[int, int] | None
    groups: int
    dilation: int
    bias: bool


_PATTERN = re.compile(r"([a-z]+)(\d*)((?:[kspgd]\d+(?:x\d+)?)*)(b?)")
_OPTION = re.compile(r"([kspgd])(\d+)(?:x(\d+))?")


def read(word: str) -> Word:
    match = _PATTERN.fullmatch(word)
    assert match is not None, f"no operation is written like {word!r}"
    said = {key: (int(one), int(other or one)) for key, one, other in _OPTION.findall(match[3])}
    number = int(match[2] or 0)
    return Word(
        name=match[1],
        number=number,
        kernel=said.get("k", (number, number)),
        stride=said.get("s", (1, 1))[0],
        padding=said.get("p"),
        groups=said.get("g", (1, 1))[0],
        dilation=said.get("d", (1, 1))[0],
        bias=bool(match[4]),
    )
