"""Features of unexplained ends of attempts, and whether the program itself is to blame for them.

An unknown exception blames the program only by its type or where the script's own `raise` raised
it. All other causes may be the device, a service or chance, and the attempt is repeated.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from orchestrator.scheduling.failures.exit_codes import find_exit_signal, format_signal_name
from orchestrator.scheduling.failures.log_scan import FRAME, HEAD, PREFIX, extract_exception_type
from orchestrator.scheduling.failures.phases import (
    GUARD_PHASES,
    TracebackFrame,
    find_phase_of_frames,
)
from orchestrator.scheduling.failures.program_faults import (
    is_device_error,
    is_program_fault,
    may_be_temporary_refusal,
)
from orchestrator.specs.attempt import Attempt, Ending, ErrorReport, Evidence, Finding, RankEnd

_INSTALLED = re.compile(
    r"[/\\](?:site|dist)-packages[/\\]|[/\\]lib(?:64)?[/\\]python3|^<(?:frozen|string|stdin)|\.zip[/\\]"
)
_RAISED = re.compile(r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*)(?::|\s*$)")
_BARE = re.compile(
    r"((?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?:Error|Exception|Interrupt|Timeout)\b)(?::|\s*$)(.*)"
)
_FOLDERS = re.compile(r".*[/\\]")
_OWN_CODES = (
    0,
    2,
    126,
    127,
)  # no artifacts; argparse's usage; the shell's "cannot execute" and "not found"
# two ends without steps are at the same point where their times differ by less
ELAPSED_SHARE = 0.2
START_S = 60.0


@dataclass(frozen=True, slots=True)
class RaisedException:
    """An exception in a traceback: its type without modules, its message, and its frames, innermost
    last.
    """

    type: str
    message: str
    frames: tuple[TracebackFrame, ...]


def read_exceptions(text: str) -> tuple[RaisedException, ...]:
    """Return the exceptions with tracebacks in the text; the last one is the one that ended the
    program.

    In a text without tracebacks, lines that begin with the name of an exception count.
    """
    raised: list[RaisedException] = []
    frames: list[TracebackFrame] | None = None
    for raw in text.splitlines():
        line = raw[prefix.end() :] if (prefix := PREFIX.match(raw)) else raw
        if HEAD in line:
            frames = []
        elif frame := FRAME.match(line):
            if frames is None:
                frames = []
            frames.append(TracebackFrame(frame[1], frame[2] or ""))
        elif frames is None:
            continue
        elif line.startswith(" "):
            if frames and not frames[-1].source:
                frames[-1] = TracebackFrame(frames[-1].file, frames[-1].function, line.strip())
        elif name := _RAISED.match(line):
            raised.append(
                RaisedException(
                    name[1].rpartition(".")[2], line[name.end() :].strip(), tuple(frames)
                )
            )
            frames = None
    bare = [_BARE.match(line) for line in text.splitlines()] if not raised else []
    return tuple(raised) or tuple(
        RaisedException(match[1].rpartition(".")[2], match[2].strip(), ())
        for match in bare
        if match
    )


def make_ending(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    finding: Finding | None,
    report: ErrorReport | None,
    command: Sequence[str],
) -> Ending:
    """Return the features by which a rank's end is compared with other ends: its type, place, step
    and time.

    They are those of the exception that ended the rank, else of its exit code. `finding` is the log
    line of that exception and `report` the guard's report of it; None where there is none.
    """
    raised = read_exceptions("" if finding is None else finding.excerpt)
    frames = raised[-1].frames if raised else ()
    kind = "" if finding is None else extract_exception_type(finding.line)
    message = "" if finding is None else finding.line.partition(":")[2].strip()
    step = (
        max((beat.step for beat in evidence.heartbeats), default=0)
        if report is None
        else report.step
    )
    # The program's own line is the place. A phase is where no such line is known: between two phases the
    # guard names either.
    place = _describe_innermost_own_frame(frames)
    if not place:
        phase = GUARD_PHASES.get(report.phase) if report is not None else None
        where = phase or find_phase_of_frames(frames)
        place = f", {where}" if where else ""
    is_own = end.exit_code in _OWN_CODES
    passes = False
    if kind:
        is_reported = report is not None and report.type.rpartition(".")[2] == kind
        bases = report.bases if report is not None and is_reported else ()
        blamed = _find_deciding_type((kind, *bases), message)
        is_own = _blames_program(blamed, message, frames, command)
        passes = may_be_temporary_refusal(blamed, message)
        # a virtual device is no GPU, wherever the program is tried
        is_own = is_own or (evidence.virtual and is_device_error(f"{kind}: {message}"))
    return Ending(
        signature=f"{kind or _describe_exit_code(end.exit_code)}{place}",
        step=step or None,
        elapsed_s=max(0.0, attempt.end_or(attempt.launched_at_s) - attempt.launched_at_s),
        is_own=is_own,
        may_pass=passes,
    )


def _find_deciding_type(types: Sequence[str], message: str) -> str:
    """Return the first of an exception's types that shows who is to blame; where none does, the
    first type.

    `types` begin with the exception's own type, followed by its base classes.
    """
    for kind in types:
        if (
            may_be_temporary_refusal(kind, message)
            or is_program_fault(kind, message)
            or kind == "FileNotFoundError"
        ):
            return kind
    return types[0]


def _describe_innermost_own_frame(frames: Sequence[TracebackFrame]) -> str:
    """Return ` in FILE:FUNCTION` of the innermost traceback frame outside installed packages; ""
    without such a frame.
    """
    for frame in reversed(frames):
        if not _INSTALLED.search(frame.file):
            return f" in {_FOLDERS.sub('', frame.file)}:{frame.function}"
    return ""


def _blames_program(
    exception_type: str, message: str, frames: Sequence[TracebackFrame], command: Sequence[str]
) -> bool:
    """Return whether an exception shows that the program itself is at fault.

    A missing file shows it only where the command names that file.
    """
    if exception_type == "FileNotFoundError":
        return any(len(word) > 1 and word.rpartition("=")[2] in message for word in command[1:])
    if is_program_fault(exception_type, message):
        return True
    return not may_be_temporary_refusal(exception_type, message) and _was_raised_by_script(
        frames, message
    )


def ended_at_same_point(first: Ending, other: Ending) -> bool:
    """Return whether two attempts ended after the same step; without step counts, after about the
    same time.
    """
    if first.step is not None or other.step is not None:
        return first.step == other.step
    return ended_after_same_time(first, other)


def ended_after_same_time(first: Ending, other: Ending) -> bool:
    """Return whether two attempts ran for about as long: within 20 %, or within a minute."""
    allowed_s = max(START_S, ELAPSED_SHARE * max(first.elapsed_s, other.elapsed_s))
    return abs(first.elapsed_s - other.elapsed_s) <= allowed_s


def _was_raised_by_script(frames: Sequence[TracebackFrame], message: str) -> bool:
    """Return whether a `raise` statement in the job's own script file raised the exception."""
    if not frames or is_device_error(message):
        return False
    innermost = frames[-1]
    is_script = innermost.file == frames[0].file and not _INSTALLED.search(innermost.file)
    return is_script and innermost.source.startswith("raise ")


def _describe_exit_code(code: int | None) -> str:
    """Return an exit code as text: the name of its signal, else `exit code N`; `no exit code` for
    None.
    """
    number = find_exit_signal(code)
    if number is not None:
        return format_signal_name(number)
    return "no exit code" if code is None else f"exit code {code}"
