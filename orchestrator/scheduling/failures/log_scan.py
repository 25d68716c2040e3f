"""Finds in a log the line that explains why a process ended, in bounded memory.

It is used only after exit codes, reports of the guard and counters.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.scheduling.failures.phases import (
    PhaseMarkers,
    TracebackFrame,
    find_phase_of_frames,
)
from orchestrator.scheduling.failures.program_faults import PROGRAM_TYPES, is_device_error
from orchestrator.scheduling.failures.signatures import (
    COMPLAINTS,
    SUSPECTS,
    blames_other_process,
    find_cause_in_catalogue,
    find_memory_cause_in_line,
    find_memory_cause_in_message,
    may_name_failure,
    mentions_device,
    only_mentions_failure,
)
from orchestrator.specs.attempt import Cause, Finding, Phase
from orchestrator.specs.replace import replace

# so many ordinary lines after a complaint, and the program has gone on: it was not the end
CALM_LINES = 200
FINDINGS_MAX = 8  # of one log that are kept as evidence
EXCERPT_CHARACTERS_MAX = 4000
# of a line that is kept: PyTorch's longest message of memory has about 650
LINE_CHARACTERS_MAX = 800
FRAMES_MAX = 60  # of a traceback that are kept, innermost last
RANKS_MAX = 256  # of one log that are told apart
REMARKS_MAX = 512  # findings that are no exceptions, between two calms

# Before what a rank says, where several write into one log: torchrun, `torchrun --tee`, Ray, `srun --label`.
PREFIX = re.compile(
    r"(?:\[(?:rank|default)(\d+)\]: ?|\((?:\w+ )?(?:rank=(\d+) )?pid=\d+[^)]*\) "
    r"|(\d{1,4}): (?=Traceback|\s|[\w.]+(?:Error|Exception)\b))"
)
_EXCEPTION = re.compile(r"[\w.]*(?:Error|Exception|Interrupt)(?::|\s*$|\s+Traceback)")
_NAMED = re.compile(r"(?:[A-Za-z_]\w*\.)*[A-Za-z_]\w*(?::|\s*$)")  # the line below a traceback
HEAD = "Traceback (most recent call last)"
_NESTED_HEAD = "Original Traceback (most recent call last)"  # torch's DataLoader, below its own
_LINKS = {
    "The above exception was the direct cause": "cause",
    "During handling of the above exception": "context",
}
_OF_A_THREAD = "Exception in thread"
_IGNORED = ("Exception ignored in", "Error in atexit", "Error in sys.excepthook")
# A line of a log, with a time or a level, ends the message of an exception before it.
_LOG_LINE = re.compile(
    r"\[?\d{2,4}[-/:]\d|(?:DEBUG|INFO|WARN|ERROR|FATAL|CRITICAL)|[IWEF]\d{4} |[\w.-]+: error:"
)
MESSAGE_LINES_MAX = 12  # of an exception, below its first
CHAIN_MAX = 16  # exceptions of one chain that are kept
# A count of steps, epochs or a bar of tqdm; not of files that are loaded, or of attempts.
_PROGRESS = re.compile(
    r"\b(?:step|iter(?:ation)?|update|batch)s?\b\W{0,4}(\d+)|\b(\d+)/\d+ \[|\bepoch\W{0,4}(\d+(?:\.\d+)?)",
    re.IGNORECASE,
)
_NO_PROGRESS = re.compile(r"retr|attempt|load|fetch|shard|file", re.IGNORECASE)
_LAUNCHERS = re.compile(
    r"[\w.]*(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException)\b"
)
FRAME = re.compile(r'\s+File "([^"]*)", line \d+(?:, in (\S+))?')
_INDENTED = re.compile(r" {4}")
_RICH_FRAME = re.compile(
    r"│ (\S.*?):\d+ in (\S+)\s+│"
)  # rich's tracebacks, under accelerate launch
_MARKS = re.compile(r"[\s^~]*\Z")
# A list of words that begins with a program. Any other, of options or of choices, is what is said.
_ECHOED_COMMAND = re.compile(
    r"\[['\"](?:[^'\"]*/)?(?:bin/[^'\"/]*|(?:python|torchrun|accelerate|deepspeed|dora|srun|mpirun|bash|sh)[\w.]*)['\"]"
    r"(?:, (?:'[^']*'|\"[^\"]*\"))+\]"
)
_ACCOUNT_WORDS = "Currently allocated", "Requested", "Device limit", "Free (according to CUDA)"
_ACCOUNT = re.compile(  # c10/cuda/CUDAMallocAsyncAllocator.cpp
    rf"\s*(?:{'|'.join(map(re.escape, _ACCOUNT_WORDS))}) *: [\d.]+ [KMGT]?i?[Bb]"
)
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ROOT_RANK = re.compile(r"\s*rank +: (\d+)")
_ROOT_EXIT = re.compile(r"\s*exitcode +: (-?\d+)")
_PINNED = re.compile(r"pin_memory|[Hh]ostAlloc|PinnedMemory")
_PINNED_LINES = 4  # of a traceback beside a bare "out of memory" that tell of pinned memory
_SEMAPHORES = re.compile(r"multiprocessing[/\\](?:synchronize|heap|shared_memory)\.py")


class LineRole(Enum):
    """What a log line is: an exception, a further line of an exception's message, or any other
    line.
    """

    EXCEPTION = 1  # the line below a traceback, or one that begins with the name of an exception
    MESSAGE = 2  # a further line of an exception's message
    LINE = 3  # any other


@dataclass(slots=True)
class _RankLines:
    """What one rank has written to the log so far, as far as it may explain the rank's end.

    It has the rank's traceback, its last exceptions, and other lines that may name a cause.
    """

    frames: deque[TracebackFrame] = field(default_factory=lambda: deque(maxlen=FRAMES_MAX))
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2 * FRAMES_MAX))
    quoting: bool = False
    is_raising: bool = False  # a traceback has begun: the next line with a name is its exception
    is_traced: bool = False  # the last exception stood below a traceback
    is_ignored: bool = False  # the next exception ends nothing
    link: str = ""  # how the next exception follows from the last: cause, context or nested
    chain: list[tuple[str, Finding]] = field(default_factory=list)  # (link, exception)
    root: Finding | None = None  # of an earlier chain
    message_lines: int = 0  # in which the last exception's message may go on
    remarks: list[Finding] = field(
        default_factory=list
    )  # complaints, and lines that are no exceptions
    progress: float | None = None  # the last count of steps since the last finding

    def find_root_exception(self) -> Finding | None:
        """Return the first exception of the chain that ended this rank, since the others followed
        from it.

        None where the rank raised none, or only exceptions about other ranks.
        """
        root = _find_original_exception(self.chain)
        if root is None or root.cause in (*COMPLAINTS, *SUSPECTS):
            return self.root
        return root

    def add_exception(self, finding: Finding) -> None:
        """Add an exception to the chain of exceptions from which it follows, or start a new chain
        with it.

        The first exception of the chain before is kept: of equal causes the earliest, which may be
        another rank's.
        """
        if not self.link:
            root = self.find_root_exception()
            is_same = self.root is not None and root is not None and self.root.cause is root.cause
            if not is_same or root is None or root.cause is Cause.RAISED:
                self.root = root
            self.chain.clear()
        if len(self.chain) >= CHAIN_MAX:
            del self.chain[1]
        self.chain.append((self.link, finding))
        self.link = ""

    def add_cause(self, further_line: Finding) -> None:
        """Take the cause from a further line of the last exception's message, if its first line
        names none.
        """
        link, exception = self.chain[-1]
        kind, _, message = exception.line.partition("\n")[0].partition(":")
        is_mistake = extract_exception_type(kind) in PROGRAM_TYPES and bool(message.strip())
        if exception.cause in (Cause.RAISED, *COMPLAINTS, *SUSPECTS) and not is_mistake:
            changed = replace(further_line, excerpt=exception.excerpt, is_exception=True)
            self.chain[-1] = (link, changed)

    def drop_findings(self) -> None:
        """Drop all that was found for this rank, since its program went on afterwards."""
        self.chain.clear()
        self.remarks.clear()
        self.root = None


def _find_original_exception(chain: Sequence[tuple[str, Finding]]) -> Finding | None:
    """Return the exception in a chain from which the others followed; None for an empty chain.

    `chain` has (how it follows from the exception before: cause, context or nested; the exception).
    An exception raised while another was handled is its own origin where it is a mistake of the
    program, unless memory or a disk had run out before. Nested exceptions stand below their
    wrapper.
    """
    if not chain:
        return None
    last = len(chain) - 1
    while last > 0:
        link, finding = chain[last]
        before = chain[last - 1][1]
        if link == "nested":
            break
        kind = extract_exception_type(finding.line)
        if link == "context" and before.cause in (Cause.RAISED, *COMPLAINTS, *SUSPECTS):
            if kind in PROGRAM_TYPES or finding.cause is not Cause.RAISED:
                break
        elif finding.cause is not Cause.RAISED and before.cause is Cause.RAISED:
            break
        last -= 1
    return chain[last][1]


def extract_exception_type(line: str) -> str:
    """Return the type of the exception in a log line without its modules: `OutOfMemoryError` of
    `torch.OutOfMemoryError: ...`.
    """
    return line.partition(":")[0].strip().rpartition(".")[2]


class LogScan:
    """Reads a log line by line, and keeps the lines that may explain the process's end (findings),
    in bounded memory.

    The last exception of a rank decides, unless steps were counted after it; of a chain of
    exceptions, the first. Other lines that name a cause count where that exception only complains
    about other ranks, or where there is none. All findings are dropped once the log goes on for
    CALM_LINES ordinary lines.
    """

    def __init__(
        self,
        *,
        log_name: str = "",
        command: Sequence[str] = (),
        pattern_by_phase: Mapping[Phase, str] | None = None,
    ) -> None:
        """Start a scan of the log `log_name` of a process with this command.

        `pattern_by_phase` has a regular expression per phase: from a matching line on, that phase
        runs.
        """
        self.root_rank: int | None = None  # the rank that torchrun saw fail first
        self.root_exit_code: int | None = None
        self._log = log_name
        self._markers = PhaseMarkers(pattern_by_phase or {})
        self._echoes = _list_misleading_arguments(command)
        self._stacks: dict[str, _RankLines] = {}
        self._quoting = 0  # stacks whose next line may be quoted source
        self._count = 0  # findings since the last calm
        self._calm = 0  # ordinary lines since the last complaint
        self._last: tuple[_RankLines, Finding] | None = None  # its bytes or frames may stand below
        self._frames_below = 0  # lines in which frames of that finding may stand
        self._messages = 0  # lines in which the message of some rank's exception may go on
        self._in_root_cause = False

    def read_line(self, line: str, offset: int = 0) -> None:
        """Read one line without its line feed. `offset` is the position of its first byte in the
        file.
        """
        self._markers.read_line(line)
        if self._add_to_memory_account(line):
            return
        if self._frames_below:
            self._frames_below -= 1
            if _PINNED.search(line):
                self._change_last_finding(cause=Cause.HOST_OOM)
        self._messages = max(0, self._messages - 1)
        if not (self._quoting or self._messages or may_name_failure(line)):
            self._calm += 1
            self._drop_findings_after_progress(line)
            return
        self._read_significant_line(line, offset)

    def _read_significant_line(self, line: str, offset: int) -> None:
        """Store the finding in a line that may name a cause, or add the line to the exception that
        is being read.
        """
        prefix = PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        stack = self._get_rank_lines(prefix[0].strip() if prefix else "")
        if self._add_to_traceback(stack, text):
            return
        self._read_torchrun_summary(text)
        text = _remove_echoed_arguments(text, self._echoes)
        role = self._find_role_of_line(stack, text)
        cause = _find_line_cause(text, role)
        if cause is None:
            self._calm += 1
            if role is not LineRole.MESSAGE:
                self._drop_findings_after_progress(line)
            return
        if self._calm > CALM_LINES:
            self._drop_all_findings()
        self._calm = 0
        numbers = prefix.groups() if prefix else ()
        rank = next((int(number) for number in numbers if number), None)
        self._store_finding(stack, self._make_finding(cause, text, rank, offset, stack), role)
        stack.frames.clear()
        stack.lines.clear()

    def skip_ordinary_lines(self, lines: str) -> bool:
        """Count these lines as ordinary, and return True; return False, and count nothing, if any
        may be significant.

        A caller then reads them one by one. Without this, a line of two characters costs as much as
        a long one: 20 million empty ones took 16 s.
        """
        # a rank whose traceback broke off quotes for ever; lines without a bracket are not of a
        # rank
        quotes = self._quoting and (
            self._get_rank_lines("").quoting or "[" in lines or "(" in lines
        )
        follows = (
            self._frames_below
            or self._messages
            or (self._last is not None and any(map(lines.__contains__, _ACCOUNT_WORDS)))
        )
        if quotes or follows or self._markers.phase is not None or may_name_failure(lines):
            return False
        # steps after a finding are counted line by line
        if self._count and self._calm <= CALM_LINES and _PROGRESS.search(lines):
            return False
        self._calm += lines.count("\n")
        return True

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The finding that explains the process's end, then at most FINDINGS_MAX - 1 others in log
        order; () without any.
        """
        if self._calm > CALM_LINES:
            return ()
        roots = list[Finding]()
        lines = list[Finding]()
        for stack in self._stacks.values():
            root = stack.find_root_exception()
            if root is not None:
                roots.append(root)
            lines += stack.remarks
        candidates = list(roots)
        for line in lines:
            if all(_line_counts_beside_exception(line, root) for root in roots):
                candidates.append(line)
        if not candidates:
            return ()
        decisive = min(
            candidates,
            key=lambda finding: (
                _order_of_doubt(finding),
                self.root_rank not in (None, finding.rank),
                finding.offset,
            ),
        )
        others = [finding for finding in (*roots, *lines) if finding is not decisive]
        others.sort(key=lambda finding: finding.offset)
        return (
            decisive,
            *(replace(finding, excerpt="") for finding in others[: FINDINGS_MAX - 1]),
        )

    def _find_role_of_line(self, rank_lines: _RankLines, line: str) -> LineRole:
        """Return what a line of the rank is, and record how the next exception will follow from the
        last one.
        """
        self._read_link_to_next_exception(rank_lines, line)
        if not self._messages:
            rank_lines.message_lines = 0
        is_named = (_NAMED if rank_lines.is_raising else _EXCEPTION).match(line)
        # below the exception of a traceback a bare name belongs to its message
        is_message = (
            not rank_lines.is_raising and rank_lines.is_traced and rank_lines.message_lines > 0
        )
        if _LAUNCHERS.match(line):
            rank_lines.is_raising = False
        elif is_named and not is_message and not _LOG_LINE.match(line):
            rank_lines.message_lines = self._messages = MESSAGE_LINES_MAX
            rank_lines.is_traced = rank_lines.is_raising
            rank_lines.is_raising = False
            return LineRole.EXCEPTION
        return LineRole.MESSAGE if self._add_to_message(rank_lines, line) else LineRole.LINE

    def _read_link_to_next_exception(self, rank_lines: _RankLines, line: str) -> None:
        """Record how the rank's next exception will follow from the last one, if this line says
        that.
        """
        for phrase, link in _LINKS.items():
            if phrase in line and rank_lines.chain:
                rank_lines.link = link
                rank_lines.message_lines = 0
        # a thread's exception ends no process: it counts only where no other is known
        is_known = bool(rank_lines.chain) or rank_lines.root is not None
        if line.startswith(_IGNORED) or (line.startswith(_OF_A_THREAD) and is_known):
            rank_lines.is_ignored = True
            rank_lines.message_lines = 0
        if HEAD in line:
            rank_lines.is_raising = True
            rank_lines.message_lines = 0
            if _NESTED_HEAD in line and rank_lines.chain:
                rank_lines.link = "nested"

    def _store_finding(self, rank_lines: _RankLines, finding: Finding, role: LineRole) -> None:
        """Store a finding in the rank's chain of exceptions, or among the rank's other lines, by
        its role.
        """
        rank_lines.progress = None
        if role is LineRole.EXCEPTION and rank_lines.is_ignored:
            rank_lines.is_ignored = False
            return
        if role is LineRole.EXCEPTION:
            finding = replace(finding, is_exception=True)
            rank_lines.add_exception(finding)
        elif role is LineRole.MESSAGE:
            rank_lines.add_cause(finding)
        is_complaint = finding.cause in (*COMPLAINTS, *SUSPECTS)
        if (is_complaint or role is not LineRole.EXCEPTION) and self._count < REMARKS_MAX:
            rank_lines.remarks.append(finding)
        self._count += 1
        self._last = rank_lines, finding
        self._frames_below = _PINNED_LINES if _is_cuda_runtime_oom(finding) else 0

    def _drop_all_findings(self) -> None:
        """Drop the findings of all ranks, since the log went on for long afterwards."""
        for stack in self._stacks.values():
            stack.drop_findings()
        self._count = 0
        self._last = None

    def _drop_findings_after_progress(self, line: str) -> None:
        """Drop a rank's findings if this line shows that its count of steps has grown since."""
        if not self._count or self._calm > CALM_LINES:
            return
        match = _PROGRESS.search(line)
        if match is None or _NO_PROGRESS.search(line):
            return
        prefix = PREFIX.match(line)
        stack = self._get_rank_lines(prefix[0].strip() if prefix else "")
        count = float(next(number for number in match.groups() if number))
        if stack.progress is not None and count > stack.progress:
            stack.drop_findings()
        stack.progress = count

    def _add_to_memory_account(self, line: str) -> bool:
        """Add a line of PyTorch's memory account to the last finding; return False if the line is
        none of that account.
        """
        if self._last is None or not _ACCOUNT.match(line):
            return False
        finding = self._last[1]
        if len(finding.line) >= LINE_CHARACTERS_MAX:
            return False
        self._change_last_finding(line=f"{finding.line}\n{line.strip()}")
        return True

    def _change_last_finding(self, **new_fields: Any) -> None:
        """Change fields of the last finding, wherever it is stored."""
        assert self._last is not None, "a finding was noted"
        stack, finding = self._last
        changed = replace(finding, **new_fields)
        if stack.remarks and stack.remarks[-1] is finding:
            stack.remarks[-1] = changed
        if stack.chain and stack.chain[-1][1] is finding:
            stack.chain[-1] = (stack.chain[-1][0], changed)
        self._last = stack, changed

    def _add_to_message(self, rank_lines: _RankLines, line: str) -> bool:
        """Add the line to the message of the rank's last exception; return False if the message
        does not go on.
        """
        if not rank_lines.message_lines or not rank_lines.chain:
            return False
        rank_lines.message_lines -= 1
        if _LOG_LINE.match(line) or _PROGRESS.search(line):
            rank_lines.message_lines = 0
            return False
        link, finding = rank_lines.chain[-1]
        is_text = bool(line.strip()) and not _EXCEPTION.match(line)
        if is_text and len(finding.line) < LINE_CHARACTERS_MAX:
            changed = replace(
                finding,
                line=f"{finding.line}\n{line.strip()}"[:LINE_CHARACTERS_MAX],
                excerpt=f"{finding.excerpt}\n{line}"[-EXCERPT_CHARACTERS_MAX:],
            )
            if self._last is not None and self._last[1] is finding:
                self._last = rank_lines, changed
            rank_lines.chain[-1] = (link, changed)
        return True

    def _get_rank_lines(self, line_prefix: str) -> _RankLines:
        """Return the stored lines of the rank whose log lines begin with this prefix, such as
        `[rank3]:`.
        """
        if line_prefix not in self._stacks and len(self._stacks) >= RANKS_MAX:
            line_prefix = next(iter(self._stacks))
        return self._stacks.setdefault(line_prefix, _RankLines())

    def _add_to_traceback(self, rank_lines: _RankLines, line: str) -> bool:
        """Add a traceback's frame or quoted source line to the rank's traceback; return False for
        any other line.
        """
        if rank_lines.quoting and _INDENTED.match(line):
            if not _MARKS.match(line):
                rank_lines.frames[-1] = replace(rank_lines.frames[-1], source=line.strip())
                rank_lines.lines.append(line)
            return True
        if line.startswith("│"):  # a box of rich's: what is no frame in it is quoted source
            if boxed := _RICH_FRAME.match(line):
                rank_lines.frames.append(TracebackFrame(boxed[1], boxed[2]))
            rank_lines.lines.append(line)
            return True
        frame = FRAME.match(line)
        if frame is None and rank_lines.quoting:
            rank_lines.quoting = False
            self._quoting -= 1
        if frame is None:
            if HEAD in line:
                rank_lines.frames.clear()
                rank_lines.lines.clear()
            return False
        rank_lines.is_raising = True
        if not rank_lines.quoting:
            rank_lines.quoting = True
            self._quoting += 1
        rank_lines.frames.append(TracebackFrame(frame[1], frame[2] or ""))
        rank_lines.lines.append(line)
        return True

    def _make_finding(
        self, cause: Cause, line: str, rank: int | None, offset: int, rank_lines: _RankLines
    ) -> Finding:
        """Return a record (finding) of a line that names this cause, with the rank's traceback as
        its excerpt.
        """
        if cause is Cause.DISK_FULL and any(
            _SEMAPHORES.search(frame.file) for frame in list(rank_lines.frames)[-3:]
        ):
            cause = Cause.SHARED_MEMORY  # named semaphores lie in /dev/shm
        finding = Finding(
            cause=cause,
            line=line.strip()[:LINE_CHARACTERS_MAX],
            rank=rank,
            log=self._log,
            offset=offset,
            phase=find_phase_of_frames(rank_lines.frames) or self._markers.phase,
            excerpt="\n".join((*rank_lines.lines, line))[-EXCERPT_CHARACTERS_MAX:].strip("\n"),
        )
        if _is_cuda_runtime_oom(finding) and any(
            map(_PINNED.search, list(rank_lines.lines)[-_PINNED_LINES:])
        ):
            return replace(finding, cause=Cause.HOST_OOM)  # page-locked memory is the host's
        return finding

    def _read_torchrun_summary(self, line: str) -> None:
        """Store the rank and exit code that a line of torchrun's failure summary names.

        Torchrun's own exit code is always 1.
        """
        if _ROOT_CAUSE in line:
            self._in_root_cause = True
        elif self._in_root_cause:
            if rank := _ROOT_RANK.match(line):
                self.root_rank = int(rank[1])
            elif code := _ROOT_EXIT.match(line):
                self.root_exit_code = int(code[1])
                self._in_root_cause = False


