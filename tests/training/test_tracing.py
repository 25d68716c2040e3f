"""Laws of the trace: extrapolations equal recordings, and frozen parameters have no gradients."""

from __future__ import annotations

import dataclasses
import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional
from transformers import AutoConfig, AutoModelForCausalLM

from orchestrator.memory.models import hf as hf_profiles
from orchestrator.memory.profiles import decoder_profile, profile_of
from orchestrator.service.server.profiling import PROGRAM
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import DataSpec, DecoderSpec, Freeze, LoraSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.profile import ModelProfile, Source, TracedMoment
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.models.hf_adapters import NF4_BYTES
from orchestrator.training.models.hf_weights import FirstValues, without_memory
from orchestrator.training.tracing import trace as tracing
from orchestrator.training.tracing.cuda_autocast import as_on_cuda
from orchestrator.training.tracing.op_recorder import MATRICES
from orchestrator.training.tracing.timeline import Place, Timeline, Unlike, deeper
from orchestrator.training.tracing.trace import Arithmetic, Request, profiles

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
GPT2: dict[str, Any] = {"model_type": "gpt2", "vocab_size": 512, "n_embd": 64, "n_layer": 2, "n_head": 4}
NONE = ActivationCheckpointing.NONE


def traced(model: ModelSpec, training: TrainingSpec | None = None) -> ModelProfile:
    (found,) = profiles(
        Request(
            model=model,
            training=training or TrainingSpec(),
            family="model",
            sequence_length=32,
            arithmetics=(Arithmetic(precision=Precision.FP32, autocast=False),),
        )
    )
    return found


