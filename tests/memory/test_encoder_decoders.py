"""Laws of the closed form of encoder-decoders: its parameters are the model's, its peaks those of traced steps."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from accelerate import init_empty_weights
from transformers import AutoConfig, AutoModelForSeq2SeqLM

from orchestrator.memory.estimate import estimate
from orchestrator.memory.models import bart, t5
from orchestrator.memory.models.bart import bart_shape
from orchestrator.memory.models.t5 import t5_shape
from orchestrator.memory.profiles import autocasts, profile_of
from orchestrator.specs.choices import ActivationCheckpointing, Engine, Precision
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.job.model import DataSpec, Freeze, LoraSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Source
from orchestrator.training.tracing.trace import Arithmetic, Request, profiles
from tests.memory.matrix import DEVICE
from tests.memory.models import BART, T5
from tests.memory.test_traced import plan

MEAN_ERROR_MAX, LOWEST_ERROR = 0.02, -0.05  # of the closed form, and of its plan furthest below the trace
FP32, BF16 = Precision.FP32, Precision.BF16
GATED = {**T5, "feed_forward_proj": "gated-gelu", "num_layers": 2, "num_decoder_layers": 4, "d_model": 160, "d_ff": 96}


def job(config: dict[str, Any], length: int, lora: LoraSpec | None = None, **training: Any) -> JobSpec:
    return JobSpec(
        name="job",
        global_batch_size=8,
        model=ModelSpec(hf=config, lora=lora),
        data=DataSpec(chat=("pairs.jsonl",), sequence_length=length),
        training=TrainingSpec(**training),
    )


def closed(config: dict[str, Any], length: int, precision: Precision = FP32, **how: bool) -> ModelProfile:
    found = profile_of(job(config, length), precision=precision, sequence_length=length, **how)
    assert found is not None
    return found


def plans(length: int, precision: Precision, *, autocast: bool) -> Iterator[Plan]:
    """Engines, stages, ranks, micro-batches and checkpointing that compute so."""
    stages = ((Engine.TORCH, (0, 2, 3)), (Engine.DEEPSPEED, (0, 1, 2, 3)))
    tried = [(engine, stage) for engine, them in stages for stage in them]
    for engine, stage in tried:
        for mode in ActivationCheckpointing:
            for dp, micro, turns in ((1, 4, 1), (2, 1, 1), (2, 3, 2)):
                try:
                    one = plan(engine, stage, dp, micro, turns, activation_checkpointing=mode, precision=precision)
                except IllegalPlan:
                    continue
                if autocasts(one) is autocast:
                    yield replace(one, sequence_length=length)


def both(
    config: dict[str, Any], length: int, *arithmetics: Arithmetic
) -> Iterator[tuple[Arithmetic, ModelProfile, ModelProfile]]:
    """The closed form and the trace in each arithmetic."""
    request = Request(
        model=ModelSpec(hf=config),
        training=TrainingSpec(),
        family="model",
        sequence_length=length,
        arithmetics=arithmetics,
    )
    for how, traced in zip(arithmetics, profiles(request), strict=True):
        ours = closed(config, length, how.precision, autocast=how.autocast, cuda=how.cuda)
        assert ours.parameters == traced.parameters
        assert ours.forward_flops == pytest.approx(traced.forward_flops)
        yield how, ours, traced


def errors(config: dict[str, Any], length: int, *arithmetics: Arithmetic) -> list[float]:
    """Of the closed form over the trace, plan by plan."""
    return [
        error
        for how, ours, traced in both(config, length, *arithmetics)
        for error in plan_errors(ours, traced, length, how)
    ]


def plan_errors(ours: ModelProfile, traced: ModelProfile, length: int, how: Arithmetic) -> list[float]:
    found = []
    for one in plans(length, how.precision, autocast=how.autocast):
        predicted, known = (estimate(each, one, DEVICE).allocated_bytes for each in (ours, traced))
        found.append(predicted / known - 1)
    return found


def kept(profile: ModelProfile) -> list[tuple[int, int, int | None]]:
    """What layers save under each kind of checkpointing, those of the encoder first."""
    layers = [segment for segment in profile.segments if segment.is_unit]
    return list(dict.fromkeys((one.saved_bytes, one.checkpointed_bytes, one.selective_bytes) for one in layers))


def bars_hold(found: Sequence[float]) -> bool:
    return sum(map(abs, found)) / len(found) <= MEAN_ERROR_MAX and min(found) >= LOWEST_ERROR


ARITHMETICS = {
    "fp32": Arithmetic(precision=FP32, autocast=False),
    "cast": Arithmetic(precision=BF16, autocast=False),
    "autocast": Arithmetic(precision=BF16, autocast=True),
    "autocast on CUDA": Arithmetic(precision=BF16, autocast=True, cuda=True),
    "cast on CUDA": Arithmetic(precision=BF16, autocast=False, cuda=True),
    "cast to fp16": Arithmetic(precision=Precision.FP16, autocast=False),
    "fp32 on CUDA": Arithmetic(precision=FP32, autocast=False, cuda=True),
}


@pytest.mark.timeout(600)  # 3 s each on an idle core, many times that on a busy one
@pytest.mark.parametrize(
    ("config", "length", "arithmetic"),
    [
        pytest.param(T5, 48, "fp32", id="T5", marks=pytest.mark.long),
        pytest.param(GATED, 64, "cast", id="gated T5"),
        pytest.param(BART, 64, "cast to fp16", id="BART", marks=pytest.mark.long),
        pytest.param(T5, 64, "autocast on CUDA", id="T5 on CUDA", marks=pytest.mark.long),
        pytest.param(T5, 64, "fp32 on CUDA", id="T5 on CUDA in fp32", marks=pytest.mark.long),
        pytest.param(GATED, 64, "autocast on CUDA", id="gated T5 on CUDA", marks=pytest.mark.long),
        pytest.param(GATED, 64, "cast on CUDA", id="gated T5 cast on CUDA", marks=pytest.mark.long),
        pytest.param(BART, 64, "cast on CUDA", id="BART on CUDA", marks=pytest.mark.long),
        # under ZeRO-2 a bucket is copied between two of its peaks: one plan was 8 % low
        pytest.param(BART, 64, "fp32 on CUDA", id="BART on CUDA in fp32"),
    ],
)
def test_the_closed_form_has_the_saved_bytes_of_traces_and_is_within_2_percent_of_their_peaks(
    config: dict[str, Any], length: int, arithmetic: str
) -> None:
    ((how, ours, traced),) = both(config, length, ARITHMETICS[arithmetic])
    assert kept(ours) == kept(traced)
    found = plan_errors(ours, traced, length, how)
    assert bars_hold(found), found


@pytest.mark.timeout(600)
def test_a_layer_of_t5_that_is_computed_again_is_whole_before_its_last_product_goes_backward() -> None:
    """Where feed-forward parts are narrow, that is the worst moment: 1.6 % off in the mean without it."""
    narrow = {**GATED, "d_ff": 64, "vocab_size": 64, "d_model": 96, "num_heads": 1, "num_decoder_layers": 2}
    ((how, ours, traced),) = both(narrow, 64, ARITHMETICS["cast on CUDA"])
    found = [
        estimate(ours, one, DEVICE).allocated_bytes / estimate(traced, one, DEVICE).allocated_bytes - 1
        for one in plans(64, how.precision, autocast=how.autocast)
        if one.activation_checkpointing is ActivationCheckpointing.FULL
    ]
    assert sum(map(abs, found)) / len(found) < 0.0125


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(6))
def test_the_bars_hold_over_ragged_t5s_in_every_arithmetic(number: int) -> None:
    chosen = random.Random(number)
    config = {
        **(GATED if number % 2 else T5),
        "vocab_size": chosen.choice([256, 1000, 5000]),
        "d_model": 32 * chosen.randint(2, 10),
        "d_ff": 32 * chosen.randint(3, 20),
        "d_kv": chosen.choice([16, 24, 64]),
        "num_heads": chosen.randint(1, 6),
        "num_layers": chosen.randint(2, 5),
        "num_decoder_layers": chosen.randint(2, 5),
    }
    found = errors(config, 32 * chosen.randint(1, 5), *ARITHMETICS.values())
    assert bars_hold(found), (config, found)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("number", range(4))
def test_the_bars_hold_over_ragged_barts(number: int) -> None:
    chosen = random.Random(number)
    heads = chosen.randint(1, 4)
    config = {
        **BART,
        "vocab_size": chosen.choice([256, 1000, 5000]),
        "d_model": 48 * heads,
        "encoder_ffn_dim": 32 * chosen.randint(3, 20),
        "decoder_ffn_dim": 32 * chosen.randint(3, 20),
        "encoder_attention_heads": heads,
        "decoder_attention_heads": chosen.choice([heads, 2 * heads]),
        "encoder_layers": chosen.randint(2, 5),
        "decoder_layers": chosen.randint(2, 5),
    }
    found = errors(config, 32 * chosen.randint(1, 3), *ARITHMETICS.values())
    assert bars_hold(found), (config, found)


def test_the_last_layer_is_gathered_beside_all_that_the_encoder_has_saved() -> None:
    known = closed(T5, 64)
    one = replace(plan(Engine.TORCH, 2, 2, 3, 1), sequence_length=64)
    (gathering,) = (each for each in estimate(known, one, DEVICE).moments if each.name == "gathering of last layer")
    encoder = known.segments[1]
    assert gathering.activation_bytes > 3 * encoder.count * encoder.saved_bytes


PUBLISHED: dict[str, dict[str, Any]] = {
    "t5-small": {"model_type": "t5"},
    "flan-t5-base with one table": {
        "model_type": "t5",
        "d_model": 768,
        "d_ff": 2048,
        "num_layers": 12,
        "num_decoder_layers": 12,
        "num_heads": 12,
        "feed_forward_proj": "gated-gelu",
    },
    "bart-large-cnn": {"model_type": "bart", "vocab_size": 50264, "num_hidden_layers": 12},
    "bart with other sides": BART,
    "fewer layers to decode": {"model_type": "t5", "num_decoder_layers": 2},
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_the_parameters_are_those_of_the_model(name: str) -> None:
    with init_empty_weights():
        made = AutoModelForSeq2SeqLM.from_config(AutoConfig.for_model(**PUBLISHED[name]))
    made.tie_weights()
    found = closed(PUBLISHED[name], 512)
    assert found.source is Source.CLOSED_FORM
    assert found.parameters == sum(parameter.numel() for parameter in made.parameters())
    assert all(sum(segment.tensors) == segment.parameters for segment in found.segments)


def test_defaults_of_a_configuration_are_those_of_transformers() -> None:
    for family, said in (("t5", t5.DEFAULTS), ("bart", {**bart.DEFAULTS, **bart.ALIKE})):
        default = AutoConfig.for_model(family)
        assert {name: getattr(default, name) for name in said} == said


def test_there_is_no_closed_form_where_it_would_not_hold() -> None:
    assert t5_shape(ModelSpec(hf=T5), T5) is not None
    for change in (
        {"dropout_rate": 0.0},
        {"feed_forward_proj": "gated-silu"},
        {"d_ff": None},
        {"model_type": "mt5"},
        {"hidden_size": 96},
        {"tie_word_embeddings": False},
    ):
        config = T5 | change
        assert t5_shape(ModelSpec(hf=config), config) is None, change
    assert bart_shape(ModelSpec(hf=BART), BART) is not None
    for change in (
        *({"dropout": 0.0}, {"attention_dropout": 0.1}, {"activation_dropout": 0.1}, {"decoder_layerdrop": 0.1}),
        *({"activation_function": "relu"}, {"num_hidden_layers": 6}, {"model_type": "mbart"}),
    ):
        config = BART | change
        assert bart_shape(ModelSpec(hf=config), config) is None, change
    unknown = (
        job(T5, 64, LoraSpec(rank=4)),
        job(BART, 64, LoraSpec(rank=4)),
        job(T5, 64, freeze=(Freeze(parameters="encoder.*"),)),
    )
    for spec in unknown:
        assert profile_of(spec, precision=FP32, sequence_length=None) is None
    assert profile_of(job(T5, 64), precision=FP32, sequence_length=None, tensor_parallel=2) is None
