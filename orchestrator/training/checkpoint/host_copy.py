"""A copy of a rank's part of the state in host memory, which every checkpoint reuses."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.training.checkpoint.fragment import Chunks, Shape, get_local_part, make_chunks
from orchestrator.training.guard.virtual_device import use_host_memory

ALIGNMENT_BYTES = 64  # a cache line: copies need not split one

Part = tuple[str, Shape, int]  # canonical name, where the part begins, bytes


class HostCopy:
    """A copy of this rank's part of a state in host memory; `state` holds it after `copy_state`.

    Every part of a value is copied by exactly one rank that holds it. The memory is allocated at
    construction, and pinned if the state is on CUDA.
    """

    def __init__(
        self, state: Mapping[str, Any], device: torch.device, group: dist.ProcessGroup
    ) -> None:
        """Allocate the memory; all ranks of `group` must call it."""
        self._pinned: Tensor | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.no_grad(), use_host_memory():
            values = {name: make_chunks(value) for name, value in state.items()}
            local = []
            for name, value in values.items():
                for offset in value.parts:
                    local.append((name, offset, _compute_part_bytes(value, offset)))
            everyone: list[Sequence[Part]] = [[] for _ in range(group.size())]
            dist.all_gather_object(everyone, local, group=group)
            mine = divide_parts(everyone)[group.rank()]
            self._buffers = self._allocate(
                [(name, offset, values[name]) for name, offset, _ in mine]
            )
        parts: dict[str, dict[Shape, Tensor]] = {}
        for (name, offset), buffer in self._buffers.items():
            parts.setdefault(name, {})[offset] = buffer
        self.state = {name: Chunks(part, values[name].size()) for name, part in parts.items()}

    def copy_state(self, state: Mapping[str, Any]) -> None:
        """Copy this rank's part of `state`, whose names and shapes must be those given at
        construction.

        On CUDA the copies are asynchronous: call `wait` before the copies are read.
        """
        with torch.no_grad(), use_host_memory():
            for (name, offset), buffer in self._buffers.items():
                buffer.copy_(_get_part(state[name], offset), non_blocking=True)
        if self._copied:
            self._copied.record()

    def wait(self) -> None:
        """Block until the copies of the last `copy_state` are complete. Thread-safe."""
        if self._copied:
            self._copied.synchronize()

    def release(self) -> None:
        """Drop the memory; it is freed once no other reference holds it."""
        if self._pinned is not None:
            _check_cuda_result(_cudart().cudaHostUnregister(self._pinned.data_ptr()))
        self._pinned = None
        self._buffers = {}
        self.state = {}

    def _allocate(
        self, parts: Sequence[tuple[str, Shape, Chunks]]
    ) -> dict[tuple[str, Shape], Tensor]:
        """Return {part: buffer}, all in one memory mapping, each a storage that is written without
        a copy.

        torch's pinned allocator is not used: it rounds up to powers of two.
        """
        sizes = [
            -(-_compute_part_bytes(value, start) // ALIGNMENT_BYTES) * ALIGNMENT_BYTES
            for _, start, value in parts
        ]
        memory = mmap.mmap(
            -1, max(sum(sizes), mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        )
        whole = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # touches every page
        if self._copied:
            _check_cuda_result(_cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))
            self._pinned = whole
        buffers = {}
        offset = 0
        for (name, start, value), size in zip(parts, sizes, strict=True):
            part = value.parts[start]
            dtype = value.get_dtype(part)
            if part.numel():
                flat = torch.frombuffer(memory, dtype=dtype, count=part.numel(), offset=offset)
            else:
                flat = torch.empty(0, dtype=dtype)
            buffers[name, start] = flat.view(part.shape)
            offset += size
        return buffers


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check_cuda_result(result: Any) -> None:
    if int(result):
        raise RuntimeError(
            f"host memory for checkpoints cannot be pinned: CUDA error {int(result)}"
        )


def divide_parts(parts_by_rank: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """Return, for each rank, the parts that it writes: every part once, balanced by bytes.

    `parts_by_rank` are the parts that each rank holds. A part that one rank holds is written by
    that rank. The others go, largest first, to the holder with the fewest bytes.
    """
    holders: dict[Part, list[int]] = {}
    for rank, local in enumerate(parts_by_rank):
        for part in local:
            holders.setdefault(part, []).append(rank)
    shared: list[list[Part]] = [[] for _ in parts_by_rank]
    load_bytes = [0] * len(parts_by_rank)
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -part[2], part)):
        rank = min(holders[part], key=load_bytes.__getitem__)
        shared[rank].append(part)
        load_bytes[rank] += part[2]
    return shared


def _compute_part_bytes(chunks: Chunks, offset: Shape) -> int:
    part = chunks.parts[offset]
    return part.numel() * chunks.get_dtype(part).itemsize


def _get_part(value: Any, offset: Shape) -> Tensor:
    """Return the rank's part of a value at this offset; faster than `make_chunks`, as it runs
    between two steps.
    """
    return value.parts[offset] if isinstance(value, Chunks) else get_local_part(value)
