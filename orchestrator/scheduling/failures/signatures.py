"""Log analysis: finds the line that says why a process ended, by an ordered catalogue and in bounded memory.

Texts come from the sources named beside each group; `tests/scheduling/failures/` has an example of each. Read only
after exit codes, reports and counters.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.scheduling.failures.phases import Frame, Markers, phase_of_frames
from orchestrator.specs.attempt import Cause, Extent, Finding, Phase
from orchestrator.specs.replace import replace

# so many ordinary lines after a complaint, and the program has gone on: it was not the end
CALM_LINES = 200
FINDINGS_MAX = 8  # of one log that are kept as evidence
EXCERPT_CHARACTERS_MAX = 4000
# of a line that is kept: PyTorch's longest message of memory has about 650
LINE_CHARACTERS_MAX = 800
FRAMES_MAX = 60  # of a traceback that are kept, innermost last
RANKS_MAX = 256  # of one log that are told apart
PER_CAUSE_MAX = 64  # findings of one cause between two calms

_CATALOGUE: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    (
        Cause.NOT_OOM,
        (
            # PyTorch's allocator after ranks lost step with each other (NVIDIA/nccl issue 1284).
            r"Tried to allocate more than 1EB memory",
            # An index out of range; cuBLAS and cuDNN fail after it in any way (NVIDIA/Megatron-LM
            # issue 146).
            r"device-side assert triggered",
            r"thread: [^\n]{0,40} Assertion `",
            r"Too many open files",  # not memory, whatever fails next (ML-GSAI/SMDM issue 3)
            # Triton: a kernel's shared memory, which a smaller batch would not mend
            r"out of resource: ",
        ),
    ),
    # facebookresearch/audiocraft audiocraft/utils/deadlock.py ends itself by SIGKILL.
    (Cause.HANG, (r"Deadlock detector timed out, last stage was",)),
    # Ray's memory monitor; its exception shares PyTorch's name, so it must stand before that. So
    # must pinned memory.
    (
        Cause.HOST_OOM,
        (
            r"killed due to the node running low on memory",
            r"ray\.exceptions\.OutOfMemoryError",
            r"killed due to memory pressure \(OOM\)",
            r"low on resource: memory",  # kubelet
            r"alloc[a-z]{0,8} [^\n]{0,40}(?:pinned |on )host\b",
            r"Host\w{0,3}lloc\b[^\n]{0,120}(?:fail|emory)",
            r"Failed to CUDA host alloc",
            r"OUT_OF_HOST_MEMORY",
            r"[Oo]ut of host memory",
        ),
    ),
    (
        Cause.DEVICE_OOM,
        (
            r"\b(?!CPU|RAM)[A-Z]{3,6}(?: backend)? out of memory(?:[.:] ?Tried| \()",
            # runtimes, NCCL, Triton
            r"(?:rror|RROR|ailure)\b[^\n]{0,80}\b(?<!-)[Oo]ut of memory\b(?! errors)",
            r"Out of memory (?:while )?(?:trying to allocate|allocating) [\d.]+",  # XLA, cupy
            # PyTorch's asynchronous allocator
            r"Allocation on device(?: \d+ would exceed allowed memory|\s*$)",
            r"rror[^:\n]{0,80}: Allocation on device",
            # torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
            r"\bOutOfMemoryError(?:: \S|\s*$|\s+Traceback)",
            r"Error_?MemoryAllocation",
            r"(?:Error|ERROR_)OutOfMemory\b",
            r"(?:ERROR|RESULT|STATUS)_OUT_OF_(?:DEVICE_)?(?:MEMORY|RESOURCES)",
            r"_ALLOC_FAILED",
            r"STATUS_INSUFFICIENT_RESOURCES",  # cuSPARSE
            r"Failed to CUDA c?alloc",  # NCCL
            r"(?:[Ff]ailed to|[Cc]ould not|[Cc]annot) (?:cuda|hip)?[Mm]?[Aa]lloc[^\n]{0,80}(?:device|GPU|buffer|bytes)",
            r"(?:hip|HIP|cuda|CUDA|GPU|[Dd]evice)[^\n]{0,80}[Ff]ailed to allocate",
            r"alloc(?:ate)? device memory failed",
            r"(?:DEVMEM|[Dd]evice|GPU)[^\n]{0,40}\b[Aa]llocation failed",
            r"ot enough (?:free )?(?:GPU|device|video)",
            r"OOM when allocating tensor",  # TensorFlow
            # accelerate's find_executable_batch_size
            r"No executable batch size found, reached zero",
            r"No available memory for the cache blocks",  # vLLM beside a training (TRL, verl)
            r"larger than the available KV cache memory",
            r"less than desired GPU memory utilization",
            r"ot enough memory\. Please try to increase",  # SGLang
        ),
    ),
    # A device, its link or its driver: the same program trains elsewhere.
    (
        Cause.HARDWARE,
        (
            r"uncorrectable [A-Za-z]+ error",  # ECC, NVLink
            r"CUDA-capable device",  # busy, unavailable, or none is detected
            r"No \w+ GPUs are available",
            r"(?:CUDA|HIP|cuda runtime) error(?: \(\d+\) )?: unknown error",
            r"CUDA unknown error - ",
            r"GPU is lost",
            r"DEVICE_LOST",
            r"fallen off the bus",
            r"NVRM: Xid",
            r"Unable to determine the device handle",
            r"river/library version mismatch",
            r"driver version is insufficient",
            r"Found no NVIDIA driver",
            r"rror: libcuda\.so[\w.]*: cannot open shared object",
            r"system not yet initialized",  # the fabric manager
        ),
    ),
    (
        Cause.NODE_LOST,
        (r"Node failure on ", r"DUE TO NODE FAILURE", r"node has (?:died|crashed)"),
    ),  # Slurm, Ray
    (
        Cause.DEVICE_OOM_SUSPECT,
        (
            r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
            r"Unable to find a valid cuDNN algorithm",
            r"unable to find an engine to execute this computation",
            r"(?:CU|HIP)(?:BLAS|SOLVER|SPARSE)_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
            r"CUFFT_INTERNAL_ERROR",  # pytorch/pytorch issue 119420: on low free memory
        ),
    ),
    # Shared memory; a line of PyTorch's ends in "No space left on device", so it stands before the
    # disk.
    (
        Cause.SHARED_MEMORY,
        (
            r"unable to allocate shared memory\(shm\) for file </torch_",
            r"insufficient shared memory \(shm\)",
            r"killed by signal: Bus error",
            r"No space left on device: '/dev/shm/",
            r"\d+ Bus error  ",  # a shell with job control
            r"workers are out of shared memory",
            r"unable to open shared memory object </torch_",
            r"unable to write to file </torch_",
            r"unable to mmap \d+ bytes from file </torch_",
            r"(?:Signal 7 \(|<Signals\.|terminated with signal )SIGBUS",
            r"exits with return code = -7",  # deepspeed's launcher
            r"(?:failed to extend|Error while creating shared memory segment) /dev/shm/nccl-",
            # it asks for a semaphore
            r"No space left on device\.\s+joblib will operate in serial mode",
        ),
    ),
    (
        Cause.HOST_OOM,
        (
            r"DefaultCPUAllocator: can't allocate memory",  # c10/core/impl/alloc_cpu.cpp
            r"not enough memory: you tried to allocate",  # the same on Windows, and torch < 1.0
            r"std::bad_alloc",
            # Python, numpy, pyarrow
            r"(?<!raise )(?<!\w)_?(?:Array|Arrow)?MemoryError(?:: \S|\s*$)",
            r"Cannot allocate memory",
            r"memory allocation of \d+ bytes failed",  # Rust: tokenizers, polars
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\)? is killed by signal: Killed",
            r"Out of memory: Kill(?:ed)? process",  # kernel log
            r"oom-kill:",
            r"OOM ?Killed",  # Kubernetes, docker, slurmstepd
            r"Memory cgroup out of memory",
            r"Detected \d+ oom[-_]kill event",  # slurmstepd
            r"xceeded (?:its |job |step )?memory limit",  # Slurm < 18
            r"tasks? [\d,-]+: Out Of Memory",  # srun
            r"PBS: job killed: mem ",
            r"TERM_MEMLIMIT",  # LSF
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
            r"\d+ [Kk]illed  ",
            r"exited on signal 9 \(",  # mpirun
        ),
    ),
    (
        Cause.DISK_FULL,
        (
            r"No space left on device",
            r"Disk quota exceeded",
            r"rrno 27\] File too large",
            r"PytorchStreamWriter failed writing file",
            r"inline_container\.cc:\d+\] \. unexpected pos",  # torch.save on a full disk
        ),
    ),
    # No other place and no later time would spare these, although their exceptions do not blame the
    # program.
    (
        Cause.PROGRAM,
        (
            r"no kernel image is available",
            r"invalid device function",
            r"undefined symbol: ",
            r"named symbol not found",
            r"hipErrorNoBinaryForGpu",
            r"too many resources requested for launch",
            # What PyTorch checks of a program's tensors.
            r"rror: [^\n]{0,200}(?:must match the size|shapes cannot be multiplied|to be on the same device)",
            r"rror\(s\) in loading state_dict for ",
            r"rror: [^\n]{0,80}does not require grad",
            r"\b401 Client Error",
            r"gated repo",
            r"RepositoryNotFoundError",
            r"rror: [^\n]{0,200}is not a valid model identifier",
            r"oss scale (?:already at minimum|reached)",
            r"^[\w.]{0,80}Error: [^\n]{0,200}\b(?:nan|NaN|Nan)\b",
            r"(?:nan|NaN|[Ii]nf|on-finite)\b[^\n]{0,60}(?:stopp|end|abort|exit)ing training",
        ),
    ),
    # Another rank may have the cause; alone, ranks waited in vain.
    (
        Cause.TIMEOUT,
        (
            r"Watchdog caught collective operation timeout",
            r"watchdog got stuck for",
            r"(?:CCL|[Cc]ollective|[Bb]arrier|Heartbeat monitor)\b[^\n]{0,200}\btimed out\b",
            r"(?:[Ss]ocket|[Nn]otify)\b[^\n]{0,60} times out",  # Ascend's HCCL
            r"task timeout occurred",
            r"ynchronize timeout",
            r"Timed out waiting \d+ ?ms for",  # gloo
            r"pass monitoredBarrier in",
        ),
    ),
    (
        Cause.PREEMPTED,
        (
            r"got signal: (?:1|2|9|15)\b",  # torchrun
            r"Received (?:Signals\.SIG[A-Z]+|\d+) death signal",
            # Slurm: DUE TO PREEMPTION, TIME LIMIT, JOB REQUEUE, or by a person
            r"\bCANCELLED AT \d",
            r"this job is (?:preempted|timed-out)",  # submitit
            r"PBS: job killed: walltime",
        ),
    ),
    (
        Cause.SECONDARY,
        (
            r"gloo/transport/tcp/pair\.cc:\d+\] (?:Read error|Connection closed by peer)",
            r"ncclRemoteError",
            r"ncclSystemError",
            r"NET/IB[^\n]{0,40}Got completion from peer",
            r"NCCL communicator was aborted",
            r"Signal 15 \(SIGTERM\) received by PID",
            r"srun: error: [^\n]{0,80}: Terminated",  # tasks that srun ends after one has failed
            r"Horovod has been shut down",
            r"Executor: Worker \d+ died",  # facebookresearch/dora
        ),
    ),
)
# A line that any rule fits, or that belongs to an exception, has one of these; few others do.
TELLING = (
    "rror", "xception", "nterrupt", "Traceback", '  File "', "│", "Root Cause", "rank   ", "exitcode", "exits with",
    "OUT_OF_", "STATUS_", "ALLOC", "INTERNAL_E", "emory", "lloc", "illed", "SIG", "kill", "nable to ", "device",
    "batch size found", "/dev/shm/nccl-", "(pid(s)", "quota", "writing file", "r.cc:", "serial mode", " Assertion `",
    "open files", "of resource: ", "MEMLIMIT", "OOM when", "ot enough ", "GPUs are av", "U is lost", "DEVICE_LOST",
    "off the bus", "NVRM: Xid", "river", "not yet init", "ode failure", "NODE FAIL", "node has ", "too large",
    "kernel image", " symbol", "gated repo", "oss scale ", "ing training", "for launch", "atchdog", "imed out",
    "times out", "timeout", "monitoredBarrier", " signal", "CANCELLED", "this job is", "Got completion", "was aborted",
    "Executor: W", "Horovod has",
)  # fmt: skip


def _literal(pattern: str) -> str:
    """Return the longest text that every line matching the pattern contains, to search for that first.

    A text with a word of TELLING comes before longer ones.
    """
    while (
        flat := re.sub(r"\((?:[^()\\]|\\.)*\)\??", "\0", pattern)
    ) != pattern:  # innermost groups first
        pattern = flat
    pieces = re.sub(
        r"\[[^\]]*\](?:[*+?]|\{[\d,]+\})?|\\[A-Za-z](?:[*+?]|\{[\d,]+\})?|[^\\][?*]|[$^]|\0",
        "\0",
        pattern,
    ).split("\0")
    texts = [re.sub(r"\\(.)", r"\1", piece).strip("+") for piece in pieces]
    return max(texts, key=lambda text: (is_telling(text), len(text)))


def is_telling(line: str) -> bool:
    """Return whether a log line may name a cause of failure or belong to a traceback."""
    return any(map(line.__contains__, TELLING))


RULES = tuple((cause, re.compile(pattern)) for cause, group in _CATALOGUE for pattern in group)
NEEDLES = tuple(_literal(pattern.pattern) for _, pattern in RULES)
SUSPECTS = (Cause.DEVICE_OOM_SUSPECT, Cause.HOST_OOM_SUSPECT)
COMPLAINTS = (
    Cause.TIMEOUT,
    Cause.PREEMPTED,
    Cause.SECONDARY,
)  # of ranks that another rank's end may have ended
_NODE_WIDE = re.compile(r"river|libcuda|not yet initialized|CUDA unknown error - ")

# Before what a rank says, where several write into one log: torchrun, `torchrun --tee`, Ray.
_PREFIX = re.compile(r"(?:\[(?:rank|default)(\d+)\]: ?|\((?:\w+ )?(?:rank=(\d+) )?pid=\d+[^)]*\) )")
_EXCEPTION = re.compile(r"[\w.]+(?:Error|Exception|Interrupt)\b")
_LAUNCHERS = re.compile(
    r"[\w.]*(?:ChildFailedError|CalledProcessError|ProcessRaisedException|ProcessExitedException)\b"
)
_FRAME = re.compile(r'\s+File "([^"]*)", line \d+(?:, in (\S+))?')
_INDENTED = re.compile(r" {4}")
_RICH_FRAME = re.compile(
    r"│ (\S.*?):\d+ in (\S+)\s+│"
)  # rich's tracebacks, under accelerate launch
_MARKS = re.compile(r"[\s^~]*\Z")
_ECHOED_COMMAND = re.compile(r"\[(?:'[^']*'|\"[^\"]*\")(?:, (?:'[^']*'|\"[^\"]*\"))+\]")
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


@dataclass(slots=True)
class _Stack:
    """State of parsing one rank's traceback."""

    frames: deque[Frame] = field(default_factory=lambda: deque(maxlen=FRAMES_MAX))
    lines: deque[str] = field(default_factory=lambda: deque(maxlen=2 * FRAMES_MAX))
    quoting: bool = False


