"""Which sentence in a log tells why a process ended? An ordered catalogue; the first match names the cause.

Texts come from the sources named beside each group. Read only after exit codes, reports and counters.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from enum import StrEnum


class Cause(StrEnum):
    """What a line of a log says, before other evidence confirms or denies it."""

    NOT_OOM = "not_oom"  # looks like memory and is not
    HANG = "hang"
    DEVICE_OOM = "gpu_oom"
    DEVICE_OOM_SUSPECT = "gpu_oom_suspect"  # only if the device was nearly full
    SHARED_MEMORY = "shm"
    HOST_OOM = "host_oom"
    HOST_OOM_SUSPECT = "host_oom_suspect"  # only if a kernel counter rose
    DISK_FULL = "disk_full"
    SECONDARY = "secondary"  # a survivor's complaint: look at the other ranks


@dataclass(frozen=True, slots=True)
class Match:
    """The cause, and the line that names it."""

    cause: Cause
    line: str


_CATALOGUE: tuple[tuple[Cause, tuple[str, ...]], ...] = (
    # PyTorch's allocator after ranks lost step with each other (NVIDIA/nccl issue 1284).
    (Cause.NOT_OOM, (r"Tried to allocate more than 1EB memory",)),
    # facebookresearch/audiocraft audiocraft/utils/deadlock.py ends itself by SIGKILL.
    (Cause.HANG, (r"Deadlock detector timed out, last stage was",)),
    # Ray's memory monitor; its exception shares PyTorch's name, so it must stand first.
    (Cause.HOST_OOM, (r"killed due to the node running low on memory", r"ray\.exceptions\.OutOfMemoryError")),
    (
        Cause.DEVICE_OOM,
        (
            r"\bOutOfMemoryError\b",  # torch.OutOfMemoryError, torch.cuda.OutOfMemoryError
            r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate",
            r"MPS backend out of memory",
            r"CUDA (?:driver )?error: out of memory",
            r"cudaErrorMemoryAllocation",
            r"CUDA_ERROR_OUT_OF_MEMORY",
            r"CU(?:[A-Z]+)_STATUS_ALLOC_FAILED",
            r"CUFFT_ALLOC_FAILED",
            r"Allocation on device(?: \d+ would exceed allowed memory)?",
            r"Cuda failure (?:\d+ )?'out of memory'",  # NCCL
            r"ncclUnhandledCudaError[^\n]*out of memory",
            r"Failed to CUDA (?:host )?c?alloc",
        ),
    ),
    (
        Cause.DEVICE_OOM_SUSPECT,
        (
            r"CUDNN_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
            r"Unable to find a valid cuDNN algorithm",
            r"unable to find an engine to execute this computation",
            r"CUBLAS_STATUS_(?:NOT_INITIALIZED|INTERNAL_ERROR)",
        ),
    ),
    # PyTorch's shared memory; its line ends in "No space left on device", so it stands before the disk.
    (
        Cause.SHARED_MEMORY,
        (
            r"unable to allocate shared memory\(shm\) for file </torch_",
            r"insufficient shared memory \(shm\)",
            r"killed by signal: Bus error",
            r"out of shared memory",
            r"unable to open shared memory object </torch_",
            r"unable to write to file </torch_",
            r"unable to mmap \d+ bytes from file </torch_",
            r"\bSIGBUS\b",
        ),
    ),
    (
        Cause.HOST_OOM,
        (
            r"DefaultCPUAllocator: (?:can't allocate|not enough) memory",  # c10/core/impl/alloc_cpu.cpp
            r"std::bad_alloc",
            r"(?<!\w)_?(?:Array)?MemoryError\b",  # Python, numpy
            r"\[Errno 12\] Cannot allocate memory",
            r"fork: Cannot allocate memory",
            r"DataLoader worker \(pid\(?s?\)? ?[\d, ]+\)? is killed by signal: Killed",
            r"Out of memory: Kill(?:ed)? process",  # kernel log
            r"oom-kill:",
            r"Memory cgroup out of memory",
        ),
    ),
    (
        Cause.HOST_OOM_SUSPECT,
        (
            r"exitcode\s*: -9 ",  # torchrun's summary
            r"died with <Signals\.SIGKILL: 9>",
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
_PATTERNS = tuple((cause, re.compile(pattern)) for cause, group in _CATALOGUE for pattern in group)
_EXCEPTION_LINE = re.compile(r"^(?:\[rank\d+\]: )?[\w.]+(?:Error|Exception|Interrupt)\b.*$", re.MULTILINE)

_FRAME_LINE = re.compile(r'^(?:\[rank\d+\]: )?\s+File "[^"]*", line \d+')
_INDENTED = re.compile(r"^(?:\[rank\d+\]: )? {4}")


def read_log(text: str, command: tuple[str, ...] = ()) -> Match | None:
    """The cause that a log names, or None where it names none.

    The last exception line is asked first. Source lines that a traceback quotes and lines that echo the command are not
    read, since both may mention anything.
    """
    lines = [line for line in _without_quoted_source(text.splitlines()) if not _echoes(line, command)]
    exceptions = [line for line in lines if _EXCEPTION_LINE.match(line)]
    if exceptions:
        match = _first(exceptions[-1])
        if match and match.cause is not Cause.SECONDARY:
            return match
    return _first("\n".join(lines))


def last_traceback(text: str) -> str:
    """The last Python traceback of a log, or its last 20 lines where it has none."""
    start = text.rfind("Traceback (most recent call last)")
    return text[start:].strip() if start >= 0 else "\n".join(text.splitlines()[-20:])


def _first(text: str) -> Match | None:
    for cause, pattern in _PATTERNS:
        found = pattern.search(text)
        if found:
            start = text.rfind("\n", 0, found.start()) + 1
            end = text.find("\n", found.end())
            return Match(cause, text[start : end if end >= 0 else None].strip())
    return None


def _without_quoted_source(lines: Iterable[str]) -> Iterator[str]:
    quoting = False
    for line in lines:
        quoting = quoting and bool(_INDENTED.match(line))
        if not quoting:
            yield line
        quoting = quoting or bool(_FRAME_LINE.match(line))


def _echoes(line: str, command: tuple[str, ...]) -> bool:
    return len(command) > 1 and all(word in line for word in command)
