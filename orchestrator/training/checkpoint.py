"""The canonical checkpoint: a torch.distributed.checkpoint folder that every engine at any world size reads and writes.

model.<name>                              fp32 master weight (or buffer), by whole-model name
optim.state.<name>.exp_avg, .exp_avg_sq   Adam's moments of a parameter, fp32
step, samples                             optimizer steps done (Adam's too), samples consumed: where the data go on
There are no param_groups: hyperparameters come from the job, not from the checkpoint.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.checkpoint import state_dict_loader, state_dict_saver
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter

from orchestrator.training.adam import MOMENTS
from orchestrator.training.fragment import FragmentLoadPlanner, FragmentSavePlanner

State = Mapping[str, Any]  # canonical name -> Tensor, DTensor or Fragment that is read and written in place


@dataclass(frozen=True, slots=True, kw_only=True)
class Cursor:
    """How far a training is."""

    step: int = 0  # optimizer steps done
    samples: int = 0  # consumed by them


@dataclass(frozen=True, slots=True, kw_only=True)
class Saved:
    """A complete checkpoint."""

    path: Path
    cursor: Cursor


def save(folder: Path, state: State, cursor: Cursor) -> None:
    """Write the state to `folder`; every rank calls it. Nothing is gathered: each rank writes what it holds."""
    tree = {**state, "step": torch.tensor(cursor.step), "samples": torch.tensor(cursor.samples)}
    writer = FileSystemWriter(folder, per_thread_copy_ahead=0)  # one item at a time
    with _own_out_of_memory():
        state_dict_saver.save(tree, storage_writer=writer, planner=FragmentSavePlanner())


def load(folder: Path, state: State) -> None:
    """Fill the tensors of `state` in place from a checkpoint of any engine at any world size; every rank calls it."""
    with _own_out_of_memory():
        state_dict_loader.load(dict(state), storage_reader=FileSystemReader(folder), planner=FragmentLoadPlanner())


def opened(folder: Path) -> Saved:
    """A complete checkpoint, and how far its training is; every rank calls it."""
    tree = {"step": torch.tensor(0), "samples": torch.tensor(0)}
    load(folder, tree)
    return Saved(path=folder, cursor=Cursor(step=int(tree["step"]), samples=int(tree["samples"])))


def model_state(module: nn.Module) -> dict[str, Tensor]:
    """`model.<name>` of every parameter (once, where shared) and persistent buffer, sharing their memory."""
    parameters = dict(module.named_parameters())
    shared = {name for name, _ in module.named_parameters(remove_duplicate=False)} - set(parameters)
    values = {name: value for name, value in module.state_dict().items() if name not in shared}
    return {f"model.{name}": value.detach() for name, value in values.items()}


def adam_state(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """`optim.state.<name>.<moment>` of every trained parameter, sharing the optimizer's memory."""
    return {
        f"optim.state.{name}.{moment}": optimizer.state[parameter][moment]
        for name, parameter in module.named_parameters()
        if parameter.requires_grad
        for moment in MOMENTS
    }


@contextlib.contextmanager
def _own_out_of_memory() -> Iterator[None]:
    """Raise this rank's out-of-memory error as itself: torch wraps whatever fails on any rank."""
    try:
        yield
    except CheckpointException as failure:
        own = failure.failures.get(dist.get_rank() if dist.is_initialized() else 0)
        if own and isinstance(own[0], torch.OutOfMemoryError):
            raise own[0] from failure
        raise
