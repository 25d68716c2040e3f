"""A residual convolution net that classifies shapes: the smallest example of a user's own model.

A factory is a function of the job's `model.config`. It returns a Recipe: the module, its loss and its data. Any plan
then trains it: DDP, FSDP2 or ZeRO, with accumulation, activation checkpointing and low precision.

Shape suffixes: B pictures, C channels, Y and X pixels, K classes.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import Batch, Recipe

SHAPES = 4  # disc, square, stripes across, stripes along


class Block(nn.Module):
    """Two convolutions with a residual connection."""

    def __init__(self, width: int, norm: str) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(width, width, 3, padding=1, bias=False) for _ in range(2)
        )
        self.norms = nn.ModuleList(_norm(width, norm) for _ in range(2))

    def forward(self, x_BCYX: Tensor) -> Tensor:
        out_BCYX = x_BCYX
        for conv, norm in zip(self.convs, self.norms, strict=True):
            out_BCYX = conv(functional.relu(norm(out_BCYX)))
        return x_BCYX + out_BCYX


class Classifier(nn.Module):
    """Pictures to logits: a stem, blocks at half the resolution, the mean over all places, a linear head."""

    def __init__(self, width: int, depth: int, norm: str) -> None:
        super().__init__()
        self.stem = nn.Conv2d(1, width, 4, stride=2, padding=1)
        self.blocks = nn.ModuleList(Block(width, norm) for _ in range(depth))
        self.head = nn.Linear(width, SHAPES)

    def forward(self, pictures_B1YX: Tensor) -> Tensor:
        x_BCYX = self.stem(pictures_B1YX)
        for block in self.blocks:
            x_BCYX = block(x_BCYX)
        return self.head(x_BCYX.mean((2, 3)))


class Pictures:
    """Synthetic: picture i depends on i alone, so every rank has the same ones. A real dataset would read files."""

    def __init__(self, samples: int, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._samples

    def token_count(self, index: int) -> int:  # noqa: ARG002
        """Each picture adds one term to the loss sum."""
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Pictures [B, 1, Y, X] and their classes [B]."""
        pictures, classes = zip(*(self._sample(index) for index in indices), strict=True)
        return torch.stack(pictures), torch.tensor(classes)

    def _sample(self, index: int) -> tuple[Tensor, int]:
        generator = torch.Generator().manual_seed(index)
        at_y, at_x, radius, noise = torch.rand(4, generator=generator).tolist()
        place = torch.linspace(-1, 1, self._size)
        y, x = place[:, None] - at_y + 0.5, place[None, :] - at_x + 0.5
        radius = 0.3 + 0.3 * radius
        kind = index % SHAPES
        shape = (
            (y.square() + x.square() < radius**2),
            (torch.maximum(y.abs(), x.abs()) < radius),
            (torch.sin(9 * y) > 0).expand(self._size, self._size),
            (torch.sin(9 * x) > 0).expand(self._size, self._size),
        )[kind]
        picture = shape.float() + noise * torch.randn(self._size, self._size, generator=generator)
        return picture[None], kind


def build(config: dict[str, Any]) -> Recipe:
    """The classifier of `config`.

    `layers` are the repeated blocks: FSDP2 shards them one by one, and activation checkpointing recomputes them. With
    `norm: batch` the job must set `training.batch_norm_samples`.
    """
    module = Classifier(config["width"], config["depth"], config.get("norm", "group"))
    return Recipe(
        module=module,
        loss_sum=loss_sum,
        dataset=Pictures(config["samples"], config["size"]),
        layers=tuple(module.blocks),
    )


def loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    """The sum over the pictures, not the mean: the engine divides by the number of pictures in the global batch."""
    pictures, classes = batch
    return functional.cross_entropy(module(pictures).float(), classes, reduction="sum")


def _norm(width: int, norm: str) -> nn.Module:
    return nn.BatchNorm2d(width) if norm == "batch" else nn.GroupNorm(4, width)
