"""Laws of the closed form of transformers models: its parameters and saved bytes are those of the model itself."""

from __future__ import annotations

import contextlib
import dataclasses
from itertools import product
from typing import Any

import pytest
import torch
from accelerate import init_empty_weights
from huggingface_hub.errors import StrictDataclassError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.models import experts
from orchestrator.memory.models.hf import DEFAULTS, find_decoder_shape
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, LoraSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile
from orchestrator.training.guard.virtual_device import VirtualDevice
from orchestrator.training.models.hf_adapters import add_adapters
from orchestrator.training.models.hf_model import read_config
from orchestrator.training.tracing.cuda_autocast import autocast_as_on_cuda
from orchestrator.training.tracing.model_builder import Arithmetic, Request
from orchestrator.training.tracing.trace import trace_arithmetics
from tests.memory.matrix import DEVICE

SIZES: dict[str, Any] = {
    "vocab_size": 96,
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
CONFIGS = {
    **{family: {"model_type": family, **SIZES} for family in DEFAULTS},
    "biased llama": {"model_type": "llama", **SIZES, "attention_bias": True, "mlp_bias": True},
    "tied llama": {"model_type": "llama", **SIZES, "tie_word_embeddings": True},
    "wide heads": {"model_type": "qwen3", **SIZES, "head_dim": 48},
    "defaults": {
        "model_type": "qwen3",
        **{key: SIZES[key] for key in SIZES if key != "num_key_value_heads"},
    },
}
CONFIGS["defaults"]["num_attention_heads"] = 64
LENGTHS = (64, 128)
SILENT = ("model_type", "num_experts_per_tok")  # more experts than there are cannot be chosen
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {"model_type": "mixtral", **SIZES, "num_local_experts": 4, "num_experts_per_tok": 3},
    "qwen2_moe": {
        "model_type": "qwen2_moe",
        **SIZES,
        "num_experts": 6,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 80,
    },
    "qwen3_moe": {
        "model_type": "qwen3_moe",
        **SIZES,
        "head_dim": 32,
        "num_experts": 6,
        "num_experts_per_tok": 4,
        "moe_intermediate_size": 32,
        "norm_topk_prob": True,
    },
}


SAID_OTHERWISE = {
    "mixtral by another name": {**MIXTURES["mixtral"], "num_experts": 3},
    "qwen3_moe by another name": {**MIXTURES["qwen3_moe"], "num_local_experts": 5},
    "qwen2_moe without biases": {**MIXTURES["qwen2_moe"], "qkv_bias": False},
}
del SAID_OTHERWISE["mixtral by another name"]["num_local_experts"]
del SAID_OTHERWISE["qwen3_moe by another name"]["num_experts"]


def profile(config: dict[str, Any], lora: LoraSpec | None = None, **changes: Any) -> ModelProfile:
    spec = JobSpec(
        name="job",
        global_batch_size=4,
        model=ModelSpec(hf=config, lora=lora),
        data=DataSpec(text=("text.txt",), sequence_length=LENGTHS[0]),
    )
    derived = find_rank_profile(
        read_model_request(spec),
        RankShare(**{"precision": Precision.FP32, "sequence_length": None, **changes}),
    )
    assert derived is not None
    return derived


def model(config: dict[str, Any], *, real: bool) -> Any:
    settings = AutoConfig.for_model(**config)
    if real:
        return AutoModelForCausalLM.from_config(settings)
    with init_empty_weights():
        made = AutoModelForCausalLM.from_config(settings)
    made.tie_weights()
    return made


@pytest.mark.parametrize("name", (CONFIGS | MIXTURES | SAID_OTHERWISE))
def test_the_parameters_are_those_of_the_model(name: str) -> None:
    config = (CONFIGS | MIXTURES | SAID_OTHERWISE)[name]
    made, derived = model(config, real=False), profile(config)
    assert derived.parameters == sum(parameter.numel() for parameter in made.parameters())
    assert sum(derived.segments[1].tensors) == derived.segments[1].parameters


