"""Builds the model of a trace, with parameters on the meta device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import (
    DataSpec,
    DecoderSpec,
    ModelSpec,
    TrainingSpec,
    parse_model_json,
    parse_training_json,
)
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from orchestrator.specs.run import TrainingRun
from orchestrator.training.contract.recipe import Batch, Recipe, from_factory
from orchestrator.training.engines.freezing import freeze_parameters
from orchestrator.training.models.decoder import make_decoder_recipe
from orchestrator.training.tracing.fake_model import move_parameters_to_meta

FP32_BYTES = 4
SAMPLES = (2, 3)  # micro-batches: linear from 2 on; with one sample some copies are not made
LAST_STEP = 2**62  # after every thaw step


@frozen
class Arithmetic:
    """Dtype settings of an engine: with autocast weights stay fp32, else the weights themselves are cast."""

    precision: Precision
    autocast: bool
    cuda: bool = False  # autocast as on CUDA


@frozen
class Request:
    """The model to trace, and the settings under which to trace it."""

    model: ModelSpec
    training: TrainingSpec
    family: str
    sequence_length: int
    arithmetics: tuple[Arithmetic, ...]
    modes: tuple[ActivationCheckpointing, ...] = tuple(ActivationCheckpointing)
    tensors: tuple[str, ...] = ()  # files of samples by the names of a head's arguments
    any_samples: bool = False  # a script brings its own
    whole_logits: bool = False  # its loss holds those of all tokens


def request_from_json(data: JsonObject) -> Request:
    """Return the Request from the JSON form of `dataclasses.asdict`."""
    arithmetics = [
        Arithmetic(**raw | {"precision": Precision(raw["precision"])})
        for raw in data["arithmetics"]
    ]
    nouns = {
        "model": parse_model_json(data["model"]),
        "training": parse_training_json(data["training"]),
        "arithmetics": tuple(arithmetics),
        "modes": tuple(map(ActivationCheckpointing, data["modes"])),
        "tensors": tuple(data["tensors"]),
    }
    return Request(**data | nouns)


def build_recipe_on_meta_device(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
    """Return the recipe of `config`, or of the model's factory, with parameters on the meta device."""
    model = request.model
    samples: Any = None if request.tensors else _Tokens(request.sequence_length)
    if isinstance(config, DecoderSpec):
        recipe = make_decoder_recipe(config, samples, request.training.seed)
    elif model.hf is not None:
        # late: importing transformers takes seconds
        from orchestrator.training.models.hf_heads import AnySamples
        from orchestrator.training.models.hf_model import make_hf_recipe

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
            plan=make_plan(arithmetic, SAMPLES[0]),
            job_folder="",
            attempt_folder="",
            epoch=1,
            device="cpu",
        )
        if request.any_samples:
            samples = AnySamples(samples)
        recipe = make_hf_recipe(run, samples, config, holds_all_logits=request.whole_logits)
    else:
        assert model.factory is not None, "a job names a decoder, a transformers model or a factory"
        torch.manual_seed(request.training.seed)
        with move_parameters_to_meta():
            recipe = from_factory(model.factory, model.config)
    if not recipe.then:
        freeze_parameters(recipe.module, request.training.freeze, LAST_STEP)
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


def read_config(model: ModelSpec) -> Any:
    """Return what decides a model's layers: a decoder's sizes, a transformers configuration, or
    None for a factory's model.
    """
    hf = model.hf
    if hf is None:
        return model.decoder
    from orchestrator.training.models.hf_model import make_published_config, read_config

    is_published = isinstance(hf, str) and "model_type" in model.config
    return make_published_config(model.config) if is_published else read_config(hf)


def make_plan(arithmetic: Arithmetic, micro_batch_size: int) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(),
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=1,
        precision=arithmetic.precision,
    )


def hold_in_four_bits(
    request: Request, module: Any, low_dtype: torch.dtype | None
) -> dict[str, float]:
    """Return {name: bytes per element} of the weights that CUDA holds in 4 bits; cast other frozen
    tables as training does.

    A script's tables are in fp32 but for `weights: bf16`, as `_add_adapters` in
    memory/models/hf.py has them.
    """
    lora = request.model.lora
    if lora is None or not lora.quantise_base:
        return {}
    from orchestrator.training.models.hf_adapters import (
        NF4_BYTES,
        cast_frozen_tables,
        list_four_bit_weights,
    )

    widths = dict.fromkeys(list_four_bit_weights(module), NF4_BYTES)
    if request.any_samples:
        head = module.get_output_embeddings().weight
        names = [name for name, weight in module.named_parameters() if weight is head]
        return widths | dict.fromkeys(names, FP32_BYTES)
    if low_dtype is not None:
        cast_frozen_tables(module, low_dtype)
    return widths
