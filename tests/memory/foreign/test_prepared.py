"""Laws of frozen bases that a trainer prepared: what is cast up, what is cast back, and what checkpointing misses."""

from __future__ import annotations

import weakref
from typing import Any

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from orchestrator.memory.foreign.activations import KEPT, boundary_bytes, hidden_bytes, saved_bytes
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.plain import plain_moments
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from tests.memory.foreign.parts import but

ROW = {
    "id": "x1",
    "model": "Llama-2 7B",
    "framework": "HF Trainer (transformers 4.49)",
    "n_gpus": "1",
    "micro_batch": "2",
    "seq_len": "1024",
    "precision": "bf16",
    "act_ckpt": "True",
    "peft": "QLoRA r16 q k v o, 4bit",
}
TRL = "HF Trainer (TRL, transformers 4.49)"


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


@pytest.mark.parametrize(
    ("columns", "norms", "ends"),
    [
        ({}, True, True),
        ({"framework": TRL}, True, False),
        ({"framework": TRL, "precision": "fp16"}, True, True),
        ({"framework": TRL, "peft": "LoRA r8 q v, int8 base"}, True, True),
        ({"framework": "HF Trainer (transformers 4.28)", "peft": "LoRA r8 q v, int8 base"}, False, False),
        ({"framework": "ms-swift 2.x"}, False, False),
    ],
)
def test_what_is_cast_up_depends_on_who_prepares_the_base(columns: dict[str, str], norms: bool, ends: bool) -> None:
    adapters = read(**columns).adapters
    assert (adapters.norms_fp32, adapters.ends_fp32) == (norms, ends)


def test_behind_fp32_norms_layers_hand_on_fp32_but_the_embedding_does_not() -> None:
    wide, back = read(), read(framework=TRL)
    elements = wide.tokens * wide.shape.hidden
    assert boundary_bytes(wide) == 4 * elements
    assert boundary_bytes(back) * back.shape.layers == pytest.approx(elements * (4 * back.shape.layers - 2), abs=32)
    held = [dict(estimate_foreign(one).by_cause)["parameters"] for one in (wide, back)]
    assert held[0] - held[1] == 2 * wide.shape.ends


def test_autocast_leaves_a_narrow_copy_of_a_frozen_head_for_the_way_back() -> None:
    head = torch.nn.Linear(64, 512, bias=False).requires_grad_(False)
    saved = []

    def pack(tensor: torch.Tensor) -> torch.Tensor:
        saved.append(tensor)
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor), torch.autocast("cpu", torch.bfloat16):
        head(torch.randn(4, 64, requires_grad=True))
    assert [one.dtype for one in saved if one.numel() == head.weight.numel()] == [torch.bfloat16]
    wide = read()
    narrow = but(wide, "adapters", ends_fp32=False)
    assert head_bytes(wide) - head_bytes(narrow) == 2 * wide.shape.table


class _Product(torch.autograd.Function):
    """One that keeps its input as an attribute, as bitsandbytes' did until 0.43.3."""

    @staticmethod
    def forward(ctx: Any, value: torch.Tensor) -> torch.Tensor:
        ctx.input = value
        return 2 * value

    @staticmethod
    def backward(_: Any, grad: torch.Tensor) -> torch.Tensor:
        return 2 * grad


@pytest.mark.parametrize("reentrant", [True, False])
def test_what_is_kept_as_an_attribute_outlives_checkpointing_that_is_not_reentrant(reentrant: bool) -> None:
    inputs = []

    def layer(value: torch.Tensor) -> Any:
        taken = value.sin()
        inputs.append(weakref.ref(taken))
        return _Product.apply(taken)  # type: ignore[no-untyped-call]

    loss = checkpoint(layer, torch.randn(8, requires_grad=True), use_reentrant=reentrant).sum()
    assert (inputs[0]() is None) is reentrant
    loss.backward()


def test_inputs_that_checkpointing_does_not_free_are_those_of_every_quantised_product() -> None:
    row = {"framework": "HF Trainer (transformers 4.49, bitsandbytes 0.41)"}
    freed, hidden = read(**row), read(**row, act_ckpt="not reentrant")
    whole = read(**row, act_ckpt="not reentrant", peft="LoRA r16 q k v o")
    h, ffn = hidden.shape.hidden, hidden.shape.ffn
    assert hidden_bytes(hidden) == hidden.tokens * 2 * (3 * h + ffn)
    assert hidden_bytes(freed) == hidden_bytes(whole) == hidden_bytes(read(act_ckpt="not reentrant")) == 0
    before, after = ({name: dict(causes) for name, causes in plain_moments(one)} for one in (freed, hidden))
    for moment in ("backward of head", "backward of last layer"):
        more = sum(after[moment].values()) - sum(before[moment].values())
        assert more == hidden.shape.layers * hidden_bytes(hidden)
        assert after[moment][KEPT] == before[moment][KEPT]  # of which alone the pool wastes a share
    assert read(framework="ms-swift 2.x", peft="LoRA r8, int4 (gptq)").adapters.hides_quantised_inputs is False
    assert read(framework="ms-swift 2.x").adapters.hides_quantised_inputs is True


@pytest.mark.parametrize(
    ("words", "fused", "fuses_norms"),
    [
        ("", False, False),
        ("liger fused linear cross-entropy", False, False),
        ("fused RMSNorm, liger fused linear cross-entropy", False, True),
        ("fused kernels (cross-entropy, RMSNorm, RoPE)", False, True),
        ("fused LoRA kernels, liger RMSNorm", True, True),
        ("liger", True, True),
        ("unsloth", True, True),
        ("torch.compile", True, True),
    ],
)
def test_a_kernel_for_the_loss_is_none_for_norms_and_activations(words: str, fused: bool, fuses_norms: bool) -> None:
    kernels = read(compile_or_other=words).kernels
    assert (kernels.fused, kernels.fuses_norms) == (fused, fuses_norms)


def test_a_norm_that_is_one_kernel_keeps_its_input_though_it_is_frozen() -> None:
    whole = read(peft="LoRA r16 q k v o")
    one = but(whole, "kernels", fuses_norms=True)
    h = whole.shape.hidden
    # fp32 copies of both inputs, 8h, against these themselves, 4h; what the weights multiply is kept in neither
    assert saved_bytes(whole) - saved_bytes(one) == 4 * h * whole.tokens
    full = read(peft="Full", precision="pure bf16")
    kept = saved_bytes(full) - saved_bytes(but(full, "kernels", fuses_norms=True))
    assert kept == 8 * h * full.tokens


def test_unsloth_copies_keys_and_values_for_every_head_before_ampere() -> None:
    row = {"model": "Llama-3.2-3B", "framework": "unsloth", "act_ckpt": "False"}
    old, new = read(**row, gpu="T4 16GB"), read(**row, gpu="A100 80GB")
    assert old.kernels.flash
    more = 2 * 2 * (new.shape.query - new.shape.key_value) * new.tokens
    assert saved_bytes(old) - saved_bytes(new) == more > 0
