"""A decoder of sound as several streams of tokens (arXiv:2306.05284): one embedding and one head for each codebook.

Shape suffixes: B samples, K codebooks, T frames, D hidden, V words of a codebook.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import Batch, Recipe


class Frames:
    """Tokens of all codebooks."""

    def __init__(self, samples: int, codebooks: int, frames: int, vocab_size: int) -> None:
        self._samples, self._shape, self._words = samples, (codebooks, frames), vocab_size

    def __len__(self) -> int:
        return self._samples

    def token_count(self, index: int) -> int:  # noqa: ARG002
        return self._shape[0] * self._shape[1]

    def batch(self, indices: Sequence[int]) -> Batch:
        """Tokens [B, K, T]."""
        tokens = torch.arange(len(indices) * self._shape[0] * self._shape[1]) % self._words
        return (tokens.view(len(indices), *self._shape),)


class SoundDecoder(nn.Module):
    """Tokens to logits of every codebook, [B, K, T, V]."""

    def __init__(self, codebooks: int, vocab_size: int, width: int, layers: int) -> None:
        super().__init__()
        self.embeddings = nn.ModuleList(nn.Embedding(vocab_size, width) for _ in range(codebooks))
        self.layers = nn.ModuleList(
            nn.TransformerEncoderLayer(
                width, 4, 4 * width, dropout=0.0, batch_first=True, norm_first=True
            )
            for _ in range(layers)
        )
        self.heads = nn.ModuleList(
            nn.Linear(width, vocab_size, bias=False) for _ in range(codebooks)
        )

    def forward(self, tokens_BKT: Tensor) -> Tensor:
        embedded = [embed(tokens_BKT[:, number]) for number, embed in enumerate(self.embeddings)]
        x_BTD = torch.stack(embedded).sum(0)
        mask_TT = nn.Transformer.generate_square_subsequent_mask(
            x_BTD.shape[1], device=x_BTD.device, dtype=x_BTD.dtype
        )
        for layer in self.layers:
            x_BTD = layer(x_BTD, src_mask=mask_TT, is_causal=True)
        return torch.stack([head(x_BTD) for head in self.heads], dim=1)


def build(config: dict[str, Any]) -> Recipe:
    module = SoundDecoder(config["codebooks"], config["words"], config["width"], config["layers"])
    return Recipe(
        module=module,
        loss_sum=loss_sum,
        dataset=Frames(config["samples"], config["codebooks"], config["frames"], config["words"]),
        layers=tuple(module.layers),
    )


def loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    (tokens_BKT,) = batch
    logits_BKTV = module(tokens_BKT).float()
    return functional.cross_entropy(
        logits_BKTV.flatten(0, 2), tokens_BKT.flatten(), reduction="sum"
    )
