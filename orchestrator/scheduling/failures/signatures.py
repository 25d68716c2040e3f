"""Which sentence in a log tells why a process ended? An ordered catalogue, read over a whole log in bounded memory.

Texts come from the sources named beside each group; `tests/scheduling/failures/` holds where each was seen. Read only
after exit codes, reports and counters.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.scheduling.failures.phases import Frame, Markers, phase_of_frames
from orchestrator.specs.attempt import Cause, Finding, Phase
from orchestrator.specs.replace import replace

CALM_LINES = 200  # so many ordinary lines after a complaint, and the program has gone on: it was not the end
FINDINGS_MAX = 8  # of one log that are kept as evidence
EXCERPT_CHARACTERS_MAX = 4000
LINE_CHARACTERS_MAX = 800  # of a line that is kept: PyTorch's longest message of memory has about 650
FRAMES_MAX = 60  # of a traceback that are kept, innermost last
RANKS_MAX = 256  # of one log that are told apart
PER_CAUSE_MAX = 64  # findings of one cause between two calms

_CATALOGUE: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    (
        Cause.NOT_OOM,
        (
            # PyTorch's allocator after ranks lost step with each other (NVIDIA/nccl issue 1284).
            r"Tried to allocate more than 1EB memory",
            # An index out of range; cuBLAS fails after it in any way (NVIDIA/Megatron-LM issue 146).
            r"device-side assert triggered",
            # Open files, not memory (ML-GSAI/SMDM issue 3).
            r"unable to open shared memory object </torch_.*Too many open files",
        ),
    ),
    # facebookresearch/audiocraft audiocraft/utils/deadlock.py ends itself by SIGKILL.
    (Cause.HANG, (r"Deadlock detector timed out, last stage was",)),
    # Ray's memory monitor; its exception shares PyTorch's name, so it must stand before that.
    (
        Cause.HOST_OOM,
        (
            r"killed due to the node running low on memory",
            r"ray\.exceptions\.OutOfMemoryError",
            r"killed due to memory pressure \(OOM\)",
        ),
    ),
    (
        Cause.DEVICE_OOM,
        (
            r"(?:CUDA|HIP|XPU) out of memory\. ?Tried to allocate",
            r"MPS backend out of memory",
            r"Allocation on device(?: \d+ would exceed allowed memory|\s*$)",  # PyTorch's asynchronous allocator
            r"rror[^:]*: Allocation on device",
            r"\bOutOfMemoryError(?:: \S|\s*$|\s+Traceback)",  # torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
            r"CUDA (?:driver )?error: ?out of memory",
            r"(?:cuda runtime error \(2\)|error=2) ?: out of memory",  # torch < 1.1
            r"cudaErrorMemoryAllocation",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"CU[A-Z]+_STATUS_ALLOC_FAILED",
            r"CUFFT_ALLOC_FAILED",
            r"Cuda failure (?:\d+ )?'out of memory'",  # NCCL
            r"Failed to CUDA (?:host )?c?alloc",
            r"No executable batch size found, reached zero",  # accelerate's find_executable_batch_size
            r"No available memory for the cache blocks",  # vLLM beside a training (TRL, verl)
        ),
    ),
    (
        Cause.DEVICE_OOM_SUSPECT,
        (
            r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
            r"Unable to find a valid cuDNN algorithm",
            r"unable to find an engine to execute this computation",
            r"CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
            r"CUFFT_INTERNAL_ERROR",  # pytorch/pytorch issue 119420: on low free memory
        ),
    ),
    # Shared memory; a line of PyTorch's ends in "No space left on device", so it stands before the disk.
    (
        Cause.SHARED_MEMORY,
        (
            r"unable to allocate shared memory\(shm\) for file </torch_",
            r"insufficient shared memory \(shm\)",
            r"killed by signal: Bus error",
            r"workers are out of shared memory",
            r"unable to open shared memory object </torch_",
            r"unable to write to file </torch_",
            r"unable to mmap \d+ bytes from file </torch_",
            r"(?:Signal 7 \(|<Signals\.|terminated with signal )SIGBUS",
            r"exits with return code = -7",  # deepspeed's launcher
            r"(?:failed to extend|Error while creating shared memory segment) /dev/shm/nccl-",
            r"No space left on device\.\s+joblib will operate in serial mode",  # it asks for a semaphore
        ),
    ),
    (
        Cause.HOST_OOM,
        (
            r"DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
            r"not enough memory: you tried to allocate",  # the same on Windows, and torch < 1.0
            r"std::bad_alloc",
            r"(?<!raise )(?<!\w)_?(?:Array)?MemoryError(?:: \S|\s*$)",  # Python, numpy
            r"\[Errno 12\] Cannot allocate memory",
            r"fork: Cannot allocate memory",
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\)? is killed by signal: Killed",
            r"Out of memory: Kill(?:ed)? process",  # kernel log
            r"oom-kill:",
            r"Memory cgroup out of memory",
            r"Detected \d+ oom[-_]kill event",  # slurmstepd
        ),
    ),
    (
        Cause.HOST_OOM_SUSPECT,
        (
            r"exitcode\s*: -9 ",  # torchrun's summary
            r"died with <Signals\.SIGKILL: 9>",  # accelerate launch, subprocess
            r"exits with return code = -9",  # deepspeed's launcher
            r"terminated with signal SIGKILL",  # torch.multiprocessing.spawn
            r"Signal 9 \(SIGKILL\) received by PID",
            r"DataLoader worker \(pid\(s\) [\d, ]+\) exited unexpectedly",
            r"(?m)^Killed$",
            r"\d+ Killed  ",
        ),
    ),
    (
        Cause.DISK_FULL,
        (
            r"No space left on device",
            r"Disk quota exceeded",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc:\d+\] \. unexpected pos",  # torch.save on a full disk
        ),
    ),
    (
        Cause.SECONDARY,
        (
            r"gloo/transport/tcp/pair\.cc:\d+\] (?:Read error|Connection closed by peer)",
            r"Watchdog caught collective operation timeout",
            r"ncclRemoteError",
            r"ncclSystemError",
            r"NCCL communicator was aborted",
            r"Signal 15 \(SIGTERM\) received by PID",
            r"Executor: Worker \d+ died",  # facebookresearch/dora
        ),
    ),
)


def _literal(pattern: str) -> str:
    """The longest text that stands in every line which the pattern fits: finding it is faster than the pattern."""
    while (flat := re.sub(r"\((?:[^()\\]|\\.)*\)\??", "\0", pattern)) != pattern:  # innermost groups first
        pattern = flat
    pieces = re.sub(r"\[[^\]]*\][*+]?|\\[A-Za-z][*+]?|[^\\][?*]|[$^]|\0", "\0", pattern).split("\0")
    return max((re.sub(r"\\(.)", r"\1", piece).strip("+") for piece in pieces), key=len)


RULES = tuple((cause, re.compile(pattern)) for cause, group in _CATALOGUE for pattern in group)
NEEDLES = tuple(_literal(pattern.pattern) for _, pattern in RULES)
# A line that any rule fits, or that belongs to an exception, has one of these; few others do.
TELLING = (
    "rror", "xception", "nterrupt", "Traceback", '  File "', "│", "Root Cause", "rank   ", "exitcode", "exits with",
    "OUT_OF_MEMORY", "STATUS_", "ALLOC", "INTERNAL_E", "of memory", " memory (", "cate memory", "low on memory",
    "allocate", "able memory", "llocation on", "bad_alloc", "illed", "SIG", "kill", "device-side", "etector timed",
    "cuDNN algorithm", "find an engine", "batch size found", "shared memory", "</torch_", "/dev/shm/nccl-", "(pid(s)",
    "left on device", "quota", "StreamWriter", "container.cc", "pair.cc:", "collective operation", "was aborted",
    "Executor: W", "Failed to CUDA", "serial mode",
)  # fmt: skip
SUSPECTS = (Cause.DEVICE_OOM_SUSPECT, Cause.HOST_OOM_SUSPECT)

# Before what a rank says, where several write into one log: torchrun, `torchrun --tee`, Ray.
_PREFIX = re.compile(r"(?:\[(?:rank|default)(\d+)\]: ?|\((?:\w+ )?(?:rank=(\d+) )?pid=\d+[^)]*\) )")
_EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception|Interrupt)\b")
_LAUNCHERS = re.compile(
    r"[\w.]*(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException)\b"
)
_FRAME = re.compile(r'\s+File "([^"]*)", line \d+(?:, in (\S+))?')
_INDENTED = re.compile(r" {4}")
_RICH_FRAME = re.compile(r"│ (\S.*?):\d+ in (\S+)\s+│")  # rich's tracebacks, under accelerate launch
_MARKS = re.compile(r"[\s^~]*\Z")
_ECHOED_COMMAND = re.compile(r"\[(?:'[^']*'|\"[^\"]*\")(?:, (?:'[^']*'|\"[^\"]*\"))+\]")
_ACCOUNT = re.compile(  # c10/cuda/CUDAMallocAsyncAllocator.cpp
    r"\s*(?:Currently allocated|Requested|Device limit|Free \(according to CUDA\)) *: [\d.]+ [KMGT]?i?[Bb]"
)
_ROOT_CAUSE = "Root Cause (first observed failure)"
_ROOT_RANK = re.compile(r"\s*rank +: (\d+)")
_ROOT_EXIT = re.compile(r"\s*exitcode +: (-?\d+)")
_SEMAPHORES = re.compile(r"multiprocessing[/\\](?:synchronize|heap|shared_memory)\.py")


@dataclass(slots=True)
class _Stack:
    """The traceback that one rank is writing."""

    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=FRAMES_MAX))
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2 * FRAMES_MAX))
    quoting: bool = False


class LogScan:
    """Reads a log line by line, in memory that does not grow with it.

    Complaints that stand within CALM_LINES ordinary lines of each other are one trouble. The last trouble is why the
    process ended, unless the log went on calmly after it; its first cause is the cause, and what others complain of
    only counts where none is named.
    """

    def __init__(
        self, *, log: str = "", command: Sequence[str] = (), markers: Mapping[Phase, str] | None = None
    ) -> None:
        self.root_rank: int | None = None  # the rank that torchrun saw fail first
        self.root_exit_code: int | None = None
        self._log = log
        self._markers = Markers(markers or {})
        self._echoes = _words_that_mislead(command)
        self._stacks: dict[str, _Stack] = {}
        self._quoting = 0  # stacks whose next line may be quoted source
        self._trouble: dict[Cause, list[Finding]] = {}
        self._calm = 0  # ordinary lines since the last complaint
        self._account: list[Finding] = []  # ends with the finding whose bytes may stand in the next lines
        self._in_root_cause = False

    def feed(self, line: str, offset: int = 0) -> None:
        """Read one line, without its line feed; `offset` says where it begins in the file."""
        self._markers.read(line)
        if self._account and _ACCOUNT.match(line) and len(self._account[-1].line) < LINE_CHARACTERS_MAX:
            self._account[-1] = replace(self._account[-1], line=f"{self._account[-1].line}\n{line.strip()}")
            return
        if not self._quoting and not is_telling(line):
            self._calm += 1
            return
        prefix = _PREFIX.match(line)
        said = line[prefix.end() :] if prefix else line
        stack = self._stack(prefix[0] if prefix else "")
        if self._in_traceback(stack, said):
            return
        self._root_cause(said)
        said = _without_echoes(said, self._echoes)
        cause = first_cause(said)
        if cause is None and (not _EXCEPTION.match(said) or _LAUNCHERS.match(said)):
            self._calm += 1
            return
        if self._calm > CALM_LINES:
            self._trouble.clear()
        self._calm = 0
        if cause is not None and len(kept := self._trouble.setdefault(cause, [])) < PER_CAUSE_MAX:
            rank = next((int(number) for number in prefix.groups() if number), None) if prefix else None
            kept.append(self._finding(cause, said, rank, offset, stack))
            self._account = kept
        stack.frames.clear()
        stack.lines.clear()

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The finding that counts, then at most FINDINGS_MAX - 1 others as they came; empty where nothing tells."""
        if self._calm > CALM_LINES:
            return ()
        found = sorted((one for group in self._trouble.values() for one in group), key=lambda one: one.offset)
        if not found:
            return ()
        counts = min(found, key=lambda one: (_doubt(one), self.root_rank not in (None, one.rank), one.offset))
        others = [replace(one, excerpt="") for one in found if one is not counts]
        return (counts, *others[: FINDINGS_MAX - 1])

    def _stack(self, prefix: str) -> _Stack:
        if prefix not in self._stacks and len(self._stacks) >= RANKS_MAX:
            prefix = next(iter(self._stacks))
        return self._stacks.setdefault(prefix, _Stack())

    def _in_traceback(self, stack: _Stack, said: str) -> bool:
        """Whether the line is a traceback's own: a frame, or source that it quotes (which may mention anything)."""
        if stack.quoting and _INDENTED.match(said):
            if not _MARKS.match(said):
                stack.frames[-1] = replace(stack.frames[-1], source=said.strip())
                stack.lines.append(said)
            return True
        if said.startswith("│"):  # a box of rich's: what is no frame in it is quoted source
            if boxed := _RICH_FRAME.match(said):
                stack.frames.append(Frame(boxed[1], boxed[2]))
            stack.lines.append(said)
            return True
        frame = _FRAME.match(said)
        if frame is None and stack.quoting:
            stack.quoting = False
            self._quoting -= 1
        if frame is None:
            if "Traceback (most recent call last)" in said:
                stack.frames.clear()
                stack.lines.clear()
            return False
        if not stack.quoting:
            stack.quoting = True
            self._quoting += 1
        stack.frames.append(Frame(frame[1], frame[2] or ""))
        stack.lines.append(said)
        return True

    def _finding(self, cause: Cause, said: str, rank: int | None, offset: int, stack: _Stack) -> Finding:
        if cause is Cause.DISK_FULL and any(_SEMAPHORES.search(frame.file) for frame in list(stack.frames)[-3:]):
            cause = Cause.SHARED_MEMORY  # named semaphores lie in /dev/shm
        return Finding(
            cause=cause,
            line=said.strip()[:LINE_CHARACTERS_MAX],
            rank=rank,
            log=self._log,
            offset=offset,
            phase=phase_of_frames(stack.frames) or self._markers.phase,
            excerpt="\n".join((*stack.lines, said))[-EXCERPT_CHARACTERS_MAX:].strip("\n"),
        )

    def _root_cause(self, said: str) -> None:
        """Take rank and exit code from torchrun's summary, whose own exit code is 1 whatever happened."""
        if _ROOT_CAUSE in said:
            self._in_root_cause = True
        elif self._in_root_cause:
            if rank := _ROOT_RANK.match(said):
                self.root_rank = int(rank[1])
            elif code := _ROOT_EXIT.match(said):
                self.root_exit_code, self._in_root_cause = int(code[1]), False


