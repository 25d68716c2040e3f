"""Training steps on fake tensors, counted: `python -m orchestrator.training.tracing.trace REQUEST [SECONDS]`.

REQUEST is a file with the JSON of `Request`; SECONDS limit its processor time. It prints a JSON list of one
ModelProfile per arithmetic. It runs in its own process: a model's code may do anything, and torch is patched. It
belongs to `training` and not to `memory`, since it traces the job's Recipe, with its loss and data.

Fake tensors have sizes but no memory, so a model is traced on a machine that could not hold it. An OpRecorder counts
live storages after every operation, at two micro-batch sizes, under every mode of activation checkpointing. The
optimizer's part follows from parameter counts and is not traced. Memory that bypasses torch's dispatcher (scratch
inside kernels, libraries' workspaces) is not seen.
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import gc
import json
import os
import resource
import signal
import sys
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn import functional

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import (
    DataSpec,
    DecoderSpec,
    ModelSpec,
    TrainingSpec,
    model_from_json,
    training_from_json,
)
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.specs.run import TrainingRun
from orchestrator.training.contract.precision import LOW_PRECISION, round_inputs
from orchestrator.training.contract.recipe import Batch, Recipe, from_factory
from orchestrator.training.engines.batch_norm import batch_norms
from orchestrator.training.engines.batch_norm import prepare as prepare_batch_norms
from orchestrator.training.engines.freezing import freeze_for
from orchestrator.training.engines.recompute import recompute
from orchestrator.training.models import cross_entropy
from orchestrator.training.models.decoder import decoder_recipe
from orchestrator.training.tracing.allocator import Ledger, fragmentation, on_lines
from orchestrator.training.tracing.cuda_autocast import as_on_cuda
from orchestrator.training.tracing.fake_model import (
    as_with_values,
    parameters_on_meta,
    without_memory,
)
from orchestrator.training.tracing.op_recorder import OpRecorder
from orchestrator.training.tracing.repeats import Stack, cut, kinds_of, layer_count, stack_of
from orchestrator.training.tracing.timeline import Phase, Steps, Unlike, profile, timeline
from orchestrator.training.tracing.values import READS, Values
from orchestrator.training.tracing.zero3_linear import zero3_linear

FP32_BYTES = 4
SAMPLES = (2, 3)  # micro-batches: linear from 2 on; with one sample some copies are not made
PR_SET_PDEATHSIG = 1  # linux/prctl.h
BAD_JOB_EXIT_CODE = 2
LAST_STEP = 2**62  # after every thaw step
# Address space of a trace beyond that of imported torch. Fake tensors are a few hundred MB of
# Python objects (measured:
# a decoder of 70 billion parameters). A model that allocates real weights exceeds it and is
# stopped.
ADDRESS_SPACE_BYTES = 16 * 2**30


@dataclass(frozen=True, slots=True, kw_only=True)
class Arithmetic:
    """Dtype settings of an engine: with autocast weights stay fp32, else the weights themselves are cast."""

    precision: Precision
    autocast: bool
    cuda: bool = False  # autocast as on CUDA


@dataclass(frozen=True, slots=True, kw_only=True)
class Request:
    """The model and settings to trace."""

    model: ModelSpec
    training: TrainingSpec
    family: str
    sequence_length: int
    arithmetics: tuple[Arithmetic, ...]
    modes: tuple[ActivationCheckpointing, ...] = tuple(ActivationCheckpointing)
    tensors: tuple[str, ...] = ()  # files of samples by the names of a head's arguments
    any_samples: bool = False  # a script brings its own
    whole_logits: bool = False  # its loss holds those of all tokens
    batch: tuple[int | None, int | None] = (
        None,
        None,
    )  # of them, the one that a head takes, once it is known


def request_from_json(data: dict[str, Any]) -> Request:
    """Return the Request from the JSON form of `dataclasses.asdict`."""
    return Request(
        model=model_from_json(data["model"]),
        training=training_from_json(data["training"]),
        family=data["family"],
        sequence_length=data["sequence_length"],
        arithmetics=tuple(
            Arithmetic(
                precision=Precision(raw["precision"]), autocast=raw["autocast"], cuda=raw["cuda"]
            )
            for raw in data["arithmetics"]
        ),
        modes=tuple(map(ActivationCheckpointing, data["modes"])),
        tensors=tuple(data["tensors"]),
        any_samples=data["any_samples"],
        whole_logits=data["whole_logits"],
    )


def profiles(request: Request) -> list[ModelProfile | None]:
    """Return a ModelProfile per dtype setting; None where the model's own code fails in it, as it would in training.

    Raises SpecError, and any exception of the model's own code where it fails in every dtype setting.

    Without autocast, CUDA differs in dropout, and in attention for which a CPU makes matrices of scores.
    """
    traced: dict[Arithmetic, tuple[ModelProfile | None, bool]] = {}
    failure: Exception | None = None
    for arithmetic in request.arithmetics:
        on_cpu = traced.get(replace(arithmetic, cuda=False))
        is_alike = on_cpu is not None and on_cpu[1] and not arithmetic.autocast
        if on_cpu is not None and is_alike:
            traced[arithmetic] = on_cpu
            continue
        try:
            traced[arithmetic] = _profile(request, arithmetic)
        except (
            Exception
        ) as error:  # a user's model may raise anything: other settings are still traced
            print(f"{arithmetic}: {type(error).__name__}: {error}", file=sys.stderr)
            traced[arithmetic] = (None, True)
            failure = failure or error
    if failure is not None and not any(profile for profile, _ in traced.values()):
        raise failure
    return [profile for profile, _ in traced.values()]


def _profile(request: Request, arithmetic: Arithmetic) -> tuple[ModelProfile, bool]:
    """The profile, and whether a CPU and CUDA do the same apart from autocast."""
    config = _config(request.model)
    whole = build(request, arithmetic, config)
    length = layer_count(config)
    kinds = kinds_of(whole.layers, config, length)
    buffer_bytes = _buffer_bytes(whole)
    stack = stack_of(kinds, length)
    if stack is not None:
        # A model's code may refuse what it never had; then the whole model says what is wrong, if
        # anything is.
        with contextlib.suppress(Exception):
            few_layers = cut(config, stack.depth)
            few = build(request, arithmetic, few_layers)
            if kinds_of(few.layers, few_layers, length) == kinds[: stack.depth] + kinds[length:]:
                traced = _Traced(request, arithmetic, few)
                extended = replace(traced.profile(stack, stack.depth), workspace_bytes=buffer_bytes)
                if extended.parameters == sum(
                    parameter.numel() for parameter in whole.module.parameters()
                ):
                    return extended, traced.is_alike_on_cuda
    try:
        traced = _Traced(request, arithmetic, whole)
    except READS:
        traced = _Traced(request, arithmetic, build(request, arithmetic, config), reads=True)
    with contextlib.suppress(Unlike):
        return traced.profile(stack, length), traced.is_alike_on_cuda
    return traced.profile(None, length), traced.is_alike_on_cuda


def _buffer_bytes(recipe: Recipe) -> int:
    buffers = [
        buffer
        for part in recipe.module.modules()
        for buffer in part._buffers.values()
        if buffer is not None
    ]
    return sum(buffer.numel() * buffer.element_size() for buffer in buffers)


class _Traced:
    """A model's recorded steps at both micro-batches, under every mode of activation checkpointing."""

    def __init__(
        self, request: Request, arithmetic: Arithmetic, recipe: Recipe, *, reads: bool = False
    ) -> None:
        """`reads`: the model's code reads values."""
        self._request = request
        self._arithmetic = arithmetic
        self._recipes = (recipe, *recipe.then)
        self._fake = FakeTensorMode(allow_non_fake_inputs=True)
        self._values = (
            Values(self._fake) if reads or request.any_samples or request.tensors else None
        )
        low = LOW_PRECISION.get(arithmetic.precision)
        self._autocast = low if arithmetic.autocast else None
        held_bytes: dict[int, float] = {}
        for member in self._recipes:
            four_bits = _in_four_bits(request, member.module, low)
            note = self._values.note if self._values else None
            held_bytes |= without_memory(
                member.module, self._fake, None if arithmetic.autocast else low, note
            )
            held_bytes |= {
                id(member.module.get_parameter(name)): width for name, width in four_bits.items()
            }
            most = request.model.weight_bytes_each
            held_bytes = {weight: min(width, most) for weight, width in held_bytes.items()}
            if low and not arithmetic.autocast:
                for part in (member.module, *member.layers):
                    part.register_forward_pre_hook(round_inputs(low), with_kwargs=True)
        if hasattr(recipe.dataset, "fit"):
            self._fit(recipe)
        self._recorder = OpRecorder(self._recipes, held_bytes)
        gc.freeze()  # excludes imported objects from collection: scanning them took 7 % of a trace
        self._fragmentation: dict[ActivationCheckpointing, float] = {}
        gradients = patch.object(
            cross_entropy, "add_gradients", self._recorder.ahead(cross_entropy.add_gradients)
        )
        with (
            as_with_values(),
            gradients,
            as_on_cuda() if arithmetic.cuda else contextlib.nullcontext(),
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
                if (steps := self._steps_or_none(mode, sharded=sharded, zero3=zero3)) is not None
            ]
        self._places = self._recorder.named_places()

    def profile(self, stack: Stack | None, depth: int) -> ModelProfile:
        """Return the profile of a model with this stack, of which `depth` layers were traced. Raises Unlike."""
        traced = timeline(self._places, self._recorded, stack, depth)
        turns = tuple(
            sum(p.numel() for p in part.module.parameters() if p.requires_grad)
            for part in self._recipes
        )
        return profile(
            traced,
            family=self._request.family,
            precision=self._arithmetic.precision,
            workspace_bytes=self._recorder.buffer_bytes,
            turns=turns if len(turns) > 1 else (),
            attention=self._recorder.attention,
            fragmentation=tuple(self._fragmentation.items()),
            updated_before_largest=self._recorder.updated_before_largest,
            has_batch_norm=any(batch_norms(recipe.module) for recipe in self._recipes),
        )

    @property
    def is_alike_on_cuda(self) -> bool:
        return self._recorder.is_alike_on_cuda

    def _fit(self, recipe: Recipe) -> None:
        """Find the batch that the head takes."""
        samples: Any = recipe.dataset
        if samples.at is None:
            with as_with_values():
                samples.fit(SAMPLES[0], recipe.module, self._fake_inputs)
            recipe.module.zero_grad()

    @contextlib.contextmanager
    def _fake_inputs(self, named: dict[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """A context of fake tensors, and these in place of real ones."""
        with self._fake, self._values.reading() if self._values else contextlib.nullcontext():
            yield {name: self._as_fake(tensor) for name, tensor in named.items()}

    def _as_fake(self, real: Tensor) -> Tensor:
        fake = self._fake.from_tensor(real)
        if self._values:
            self._values.note(fake, real)
        return fake

    def _steps_or_none(
        self, mode: ActivationCheckpointing, *, sharded: bool, zero3: bool
    ) -> Steps | None:
        """The steps; None where a kind of checkpointing, or stage 3, fails alone. Raises what fails without both."""
        try:
            return self._steps(mode, sharded=sharded, zero3=zero3)
        except Exception as error:  # a user's model may raise anything: the kind is left out
            is_first = mode is self._request.modes[0] and not zero3
            if is_first or (isinstance(error, READS) and not self._values):
                raise
            print(f"{mode}, zero3={zero3}: {type(error).__name__}: {error}", file=sys.stderr)
            return None

    def _steps(self, mode: ActivationCheckpointing, *, sharded: bool, zero3: bool) -> Steps:
        layers = [layer for recipe in self._recipes for layer in recipe.layers]
        norms = [norm for recipe in self._recipes for norm in batch_norms(recipe.module)]
        linear = (
            patch.object(functional, "linear", zero3_linear) if zero3 else contextlib.nullcontext()
        )
        with _forwards_put_back((*layers, *norms)), linear:
            recompute(layers, mode)
            steps = [
                (*self._step(samples, norms, sharded=sharded), self._recorder.bytes_by_place)
                for samples in SAMPLES
            ]
        (first, few, held_by_few), (second, many, held_by_many) = steps
        if not (sharded or zero3) and (self._arithmetic.cuda or not self._arithmetic.autocast):
            self._fragmentation[mode] = fragmentation(
                on_lines(few, many, SAMPLES).values(), self._adam_bytes()
            )
        return Steps(
            mode=mode,
            sharded=sharded,
            zero3=zero3,
            samples=SAMPLES,
            phases=(first, second),
            bytes_by_place=(held_by_few, held_by_many),
        )

    def _adam_bytes(self) -> list[int]:
        """Bytes of both fp32 moments, per trained parameter."""
        trained = [
            p for recipe in self._recipes for p in recipe.module.parameters() if p.requires_grad
        ]
        return [4 * p.numel() for p in trained for _ in ("exp_avg", "exp_avg_sq")]

    def _step(self, samples: int, norms: list[Any], *, sharded: bool) -> tuple[list[Phase], Ledger]:
        """Forward and backward of one optimizer step, for every recipe in turn; returns phases and allocations.

        `sharded`: as under FSDP2, where recipes out of turn require gradients too (engines/alternating.py).
        """
        real = self._recipes[0].dataset.batch(range(samples))
        training = replace(
            self._request.training, batch_norm_samples=samples, sync_batch_norm=False
        )
        reading = self._values.reading() if self._values else contextlib.nullcontext()
        with _forwards_put_back(norms), self._fake, reading, self._recorder.step(samples):
            prepare_batch_norms(norms, _plan(self._arithmetic, samples), training)
            for turn, recipe in enumerate(self._recipes):
                still = (
                    contextlib.nullcontext() if sharded else _freeze_others(self._recipes, recipe)
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
        self._recorder.turn_back()
        (loss_sum * 1.0).backward()  # type: ignore[no-untyped-call]


def build(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
    """Return the recipe of `config`, or of the model's factory, with parameters on the meta device."""
    model = request.model
    samples: Any = None if request.tensors else _Tokens(request.sequence_length)
    if isinstance(config, DecoderSpec):
        recipe = decoder_recipe(config, samples, request.training.seed)
    elif model.hf is not None:
        # late: importing transformers takes seconds
        from orchestrator.training.models.hf_heads import AnySamples
        from orchestrator.training.models.hf_model import hf_recipe

        # quantising needs CUDA
        lora = None if model.lora is None else replace(model.lora, quantise_base=False)
        published = model.hf if isinstance(model.hf, dict) else model.config
        own_head = (
            {"tie_word_embeddings": False} if published.get("tie_word_embeddings") is False else {}
        )
        shrunk = replace(model, hf={"model_type": config.model_type} | own_head, lora=lora)
        run = TrainingRun(
            model=shrunk,
            data=DataSpec(sequence_length=request.sequence_length, tensors=request.tensors),
            training=request.training,
            plan=_plan(arithmetic, SAMPLES[0]),
            job_folder="",
            attempt_folder="",
            epoch=1,
            device="cpu",
        )
        if request.any_samples:
            samples = AnySamples(samples, request.batch)
        recipe = hf_recipe(run, samples, config, whole_logits=request.whole_logits)
    else:
        assert model.factory is not None, "a job names a decoder, a transformers model or a factory"
        torch.manual_seed(request.training.seed)
        with parameters_on_meta():
            recipe = from_factory(model.factory, model.config)
    if not recipe.then:
        freeze_for(recipe.module, request.training.freeze, LAST_STEP)
    return recipe


class _Tokens:
    """Random token samples of a language model."""

    def __init__(self, sequence_length: int) -> None:
        self._length = sequence_length

    def __len__(self) -> int:
        return 2**31

    def token_count(self, _index: int) -> int:
        return self._length

    def batch(self, indices: Sequence[int]) -> Batch:
        shape = len(indices), self._length
        return torch.zeros(shape, dtype=torch.int64), torch.zeros(shape, dtype=torch.int64)


def _config(model: ModelSpec) -> Any:
    """A decoder's shape, a transformers configuration, or None for a factory's model."""
    hf = model.hf
    if hf is None:
        return model.decoder
    from orchestrator.training.models.hf_model import published_config, read_config

    is_published = isinstance(hf, str) and "model_type" in model.config
    return published_config(model.config) if is_published else read_config(hf)


def _plan(arithmetic: Arithmetic, samples: int) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(),
        micro_batch_size=samples,
        gradient_accumulation_steps=1,
        precision=arithmetic.precision,
    )


def _in_four_bits(request: Request, module: Any, low: torch.dtype | None) -> dict[str, float]:
    """Return name -> bytes per element of the weights that CUDA holds in 4 bits; hold the tables as training does.

    A script's are in fp32 but for `weights: bf16`, as `_with_adapters` in memory/models/hf.py has them.
    """
    lora = request.model.lora
    if lora is None or not lora.quantise_base:
        return {}
    from orchestrator.training.models.hf_adapters import NF4_BYTES, hold_tables_in, in_four_bits

    widths = dict.fromkeys(in_four_bits(module), NF4_BYTES)
    if request.any_samples:
        head = module.get_output_embeddings().weight
        names = [name for name, weight in module.named_parameters() if weight is head]
        return widths | dict.fromkeys(names, FP32_BYTES)
    if low is not None:
        hold_tables_in(module, low)
    return widths


@contextlib.contextmanager
def _forwards_put_back(modules: Iterable[nn.Module]) -> Iterator[None]:
    """A context that restores the modules' forward functions at its end."""
    before = [(module, module.__dict__.get("forward")) for module in modules]
    try:
        yield
    finally:
        for module, forward in before:
            module.__dict__.pop("forward", None)
            if forward is not None:
                module.__dict__["forward"] = forward


@contextlib.contextmanager
def _freeze_others(recipes: Sequence[Recipe], but: Recipe) -> Iterator[None]:
    """A context in which only the parameters of recipe `but` require gradients."""
    others = [
        parameter
        for recipe in recipes
        if recipe is not but
        for parameter in recipe.module.parameters()
    ]
    trained = [parameter for parameter in others if parameter.requires_grad]
    for parameter in trained:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in trained:
            parameter.requires_grad_(True)


def _limit_address_space(more_bytes: int) -> None:
    """Limit this process's address space to `more_bytes` more: an allocation fails before the kernel kills the process.

    Only on Linux: other systems do not report mapped pages.
    """
    mapped = Path("/proc/self/statm")
    if mapped.exists():
        used_bytes = int(mapped.read_text().split()[0]) * resource.getpagesize()
        _, hard = resource.getrlimit(resource.RLIMIT_AS)
        most = used_bytes + more_bytes
        resource.setrlimit(
            resource.RLIMIT_AS, (most if hard == resource.RLIM_INFINITY else min(most, hard), hard)
        )


def main(arguments: list[str]) -> int:
    """Print the profiles of the request file, or, with exit code 2, the job's error.

    Output of the model's own code is redirected to standard error.
    """
    if len(arguments) > 1:  # whoever waits for the answer may be killed
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    request = request_from_json(json.loads(Path(arguments[0]).read_text()))
    _limit_address_space(ADDRESS_SPACE_BYTES)
    if len(arguments) > 1:  # seconds of processor time
        resource.setrlimit(resource.RLIMIT_CPU, (int(arguments[1]), resource.RLIM_INFINITY))
    with os.fdopen(os.dup(1), "w") as answer:
        os.dup2(2, 1)
        try:
            results = profiles(request)
        except SpecError as error:
            problem = {
                name: getattr(error, name) for name in ("what", "path", "got", "allowed", "hint")
            }
            json.dump(problem, answer, default=str)
            return BAD_JOB_EXIT_CODE
        json.dump([entry and dataclasses.asdict(entry) for entry in results], answer)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
