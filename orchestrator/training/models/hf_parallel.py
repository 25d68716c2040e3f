"""Tensor-parallel plans, pipeline stages and shared contexts of transformers models, by family.

Attention is sharded by heads, the feed-forward by columns (arXiv:1909.08053, section 3). The attention modules of
transformers derive their number of heads from the projections' output. Families of the Llama kind are sharded by tokens
in between (arXiv:2205.05198, section 4.2.2).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS, _grouped_linear
from transformers.integrations.sdpa_attention import sdpa_attention_forward

from orchestrator.training.contract.context import Context
from orchestrator.training.contract.dispatch import Dispatch
from orchestrator.training.contract.recipe import Experts, Stages

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
SHARED = "context_parallel"  # our attention, by transformers' name of an implementation
SPREAD = "expert_parallel"  # our dispatch to experts, likewise
MIXTURES = ("mixtral", "qwen2_moe", "qwen3_moe")
STAGED = ("llama", "mistral", "qwen2", "qwen3", "gemma", *MIXTURES)


def get_tensor_parallel_plan(module: Any) -> Mapping[str, str]:
    """Return {pattern of module names: style} of the model family's tensor-parallel plan; {}
    without one.
    """
    return PLANS.get(module.config.model_type, {})


def get_tensor_parallel_sizes(module: Any) -> dict[str, int]:
    """Return {name: size} of the sizes that a tensor-parallel degree must divide."""
    sizes = {
        name: getattr(module.config, name, None)
        for name in ("num_attention_heads", "num_key_value_heads")
    }
    return {name: size for name, size in sizes.items() if size is not None}


def limit_t5_bias_heads(module: Any, tp: int) -> None:
    """Make T5's attention create its zero bias for the heads of one of `tp` ranks only, in place."""
    for attention in module.modules():
        if module.config.model_type == "t5" and hasattr(attention, "n_heads"):
            attention.n_heads //= tp


def find_stages(module: Any) -> Stages | None:
    """Return the model family's rules for pipeline stages; None without any."""
    if module.config.model_type not in STAGED:
        return None
    return Stages(
        first=("model.embed_tokens",),
        last=("model.norm", "lm_head"),
        hidden=_run_stage_layers,
        loss_sum=_compute_stage_loss_sum,
    )


def find_context_parallel_switch(module: Any) -> Callable[[Context], None] | None:
    """Return the function that switches the module to context parallelism; None if its family has none."""
    return functools.partial(_share_context, module) if module.config.model_type in STAGED else None


def _share_context(module: Any, context: Context) -> None:
    AttentionInterface.register(SHARED, _attend)
    module.config._attn_implementation = SHARED
    module.context = context
    for part in module.modules():
        if hasattr(part, "num_key_value_groups"):
            part.context = context


def _attend(
    module: Any, q: Tensor, k: Tensor, v: Tensor, _mask: None, **settings: Any
) -> tuple[Tensor, None]:
    """Return the attention output of this rank over all tokens; transformers calls it as an
    implementation of SDPA.

    For an implementation that transformers does not know it makes no mask, so that a sliding window
    is masked here.
    """
    assert _mask is None, "a decoder's own mask needs none"

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        # fewer where ranks share a key-value head
        module.num_key_value_groups = q.shape[1] // k.shape[1]
        mask = module.context.window_mask(q, settings.get("sliding_window"))
        return sdpa_attention_forward(module, q, k, v, mask, **settings)[0]

    return module.context.attend(q, k, v, attention), None


def find_expert_mixtures(module: Any) -> Experts | None:
    """Return the model family's mixtures of experts, which ranks may split; None without any."""
    if module.config.model_type not in MIXTURES:
        return None
    mixtures = tuple(part for part in module.modules() if hasattr(part, "gate_up_proj"))
    if not mixtures:
        return None
    return Experts(
        modules=mixtures,
        count=mixtures[0].num_experts,
        spread=functools.partial(_spread_experts, module, mixtures),
    )


def _spread_experts(module: Any, mixtures: Sequence[Any], dispatch: Dispatch) -> None:
    ALL_EXPERTS_FUNCTIONS.register(SPREAD, _dispatch_experts)
    module.config._experts_implementation = SPREAD
    for mixture in mixtures:
        mixture.dispatch = dispatch


def _dispatch_experts(mixture: Any, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor) -> Tensor:
    """Return the experts' outputs, each token's products computed on the ranks of its experts.

    It replaces transformers' `grouped_mm_experts_forward`.
    """

    def experts(x_RD: Tensor, ends_L: Tensor) -> Tensor:
        gate_up, down = (weight.to_local() for weight in (mixture.gate_up_proj, mixture.down_proj))
        gated_RF = mixture._apply_gate(
            _grouped_linear(x_RD, gate_up, ends_L, is_transposed=mixture.is_transposed)
        )
        return _grouped_linear(gated_RF, down, ends_L, is_transposed=mixture.is_transposed)

    return mixture.dispatch.answer(x_ND, chosen_NK, weights_NK, experts)


def make_position_arguments(module: Any, x: Tensor) -> dict[str, Tensor]:
    """Return {"position_ids": [1, t]} for this rank's tokens [B, t, ...]; {} without context
    parallelism.
    """
    context: Context | None = getattr(module, "context", None)
    if context is None:
        return {}
    first = context.first(x.shape[1])
    count = x.shape[1]
    return {"position_ids": torch.arange(first, first + count, device=x.device).unsqueeze(0)}


def _run_stage_layers(module: Any, x: Tensor) -> Tensor:
    base = module.base_model
    if (
        base.norm is None
    ):  # the model calls it; a placeholder without parameters leaves all names unchanged
        base.norm = nn.Identity()
    argument = "inputs_embeds" if base.embed_tokens is None else "input_ids"
    return base(
        **{argument: x}, **make_position_arguments(module, x), use_cache=False
    ).last_hidden_state


def _compute_stage_loss_sum(module: Any, hidden: Tensor, labels: Tensor) -> Tensor:
    return module.lm_head(hidden, labels)
