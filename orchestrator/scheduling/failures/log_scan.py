"""Log analysis: finds what ended a process in its log, in bounded memory.

Read only after exit codes, reports and counters.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from orchestrator.scheduling.failures.phases import Frame, Markers, phase_of_frames
from orchestrator.scheduling.failures.program_faults import PROGRAM_TYPES, is_device_error
from orchestrator.scheduling.failures.signatures import (
    COMPLAINTS,
    SUSPECTS,
    cause_in_words,
    cause_of_message,
    first_cause,
    is_quoted,
    is_telling,
    names_device,
    points_elsewhere,
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


class Role(Enum):
    """What a line of a log is."""

    EXCEPTION = 1  # the line below a traceback, or one that begins with the name of an exception
    MESSAGE = 2  # a further line of an exception's message
    LINE = 3  # any other


@dataclass(slots=True)
class _Stack:
    """State of reading the lines of one rank: its traceback, its last exceptions, and other telling lines."""

    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=FRAMES_MAX))
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

    def find_root(self) -> Finding | None:
        """Return the exception that ended this rank; None where none was raised, or only complaints."""
        root = _blamed(self.chain)
        if root is None or root.cause in (*COMPLAINTS, *SUSPECTS):
            return self.root
        return root

    def add_exception(self, finding: Finding) -> None:
        """Add an exception to the chain that it follows from, or begin a new chain with it.

        The root of the last chain is kept; of equal causes the first, which may be another rank's.
        """
        if not self.link:
            root = self.find_root()
            is_same = self.root is not None and root is not None and self.root.cause is root.cause
            if not is_same or root is None or root.cause is Cause.RAISED:
                self.root = root
            self.chain.clear()
        if len(self.chain) >= CHAIN_MAX:
            del self.chain[1]
        self.chain.append((self.link, finding))
        self.link = ""

    def add_cause(self, finding: Finding) -> None:
        """Take the cause that a further line of the last exception's message names, where its first names none."""
        link, exception = self.chain[-1]
        kind, _, message = exception.line.partition("\n")[0].partition(":")
        is_mistake = type_of(kind) in PROGRAM_TYPES and bool(message.strip())
        if exception.cause in (Cause.RAISED, *COMPLAINTS, *SUSPECTS) and not is_mistake:
            changed = replace(finding, excerpt=exception.excerpt, is_exception=True)
            self.chain[-1] = (link, changed)

    def forget(self) -> None:
        """Forget all findings: the program has outlived them."""
        self.chain.clear()
        self.remarks.clear()
        self.root = None


def _blamed(chain: Sequence[tuple[str, Finding]]) -> Finding | None:
    """Return the root of a chain of exceptions.

    The cause of an exception is its root. An exception raised while another was handled is its own root where it is a
    mistake of the program, unless memory or a disk had run out before. Nested exceptions stand below their wrapper.
    """
    if not chain:
        return None
    last = len(chain) - 1
    while last > 0:
        link, finding = chain[last]
        before = chain[last - 1][1]
        if link == "nested":
            break
        kind = type_of(finding.line)
        if link == "context" and before.cause in (Cause.RAISED, *COMPLAINTS, *SUSPECTS):
            if kind in PROGRAM_TYPES or finding.cause is not Cause.RAISED:
                break
        elif finding.cause is not Cause.RAISED and before.cause is Cause.RAISED:
            break
        last -= 1
    return chain[last][1]


def type_of(line: str) -> str:
    """Return the type, without its modules, of the exception in a log line."""
    return line.partition(":")[0].strip().rpartition(".")[2]


