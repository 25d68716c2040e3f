"""Laws of the trace: extrapolations equal recordings, and frozen parameters have no gradients."""

from __future__ import annotations

import dataclasses
import json
import os
import random
import select
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.models import hf as hf_profiles
from orchestrator.memory.profiles import find_rank_profile, make_decoder_profile
from orchestrator.service.intake.profiling import PROGRAM
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import (
    DataSpec,
    DecoderSpec,
    Freeze,
    LoraSpec,
    ModelSpec,
    TrainingSpec,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.profile import ModelProfile, Source
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.models.hf_adapters import NF4_BYTES
from orchestrator.training.models.hf_weights import InitialisationRecorder, recording_initialisation
from orchestrator.training.tracing import trace as tracing
from orchestrator.training.tracing.cuda_autocast import autocast_as_on_cuda
from orchestrator.training.tracing.model_builder import Arithmetic, Request
from orchestrator.training.tracing.op_recorder import MATRICES
from orchestrator.training.tracing.repeats import RepeatPattern, find_repeat_pattern
from orchestrator.training.tracing.timeline import (
    Event,
    ModelPlace,
    PlaceVisit,
    RecordedSteps,
    StepsDiffer,
    Timeline,
    make_timeline,
)
from orchestrator.training.tracing.trace import trace_arithmetics

EXAMPLES = Path(__file__).parents[2] / "jobs" / "examples"
LLAMA: dict[str, Any] = {
    "model_type": "llama",
    "vocab_size": 512,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 8,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}
DECODER = DecoderSpec(**{name: value for name, value in LLAMA.items() if name != "model_type"})
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "vocab_size": 512,
    "n_embd": 64,
    "n_layer": 2,
    "n_head": 4,
}
NONE = ActivationCheckpointing.NONE
REQUEST = Request(
    model=ModelSpec(hf=LLAMA),
    training=TrainingSpec(),
    family="model",
    sequence_length=32,
    arithmetics=(Arithmetic(precision=Precision.FP32, autocast=False),),
)


def trace_model(model: ModelSpec, training: TrainingSpec | None = None) -> ModelProfile:
    request = replace(REQUEST, model=model, training=training or TrainingSpec())
    (profile,) = trace_arithmetics(request)
    return profile


@pytest.mark.parametrize("layers", [3, 12])
def test_attention_that_holds_its_scores_does_so_at_any_depth(layers: int) -> None:
    plain, eager = (
        trace_model(ModelSpec(hf={**LLAMA, "num_hidden_layers": layers, **more}))
        for more in ({}, {"attn_implementation": "eager"})
    )
    scores = layers * LLAMA["num_attention_heads"] * 32 * 32
    saved = [
        sum(part.count * part.saved_bytes for part in profile.segments)
        for profile in (plain, eager)
    ]
    assert saved[1] - saved[0] >= 4 * scores


def test_a_loss_of_whole_logits_holds_those_of_all_tokens() -> None:
    wide = {**LLAMA, "vocab_size": 8 * LLAMA["vocab_size"], "num_hidden_layers": 2}
    request = replace(REQUEST, model=ModelSpec(hf=wide), sequence_length=2048)
    heads = []
    for whole in (False, True):
        (profile,) = trace_arithmetics(replace(request, whole_logits=whole))
        heads.append(max(part.saved_bytes + part.transient_bytes for part in profile.segments[-2:]))
    assert heads[1] - heads[0] > 2 * 2048 * wide["vocab_size"]


GEMMA: dict[str, Any] = {
    **LLAMA,
    "model_type": "gemma2",
    "head_dim": 16,
    "sliding_window": 16,
    "num_hidden_layers": 10,
}
SLIDING, FULL = "sliding_attention", "full_attention"


def alternating(seed: int, period: int) -> dict[str, Any]:
    """Layers of two kinds in a random order that comes again after `period`, and begins once more at the end."""
    draw = random.Random(seed)
    pattern = [SLIDING, FULL, *draw.choices((SLIDING, FULL), k=period - 2)]
    draw.shuffle(pattern)
    layers = 3 * period + 2 + draw.randint(period + 1, 2 * period)
    kinds = [pattern[index % period] for index in range(layers)]
    return GEMMA | {
        "model_type": "qwen3",
        "use_sliding_window": True,
        "num_hidden_layers": layers,
        "layer_types": kinds,
    }