@pytest.mark.parametrize("targets", [(), ("q_proj", "down_proj")])
def test_adapters_alone_are_trained_beside_a_frozen_base(targets: tuple[str, ...]) -> None:
    lora = LoraSpec(rank=4, target_modules=targets)
    with init_empty_weights():
        made = add_adapters(model(CONFIGS["qwen3"], real=False), lora)
    derived = profile(CONFIGS["qwen3"], lora)
    trained = sum(parameter.numel() for parameter in made.parameters() if parameter.requires_grad)
    frozen = sum(
        parameter.numel() for parameter in made.parameters() if not parameter.requires_grad
    )
    assert derived.trained_parameters == trained
    assert derived.compute_weight_bytes(4) == 4 * (trained + frozen)
    low = profile(CONFIGS["qwen3"], lora, precision=Precision.BF16, autocast=True)
    projections = [
        name
        for name, _ in made.named_parameters()
        if name.endswith(("_proj.weight", "base_layer.weight"))
    ]
    matrices = sum(made.get_parameter(name).numel() for name in projections)
    head = SIZES["vocab_size"] * SIZES["hidden_size"]
    assert low.compute_weight_bytes(4) == 4 * trained + 4 * frozen - 2 * (matrices + head)


def saved_bytes_per_token(
    config: dict[str, Any], lora: LoraSpec | None, precision: str, *, cuda: bool = False
) -> float:
    """Return the bytes that a further layer keeps for its backward pass, as the slope over a sample's tokens."""
    made = model(config, real=True)
    layers = (add_adapters(made, lora) if lora else made).model.layers
    dtype, autocast = (
        torch.bfloat16 if precision == "cast" else torch.float32,
        precision == "autocast",
    )
    layers.to(dtype)

    def live_bytes(count: int, length: int) -> int:
        with VirtualDevice(2**40) as device:
            hidden = (
                torch.randn(1, length, config["hidden_size"], requires_grad=True, dtype=dtype) * 1.0
            )
            tables = made.model.rotary_emb(hidden, torch.arange(length)[None])
            before = device.live_bytes
            on_cuda = autocast_as_on_cuda() if cuda else contextlib.nullcontext()
            with on_cuda, torch.autocast("cpu", torch.bfloat16, enabled=autocast):
                for layer in layers[:count]:
                    hidden = layer(hidden, position_embeddings=tables, attention_mask=None)
            return device.live_bytes - before

    short, long = (live_bytes(3, length) - live_bytes(2, length) for length in LENGTHS)
    return (long - short) / (LENGTHS[1] - LENGTHS[0])


ADAPTERS = {
    "whole": None,
    "adapters": LoraSpec(rank=4),
    "some": LoraSpec(rank=4, target_modules=("q_proj", "v_proj")),
    "dropout": LoraSpec(rank=4, dropout=0.1, target_modules=("o_proj", "gate_proj", "down_proj")),
}


# Each family, precision and kind of adapters stands in one case; further ones are long.
CASES = [
    pytest.param(*case, marks=() if order[1:] == (order[0] % 3, order[0] % 4) else pytest.mark.long)
    for order, case in (
        (tuple(number for number, _ in numbered), tuple(value for _, value in numbered))
        for numbered in product(
            enumerate(DEFAULTS), enumerate(("fp32", "autocast", "cast")), enumerate(ADAPTERS)
        )
    )
]


@pytest.mark.parametrize(("family", "precision", "adapters"), CASES)
def test_a_layer_saves_what_the_closed_form_says(
    family: str, precision: str, adapters: str
) -> None:
    lora = ADAPTERS[adapters]
    config = {**CONFIGS[family], "head_dim": 16}
    arithmetic = Precision.FP32 if precision == "fp32" else Precision.BF16
    layer = profile(config, lora, precision=arithmetic, autocast=precision == "autocast").segments[
        1
    ]
    measured = saved_bytes_per_token(config, lora, precision)
    assert layer.saved_bytes / LENGTHS[0] == pytest.approx(measured, rel=1e-3)


