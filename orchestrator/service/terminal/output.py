"""Output of the commands: text for people, JSON for programs.

`clean_streams` is the one door to a terminal: whatever a command writes into standard output or
error passes it, also errors of the command line and tracebacks. Control sequences in it become
readable escapes. Tables and panels have sequences of their own: `make_console` cleans their texts,
and writes behind the door. Only `write_log_piece` passes more.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from threading import Timer
from typing import TYPE_CHECKING, Any, TextIO, cast

from orchestrator.service.visible import escape_controls, escape_except_colours, escape_log
from orchestrator.specs.json_object import JsonObject

if TYPE_CHECKING:  # not loaded for JSON output
    from rich.console import Console, RenderableType

PLAIN_WIDTH = 160  # columns if the output is not a terminal
SPINNER_AFTER_S = 0.5


def print_answer(answer: JsonObject, as_json: bool, text_for_people: RenderableType) -> None:
    """Print the answer as JSON with `as_json`, else the text for people."""
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        make_console(sys.stdout).print(text_for_people, highlight=False, markup=False)


class CleanStream:
    """A text stream that replaces each control sequence by a readable escape; at a terminal,
    colours pass.
    """

    def __init__(self, raw: TextIO) -> None:
        """Wrap a stream; nothing is written yet."""
        self.raw = raw

    def write(self, text: str) -> int:
        """Write the text with its control sequences escaped; return the text's length."""
        self.raw.write(escape_except_colours(text) if self.raw.isatty() else escape_controls(text))
        return len(text)

    def writelines(self, lines: Iterable[str]) -> None:
        """Write each of these texts, as `write` does."""
        for line in lines:
            self.write(line)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.raw, name)


@contextmanager
def clean_streams() -> Iterator[None]:
    """Open a context in which standard output and error are `CleanStream`s.

    They stay replaced after an unexpected exception: the interpreter writes its traceback after the
    block.
    """
    streams = sys.stdout, sys.stderr
    sys.stdout, sys.stderr = (
        cast(TextIO, CleanStream(sys.stdout)),
        cast(TextIO, CleanStream(sys.stderr)),
    )
    try:
        yield
    except SystemExit:
        sys.stdout, sys.stderr = streams
        raise
    sys.stdout, sys.stderr = streams


def write_log_piece(text: str) -> None:
    """Write a piece of a log: to a terminal with colours and carriage returns only, into a pipe or
    a file unchanged.
    """
    stream = sys.stdout.raw if isinstance(sys.stdout, CleanStream) else sys.stdout
    stream.write(escape_log(text) if stream.isatty() else text)
    stream.flush()


def make_console(stream: TextIO) -> Console:
    """Return a Rich console on the stream, as wide as the terminal.

    It is PLAIN_WIDTH wide without a terminal and without COLUMNS in the environment.
    """
    from orchestrator.service.terminal.clean_console import CleanConsole

    width = None if stream.isatty() or "COLUMNS" in os.environ else PLAIN_WIDTH
    return CleanConsole(file=stream.raw if isinstance(stream, CleanStream) else stream, width=width)


@contextmanager
def show_spinner(text: str) -> Iterator[None]:
    """Show a spinner with the text on standard error while the block takes longer than
    SPINNER_AFTER_S seconds.

    Nothing is shown if standard error is not a terminal. Output of the block appears above the
    spinner.
    """
    if not sys.stderr.isatty():
        yield
        return
    status = make_console(sys.stderr).status(text)
    timer = Timer(SPINNER_AFTER_S, status.start)
    timer.daemon = True
    timer.start()
    try:
        yield
    finally:
        timer.cancel()
        timer.join()
        status.stop()
