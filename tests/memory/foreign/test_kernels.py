"""Which attention a model's code had when it was trained."""

from __future__ import annotations

import pytest

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
    [("HF Trainer (torch 2.1)", False), ("HF Trainer (torch 2.2)", True), ("Lit-GPT (torch 2.1)", True)],
)
def test_torch_of_2023_is_beside_transformers_of_2023(framework: str, flash: bool) -> None:
    assert described_row({**ROW, "model": "Llama-2-7b", "framework": framework}).training.kernels.flash is flash
