"""Several recipes that train in turn within every optimizer step, such as the two networks of a GAN.

Each has an ordinary engine. In a recipe's turn the others stand still: what its loss sends through them changes
nothing of theirs. Where their parameters are plain tensors they ask for no gradients meanwhile; FSDP2 keeps gathered
parameters of its own that ask all the same, so there the gradients are dropped: they cost a reduction in vain.
"""

from __future__ import annotations

import dataclasses
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
from orchestrator.training.contract.engine import Engine, State
from orchestrator.training.contract.recipe import Batch, Recipe
from orchestrator.training.contract.results import StepResult
from orchestrator.training.engines.randomness import Randomness


class AlternatingEngine:
    """One engine per recipe; every step lets each see the same micro-batches, in the recipes' order."""

    def __init__(
        self, recipe: Recipe, plan: Plan, training: TrainingSpec, build: Callable[[Recipe, TrainingSpec], Engine]
    ) -> None:
        """`build` makes a recipe's own engine. Raises SpecError where the plan or the job does not fit such recipes."""
        recipes = (recipe, *recipe.then)
        if plan.layout.tp > 1 or plan.layout.pp > 1:
            got = f"tp={plan.layout.tp}, pp={plan.layout.pp}"
            raise SpecError("recipes that train in turn run data parallel only", path="plan.layout", got=got)
        _check_names(recipes, training)
        own = [self._with_own_randomness(each) for each in recipes]
        self._engines = [build(each, _training(each, training)) for each in own]
        self._parts = [_Part(each.module) for each in recipes]
        # Registered after the engines', so that its seeds count: those of a recipe's engine know its own turn only.
        layers = tuple(layer for each in recipes for layer in each.layers)
        self._randomness = Randomness(dataclasses.replace(recipe, layers=layers), training.seed)

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        batches = list(micro_batches)
        results = []
        for turn, engine in enumerate(self._engines):
            others = [part for part in self._parts if part is not self._parts[turn]]
            for part in others:
                part.stand_still()
            results.append(engine.step(step, batches, tokens))
            for part in others:
                part.go_on()
        return StepResult(
            loss=sum(result.loss for result in results), grad_norm=math.hypot(*(result.grad_norm for result in results))
        )

    def state(self) -> State:
        return {name: value for engine in self._engines for name, value in engine.state().items()}

    def _with_own_randomness(self, recipe: Recipe) -> Recipe:
        """The recipe, with every module's layers seeded by what its engine has just seeded for the micro-batch."""

        def loss_sum(module: nn.Module, batch: Batch) -> Tensor:
            self._randomness.begin(torch.initial_seed(), 0)
            return recipe.loss_sum(module, batch)

        return dataclasses.replace(recipe, loss_sum=loss_sum, then=())


class _Part:
    """A recipe's module, as the turns of others see it."""

    def __init__(self, module: nn.Module) -> None:
        self._sharded = [part for part in module.modules() if isinstance(part, FSDPModule)]
        self._trained = [parameter for parameter in module.parameters() if parameter.requires_grad]

    def stand_still(self) -> None:
        if not self._sharded:
            for parameter in self._trained:
                parameter.requires_grad_(False)

    def go_on(self) -> None:
        for part in self._sharded:
            part.reshard()  # a forward pass alone leaves it gathered
        for parameter in self._trained:
            parameter.requires_grad_(True)
            parameter.grad = None


def _training(recipe: Recipe, training: TrainingSpec) -> TrainingSpec:
    """The job's settings for one recipe: its own learning rate, and what is frozen by its own names."""
    names = [name for name, _ in recipe.module.named_parameters()]
    freeze = tuple(
        Freeze(parameters=glob.escape(name), until_step=entry.until_step)
        for entry in training.freeze
        for name in names
        if fnmatchcase(f"{recipe.name}.{name}", entry.parameters)
    )
    return dataclasses.replace(training, learning_rate=recipe.learning_rate or training.learning_rate, freeze=freeze)


def _check_names(recipes: Sequence[Recipe], training: TrainingSpec) -> None:
    names = [f"{recipe.name}.{name}" for recipe in recipes for name, _ in recipe.module.named_parameters()]
    for entry in training.freeze:
        if not any(fnmatchcase(name, entry.parameters) for name in names):
            example = f"a pattern of names such as {names[0]}"
            raise SpecError("no parameter matches", path="training.freeze", got=entry.parameters, allowed=example)