@pytest.mark.parametrize("precision", ["fp32", "autocast", "cast"])
def test_dropout_before_adapters_keeps_a_byte_of_each_element_on_cuda(precision: str) -> None:
    config, lora = {**CONFIGS["llama"], "head_dim": 16}, ADAPTERS["dropout"]
    arithmetic = Precision.FP32 if precision == "fp32" else Precision.BF16
    here, there = (
        profile(config, lora, precision=arithmetic, autocast=precision == "autocast", cuda=cuda)
        .segments[1]
        .saved_bytes
        for cuda in (False, True)
    )
    measured = saved_bytes_per_token(config, lora, precision, cuda=True)
    assert there / LENGTHS[0] == pytest.approx(measured, rel=1e-3)
    elements = LENGTHS[0] * (2 * SIZES["hidden_size"] + SIZES["intermediate_size"])
    assert here - there == elements * ((2 if precision == "cast" else 4) - 1)


@pytest.mark.parametrize(
    ("arithmetic", "lora"),
    [
        pytest.param(
            Arithmetic(precision=Precision.FP32, autocast=False, cuda=True),
            LoraSpec(rank=4, dropout=0.1),
            marks=pytest.mark.long,
        ),
        pytest.param(
            Arithmetic(precision=Precision.BF16, autocast=True, cuda=True),
            LoraSpec(rank=4, dropout=0.1),
            marks=pytest.mark.long,
        ),
        (
            Arithmetic(precision=Precision.BF16, autocast=False),
            LoraSpec(rank=4, target_modules=("q_proj", "v_proj")),
        ),
    ],
    ids=["dropout", "dropout under autocast", "attention alone, cast"],
)
def test_a_recomputed_layer_with_adapters_peaks_where_its_trace_does(
    arithmetic: Arithmetic, lora: LoraSpec
) -> None:
    hf = {**CONFIGS["llama"], "hidden_size": 192, "intermediate_size": 512, "head_dim": 48}
    model, length = ModelSpec(hf=hf, lora=lora), LENGTHS[1]
    (traced,) = trace_arithmetics(
        Request(
            model=model,
            training=TrainingSpec(),
            family="job",
            sequence_length=length,
            arithmetics=(arithmetic,),
        )
    )
    closed = profile(hf, lora, **dataclasses.asdict(arithmetic), sequence_length=length)
    plan = Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(),
        zero_stage=ZeroStage.NONE,
        micro_batch_size=8,
        gradient_accumulation_steps=1,
        sequence_length=length,
        precision=arithmetic.precision,
        activation_checkpointing=ActivationCheckpointing.FULL,
    )
    actual, expected = (
        estimate(source, plan, DEVICE).allocated_bytes for source in (closed, traced)
    )
    assert actual == pytest.approx(expected, rel=0.01)


EXPERTS = [
    pytest.param(family, precision, marks=() if number == other else pytest.mark.long)
    for number, family in enumerate(MIXTURES)
    for other, precision in enumerate(("fp32", "autocast", "cast"))
]


@pytest.mark.parametrize(("family", "precision"), EXPERTS)
def test_a_layer_of_experts_saves_what_the_closed_form_says(family: str, precision: str) -> None:
    arithmetic = Precision.FP32 if precision == "fp32" else Precision.BF16
    layer = profile(
        MIXTURES[family], precision=arithmetic, autocast=precision == "autocast"
    ).segments[1]
    measured = saved_bytes_per_token(MIXTURES[family], None, precision)
    assert layer.saved_bytes / LENGTHS[0] == pytest.approx(measured, rel=1e-3)


def other_values(config: dict[str, Any], setting: str, default: Any) -> list[Any]:
    current = config.get(setting, default)
    if isinstance(current, bool):
        return [not current]
    if setting == "hidden_act":
        return ["relu", "gelu"]
    if isinstance(current, list):
        return [[1]]
    return (
        [2 * current] if isinstance(current, int) else [0.1] if isinstance(current, float) else [2]
    )


