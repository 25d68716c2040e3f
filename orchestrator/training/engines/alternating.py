"""Alternating training of several recipes within every optimizer step, such as the two networks of a GAN.

Each recipe has an ordinary engine. While one trains, the others are frozen, although its loss may run through them.
Plain parameters require no gradients meanwhile. FSDP2's gathered parameters still do, so their gradients are dropped
after a wasted reduction.
"""

from __future__ import annotations

import glob
import math
from collections.abc import Callable, Iterable, Sequence
from fnmatch import fnmatchcase

import torch
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import Freeze, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from orchestrator.training.contract.engine import Engine, State
from orchestrator.training.contract.recipe import Batch, Recipe
from orchestrator.training.contract.results import StepResult
from orchestrator.training.engines.randomness import Randomness


class AlternatingEngine:
    """Engines of several recipes (as a GAN's networks) that take turns in every optimizer step.

    Each trains on the same micro-batches, in the recipes' order.
    """

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        training: TrainingSpec,
        build_engine: Callable[[Recipe, TrainingSpec], Engine],
    ) -> None:
        """Make the engines; `build_engine` returns one recipe's engine. Raises SpecError if plan or job do
        not support several recipes.
        """
        recipes = (recipe, *recipe.then)
        if plan.world_size > plan.layout.dp:
            raise SpecError(
                "recipes that train in turn run data parallel only",
                path="plan.layout",
                got=plan.layout,
            )
        if plan.optimizer_in_backward:
            raise SpecError(
                "recipes that train in turn get gradients out of turn, which would be updates",
                path="plan.optimizer_in_backward",
                got="true",
            )
        _check_recipe_names(recipes, training)
        seeded = [self._add_own_randomness(part) for part in recipes]
        self._engines = [
            build_engine(part, _make_recipe_training(part, training)) for part in seeded
        ]
        self._parts = [_TurnModule(part.module) for part in recipes]
        # Registered after the engines' hooks, so that these seeds win: a recipe's engine seeds for
        # its own turn only.
        layers = tuple(layer for part in recipes for layer in part.layers)
        self._randomness = Randomness(replace(recipe, layers=layers), training.seed)

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        batches = list(micro_batches)
        results = []
        for turn, engine in enumerate(self._engines):
            others = [part for part in self._parts if part is not self._parts[turn]]
            for part in others:
                part.freeze()
            results.append(engine.step(step, batches, tokens))
            for part in others:
                part.unfreeze()
        return StepResult(
            loss=sum(result.loss for result in results),
            grad_norm=math.hypot(*(result.grad_norm for result in results)),
        )

    def state(self) -> State:
        return {name: value for engine in self._engines for name, value in engine.state().items()}

    def _add_own_randomness(self, recipe: Recipe) -> Recipe:
        """Return the recipe with a loss whose layers draw the same random numbers, whichever
        recipe's turn it is.
        """

        def loss_sum(module: nn.Module, batch: Batch) -> Tensor:
            self._randomness.begin(torch.initial_seed(), 0)
            return recipe.loss_sum(module, batch)

        return replace(recipe, loss_sum=loss_sum, then=())


class _TurnModule:
    """A recipe's module, which is frozen during the turns of other recipes."""

    def __init__(self, module: nn.Module) -> None:
        self._sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def freeze(self) -> None:
        if not self._sharded:
            for parameter in self._trained:
                parameter.requires_grad_(False)

    def unfreeze(self) -> None:
        for part in self._sharded:
            part.reshard()  # a forward pass without backward leaves it gathered
        for parameter in self._trained:
            parameter.requires_grad_(True)
            parameter.grad = None


def _make_recipe_training(recipe: Recipe, training: TrainingSpec) -> TrainingSpec:
    """Return the job's training settings for one recipe: with its own learning rate, and `freeze`
    by its own parameter names.
    """
    names = [name for name, _ in recipe.module.named_parameters()]
    freeze = tuple(
        Freeze(parameters=glob.escape(name), until_step=entry.until_step)
        for entry in training.freeze
        for name in names
        if fnmatchcase(f"{recipe.name}.{name}", entry.parameters)
    )
    return replace(
        training, learning_rate=recipe.learning_rate or training.learning_rate, freeze=freeze
    )


def _check_recipe_names(recipes: Sequence[Recipe], training: TrainingSpec) -> None:
    names = []
    for recipe in recipes:
        for name, _ in recipe.module.named_parameters():
            names.append(f"{recipe.name}.{name}")
    for entry in training.freeze:
        if not any(fnmatchcase(name, entry.parameters) for name in names):
            example = f"a pattern of names such as {names[0]}"
            raise SpecError(
                "no parameter matches",
                path="training.freeze",
                got=entry.parameters,
                allowed=example,
            )