@pytest.mark.timeout(600)  # 10 s on an idle core: importing transformers
@pytest.mark.parametrize(
    ("model", "segments"),
    [
        pytest.param(ModelSpec(hf=LLAMA), 3, id="transformers", marks=pytest.mark.long),
        pytest.param(ModelSpec(decoder=DECODER), 3, id="decoder"),
        pytest.param(ModelSpec(hf=GEMMA), 12, id="two kinds in turn", marks=pytest.mark.long),
        *(
            pytest.param(
                ModelSpec(hf=alternating(seed, period)),
                None,
                id=f"{period}-{seed}",
                marks=pytest.mark.long,
            )
            for seed, period in ((1, 3), (2, 3), (3, 4), (4, 6))
        ),
    ],
)
def test_a_profile_extrapolated_from_a_few_layers_is_that_of_all_layers(
    model: ModelSpec, segments: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    build = tracing.build_recipe_on_meta_device

    def count_builds(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
        depths.append(config.num_hidden_layers)
        return build(request, arithmetic, config)

    monkeypatch.setattr(tracing, "build_recipe_on_meta_device", count_builds)
    stretched = trace_model(model)
    layers, few = depths
    assert few < layers
    monkeypatch.setattr(tracing, "cut_layers", None)
    whole = trace_model(model)
    assert depths == [layers, few, layers]
    assert replace(stretched, fragmentation=()) == replace(whole, fragmentation=()), (
        "that is of the layers it had"
    )
    assert stretched.fragmentation
    assert sum(segment.count for segment in stretched.segments if segment.is_unit) == layers
    assert segments in (None, len(stretched.segments))
    assert {moment.mode for moment in stretched.moments} == {*ActivationCheckpointing}


@given(
    st.integers(0, 3),
    st.integers(1, 6),
    st.integers(0, 40),
    st.data(),
)
def test_every_layer_is_of_the_kind_of_the_one_that_represents_it(
    lead: int, period: int, more: int, data: st.DataObject
) -> None:
    pattern = data.draw(st.lists(st.integers(0, 2), min_size=period, max_size=period))
    head = data.draw(st.lists(st.integers(0, 2), min_size=lead, max_size=lead))
    length = lead + 3 * period + 2 + more
    kinds = head + [pattern[index % period] for index in range(length - lead)]
    stack = find_repeat_pattern(kinds, length)
    if stack is None:
        assert length <= lead + 4 * period + 2
        return
    assert stack.depth < length
    head_layers = stack.lead + 2 * stack.period
    added = length - stack.depth
    few = kinds[: stack.depth]
    again = [few[head_layers - stack.period + index % stack.period] for index in range(added)]
    assert few[:head_layers] + again + few[head_layers:] == kinds


def test_a_pattern_that_does_not_come_again_is_traced_whole() -> None:
    assert find_repeat_pattern([0, 1, 0, 0, 1, 1, 0, 1, 1, 1, 0, 0, 1, 0, 1, 1], 16) is None
    assert find_repeat_pattern([0] * 15 + [1], 16) is None


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 4}
LATENT = {
    "q_lora_rank": 24,
    "kv_lora_rank": 32,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
}
DEEPSEEK = {
    **LLAMA,
    **EXPERTS,
    **LATENT,
    "model_type": "deepseek_v3",
    "n_routed_experts": 8,
    "n_group": 2,
}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2}
QWEN = {**LLAMA, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4}