@pytest.mark.long
@pytest.mark.parametrize("family", DEFAULTS | experts.DEFAULTS)
def test_no_setting_of_a_family_is_overlooked(family: str) -> None:
    config, default = (CONFIGS | MIXTURES)[family], AutoConfig.for_model(family)
    settings = {**default.to_dict(), **dict.fromkeys(default.attribute_map, 2)}
    of_all = PreTrainedConfig().to_dict().keys() - {"tie_word_embeddings"}
    for setting in settings.keys() - of_all - set(SILENT):
        for value in other_values(config, setting, settings[setting]):
            changed = {**config, setting: value}
            if setting in default.attribute_map:
                changed.pop(default.attribute_map[setting], None)
                changed["num_experts_per_tok"] = 1
            try:
                read_config(changed)
                made = model(changed, real=False)
            except (SpecError, StrictDataclassError, ValueError, TypeError, KeyError):
                continue  # transformers refuses it, or it says nothing of the model
            if find_decoder_shape(ModelSpec(hf=changed), LENGTHS[0]) is not None:
                derived = profile(changed)
                assert derived.parameters == sum(
                    parameter.numel() for parameter in made.parameters()
                ), setting
                measured = saved_bytes_per_token(changed, None, "fp32")
                assert derived.segments[1].saved_bytes / LENGTHS[0] == pytest.approx(
                    measured, rel=1e-3
                ), setting


def test_every_family_with_experts_is_known_by_its_defaults() -> None:
    assert set(MIXTURES) == set(experts.DEFAULTS)
    for family, defaults in experts.DEFAULTS.items():
        default = AutoConfig.for_model(family)
        assert {name: getattr(default, name) for name in defaults} == dict(defaults)


def test_there_is_no_closed_form_where_it_would_not_hold() -> None:
    unknown = [
        {"model_type": "gpt2", **SIZES},
        {"model_type": "llama", **{key: SIZES[key] for key in SIZES if key != "hidden_size"}},
        {"model_type": "llama", **SIZES, "attention_dropout": 0.1},
        {"model_type": "llama", **SIZES, "hidden_act": "relu"},
        {"model_type": "gemma", **SIZES, "hidden_activation": "gelu_new"},
        {"model_type": "gemma", **SIZES, "head_dim": 512},
        {"model_type": "mistral", **SIZES, "sliding_window": LENGTHS[0] - 1},
    ]
    assert [find_decoder_shape(ModelSpec(hf=config), LENGTHS[0]) for config in unknown] == [
        None
    ] * 7
    assert (
        find_decoder_shape(ModelSpec(hf={**unknown[-1], "sliding_window": None}), LENGTHS[0])
        is not None
    )
    for targets in (
        ("embed_tokens", "q_proj"),
        ("nothing",),
    ):  # adapters that only a trace knows, or refuses
        lora = LoraSpec(rank=4, target_modules=targets)
        assert find_decoder_shape(ModelSpec(hf=CONFIGS["llama"], lora=lora), LENGTHS[0]) is None
    mixture = MIXTURES["qwen3_moe"]
    without_width = {name: size for name, size in mixture.items() if name != "intermediate_size"}
    assert find_decoder_shape(ModelSpec(hf=mixture), LENGTHS[0]) == find_decoder_shape(
        ModelSpec(hf=without_width), LENGTHS[0]
    )
    assert find_decoder_shape(ModelSpec(hf=mixture), LENGTHS[0]) is not None
    without_width = {
        name: size for name, size in MIXTURES["mixtral"].items() if name != "intermediate_size"
    }
    assert find_decoder_shape(ModelSpec(hf=without_width), LENGTHS[0]) is None
    for change in (
        {"mlp_only_layers": [0]},
        {"decoder_sparse_step": 2},
        {"output_router_logits": True},
    ):
        assert find_decoder_shape(ModelSpec(hf=mixture | change), LENGTHS[0]) is None
    assert find_decoder_shape(ModelSpec(hf=mixture, lora=LoraSpec(rank=4)), LENGTHS[0]) is None
