"""A U-Net over volumes (Çiçek et al. 2016, arXiv:1606.06650): every voxel of a made scan is inside of a ball or not.

Shape suffixes: B volumes, C channels, Z, Y and X voxels.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import Batch, Recipe


class Block(nn.Module):
    """Two convolutions, each behind a norm."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList((nn.GroupNorm(1, inputs), nn.GroupNorm(4, outputs)))
        self.convs = nn.ModuleList(
            nn.Conv3d(width, outputs, 3, padding=1) for width in (inputs, outputs)
        )

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        for norm, conv in zip(self.norms, self.convs, strict=True):
            x_BCZYX = functional.relu(conv(norm(x_BCZYX)))
        return x_BCZYX


class UNet(nn.Module):
    """Volumes to one logit for every voxel."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.down = nn.ModuleList(
            Block(inputs, outputs) for inputs, outputs in itertools.pairwise((1, *widths))
        )
        deepest_first = widths[::-1]
        pairs = list(itertools.pairwise(deepest_first))
        self.rise = nn.ModuleList(
            nn.ConvTranspose3d(inputs, outputs, 2, stride=2) for inputs, outputs in pairs
        )
        self.up = nn.ModuleList(Block(2 * outputs, outputs) for _, outputs in pairs)
        self.last = nn.Conv3d(width, 1, 1)

    def forward(self, x_BCZYX: Tensor) -> Tensor:
        passed: list[Tensor] = []
        for level, block in enumerate(self.down):
            x_BCZYX = block(functional.max_pool3d(x_BCZYX, 2) if level else x_BCZYX)
            passed.append(x_BCZYX)
        x_BCZYX = passed.pop()
        for rise, block in zip(self.rise, self.up, strict=True):
            x_BCZYX = block(torch.cat((rise(x_BCZYX), passed.pop()), dim=1))
        return self.last(x_BCZYX)


class Balls:
    """Made scans, one ball in each."""

    def __init__(self, samples: int, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._samples

    def token_count(self, index: int) -> int:  # noqa: ARG002
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Volumes and masks, [B, 1, Z, Y, X] each."""
        axis = torch.linspace(-1, 1, self._size)
        distance = (axis[:, None, None].square() + axis[:, None].square() + axis.square()).sqrt()
        masks = torch.stack(
            [(distance < 0.2 + 0.1 * (index % 7)).float() for index in indices]
        ).unsqueeze(1)
        return masks + 0.1, masks


def build(config: dict[str, Any]) -> Recipe:
    module = UNet(config["width"], config["levels"])
    return Recipe(
        module=module,
        loss_sum=loss_sum,
        dataset=Balls(config["samples"], config["size"]),
        layers=(*module.down, *module.up),
    )


def loss_sum(module: nn.Module, batch: Batch) -> Tensor:
    """The mean over the voxels of every volume, summed over the volumes."""
    volumes, masks = batch
    lost = functional.binary_cross_entropy_with_logits(
        module(volumes).float(), masks, reduction="none"
    )
    return lost.flatten(1).mean(1).sum()
