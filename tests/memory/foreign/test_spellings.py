"""What a row says in other words is read as what it means, or is refused in a line that says what is missing."""

from __future__ import annotations

import pytest

from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.public_models import known
from orchestrator.memory.foreign.published import described_row
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import ActivationCheckpointing

ROW = {
    "id": "x",
    "model": "Llama-2-7b",
    "gpu": "A100 80GB",
    "n_gpus": "8",
    "framework": "HF Trainer + DeepSpeed",
    "sharding": "ZeRO-3",
    "micro_batch": "2",
    "seq_len": "2048",
    "precision": "bf16",
    "act_ckpt": "True",
    "optimizer": "AdamW",
}


@pytest.mark.parametrize(
    ("sharding", "stage"),
    [
        ("ZeRO Stage 3", 3),
        ("zero stage 2", 2),
        ("stage3", 3),
        ("ZeRO 2", 2),
        ("deepspeed_zero3", 3),
        ("Z3", 3),
        ("ZeRO-Infinity", 3),
        ("ZeRO++", 3),
    ],
)
def test_a_stage_of_zero_is_read_in_any_spelling(sharding: str, stage: int) -> None:
    assert described_row({**ROW, "sharding": sharding}).training.zero_stage == stage


def test_deepspeed_on_several_devices_without_a_stage_is_refused() -> None:
    with pytest.raises(SpecError, match="which stage of ZeRO is not stated"):
        described_row({**ROW, "sharding": ""})
    assert described_row({**ROW, "sharding": "", "n_gpus": "1"}).training.zero_stage == 0


def test_fsdp_that_shards_nothing_is_ddp_without_buckets() -> None:
    training = described_row({**ROW, "framework": "PyTorch FSDP", "sharding": "NO_SHARD"}).training
    assert training.framework is Framework.PLAIN
    assert training.zero_stage == 0
    ddp = described_row({**ROW, "framework": "PyTorch", "sharding": "DDP"}).training
    buckets = dict(estimate_foreign(ddp).by_cause)["gradient buckets"]
    assert estimate_foreign(ddp).allocated_bytes - estimate_foreign(training).allocated_bytes == buckets


def test_layers_of_both_sides_are_read() -> None:
    arch = "L24+12 h1024 a16 ffn4x V32000"
    shape = described_row(
        {**ROW, "model": "own", "framework": "PyTorch", "sharding": "DDP", "arch": arch}
    ).training.shape
    assert (shape.layers, shape.crossed) == (36, 12)


@pytest.mark.parametrize(("said", "tied"), [("", True), (" tied", True), (" untied", False)])
def test_what_a_description_says_of_the_head_counts_and_else_what_the_name_means(said: str, tied: bool) -> None:
    row = {**ROW, "model": "GPT-2", "arch": f"L12 h768 a12 ffn4x V50257 learned-pos{said}"}
    assert described_row(row).training.shape.tied is tied


def test_alpa_searches_and_alpaca_does_not() -> None:
    with pytest.raises(SpecError, match="searched configuration"):
        described_row({**ROW, "framework": "Alpa", "sharding": ""})
    row = {**ROW, "framework": "HF Trainer (alpaca-lora)", "sharding": "", "n_gpus": "1"}
    assert described_row(row).training.framework is Framework.PLAIN


@pytest.mark.parametrize(
    ("name", "like"),
    [
        ("BAAI/bge-large-en-v1.5", "bert-large"),
        ("intfloat/e5-base-v2", "bert-base"),
        ("intfloat/multilingual-e5-base", "xlm-roberta-base"),
        ("BAAI/bge-m3", "xlm-roberta-large"),
        ("sentence-transformers/all-MiniLM-L12-v2", "bge-small-en"),
        ("OpenHermes-2.5-Mistral-7B", "mistral-7b"),
        ("Salesforce/codegen-2B-mono", "codegen-2b"),
        ("Qwen/Qwen3-Embedding-0.6B", "qwen3-0.6b"),
        ("GPT-3_6.7B", "gpt-3-6.7b"),
    ],
)
def test_models_that_were_trained_on_are_known_by_their_own_names(name: str, like: str) -> None:
    assert known(name) == known(like) is not None


@pytest.mark.parametrize(
    "name", ["Alibaba-NLP/gte-base-en-v1.5", "BAAI/bge-large-zh-v1.5", "intfloat/e5-mistral-7b-instruct"]
)
def test_an_encoder_of_another_shape_is_not_taken_for_bert(name: str) -> None:
    assert known(name) is None


@pytest.mark.parametrize("word", ["n", "disabled", "without", "off", "No", "none"])
def test_no_checkpointing_in_any_word(word: str) -> None:
    assert described_row({**ROW, "act_ckpt": word}).training.checkpointing is ActivationCheckpointing.NONE


@pytest.mark.parametrize(("length", "tokens"), [("0.5k", 512), ("2,048", 2048), ("4K", 4096)])
def test_lengths_in_any_spelling(length: str, tokens: int) -> None:
    assert described_row({**ROW, "seq_len": length}).training.sequence_length == tokens


def test_a_range_of_lengths_is_no_length() -> None:
    with pytest.raises(SpecError, match="length of the samples is not stated"):
        described_row({**ROW, "seq_len": "512-1024"})


def test_a_global_batch_is_no_micro_batch() -> None:
    found = described_row({**ROW, "micro_batch": "global 64"})
    assert found.training.micro_batch_size == 1
    assert found.is_lower_bound


@pytest.mark.parametrize(
    ("peft", "bits"), [("LoRA 8bit", 8), ("LoRA, 8-bit base", 8), ("LoRA 4-bit", 4), ("QLoRA", 4), ("LoRA", 16)]
)
def test_bits_of_a_base_in_any_spelling(peft: str, bits: int) -> None:
    training = described_row({**ROW, "framework": "HF Trainer", "n_gpus": "1", "sharding": "", "peft": peft}).training
    base = training.adapters.base_bytes or 2
    assert (base < 2, base < 1) == (bits < 16, bits < 8)


def test_adam_on_the_host_keeps_its_states_there() -> None:
    training = described_row({**ROW, "sharding": "ZeRO-2", "optimizer": "CPUAdam"}).training
    assert training.offload_optimizer
    assert not training.offload_parameters


@pytest.mark.parametrize("engine", ["InternEvo", "OneFlow LiBai", "PatrickStar", "MindSpeed-LLM"])
def test_engines_that_are_not_modelled_are_refused_by_name(engine: str) -> None:
    with pytest.raises(SpecError, match="no model of the engine"):
        described_row({**ROW, "framework": engine})


def test_four_bit_adam_is_refused() -> None:
    with pytest.raises(SpecError, match="AdamW4bit"):
        described_row({**ROW, "framework": "HF Trainer", "n_gpus": "1", "sharding": "", "optimizer": "AdamW4bit"})


def test_a_stage_that_a_pipeline_does_not_have_is_refused() -> None:
    row = {
        **ROW,
        "framework": "Megatron-LM",
        "sharding": "",
        "model": "GPT-3 1.3B stage 4",
        "arch": "L24 h2048 a16 V51200",
    }
    assert described_row({**row, "pp": "8"}).training.megatron.stage == 4
    with pytest.raises(SpecError, match="no stage 4 of a pipeline of 4"):
        described_row({**row, "pp": "4"})
