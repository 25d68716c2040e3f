"""The catalogue of lines that name a cause of failure, and the words by which unknown lines name memory.

Texts come from the sources named beside each group; `tests/scheduling/failures/` has an example of each. An exception
that no rule matches has no cause here: `endings.py` decides whether the program is to blame.
"""

from __future__ import annotations

import re

from orchestrator.specs.attempt import Cause, Extent

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
            r"low on resource: memory",  # kubelet
            r"alloc[a-z]{0,8} [^\n]{0,40}(?:pinned |on )host\b",
            r"Host\w{0,3}lloc\b[^\n]{0,120}(?:fail|emory)",
            r"Failed to CUDA host alloc",
            r"OUT_OF_HOST_MEMORY",
            r"[Oo]ut of host memory",
            r"paging file is too small",  # Windows
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
            r"the launch timed out and was terminated",
            r"HW Exception by GPU",  # ROCm
            r"[Ff]ailed to initialize NVML",
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
            r"shm\.(?:h|cc):\d+[^\n]{0,80}No space left on device",  # NCCL
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
            r"\b4(?!08|25|29)\d\d Client Error",
            r"NoSuch(?:Bucket|Key)",
            r"AccessDenied",
            r"InvalidAccessKey",
            r"Duplicate GPU detected",  # NCCL: two ranks on one device
            r"Expected to have finished reduction in the prior iteration",
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
            r"^KeyboardInterrupt\b",
            # a script's own handler
            r"(?:aught|eceived|[Gg]ot|Handling|handling)[^\n]{0,20}\bSIG(?:TERM|INT|USR\d)\b",
            r"(?:aught|eceived|[Gg]ot|Handling|handling)[^\n]{0,20}\bsignal (?:2|10|12|15)\b",
            r"imminent node shutdown",  # kubelet
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
            r"remote process exited or there was a network error",
            r"unhandled (?:system|cuda) error",
            r"ncclUnhandledCudaError",
            r"Dist(?:Network|Store)Error: [^\n]{0,200}(?:reset|closed|roken pipe)",
            r"TCPStore[^\n]{0,120}(?:reset|closed|roken pipe)",
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
    "Executor: W", "Horovod has", " process ", "W Exception", "VRAM", "显存", "内存", "finished reduction",
    "Duplicate GPU", "paging file", "shutdown", "Client E", "NoSuch", "AccessDenied", "InvalidAcc", "NVML",
    "terminated", "TCPStore", "signal ",
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
# an exception that points at another one, and a cause that other evidence must confirm
SUSPECTS = (Cause.DEVICE_OOM_SUSPECT, Cause.HOST_OOM_SUSPECT, Cause.DEFERRED)
COMPLAINTS = (
    Cause.TIMEOUT,
    Cause.PREEMPTED,
    Cause.SECONDARY,
)  # of ranks that another rank's end may have ended
_NODE_WIDE = re.compile(r"river|libcuda|not yet initialized|CUDA unknown error - ")


# Words by which a line says that memory was not to be had, in any library's phrase.
_ALLOCATION = re.compile(r"alloc|memory|\b[Vv]?RAM\b|\bHBM\b|\bOOM\b|显存|内存", re.IGNORECASE)
_FAILURE = re.compile(
    r"fail|\berror\b|can(?:not|'t)|could(?: not|n't)|unable|not enough|insufficient|exhaust|out of|ran out|exceed"
    r"|too (?:small|little)|不足|失败|溢出|超出",
    re.IGNORECASE,
)
_ON_DEVICE = re.compile(
    r"(?<![a-z])(?:cuda|gpu|hip|rocm|npu|xpu|mps|tpu|mlu|musa|sycl|vram|hbm)|\bdevice\b|显存|显卡",
    re.IGNORECASE,
)
_ON_HOST = re.compile(
    r"\bhost|pinned|page.?locked|\bcpu\b|\bram\b|\bswap|paging|\bfork|mmap|\barray\b|内存",
    re.IGNORECASE,
)
_NO_ALLOCATION = re.compile(  # of memory that there was, or of memory of another kind
    r"illegal memory|memory[ _](?:leak|format|address|efficient|access)|misaligned|invalid (?:device )?pointer"
    r"|shared memory|/dev/shm|\bdisk\b|No space left|1EB memory|out of resource",
    re.IGNORECASE,
)
_UNPLACED = re.compile(
    r"alloc\w*[^\n]{0,60}fail|fail\w*[^\n]{0,40}alloc|(?:out of|not enough|insufficient) memory|memory exhausted"
    r"|can(?:not|'t) allocate",
    re.IGNORECASE,
)
_ADVICE = re.compile(
    r"\b(?:if|may|might|could|would|try|avoid|reduce|prevent|helps?|when|where|whether|consider|lower|warn\w*|hint"
    r"|risks?|please|will|refer|documentation|how to)\b",
    re.IGNORECASE,
)
_CODE_2 = re.compile(  # cudaErrorMemoryAllocation, CUDA_ERROR_OUT_OF_MEMORY, hipErrorOutOfMemory
    r"(?:cuda|hip)\w*[^\n]{0,60}\b(?:error|err|status|code|ret(?:urned)?)(?: code| number)?\W{0,3}2\b(?![.\d])",
    re.IGNORECASE,
)
_KILLED_FOR_MEMORY = re.compile(  # earlyoom, systemd-oomd, YARN, Kubernetes, Ray
    r"(?:kill|evict|terminat|SIGTERM|SIGKILL)[^\n]{0,200}"
    r"(?:memory (?:pressure|limit|usage)|(?:physical|virtual) memory|oom_score|out of memory|\bOOM\b)"
    r"|(?:memory (?:pressure|limits?)|out of memory|\boom)[^\n]{0,120}(?:kill|evict|terminat)"
    r"|\blow memory\b",
    re.IGNORECASE,
)
_POINTS_ELSEWHERE = re.compile(  # at the error of another process
    r"(?:see|check|look)\b[^\n]{0,80}\b(?:above|earlier|logs?|other ranks?)\b"
    r"|no longer alive|\bdied\b|abruptly|exited unexpectedly|BrokenProcessPool|EngineDeadError"
    r"|\bworkers?\b[^\n]{0,60}\b(?:crashed|exited|terminated)",
    re.IGNORECASE,
)

