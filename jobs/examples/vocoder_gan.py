"""A small HiFi-GAN (arXiv:2010.05646, with its least-squares losses): the example of a model with two optimizers.

A generator makes sound from its spectrum; a discriminator tells it from real sound.

The factory returns two Recipes. In every optimizer step the discriminator is trained first, then the generator, each
with its own optimizer and learning rate, on the same samples.

Shape suffixes: B sounds, C channels, F frequencies, N frames, T points in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.training.contract.recipe import Batch, Recipe

HOP = 16  # points in time per frame
FREQUENCIES = HOP + 1  # of a frame and its successor
WEIGHT_OF_SPECTRUM = 1.0  # HiFi-GAN: 45, of absolute distances


class Upsampling(nn.Module):
    """Four times the points in time at half the channels, and a residual convolution."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(width, width // 2, 8, stride=4, padding=2)
        self.conv = nn.Conv1d(width // 2, width // 2, 3, padding=1)
        self.dropout = nn.Dropout(0.1)

    def forward(self, x_BCT: Tensor) -> Tensor:
        x_BCT = self.up(functional.leaky_relu(x_BCT, 0.1))
        return x_BCT + self.dropout(self.conv(functional.leaky_relu(x_BCT, 0.1)))


class Generator(nn.Module):
    """Log spectra and noise to sounds."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(FREQUENCIES + 1, width, 3, padding=1)
        self.blocks = nn.ModuleList(
            Upsampling(width // 2**level) for level in range(2)
        )  # 4 x 4 = HOP
        self.last = nn.Conv1d(width // 4, 1, 7, padding=3)

    def forward(self, spectra_BFN: Tensor, noise_B1N: Tensor) -> Tensor:
        x_BCT = self.first(torch.cat((spectra_BFN, noise_B1N), dim=1))
        for block in self.blocks:
            x_BCT = block(x_BCT)
        return torch.tanh(self.last(x_BCT))


class Downsampling(nn.Module):
    """A strided convolution and its activation."""

    def __init__(self, inputs: int, outputs: int) -> None:
        super().__init__()
        self.conv = nn.Conv1d(inputs, outputs, 5, stride=3, padding=2)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return functional.leaky_relu(self.conv(x_BCT), 0.1)


class Discriminator(nn.Module):
    """Sounds to scores, one per stretch of time: 1 real, 0 made."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.first = Downsampling(1, width)
        self.blocks = nn.ModuleList((Downsampling(width, width), Downsampling(width, width)))
        self.last = nn.Conv1d(width, 1, 3, padding=1)

    def forward(self, sounds_B1T: Tensor) -> Tensor:
        x_BCT = self.first(sounds_B1T)
        for block in self.blocks:
            x_BCT = block(x_BCT)
        return self.last(x_BCT)


class Tones:
    """Synthetic: sound i has three harmonics of its own pitch. A real dataset would read recordings."""

    def __init__(self, samples: int, frames: int) -> None:
        self._samples, self._frames = samples, frames

    def __len__(self) -> int:
        return self._samples

    def token_count(self, index: int) -> int:  # noqa: ARG002
        """Each sound adds one term to the loss sum."""
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Sounds [B, 1, T]."""
        return (torch.stack([self._sound(index) for index in indices]).unsqueeze(1),)

    def _sound(self, index: int) -> Tensor:
        generator = torch.Generator().manual_seed(index)
        pitch, *volumes = torch.rand(4, generator=generator).tolist()
        time = torch.arange(self._frames * HOP) * (0.1 + 0.3 * pitch)
        return sum(
            (0.3 * v * torch.sin(n * time) for n, v in enumerate(volumes, start=1)),
            torch.zeros_like(time),
        )


def build(config: dict[str, Any]) -> tuple[Recipe, Recipe]:
    """The pair of `config`, in training order.

    A loss calls its own module once, through its argument, and the other module through this function's variable.
    """
    generator, discriminator = Generator(config["width"]), Discriminator(config["width"])
    dataset = Tones(config["samples"], config["frames"])

    def discriminator_loss(module: nn.Module, batch: Batch) -> Tensor:
        (real_B1T,) = batch
        with torch.no_grad():
            made_B1T = generator(*_inputs(real_B1T))
        scores = module(
            torch.cat((real_B1T, made_B1T.to(real_B1T.dtype)))
        ).float()  # both in one call
        real, made = scores.chunk(2)
        return _sum_of_means((real - 1).square()) + _sum_of_means(made.square())

    def generator_loss(module: nn.Module, batch: Batch) -> Tensor:
        (real_B1T,) = batch
        made_B1T = module(*_inputs(real_B1T))
        scores = discriminator(made_B1T).float()
        distance = (_spectra(made_B1T.float()) - _spectra(real_B1T)).square()
        return _sum_of_means((scores - 1).square()) + WEIGHT_OF_SPECTRUM * _sum_of_means(distance)

    return (
        Recipe(
            name="discriminator",
            module=discriminator,
            loss_sum=discriminator_loss,
            dataset=dataset,
            layers=tuple(discriminator.blocks),
            learning_rate=config["discriminator_learning_rate"],
        ),
        Recipe(
            name="generator",
            module=generator,
            loss_sum=generator_loss,
            dataset=dataset,
            layers=tuple(generator.blocks),
        ),
    )


def _inputs(sounds_B1T: Tensor) -> tuple[Tensor, Tensor]:
    """The generator's inputs. Noise comes from torch's generator, which the engine seeds for every micro-batch."""
    spectra_BFN = _spectra(sounds_B1T)
    return spectra_BFN, torch.randn_like(spectra_BFN[:, :1])


def _spectra(sounds_B1T: Tensor) -> Tensor:
    """Log powers of overlapping frames, [B, F, N]."""
    frames_BNT = functional.pad(sounds_B1T.squeeze(1), (0, HOP)).unfold(1, 2 * HOP, HOP)
    window = torch.hann_window(2 * HOP, device=sounds_B1T.device)
    return torch.log1p(torch.fft.rfft(frames_BNT * window).abs().square()).transpose(1, 2)


def _sum_of_means(values: Tensor) -> Tensor:
    """One term per sound: the mean over all else."""
    return values.flatten(1).mean(1).sum()
