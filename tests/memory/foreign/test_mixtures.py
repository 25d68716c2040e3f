"""Laws of mixtures of experts in other people's trainings."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.foreign.activations import saved_bytes
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.kernels import Kernels
from orchestrator.memory.foreign.mixtures import KNOWN, known_mixture
from orchestrator.memory.foreign.optimizers import Optimizer
from orchestrator.memory.foreign.published import Described, described_row
from orchestrator.memory.foreign.row import COLUMNS
from orchestrator.memory.foreign.training import Training, layer_held
from orchestrator.specs.errors import SpecError

DENSE = "L24 h2048 a16 kv8 ffn4096 V32000"
PLAIN = Training(shape=KNOWN["qwen3-30b-a3b"], framework=Framework.PLAIN, micro_batch_size=2, sequence_length=1024)
MEGATRON = replace(
    PLAIN,
    framework=Framework.MEGATRON,
    optimizer=Optimizer(masters=True),
    zero_stage=1,
    dp=8,
    kernels=Kernels(fused=True, fuses_norms=True),
)


def read(**columns: str) -> Described:
    row = dict.fromkeys(COLUMNS, "") | {"id": "x", "framework": "HF Trainer", "micro_batch": "2", "seq_len": "1024"}
    return described_row(row | columns)


def needed(**columns: str) -> int:
    return estimate_foreign(read(**columns).training).allocated_bytes


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' own pages count them
        ("mixtral-8x7b", 46_702_792_704),
        ("qwen1.5-moe-a2.7b", 14_315_784_192),
        ("qwen2-57b-a14b", 57_409_011_712),
        ("qwen3-30b-a3b", 30_532_122_624),
        ("qwen3-235b-a22b", 235_093_634_560),
        ("olmoe-1b-7b", 6_919_161_856),
        ("phi-3.5-moe", 41_873_153_344),
        ("gpt-oss-20b", 20_914_757_184),
    ],
)
def test_a_mixture_has_the_parameters_that_its_publisher_counts(name: str, parameters: int) -> None:
    assert KNOWN[name].parameters == pytest.approx(parameters, rel=6e-4)  # biases are not counted


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("mistralai/Mixtral-8x7B-Instruct-v0.1", "mixtral-8x7b"),
        ("Mixtral 8x22B", "mixtral-8x22b"),
        ("Qwen/Qwen3-30B-A3B-Instruct-2507", "qwen3-30b-a3b"),
        ("Qwen3-Coder-30B-A3B-Instruct", "qwen3-30b-a3b"),
        ("Qwen1.5-MoE-A2.7B-Chat", "qwen1.5-moe-a2.7b"),
        ("allenai/OLMoE-1B-7B-0924", "olmoe-1b-7b"),
        ("unsloth/gpt-oss-20b-unsloth-bnb-4bit", "gpt-oss-20b"),
        ("microsoft/Phi-3.5-MoE-instruct", "phi-3.5-moe"),
    ],
)
def test_a_mixture_is_known_by_every_usual_spelling(written: str, name: str) -> None:
    assert known_mixture(written) is KNOWN[name]


def test_all_experts_are_held_and_only_the_chosen_ones_keep_activations() -> None:
    few, many = (replace(PLAIN, shape=replace(PLAIN.shape, experts=count)) for count in (64, 128))
    assert layer_held(many).trained > 1.9 * layer_held(few).trained
    assert saved_bytes(many) < 1.01 * saved_bytes(few)
    more = replace(PLAIN, shape=replace(PLAIN.shape, chosen=16))
    copies = PLAIN.tokens * 8 * 2 * (4 * PLAIN.shape.ffn + 2 * PLAIN.shape.hidden)
    assert saved_bytes(more) - saved_bytes(PLAIN) == pytest.approx(copies, rel=0.02)


def test_one_expert_that_everyone_takes_is_nearly_a_dense_layer() -> None:
    dense = needed(model="Frobnicator", arch=DENSE)
    assert needed(model="Frobnicator", arch=f"{DENSE} experts1 top1") == pytest.approx(dense, rel=0.05)
    assert needed(model="Frobnicator", arch=f"{DENSE} experts8 top1") > 2 * dense


def test_expert_parallelism_spreads_experts_and_their_states_and_nothing_else() -> None:
    spread = replace(MEGATRON, ep=8)
    shape = MEGATRON.shape
    less = layer_held(MEGATRON).trained - layer_held(spread).trained
    assert less == shape.routed_matrices * 7 // 8
    states, together = (dict(estimate_foreign(one).by_cause)["optimizer states"] for one in (spread, MEGATRON))
    assert states == pytest.approx(together, rel=1e-6)  # an eighth of the experts, but no other rank has them
    assert saved_bytes(spread) == saved_bytes(MEGATRON)


def test_even_routing_is_taken_and_said_where_experts_are_spread() -> None:
    row = {"model": "Qwen3-30B-A3B", "framework": "Megatron-LM", "n_gpus": "8", "tp": "1"}
    assert not any("evenly" in said for said in read(**row).inferred)
    described = read(**row, ep="8")
    assert described.training.ep == 8
    assert any("evenly" in said for said in described.inferred)


def test_a_spread_that_is_not_stated_or_not_modelled_is_refused() -> None:
    with pytest.raises(SpecError, match="degree that is not stated"):
        read(model="Qwen3-30B-A3B", framework="Megatron-LM", n_gpus="16")
    with pytest.raises(SpecError, match="more devices than are stated"):
        read(model="Qwen3-30B-A3B", framework="Megatron-LM", n_gpus="8", tp="2", ep="8")
    with pytest.raises(SpecError, match="no model of expert parallelism"):
        read(model="Qwen3-30B-A3B", framework="DeepSpeed", sharding="ZeRO-2", n_gpus="8", ep="8")


def test_adapters_of_experts_stand_beside_each_of_them() -> None:
    attention = read(model="Mixtral 8x7B", peft="LoRA r16 q v").training
    everything = read(model="Mixtral 8x7B", peft="LoRA r16 all linear").training
    assert layer_held(everything).trained > 8 * 3 * 16 * (4096 + 14336)
    assert layer_held(attention).trained == 16 * (4096 + 4096 + 4096 + 1024)
    assert saved_bytes(everything) > saved_bytes(attention)


def test_experts_in_one_tensor_get_adapters_only_where_they_are_named() -> None:
    usual = read(model="gpt-oss-20b", peft="LoRA r8 all linear").training
    named = read(model="gpt-oss-20b", peft="LoRA r8 all linear, target_parameters experts").training
    assert usual.adapters.targets == ("q", "k", "v", "o")
    assert named.adapters.targets == ()


def test_swift_leaves_experts_whole_and_megatron_cuts_them_as_all_else() -> None:
    row = {"model": "Qwen3-30B-A3B", "n_gpus": "8", "tp": "4", "ep": "2"}
    assert read(**row, framework="Megatron-LM").training.expert_tp == 4
    assert read(**row, framework="ms-swift Megatron-LM").training.expert_tp == 1
    assert read(**row, framework="Megatron-LM", compile_or_other="ETP2").training.expert_tp == 2


def test_experts_have_communicators_of_their_own() -> None:
    def around(training: Training) -> int:
        estimate = estimate_foreign(training)
        return estimate.device_bytes - estimate.reserved_bytes

    one, two = around(replace(MEGATRON, ep=8)), around(replace(MEGATRON, ep=4))
    assert around(MEGATRON) < one < two  # the other copies of a fourth of them reduce its gradients


def test_a_plain_activation_is_kept_beside_its_weighted_copy_in_megatron() -> None:
    said = "L12 h512 a8 ffn4x V50257"
    dense, mixed = (
        read(model="GPT-3", arch=arch, framework="Megatron-LM", n_gpus="8", tp="1").training
        for arch in (said, f"{said} experts8 top1")
    )
    more = mixed.width * (512 + 2048)  # what goes into the expert, and what its activation returns
    assert saved_bytes(mixed) - saved_bytes(dense) == mixed.tokens * more


DEGREES = st.integers(min_value=0, max_value=8)


@settings(deadline=None)
@given(tp=DEGREES, pp=DEGREES, ep=DEGREES, expert_tp=DEGREES, gpus=st.integers(min_value=0, max_value=64))
def test_any_spread_is_counted_or_refused(tp: int, pp: int, ep: int, expert_tp: int, gpus: int) -> None:
    said = f"TP{tp}, PP{pp}, EP{ep}, ETP{expert_tp}"
    try:
        training = read(model="Mixtral 8x7B", framework="Megatron-LM", n_gpus=str(gpus), compile_or_other=said).training
    except SpecError:
        return
    assert estimate_foreign(training).allocated_bytes > 0
