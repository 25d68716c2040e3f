"""The contract between a model and the engines. A factory returns a Recipe; the built-in decoder is one."""

from __future__ import annotations

import hashlib
import importlib.util
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import field
from pathlib import Path
from typing import Protocol

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import ParallelStyle

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.replace import replace
from orchestrator.training.contract.context import Context
from orchestrator.training.contract.dispatch import Dispatch

IGNORED_LABEL = -100  # torch.nn.functional.cross_entropy's default ignore_index

Batch = tuple[Tensor, ...]


class Dataset(Protocol):
    """Samples by index, the same on every rank."""

    def __len__(self) -> int: ...

    def token_count(self, index: int) -> int:
        """Return how many terms this sample adds to the loss sum: its labelled tokens, or 1 for a
        classified image.
        """

    def batch(self, indices: Sequence[int]) -> Batch:
        """Return the samples as tensors in host memory; axis 0 counts samples."""


@frozen
class Stages:
    """The rules for splitting a module into pipeline stages, between its layers.

    - `first`, `last`: submodules, by whole-model name, of the first and the last stage only; None on other stages.
    - `hidden(module, x)` runs the stage. `x` is `batch[0]` on the first stage, else the previous stage's hidden states.
    - `loss_sum(module, hidden, labels)` ends the last stage; `labels` is `batch[1]`.

    On a stage, layers of other stages return their first input unchanged.
    """

    first: tuple[str, ...]
    last: tuple[str, ...]
    hidden: Callable[[nn.Module, Tensor], Tensor]
    loss_sum: Callable[[nn.Module, Tensor, Tensor], Tensor]


@frozen
class Experts:
    """The mixtures of experts within a module's layers.

    - `modules`: each holds all experts of a layer, `count` of them along axis 0 of every parameter.
    - `spread(dispatch)` makes them, in place, compute with the experts of one rank, and send tokens to the others.
    """

    modules: tuple[nn.Module, ...]
    count: int
    spread: Callable[[Dispatch], None]


@frozen
class Recipe:
    """A model, its loss and its data.

    - `loss_sum(module, batch)`: the loss *summed* over the batch's terms, a scalar. The engine divides by the global
      batch's count. It calls the module exactly once, so that an engine can wrap it.
    - `layers`: the repeated blocks, which FSDP2 shards, activation checkpointing recomputes and a pipeline cuts.
    - `initialise(name, parameter)`: required for a module on the meta device. It fills a parameter by its whole-model
      name alone, so that every layout starts from the same values.
    - `tensor_parallel`: shell patterns of module names -> a torch ParallelStyle, or one of these words. Modules without
      a match are replicated. Without a plan the model runs at tp=1.
      - "colwise", "rowwise": cut by outputs, by inputs.
      - "embedding": cut by vocabulary.
      - "head": likewise; its forward pass passes the DTensor weight to `linear_cross_entropy`.
      - "headwise": replicated, used on this rank's heads, gradients summed.
      - "gathered": holds cut modules only. Between such modules a rank has its own tokens [1, N, D], from the embedding
        to the head.
      - "tokenwise": replicated, used on these between the last layer and the head.
    - `tensor_parallel_sizes`: sizes, by the user's names, that the degree must divide.
    - `stages`: without it the model runs at pp=1.
    - `context_parallel(context)` makes the module, in place, take its rank's own tokens and attend to all; without it
      the model runs at cp=1. Degrees divide `num_attention_heads` and `num_key_value_heads` as those of tp do.
    - `experts`: without them the model runs at expert_parallel=1, which divides their number otherwise.

    A factory may return several recipes (a GAN's two networks), each with a `name` and optionally a `learning_rate`.
    They train one after the other within every optimizer step, in that order. A recipe's loss calls its own module
    through its argument, and the other modules as they were built. `then` holds the recipes after the first.
    """

    module: nn.Module
    loss_sum: Callable[[nn.Module, Batch], Tensor]
    dataset: Dataset
    layers: Sequence[nn.Module] = ()
    initialise: Callable[[str, Tensor], None] | None = None
    tensor_parallel: Mapping[str, str | ParallelStyle] = field(default_factory=dict)
    tensor_parallel_sizes: Mapping[str, int] = field(default_factory=dict)
    stages: Stages | None = None
    context_parallel: Callable[[Context], None] | None = None
    experts: Experts | None = None
    name: str = ""
    learning_rate: float | None = None  # None: the job's
    then: tuple[Recipe, ...] = ()


