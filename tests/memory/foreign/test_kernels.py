"""Which attention a model's code had when it was trained."""

from __future__ import annotations

import pytest

from orchestrator.memory.foreign.activations import score_bytes
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.published import described_row

ROW = {"id": "x", "gpu": "A100", "n_gpus": "1", "micro_batch": "4", "seq_len": "512", "precision": "bf16"}


@pytest.mark.parametrize(
    ("model", "framework", "flash"),
    [
        ("Llama-2-7b", "HF Trainer (transformers 4.36)", True),
        ("gpt2-xl", "HF Trainer (transformers 4.41)", False),
        ("gpt2-xl", "HF Trainer (transformers 4.42)", True),
        ("bert-base-uncased", "HF Trainer (transformers 4.40)", False),
        ("distilbert-base-uncased", "HF Trainer (transformers 4.41)", False),
        ("bigscience/bloom-7b1", "HF Trainer (transformers 5.0)", False),
        ("EleutherAI/gpt-neo-125M", "HF Trainer", False),
    ],
)
def test_each_model_of_transformers_got_torchs_attention_in_a_version_of_its_own(
    model: str, framework: str, flash: bool
) -> None:
    assert described_row({**ROW, "model": model, "framework": framework}).training.kernels.flash is flash


@pytest.mark.parametrize(
    ("framework", "flash"),
    [
        ("HF Trainer (torch 2.1)", False),
        ("HF Trainer (torch 2.2)", True),
        ("Lit-GPT (torch 2.1)", True),
        ("HF Trainer (2023-11, torch 2.1)", False),
        ("HF Trainer (2024-04, torch 2.1)", True),
        ("HF Trainer (2024-04, transformers 4.35, torch 2.1)", False),
    ],
)
def test_torch_of_2023_is_beside_transformers_of_2023_but_in_a_later_run(framework: str, flash: bool) -> None:
    assert described_row({**ROW, "model": "Llama-2-7b", "framework": framework}).training.kernels.flash is flash


@pytest.mark.parametrize(
    ("precision", "each"),
    [("fp32", 4), ("fp16 amp", 4), ("fp16 pure", 2)],  # autocast hands softmax a copy in fp32
)
def test_softmax_kept_its_input_until_torch_1_11(precision: str, each: int) -> None:
    row = {**ROW, "gpu": "V100", "model": "bert-base-uncased", "precision": precision}
    before, since = (
        score_bytes(described_row({**row, "framework": f"HF Trainer (torch {version})"}).training)
        for version in ("1.10", "1.11")
    )
    assert before - since == each * 12 * 4 * 512**2


def test_megatrons_softmax_never_kept_its_input() -> None:
    row = {**ROW, "gpu": "V100", "model": "bert-base-uncased", "precision": "fp16"}
    before, since = (
        score_bytes(described_row({**row, "framework": f"Megatron-LM (torch {version})"}).training)
        for version in ("1.10", "1.11")
    )
    assert before == since > 0


def test_megatrons_loss_worked_in_place_until_september_2022() -> None:
    row = {**ROW, "gpu": "V100", "model": "gpt2-xl", "precision": "fp16"}
    before, since = (
        described_row({**row, "framework": f"Megatron-LM ({when})"}).training for when in ("2021, torch 1.8", "2022")
    )
    assert head_bytes(since) - head_bytes(before) == 4 * 4 * 512 * since.shape.vocab
