"""Reads what the ranks of an attempt left in its folder: bounded before it is read, typed and finite.

Everything here was written inside a user's process. What is wrong is left out and named in `problems`; nothing raises.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, TypeVar

from orchestrator.backends.attempts.durable import open_untrusted, read_json
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.report_bounds import split_bounded_values
from orchestrator.specs.run import AttemptFolder

LOG_TAIL_BYTES = 64 * 1024
CHUNK_BYTES = 2**20
BLOCK_BYTES = 16 * 1024  # of a log that are passed over at once where nothing in them tells
# of a log that are read, and of its beginning
LOG_BYTES_MAX = 2**28
LOG_HEAD_BYTES = 2**26
LINE_BYTES_MAX = 16 * 1024  # of a line that are read: no cause stands further from its beginning
EXIT_CODE_BYTES_MAX = 32
EXIT_CODE_MAX = 2**31
PROBLEMS_MAX = 8
PROBLEM_CHARACTERS_MAX = 200

Report = TypeVar("Report")


@dataclass(frozen=True)
class Reports(Generic[Report]):
    """The readable reports of one kind, by ascending rank, and sentences on what could not be
    read.
    """

    reports: tuple[Report, ...] = ()
    problems: tuple[str, ...] = ()


@dataclass(slots=True)
class Problems:
    """Sentences on files that an attempt left and that could not be read, at most PROBLEMS_MAX."""

    sentences: list[str] = field(default_factory=list)

    def add_sentences(self, *sentences: str) -> None:
        """Add sentences that are not there yet, each cut to a bound and put on one line."""
        for sentence in sentences:
            line = " ".join(sentence.split())[:PROBLEM_CHARACTERS_MAX]
            if line not in self.sentences and len(self.sentences) < PROBLEMS_MAX:
                self.sentences.append(line)


def read_heartbeats(folder: AttemptFolder, world_size: int) -> Reports[Heartbeat]:
    """Return the last heartbeat (progress report) of each rank that wrote one."""
    return read_reports(Heartbeat, folder.heartbeat, range(world_size))


def read_reports(
    report_type: type[Report], path_of_rank: Callable[[int], Path], ranks: Iterable[int]
) -> Reports[Report]:
    """Return the readable reports of this type from the files of these ranks.

    A field that has a default and a wrong value gets its default. A report that names another rank
    is left out.
    """
    reports = list[Report]()
    problems = Problems()
    for rank in ranks:
        name = f"{path_of_rank(rank).name} of rank {rank}"
        try:
            data = read_json(path_of_rank(rank))
        except OSError:  # not written
            continue
        except ValueError as error:
            problems.add_sentences(f"{name}: {error}")
            continue
        values, wrong = split_bounded_values(report_type, data)
        problems.add_sentences(*(f"{name}: {reason}" for reason in wrong))
        if values.get("rank") != rank:
            problems.add_sentences(f"{name}: it is no report of this rank")
            continue
        try:
            reports.append(report_type(**values))
        except TypeError:  # a required field is missing
            problems.add_sentences(f"{name}: it lacks required fields")
    return Reports(tuple(reports), tuple(problems.sentences))


def read_exit_code(folder: AttemptFolder, rank: int) -> int | None:
    """Return a rank's exit code, or minus the signal that ended it; None where no exit code can be
    read.
    """
    try:
        with open_untrusted(folder.exit_code(rank)) as file:
            code = int(file.read(EXIT_CODE_BYTES_MAX))
    except (OSError, ValueError):
        return None
    return code if abs(code) < EXIT_CODE_MAX else None


def iterate_log_lines(path: Path) -> Iterator[tuple[int, str]]:
    """Yield (byte offset, line) of a log, each line cut at LINE_BYTES_MAX; nothing where there is
    no log.
    """
    for offset, block in iterate_log_blocks(path):
        for line in block[:-1].split(b"\n"):
            yield offset, line[:LINE_BYTES_MAX].decode("utf-8", errors="replace")
            offset += len(line) + 1


def iterate_log_blocks(path: Path) -> Iterator[tuple[int, bytes]]:
    """Yield (byte offset, block of whole lines) of a log; nothing where there is no log.

    A carriage return also ends a line, since progress bars write nothing else. A line longer than a
    block is cut off. Of a log above LOG_BYTES_MAX the middle is left out: its beginning and its end
    tell the cause.
    """
    try:
        with open_untrusted(path) as log:
            size = os.fstat(log.fileno()).st_size
            offset = 0
            rest = b""
            dropped_bytes = 0
            while chunk := log.read(BLOCK_BYTES):
                text = (rest + chunk).replace(b"\r", b"\n")
                if (
                    dropped_bytes and b"\n" in text
                ):  # the line that was cut off ends here: it is a block of its own
                    first = text.index(b"\n") + 1
                    yield offset, text[:first]
                    offset += first + dropped_bytes
                    text = text[first:]
                    dropped_bytes = 0
                end = text.rfind(b"\n") + 1
                if end:
                    yield offset, text[:end]
                    offset += end
                rest = text[end : end + BLOCK_BYTES]
                dropped_bytes += len(text) - end - len(rest)
                if (
                    log.tell() >= LOG_HEAD_BYTES
                    and size - log.tell() > LOG_BYTES_MAX - LOG_HEAD_BYTES
                ):
                    offset = size - (LOG_BYTES_MAX - LOG_HEAD_BYTES)
                    rest = b""
                    dropped_bytes = 0
                    log.seek(offset)
            yield offset, rest + b"\n"
    except OSError:
        return


def read_log_tail(path: Path, size_bytes: int = LOG_TAIL_BYTES) -> str:
    """Return the last `size_bytes` bytes of a log as text; "" where there is no log."""
    try:
        with open_untrusted(path) as log:
            log.seek(max(0, os.fstat(log.fileno()).st_size - size_bytes))
            return log.read(size_bytes).decode("utf-8", errors="replace")
    except OSError:
        return ""
