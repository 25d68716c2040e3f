"""Adapters, and what bitsandbytes brings: base weights of 4 bits under them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from orchestrator.specs.choices import Precision  # noqa: E402
from orchestrator.specs.job.model import DataSpec, LoraSpec, ModelSpec  # noqa: E402
from tests.gpu.runs import TRAINING, plan, run_of, train  # noqa: E402

LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_qlora_trains_adapters_beside_a_base_of_four_bits(
    tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    parameters = adapters_learn(tmp_path, cuda, monkeypatch, LoraSpec(rank=4, quantise_base=True))
    assert any(parameter.dtype == torch.uint8 for parameter in parameters.values())


@pytest.mark.long
def test_lora_trains_adapters(
    tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    parameters = adapters_learn(tmp_path, device, monkeypatch, LoraSpec(rank=4))
    kinds = {
        ("lora_" in name, parameter.dtype)
        for name, parameter in parameters.items()
        if parameter.dim() > 1
    }
    assert (True, torch.float32) in kinds, "adapters are masters"
    assert (False, torch.bfloat16) in kinds, "frozen matrices are held as they are computed with"
    assert {dtype for is_adapter, dtype in kinds if is_adapter} == {torch.float32}


def adapters_learn(
    folder: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch, lora: LoraSpec
) -> dict[str, torch.nn.Parameter]:
    """The parameters of a small transformers model after its adapters were trained, and nothing else was."""
    transformers = pytest.importorskip("transformers")
    pytest.importorskip("peft")
    monkeypatch.setenv("LOCAL_RANK", "0")
    torch.manual_seed(0)
    model: Any = transformers.LlamaForCausalLM(transformers.LlamaConfig(**LLAMA))
    model.save_pretrained(folder / "model")
    tokens = folder / "tokens.npy"
    np.save(tokens, np.arange(4000, dtype=np.uint16) % 23)
    chosen = plan(precision=Precision.BF16)
    run = run_of(
        folder,
        device,
        chosen,
        model=ModelSpec(hf=str(folder / "model"), lora=lora),
        data=DataSpec(tokens=(str(tokens),), sequence_length=32),
        training=dataclasses.replace(TRAINING, learning_rate=1e-2, max_steps=10),
    )
    trained = train(run, device)
    print(json.dumps({"losses": trained.losses}))
    assert trained.losses[-1] < trained.losses[0] - 0.05
    parameters = dict(trained.recipe.module.named_parameters())
    assert {name for name, parameter in parameters.items() if parameter.requires_grad} == {
        name for name in parameters if "lora_" in name
    }
    return parameters
