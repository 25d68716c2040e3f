"""Laws of what the words of a published row mean: what is adapted is not trained whole, and nothing is guessed."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.foreign.activations import kept_bytes, saved_bytes, score_bytes, working_bytes
from orchestrator.memory.foreign.architectures import described
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.optimizers import Rule, rule_of
from orchestrator.memory.foreign.public_models import KNOWN, known
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import ActivationCheckpointing
from tests.memory.foreign.parts import but

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
    assert adapted.adapters.rank
    assert allocated_bytes(adapted) < 0.6 * allocated_bytes(whole)


def test_dora_keeps_what_its_projections_return() -> None:
    assert allocated_bytes(read(ROW, peft="DoRA r8 q v")) > allocated_bytes(read(ROW, peft="LoRA r8 q v"))


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"peft": "frobnication"}, "way of tuning"),
        ({"optimizer": "BAdam"}, "optimizer's states"),
        ({"model": "XLNet", "arch": "L24 h4096 a64 ffn10240 V50257"}, "kind of transformer"),
        ({"model": "Frobnicator-30B-A3B", "arch": "L12 h512 a8 ffn4x V50257"}, "mixture of experts"),
        ({"model": "Mask2Former R50"}, "image model"),
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
    assert last.megatron.stage == 3
    kept = [
        dict(estimate_foreign(but(worst, "megatron", stage=stage)).by_cause)["saved activations"] for stage in range(4)
    ]
    assert kept == sorted(kept, reverse=True)
    assert kept[0] > kept[3] == dict(estimate_foreign(last).by_cause)["saved activations"]


def test_attention_that_is_not_fused_holds_its_scores() -> None:
    fused, unfused = read(MEGATRON), read(MEGATRON, compile_or_other="attention backend unfused")
    assert (fused.kernels.flash, unfused.kernels.flash) == (True, False)


def test_megatron_makes_gradients_of_logits_in_place_but_for_2022_and_compiled_losses() -> None:
    today = read(MEGATRON)
    assert today.framework is Framework.MEGATRON
    logits = today.tokens * today.shape.vocab
    for other in (but(today, "platform", is_old=True), read(MEGATRON, compile_or_other="fused cross entropy")):
        assert head_bytes(other) - head_bytes(today) == 4 * logits


# ----------------------------------------------------------------------------------------------------------- trainers


SHARDED = ROW | {"model": "Llama-2-7b", "n_gpus": "4", "micro_batch": "8", "seq_len": "2048", "act_ckpt": "True"}


def test_masters_have_fp32_states_beside_them() -> None:
    """DeepSpeed's log of a 52B model on 64 ranks: 1.51 GB before its optimizer is there, 10.6 GB after.

    bigscience-workshop/bigscience, experiments/gpt2-meg-ds-zero/meg_ds_zero_gpt2_perf_n16_nbs48_ms48.out.
    """
    training = read(SHARDED, framework="DeepSpeed", sharding="ZeRO-3")
    states = dict(estimate_foreign(training).by_cause)["optimizer states"]
    assert states == pytest.approx(12 * training.shape.parameters / 4, rel=0.01)


def test_buckets_are_as_large_as_the_trainer_makes_them() -> None:
    sizes = {"DeepSpeed": 500_000_000, "HF Trainer + DeepSpeed": 4096**2, "ColossalAI": 12 * 2**20}
    found = {name: read(SHARDED, framework=name, sharding="ZeRO-2").deepspeed.bucket_elements for name in sizes}
    assert found == sizes
    said = {"framework": "DeepSpeed", "sharding": "ZeRO-2", "compile_or_other": "reduce bucket 5e7"}
    assert read(SHARDED, **said).deepspeed.bucket_elements == 50_000_000


@pytest.mark.parametrize(
    ("framework", "elements", "overlaps"),
    [
        ("LLaMA-Factory 0.7.1 + DeepSpeed", 500_000_000, True),
        ("LLaMA-Factory + DeepSpeed", 500_000_000, False),
        ("axolotl (HF Trainer, DeepSpeed)", 500_000_000, True),
        ("ms-swift 2.3 DeepSpeed", 200_000_000, True),
        ("ms-swift DeepSpeed", 200_000_000, False),
    ],
)
def test_configurations_of_trainers_state_their_buckets_up_to_stage_2(
    framework: str, elements: int, overlaps: bool
) -> None:
    low, high = (read(SHARDED, framework=framework, sharding=f"ZeRO-{stage}").deepspeed for stage in (2, 3))
    assert (low.bucket_elements, low.overlaps) == (elements, overlaps)
    assert high.bucket_elements == 4096**2


def test_deepspeed_makes_its_whole_bucket_however_little_is_trained() -> None:
    settings = {"framework": "DeepSpeed", "sharding": "ZeRO-2", "peft": "LoRA r8"}
    alone, twice = read(SHARDED, **settings), read(SHARDED, **settings, compile_or_other="overlap_comm")
    assert [dict(estimate_foreign(one).by_cause)["buckets"] for one in (alone, twice)] == [10**9, 2 * 10**9]


def test_stage_3_casts_the_gradients_of_one_sub_group_at_a_time() -> None:
    large = read(SHARDED, model="Llama-2-70b", framework="DeepSpeed", sharding="ZeRO-3", micro_batch="1")
    found = estimate_foreign(large)
    assert (found.moment, dict(found.by_cause)["optimizer temporaries"]) == ("optimizer step", 6 * 10**9)
    for trainer in ("LLaMA-Factory", "XTuner DeepSpeed", "ms-swift DeepSpeed"):
        torch = read(SHARDED, model="Llama-2-70b", framework=trainer, sharding="ZeRO-3", micro_batch="1")
        assert dict(estimate_foreign(torch).by_cause)["optimizer temporaries"] == 10 * 10**9


def test_stage_3_fetches_ahead_up_to_its_limit_and_the_table_beyond() -> None:
    settings = {"framework": "HF Accelerate + DeepSpeed", "sharding": "ZeRO-3", "offload": "cpu", "peft": "LoRA r8 q v"}
    settings |= {"precision": "fp32", "micro_batch": "1", "seq_len": "64"}
    today = read(SHARDED, model="bigscience/bloomz-7b1", **settings)
    found = dict(estimate_foreign(today).by_cause)
    assert found["buckets"] == 2 * 10**9
    assert found["gathered parameters"] == 4 * (10**9 + today.shape.table)
    before = dict(estimate_foreign(but(today, "platform", is_old=True)).by_cause)
    assert before["gathered parameters"] == 4 * 10**9


def test_weights_and_gradients_of_an_fp32_run_are_wide_under_deepspeed_too() -> None:
    settings = {"framework": "DeepSpeed", "sharding": "ZeRO-3", "micro_batch": "1", "seq_len": "64"}
    low, wide = (dict(estimate_foreign(read(SHARDED, **settings, precision=one)).by_cause) for one in ("bf16", "fp32"))
    assert (wide["parameters"], wide["gradients"]) == (2 * low["parameters"], 2 * low["gradients"])


def test_megatron_cuts_gradients_where_deepspeed_is_at_stage_2() -> None:
    cut = read(MEGATRON, framework="Megatron-DeepSpeed", sharding="ZeRO-2", n_gpus="8", tp="1", pp="1")
    assert (cut.framework, cut.zero_stage) == (Framework.DEEPSPEED, 2)


BRIDGE = MEGATRON | {"framework": "Megatron-Bridge 26.04", "model": "LLAMA3_70B Pre-Training Performance", "arch": ""}
BRIDGE |= {"n_gpus": "64", "tp": "4", "pp": "8", "micro_batch": "1", "seq_len": "8192", "compile_or_other": "VP=5"}


@pytest.mark.parametrize(
    ("framework", "wide"), [("NeMo 2.2 performance scripts (mcore)", False), ("NeMo 2 (mcore)", True)]
)
def test_nemos_performance_scripts_reduce_gradients_in_bf16(framework: str, wide: bool) -> None:
    assert read({**BRIDGE, "framework": f"{framework}, Megatron-LM"}).megatron.fp32_gradients is wide


def test_megatron_bridge_is_read_as_its_performance_recipes_have_it() -> None:
    bridge = read(BRIDGE)
    assert (bridge.megatron.virtual_stages, bridge.megatron.fp32_gradients, bridge.platform.expandable_segments) == (
        5,
        False,
        True,
    )
    assert read(BRIDGE, framework="Megatron-LM").megatron.fp32_gradients
    departs = read(BRIDGE, compile_or_other="VP=5, default allocator")
    assert (departs.megatron.fp32_gradients, departs.platform.expandable_segments) == (True, False)


def test_megatron_fsdp_cuts_parameters_and_gradients_too() -> None:
    """NVIDIA/Megatron-LM tests/functional_tests/test_cases/gpt, gpt3_mcore_te_tp2_zp_z3_resume_fsdp_dtensor."""
    settings = {"framework": "Megatron-LM (mcore)", "pp": "1", "tp": "2", "gpu": "H100 80GB"}
    settings |= {"compile_or_other": "transformer engine", "arch": "L12 h512 a8 ffn4x V50257"}
    cut, whole = (read(MEGATRON, **settings, sharding=one) for one in ("Megatron FSDP", "distributed optimizer"))
    assert (cut.framework, cut.zero_stage, whole.zero_stage) == (Framework.MEGATRON, 3, 1)
    assert allocated_bytes(cut) < allocated_bytes(whole)
    assert allocated_bytes(cut) == pytest.approx(1401.6 * 2**20, rel=0.04)


def test_torch_allocates_what_cublas_works_in_but_for_2022() -> None:
    kinds = ("H100 80GB", "A100 80GB", "V100 32GB")
    found = [dict(estimate_foreign(read(MEGATRON, gpu=gpu)).by_cause).get("workspaces", 0) for gpu in kinds]
    engines = (32 * 2**20, 4 * 2**20, 0)  # what Transformer Engine has beside
    assert [one - more for one, more in zip(found, engines, strict=True)] == [64 * 2**20, 9344 * 2**10, 0]


def test_products_in_8_bits_keep_their_input_so_and_attention_its_result_beside() -> None:
    wide, narrow = read(BRIDGE, precision="BF16"), read(BRIDGE, precision="FP8")
    assert (wide.megatron.fp8, narrow.megatron.fp8) == (False, True)
    shape = wide.shape
    less = (2 * shape.hidden + shape.ffn - shape.query) // 4
    assert saved_bytes(wide) - saved_bytes(narrow) == pytest.approx(less * wide.tokens, rel=1e-3)


def test_megatron_reduces_gradients_where_they_lie_but_for_2022() -> None:
    low = but(read(BRIDGE), "platform", is_old=False)
    causes = [dict(estimate_foreign(one).by_cause) for one in (low, but(low, "platform", is_old=True))]
    assert causes[0]["gradients"] < 2.6 * low.shape.parameters / 32
    assert estimate_foreign(but(low, "platform", is_old=True)).reserved_bytes > estimate_foreign(low).reserved_bytes


def test_models_of_transformers_hold_their_scores_before_4_36() -> None:
    found = [read(ROW, framework=f"HF Trainer (transformers 4.{minor})") for minor in (9, 30, 35, 36, 41)]
    assert [one.kernels.flash for one in found] == [False, False, False, True, True]


def test_llama_factory_leaves_the_ends_of_a_quantised_model_as_they_are() -> None:
    quantised = {"peft": "QLoRA r8 all, 4bit"}
    assert [read(ROW, framework=name, **quantised).adapters.ends_fp32 for name in ("HF Trainer", "LLaMA-Factory")] == [
        True,
        False,
    ]


def test_colossalai_holds_gradients_on_the_device_while_its_states_are_on_the_host() -> None:
    offloaded = read(SHARDED, framework="ColossalAI zero2-cpu", sharding="zero2-cpu", offload="CPU")
    causes = dict(estimate_foreign(offloaded).by_cause)
    assert causes["gradients"] == pytest.approx(2 * offloaded.shape.parameters / 4, rel=0.01)
    assert "optimizer states" not in causes
    with pytest.raises(SpecError, match="no model of the engine"):
        read(SHARDED, framework="ColossalAI gemini")


def test_adapters_over_fp32_weights_that_are_cast_need_six_bytes_of_each() -> None:
    row = ROW | {"model": "Llama-2-7b", "framework": "LitGPT", "peft": "LoRA r8 q v", "micro_batch": "1"}
    true, mixed = read(row, precision="bf16-true"), read(row, precision="bf16-mixed")
    assert (true.autocasts, mixed.autocasts) == (False, True)
    more = allocated_bytes(mixed) - allocated_bytes(true)
    assert more > 4 * 0.95 * mixed.shape.parameters


def test_kernels_that_write_in_place_leave_less_at_work() -> None:
    row = ROW | {"model": "Llama-3.2-1B", "act_ckpt": "True", "seq_len": "65536", "micro_batch": "1"}
    plain = read(row, peft="LoRA r16 all linear", compile_or_other="liger fused linear cross-entropy")
    liger = read(row, peft="LoRA r16 all linear", compile_or_other="Liger-Kernel")
    fused = read(row, peft="LoRA r16 all linear", compile_or_other="fused LoRA kernels, Liger-Kernel")
    assert allocated_bytes(plain) > allocated_bytes(liger) > allocated_bytes(fused)


def test_norms_of_queries_and_keys_are_kept() -> None:
    with_norms = read(ROW, model="Qwen3-8B", peft="LoRA r8 q v")
    without = replace(with_norms, shape=replace(with_norms.shape, qk_norm=False))
    assert allocated_bytes(with_norms) > allocated_bytes(without)


def test_a_row_that_leaves_checkpointing_open_has_it_as_its_trainer_would() -> None:
    assert read(ROW, framework="ms-swift").checkpointing is ActivationCheckpointing.FULL
    assert read(ROW, framework="PyTorch").checkpointing is ActivationCheckpointing.NONE
    assert read(ROW, framework="ms-swift", act_ckpt="False").checkpointing is ActivationCheckpointing.NONE


@pytest.mark.parametrize(
    ("said", "layers"),
    [
        ("every 2 layers", 2),
        ("full, uniform 4 layers", 4),
        ("uniform (3 layers)", 3),
        ("full (1 layer)", 1),
        ("full, every layer", 1),
        ("True", 1),
    ],
)
def test_layers_that_are_made_again_together_keep_one_input_and_are_live_together(said: str, layers: int) -> None:
    alone, together = read(ROW, act_ckpt="True"), read(ROW, act_ckpt=said)
    assert together.layers_made_again == layers
    assert kept_bytes(together) == kept_bytes(alone) // layers
    assert working_bytes(together) - working_bytes(alone) == (layers - 1) * saved_bytes(alone)


@pytest.mark.parametrize(
    "columns", [{"framework": "TRL DPO"}, {"framework": "ms-swift Megatron-LM", "sharding": "ZeRO-1+TP"}]
)
def test_what_says_too_little_of_its_size_is_refused(columns: dict[str, str]) -> None:
    with pytest.raises(SpecError):
        read(ROW, **columns)


@pytest.mark.parametrize(
    ("columns", "tokens"),
    [
        ({"seq_len": "2,048"}, 4 * 2048),
        ({"seq_len": "4k"}, 4 * 4096),
        ({"seq_len": "up to 1024"}, 4 * 1024),
        ({"seq_len": "seq_len=512", "micro_batch": "bs 2"}, 2 * 512),
        ({"seq_len": "~300"}, 4 * 300),
    ],
)
def test_a_length_is_read_however_it_is_written(columns: dict[str, str], tokens: int) -> None:
    assert read(ROW, **columns).tokens == tokens


def test_words_for_devices_precision_and_offload_are_read() -> None:
    assert read(SHARDED, sharding="FULL_SHARD", n_gpus="2 nodes x 8").dp == 16
    assert read(ROW, precision="32-true").low_precision is False
    assert read(ROW, precision="mixed (fp16)").low_precision is True
    assert read(SHARDED, framework="DeepSpeed", sharding="ZeRO-2-offload").offload_optimizer is True
    assert read(ROW, optimizer="AdamW", peft="LoRA r8, 8bit base").optimizer.rule is Rule.ADAM
    assert read(ROW, peft="LoRA (rank: 8) qkv").adapters.targets == ("q", "k", "v")
    assert read(ROW, framework="nanotron", tp="2", n_gpus="2", peft="").framework is Framework.MEGATRON


def test_a_run_of_2022_has_the_context_of_its_device_and_an_optimizer_that_takes_one_parameter_at_a_time() -> None:
    row = ROW | {"model": "bert-large-uncased", "framework": "HF Trainer (2022)", "precision": "fp32"}
    old, new = read(row, gpu="V100"), read(row | {"framework": "HF Trainer"}, gpu="A100")
    assert (old.optimizer.foreach, new.optimizer.foreach) == (False, True)
    volta, ampere = (estimate_foreign(but(old, "platform", on_volta=on)).device_bytes for on in (True, False))
    assert ampere - volta == 503_000_000  # 1.78 GiB of an A100, 1,343 MiB of a V100


@pytest.mark.parametrize("year", range(2019, 2025))
def test_a_year_before_2023_is_of_another_software(year: int) -> None:
    platform = read(ROW, framework=f"HF Trainer ({year}-07)").platform
    assert (platform.is_old, platform.keeps_gradients) == (year < 2023, year < 2023)


def test_a_v100_is_of_the_years_before_2023_unless_a_later_one_is_said() -> None:
    old = [read(ROW, gpu="V100", framework=f"HF Trainer{when}").platform.is_old for when in ("", " (2022)", " (2023)")]
    assert old == [True, True, False]


@pytest.mark.parametrize(
    ("columns", "copies"),
    [
        ({"framework": "HF Trainer (torch 2.0)"}, 2),
        ({"framework": "HF Trainer (torch 2.1)"}, 1),
        ({"framework": "HF Trainer (torch 2.0)", "optimizer": "SGD with momentum"}, 1),
        ({"framework": "HF Trainer (torch 2.0)", "optimizer": "AdamW fused"}, 0),
    ],
)
def test_torch_2_0_adds_epsilon_to_a_copy_of_all_that_is_trained(columns: dict[str, str], copies: int) -> None:
    training = read(ROW, peft="Full", precision="pure bf16", micro_batch="1", seq_len="64", **columns)
    causes = dict(estimate_foreign(training).by_cause)
    assert causes.get("optimizer temporaries", 0) == copies * causes["gradients"]


@pytest.mark.parametrize(
    ("columns", "bytes_of_a_logit"),
    [
        ({"framework": "HF Trainer"}, 12),
        ({"framework": "HF Trainer (transformers 4.45)"}, 12),
        ({"framework": "HF Trainer (transformers 4.48)"}, 14),
        ({"framework": "HF Trainer (transformers 4.48)", "model": "gpt2-xl"}, 12),
        ({"framework": "HF Trainer (transformers 4.48)", "precision": "fp32"}, 12),
        ({"framework": "HF transformers 4.52"}, 12),
        ({"framework": "transformers 5.13"}, 12),
        ({"framework": "HF Trainer + DeepSpeed", "sharding": "ZeRO-2", "model": "Qwen-7B-Chat"}, 6),
        ({"framework": "HF Trainer + DeepSpeed", "sharding": "ZeRO-3", "model": "gpt2-xl"}, 6),
    ],
)
def test_a_loss_holds_the_copies_of_logits_that_its_code_makes(columns: dict[str, str], bytes_of_a_logit: int) -> None:
    training = read(ROW, **columns)
    wider = replace(training, shape=replace(training.shape, vocab=2 * training.shape.vocab))
    more = head_bytes(wider) - head_bytes(training)
    assert more == bytes_of_a_logit * training.tokens * training.shape.vocab


def test_nanotron_keeps_what_it_gathers_for_both_blocks_of_a_layer() -> None:
    row = ROW | {"framework": "nanotron", "tp": "4", "n_gpus": "4", "peft": ""}
    kept = read(row)
    recomputed = read(row, compile_or_other="tp_recompute_allgather")
    assert (kept.sequence_parallel, recomputed.sequence_parallel) == (True, True)
    gathered = kept.tokens * kept.width * kept.shape.hidden * 3 // 4
    assert saved_bytes(kept) - saved_bytes(recomputed) == 2 * gathered
    alone, same = (read(row, tp="1", n_gpus="1", compile_or_other=other) for other in ("", "tp_recompute_allgather"))
    assert saved_bytes(alone) == saved_bytes(same)


def test_autocast_keeps_attention_in_fp32() -> None:
    row = ROW | {"model": "bert-large-uncased", "framework": "HF Trainer (2022)", "precision": "fp16 (AMP)"}
    mixed = read(row)
    assert mixed.autocasts
    scores = mixed.shape.heads * mixed.sequence_length * mixed.tokens
    assert score_bytes(mixed) - score_bytes(replace(mixed, autocasts=False)) == 2 * scores


def test_quantised_products_return_what_fp32_norms_hand_them_unless_autocast_casts_it() -> None:
    quantised = {"peft": "QLoRA r8 all linear, 4bit"}
    assert read(ROW, **quantised, precision="bf16 mixed").width == 2
    assert read(ROW, **quantised, precision="bf16 true").width == 4
    assert read(ROW, peft="LoRA r8 all linear", precision="bf16 true").width == 2


def test_a_gelu_of_elementary_operations_keeps_three_more_of_its_width() -> None:
    row = ROW | {"peft": "Full", "precision": "bf16 true"}
    gpt2, opt = (read(row, model=name, framework="HF Trainer") for name in ("gpt2-xl", "facebook/opt-1.3b"))
    assert (gpt2.kernels.composed_gelu, opt.kernels.composed_gelu) == (True, False)
    assert not read(
        row, model="gpt2-xl", framework="HF Trainer", compile_or_other="torch.compile"
    ).kernels.composed_gelu
    assert not read(row, model="gpt2-xl", framework="Megatron-LM", n_gpus="1").kernels.composed_gelu
    more = saved_bytes(gpt2) - saved_bytes(but(gpt2, "kernels", composed_gelu=False))
    assert more == 3 * gpt2.tokens * gpt2.width * gpt2.shape.ffn  # counted on live storages of gelu_new, 2026-11


def test_a_trainer_holds_gradients_back_and_a_loop_of_ones_own_does_not() -> None:
    row = ROW | {"sharding": "FULL_SHARD", "n_gpus": "2", "grad_accum": "4"}
    assert read(row, framework="HF transformers").fsdp.unsynced
    assert not read(row, framework="somebody's trainer (own loop, HF transformers)").fsdp.unsynced


def test_llama_recipes_trains_models_of_transformers_in_a_loop_of_its_own() -> None:
    row = ROW | {"sharding": "FULL_SHARD", "n_gpus": "2", "grad_accum": "4", "peft": "LoRA r8", "act_ckpt": "True"}
    theirs = read(row, framework="llama-recipes FSDP1 (HF transformers)").fsdp
    assert not theirs.unsynced
    assert not theirs.holds_boundaries
    trainer = read(row, framework="HF Trainer FSDP1").fsdp
    assert trainer.unsynced
    assert trainer.holds_boundaries


def test_swift_cuts_what_the_optimizer_keeps_unless_it_is_told_otherwise() -> None:
    assert read(ROW, framework="ms-swift Megatron-LM", n_gpus="4").zero_stage == 1
    assert read(ROW, framework="Megatron-LM", n_gpus="4").zero_stage == 0