@pytest.mark.long
@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "depths"),
    [
        pytest.param(DEEPSEEK | {"num_hidden_layers": 9}, [9, 6], marks=pytest.mark.long),
        (QWEN | {"num_hidden_layers": 8, "mlp_only_layers": [6]}, [8]),
    ],
)
def test_dense_layers_do_not_represent_layers_with_experts(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], depths: list[int]
) -> None:
    built_depths: list[int] = []
    build = tracing.build_recipe_on_meta_device

    def count_builds(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
        built_depths.append(config.num_hidden_layers)
        return build(request, arithmetic, config)

    monkeypatch.setattr(tracing, "build_recipe_on_meta_device", count_builds)
    profile = trace_model(ModelSpec(hf=config))
    assert built_depths == depths
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert profile.parameters == sum(parameter.numel() for parameter in whole.parameters())


def test_the_largest_parameters_never_have_memory() -> None:
    with recording_initialisation(InitialisationRecorder()):
        large, small = torch.empty(2**14, 2**14), torch.empty(2**14)
    assert large.is_meta
    assert not small.is_meta


def test_recipes_in_turn_hold_the_gradients_of_one_at_a_time_except_under_fsdp2() -> None:
    config = {"width": 16, "frames": 16, "samples": 8, "discriminator_learning_rate": 1e-3}
    profile = trace_model(ModelSpec(factory=f"{EXAMPLES}/vocoder_gan.py:build", config=config))
    discriminator, generator = profile.turns
    assert profile.trained_parameters == profile.parameters == discriminator + generator

    def made(turn: int, *, sharded: bool) -> int:
        return max(
            moment.own + moment.done
            for moment in profile.moments
            if (moment.turn, moment.sharded) == (turn, sharded)
        )

    assert 0 < made(0, sharded=False) <= discriminator
    assert 0 < made(1, sharded=False) <= generator
    assert generator < made(1, sharded=True) <= discriminator + generator


def test_products_of_matrices_are_those_of_the_closed_form() -> None:
    decoder = DecoderSpec(
        vocab_size=256,
        hidden_size=64,
        intermediate_size=192,
        num_hidden_layers=3,
        num_attention_heads=4,
    )
    trace, closed_form = (
        trace_model(ModelSpec(decoder=decoder)),
        make_decoder_profile(decoder, "model", Precision.FP32, 32, 1, False),
    )
    layer, theirs = (
        next(segment for segment in profile.segments if segment.count == 3)
        for profile in (trace, closed_form)
    )
    assert sorted(layer.matmuls) == sorted(theirs.matmuls)
    assert layer.forward_flops == theirs.forward_flops


def test_only_the_selected_experts_of_a_token_count_as_computed() -> None:
    def flops_of(**changed: int) -> float:
        model = ModelSpec(hf=QWEN | {"num_hidden_layers": 2} | changed)
        spec = JobSpec(
            name="job",
            global_batch_size=4,
            model=model,
            data=DataSpec(text=("text",), sequence_length=32),
        )
        profile = find_rank_profile(read_model_request(spec), RankShare(precision=Precision.FP32))
        assert profile is not None
        return profile.forward_flops

    assert trace_model(ModelSpec(hf=QWEN | {"num_hidden_layers": 2})).forward_flops == flops_of()
    hidden, router = QWEN["hidden_size"], 2.0 * 2 * 32 * QWEN["hidden_size"]
    assert flops_of(num_experts=8) - flops_of() == 4 * router
    assert (
        flops_of(num_experts_per_tok=3) - flops_of()
        == 2 * 2.0 * 32 * 3 * hidden * QWEN["moe_intermediate_size"]
    )


def test_a_convolution_is_the_product_of_patches_and_filters() -> None:
    model = ModelSpec(
        factory=f"{EXAMPLES}/vocoder_gan.py:build",
        config={"width": 16, "frames": 16, "samples": 8, "discriminator_learning_rate": 1e-3},
    )
    for segment in trace_model(model).segments:
        products = sum(2.0 * rows * inner * columns for rows, inner, columns in segment.matmuls)
        assert products == segment.forward_flops, segment.name


def test_autocast_as_on_cuda_casts_exactly_cudas_operations_to_fp32() -> None:
    hidden, weight = torch.ones(2, 8, 4, dtype=torch.bfloat16), torch.ones(8)

    def widths() -> dict[str, torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            made = {
                "norm": functional.group_norm(hidden, 4, weight, weight),
                "softmax": functional.softmax(hidden, -1),
                "said": functional.softmax(hidden, -1, dtype=torch.bfloat16),
                "sum": hidden.sum(),
                "enlarged": functional.interpolate(hidden, scale_factor=2.0),
                "product": hidden @ hidden.mT,
                "activation": functional.silu(hidden),
            }
        return {name: tensor.dtype for name, tensor in made.items()}

    before = widths()
    with autocast_as_on_cuda():
        inside = widths()
    assert {name for name, dtype in inside.items() if dtype is torch.float32} == {
        "norm",
        "softmax",
        "sum",
        "enlarged",
    }
    assert set(before.values()) == {torch.bfloat16}
    assert widths() == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", [pytest.param(DEEPSEEK, marks=pytest.mark.long), GPT2])
def test_attention_saves_no_scores_on_cuda_where_it_does_on_a_cpu(config: dict[str, Any]) -> None:
    kinds = tuple(
        Arithmetic(precision=Precision.BF16, autocast=False, cuda=cuda) for cuda in (False, True)
    )
    fields: dict[str, Any] = {"training": TrainingSpec(), "family": "model", "sequence_length": 64}
    on_cpu, on_cuda = trace_arithmetics(
        Request(model=ModelSpec(hf=config), arithmetics=kinds, **fields)
    )
    assert (on_cpu.attention, on_cuda.attention) == (MATRICES, "memory-efficient")
    scores_bytes = 2 * config.get("num_attention_heads", 4) * 64**2
    for on_host, other in zip(on_cpu.segments[1:-1], on_cuda.segments[1:-1], strict=True):
        assert on_host.saved_bytes > other.saved_bytes + scores_bytes


def test_attention_that_is_alike_on_both_is_traced_once() -> None:
    kinds = tuple(
        Arithmetic(precision=Precision.BF16, autocast=False, cuda=cuda) for cuda in (False, True)
    )
    fields: dict[str, Any] = {"training": TrainingSpec(), "family": "model", "sequence_length": 32}
    model = ModelSpec(hf=LLAMA | {"num_hidden_layers": 2})
    on_cpu, on_cuda = trace_arithmetics(Request(model=model, arithmetics=kinds, **fields))
    assert on_cuda is on_cpu


@pytest.mark.timeout(600)
@pytest.mark.parametrize("quantise", [True, False])
@pytest.mark.parametrize("weights", [None, Precision.BF16])
@pytest.mark.parametrize("is_script", [True, False])
def test_a_frozen_base_is_traced_as_the_closed_form_has_it(
    *, quantise: bool, weights: Precision | None, is_script: bool
) -> None:
    if weights and not is_script:
        pytest.skip("only a script says it")
    model = ModelSpec(
        hf=LLAMA | {"num_hidden_layers": 2},
        lora=LoraSpec(rank=4, quantise_base=quantise),
        weights=weights,
    )
    kind = Arithmetic(precision=Precision.BF16, autocast=weights is None)
    request = replace(REQUEST, model=model, arithmetics=(kind,), any_samples=is_script)
    (trace,) = trace_arithmetics(request)
    text = () if is_script else ("text",)
    spec = JobSpec(
        name="job",
        global_batch_size=4,
        precision=Precision.BF16,
        data=DataSpec(text=text, sequence_length=32),
        command=("python", "train.py") if is_script else None,
        **{"trains" if is_script else "model": model},
    )
    closed_form = find_rank_profile(
        read_model_request(spec),
        RankShare(precision=Precision.BF16, autocast=True),
    )
    assert closed_form is not None
    assert (trace.source, closed_form.source) == (Source.TRACED, Source.CLOSED_FORM)
    assert trace.trained_parameters == closed_form.trained_parameters
    assert trace.compute_weight_bytes(4) == pytest.approx(
        closed_form.compute_weight_bytes(4), rel=1e-4
    )
    assert NF4_BYTES == hf_profiles.NF4_BYTES


def test_frozen_parameters_have_no_gradients() -> None:
    config = {"width": 8, "depth": 2, "size": 8, "samples": 8}
    model = ModelSpec(factory=f"{EXAMPLES}/conv_classifier.py:build", config=config)
    whole, part = (
        trace_model(model),
        trace_model(model, TrainingSpec(freeze=(Freeze(parameters="blocks.0.*"),))),
    )
    layer = next(segment.parameters for segment in whole.segments if segment.count == 2)
    assert part.parameters == whole.parameters
    assert part.trained_parameters == whole.trained_parameters - layer
    assert max(moment.own + moment.done for moment in part.moments) <= part.trained_parameters


@pytest.mark.parametrize(
    ("tied", "last"), [(True, 64), (False, 512 * 64)], ids=("a norm", "the head")
)
def test_fsdp2_does_not_reduce_the_first_embedding_last(tied: bool, last: int) -> None:
    config = LLAMA | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    assert trace_model(ModelSpec(hf=config)).segments[-1].last_gradient == last


def test_a_model_that_takes_real_memory_is_stopped(tmp_path: Path) -> None:
    factory = tmp_path / "greedy.py"
    factory.write_text("import torch\ndef build(config):\n    return torch.ones(2**34)\n")  # 64 GiB
    request = Request(
        model=ModelSpec(factory=f"{factory}:build"),
        training=TrainingSpec(),
        family="model",
        sequence_length=8,
        arithmetics=(Arithmetic(precision=Precision.FP32, autocast=False),),
    )
    path = tmp_path / "request.json"
    path.write_text(json.dumps(dataclasses.asdict(request)))
    child = subprocess.run(
        [sys.executable, "-m", PROGRAM, str(path)], capture_output=True, text=True, check=False
    )
    assert child.returncode not in (0, -signal.SIGKILL)
    assert "allocate" in child.stderr.splitlines()[-1], child.stderr


@pytest.mark.parametrize("bent", ["forward", "backward", "held"])
def test_layers_that_do_not_grow_linearly_are_not_extrapolated(bent: str) -> None:
    def record_steps(layers: int, bend: int) -> RecordedSteps:
        """Layers that save 8 bytes of each sample, and one that saves more."""

        def phases(samples: int) -> list[PlaceVisit]:
            forward = [
                8 * samples * index + (bend if bent == "forward" and index == 2 else 0)
                for index in range(layers)
            ]
            backward = [
                8 * samples * index + (bend if bent == "backward" and index == 2 else 0)
                for index in range(layers)
            ]
            done = [layers - 1 - index for index in range(layers)]
            return [
                PlaceVisit(index, 0, False, [Event(forward[index], 0, 0, 0, 0)])
                for index in range(layers)
            ] + [
                PlaceVisit(index, 0, True, [Event(backward[index], 0, done[index], 0, done[index])])
                for index in reversed(range(layers))
            ]

        held_bytes = tuple(
            {
                index: 8 * samples + (bend if bent == "held" and index == 2 else 0)
                for index in range(layers)
            }
            for samples in (2, 3)
        )
        return RecordedSteps(
            mode=NONE,
            sharded=False,
            zero3=False,
            samples=(2, 3),
            phases=(phases(2), phases(3)),
            bytes_by_place=(held_bytes[0], held_bytes[1]),
        )

    def grown(depth: int, bend: int = 0) -> Timeline:
        places = [
            ModelPlace(name=f"layers.{index}", is_layer=True, parameters=1)
            for index in range(depth)
        ]
        return make_timeline(
            places, [record_steps(depth, bend)], RepeatPattern(lead=0, period=1, length=9), depth
        )

    assert grown(5) == grown(9)
    with pytest.raises(StepsDiffer):
        grown(5, 1)


CALLER = """
import subprocess, sys
subprocess.run([sys.executable, "-m", "orchestrator.training.tracing.trace", sys.argv[1], "600"])
"""


def test_a_trace_ends_with_whoever_waits_for_it(tmp_path: Path) -> None:
    request = tmp_path / "request.json"
    os.mkfifo(request)
    caller = subprocess.Popen([sys.executable, "-c", CALLER, str(request)])
    # opening it waits until the trace has opened it, too, which then waits for the request
    with request.open("w") as pipe:
        caller.kill()
        caller.wait()
        ended = select.poll()
        ended.register(pipe, select.POLLERR)
        assert ended.poll(20_000), "the trace still reads"