def find_log_findings(log_text: str, command: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return the lines of a log that may explain the process's end, as `LogScan.findings` after the
    whole text.
    """
    scan = LogScan(command=command)
    offset = 0
    for line in log_text.splitlines():
        scan.read_line(line, offset)
        offset += len(line) + 1
    return scan.findings


def extract_last_traceback(log_text: str) -> str:
    """Return the last Python traceback in a log; its last 20 lines where it has none."""
    start = log_text.rfind(HEAD)
    return log_text[start:].strip() if start >= 0 else "\n".join(log_text.splitlines()[-20:])


def _find_line_cause(line: str, role: LineRole) -> Cause | None:
    """Return the cause of failure that a log line names; None where it names none."""
    cause = find_cause_in_catalogue(line)
    if role is LineRole.LINE:
        cause = cause or find_memory_cause_in_line(line)
        return None if cause is None or only_mentions_failure(line) else cause
    cause = cause or find_memory_cause_in_message(line)
    if cause is None and role is LineRole.EXCEPTION:
        return Cause.DEFERRED if blames_other_process(line) else Cause.RAISED
    return cause


def _line_counts_beside_exception(line_finding: Finding, root_exception: Finding) -> bool:
    """Return whether a line that names a cause still counts, although a rank raised
    `root_exception`.

    A line after that exception counts. So does a device's report before an exception about the
    device, and a line that names the memory or disk which the exception leaves open.
    """
    if line_finding.offset > root_exception.offset or line_finding.cause in COMPLAINTS:
        return True
    if root_exception.cause is Cause.DEVICE_OOM and line_finding.cause in (
        Cause.HOST_OOM,
        Cause.SHARED_MEMORY,
    ):
        return not mentions_device(root_exception.line)
    if root_exception.cause is Cause.DISK_FULL and line_finding.cause is Cause.SHARED_MEMORY:
        return ": '" not in root_exception.line
    return line_finding.cause in (Cause.HARDWARE, Cause.NOT_OOM) and is_device_error(
        root_exception.line
    )


def _is_cuda_runtime_oom(finding: Finding) -> bool:
    """Return whether the finding says that the CUDA runtime ran out of memory, not PyTorch's
    allocator.
    """
    return finding.cause is Cause.DEVICE_OOM and "Tried to allocate" not in finding.line


def _order_of_doubt(finding: Finding) -> int:
    """Return a sort key of a finding: 0 if it surely names the cause, up to 3 if it only complains
    about other ranks.
    """
    if finding.cause in COMPLAINTS:
        return 3 if finding.cause is Cause.SECONDARY else 2
    return 1 if finding.cause in SUSPECTS else 0


def _list_misleading_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments of the command that would look like a cause of failure if the log
    repeated them.
    """
    parts = [part for word in command for part in (word, word.partition("=")[2])]
    return tuple(word for word in parts if find_cause_in_catalogue(word) or _EXCEPTION.match(word))


def _remove_echoed_arguments(line: str, misleading_arguments: Sequence[str]) -> str:
    """Return the line without a repeated command, and without the misleading arguments."""
    line = _ECHOED_COMMAND.sub("[]", line)
    for word in misleading_arguments:
        line = line.replace(word, "")
    return line