# Where a log speaks of failures and none is meant: a text in quotes, a row of a table, a dump of settings, a count of
# zero. The quoted message of an exception, or of a structured log, is meant.
_MEANT_QUOTE = re.compile(
    r"(?:(?:Error|Exception|Exit)\(|(?:[Ff]ailure|[Ee]rror)[ \w]{0,8}"
    r"|[\"'](?:msg|message|error|err|exception|exc_info|stack|event|log)[\"']: ?)\Z"
)
_TABLE_ROW = re.compile(r"\s*[|│┃║].*[|│┃║].*[|│┃║]")
_SETTING = re.compile(
    r"\s+(?!\s|exitcode|traceback|error|reason|message|what)[\"']?[a-z][\w.-]*[\"']?\s*[:=]\s"
    r"|\s*[\"']?[a-z]+_[a-z_]+[\"']?\s*[:=]\s|\s*--\w"
)
_COUNTER = re.compile(r"errors|kills|events|OOMs|count", re.IGNORECASE)
_ZERO_BEFORE = re.compile(r"(?:^|[\s=:])0\s+(?:[\w-]+\s+){0,2}\Z")
_ZERO_AFTER = re.compile(r"\w{0,12}\s?\w{0,12}\s?[:=]\s*0(?![.\d])")


def first_cause(text: str) -> Cause | None:
    """Return the cause named by the first matching rule of the catalogue; None without a match."""
    for needle, (cause, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in text and pattern.search(text):
            return cause
    return None


def cause_in_words(text: str) -> Cause | None:
    """Return memory of the host or of a device where a line that no rule knows says that none was to be had.

    A line of advice, or about memory of another kind, names nothing.
    """
    if _ADVICE.search(text):
        return None
    if _KILLED_FOR_MEMORY.search(text) and not _ON_DEVICE.search(text):
        return Cause.HOST_OOM
    return None if "=" in text else cause_of_message(text)


def cause_of_message(text: str) -> Cause | None:
    """Return the cause that an exception's message names by its words; None where it names none.

    Memory of no named place is the device's, since a training has most of its memory there.
    """
    if _NO_ALLOCATION.search(text):
        return None
    if _CODE_2.search(text):
        return Cause.DEVICE_OOM
    fails = _FAILURE.search(_ALLOCATION.sub("", text)) if _ALLOCATION.search(text) else None
    if fails and _ON_DEVICE.search(text):
        return Cause.HOST_OOM if _ON_HOST.search(text) else Cause.DEVICE_OOM
    if fails and _ON_HOST.search(text):
        return Cause.HOST_OOM
    return Cause.DEVICE_OOM if _UNPLACED.search(text) else None


def names_device(text: str) -> bool:
    """Return whether a line speaks of a device."""
    return _ON_DEVICE.search(text) is not None


def points_elsewhere(text: str) -> bool:
    """Return whether an exception says that the error of another process is the cause."""
    return _POINTS_ELSEWHERE.search(text) is not None


def is_quoted(text: str) -> bool:
    """Return whether a line only mentions a failure: in quotes, a table, a dump of settings, or as a count of zero."""
    if _TABLE_ROW.match(text) or _SETTING.match(text):
        return True
    match = _match_of(text)
    if match is None:
        return False
    before, after = text[: match.start()], text[match.end() :]
    is_zero = _ZERO_BEFORE.search(before) or _ZERO_AFTER.match(after)
    if is_zero and _COUNTER.search(text):
        return True
    for quote in "\"'":
        opened = before.rfind(quote)
        is_open = before.count(quote) % 2 and quote in after
        # an apostrophe within a word opens nothing
        if is_open and not before[:opened][-1:].isalnum():
            return _MEANT_QUOTE.search(before[:opened]) is None
    return False


def _match_of(text: str) -> re.Match[str] | None:
    """Return where a line names its cause."""
    for needle, (_, pattern) in zip(NEEDLES, RULES, strict=True):
        if needle in text and (match := pattern.search(text)):
            return match
    return _ALLOCATION.search(text)


def broken_extent(line: str) -> Extent:
    """Return whether a hardware error in a log line concerns a device or the node. A driver error concerns the node."""
    return Extent.NODE if _NODE_WIDE.search(line) else Extent.DEVICE
