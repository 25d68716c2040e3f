"""A small diffusion U-Net (arXiv:2006.11239) that learns to draw spots: the example of a loss with random noise.

Times and noise come from torch's generator inside the loss. The engine seeds it for every micro-batch. With equal
micro_batch_size they are the same after a restart, at any number of devices and in a recomputation.

Shape suffixes: B pictures, C channels, Y and X pixels, E embedding of the time.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import Batch, Recipe


class Block(nn.Module):
    """A residual convolution with an embedding of the diffusion time; `scale` other than 1 changes the resolution."""

    def __init__(self, inputs: int, outputs: int, embedding: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norm = nn.GroupNorm(4, inputs)
        self.conv = nn.Conv2d(inputs, outputs, 3, padding=1)
        self.time = nn.Linear(embedding, outputs)
        self.skip = nn.Conv2d(inputs, outputs, 1)

    def forward(self, x_BCYX: Tensor, time_BE: Tensor) -> Tensor:
        if self.scale != 1:
            x_BCYX = functional.interpolate(x_BCYX, scale_factor=self.scale, mode="nearest")
        out_BCYX = (
            self.conv(functional.silu(self.norm(x_BCYX))) + self.time(time_BE)[:, :, None, None]
        )
        return self.skip(x_BCYX) + functional.silu(out_BCYX)


class UNet(nn.Module):
    """Predicts the noise in noisy pictures from the pictures and their diffusion times."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = nn.Conv2d(1, width, 3, padding=1)
        self.down = nn.ModuleList(
            Block(inputs, outputs, width, scale=0.5)
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.middle = Block(widths[-1], widths[-1], width)
        self.up = nn.ModuleList(
            Block(2 * inputs, outputs, width, scale=2.0)
            for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv2d(2 * width, 1, 3, padding=1)

    def forward(self, x_B1YX: Tensor, time_BE: Tensor) -> Tensor:
        passed = [self.first(x_B1YX)]
        for block in self.down:
            passed.append(block(passed[-1], time_BE))
        x_BCYX = self.middle(passed[-1], time_BE)
        for block in self.up:
            x_BCYX = block(torch.cat((x_BCYX, passed.pop()), dim=1), time_BE)
        return self.last(torch.cat((x_BCYX, passed.pop()), dim=1))


class Spots:
    """Synthetic: pictures of one soft spot each. A real dataset would read files."""

    def __init__(self, samples: int, size: int) -> None:
        self._samples, self._size = samples, size

    def __len__(self) -> int:
        return self._samples

    def token_count(self, index: int) -> int:  # noqa: ARG002
        """Each picture adds one term to the loss sum."""
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Pictures [B, 1, Y, X] from -1 to 1."""
        return (torch.stack([self._picture(index) for index in indices]).unsqueeze(1),)

    def _picture(self, index: int) -> Tensor:
        at_y, at_x, radius = (
            torch.rand(3, generator=torch.Generator().manual_seed(index)) - 0.5
        ).tolist()
        place = torch.linspace(-1, 1, self._size)
        distance = (place[:, None] - at_y).square() + (place[None, :] - at_x).square()
        return 2 * torch.exp(-distance / (0.2 + 0.2 * radius)) - 1


def build(config: dict[str, Any]) -> Recipe:
    """The U-Net of `config`."""
    module = UNet(config["width"], config["levels"])
    return Recipe(
        module=module,
        loss_sum=functools.partial(loss_sum, width=config["width"]),
        dataset=Spots(config["samples"], config["size"]),
        layers=(*module.down, module.middle, *module.up),
    )


def loss_sum(module: nn.Module, batch: Batch, *, width: int) -> Tensor:
    """Sum over the pictures of the mean square error of the predicted noise (the paper's equation 14).

    The module's inputs may be rounded to the plan's precision. Times would become too coarse, so it gets their sines.
    """
    (pictures,) = batch
    time_B = torch.rand(len(pictures), device=pictures.device)
    noise = torch.randn_like(pictures)
    angle = (time_B * math.pi / 2).view(-1, 1, 1, 1)  # a cosine schedule, as in arXiv:2102.09672
    found = module(angle.cos() * pictures + angle.sin() * noise, _embedded(time_B, width)).float()
    return (found - noise).square().flatten(1).mean(1).sum()


def _embedded(time_B: Tensor, width: int) -> Tensor:
    """Sines and cosines of the time at growing frequencies, [B, E]."""
    frequencies = torch.exp(torch.linspace(0, 6, width // 2, device=time_B.device))
    angles = time_B[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
