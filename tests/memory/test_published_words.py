"""Laws of what the words of a published row mean: what is adapted is not trained whole, and nothing is guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.architectures import KNOWN, described, known
from orchestrator.memory.foreign import Framework, Rule, Training, head_bytes
from orchestrator.memory.foreign_engines import estimate_foreign
from orchestrator.memory.published import described_row
from orchestrator.memory.published_words import rule_of
from orchestrator.specs.errors import SpecError

ROW = {
    "id": "x1",
    "model": "Llama-3.2-3B",
    "framework": "HF transformers",
    "n_gpus": "1",
    "micro_batch": "4",
    "seq_len": "768",
    "precision": "bf16",
    "optimizer": "AdamW",
}
MEGATRON = {
    "id": "x2",
    "model": "GPT-3",
    "arch": "L12 h512 a8 ffn4x V50304",
    "framework": "Megatron-LM",
    "n_gpus": "8",
    "pp": "4",
    "micro_batch": "4",
    "global_batch": "32",
    "seq_len": "1024",
    "precision": "bf16",
}


def read(row: dict[str, str], **columns: str) -> Training:
    return described_row(row | columns).training


def allocated_bytes(training: Training) -> int:
    return estimate_foreign(training).allocated_bytes


@pytest.mark.parametrize(
    "method",
    ["IA3", "VeRA", "LN tuning", "prompt tuning", "prefix-tuning", "P-Tuning v2", "OFT r32", "LoHa r32", "DoRA r8"],
)
def test_a_model_with_adapters_needs_less_than_one_trained_whole(method: str) -> None:
    adapted, whole = read(ROW, peft=method), read(ROW, peft="Full")
    assert adapted.lora_rank
    assert allocated_bytes(adapted) < 0.6 * allocated_bytes(whole)


def test_dora_keeps_what_its_projections_return() -> None:
    assert allocated_bytes(read(ROW, peft="DoRA r8 q v")) > allocated_bytes(read(ROW, peft="LoRA r8 q v"))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"peft": "frobnication"}, "way of tuning"),
        ({"optimizer": "GaLore AdamW"}, "optimizer's states"),
        ({"model": "T5 11B", "arch": "L24 h4096 a64 ffn10240 V50257"}, "kind of transformer"),
        ({"model": "GPT", "arch": "L12 h512 a8 ffn4x V50257 experts8"}, "mixture of experts"),
        ({"model": "Qwen3-30B-A3B"}, "mixture of experts"),
        ({"model": "RetinaNet R50"}, "image model"),
        ({"model": "FLUX.2-klein-4B", "peft": "LoRA r32"}, "image model"),
        ({"model": "Stable Diffusion 1.5 ControlNet"}, "image model"),
    ],
)
def test_what_has_no_closed_form_is_refused_with_its_reason(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        read(ROW, **columns)


def test_an_optimizer_is_known_by_its_states() -> None:
    said = {"lion": Rule.MOMENTUM, "sgd": Rule.SGD, "adamw_8bit": Rule.ADAM_8BIT, "lomo": Rule.SGD, "adamw": Rule.ADAM}
    assert {name: rule_of(name) for name in said} == said


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama 3.1 (8B)", "llama-3.1-8b"),
        ("Llama-v2-7b", "llama-2-7b"),
        ("Qwen2_5-7B", "qwen2.5-7b"),
        ("openbmb/MiniCPM-2B-sft-bf16", "minicpm-2b"),
        ("gptj-6B", "gpt-j-6b"),
        ("opt1.3b", "opt-1.3b"),
        ("gpt2-345m", "gpt2-medium"),
        ("granite-3.1-8b-instruct", "granite-3.0-8b"),
        ("allenai/Olmo-3-7B-Instruct-SFT", "olmo-3-7b"),
        ("mistralai/Magistral-Small-2506", "magistral-small"),
    ],
)
def test_more_spellings_name_a_public_model(written: str, name: str) -> None:
    assert known(written) is KNOWN[name]


def test_an_architecture_says_itself_whether_it_is_gated_and_tied() -> None:
    said = {"kv8 ffn4x": (False, True), "kv8 ffn4x swiglu untied": (True, False), "ffn4x untied rope": (False, False)}
    for words, expected in said.items():
        found = described(f"L2 h512 a8 {words} V50304")
        assert found is not None
        assert (found[0].gated, found[0].tied) == expected
    rotary = described("L2 h512 a8 ffn4x V50304 rope")
    assert rotary is not None
    assert rotary[0].positions == 0


def test_the_last_rank_of_an_interleaved_pipeline_holds_fewer_chunks_than_the_first() -> None:
    worst = read(MEGATRON, compile_or_other="VPP=3")
    last = read(MEGATRON, compile_or_other="VPP=3", note="measured on the last rank")
    assert last.stage == 3
    kept = [dict(estimate_foreign(replace(worst, stage=stage)).by_cause)["saved activations"] for stage in range(4)]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[3] == dict(estimate_foreign(last).by_cause)["saved activations"]


def test_attention_that_is_not_fused_holds_its_scores() -> None:
    fused, unfused = read(MEGATRON), read(MEGATRON, compile_or_other="attention backend unfused")
    assert (fused.flash, unfused.flash) == (True, False)


def test_megatron_makes_gradients_of_logits_in_place_but_for_2022_and_compiled_losses() -> None:
    today = read(MEGATRON)
    assert today.framework is Framework.MEGATRON
    logits = today.tokens * today.shape.vocab
    for other in (replace(today, is_old=True), read(MEGATRON, compile_or_other="fused cross entropy")):
        assert head_bytes(other) - head_bytes(today) == 4 * logits