def read_log(text: str, command: Sequence[str] = ()) -> tuple[Finding, ...]:
    """What a `LogScan` finds in a text."""
    scan = LogScan(command=command)
    offset = 0
    for line in text.splitlines():
        scan.feed(line, offset)
        offset += len(line) + 1
    return scan.findings


def first_cause(text: str) -> Cause | None:
    """The cause that the first fitting rule of the catalogue names."""
    for needle, (cause, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in text and pattern.search(text):
            return cause
    return None


def is_telling(line: str) -> bool:
    """Whether a line is worth reading: it may name a cause, or belong to a traceback."""
    return any(map(line.__contains__, TELLING))


def last_traceback(text: str) -> str:
    """The last Python traceback of a log, or its last 20 lines where it has none."""
    start = text.rfind("Traceback (most recent call last)")
    return text[start:].strip() if start >= 0 else "\n".join(text.splitlines()[-20:])


def _doubt(finding: Finding) -> int:
    if finding.cause is Cause.SECONDARY:
        return 2
    return 1 if finding.cause in SUSPECTS else 0


def _words_that_mislead(command: Sequence[str]) -> tuple[str, ...]:
    """Arguments that would be taken for a cause wherever the program or its launcher repeats them."""
    words = [part for word in command for part in (word, word.partition("=")[2])]
    return tuple(word for word in words if first_cause(word) or _EXCEPTION.match(word))


def _without_echoes(said: str, words: Sequence[str]) -> str:
    """The line without a command that a launcher repeats in it, and without arguments that would mislead."""
    said = _ECHOED_COMMAND.sub("[]", said)
    for word in words:
        said = said.replace(word, "")
    return said
