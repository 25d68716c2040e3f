"""Laws of other people's trainings: what a row says, and how the bytes of each engine follow from it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.foreign.activations import kept_bytes, saved_bytes
from orchestrator.memory.foreign.adapters import Adapters
from orchestrator.memory.foreign.architectures import described
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.kernels import Kernels
from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.megatron import megatron_moments
from orchestrator.memory.foreign.optimizers import Optimizer
from orchestrator.memory.foreign.public_models import KNOWN, known
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.row import COLUMNS
from orchestrator.memory.foreign.training import Training, layer_held
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import ActivationCheckpointing
from tests.memory.foreign.parts import but

MEGATRON = Training(
    shape=replace(KNOWN["gpt-3-1.3b"], vocab=50304),
    framework=Framework.MEGATRON,
    micro_batch_size=2,
    sequence_length=1024,
    optimizer=Optimizer(masters=True),
    checkpointing=ActivationCheckpointing.FULL,
    gradient_accumulation_steps=8,
)
PLAIN = Training(shape=KNOWN["llama-2-7b"], framework=Framework.PLAIN, micro_batch_size=1, sequence_length=512)
ROW = {
    "id": "x1",
    "model": "Llama-2 7B",
    "framework": "HF Trainer",
    "n_gpus": "1",
    "micro_batch": "2",
    "seq_len": "1024",
    "precision": "bf16",
    "act_ckpt": "True",
    "peft": "QLoRA r16 all linear",
}


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


def by_cause(training: Training) -> Mapping[str, int]:
    return dict(estimate_foreign(training).by_cause)


# ------------------------------------------------------------------------------------------------------ architectures


@pytest.mark.parametrize(
    ("name", "parameters"),
    [  # as the models' own pages count them
        ("llama-2-7b", 6_738_415_616),
        ("llama-3.1-8b", 8_030_261_248),
        ("llama-3.2-3b", 3_212_749_824),
        ("mistral-7b", 7_241_732_096),
        ("gpt2", 124_439_808),
        ("gpt2-xl", 1_557_611_200),
        ("bloom", 176_247_271_424),
        ("qwen2.5-14b", 14_770_033_664),
        ("mistral-nemo", 12_247_782_400),
        ("phi-4", 14_659_507_200),
        ("starcoder2-3b", 3_030_371_328),
        ("smollm2-1.7b", 1_711_376_384),
        ("olmo-2-1b", 1_484_916_736),
        ("stablelm-3b-4e1t", 2_795_443_200),
        ("biogpt", 346_763_264),
        ("opt-350m", 331_196_416 - 2 * 512 * 1024),  # but for what projects its narrow embedding
    ],
)
def test_a_public_shape_has_the_parameters_that_its_publisher_counts(name: str, parameters: int) -> None:
    assert KNOWN[name].parameters == pytest.approx(parameters, rel=1e-4)


@pytest.mark.parametrize(
    ("written", "name"),
    [
        ("Llama 3.1 8B", "llama-3.1-8b"),
        ("meta-llama/Llama-3.2-3B-Instruct", "llama-3.2-3b"),
        ("Llama3-70B SFT", "llama-3-70b"),
        ("qwen-1_8b-chat", "qwen-1.8b"),
        ("qwen-72b-chat (2*A100)", "qwen-72b"),
        ("Qwen2.5-14B", "qwen2.5-14b"),
        ("Mistral 7B v0.2", "mistral-7b"),
        ("gpt2_large", "gpt2-large"),
        ("BERT_base", "bert-base"),
        ("FacebookAI/xlm-roberta-large", "xlm-roberta-large"),
        ("lmsys/vicuna-7b-v1.5", "vicuna-7b"),
        ("openlm-research/open_llama_3b_v2", "open-llama-3b"),
        ("microsoft/Phi-3-medium-4k-instruct", "phi-3-medium"),
        ("stabilityai/stablelm-2-1_6b", "stablelm-2-1.6b"),
        ("mistralai/Mistral-Large-Instruct-2407", "mistral-large"),
        ("allenai/OLMo-2-1124-7B-Instruct", "olmo-2-7b"),
        ("internlm/internlm2_5-7b-chat", "internlm2.5-7b"),
        ("Qwen/Qwen2.5-Coder-7B-Instruct", "qwen2.5-7b"),
        ("llama_2_7b", "llama-2-7b"),
        ("Qwen-7B-Chat-Int4", "qwen-7b"),
        ("TheBloke/Llama-2-7B-GPTQ", "llama-2-7b"),
        ("unsloth/Meta-Llama-3.1-8B-Instruct-bnb-4bit", "llama-3.1-8b"),
        ("bigscience/bloomz-7b1", "bloom-7b1"),
        ("LLaMA-33B", "llama-30b"),
        ("tiny-llama", "tinyllama-1.1b"),
        ("canopylabs/orpheus-3b-0.1-ft", "orpheus-3b"),
        ("openlm-research/open_llama_3b", "open-llama-3b"),
        ("HuggingFaceH4/zephyr-7b-sft-full", "zephyr-7b"),
        ("NousResearch/Nous-Hermes-llama2-13b", "llama-2-13b"),
        ("GPT-350M", "gpt-3-350m"),
        ("nanoGPT", "gpt2"),
        ("LLAMA3.1_405B Pre-Training Performance", "llama-3.1-405b"),
        ("Phi3-mini", "phi-3-mini"),
        ("stablelm-base-alpha-3b", "stablelm-alpha-3b"),
        ("Qwen/Qwen3-14B-FP8", "qwen3-14b"),
    ],
)
def test_a_model_is_known_by_every_usual_spelling(written: str, name: str) -> None:
    assert known(written) is KNOWN[name]


def test_every_model_of_the_table_is_found_by_its_own_name() -> None:
    assert [name for name in KNOWN if known(name) is not KNOWN[name]] == []


def test_an_unknown_model_is_not_guessed() -> None:
    assert known("Frobnicator 9B") is None


def test_an_architecture_string_says_a_gated_and_an_ungated_shape() -> None:
    found = described("L28 h3072 a24 kv8 ffn8192 V128256 tied")
    assert found is not None
    gated, inferred = found
    assert gated == KNOWN["llama-3.2-3b"]
    assert not inferred
    found = described("L32 h4096 a32 ffn4x V50368 flash learned-pos tied")
    assert found is not None
    ungated = found[0]
    assert (ungated.gated, ungated.ffn, ungated.flash, ungated.tied) == (False, 16384, True, True)
    assert ungated.parameters == pytest.approx(6_658_859_008, rel=2e-3)  # as llm-foundry counts it, without biases


# --------------------------------------------------------------------------------------------------------------- rows


def test_what_was_measured_never_enters_the_description() -> None:
    measured = {"mem": "71.3", "mem_unit": "GiB", "mem_kind": "peak reserved", "fits": "OOM", "tput": "9"}
    assert described_row(ROW | measured) == described_row(ROW)


def test_a_row_says_adapters_over_a_quantised_base() -> None:
    training = read()
    assert (training.adapters.rank, training.adapters.base_bytes is not None, training.adapters.ends_fp32) == (
        16,
        True,
        True,
    )
    assert training.micro_batch_size * training.sequence_length == 2048


@pytest.mark.parametrize(
    ("columns", "reason"),
    [
        ({"model": "resnet50"}, "convolutional"),
        ({"model": "whisper-small"}, "no closed form"),
        ({"model": "Frobnicator 9B"}, "neither described nor publicly known"),
        ({"model": "deepseek-ai/DeepSeek-V2-Lite"}, "latent attention"),
        ({"seq_len": "wikitext, length not confirmed"}, "length of the samples"),
        ({"seq_len": "512x1024 Cityscapes"}, "images"),
        ({"model": "kernel:cross_entropy"}, "kernel"),
        ({"model": "ViT-H"}, "size of the images"),
        ({"model": "google/umt5-small"}, "no closed form"),
        ({"model": "Frobnicator 9B"}, "write it into the column arch"),
        ({"framework": "HF Trainer", "tp": "4"}, "no model of tensor"),
        ({"framework": "MaxText (JAX)"}, "no model of the engine"),
        ({"framework": "torchtitan", "n_gpus": "8", "pp": "4"}, "no model of tensor, pipeline"),
    ],
)
def test_a_row_that_cannot_be_described_says_why(columns: dict[str, str], reason: str) -> None:
    with pytest.raises(SpecError, match=reason):
        described_row(ROW | columns)


@pytest.mark.parametrize(
    ("peft", "targets"),
    [
        ("LoRA r8 q_proj v_proj", ("q", "v")),
        ("LoRA r8 (c_attn)", ("q", "k", "v")),
        ("LoRA r64 c_attn c_proj w1 w2", ("q", "k", "v", "o", "down", "gate", "up")),
        ("LoRA r64 c_attn attn.c_proj", ("q", "k", "v", "o")),
        ("LoRA r8 wqkv wo w1 w2 w3", ("q", "k", "v", "o", "gate", "down", "up")),
        ("LoRA r8 query_key_value dense_h_to_4h dense_4h_to_h", ("q", "k", "v", "up", "down")),
        ("LoRA r8 W_pack out_proj fc1 gate_up_proj", ("q", "k", "v", "o", "up", "gate")),
        ("LoRA r8 all linear", ()),
        ("LoRA r8", ("q", "k", "v")),
    ],
)
def test_a_row_says_which_projections_are_adapted(peft: str, targets: tuple[str, ...]) -> None:
    assert read(peft=peft).adapters.targets == targets


@pytest.mark.parametrize(
    ("precision", "low", "wide"), [("bf16-true", True, False), ("bf16-mixed", True, True), ("32-true", False, False)]
)
def test_a_row_says_whether_weights_stay_wide(precision: str, low: bool, wide: bool) -> None:
    training = read(peft="Full", precision=precision)
    assert (training.low_precision, training.autocasts) == (low, wide)


def test_context_parallel_ranks_share_the_samples_and_the_states() -> None:
    whole = read(peft="Full", framework="torchtitan", n_gpus="8", sharding="FULL_SHARD")
    cut = read(peft="Full", framework="torchtitan", n_gpus="8", sharding="FULL_SHARD", cp="4")
    assert (cut.sequence_length, cut.dp) == (whole.sequence_length // 4, whole.dp)


def test_what_a_row_leaves_open_makes_a_lower_bound() -> None:
    assert not described_row(ROW).is_lower_bound
    for column in ("micro_batch", "seq_len"):
        found = described_row(ROW | {column: ""})
        assert found.is_lower_bound
        assert any("not stated" in said for said in found.inferred)


@settings(deadline=None)
@given(columns=st.dictionaries(st.sampled_from(COLUMNS), st.text(max_size=40)))
def test_any_row_is_described_or_refused(columns: dict[str, str]) -> None:
    try:
        training = described_row(ROW | columns).training
    except SpecError:
        return
    estimate = estimate_foreign(training)
    assert 0 < estimate.allocated_bytes <= estimate.reserved_bytes <= estimate.device_bytes


# ------------------------------------------------------------------------------------------------------------ engines


def test_zero_1_cuts_masters_and_moments_over_data_parallel_ranks() -> None:
    whole = replace(MEGATRON, framework=Framework.MEGATRON_DEEPSPEED, dp=8, zero_stage=0)
    states, cut = by_cause(whole)["optimizer states"], by_cause(replace(whole, zero_stage=1))["optimizer states"]
    assert states == 12 * whole.shape.parameters
    assert cut == pytest.approx(states / 8, abs=1)


def test_megatron_holds_the_states_that_it_is_told_to_and_where() -> None:
    row = {"framework": "Megatron-LM", "tp": "4", "n_gpus": "4", "peft": "Full"}
    wide, low = read(**row), read(**row, optimizer="Adam (bf16 states)")
    assert by_cause(low)["optimizer states"] == by_cause(wide)["optimizer states"] * 8 // 12
    assert "optimizer states" not in by_cause(read(**row, offload="optimizer to CPU"))


def test_gradients_added_up_in_fp32_lie_beside_those_of_the_backward_pass() -> None:
    training = replace(MEGATRON, framework=Framework.MEGATRON_DEEPSPEED, dp=64, zero_stage=1)
    more = by_cause(but(training, "megatron", fp32_gradients=True))["gradients"] - by_cause(training)["gradients"]
    assert more == pytest.approx(4 * training.shape.parameters)


def test_in_no_buffer_the_gradients_of_a_step_stay_until_the_next_are_reduced() -> None:
    last_step, low_bytes = "gradients of the last step", 2 * MEGATRON.shape.parameters
    old = but(MEGATRON, "platform", is_old=True)
    backward, reduction, _ = (dict(causes) for _, causes, _ in megatron_moments(old, 0))
    assert backward[last_step] == reduction["flat gradients"] == low_bytes
    assert last_step not in reduction
    for buffered in (MEGATRON, but(old, "megatron", fp32_gradients=True), but(old, "megatron", first_step=True)):
        assert by_cause(buffered).get(last_step, 0) == 0


def test_every_stage_keeps_one_micro_batch_less_than_the_one_before() -> None:
    training = replace(MEGATRON, pp=4, framework=Framework.MEGATRON_DEEPSPEED, micro_batch_size=16)
    layers = training.shape.layers // 4
    step = (layers + 1) * kept_bytes(training)  # and the message that came in
    middle = [by_cause(but(training, "megatron", stage=stage))["saved activations"] for stage in (1, 2)]
    assert middle[0] - middle[1] == step


def test_tensor_parallelism_cuts_matrices_and_sequence_parallelism_the_rest_of_the_activations() -> None:
    one, four = MEGATRON, replace(MEGATRON, tp=4, checkpointing=ActivationCheckpointing.NONE)
    assert layer_held(four).trained < layer_held(one).trained / 3.9
    split = saved_bytes(replace(four, sequence_parallel=True))
    assert 4 * split == pytest.approx(saved_bytes(one), rel=0.01)
    assert split < saved_bytes(four) < saved_bytes(one)


def test_an_ungated_layer_saves_what_korthikanti_counts() -> None:
    h, t = MEGATRON.shape.hidden, MEGATRON.tokens
    assert saved_bytes(but(MEGATRON, "kernels", flash=True)) == 34 * t * h  # arXiv:2205.05198, section 4.1
    scores = 5 * MEGATRON.shape.heads * MEGATRON.sequence_length * t
    assert saved_bytes(but(MEGATRON, "kernels", flash=False)) == 34 * t * h + scores


ADAPTED = but(PLAIN, "adapters", rank=8, fp32=False)


def test_a_frozen_projection_does_not_keep_its_input() -> None:
    attention = saved_bytes(but(ADAPTED, "adapters", targets=("q", "k", "v")))
    shape = ADAPTED.shape
    between = 2 * 8 * 4  # rank x (o, up, gate, down)
    assert saved_bytes(ADAPTED) - attention == ADAPTED.tokens * (2 * shape.hidden + 2 * shape.ffn + between)
    old = but(ADAPTED, "adapters", targets=("q", "k", "v"), keeps_quantised_inputs=True)
    assert saved_bytes(old) - attention == ADAPTED.tokens * (2 * shape.hidden + 2 * shape.ffn)


def test_dropout_before_adapters_keeps_a_copy_for_each_and_its_mask() -> None:
    shape, three = ADAPTED.shape, but(ADAPTED, "adapters", targets=("q", "k", "v"))
    dropped = saved_bytes(but(three, "adapters", dropout=True)) - saved_bytes(three)
    assert dropped == ADAPTED.tokens * (3 * 3 - 2) * shape.hidden


def test_training_the_ends_beside_adapters_keeps_the_frozen_ones_too() -> None:
    alone, beside = by_cause(ADAPTED), by_cause(but(ADAPTED, "adapters", trains_ends=True))
    ends = 2 * ADAPTED.shape.table + ADAPTED.shape.hidden
    assert beside["parameters"] - alone["parameters"] == 2 * ends


@pytest.mark.parametrize("ranks", [2, 8])
def test_gradients_that_wait_for_the_last_micro_batch_are_whole_on_every_rank(ranks: int) -> None:
    row = {"framework": "LitGPT", "sharding": "FULL_SHARD", "n_gpus": str(ranks), "peft": "LoRA r8 q v"}
    waiting = read(**row, precision="bf16-true", grad_accum="4")
    frozen = layer_held(waiting).frozen_bytes * waiting.shape.layers
    assert by_cause(waiting)["gradients"] > frozen  # of the frozen weights too, as they share units with adapters
    assert by_cause(read(**row, precision="bf16-true", grad_accum="1")).get("gradients", 0) < frozen


def test_frozen_units_under_reentrant_checkpointing_hold_every_boundary_and_its_gradient() -> None:
    row = {"framework": "HF Trainer", "sharding": "FULL_SHARD", "n_gpus": "2", "peft": "LoRA r8", "seq_len": "8192"}
    freed = read(**row, compile_or_other="non-reentrant")
    held = read(**row)
    name = "saved activations"
    assert by_cause(held)[name] == 2 * by_cause(freed)[name] == 2 * freed.shape.layers * kept_bytes(freed)


def test_what_peft_says_decides_whether_there_are_adapters() -> None:
    assert read(peft="Full", compile_or_other="fused kernels (RoPE, LoRA)").adapters.rank == 0
    assert read(peft="", model="Llama-2 7B LoRA").adapters.rank > 0


def test_the_trainer_steps_over_all_shards_at_once() -> None:
    row = {"framework": "HF Trainer", "sharding": "FULL_SHARD", "n_gpus": "2", "peft": "Full", "precision": "bf16 pure"}
    assert by_cause(read(**row, seq_len="256"))["optimizer temporaries"] == read(**row).shape.parameters


def test_a_fused_kernel_beside_the_optimizer_does_not_fuse_its_step() -> None:
    kernels = read(framework="HF Trainer", peft="Full", compile_or_other="fused kernels (cross-entropy)")
    assert (kernels.optimizer.foreach, kernels.loss) == (True, Loss.SHIFTED)
    assert not read(framework="HF Trainer", peft="Full", optimizer="AdamW (fused)").optimizer.foreach
    linear = read(framework="HF Trainer", peft="Full", compile_or_other="liger fused linear cross-entropy")
    assert linear.loss is Loss.FUSED


def test_v_as_a_view_holds_the_product_and_groups_are_copied_for_all_heads() -> None:
    joint = but(PLAIN, "kernels", joint_projection=True)
    assert saved_bytes(joint) - saved_bytes(PLAIN) == PLAIN.tokens * 2 * 2 * PLAIN.shape.hidden
    grouped = replace(PLAIN, shape=KNOWN["mistral-7b"])
    copied = saved_bytes(but(grouped, "kernels", joint_projection=True)) - saved_bytes(grouped)
    assert copied == PLAIN.tokens * 2 * 2 * (4096 - 1024)


def test_a_quantised_head_weighs_less_and_is_dequantised_at_the_loss() -> None:
    row = {"framework": "LitGPT", "peft": "QLoRA r8 q v, nf4", "precision": "bf16-true", "act_ckpt": "no"}
    quantised = read(**row)
    whole = but(quantised, "adapters", quantises_head=False)
    assert by_cause(whole)["parameters"] - by_cause(quantised)["parameters"] == round((2 - 0.5625) * whole.shape.table)
    assert head_bytes(quantised) - head_bytes(whole) == 4 * whole.shape.table


def test_every_second_product_is_less_than_all_and_more_than_none() -> None:
    kept = [
        kept_bytes(read(framework="torchtitan", n_gpus="8", peft="Full", act_ckpt=said))
        for said in ("full", "selective op", "none")
    ]
    assert kept == sorted(set(kept))
    all_products = replace(
        read(framework="torchtitan", n_gpus="8", peft="Full", act_ckpt="selective op"), alternate_products=False
    )
    assert kept[1] < kept_bytes(all_products)


def test_full_sharding_cuts_all_states() -> None:
    fsdp = replace(PLAIN, framework=Framework.FSDP1, zero_stage=3, dp=8, autocasts=True)
    causes = by_cause(fsdp)
    assert causes["parameters"] == pytest.approx(4 * fsdp.shape.parameters / 8, abs=8)
    assert causes["optimizer states"] == pytest.approx(8 * fsdp.shape.parameters / 8, abs=8)


def test_layers_that_stay_gathered_cost_all_but_the_one_that_is_there_anyway() -> None:
    fsdp = replace(PLAIN, framework=Framework.FSDP1, zero_stage=3, dp=8, autocasts=True)
    at_3, at_2 = by_cause(fsdp), by_cause(replace(fsdp, zero_stage=2))
    layer = 2 * layer_held(fsdp).trained
    assert at_2["gathered parameters"] - at_3["gathered parameters"] == (fsdp.shape.layers - 1) * layer


def test_a_quantised_base_weighs_half_a_byte_per_element_and_its_ends_four() -> None:
    training = but(PLAIN, "adapters", rank=8, base_bytes=0.5, ends_fp32=True)
    matrices = training.shape.layers * training.shape.layer_matrices
    rest = training.shape.parameters - matrices
    adapters = training.shape.layers * layer_held(training).trained
    norms = training.shape.layers * training.shape.layer_vectors
    assert by_cause(training)["parameters"] == matrices // 2 + 4 * (rest - norms) + 2 * norms + 4 * adapters


def test_fp32_adapters_copy_only_what_is_not_fp32() -> None:
    for low in (True, False):
        narrow = but(replace(PLAIN, low_precision=low), "adapters", rank=8, fp32=False)
        wide = but(narrow, "adapters", fp32=True)
        assert (saved_bytes(wide) > saved_bytes(narrow)) is low


@pytest.mark.parametrize("loss", [Loss.CHUNKED, Loss.IN_PLACE, Loss.FUSED, Loss.COMPILED])
def test_every_other_loss_holds_less_than_the_plain_one(loss: Loss) -> None:
    assert head_bytes(replace(PLAIN, loss=loss)) < head_bytes(PLAIN) / 2
    for wide in (Loss.LISTED, Loss.SHIFTED):
        assert head_bytes(replace(PLAIN, loss=loss)) < head_bytes(replace(PLAIN, loss=wide)) < head_bytes(PLAIN)


@settings(deadline=None)
@given(
    framework=st.sampled_from(list(Framework)),
    micro=st.integers(1, 8),
    length=st.integers(64, 4096),
    checkpointing=st.sampled_from(list(ActivationCheckpointing)),
    flash=st.booleans(),
    lora=st.sampled_from([0, 8]),
)
def test_more_samples_and_longer_ones_never_need_less(
    framework: Framework, micro: int, length: int, checkpointing: ActivationCheckpointing, flash: bool, lora: int
) -> None:
    training = replace(
        PLAIN,
        framework=framework,
        micro_batch_size=micro,
        sequence_length=length,
        checkpointing=checkpointing,
        kernels=Kernels(flash=flash),
        adapters=Adapters(rank=lora),
    )
    needed = estimate_foreign(training).device_bytes
    assert needed <= estimate_foreign(replace(training, micro_batch_size=micro + 1)).device_bytes
    assert needed <= estimate_foreign(replace(training, sequence_length=length + 64)).device_bytes
    offloaded = replace(training, checkpointing=ActivationCheckpointing.NONE)
    if checkpointing is ActivationCheckpointing.FULL:
        assert kept_bytes(training) < kept_bytes(offloaded)


def test_the_allocator_holds_no_more_than_the_device_has_unless_that_much_is_live() -> None:
    training = replace(PLAIN, micro_batch_size=4, sequence_length=4096, lengths_vary=True)
    free = estimate_foreign(training)
    pressed = estimate_foreign(training, free.device_bytes - 2**30)
    assert pressed.device_bytes == free.device_bytes - 2**30
    assert estimate_foreign(training, 2**30).device_bytes > free.allocated_bytes


def test_the_first_step_leaves_no_place_for_the_activations_of_the_next() -> None:
    full = replace(PLAIN, checkpointing=ActivationCheckpointing.FULL, optimizer=Optimizer(foreach=True))
    short, long = (estimate_foreign(replace(full, sequence_length=length)) for length in (128, 256))
    assert short.moment == long.moment == "optimizer step"
    assert short.allocated_bytes == long.allocated_bytes
    assert short.reserved_bytes < long.reserved_bytes
    growing = but(
        replace(full, sequence_length=256), "platform", expandable_segments=True
    )  # whose segments are mapped anew
    assert estimate_foreign(growing).reserved_bytes < long.reserved_bytes


def test_samples_of_many_lengths_leave_more_unused_than_those_of_one() -> None:
    varying = estimate_foreign(replace(PLAIN, micro_batch_size=32, lengths_vary=True))
    even = estimate_foreign(replace(PLAIN, micro_batch_size=32))
    assert varying.allocated_bytes == even.allocated_bytes
    assert varying.reserved_bytes > even.reserved_bytes


@settings(deadline=None)
@given(stage=st.integers(0, 3), steps=st.integers(1, 8))
def test_the_worst_rank_is_at_least_every_stage(stage: int, steps: int) -> None:
    training = replace(MEGATRON, pp=4, tp=2, gradient_accumulation_steps=steps)
    worst = estimate_foreign(training).allocated_bytes
    assert worst >= estimate_foreign(but(training, "megatron", stage=stage)).allocated_bytes
