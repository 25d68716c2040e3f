"""Whole steps of transformers' decoders where attention holds its scores: traced, and replayed on the allocator."""

from __future__ import annotations

import gc
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import AutoModelForCausalLM, LlamaConfig

from orchestrator.memory.estimate import WORKSPACE_BYTES
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.training.fake_model import as_with_values
from tests.memory.foreign.test_reserved import Allocator
from tests.memory.foreign.torch_nets import Live

LAYERS, RANK = 4, 32
TARGETS = ("q_proj", "k_proj", "v_proj", "o_proj")
SMOLLM = {"vocab_size": 49152, "hidden_size": 576, "intermediate_size": 1536} | {
    "num_attention_heads": 9,
    "num_key_value_heads": 3,
    "tie_word_embeddings": True,
}
TINYLLAMA = {"vocab_size": 32000, "hidden_size": 2048, "intermediate_size": 5632} | {
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "tie_word_embeddings": False,
}
WIDE = {"vocab_size": 49152, "hidden_size": 2048, "intermediate_size": 8192} | {
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "tie_word_embeddings": True,
}


class Case(NamedTuple):
    config: dict[str, Any]
    samples: int
    length: int
    dtype: torch.dtype = torch.bfloat16
    checkpoints: bool = True


CASES = {
    "logits larger than scores": Case(SMOLLM, 1, 4096),
    "scores larger than logits": Case(TINYLLAMA, 2, 2048),
    "scores a little larger": Case(TINYLLAMA, 2, 1024),
    "in fp32": Case(WIDE, 1, 2048, torch.float32),
    "kept": Case(TINYLLAMA, 2, 2048, checkpoints=False),
    "kept in fp32": Case(WIDE, 1, 2048, torch.float32, checkpoints=False),
    "kept, logits larger": Case(SMOLLM, 1, 4096, checkpoints=False),
}


class Adapted(nn.Module):
    """A frozen projection with an fp32 adapter beside it, as peft's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, RANK, bias=False)
        self.up = nn.Linear(RANK, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        found: Tensor = self.base(x)
        return (found + self.up(self.down(x.float())) * 2).to(found.dtype)


class LiveOnCuda(Live):
    """CUDA's softmax makes the product of its result and the gradient (softmax_backward_cuda_out, SoftMax.cu)."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        product = None
        if func is torch.ops.aten._softmax_backward_data.default:
            product = torch.empty_like(args[0])
            self._count(product)
        return super().__torch_dispatch__(func, types, args, kwargs)


def adapted(case: Case) -> nn.Module:
    config = LlamaConfig(**case.config, num_hidden_layers=LAYERS, max_position_embeddings=8192)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=case.dtype)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for name in TARGETS:
            setattr(layer.self_attn, name, Adapted(getattr(layer.self_attn, name)))
    if case.checkpoints:
        model.activation_checkpointing_enable(activation_checkpointing_kwargs={"use_reentrant": False})
    model.enable_input_require_grads()
    return model.train()


def replayed(case: Case) -> Allocator:
    """Two steps of a loop that holds what the model returned."""
    with FakeTensorMode(), as_with_values(), LiveOnCuda() as live:
        model = adapted(case)
        optimizer = torch.optim.AdamW([each for each in model.parameters() if each.requires_grad], foreach=True)
        for _ in range(2):
            tokens = torch.zeros(case.samples, case.length, dtype=torch.long)
            outputs = model(input_ids=tokens, labels=tokens)
            outputs.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            del outputs
            gc.collect()
        events = list(live.events)
    allocator, blocks = Allocator(), {}
    for number, size in events:
        if size:
            blocks[number] = allocator.take(size)
        elif number in blocks:
            allocator.give(blocks.pop(number))
    return allocator


def described(case: Case) -> Training:
    config = case.config
    return described_row(
        {
            "id": "x1",
            "model": "own",
            "arch": f"L{LAYERS} h{config['hidden_size']} a{config['num_attention_heads']} "
            f"kv{config['num_key_value_heads']} ffn{config['intermediate_size']} V{config['vocab_size']} swiglu "
            + ("tied" if config["tie_word_embeddings"] else "untied"),
            "framework": "HF transformers 5.17 + PEFT (own loop)",
            "n_gpus": "1",
            "micro_batch": str(case.samples),
            "seq_len": str(case.length),
            "precision": "bf16" if case.dtype is torch.bfloat16 else "fp32",
            "act_ckpt": str(case.checkpoints),
            "optimizer": "AdamW foreach",
            "peft": f"LoRA r{RANK} q k v o",
            "compile_or_other": "eager attention",
        }
    ).training


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_of_a_step_that_holds_scores_both_totals_are_those_of_its_replay(case: Case) -> None:
    found, ours = replayed(case), estimate_foreign(described(case))
    assert ours.allocated_bytes - dict(ours.by_cause)["workspaces"] == pytest.approx(found.peak_bytes, rel=0.02)
    assert ours.reserved_bytes - WORKSPACE_BYTES == pytest.approx(found.reserved_bytes, rel=0.05)