@pytest.mark.timeout(600)  # 10 s on an idle core: importing transformers
@pytest.mark.parametrize(
    ("model", "layers"),
    [
        pytest.param(ModelSpec(hf=LLAMA), "model.layers", id="transformers"),
        pytest.param(ModelSpec(decoder=DECODER), "layers", id="decoder", marks=pytest.mark.long),
    ],
)
def test_a_profile_extrapolated_from_a_few_layers_is_that_of_all_layers(
    model: ModelSpec, layers: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    depths: list[int] = []
    build = tracing.build

    def counted(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
        depths.append(config.num_hidden_layers)
        return build(request, arithmetic, config)

    monkeypatch.setattr(tracing, "build", counted)
    stretched = traced(model)
    assert depths == [4, 6, 8]  # the last one only to count its parameters
    monkeypatch.setattr(tracing, "DEPTHS", (4, 100))
    whole = traced(model)
    assert replace(stretched, fragmentation=()) == replace(whole, fragmentation=()), "that is of the layers it had"
    assert stretched.fragmentation
    assert depths == [4, 6, 8, 8]
    assert [(segment.name, segment.count) for segment in stretched.segments][1] == (layers, 8)
    assert stretched.attention == "flash"


EXPERTS = {"num_experts_per_tok": 2, "moe_intermediate_size": 48, "num_key_value_heads": 4}
LATENT = {"q_lora_rank": 24, "kv_lora_rank": 32, "qk_rope_head_dim": 8, "qk_nope_head_dim": 16, "v_head_dim": 16}
DEEPSEEK = {**LLAMA, **EXPERTS, **LATENT, "model_type": "deepseek_v3", "n_routed_experts": 8, "n_group": 2}
DEEPSEEK |= {"topk_group": 1, "first_k_dense_replace": 1, "num_hidden_layers": 2}
QWEN = {**LLAMA, **EXPERTS, "model_type": "qwen3_moe", "num_experts": 4}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    ("config", "depths"),
    [
        pytest.param(DEEPSEEK | {"num_hidden_layers": 9}, [5, 7, 9], marks=pytest.mark.long),
        (QWEN | {"num_hidden_layers": 8, "mlp_only_layers": [6]}, [4, 6, 8, 8]),
    ],
)
def test_dense_layers_do_not_represent_layers_with_experts(
    monkeypatch: pytest.MonkeyPatch, config: dict[str, Any], depths: list[int]
) -> None:
    seen: list[int] = []
    build = tracing.build

    def counted(request: Request, arithmetic: Arithmetic, config: Any) -> Recipe:
        seen.append(config.num_hidden_layers)
        return build(request, arithmetic, config)

    monkeypatch.setattr(tracing, "build", counted)
    found = traced(ModelSpec(hf=config))
    assert seen == depths
    with torch.device("meta"):
        whole = AutoModelForCausalLM.from_config(AutoConfig.for_model(**config))
    assert found.parameters == sum(parameter.numel() for parameter in whole.parameters())


def test_the_largest_parameters_never_have_memory() -> None:
    with without_memory(FirstValues()):
        large, small = torch.empty(2**14, 2**14), torch.empty(2**14)
    assert large.is_meta
    assert not small.is_meta


def test_recipes_in_turn_hold_the_gradients_of_one_at_a_time_except_under_fsdp2() -> None:
    config = {"width": 16, "frames": 16, "samples": 8, "discriminator_learning_rate": 1e-3}
    found = traced(ModelSpec(factory=f"{EXAMPLES}/vocoder_gan.py:build", config=config))
    discriminator, generator = found.turns
    assert found.trained_parameters == found.parameters == discriminator + generator

    def made(turn: int, *, sharded: bool) -> int:
        return max(one.own + one.done for one in found.moments if (one.turn, one.sharded) == (turn, sharded))

    assert 0 < made(0, sharded=False) <= discriminator
    assert 0 < made(1, sharded=False) <= generator
    assert generator < made(1, sharded=True) <= discriminator + generator


def test_products_of_matrices_are_those_of_the_closed_form() -> None:
    decoder = DecoderSpec(
        vocab_size=256, hidden_size=64, intermediate_size=192, num_hidden_layers=3, num_attention_heads=4
    )
    found, known = traced(ModelSpec(decoder=decoder)), decoder_profile(decoder, "model", Precision.FP32, 32, 1, False)
    ours, theirs = (next(each for each in one.segments if each.count == 3) for one in (found, known))
    assert sorted(ours.matmuls) == sorted(theirs.matmuls)
    assert ours.forward_flops == theirs.forward_flops


def test_only_the_selected_experts_of_a_token_count_as_computed() -> None:
    def known(**changed: int) -> float:
        model = ModelSpec(hf=QWEN | {"num_hidden_layers": 2} | changed)
        spec = JobSpec(name="job", global_batch_size=4, model=model, data=DataSpec(text=("text",), sequence_length=32))
        found = profile_of(spec, precision=Precision.FP32, sequence_length=None)
        assert found is not None
        return found.forward_flops

    assert traced(ModelSpec(hf=QWEN | {"num_hidden_layers": 2})).forward_flops == known()
    hidden, router = QWEN["hidden_size"], 2.0 * 2 * 32 * QWEN["hidden_size"]
    assert known(num_experts=8) - known() == 4 * router
    assert known(num_experts_per_tok=3) - known() == 2 * 2.0 * 32 * 3 * hidden * QWEN["moe_intermediate_size"]


def test_a_convolution_is_the_product_of_patches_and_filters() -> None:
    model = ModelSpec(
        factory=f"{EXAMPLES}/vocoder_gan.py:build",
        config={"width": 16, "frames": 16, "samples": 8, "discriminator_learning_rate": 1e-3},
    )
    for segment in traced(model).segments:
        products = sum(2.0 * rows * inner * columns for rows, inner, columns in segment.matmuls)
        assert products == segment.forward_flops, segment.name


def test_autocast_as_on_cuda_casts_exactly_cudas_operations_to_fp32() -> None:
    given, weight = torch.ones(2, 8, 4, dtype=torch.bfloat16), torch.ones(8)

    def widths() -> dict[str, torch.dtype]:
        with torch.autocast("cpu", torch.bfloat16):
            made = {
                "norm": functional.group_norm(given, 4, weight, weight),
                "softmax": functional.softmax(given, -1),
                "said": functional.softmax(given, -1, dtype=torch.bfloat16),
                "sum": given.sum(),
                "enlarged": functional.interpolate(given, scale_factor=2.0),
                "product": given @ given.mT,
                "activation": functional.silu(given),
            }
        return {name: tensor.dtype for name, tensor in made.items()}

    before = widths()
    with as_on_cuda():
        inside = widths()
    assert {name for name, dtype in inside.items() if dtype is torch.float32} == {"norm", "softmax", "sum", "enlarged"}
    assert set(before.values()) == {torch.bfloat16}
    assert widths() == before


@pytest.mark.timeout(600)
@pytest.mark.parametrize("config", [pytest.param(DEEPSEEK, marks=pytest.mark.long), GPT2])
def test_attention_saves_no_scores_on_cuda_where_it_does_on_a_cpu(config: dict[str, Any]) -> None:
    kinds = tuple(Arithmetic(precision=Precision.BF16, autocast=False, cuda=cuda) for cuda in (False, True))
    said: dict[str, Any] = {"training": TrainingSpec(), "family": "model", "sequence_length": 64}
    on_cpu, on_cuda = profiles(Request(model=ModelSpec(hf=config), arithmetics=kinds, **said))
    assert (on_cpu.attention, on_cuda.attention) == (MATRICES, "memory-efficient")
    scores_bytes = 2 * config.get("num_attention_heads", 4) * 64**2
    for one, other in zip(on_cpu.segments[1:-1], on_cuda.segments[1:-1], strict=True):
        assert one.saved_bytes > other.saved_bytes + scores_bytes


def test_attention_that_is_alike_on_both_is_traced_once() -> None:
    kinds = tuple(Arithmetic(precision=Precision.BF16, autocast=False, cuda=cuda) for cuda in (False, True))
    said: dict[str, Any] = {"training": TrainingSpec(), "family": "model", "sequence_length": 32}
    model = ModelSpec(hf=LLAMA | {"num_hidden_layers": 2})
    on_cpu, on_cuda = profiles(Request(model=model, arithmetics=kinds, **said))
    assert on_cuda is on_cpu


@pytest.mark.timeout(600)
def test_a_base_in_four_bits_is_traced_as_the_closed_form_has_it() -> None:
    model = ModelSpec(hf=LLAMA | {"num_hidden_layers": 2}, lora=LoraSpec(rank=4, quantise_base=True))
    kind = Arithmetic(precision=Precision.BF16, autocast=True)
    said: dict[str, Any] = {"training": TrainingSpec(), "family": "model", "sequence_length": 32}
    (found,) = profiles(Request(model=model, arithmetics=(kind,), **said))
    spec = JobSpec(name="job", global_batch_size=4, model=model, data=DataSpec(text=("text",), sequence_length=32))
    known = profile_of(spec, precision=Precision.BF16, sequence_length=None, autocast=True)
    assert known is not None
    assert (found.source, known.source) == (Source.TRACED, Source.CLOSED_FORM)
    assert found.trained_parameters == known.trained_parameters
    assert found.weight_bytes(4) == pytest.approx(known.weight_bytes(4), rel=1e-4)
    assert NF4_BYTES == hf_profiles.NF4_BYTES


def test_frozen_parameters_have_no_gradients() -> None:
    config = {"width": 8, "depth": 2, "size": 8, "samples": 8}
    model = ModelSpec(factory=f"{EXAMPLES}/conv_classifier.py:build", config=config)
    whole, part = traced(model), traced(model, TrainingSpec(freeze=(Freeze(parameters="blocks.0.*"),)))
    layer = next(segment.parameters for segment in whole.segments if segment.count == 2)
    assert part.parameters == whole.parameters
    assert part.trained_parameters == whole.trained_parameters - layer
    assert max(one.own + one.done for one in part.moments) <= part.trained_parameters


@pytest.mark.parametrize(("tied", "last"), [(True, 64), (False, 512 * 64)], ids=("a norm", "the head"))
def test_fsdp2_does_not_reduce_the_first_embedding_last(tied: bool, last: int) -> None:
    config = LLAMA | {"num_hidden_layers": 2, "tie_word_embeddings": tied}
    assert traced(ModelSpec(hf=config)).segments[-1].last_gradient == last


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
    asked = tmp_path / "request.json"
    asked.write_text(json.dumps(dataclasses.asdict(request)))
    child = subprocess.run([sys.executable, "-m", PROGRAM, str(asked)], capture_output=True, text=True, check=False)
    assert child.returncode not in (0, -signal.SIGKILL)
    assert "allocate" in child.stderr.splitlines()[-1], child.stderr


def test_layers_that_do_not_grow_linearly_are_not_extrapolated() -> None:
    def at_depth(layers: int, fixed_bytes: int) -> Timeline:
        moment = TracedMoment(NONE, 0, 0, layers - 1, True, True, fixed_bytes, 8, 0, 0, 0, 0)
        return Timeline(segments=((Place(name="layers", is_layer=True), layers),), stretches=((moment,),))

    grown = deeper(at_depth(4, 40), at_depth(6, 60), apart=2, more=3)
    assert grown.segments[0][1] == 9
    assert grown.stretches[0][0] == replace_moment(at_depth(6, 60), position=8, fixed_bytes=90)
    with pytest.raises(Unlike):
        deeper(at_depth(4, 40), at_depth(6, 61), apart=2, more=3)
    with pytest.raises(Unlike):
        deeper(at_depth(4, 40), replace(at_depth(6, 60), stretches=()), apart=2, more=3)


def replace_moment(found: Timeline, **changed: int) -> TracedMoment:
    return found.stretches[0][0]._replace(**changed)  # type: ignore[arg-type]
