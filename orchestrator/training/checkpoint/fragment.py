"""Pieces of flattened tensors inside a torch.distributed.checkpoint.

DeepSpeed's ranks own runs of elements of a flattened parameter; the checkpoint stores rectangles of whole tensors. A
run of a row-major tensor is a few rectangles, each contiguous in the run. So every rank writes and reads its own memory
in place, and nothing is gathered.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, DefaultSavePlanner
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
)
from torch.distributed.checkpoint.planner import TensorWriteData, WriteItem, WriteItemType
from torch.distributed.tensor import DTensor

from orchestrator.specs.frozen import frozen
from orchestrator.training.guard.virtual_device import use_host_memory

Shape = tuple[int, ...]


@frozen
class Rectangle:
    """A rectangular part of a tensor: offset and size per axis."""

    offsets: Shape
    sizes: Shape


def list_rectangles(shape: Shape, start: int, stop: int) -> Iterator[Rectangle]:
    """Yield the rectangles that cover elements `start` to `stop` (excluded) of a row-major tensor; at most 2n-1."""
    assert 0 <= start <= stop <= math.prod(shape), (shape, start, stop)
    row_size = math.prod(shape[1:])
    while start < stop:
        row, within = divmod(start, row_size)
        rows = (stop - start) // row_size if within == 0 else 0
        if rows:
            yield Rectangle(offsets=(row, *(0,) * (len(shape) - 1)), sizes=(rows, *shape[1:]))
            start += rows * row_size
            continue
        end = min(stop, (row + 1) * row_size)
        for inner in list_rectangles(shape[1:], within, end - row * row_size):
            yield Rectangle(offsets=(row, *inner.offsets), sizes=(1, *inner.sizes))
        start = end


class Chunks:
    """A rank's rectangles of a tensor of `shape`, by offset, in the form that checkpoints store.

    `stored_dtype`: dtype of the values in a checkpoint, where it differs from the dtype of the
    rank's parts.
    """

    stored_dtype: torch.dtype | None = None

    def __init__(self, parts: Mapping[Shape, Tensor], shape: torch.Size) -> None:
        self.parts = parts
        self._shape = shape

    def size(self) -> torch.Size:
        return self._shape

    def __create_write_items__(self, name: str, _object: object) -> list[WriteItem]:
        return [
            WriteItem(
                index=MetadataIndex(name, chunk.offsets),
                type=WriteItemType.SHARD,
                tensor_data=TensorWriteData(
                    chunk=chunk,
                    properties=TensorProperties(dtype=self.get_dtype(part)),
                    size=self._shape,
                ),
            )
            for chunk, part in zip(self.__create_chunk_list__(), self.parts.values(), strict=True)
        ]

    def __create_chunk_list__(self) -> list[ChunkStorageMetadata]:
        return [
            ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=part.shape)
            for offsets, part in self.parts.items()
        ]

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        assert index.offset is not None, index
        return self.parts[tuple(index.offset)]

    def get_dtype(self, part: Tensor) -> torch.dtype:
        """Return the dtype in which a checkpoint stores this part."""
        return self.stored_dtype or part.dtype


class Narrow(Chunks):
    """Rectangles whose values a rank holds quantised or rounded, while a checkpoint stores them in
    fp32.
    """

    stored_dtype = torch.float32

    def __get_tensor_shard__(self, index: MetadataIndex) -> Tensor:
        part = super().__get_tensor_shard__(index)
        return part.float() if part.dtype is torch.bfloat16 else part.dequantize()

    def make_fp32_buffers(self) -> Chunks:
        """Return empty fp32 rectangles in host memory, into which values can be loaded."""
        with use_host_memory():
            return Chunks(
                {offset: torch.empty(part.shape) for offset, part in self.parts.items()},
                self.size(),
            )

    def fill_from_fp32(self, values: Chunks) -> None:
        """Quantise or round these fp32 values into the rank's memory."""
        for offset, part in self.parts.items():
            part.copy_(values.parts[offset].to(part.device))


class Fragment(Chunks):
    """Consecutive elements of a tensor of `shape`, from element `start`, stored in the memory
    `flat`.
    """

    def __init__(self, flat: Tensor, start: int, shape: torch.Size) -> None:
        assert flat.dim() == 1, flat.shape
        parts: dict[Shape, Tensor] = {}
        position = 0
        for part in list_rectangles(tuple(shape), start, start + flat.numel()):
            count = math.prod(part.sizes)
            parts[part.offsets] = flat.narrow(0, position, count).view(part.sizes)
            position += count
        super().__init__(parts, shape)


def get_local_part(tensor: Tensor) -> Tensor:
    """Return the rank's part of a distributed tensor; any other tensor unchanged."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def make_chunks(value: Tensor | Chunks) -> Chunks:
    """Return the rank's part of a value in the state, sharing its memory; for a DTensor its local
    shard.
    """
    if isinstance(value, Chunks):
        return value
    if not isinstance(value, DTensor):
        return Chunks({(0,) * value.dim(): value}, value.size())
    if value.device_mesh.get_coordinate() is None:  # other ranks have it
        return Chunks({}, value.size())
    (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
    local = value.to_local()
    offsets = tuple(chunk.offsets)
    return Chunks({offsets: local} if local.numel() or not value.numel() else {}, value.size())


class FragmentSavePlanner(DefaultSavePlanner):
    """The default save planner, with support for Chunks."""

    def lookup_object(self, index: MetadataIndex) -> object:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index)
            if isinstance(value, Chunks)
            else super().lookup_object(index)
        )


class FragmentLoadPlanner(DefaultLoadPlanner):
    """The default load planner, with support for Chunks."""

    def set_up_planner(
        self,
        state_dict: dict[str, Any],
        metadata: Metadata | None = None,
        is_coordinator: bool = False,
    ) -> None:
        tensors = {
            name: value for name, value in state_dict.items() if not isinstance(value, Chunks)
        }
        super().set_up_planner(
            tensors, metadata, is_coordinator
        )  # replaces values of unknown types by None
        self.state_dict = {**state_dict, **self.state_dict}

    def lookup_tensor(self, index: MetadataIndex) -> Tensor:
        value = self.state_dict[index.fqn]
        return (
            value.__get_tensor_shard__(index)
            if isinstance(value, Chunks)
            else super().lookup_tensor(index)
        )
