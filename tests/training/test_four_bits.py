"""Frozen tables beside a base of four bits are held in two bytes, and the model's results stay the same."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn
from transformers import LlamaConfig, LlamaForCausalLM

from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.planning.frontier import list_fitting
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.parse import parse_cluster, parse_job_data
from orchestrator.training.models.hf_adapters import cast_frozen_tables

SIZES = {"vocab_size": 99, "hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}


def published_model(*, tied: bool) -> Any:
    """Return a frozen model whose tables were published in bf16, with one trained layer."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LlamaConfig(**SIZES, **HEADS, tie_word_embeddings=tied))
    for parameter in model.parameters():
        parameter.requires_grad_(False)
        parameter.copy_(parameter.bfloat16())
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(True)
    return model


def logits_and_gradient(model: Any) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the logits, and the gradient of the trained layer."""
    with torch.autocast("cpu", torch.bfloat16):
        logits = model(input_ids=torch.arange(1, 17)[None], use_cache=False).logits
    logits.float().square().mean().backward()
    return logits, model.model.layers[0].mlp.up_proj.weight.grad


@pytest.mark.parametrize("tied", [True, False])
def test_tables_in_two_bytes_change_neither_logits_nor_gradients(tied: bool) -> None:
    model = published_model(tied=tied)
    narrowed = copy.deepcopy(model)
    cast_frozen_tables(narrowed, torch.bfloat16)
    tables = [
        layer
        for layer in narrowed.modules()
        if isinstance(layer, nn.Embedding) or layer is narrowed.lm_head
    ]
    assert {layer.weight.dtype for layer in tables} == {torch.bfloat16}
    assert (narrowed.lm_head.weight is narrowed.model.embed_tokens.weight) == tied
    assert {
        norm.weight.dtype for name, norm in narrowed.named_modules() if name.endswith("norm")
    } == {torch.float32}
    for expected, actual in zip(
        logits_and_gradient(model), logits_and_gradient(narrowed), strict=True
    ):
        assert torch.equal(expected, actual)


def test_a_table_that_is_trained_keeps_its_precision() -> None:
    model = published_model(tied=False)
    model.model.embed_tokens.weight.requires_grad_(True)
    cast_frozen_tables(model, torch.bfloat16)
    assert model.model.embed_tokens.weight.dtype is torch.float32


LLAMA_7B = {
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
}
LLAMA_70B = {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


@pytest.mark.parametrize(
    ("sizes", "memory"),
    [(LLAMA_7B, "11.65GiB"), (LLAMA_70B | {"num_key_value_heads": 8}, "47.4GiB")],
    ids=("7B on 12 GB", "70B on 48 GB"),
)
def test_what_people_train_by_four_bits_has_plans(sizes: dict[str, int], memory: str) -> None:
    """The memory is what such cards report; one adapter of rank 16 beside each linear layer, 512 tokens."""
    speed = "bf16_tflops: 100, fp32_tflops: 30, memory_bandwidth: 900GB/s, link_bandwidth: 30GB/s"
    device = f"{{name: card, kind: cuda, memory: {memory}, {speed}}}"
    cluster = f"name: one\nnodes: [{{name: n, devices: 1, device: {device}, host_memory: 256GiB}}]"
    hardware = group_equal_nodes(make_idle_nodes(parse_cluster(cluster, "cluster")))[0].hardware
    config = {"model_type": "llama", "vocab_size": 32000, **sizes}
    data = {
        "name": "qlora",
        "gpus": 1,
        "global_batch_size": 4,
        "precision": "bf16",
        "model": {
            "hf": "some/llama",
            "config": config,
            "lora": {"rank": 16, "quantise_base": True},
        },
        "data": {"text": ["text"], "sequence_length": 512},
    }
    plans = list(
        list_fitting(
            find_frontier(read_plan_request(parse_job_data(data, "job")), hardware),
            hardware.device.memory,
            UNMEASURED,
        )
    )
    assert len(plans) >= 2