class LogScan:
    """Incremental log analysis in bounded memory.

    What ended the process decides: the last exception of a rank after which no steps were counted, and of its chain the
    root. Other telling lines count where that exception is a complaint, or where there is none. They count as long as
    the log did not go on calmly, for CALM_LINES ordinary lines.
    """

    def __init__(
        self,
        *,
        log: str = "",
        command: Sequence[str] = (),
        markers: Mapping[Phase, str] | None = None,
    ) -> None:
        self.root_rank: int | None = None  # the rank that torchrun saw fail first
        self.root_exit_code: int | None = None
        self._log = log
        self._markers = Markers(markers or {})
        self._echoes = _misleading_arguments(command)
        self._stacks: dict[str, _Stack] = {}
        self._quoting = 0  # stacks whose next line may be quoted source
        self._count = 0  # findings since the last calm
        self._calm = 0  # ordinary lines since the last complaint
        self._last: tuple[_Stack, Finding] | None = None  # its bytes or frames may stand below
        self._frames_below = 0  # lines in which frames of that finding may stand
        self._messages = 0  # lines in which the message of some rank's exception may go on
        self._in_root_cause = False

    def feed(self, line: str, offset: int = 0) -> None:
        """Read one line, without its line feed. `offset` is its first byte's position in the file."""
        self._markers.read(line)
        if self._continues_account(line):
            return
        if self._frames_below:
            self._frames_below -= 1
            if _PINNED.search(line):
                self._replace_last(cause=Cause.HOST_OOM)
        self._messages = max(0, self._messages - 1)
        if not (self._quoting or self._messages or is_telling(line)):
            self._calm += 1
            self._count_steps(line)
            return
        self._read_telling(line, offset)

    def _read_telling(self, line: str, offset: int) -> None:
        """Keep the cause that a line names, or add the line to the exception that is being read."""
        prefix = PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        stack = self._stack(prefix[0].strip() if prefix else "")
        if self._in_traceback(stack, text):
            return
        self._root_cause(text)
        text = _without_echoes(text, self._echoes)
        role = self._role_of(stack, text)
        cause = _cause_of(text, role)
        if cause is None:
            self._calm += 1
            if role is not Role.MESSAGE:
                self._count_steps(line)
            return
        if self._calm > CALM_LINES:
            self._forget_all()
        self._calm = 0
        numbers = prefix.groups() if prefix else ()
        rank = next((int(number) for number in numbers if number), None)
        self._note(stack, self._finding(cause, text, rank, offset, stack), role)
        stack.frames.clear()
        stack.lines.clear()

    def pass_over(self, block: str) -> bool:
        """Count the whole lines of a block as ordinary ones at once; False where they must be fed one by one.

        A line of two characters costs as much as a long one: 20 million empty ones took 16 s.
        """
        # a rank whose traceback broke off quotes for ever; lines without a bracket are not of a
        # rank
        quotes = self._quoting and (self._stack("").quoting or "[" in block or "(" in block)
        follows = (
            self._frames_below
            or self._messages
            or (self._last is not None and any(map(block.__contains__, _ACCOUNT_WORDS)))
        )
        if quotes or follows or self._markers.phase is not None or is_telling(block):
            return False
        # steps after a finding are counted line by line
        if self._count and self._calm <= CALM_LINES and _PROGRESS.search(block):
            return False
        self._calm += block.count("\n")
        return True

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The log line that explains the end, then at most FINDINGS_MAX - 1 others in order; () without any."""
        if self._calm > CALM_LINES:
            return ()
        roots = list[Finding]()
        lines = list[Finding]()
        for stack in self._stacks.values():
            root = stack.find_root()
            if root is not None:
                roots.append(root)
            lines += stack.remarks
        candidates = list(roots)
        for line in lines:
            if all(_counts_beside(line, root) for root in roots):
                candidates.append(line)
        if not candidates:
            return ()
        decisive = min(
            candidates,
            key=lambda finding: (
                _doubt(finding),
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

    def _role_of(self, stack: _Stack, text: str) -> Role:
        """Return what a line is, and remember how the rank's exceptions follow from each other."""
        self._read_link(stack, text)
        if not self._messages:
            stack.message_lines = 0
        is_named = (_NAMED if stack.is_raising else _EXCEPTION).match(text)
        # below the exception of a traceback a bare name belongs to its message
        is_message = not stack.is_raising and stack.is_traced and stack.message_lines > 0
        if _LAUNCHERS.match(text):
            stack.is_raising = False
        elif is_named and not is_message and not _LOG_LINE.match(text):
            stack.message_lines = self._messages = MESSAGE_LINES_MAX
            stack.is_traced = stack.is_raising
            stack.is_raising = False
            return Role.EXCEPTION
        return Role.MESSAGE if self._continues_message(stack, text) else Role.LINE

    def _read_link(self, stack: _Stack, text: str) -> None:
        for phrase, link in _LINKS.items():
            if phrase in text and stack.chain:
                stack.link = link
                stack.message_lines = 0
        # a thread's exception ends no process: it counts only where no other is known
        is_known = bool(stack.chain) or stack.root is not None
        if text.startswith(_IGNORED) or (text.startswith(_OF_A_THREAD) and is_known):
            stack.is_ignored = True
            stack.message_lines = 0
        if HEAD in text:
            stack.is_raising = True
            stack.message_lines = 0
            if _NESTED_HEAD in text and stack.chain:
                stack.link = "nested"

    def _note(self, stack: _Stack, finding: Finding, role: Role) -> None:
        """Keep a finding of a rank: in the chain of its exceptions, or among other lines."""
        stack.progress = None
        if role is Role.EXCEPTION and stack.is_ignored:
            stack.is_ignored = False
            return
        if role is Role.EXCEPTION:
            finding = replace(finding, is_exception=True)
            stack.add_exception(finding)
        elif role is Role.MESSAGE:
            stack.add_cause(finding)
        is_complaint = finding.cause in (*COMPLAINTS, *SUSPECTS)
        if (is_complaint or role is not Role.EXCEPTION) and self._count < REMARKS_MAX:
            stack.remarks.append(finding)
        self._count += 1
        self._last = stack, finding
        self._frames_below = _PINNED_LINES if _is_bare(finding) else 0

    def _forget_all(self) -> None:
        for stack in self._stacks.values():
            stack.forget()
        self._count = 0
        self._last = None

    def _count_steps(self, line: str) -> None:
        """Forget what a rank wrote of failures once its steps are counted further."""
        if not self._count or self._calm > CALM_LINES:
            return
        match = _PROGRESS.search(line)
        if match is None or _NO_PROGRESS.search(line):
            return
        prefix = PREFIX.match(line)
        stack = self._stack(prefix[0].strip() if prefix else "")
        count = float(next(number for number in match.groups() if number))
        if stack.progress is not None and count > stack.progress:
            stack.forget()
        stack.progress = count

    def _continues_account(self, line: str) -> bool:
        """Return whether the line goes on with PyTorch's account of memory, and add it to the last finding."""
        if self._last is None or not _ACCOUNT.match(line):
            return False
        finding = self._last[1]
        if len(finding.line) >= LINE_CHARACTERS_MAX:
            return False
        self._replace_last(line=f"{finding.line}\n{line.strip()}")
        return True

    def _replace_last(self, **changes: Any) -> None:
        """Replace fields of the last finding wherever it is kept."""
        assert self._last is not None, "a finding was noted"
        stack, finding = self._last
        changed = replace(finding, **changes)
        if stack.remarks and stack.remarks[-1] is finding:
            stack.remarks[-1] = changed
        if stack.chain and stack.chain[-1][1] is finding:
            stack.chain[-1] = (stack.chain[-1][0], changed)
        self._last = stack, changed

    def _continues_message(self, stack: _Stack, text: str) -> bool:
        """Return whether the line goes on with the message of the rank's last exception, and add it there."""
        if not stack.message_lines or not stack.chain:
            return False
        stack.message_lines -= 1
        if _LOG_LINE.match(text) or _PROGRESS.search(text):
            stack.message_lines = 0
            return False
        link, finding = stack.chain[-1]
        is_text = bool(text.strip()) and not _EXCEPTION.match(text)
        if is_text and len(finding.line) < LINE_CHARACTERS_MAX:
            changed = replace(
                finding,
                line=f"{finding.line}\n{text.strip()}"[:LINE_CHARACTERS_MAX],
                excerpt=f"{finding.excerpt}\n{text}"[-EXCERPT_CHARACTERS_MAX:],
            )
            if self._last is not None and self._last[1] is finding:
                self._last = stack, changed
            stack.chain[-1] = (link, changed)
        return True

    def _stack(self, prefix: str) -> _Stack:
        if prefix not in self._stacks and len(self._stacks) >= RANKS_MAX:
            prefix = next(iter(self._stacks))
        return self._stacks.setdefault(prefix, _Stack())

    def _in_traceback(self, stack: _Stack, text: str) -> bool:
        """Return whether the line belongs to a traceback: a frame, or source in it, which may mention anything."""
        if stack.quoting and _INDENTED.match(text):
            if not _MARKS.match(text):
                stack.frames[-1] = replace(stack.frames[-1], source=text.strip())
                stack.lines.append(text)
            return True
        if text.startswith("│"):  # a box of rich's: what is no frame in it is quoted source
            if boxed := _RICH_FRAME.match(text):
                stack.frames.append(Frame(boxed[1], boxed[2]))
            stack.lines.append(text)
            return True
        frame = FRAME.match(text)
        if frame is None and stack.quoting:
            stack.quoting = False
            self._quoting -= 1
        if frame is None:
            if HEAD in text:
                stack.frames.clear()
                stack.lines.clear()
            return False
        stack.is_raising = True
        if not stack.quoting:
            stack.quoting = True
            self._quoting += 1
        stack.frames.append(Frame(frame[1], frame[2] or ""))
        stack.lines.append(text)
        return True

    def _finding(
        self, cause: Cause, text: str, rank: int | None, offset: int, stack: _Stack
    ) -> Finding:
        if cause is Cause.DISK_FULL and any(
            _SEMAPHORES.search(frame.file) for frame in list(stack.frames)[-3:]
        ):
            cause = Cause.SHARED_MEMORY  # named semaphores lie in /dev/shm
        finding = Finding(
            cause=cause,
            line=text.strip()[:LINE_CHARACTERS_MAX],
            rank=rank,
            log=self._log,
            offset=offset,
            phase=phase_of_frames(stack.frames) or self._markers.phase,
            excerpt="\n".join((*stack.lines, text))[-EXCERPT_CHARACTERS_MAX:].strip("\n"),
        )
        if _is_bare(finding) and any(map(_PINNED.search, list(stack.lines)[-_PINNED_LINES:])):
            return replace(finding, cause=Cause.HOST_OOM)  # page-locked memory is the host's
        return finding

    def _root_cause(self, text: str) -> None:
        """Read rank and exit code from torchrun's summary, since torchrun's own exit code is always 1."""
        if _ROOT_CAUSE in text:
            self._in_root_cause = True
        elif self._in_root_cause:
            if rank := _ROOT_RANK.match(text):
                self.root_rank = int(rank[1])
            elif code := _ROOT_EXIT.match(text):
                self.root_exit_code = int(code[1])
                self._in_root_cause = False


