"""What bitsandbytes brings: moments of 8 bits, and base weights of 4 bits under adapters."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

torch = pytest.importorskip("torch")

from orchestrator.specs.errors import SpecError  # noqa: E402
from orchestrator.specs.job.model import DataSpec, LoraSpec, ModelSpec  # noqa: E402
from orchestrator.specs.plan import Optimizer, Precision  # noqa: E402
from orchestrator.training.build import build_engine, build_recipe  # noqa: E402
from orchestrator.training.checkpoint import checkpoint  # noqa: E402
from orchestrator.training.checkpoint.checkpoint import Cursor, Saved  # noqa: E402
from orchestrator.training.engines import eight_bit  # noqa: E402
from tests.gpu.runs import TRAINING, plan, run_of, train  # noqa: E402

EIGHT_BIT = plan(optimizer=Optimizer.ADAMW_8BIT)
LLAMA = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
}


def test_the_states_of_eight_bit_adamw_are_those_that_a_checkpoint_holds(device: torch.device) -> None:
    """Every state tensor is saved or a constant, and the first update finds them in place: it makes none anew."""
    bitsandbytes = pytest.importorskip("bitsandbytes")
    small, large = (torch.nn.Parameter(torch.ones(size, device=device)) for size in (4095, 4096))
    optimizer = bitsandbytes.optim.AdamW8bit([{"params": [small]}, {"params": [large]}], lr=0.1)
    for tensor, dtype in ((small, torch.float32), (large, torch.uint8)):
        states, names = eight_bit.new_state(optimizer, tensor), eight_bit.state_names(tensor.numel())
        assert {name for name, value in states.items() if torch.is_tensor(value)} - {"qmap1", "qmap2"} == set(names)
        assert states["step"] == 0
        assert (states["state1"].dtype, states["state1"].shape) == (dtype, tensor.shape)
        before = {name: states[name] for name in names}
        tensor.grad = torch.ones_like(tensor)
        optimizer.step()
        tensor.grad = None
        assert optimizer.state[tensor]["step"] == 1
        assert all(optimizer.state[tensor][name] is value for name, value in before.items())
        assert tensor.mean().item() == pytest.approx(0.9, abs=0.01)


def test_eight_bit_adamw_is_refused_without_cuda() -> None:
    training = dataclasses.replace(TRAINING, optimizer=Optimizer.ADAMW_8BIT)
    with pytest.raises(SpecError, match="needs CUDA"):
        eight_bit.adamw([{"params": [torch.nn.Parameter(torch.ones(1))]}], training, torch.device("cpu"))


def test_eight_bit_adamw_stays_near_adamw_and_goes_on_from_its_checkpoint(tmp_path: Path, cuda: torch.device) -> None:
    pytest.importorskip("bitsandbytes")
    full = train(run_of(tmp_path, cuda, plan()), cuda)
    training = dataclasses.replace(TRAINING, optimizer=Optimizer.ADAMW_8BIT)
    run = run_of(tmp_path, cuda, EIGHT_BIT, training=training)
    eight = train(run, cuda)
    assert eight.losses == pytest.approx(full.losses, abs=2e-2, rel=0)
    saved = Saved(path=tmp_path / "checkpoint", cursor=Cursor(step=training.max_steps))
    checkpoint.save(saved.path, eight.engine.state(), saved.cursor)
    again = build_engine(run, build_recipe(run), cuda, saved).state()
    for name, value in eight.engine.state().items():
        assert torch.equal(again[name], value), name


def test_qlora_trains_adapters_beside_a_base_of_four_bits(
    tmp_path: Path, cuda: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("bitsandbytes")
    parameters = adapters_learn(tmp_path, cuda, monkeypatch, LoraSpec(rank=4, quantise_base=True))
    assert any(parameter.dtype == torch.uint8 for parameter in parameters.values())


@pytest.mark.long
def test_lora_trains_adapters(tmp_path: Path, device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    parameters = adapters_learn(tmp_path, device, monkeypatch, LoraSpec(rank=4))
    kinds = {("lora_" in name, parameter.dtype) for name, parameter in parameters.items() if parameter.dim() > 1}
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
