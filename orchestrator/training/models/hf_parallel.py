"""Tensor-parallel plans and pipeline stages of transformers models, by family.

Attention is sharded by heads, the feed-forward by columns (arXiv:1909.08053, section 3). The attention modules of
transformers derive their number of heads from the projections' output. Families of the Llama kind are sharded by tokens
in between (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from orchestrator.training.contract.recipe import Stages

LLAMA_PLAN = {
    "model.layers.*.self_attn": "gathered",
    "model.layers.*.mlp": "gathered",
    "model.embed_tokens": "embedding",
    "model.layers.*.self_attn.[qkv]_proj": "colwise",
    "model.layers.*.self_attn.o_proj": "rowwise",
    "model.layers.*.mlp.gate_proj": "colwise",
    "model.layers.*.mlp.up_proj": "colwise",
    "model.layers.*.mlp.down_proj": "rowwise",
    "model.norm": "tokenwise",
    "lm_head": "head",
}
T5_PLAN = {
    "*Attention.[qkv]": "colwise",
    "*Attention.o": "rowwise",
    "*Attention.relative_attention_bias": "colwise",  # a column per head
    "*DenseReluDense.wi*": "colwise",
    "*DenseReluDense.wo": "rowwise",
}
PLANS = {
    "llama": LLAMA_PLAN,
    "mistral": LLAMA_PLAN,
    "qwen2": LLAMA_PLAN,
    "qwen3": LLAMA_PLAN | {"model.layers.*.self_attn.[qk]_norm": "headwise"},
    "gemma": LLAMA_PLAN,
    "t5": T5_PLAN,
}
STAGED = ("llama", "mistral", "qwen2", "qwen3", "gemma", "mixtral", "qwen2_moe", "qwen3_moe")


def tensor_parallel_of(module: Any) -> Mapping[str, str]:
    """The family's tensor-parallel plan; empty if it has none."""
    return PLANS.get(module.config.model_type, {})


def tensor_parallel_sizes_of(module: Any) -> dict[str, int]:
    """The sizes that a tensor-parallel degree must divide, by name."""
    found = {name: getattr(module.config, name, None) for name in ("num_attention_heads", "num_key_value_heads")}
    return {name: size for name, size in found.items() if size is not None}


def keep_own_heads(module: Any, tp: int) -> None:
    """Make T5's attention create its zero bias for the heads of one of `tp` ranks only, in place."""
    for attention in module.modules():
        if module.config.model_type == "t5" and hasattr(attention, "n_heads"):
            attention.n_heads //= tp


def stages_of(module: Any) -> Stages | None:
    """The family's pipeline stages; None if it has none."""
    if module.config.model_type not in STAGED:
        return None
    return Stages(
        first=("model.embed_tokens",), last=("model.norm", "lm_head"), hidden=_hidden, loss_sum=_stage_loss_sum
    )


def _hidden(module: Any, x: Tensor) -> Tensor:
    base = module.base_model
    if base.norm is None:  # the model calls it; a placeholder without parameters leaves all names unchanged
        base.norm = nn.Identity()
    given = "inputs_embeds" if base.embed_tokens is None else "input_ids"
    return base(**{given: x}, use_cache=False).last_hidden_state


def _stage_loss_sum(module: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return module.lm_head(hidden, labels)
