"""A model from a factory, as a user would write one: materialised, with its own seed and a buffer."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import IGNORED_LABEL, Batch, Recipe
from orchestrator.training.data.dataset import TextDataset


class Tower(nn.Module):
    """An embedding, layers, and a head that shares the embedding's weight."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        nn.init.normal_(self.embed.weight, std=0.05)
        self.layers = nn.ModuleList(
            nn.Sequential(
                nn.LayerNorm(width),
                nn.Linear(width, 3 * width),
                nn.GELU(),
                nn.Linear(3 * width, width),
            )
            for _ in range(depth)
        )
        self.register_buffer("seen", torch.zeros(1))
        self.head = nn.Linear(width, 256)
        self.head.weight = self.embed.weight

    def forward(self, tokens: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        hidden = self.embed(tokens)
        for layer in self.layers:
            hidden = hidden + layer(hidden)
        return self.head(hidden)


def build(config: dict[str, Any]) -> Recipe:
    torch.manual_seed(config["seed"])
    module = Tower(width=config["width"], depth=config["depth"])
    return Recipe(
        module=module,
        loss_sum=_loss_sum,
        dataset=TextDataset(config["text"], config["sequence_length"]),
        layers=tuple(module.layers),
    )


def _loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    tokens, labels = batch
    logits = module(tokens).float()
    return functional.cross_entropy(
        logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