def read_log(text: str, command: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return the findings of a `LogScan` over a whole text."""
    scan = LogScan(command=command)
    offset = 0
    for line in text.splitlines():
        scan.feed(line, offset)
        offset += len(line) + 1
    return scan.findings


def last_traceback(text: str) -> str:
    """Return the last Python traceback of a log, or its last 20 lines without one."""
    start = text.rfind(HEAD)
    return text[start:].strip() if start >= 0 else "\n".join(text.splitlines()[-20:])


def _cause_of(text: str, role: Role) -> Cause | None:
    """Return the cause that a line names by a rule, or by its words; None where it names none."""
    cause = first_cause(text)
    if role is Role.LINE:
        cause = cause or cause_in_words(text)
        return None if cause is None or is_quoted(text) else cause
    cause = cause or cause_of_message(text)
    if cause is None and role is Role.EXCEPTION:
        return Cause.DEFERRED if points_elsewhere(text) else Cause.RAISED
    return cause


def _counts_beside(word: Finding, root: Finding) -> bool:
    """Return whether a telling line counts although an exception ended a rank.

    What came after that exception counts. So does what a device reported before an error of the device, and the place
    of memory or of space that the exception does not name.
    """
    if word.offset > root.offset or word.cause in COMPLAINTS:
        return True
    if root.cause is Cause.DEVICE_OOM and word.cause in (Cause.HOST_OOM, Cause.SHARED_MEMORY):
        return not names_device(root.line)
    if root.cause is Cause.DISK_FULL and word.cause is Cause.SHARED_MEMORY:
        return ": '" not in root.line
    return word.cause in (Cause.HARDWARE, Cause.NOT_OOM) and is_device_error(root.line)


def _is_bare(finding: Finding) -> bool:
    """Return whether the CUDA runtime, not PyTorch's allocator, was out of device or pinned memory."""
    return finding.cause is Cause.DEVICE_OOM and "Tried to allocate" not in finding.line


def _doubt(finding: Finding) -> int:
    if finding.cause in COMPLAINTS:
        return 3 if finding.cause is Cause.SECONDARY else 2
    return 1 if finding.cause in SUSPECTS else 0


def _misleading_arguments(command: Sequence[str]) -> tuple[str, ...]:
    """Return the arguments that would be read as a cause wherever the program or its launcher repeats them."""
    parts = [part for word in command for part in (word, word.partition("=")[2])]
    return tuple(word for word in parts if first_cause(word) or _EXCEPTION.match(word))


def _without_echoes(text: str, arguments: Sequence[str]) -> str:
    """Return the line without a command that a launcher repeats, and without arguments that would mislead."""
    text = _ECHOED_COMMAND.sub("[]", text)
    for word in arguments:
        text = text.replace(word, "")
    return text