def materialise(
    whole_module: nn.Module,
    part: nn.Module,
    recipe: Recipe,
    device: torch.device,
    local_part_of_parameter: Callable[[str, Tensor], Tensor] | None = None,
    dtype: torch.dtype | None = None,
) -> None:
    """Allocate and initialise the meta-device parameters of `part`, in place.

    Shared parameters stay shared. Names are those in `whole_module`. `local_part_of_parameter`
    returns this rank's part of a parameter; at most one parameter at a time is whole. `dtype`
    replaces the dtype of floating-point parameters.
    """
    names = {id(parameter): name for name, parameter in whole_module.named_parameters()}
    real: dict[int, nn.Parameter] = {}
    for module in part.modules():
        for key, parameter in module._parameters.items():
            if parameter is None:
                continue
            is_placed = local_part_of_parameter is None or isinstance(parameter, DTensor)
            if not parameter.is_meta and is_placed and dtype in (None, parameter.dtype):
                continue
            if id(parameter) not in real:
                name = names[id(parameter)]
                values = parameter.detach()
                if parameter.is_meta:
                    assert recipe.initialise, "a module on the meta device needs Recipe.initialise"
                    values = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
                    recipe.initialise(name, values)
                if dtype is not None and values.is_floating_point():
                    values = values.to(dtype)
                if local_part_of_parameter:
                    values = local_part_of_parameter(name, values.to(device))
                real[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
            module._parameters[key] = real[id(parameter)]


def seeded_normal(name: str, values: Tensor, *, seed: int, std: float) -> None:
    """Fill `values` in place from N(0, std**2), determined by (seed, name) and equal on every
    device.
    """
    generator = make_seeded_generator(seed, name)
    if values.device.type == "cpu":
        values.normal_(std=std, generator=generator)
    else:
        values.copy_(
            torch.empty(values.shape, dtype=values.dtype).normal_(std=std, generator=generator)
        )


def make_seeded_generator(seed: int, name: str) -> torch.Generator:
    """Return a CPU generator seeded by (seed, name) alone."""
    digest = hashlib.blake2b(f"{seed}:{name}".encode(), digest_size=7).digest()
    return torch.Generator().manual_seed(int.from_bytes(digest, "big"))


def from_factory(factory: str, config: JsonObject) -> Recipe:
    """Return the Recipe from `path/to/file.py:function` called with `config`; further recipes are in its `then`.

    Raises SpecError if it cannot be called or returns anything else.
    """
    file, _, name = factory.rpartition(":")
    spec = importlib.util.spec_from_file_location(Path(file).stem, file) if file else None
    if spec is None or spec.loader is None or not Path(file).is_file():
        raise SpecError(
            "no such model file",
            path="model.factory",
            got=factory,
            allowed="path/to/file.py:function",
        )
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    function = getattr(module, name, None)
    if not callable(function):
        raise SpecError(f"{file} has no function {name!r}", path="model.factory", got=factory)
    made = function(config)
    recipes = tuple(made) if isinstance(made, list | tuple) else (made,)
    if not recipes or not all(isinstance(recipe, Recipe) for recipe in recipes):
        raise SpecError(
            "the factory must return a Recipe, or several",
            path="model.factory",
            got=[type(recipe).__qualname__ for recipe in recipes],
        )
    return _chain_recipes(recipes) if len(recipes) > 1 else recipes[0]


def _chain_recipes(recipes: tuple[Recipe, ...]) -> Recipe:
    """Return the first recipe, with the others in `then`. Raises SpecError if they cannot
    alternate.
    """
    names = [recipe.name for recipe in recipes]
    if len(set(names)) < len(names) or not all(name.isidentifier() for name in names):
        raise SpecError(
            "several recipes need a name each",
            path="model.factory",
            got=names,
            allowed="identifiers",
        )
    if any(recipe.dataset is not recipes[0].dataset for recipe in recipes):
        raise SpecError(
            "recipes that train in turn see the same samples",
            path="model.factory",
            allowed="one dataset",
        )
    if any(
        recipe.tensor_parallel or recipe.stages or recipe.context_parallel for recipe in recipes
    ):
        raise SpecError(
            "several recipes run data parallel only",
            path="model.factory",
            got="tensor_parallel, context_parallel or stages",
        )
    shared = Counter(
        id(parameter) for recipe in recipes for parameter in recipe.module.parameters()
    )
    if max(shared.values(), default=1) > 1:
        raise SpecError(
            "a parameter belongs to one recipe",
            path="model.factory",
            got="a parameter of two modules",
        )
    return replace(recipes[0], then=recipes[1:])
