"""The canonical checkpoint: a torch.distributed.checkpoint folder that every engine at any world size reads and writes.

model.<name>                              fp32 master weight (or buffer), by whole-model name
optim.state.<name>.exp_avg, .exp_avg_sq   what the optimizer keeps of a parameter (here AdamW), fp32
optim.steps                               updates done, per group of parameters that thaw together
loss_scale                                fp16 only: the scale, and finite steps since it changed
step, samples                             optimizer steps done, samples consumed: where the data go on
Of several recipes that train in turn, each has its name before its own: model.<recipe>.<name>, optim.steps.<recipe>.
Parameters that no step trains (the base under adapters) come with the model. There are no param_groups and no random
states: hyperparameters and seeds come from the job, not from the checkpoint.
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

from orchestrator.training import loss_scale
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
    """Fill the tensors of `state` in place from a checkpoint of any engine at any world size; every rank calls it.

    A loss scale stays as it is where the checkpoint, of another precision, has none.
    """
    reader = FileSystemReader(folder)
    known = reader.read_metadata().state_dict_metadata
    wanted = {name: value for name, value in state.items() if name in known or not name.startswith(loss_scale.STATE)}
    with _own_out_of_memory():
        state_dict_loader.load(wanted, storage_reader=reader, planner=FragmentLoadPlanner())


def opened(folder: Path) -> Saved:
    """A complete checkpoint, and how far its training is; every rank calls it."""
    tree = {"step": torch.tensor(0), "samples": torch.tensor(0)}
    load(folder, tree)
    return Saved(path=folder, cursor=Cursor(step=int(tree["step"]), samples=int(tree["samples"])))


def model_state(module: nn.Module, changing: frozenset[str]) -> dict[str, Tensor]:
    """`model.<name>` of the parameters named in `changing` and of every persistent buffer, sharing their memory.

    A shared parameter appears once. What no step changes comes with the model and is not saved.
    """
    parameters = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    values = {name: value for name, value in module.state_dict().items() if name in changing or name not in parameters}
    return {f"model.{name}": value.detach() for name, value in values.items()}


def of_recipe(recipe: str, state: State) -> State:
    """The state with the recipe's name in all names, where it has one: so that states of several recipes fit together.

    `model.x` -> `model.<recipe>.x`, `optim.state.x` -> `optim.state.<recipe>.x`, others end in `.<recipe>`.
    """
    return {_named(recipe, name): value for name, value in state.items()} if recipe else state


def _named(recipe: str, name: str) -> str:
    kind = next((kind for kind in ("model.", "optim.state.") if name.startswith(kind)), None)
    return f"{kind}{recipe}.{name.removeprefix(kind)}" if kind else f"{name}.{recipe}"


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
