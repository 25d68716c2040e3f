"""A Llama-like decoder in plain PyTorch, small enough to read.

Shape suffixes: B samples, T tokens, D hidden, N heads, K key-value heads, H head width, F feed-forward, V vocabulary.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DecoderSpec
from orchestrator.training.contract.context import Context
from orchestrator.training.contract.recipe import Batch, Recipe, Stages, seeded_normal
from orchestrator.training.data.dataset import BYTE_VOCABULARY, TextDataset
from orchestrator.training.models.cross_entropy import linear_cross_entropy

INITIAL_STD = 0.02  # GPT-2's initialisation (Radford et al. 2019, section 2.3)
ROTARY_BASE = 10_000.0  # Su et al. 2021, arXiv:2104.09864, section 3.4.2


class Attention(nn.Module):
    """Causal grouped-query attention with rotary positions."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.heads = spec.num_attention_heads
        self.kv_heads = spec.kv_heads
        self.width = spec.head_dim
        self.context: Context | None = None  # where other ranks have tokens of the same samples
        self.q_proj = nn.Linear(spec.hidden_size, self.heads * self.width, bias=False)
        self.k_proj = nn.Linear(spec.hidden_size, self.kv_heads * self.width, bias=False)
        self.v_proj = nn.Linear(spec.hidden_size, self.kv_heads * self.width, bias=False)
        self.o_proj = nn.Linear(self.heads * self.width, spec.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        q_BNTH = self.q_proj(x_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2)
        k_BKTH = self.k_proj(x_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2)
        v_BKTH = self.v_proj(x_BTD).unflatten(-1, (-1, self.width)).transpose(1, 2)
        q_BNTH = _apply_rotary(q_BNTH, cos_TH, sin_TH)
        k_BKTH = _apply_rotary(k_BKTH, cos_TH, sin_TH)
        if self.context is not None:
            out_BTNH = self.context.attend(q_BNTH, k_BKTH, v_BKTH, self._attend)
        else:
            out_BTNH = self._attend(q_BNTH, k_BKTH, v_BKTH)
        return self.o_proj(out_BTNH.flatten(2))

    def _attend(self, q_BNTH: Tensor, k_BKTH: Tensor, v_BKTH: Tensor) -> Tensor:
        grouped = self.heads != self.kv_heads
        out_BNTH = functional.scaled_dot_product_attention(
            q_BNTH, k_BKTH, v_BKTH, is_causal=True, enable_gqa=grouped
        )
        return out_BNTH.transpose(1, 2)


class FeedForward(nn.Module):
    """The SwiGLU feed-forward part (Shazeer 2020, arXiv:2002.05202)."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.up_proj = nn.Linear(spec.hidden_size, spec.intermediate_size, bias=False)
        self.down_proj = nn.Linear(spec.intermediate_size, spec.hidden_size, bias=False)

    def forward(self, x_BTD: Tensor) -> Tensor:
        return self.down_proj(functional.silu(self.gate_proj(x_BTD)) * self.up_proj(x_BTD))


class Layer(nn.Module):
    """A decoder layer: attention and feed-forward, each with a pre-norm and a residual connection."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(spec.hidden_size, eps=1e-6)
        self.self_attn = Attention(spec)
        self.post_attention_layernorm = nn.RMSNorm(spec.hidden_size, eps=1e-6)
        self.mlp = FeedForward(spec)
        self.dropout = nn.Dropout(spec.dropout)

    def forward(self, x_BTD: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
        x_BTD = x_BTD + self.dropout(self.self_attn(self.input_layernorm(x_BTD), cos_TH, sin_TH))
        return x_BTD + self.dropout(self.mlp(self.post_attention_layernorm(x_BTD)))


class Head(nn.Linear):
    """The output head: it computes the summed next-token loss from hidden states, without holding
    all logits.
    """

    def forward(self, x_BTD: Tensor, labels_BT: Tensor) -> Tensor:  # type: ignore[override]
        return linear_cross_entropy(x_BTD.flatten(0, 1), self.weight, labels_BT.flatten())


class Decoder(nn.Module):
    """The model: computes the summed next-token loss from tokens and labels. Pipeline stages have only their parts."""

    def __init__(self, spec: DecoderSpec) -> None:
        super().__init__()
        self.head_dim = spec.head_dim
        self.context: Context | None = None
        self.embed_tokens = nn.Embedding(spec.vocab_size, spec.hidden_size)
        self.layers = nn.ModuleList(Layer(spec) for _ in range(spec.num_hidden_layers))
        self.norm = nn.RMSNorm(spec.hidden_size, eps=1e-6)
        self.lm_head = Head(spec.hidden_size, spec.vocab_size, bias=False)
        if spec.tie_word_embeddings:
            self.lm_head.weight = self.embed_tokens.weight

    def forward(self, tokens_BT: Tensor, labels_BT: Tensor) -> Tensor:
        return self.lm_head(self.hidden(tokens_BT), labels_BT)

    def hidden(self, x: Tensor) -> Tensor:
        """Return hidden states [B, T, D] after this stage's layers, from tokens [B, T] or from hidden states."""
        x_BTD = self.embed_tokens(x) if self.embed_tokens is not None else x
        first = self.context.first(x_BTD.shape[1]) if self.context is not None else 0
        cos_TH, sin_TH = _make_rotary_tables(first, x_BTD.shape[1], self.head_dim, x_BTD.device)
        for layer in self.layers:
            x_BTD = layer(x_BTD, cos_TH, sin_TH)
        return self.norm(x_BTD) if self.norm is not None else x_BTD

    def share_context(self, context: Context) -> None:
        """Switch to context parallelism, in place: take this rank's tokens, and attend to those of
        all ranks.
        """
        for module in self.modules():
            if isinstance(module, Attention | Decoder):
                module.context = context


# Attention is sharded by heads, the feed-forward by columns (arXiv:1909.08053, section 3); the rest
# by tokens
# (arXiv:2205.05198, section 4.2.2).
TENSOR_PARALLEL = {
    "layers.*.self_attn": "gathered",
    "layers.*.mlp": "gathered",
    "embed_tokens": "embedding",
    "layers.*.self_attn.[qkv]_proj": "colwise",
    "layers.*.self_attn.o_proj": "rowwise",
    "layers.*.mlp.gate_proj": "colwise",
    "layers.*.mlp.up_proj": "colwise",
    "layers.*.mlp.down_proj": "rowwise",
    "norm": "tokenwise",
    "lm_head": "head",
}
STAGES = Stages(
    first=("embed_tokens",),
    last=("norm", "lm_head"),
    hidden=lambda module, x: module.hidden(x),  # type: ignore[operator]
    loss_sum=lambda module, hidden, labels: module.lm_head(hidden, labels),  # type: ignore[operator]
)


def make_decoder_recipe(spec: DecoderSpec, dataset: TextDataset, seed: int) -> Recipe:
    """Return the recipe of a decoder on the meta device, which reads text as bytes. Raises
    SpecError for a vocabulary below 256.
    """
    if spec.vocab_size < BYTE_VOCABULARY:
        raise SpecError(
            "text is read as bytes",
            path="model.decoder.vocab_size",
            got=spec.vocab_size,
            allowed=">= 256",
        )
    with torch.device("meta"):
        module = Decoder(spec)
    return Recipe(
        module=module,
        loss_sum=_sum_loss_of_recipe,
        dataset=dataset,
        layers=tuple(module.layers),
        initialise=functools.partial(_initialise, seed=seed),
        tensor_parallel=TENSOR_PARALLEL,
        tensor_parallel_sizes={
            "num_attention_heads": spec.num_attention_heads,
            "num_key_value_heads": spec.kv_heads,
            "intermediate_size": spec.intermediate_size,
            "vocab_size": spec.vocab_size,
        },
        stages=STAGES,
        context_parallel=module.share_context,
    )


def _sum_loss_of_recipe(module: nn.Module, batch: Batch) -> Tensor:
    return module(*batch)


def _initialise(name: str, parameter: Tensor, *, seed: int) -> None:
    if parameter.dim() > 1:
        seeded_normal(name, parameter, seed=seed, std=INITIAL_STD)
    else:
        parameter.fill_(1.0)  # norm weights


def _make_rotary_tables(
    first_position: int, length: int, head_width: int, device: torch.device
) -> tuple[Tensor, Tensor]:
    frequencies = ROTARY_BASE ** (
        -torch.arange(0, head_width, 2, device=device, dtype=torch.float32) / head_width
    )
    places = torch.arange(
        first_position, first_position + length, device=device, dtype=torch.float32
    )
    angles = torch.outer(places, frequencies).repeat(1, 2)
    return angles.cos(), angles.sin()


def _apply_rotary(x: Tensor, cos_TH: Tensor, sin_TH: Tensor) -> Tensor:
    first, second = x.chunk(2, dim=-1)
    return x * cos_TH.to(x.dtype) + torch.cat((-second, first), dim=-1) * sin_TH.to(x.dtype)
