"""Features of unexplained ends of attempts, and whether they blame the program.

An unknown exception blames the program only where its type or its own `raise` statement does. All others may come from
the device, a service or chance, and are tried again.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.scheduling.failures.exit_codes import exit_signal, signal_name
from orchestrator.scheduling.failures.phases import GUARD_PHASES, Frame, phase_of_frames
from orchestrator.specs.attempt import Attempt, Ending, ErrorReport, Evidence, RankEnd

# Types that a mistake in code or arguments raises, wherever it is raised.
PROGRAM_TYPES = frozenset(
    (
        *(
            "SyntaxError",
            "IndentationError",
            "TabError",
            "NameError",
            "UnboundLocalError",
            "ImportError",
        ),
        *(
            "ModuleNotFoundError",
            "AttributeError",
            "TypeError",
            "KeyError",
            "IndexError",
            "LookupError",
            "ValueError",
        ),
        *(
            "AssertionError",
            "NotImplementedError",
            "ZeroDivisionError",
            "RecursionError",
            "UnicodeDecodeError",
        ),
    )
)
# Exceptions that name what the operating system, a network or a service refused: the same may
# succeed later.
_REFUSED = re.compile(
    r"Connect|Network|Http|HTTP|URL|SSL|Timeout|TimedOut|Socket|BrokenPipe|Retr|RateLimit|Unavailable|Comm"
    r"|\A(?:OS|IO|EOF|Interrupted|Permission|BlockingIO|gai|h)[Ee]rror\Z"
)
_NO_ANSWER = re.compile(
    r"Connection error|(?:Cannot|Could not|Couldn't) (?:connect|reach)"
)  # of a ValueError, say
_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|^<(?:frozen|string|stdin)|\.zip[/\\]"
)
_PREFIX = re.compile(r"\[(?:rank|default)\d+\]: ?|\((?:\w+ )?(?:rank=\d+ )?pid=\d+[^)]*\) ")
_FRAME = re.compile(r'\s+File "([^"]*)", line \d+(?:, in (\S+))?')
_RAISED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::|\s*$)")
_BARE = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Timeout)\b)(?::|\s*$)(.*)"
)
_FOLDERS = re.compile(r".*[/\\]")
_HEAD = "Traceback (most recent call last)"
_OWN_CODES = (
    0,
    2,
    126,
    127,
)  # no artifacts; argparse's usage; the shell's "cannot execute" and "not found"
ELAPSED_SHARE, START_S = (
    0.2,
    60.0,
)  # two ends without steps are at the same point where their times differ by less


@dataclass(frozen=True, slots=True)
class Raised:
    """An exception in a traceback: its type without modules, its message and its frames, innermost last."""

    type: str
    message: str
    frames: tuple[Frame, ...]


def read_exceptions(text: str) -> tuple[Raised, ...]:
    """Return the exceptions whose tracebacks are in a text; the one that ended the program comes last.

    A text without tracebacks may still name an exception at the start of a line.
    """
    raised: list[Raised] = []
    frames: list[Frame] | None = None
    for raw in text.splitlines():
        line = raw[prefix.end() :] if (prefix := _PREFIX.match(raw)) else raw
        if _HEAD in line:
            frames = []
        elif frames is None:
            continue
        elif frame := _FRAME.match(line):
            frames.append(Frame(frame[1], frame[2] or ""))
        elif line.startswith(" "):
            if frames and not frames[-1].source:
                frames[-1] = Frame(frames[-1].file, frames[-1].function, line.strip())
        elif name := _RAISED.match(line):
            raised.append(
                Raised(name[1].rpartition(".")[2], line[name.end() :].strip(), tuple(frames))
            )
            frames = None
    bare = [_BARE.match(line) for line in text.splitlines()] if not raised else []
    return tuple(raised) or tuple(
        Raised(match[1].rpartition(".")[2], match[2].strip(), ()) for match in bare if match
    )


def ending_of(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    report: ErrorReport | None,
    command: Sequence[str],
) -> Ending:
    """Return the features of a rank's end, from the guard's report, else from its log and exit code."""
    raised = read_exceptions(end.log_tail if report is None else report.traceback)
    step = (
        max((beat.step for beat in evidence.heartbeats), default=0)
        if report is None
        else report.step
    )
    last = raised[-1] if raised else None
    kind = (
        last.type if last is not None else "" if report is None else report.type.rpartition(".")[2]
    )
    frames = last.frames if last is not None else ()
    phase = GUARD_PHASES.get(report.phase) if report is not None else None
    where = phase or phase_of_frames(frames)
    own_frame = next(
        (frame for frame in reversed(frames) if not _INSTALLED.search(frame.file)), None
    )
    place = (
        f" in {_FOLDERS.sub('', own_frame.file)}:{own_frame.function}"
        if own_frame is not None
        else ""
    )
    may_pass = any(
        _REFUSED.search(error.type) or _NO_ANSWER.match(error.message) for error in raised
    ) or bool(_REFUSED.search(kind))
    return Ending(
        signature=f"{kind or _exit_text(end.exit_code)}{place}{f', {where}' if where else ''}",
        step=step or None,
        elapsed_s=max(0.0, attempt.end_or(attempt.launched_at_s) - attempt.launched_at_s),
        is_own=_is_own(kind, last, end.exit_code, command, may_pass=may_pass),
        may_pass=may_pass,
    )


def same_point(first: Ending, other: Ending) -> bool:
    """Return whether two attempts ended after the same step or, without step counts, after about the same time."""
    if first.step is not None or other.step is not None:
        return first.step == other.step
    allowed_s = max(START_S, ELAPSED_SHARE * max(first.elapsed_s, other.elapsed_s))
    return abs(first.elapsed_s - other.elapsed_s) <= allowed_s


def _is_own(
    kind: str, last: Raised | None, code: int | None, command: Sequence[str], *, may_pass: bool
) -> bool:
    """Return whether the exception, or without one the exit code, blames the program itself."""
    if not kind:
        return code in _OWN_CODES
    if kind == "FileNotFoundError" and last is not None:
        return any(
            len(word) > 1 and word.rpartition("=")[2] in last.message for word in command[1:]
        )
    if may_pass:
        return False
    innermost = last.frames[-1] if last is not None and last.frames else None
    is_raised = innermost is not None and innermost.source.startswith("raise ")
    return kind in PROGRAM_TYPES or (
        is_raised and innermost is not None and not _INSTALLED.search(innermost.file)
    )


def _exit_text(code: int | None) -> str:
    number = exit_signal(code)
    if number is not None:
        return signal_name(number)
    return "no exit code" if code is None else f"exit code {code}"
