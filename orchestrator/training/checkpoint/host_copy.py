"""What a rank writes of a state, copied into host memory that is used again for every checkpoint."""

from __future__ import annotations

import mmap
from collections.abc import Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.training.checkpoint.fragment import Chunks, Shape, chunks_of
from orchestrator.training.guard.virtual_device import host_memory

ALIGNMENT_BYTES = 64  # a cache line: copies need not split one

Part = tuple[str, Shape, int]  # canonical name, where the part begins, bytes


class HostCopy:
    """`state` holds, after `take`, this rank's share of the state it was made for, as host memory of its own.

    Every part of a value is in the share of one rank that holds it. The memory is pinned where the state is on CUDA;
    it is taken at once, not at the first copy.
    """

    def __init__(self, state: Mapping[str, Any], device: torch.device, group: dist.ProcessGroup) -> None:
        """Collective over `group`."""
        self._pinned: Tensor | None = None
        self._copied = torch.cuda.Event() if device.type == "cuda" else None  # type: ignore[no-untyped-call]
        with torch.no_grad(), host_memory():
            values = {name: chunks_of(value) for name, value in state.items()}
            held = [(name, at, part.nbytes) for name, value in values.items() for at, part in value.held.items()]
            everyone: list[Sequence[Part]] = [[] for _ in range(group.size())]
            dist.all_gather_object(everyone, held, group=group)
            mine = shares(everyone)[group.rank()]
            self._buffers = self._allocate([(name, at, values[name].held[at]) for name, at, _ in mine])
        parts: dict[str, dict[Shape, Tensor]] = {}
        for (name, at), buffer in self._buffers.items():
            parts.setdefault(name, {})[at] = buffer
        self.state = {name: Chunks(part, values[name].size()) for name, part in parts.items()}

    def take(self, state: Mapping[str, Any]) -> None:
        """Copy this rank's share of `state`, which has the same values as the one it was made for.

        On CUDA the copies are queued behind what the device does: call `wait` before reading them.
        """
        with torch.no_grad(), host_memory():
            for (name, at), buffer in self._buffers.items():
                buffer.copy_(_part(state[name], at), non_blocking=True)
        if self._copied:
            self._copied.record()

    def wait(self) -> None:
        """Return when the copies of the last `take` are there; from any thread."""
        if self._copied:
            self._copied.synchronize()

    def release(self) -> None:
        """Give the memory back, in so far as nobody else holds it."""
        if self._pinned is not None:
            _check(_cudart().cudaHostUnregister(self._pinned.data_ptr()))
        self._pinned, self._buffers, self.state = None, {}, {}

    def _allocate(self, parts: Sequence[tuple[str, Shape, Tensor]]) -> dict[tuple[str, Shape], Tensor]:
        """A buffer for each part, all in one mapping, each with a storage of its own: so it is written as it is.

        Not torch's pinned allocator, which rounds up to powers of two.
        """
        sizes = [-(-part.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for _, _, part in parts]
        memory = mmap.mmap(-1, max(sum(sizes), mmap.PAGESIZE), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        whole = torch.frombuffer(memory, dtype=torch.uint8).zero_()  # the pages are there from now on
        if self._copied:
            _check(_cudart().cudaHostRegister(whole.data_ptr(), whole.nbytes, 0))
            self._pinned = whole
        buffers, offset = {}, 0
        for (name, at, part), size in zip(parts, sizes, strict=True):
            if part.numel():
                flat = torch.frombuffer(memory, dtype=part.dtype, count=part.numel(), offset=offset)
            else:
                flat = torch.empty(0, dtype=part.dtype)
            buffers[name, at] = flat.view(part.shape)
            offset += size
        return buffers


def _cudart() -> Any:
    return torch.cuda.cudart()  # type: ignore[no-untyped-call]


def _check(result: Any) -> None:
    if int(result):
        raise RuntimeError(f"host memory for checkpoints cannot be pinned: CUDA error {int(result)}")


def shares(everyone: Sequence[Sequence[Part]]) -> list[list[Part]]:
    """What each rank writes, of what each rank holds: every part once, and as equal in bytes as that allows.

    What only one rank holds is its own; the rest goes, largest first, to the holder with least.
    """
    holders: dict[Part, list[int]] = {}
    for rank, held in enumerate(everyone):
        for part in held:
            holders.setdefault(part, []).append(rank)
    found: list[list[Part]] = [[] for _ in everyone]
    load_bytes = [0] * len(everyone)
    for part in sorted(holders, key=lambda part: (len(holders[part]) > 1, -part[2], part)):
        rank = min(holders[part], key=load_bytes.__getitem__)
        found[rank].append(part)
        load_bytes[rank] += part[2]
    return found


def _part(value: Any, at: Shape) -> Tensor:
    """The part of a value that begins there; cheaper than `chunks_of`, since this happens between two steps."""
    if isinstance(value, Chunks):
        return value.held[at]
    return value.to_local() if isinstance(value, DTensor) else value
