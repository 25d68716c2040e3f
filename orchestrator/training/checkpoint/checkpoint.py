"""The canonical checkpoint: a torch.distributed.checkpoint folder that every engine at any world size reads and writes.

model.<name>                              fp32 master weight (or buffer), by whole-model name
optim.state.<name>.exp_avg, .exp_avg_sq   optimizer states of a parameter (here AdamW), fp32
optim.steps                               updates done, per group of parameters that thaw together
loss_scale                                fp16 only: the scale, and finite steps since it changed
step, samples                             optimizer steps done, samples consumed

With several recipes, names contain the recipe: model.<recipe>.<name>, optim.steps.<recipe>.

Parameters that no step trains (the base model under adapters) are not saved. Neither are param_groups and random
states: hyperparameters and seeds come from the job.
"""

from __future__ import annotations

import contextlib
import io
import os
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem, FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.fragment import (
    FragmentLoadPlanner,
    FragmentSavePlanner,
    Narrow,
    make_chunks,
)
from orchestrator.training.contract import loss_scale
from orchestrator.training.contract.engine import State


@frozen
class TrainingProgress:
    """How far a training is: optimizer steps done and samples consumed."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # consumed by them


@frozen
class SavedCheckpoint:
    """A complete checkpoint on disk, with its progress."""

    path: Path
    cursor: TrainingProgress


def save_state(
    folder: Path, state: State, progress: TrainingProgress, group: dist.ProcessGroup | None = None
) -> dict[str, checkpoint_folder.WrittenFile]:
    """Write and fsync the state to `folder`; return {file: size and checksum} of this rank's files.
    Collective.

    Nothing is gathered: each rank writes what it holds, and one of the ranks with the same value
    writes that value.
    """
    tree = {**state, "step": torch.tensor(progress.step), "samples": torch.tensor(progress.samples)}
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # one item at a time
    writer.fs = files = _ChecksummedFiles()
    with _reraise_own_out_of_memory():
        state_dict_saver.save(
            tree, storage_writer=writer, planner=FragmentSavePlanner(), process_group=group
        )
    return files.written


def load_state(folder: Path, state: State) -> None:
    """Fill the tensors of `state` in place from a checkpoint of any engine and world size.
    Collective.

    A loss scale keeps its value if the checkpoint, of another precision, has none. Raises SpecError
    if another name is missing in the checkpoint or has another shape there.
    """
    reader = FileSystemReader(folder)
    stored = reader.read_metadata().state_dict_metadata
    wanted = {
        name: value
        for name, value in state.items()
        if name in stored or not name.startswith(loss_scale.STATE)
    }
    for name, value in wanted.items():
        _check_stored_shape(folder, name, tuple(value.size()), stored.get(name))
    narrow = {name: value for name, value in wanted.items() if isinstance(value, Narrow)}
    wanted |= {name: value.make_fp32_buffers() for name, value in narrow.items()}
    with _reraise_own_out_of_memory():
        state_dict_loader.load(wanted, storage_reader=reader, planner=FragmentLoadPlanner())
    with torch.no_grad():
        for name, value in narrow.items():
            value.fill_from_fp32(wanted[name])


def _check_stored_shape(
    folder: Path, name: str, expected_shape: tuple[int, ...], stored: object
) -> None:
    """Raise SpecError unless the checkpoint has a tensor of this shape."""
    hint = "use the model, optimizer and training.freeze that wrote the checkpoint, or give the job a new name"
    if not isinstance(stored, TensorStorageMetadata):
        raise SpecError(f"the checkpoint has no {name}", source=str(folder), path=name, hint=hint)
    if tuple(stored.size) != expected_shape:
        raise SpecError(
            "the checkpoint has another shape",
            source=str(folder),
            path=name,
            got=tuple(stored.size),
            allowed=f"{expected_shape}, the model's",
            hint=hint,
        )


def open_checkpoint(folder: Path) -> SavedCheckpoint:
    """Return a complete checkpoint with its step and sample counts. Collective."""
    tree = {"step": torch.tensor(0), "samples": torch.tensor(0)}
    load_state(folder, tree)
    return SavedCheckpoint(
        path=folder, cursor=TrainingProgress(step=int(tree["step"]), samples=int(tree["samples"]))
    )


def collect_model_state(module: nn.Module, trained_names: frozenset[str]) -> dict[str, Any]:
    """Return {`model.<name>`: tensor} of the parameters in `trained_names` and of persistent
    buffers; they share memory.

    A parameter with several names appears once. Parameters that no step changes are left out.
    """
    saved_names = trained_names | {name for name, _ in module.named_buffers(remove_duplicate=False)}
    values = {name: value for name, value in module.state_dict().items() if name in saved_names}
    return {
        f"model.{name}": prepare_weight_for_saving(value) if name in trained_names else value
        for name, value in values.items()
    }


def prepare_weight_for_saving(weight: Tensor) -> Tensor | Narrow:
    """Return a weight in the form in which checkpoints store it (fp32 values), sharing its memory."""
    weight = weight.detach()
    if weight.dtype is not torch.bfloat16:
        return weight
    chunks = make_chunks(weight)
    return Narrow(chunks.parts, chunks.size())


def add_recipe_prefix(recipe_name: str, state: State) -> State:
    """Return the state with the recipe's name inserted in all names, as several recipes share a
    checkpoint; unchanged for "".

    `model.x` -> `model.<recipe>.x`, `optim.state.x` -> `optim.state.<recipe>.x`, others end in
    `.<recipe>`.
    """
    return (
        {_add_prefix(recipe_name, name): value for name, value in state.items()}
        if recipe_name
        else state
    )


def _add_prefix(recipe_name: str, state_name: str) -> str:
    kind = next((kind for kind in ("model.", "optim.state.") if state_name.startswith(kind)), None)
    return (
        f"{kind}{recipe_name}.{state_name.removeprefix(kind)}"
        if kind
        else f"{state_name}.{recipe_name}"
    )


AnyPath = str | os.PathLike[str]


class _ChecksummedFiles(FileSystem):
    """The file system of torch.distributed.checkpoint, which also computes a CRC-32 of every file
    that it writes.
    """

    def __init__(self) -> None:
        self.written: dict[str, checkpoint_folder.WrittenFile] = {}

    @contextlib.contextmanager
    def create_stream(self, path: AnyPath, mode: str) -> Iterator[io.IOBase]:
        with super().create_stream(path, mode) as raw:
            stream = _Checksummed(raw)
            yield stream
            self.written[Path(path).name] = checkpoint_folder.make_manifest_entry(
                stream.size_bytes, stream.crc
            )

    def rename(self, path: AnyPath, new_path: AnyPath) -> None:
        super().rename(path, new_path)
        self.written[Path(new_path).name] = self.written.pop(Path(path).name)


class _Checksummed(io.RawIOBase):
    """A sequentially written file with its size and CRC-32."""

    def __init__(self, raw: io.IOBase) -> None:
        self._raw = raw
        self.size_bytes = 0
        self.crc = 0

    def write(self, data: Any) -> int:
        count: int = self._raw.write(data)
        assert count == memoryview(data).nbytes, count
        self.crc = zlib.crc32(data, self.crc)
        self.size_bytes += count
        return count

    def tell(self) -> int:
        return self.size_bytes

    def fileno(self) -> int:
        self._raw.flush()
        return self._raw.fileno()

    def writable(self) -> bool:
        return True


@contextlib.contextmanager
def _reraise_own_out_of_memory() -> Iterator[None]:
    """Open a context that raises this rank's out-of-memory error itself; torch would raise one
    error with all ranks' exceptions.
    """
    try:
        yield
    except CheckpointException as failure:
        error = failure.failures.get(dist.get_rank() if dist.is_initialized() else 0)
        if error and isinstance(error[0], torch.OutOfMemoryError):
            raise error[0] from failure
        raise
