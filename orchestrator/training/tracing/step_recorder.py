"""Records training steps of a model on fake tensors, at two micro-batch sizes, under every mode of checkpointing."""

from __future__ import annotations

import contextlib
import gc
import sys
from collections.abc import Iterable, Iterator, Sequence
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.training.contract.precision import LOW_PRECISION, make_input_cast_hook
from orchestrator.training.contract.recipe import Batch, Recipe
from orchestrator.training.engines.batch_norm import list_batch_norms, prepare_batch_norms
from orchestrator.training.engines.recompute import apply_checkpointing
from orchestrator.training.models import cross_entropy
from orchestrator.training.tracing.allocator import (
    AllocationLedger,
    extrapolate_ledgers,
    simulate_fragmentation,
)
from orchestrator.training.tracing.cuda_autocast import autocast_as_on_cuda
from orchestrator.training.tracing.fake_model import fake_as_with_values, replace_by_fake_tensors
from orchestrator.training.tracing.model_builder import (
    SAMPLES,
    Arithmetic,
    Request,
    hold_in_four_bits,
    make_plan,
)
from orchestrator.training.tracing.op_recorder import OpRecorder
from orchestrator.training.tracing.repeats import RepeatPattern
from orchestrator.training.tracing.timeline import (
    PlaceVisit,
    RecordedSteps,
    make_profile,
    make_timeline,
)
from orchestrator.training.tracing.values import READS, FakeTensorValues
from orchestrator.training.tracing.zero3_linear import zero3_linear


