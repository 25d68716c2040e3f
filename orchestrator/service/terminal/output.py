"""How does a command answer? In words for people, as JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # a command that answers as JSON does without
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160  # columns where the output is no terminal


def tell(answer: dict[str, Any], as_json: bool, words: RenderableType) -> None:
    """Print the answer as JSON, or its words."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        console_on(sys.stdout).print(words, highlight=False, markup=False)


def console_on(stream: TextIO) -> Console:
    """As wide as the terminal, or as PLAIN_WIDTH where it is none and nobody says how wide."""
    from rich.console import Console

    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=stream, width=width)
