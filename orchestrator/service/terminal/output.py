"""Output of the commands: text for people, JSON for programs."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO

if TYPE_CHECKING:  # not loaded for JSON output
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160  # columns if the output is not a terminal
SPINNER_AFTER_S = 0.5


def tell(answer: dict[str, Any], as_json: bool, text: RenderableType) -> None:
    """Print `answer` as JSON, or `text`."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        console_on(sys.stdout).print(text, highlight=False, markup=False)


def console_on(stream: TextIO) -> Console:
    """Return a console of the terminal's width; PLAIN_WIDTH if there is no terminal and COLUMNS is not set."""
    from rich.console import Console

    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return Console(file=stream, width=width)


@contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show a spinner with the text on standard error while the block takes longer than SPINNER_AFTER_S.

    Shows nothing where standard error is not a terminal. What the block prints appears above the spinner.
    """
    if not sys.stderr.isatty():
        yield
        return
    status = console_on(sys.stderr).status(text)
    timer = Timer(SPINNER_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