class StepRecorder:
    """Records a model's training step at both micro-batch sizes, under every kind of activation
    checkpointing.
    """

    def __init__(
        self,
        request: Request,
        arithmetic: Arithmetic,
        recipe: Recipe,
        *,
        reads_values: bool = False,
    ) -> None:
        """Record the steps. `reads_values`: the model's code reads the values of tensors."""
        self._request = request
        self._arithmetic = arithmetic
        self._recipes = (recipe, *recipe.then)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._values = (
            FakeTensorValues(self._fake)
            if reads_values or request.any_samples or request.tensors
            else None
        )
        low = LOW_PRECISION.get(arithmetic.precision)
        self._autocast = low if arithmetic.autocast else None
        held_bytes: dict[Tensor, float] = {}
        for member in self._recipes:
            four_bits = hold_in_four_bits(request, member.module, low)
            note = self._values.note if self._values else None
            held_bytes |= replace_by_fake_tensors(
                member.module, self._fake, None if arithmetic.autocast else low, note
            )
            held_bytes |= {
                member.module.get_parameter(name): width for name, width in four_bits.items()
            }
            most = request.model.weight_bytes_each
            held_bytes = {weight: min(width, most) for weight, width in held_bytes.items()}
            if low and not arithmetic.autocast:
                for part in (member.module, *member.layers):
                    part.register_forward_pre_hook(make_input_cast_hook(low), with_kwargs=True)
        if hasattr(recipe.dataset, "fit"):
            self._fit_synthetic_batch(recipe)
        self._recorder = OpRecorder(self._recipes, held_bytes)
        gc.freeze()  # excludes imported objects from collection: scanning them took 7 % of a trace
        self._fragmentation: dict[ActivationCheckpointing, float] = {}
        gradients = patch.object(
            cross_entropy,
            "add_chunk_gradients",
            self._recorder.wrap_as_backward(cross_entropy.add_chunk_gradients),
        )
        with (
            fake_as_with_values(),
            gradients,
            autocast_as_on_cuda() if arithmetic.cuda else contextlib.nullcontext(),
        ):
            cases = [(False, False)]
            if recipe.then and self._autocast is None:
                cases.append((True, False))
            elif self._autocast is None and not all(
                weight.requires_grad for weight in recipe.module.parameters()
            ):
                cases.append((False, True))
            self._recorded = [
                steps
                for sharded, zero3 in cases
                for mode in request.modes
                if (steps := self._try_to_record_steps(mode, is_sharded=sharded, is_zero3=zero3))
                is not None
            ]
        self._places = self._recorder.list_named_places()

    def make_model_profile(
        self, repeat_pattern: RepeatPattern | None, traced_layers: int
    ) -> ModelProfile:
        """Return the profile of a model with this repeat pattern, of which `traced_layers` layers
        were traced.

        Raises StepsDiffer where the traced layers do not fit the pattern.
        """
        traced = make_timeline(self._places, self._recorded, repeat_pattern, traced_layers)
        turns = tuple(
            sum(p.numel() for p in part.module.parameters() if p.requires_grad)
            for part in self._recipes
        )
        return make_profile(
            traced,
            family=self._request.family,
            precision=self._arithmetic.precision,
            workspace_bytes=self._recorder.estimate_buffer_bytes,
            turns=turns if len(turns) > 1 else (),
            attention=self._recorder.attention,
            fragmentation=tuple(self._fragmentation.items()),
            updated_before_largest=self._recorder.updated_before_largest,
            has_batch_norm=any(list_batch_norms(recipe.module) for recipe in self._recipes),
        )

    @property
    def is_alike_on_cuda(self) -> bool:
        return self._recorder.is_alike_on_cuda

    def _fit_synthetic_batch(self, recipe: Recipe) -> None:
        """Make the recipe's dataset find a batch that the model's head accepts."""
        samples: Any = recipe.dataset
        with fake_as_with_values():
            samples.fit(SAMPLES[0], recipe.module, self._fake_inputs)
        recipe.module.zero_grad()

    @contextlib.contextmanager
    def _fake_inputs(self, named: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Open a context of fake tensors, which yields fake copies of these tensors."""
        with (
            self._fake,
            self._values.allowing_array_reads() if self._values else contextlib.nullcontext(),
        ):
            yield {name: self._as_fake(tensor) for name, tensor in named.items()}

    def _as_fake(self, real: Tensor) -> Tensor:
        fake = self._fake.from_tensor(real)
        if self._values:
            self._values.note(fake, real)
        return fake

    def _try_to_record_steps(
        self, checkpointing: ActivationCheckpointing, *, is_sharded: bool, is_zero3: bool
    ) -> RecordedSteps | None:
        """Return the steps recorded under this kind of checkpointing; None where only that kind, or
        only ZeRO stage 3, makes the model fail.

        Raises the error of a model that fails without both, too.
        """
        try:
            return self._record_steps(checkpointing, is_sharded=is_sharded, is_zero3=is_zero3)
        except Exception as error:  # a user's model may raise anything: the kind is left out
            is_first = checkpointing is self._request.modes[0] and not is_zero3
            if is_first or (isinstance(error, READS) and not self._values):
                raise
            print(
                f"{checkpointing}, zero3={is_zero3}: {type(error).__name__}: {error}",
                file=sys.stderr,
            )
            return None

    def _record_steps(
        self, checkpointing: ActivationCheckpointing, *, is_sharded: bool, is_zero3: bool
    ) -> RecordedSteps:
        layers: list[nn.Module] = []
        for recipe in self._recipes:
            layers.extend(recipe.layers)
        norms = []
        for recipe in self._recipes:
            norms.extend(list_batch_norms(recipe.module))
        linear = (
            patch.object(functional, "linear", zero3_linear)
            if is_zero3
            else contextlib.nullcontext()
        )
        with _restoring_forwards((*layers, *norms)), linear:
            apply_checkpointing(layers, checkpointing)
            steps = [
                (
                    *self._record_step(samples, norms, is_sharded=is_sharded),
                    self._recorder.bytes_by_place,
                )
                for samples in SAMPLES
            ]
        (first, few, held_by_few), (second, many, held_by_many) = steps
        if not (is_sharded or is_zero3) and (
            self._arithmetic.cuda or not self._arithmetic.autocast
        ):
            self._fragmentation[checkpointing] = simulate_fragmentation(
                extrapolate_ledgers(few, many, SAMPLES).values(), self._list_adam_moment_bytes()
            )
        return RecordedSteps(
            mode=checkpointing,
            sharded=is_sharded,
            zero3=is_zero3,
            samples=SAMPLES,
            phases=(first, second),
            bytes_by_place=(held_by_few, held_by_many),
        )

    def _list_adam_moment_bytes(self) -> list[int]:
        """Return the bytes of each fp32 moment, two for each trained parameter."""
        trained = []
        for recipe in self._recipes:
            for p in recipe.module.parameters():
                if p.requires_grad:
                    trained.append(p)
        return [4 * p.numel() for p in trained for _ in ("exp_avg", "exp_avg_sq")]

    def _record_step(
        self, samples: int, batch_norms: list[Any], *, is_sharded: bool
    ) -> tuple[list[PlaceVisit], AllocationLedger]:
        """Run forward and backward of one optimizer step, for every recipe in turn; return (visits,
        allocations).

        `is_sharded`: as under FSDP2, where recipes out of turn require gradients too
        (engines/alternating.py).
        """
        real = self._recipes[0].dataset.batch(range(samples))
        training = replace(
            self._request.training, batch_norm_samples=samples, sync_batch_norm=False
        )
        reading = self._values.allowing_array_reads() if self._values else contextlib.nullcontext()
        with _restoring_forwards(batch_norms), self._fake, reading, self._recorder.step(samples):
            prepare_batch_norms(batch_norms, make_plan(self._arithmetic, samples), training)
            for turn, recipe in enumerate(self._recipes):
                still = (
                    contextlib.nullcontext()
                    if is_sharded
                    else _freezing_others(self._recipes, recipe)
                )
                with self._recorder.turn(turn), still:
                    self._forward_backward(recipe, tuple(map(self._as_fake, real)))
        return self._recorder.phases, self._recorder.ledger

    def _forward_backward(self, recipe: Recipe, batch: Batch) -> None:
        batch = tuple(
            tensor.view_as(tensor) for tensor in batch
        )  # an operation, so that it is counted
        with torch.autocast("cpu", self._autocast) if self._autocast else contextlib.nullcontext():
            loss_sum = recipe.loss_sum(recipe.module, batch)
        self._recorder.mark_backward_start()
        (loss_sum * 1.0).backward()  # type: ignore[no-untyped-call]


@contextlib.contextmanager
def _restoring_forwards(modules: Iterable[nn.Module]) -> Iterator[None]:
    """Open a context that restores the modules' forward functions at its end."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


@contextlib.contextmanager
def _freezing_others(recipes: Sequence[Recipe], trained_recipe: Recipe) -> Iterator[None]:
    """Open a context in which the parameters of all recipes but `trained_recipe` are frozen."""
    others: list[nn.Parameter] = []
    for recipe in recipes:
        if recipe is not trained_recipe:
            others.extend(recipe.module.parameters())
    trained = [parameter for parameter in others if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)
