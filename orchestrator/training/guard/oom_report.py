"""Recognises device out-of-memory errors, and parses the byte counts in their messages. Standard library only."""

from __future__ import annotations

import re
from collections.abc import Iterator

BYTES = {"B": 1, "bytes": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30, "TiB": 2**40}
AMOUNT = r"([\d.]+) ([KMGT]?i?B|bytes)"

# Texts of PyTorch's allocators, the CUDA runtime and its libraries, and NCCL (pytorch/pytorch,
# NVIDIA/nccl).
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
# desynchronised ranks (NVIDIA/nccl issue 1284)
NOT_OUT_OF_MEMORY = "Tried to allocate more than 1EB memory"
OUT_OF_MEMORY_TYPES = (("torch", "OutOfMemoryError"), ("torch.cuda", "OutOfMemoryError"))


def _compile_patterns(*texts: str) -> tuple[re.Pattern[str], ...]:
    """Return the texts compiled as patterns, in which AMOUNT stands for a number of bytes with its
    unit.
    """
    return tuple(re.compile(text.replace("AMOUNT", AMOUNT)) for text in texts)


# Three generations of PyTorch's message, and that of its asynchronous allocator.
REQUESTED = _compile_patterns("Tried to allocate AMOUNT", "Requested +: AMOUNT")
(ALLOWED,) = _compile_patterns(
    "AMOUNT allowed"
)  # a cap set by torch.cuda.set_per_process_memory_fraction
CAPACITY = _compile_patterns(
    "total capaci?ty of AMOUNT",  # 2.1 misspells it
    "; AMOUNT total capaci?ty",
    "Device limit +: AMOUNT",
)
FREE = _compile_patterns(
    "of which AMOUNT is free", "; AMOUNT free", r"Free \(according to CUDA\): AMOUNT"
)
ALLOCATED = _compile_patterns(
    "Of the allocated memory AMOUNT is allocated by PyTorch",
    "; AMOUNT already allocated",
    "Currently allocated +: AMOUNT",
)
RESERVED = _compile_patterns("; AMOUNT reserved in total by PyTorch", "; AMOUNT cached")
UNALLOCATED = _compile_patterns("AMOUNT is reserved by PyTorch but unallocated")
OWN = _compile_patterns("this process has AMOUNT memory in use")
(NAMED,) = _compile_patterns(r"(?<!this )\bProcess \d+ has AMOUNT memory in use")
# Memory that is neither free nor PyTorch's counts as CUDA context and desktop, up to this or a
# quarter of the device.
# A context has 0.47 to 1.78 GiB (stas00/ml-engineering, training/performance/README.md).
OVERHEAD_BYTES = 2 * 2**30
ROUNDING_BYTES = 2**25  # messages give hundredths of a GiB


def find_oom_exception(error: BaseException) -> BaseException | None:
    """Return the out-of-memory exception in the chain of `error` (itself, causes, contexts); None
    without one.
    """
    return next(filter(_is_out_of_memory, _list_exception_chain(error)), None)


def parse_requested_bytes(message: str) -> int | None:
    """Return the bytes that the failed allocation requested; None if the message does not say."""
    return _find_first_amount(REQUESTED, message)


def parse_capacity_bytes(message: str) -> int | None:
    """Return the bytes of the device, or of this process's cap if one is set; None if the message
    has neither.
    """
    return _find_first_amount((ALLOWED, *CAPACITY), message)


def has_process_cap(message: str) -> bool:
    """Return whether the message says that PyTorch's allocator has its own cap.

    Other processes' memory does not reduce that cap.
    """
    return ALLOWED.search(message) is not None


def parse_free_bytes(message: str) -> int | None:
    """Return the free bytes of the device; None if the message does not say."""
    return _find_first_amount(FREE, message)


def parse_allocated_bytes(message: str) -> int | None:
    """Return the bytes of live tensors, else of all process memory; None if the message has neither."""
    return _find_first_amount((*ALLOCATED, *OWN), message)


def parse_unallocated_bytes(message: str) -> int | None:
    """Return the bytes reserved by PyTorch but not allocated; None if the message does not say."""
    reserved = _find_first_amount(RESERVED, message)
    allocated = _find_first_amount(ALLOCATED, message)
    if reserved is not None and allocated is not None:
        return max(reserved - allocated, 0)
    return _find_first_amount(UNALLOCATED, message)


def parse_foreign_bytes(message: str) -> int:
    """Return the bytes that other processes hold on the device, as far as the message lists them; 0
    where it lists none.

    PyTorch lists every process that NVML reports except its own. In a container it cannot recognise
    its own, since NVML reports host process ids. Then the smallest listed process that can hold
    PyTorch's bytes counts as this one.
    """
    named = [_parse_amount(match) or 0 for match in NAMED.finditer(message)]
    own_bytes = _find_first_amount(OWN, message)
    allocated = _find_first_amount(ALLOCATED, message)
    torch_bytes = None if allocated is None else allocated + (parse_unallocated_bytes(message) or 0)
    if (
        own_bytes is None
        and torch_bytes is not None
        and any(count >= torch_bytes for count in named)
    ):
        named.remove(min(count for count in named if count >= torch_bytes))
        return sum(named)
    total = _find_first_amount(CAPACITY, message)
    free = parse_free_bytes(message)
    if named or total is None or free is None:
        return sum(named)
    if own_bytes is not None:
        rest = total - free - own_bytes
        tolerance_bytes = ROUNDING_BYTES
    else:
        rest = 0 if torch_bytes is None else total - free - torch_bytes
        tolerance_bytes = max(OVERHEAD_BYTES, total // 4)
    return rest if rest > tolerance_bytes else 0


def _is_out_of_memory(error: BaseException) -> bool:
    message = str(error)
    if NOT_OUT_OF_MEMORY in message:
        return False
    types = {(kind.__module__, kind.__name__) for kind in type(error).__mro__}
    if types.intersection(OUT_OF_MEMORY_TYPES):
        return True
    return isinstance(error, RuntimeError) and OUT_OF_MEMORY.search(message) is not None


def _list_exception_chain(error: BaseException) -> Iterator[BaseException]:
    """Yield the error, then its causes and contexts, each once."""
    waiting: list[BaseException | None] = [error]
    visited: set[int] = set()
    while waiting:
        current = waiting.pop(0)
        if current is not None and id(current) not in visited:
            visited.add(id(current))
            yield current
            waiting += [current.__cause__, current.__context__]


def _find_first_amount(patterns: tuple[re.Pattern[str], ...], message: str) -> int | None:
    return next(
        (
            _parse_amount(match)
            for match in (pattern.search(message) for pattern in patterns)
            if match
        ),
        None,
    )


def _parse_amount(match: re.Match[str] | None) -> int | None:
    return round(float(match[1]) * BYTES[match[2]]) if match and match[2] in BYTES else None
