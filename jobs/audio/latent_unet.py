"""A small latent 3D U-Net that syncs lips to speech, as LatentSync's (arXiv:2412.09262).

It predicts the noise in the latents of a video with a masked mouth. Inputs: the unmasked rest, a reference stretch of
the same video, and the sound.

Its thirteen input channels are LatentSync's: noisy 4, mask 1, masked 4, reference 4. Faces are drawn from the speech
(faces.py), their latents are computed once.

Shape suffixes: B stretches, C channels, N video frames, Y and X places, A mel frames of a video frame, M mel bands.
"""

from __future__ import annotations

import functools
import itertools
import math
import sys
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))  # a rank knows this file alone
from jobs.audio.faces import CHANNELS, Stretches, latents_of
from jobs.audio.features import MELS, speech_of
from jobs.audio.weights import read_weights
from orchestrator.training.contract.recipe import Batch, Recipe

HEADS = 4


class Attention(nn.Module):
    """Attention of each place to `context`, or self-attention, with a residual connection."""

    def __init__(self, width: int, context: int | None = None) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(width)
        self.query = nn.Linear(width, width)
        self.key_value = nn.Linear(context or width, 2 * width)
        self.out = nn.Linear(width, width)

    def forward(self, x: Tensor, context: Tensor | None = None) -> Tensor:
        normed = self.norm(x)
        queries = self.query(normed).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        pairs = (
            self.key_value(normed if context is None else context)
            .unflatten(-1, (2 * HEADS, -1))
            .transpose(1, 2)
        )
        keys, values = pairs.chunk(2, dim=1)
        found = functional.scaled_dot_product_attention(queries, keys, values)
        return x + self.out(found.transpose(1, 2).flatten(2))


class Block(nn.Module):
    """A residual convolution of every picture with an embedding of the diffusion time, then attention to the sound and
    along the frames (LatentSync's motion module). `scale` other than 1 changes the resolution."""

    def __init__(self, inputs: int, outputs: int, embedding: int, scale: float = 1.0) -> None:
        super().__init__()
        self.scale = scale
        self.norms = nn.ModuleList((nn.GroupNorm(1, inputs), nn.GroupNorm(4, outputs)))
        self.convs = nn.ModuleList(
            nn.Conv3d(width, outputs, (1, 3, 3), padding=(0, 1, 1)) for width in (inputs, outputs)
        )
        self.time = nn.Linear(embedding, outputs)
        self.skip = nn.Conv3d(inputs, outputs, 1)
        self.sound = Attention(outputs, MELS)
        self.motion = Attention(outputs)

    def forward(self, x_BCNYX: Tensor, time_BE: Tensor, sound_BNAM: Tensor) -> Tensor:
        if self.scale != 1:
            x_BCNYX = functional.interpolate(
                x_BCNYX, scale_factor=(1, self.scale, self.scale), mode="nearest"
            )
        out = (
            self.convs[0](functional.silu(self.norms[0](x_BCNYX)))
            + self.time(time_BE)[:, :, None, None, None]
        )
        x_BCNYX = self.skip(x_BCNYX) + self.convs[1](functional.silu(self.norms[1](out)))
        batch, _, frames, height, width = x_BCNYX.shape
        pictures = x_BCNYX.permute(0, 2, 3, 4, 1).flatten(2, 3).flatten(0, 1)  # [BN, YX, C]
        pictures = self.sound(pictures, sound_BNAM.flatten(0, 1))
        places = pictures.unflatten(0, (batch, frames)).transpose(1, 2).flatten(0, 1)  # [BYX, N, C]
        moved = self.motion(places).unflatten(0, (batch, height, width))
        return moved.permute(0, 4, 3, 1, 2)


class UNet(nn.Module):
    """Predicts the noise of the first four channels from thirteen channels, the diffusion time and the sound."""

    def __init__(self, width: int, levels: int) -> None:
        super().__init__()
        widths = [width * 2**level for level in range(levels)]
        self.first = nn.Conv3d(3 * CHANNELS + 1, width, (1, 3, 3), padding=(0, 1, 1))
        self.down = nn.ModuleList(
            Block(inputs, outputs, width, scale=0.5)
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.middle = Block(widths[-1], widths[-1], width)
        self.up = nn.ModuleList(
            Block(2 * inputs, outputs, width, scale=2.0)
            for inputs, outputs in zip(widths[:0:-1], widths[-2::-1], strict=True)
        )
        self.last = nn.Conv3d(2 * width, CHANNELS, 1)

    def forward(self, x_BCNYX: Tensor, time_BE: Tensor, sound_BNAM: Tensor) -> Tensor:
        passed = [self.first(x_BCNYX)]
        for block in self.down:
            passed.append(block(passed[-1], time_BE, sound_BNAM))
        x_BCNYX = self.middle(passed[-1], time_BE, sound_BNAM)
        for block in self.up:
            x_BCNYX = block(torch.cat((x_BCNYX, passed.pop()), dim=1), time_BE, sound_BNAM)
        return self.last(torch.cat((x_BCNYX, passed.pop()), dim=1))


def build(config: dict[str, Any]) -> Recipe:
    """The U-Net of `config`, over `frames` pictures of `resolution` pixels; `weights` names a file."""
    speech = speech_of(clips=config["clips"], cache=config.get("cache"))
    module = UNet(config["width"], config["levels"])
    if "weights" in config:
        read_weights(module, config["weights"])
    return Recipe(
        module=module,
        loss_sum=functools.partial(loss_sum, width=config["width"]),
        dataset=Stretches(
            latents_of(speech, frames=config["frames"], resolution=config["resolution"])
        ),
        layers=(*module.down, module.middle, *module.up),
    )


def loss_sum(module: nn.Module, batch: Batch, *, width: int) -> Tensor:
    """Sum over the stretches of the mean square error of the predicted noise (arXiv:2006.11239, equation 14)."""
    latents, reference, sound = batch
    time_B = torch.rand(len(latents), device=latents.device)
    noise = torch.randn_like(latents)
    angle = (time_B * math.pi / 2).view(-1, 1, 1, 1, 1)  # a cosine schedule, as in arXiv:2102.09672
    noisy = angle.cos() * latents + angle.sin() * noise
    mask = torch.ones_like(latents[:, :1])
    mask[..., latents.shape[-2] // 2 :, :] = 0  # the mouth is in the lower half
    given = torch.cat((noisy, mask, latents * mask, reference), dim=1)
    found = module(given, _embedded(time_B, width), sound).float()
    return (found - noise).square().flatten(1).mean(1).sum()


def _embedded(time_B: Tensor, width: int) -> Tensor:
    """Sines and cosines of the time at growing frequencies, [B, E]."""
    frequencies = torch.exp(torch.linspace(0, 6, width // 2, device=time_B.device))
    angles = time_B[:, None] * frequencies
    return torch.cat((angles.sin(), angles.cos()), dim=1)
