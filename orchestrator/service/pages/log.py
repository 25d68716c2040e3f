"""The page of a log: a window of it, and text search."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence
from pathlib import Path

from orchestrator.specs.run import JobFolder

WINDOW_BYTES = 32 * 2**10  # of a log on a page
SEARCH_BYTES = 8 * 2**20  # of the end of a log, among which a search looks
MATCHES_MAX, LINE_MAX = 200, 500  # lines of a search, and bytes of one
TEXT_MAX = 200  # characters of a searched text

Read = Callable[[int], bytes]  # what a log has from an offset on, as far as one response goes


def get_log_size_bytes(home: Path, job_id: str, attempt_number: int, rank: int) -> int:
    """Return the size of a rank's log in bytes; 0 where there is none."""
    try:
        return JobFolder(home, job_id).attempt(attempt_number).log(rank).stat().st_size
    except OSError:
        return 0


def read_text_from(read_bytes: Read, offset: int) -> str:
    """Return a part of a log as text, from the first line that begins at or after the byte
    `offset`.
    """
    if offset == 0:
        return read_bytes(0)[:WINDOW_BYTES].decode(errors="replace")
    text = read_bytes(offset - 1)[: WINDOW_BYTES + 1].decode(
        errors="replace"
    )  # whether a line begins there, says this byte
    return text.partition("\n")[2] if "\n" in text else text


def find_line_offsets_and_texts(
    read_bytes: Read, log_size: int, text: str
) -> Sequence[tuple[int, str]]:
    """Return (offset in bytes, line) of the last MATCHES_MAX lines that contain the text; case is
    ignored in ASCII letters.

    The search reads the last SEARCH_BYTES of a log of `log_size` bytes.
    """
    needle = text.encode().lower()
    matches = deque[tuple[int, str]](maxlen=MATCHES_MAX)
    offset = max(0, log_size - SEARCH_BYTES)
    rest = b""
    while offset < log_size and (chunk := read_bytes(offset)):
        lines = (rest + chunk).split(b"\n")
        start = offset - len(rest)
        offset = offset + len(chunk)
        rest = lines.pop()[-WINDOW_BYTES:] if offset < log_size else b""
        for line in lines if offset < log_size else [*lines, *[rest]]:
            if needle in line.lower():
                matches.append((start, line[:LINE_MAX].decode(errors="replace")))
            start += len(line) + 1
    return matches
