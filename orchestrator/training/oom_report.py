"""Did the memory of a device run out, and what does the exception say about it? Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator

BYTES = {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
AMOUNT = r"([\d.]+) ([KMGT]?i?B)"

# Texts of PyTorch's allocators, the CUDA runtime and its libraries, and NCCL (pytorch/pytorch, NVIDIA/nccl).
OUT_OF_MEMORY = re.compile(
    r"(?:CUDA|HIP|XPU) out of memory\. Tried to allocate"
    r"|MPS backend out of memory"
    r"|CUDA (?:driver )?error: out of memory"
    r"|cudaErrorMemoryAllocation"
    r"|CUDA_ERROR_OUT_OF_MEMORY"
    r"|CU[A-Z]+_STATUS_ALLOC_FAILED"
    r"|CUFFT_ALLOC_FAILED"
    r"|Allocation on device(?: \d+ would exceed allowed memory)?"
    r"|Cuda failure (?:\d+ )?'out of memory'"
    r"|ncclUnhandledCudaError[^\n]*out of memory"
    r"|Failed to CUDA (?:calloc|host alloc)"
)
NOT_OUT_OF_MEMORY = "Tried to allocate more than 1EB memory"  # desynchronised ranks (NVIDIA/nccl issue 1284)
OUT_OF_MEMORY_TYPES = (("torch", "OutOfMemoryError"), ("torch.cuda", "OutOfMemoryError"))

REQUESTED = re.compile(rf"Tried to allocate {AMOUNT}")
ALLOWED = re.compile(rf"{AMOUNT} allowed")  # a cap set by torch.cuda.set_per_process_memory_fraction
CAPACITY = (re.compile(rf"total capac(?:it)?y of {AMOUNT}"), re.compile(rf"; {AMOUNT} total capac(?:it)?y"))
FREE = (re.compile(rf"of which {AMOUNT} is free"), re.compile(rf"; {AMOUNT} free"))
OWN = re.compile(rf"this process has {AMOUNT} memory in use")
FOREIGN = re.compile(rf"(?<!this )\bProcess \d+ has {AMOUNT} memory in use")


def out_of_memory(error: BaseException) -> BaseException | None:
    """The out-of-memory exception that `error` is, or was raised from or after; None where there is none."""
    return next(filter(_is_out_of_memory, _chain(error)), None)


def requested_bytes(message: str) -> int | None:
    """Bytes that the failed allocation asked for, or None where the message does not say."""
    return _amount(REQUESTED.search(message))


def capacity_bytes(message: str) -> int | None:
    """Bytes of the device, or of this process's share of it where one is set; None where the message does not say."""
    return _first((ALLOWED, *CAPACITY), message)


def foreign_bytes(message: str) -> int:
    """Bytes that other processes hold on the device as far as the message tells, else 0."""
    named = [_amount(match) or 0 for match in FOREIGN.finditer(message)]
    total, free, own = _first(CAPACITY, message), _first(FREE, message), _amount(OWN.search(message))
    if named or total is None or free is None or own is None:
        return sum(named)
    return max(total - free - own, 0)


def _is_out_of_memory(error: BaseException) -> bool:
    message = str(error)
    if NOT_OUT_OF_MEMORY in message:
        return False
    types = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    if types.intersection(OUT_OF_MEMORY_TYPES):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(message) is not None


def _chain(error: BaseException) -> Iterator[BaseException]:
    """The error, then what it was raised from and what was being handled; each once."""
    waiting: list[BaseException | None] = [error]
    seen: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is not None and id(current) not in seen:
            seen.add(id(current))
            yield current
            waiting += [current.__cause__, current.__context__]


def _first(patterns: tuple[re.Pattern[str], ...], message: str) -> int | None:
    return next((_amount(match) for match in (pattern.search(message) for pattern in patterns) if match), None)


def _amount(match: re.Match[str] | None) -> int | None:
    return round(float(match[1]) * BYTES[match[2]]) if match and match[2] in BYTES else None