class LogScan:
    """Incremental log analysis in bounded memory.

    Error lines within CALM_LINES ordinary lines of each other form one group. The last group explains the end of the
    process, unless the log went on calmly after it. Its first line with a cause decides; secondary errors count only
    where no line names a cause.
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
        self._trouble: dict[Cause, list[Finding]] = {}
        self._calm = 0  # ordinary lines since the last complaint
        self._account: list[
            Finding
        ] = []  # ends with the finding whose bytes or frames may stand in the next lines
        self._frames_below = 0  # lines in which frames of that finding may stand
        self._in_root_cause = False

    def feed(self, line: str, offset: int = 0) -> None:
        """Read one line, without its line feed. `offset` is its first byte's position in the file."""
        self._markers.read(line)
        if (
            self._account
            and _ACCOUNT.match(line)
            and len(self._account[-1].line) < LINE_CHARACTERS_MAX
        ):
            self._account[-1] = replace(
                self._account[-1], line=f"{self._account[-1].line}\n{line.strip()}"
            )
            return
        if self._frames_below:
            self._frames_below -= 1
            if _PINNED.search(line):
                self._account[-1] = replace(self._account[-1], cause=Cause.HOST_OOM)
        if not self._quoting and not is_telling(line):
            self._calm += 1
            return
        prefix = _PREFIX.match(line)
        text = line[prefix.end() :] if prefix else line
        stack = self._stack(prefix[0] if prefix else "")
        if self._in_traceback(stack, text):
            return
        self._root_cause(text)
        text = _without_echoes(text, self._echoes)
        cause = first_cause(text)
        if cause is None and (not _EXCEPTION.match(text) or _LAUNCHERS.match(text)):
            self._calm += 1
            return
        if self._calm > CALM_LINES:
            self._trouble.clear()
        self._calm = 0
        if (
            cause is not None
            and len(findings := self._trouble.setdefault(cause, [])) < PER_CAUSE_MAX
        ):
            rank = (
                next((int(number) for number in prefix.groups() if number), None)
                if prefix
                else None
            )
            findings.append(self._finding(cause, text, rank, offset, stack))
            self._account = findings
            self._frames_below = _PINNED_LINES if _is_bare(findings[-1]) else 0
        stack.frames.clear()
        stack.lines.clear()

    def pass_over(self, block: str) -> bool:
        """Count the whole lines of a block as ordinary ones at once; False where they must be fed one by one.

        A line of two characters costs as much as a long one: 20 million empty ones took 16 s.
        """
        # a rank whose traceback broke off quotes for ever; lines without a bracket are not of a
        # rank
        quotes = self._quoting and (self._stack("").quoting or "[" in block or "(" in block)
        follows = self._frames_below or (
            self._account and any(map(block.__contains__, _ACCOUNT_WORDS))
        )
        if quotes or follows or self._markers.phase is not None or is_telling(block):
            return False
        self._calm += block.count("\n")
        return True

    @property
    def findings(self) -> tuple[Finding, ...]:
        """The log line that explains the end, then at most FINDINGS_MAX - 1 others in order; () without any."""
        if self._calm > CALM_LINES:
            return ()
        findings = sorted(
            (finding for group in self._trouble.values() for finding in group),
            key=lambda finding: finding.offset,
        )
        if not findings:
            return ()
        decisive = min(
            findings,
            key=lambda finding: (
                _doubt(finding),
                self.root_rank not in (None, finding.rank),
                finding.offset,
            ),
        )
        others = [replace(finding, excerpt="") for finding in findings if finding is not decisive]
        return (decisive, *others[: FINDINGS_MAX - 1])

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
        frame = _FRAME.match(text)
        if frame is None and stack.quoting:
            stack.quoting = False
            self._quoting -= 1
        if frame is None:
            if "Traceback (most recent call last)" in text:
                stack.frames.clear()
                stack.lines.clear()
            return False
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
                self.root_exit_code, self._in_root_cause = int(code[1]), False


def read_log(text: str, command: Sequence[str] = ()) -> tuple[Finding, ...]:
    """Return the findings of a `LogScan` over a whole text."""
    scan = LogScan(command=command)
    offset = 0
    for line in text.splitlines():
        scan.feed(line, offset)
        offset += len(line) + 1
    return scan.findings


def first_cause(text: str) -> Cause | None:
    """Return the cause named by the first matching rule of the catalogue; None without a match."""
    for needle, (cause, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in text and pattern.search(text):
            return cause
    return None


def broken_extent(line: str) -> Extent:
    """Return whether a hardware error in a log line concerns a device or the node. A driver error concerns the node."""
    return Extent.NODE if _NODE_WIDE.search(line) else Extent.DEVICE


def last_traceback(text: str) -> str:
    """Return the last Python traceback of a log, or its last 20 lines without one."""
    start = text.rfind("Traceback (most recent call last)")
    return text[start:].strip() if start >= 0 else "\n".join(text.splitlines()[-20:])


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
