"""Voice conversion as in RVC: VITS (arXiv:2106.06103) against HiFi-GAN's discriminators (arXiv:2010.05646).

Two networks, two optimizers; the discriminators train first, as in RVC. The input is pitch and one unit per frame: a
k-means cluster of the log-mel frame, where RVC uses HuBERT's features. The prior encoder reads the units, the posterior
encoder the recording; couplings map one to the other; the decoder makes sound.

Shape suffixes: B stretches, C channels, M mel bands, N frames, D latent, T points in time.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional

sys.path.append(str(Path(__file__).parents[2]))  # a rank knows this file alone
from jobs.audio.features import (
    HOP,
    MELS,
    QUIET,
    WINDOW,
    Codes,
    Speech,
    codes_of,
    mel_filters,
    speech_of,
)
from jobs.audio.weights import read_weights
from orchestrator.training.contract.recipe import Batch, Recipe

RATES = (8, 8, 4)  # of the decoder's upsampling: HOP in all
PERIODS = (2, 3, 5)
WEIGHT_OF_MELS = 45.0  # HiFi-GAN, section 3.2 (equation 7)
WEIGHT_OF_FEATURES = 2.0  # there
SLOPE = 0.1  # of the leaky rectifiers


class Residual(nn.Module):
    """Three dilated convolutions, each with a residual connection."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv1d(width, width, 3, padding=d, dilation=d) for d in (1, 3, 5)
        )

    def forward(self, x_BCT: Tensor) -> Tensor:
        for conv in self.convs:
            x_BCT = x_BCT + conv(functional.leaky_relu(x_BCT, SLOPE))
        return x_BCT


class Upsampling(nn.Module):
    """Upsampling by `rate` at half the channels."""

    def __init__(self, width: int, rate: int) -> None:
        super().__init__()
        self.up = nn.ConvTranspose1d(width, width // 2, 2 * rate, stride=rate, padding=rate // 2)
        self.residual = Residual(width // 2)

    def forward(self, x_BCT: Tensor) -> Tensor:
        return self.residual(self.up(functional.leaky_relu(x_BCT, SLOPE)))


class Coupling(nn.Module):
    """Half of the channels shift the other half; then they swap (VITS, section 2.5.1: volume-preserving)."""

    def __init__(self, latent: int, width: int) -> None:
        super().__init__()
        self.first = nn.Conv1d(latent // 2, width, 1)
        self.residual = Residual(width)
        self.last = nn.Conv1d(width, latent // 2, 1)

    def forward(self, z_BDN: Tensor) -> Tensor:
        kept, moved = z_BDN.chunk(2, dim=1)
        return torch.cat((moved + self.last(self.residual(self.first(kept))), kept), dim=1)


class Generator(nn.Module):
    """Mels, units, pitch and noise to sound [B, 1, T], and the terms of the divergence [B, D, N]."""

    def __init__(self, width: int, latent: int, words: int) -> None:
        super().__init__()
        self.units = nn.Embedding(words, width)
        self.pitch = nn.Conv1d(2, width, 1)  # voiced or not, and logarithm
        self.prior = nn.Sequential(Residual(width), nn.Conv1d(width, 2 * latent, 1))
        self.posterior = nn.Sequential(
            nn.Conv1d(MELS, width, 5, padding=2), Residual(width), nn.Conv1d(width, 2 * latent, 1)
        )
        self.couplings = nn.ModuleList(Coupling(latent, width) for _ in range(4))
        self.first = nn.Conv1d(latent, width, 7, padding=3)
        self.blocks = nn.ModuleList(
            Upsampling(width // 2**level, rate) for level, rate in enumerate(RATES)
        )
        self.last = nn.Conv1d(width // 2 ** len(RATES), 1, 7, padding=3)
        for encoder in (
            self.prior,
            self.posterior,
        ):  # both start as the standard normal: their divergence is 0
            nn.init.zeros_(encoder[-1].weight)
            nn.init.zeros_(encoder[-1].bias)

    def forward(
        self, mels_BMN: Tensor, units_BN: Tensor, pitch_B2N: Tensor, noise_BDN: Tensor
    ) -> tuple[Tensor, Tensor]:
        mean_p, log_p = self.prior(
            self.units(units_BN).transpose(1, 2) + self.pitch(pitch_B2N)
        ).chunk(2, dim=1)
        mean_q, log_q = self.posterior(mels_BMN).chunk(2, dim=1)
        z_BDN = mean_q + noise_BDN * log_q.exp()
        carried = z_BDN
        for coupling in self.couplings:
            carried = coupling(carried)
        divergence_BDN = (
            log_p - log_q - 0.5 + 0.5 * (carried - mean_p).square() * (-2 * log_p).exp()
        )
        x_BCT = self.first(z_BDN)
        for block in self.blocks:
            x_BCT = block(x_BCT)
        return torch.tanh(self.last(functional.leaky_relu(x_BCT, SLOPE))), divergence_BDN


class Discriminator(nn.Module):
    """Sound, folded at a period (1: not folded), to scores and the features of each layer."""

    def __init__(self, width: int, period: int) -> None:
        super().__init__()
        self.period = period
        widths = (1, width, 2 * width, 4 * width)
        self.convs = nn.ModuleList(
            nn.Conv2d(inputs, outputs, (5, 1), stride=(3, 1), padding=(2, 0))
            for inputs, outputs in itertools.pairwise(widths)
        )
        self.last = nn.Conv2d(4 * width, 1, (3, 1), padding=(1, 0))

    def forward(self, sounds_B1T: Tensor) -> list[Tensor]:
        folded = functional.pad(sounds_B1T, (0, -sounds_B1T.shape[-1] % self.period))
        found = [folded.unflatten(-1, (-1, self.period))]
        for conv in self.convs:
            found.append(functional.leaky_relu(conv(found[-1]), SLOPE))
        return [*found[1:], self.last(found[-1])]


class Discriminators(nn.Module):
    """One discriminator for each period, and one for the unfolded sound."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.each = nn.ModuleList(Discriminator(width, period) for period in (1, *PERIODS))

    def forward(self, sounds_B1T: Tensor) -> list[list[Tensor]]:
        return [discriminator(sounds_B1T) for discriminator in self.each]


class Windows:
    """Stretches of `frames` frames, each inside one clip."""

    def __init__(self, speech: Speech, units: Codes, frames: int) -> None:
        self._speech, self._units, self._frames = speech, units.levels[0], frames
        clips = map(speech.frames, range(len(speech.texts)))
        self._firsts = [
            first for clip in clips for first in range(clip.start, clip.stop - frames + 1, frames)
        ]

    def __len__(self) -> int:
        return len(self._firsts)

    def token_count(self, index: int) -> int:  # noqa: ARG002
        """Each stretch adds one term to the loss sum."""
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Sounds [B, 1, T], mels [B, M, N], units [B, N] and pitch [B, 2, N]."""
        at = [
            slice(first, first + self._frames)
            for first in (self._firsts[index] for index in indices)
        ]
        sounds = np.stack([self._speech.sound[each.start * HOP : each.stop * HOP] for each in at])[
            :, None
        ]
        mels = np.stack([self._speech.mels_TM[each].T for each in at])
        units = np.stack([self._units[each] for each in at])
        pitch = np.stack([self._speech.pitch_T[each] for each in at])
        heard = np.stack((pitch > 0, np.log(np.maximum(pitch, 1.0)) / 6), axis=1)
        return (
            torch.from_numpy(sounds.astype(np.float32) / 2**15),
            torch.from_numpy((mels + 6) / 3),  # of about mean 0 and variance 1
            torch.from_numpy(units.astype(np.int64)),
            torch.from_numpy(heard.astype(np.float32)),
        )


def build(config: dict[str, Any]) -> tuple[Recipe, Recipe]:
    """The pair of `config`, in training order.

    `generator_weights` and `discriminator_weights` name files: RVC's `-pg` and `-pd`.
    """
    speech = speech_of(clips=config["clips"], cache=config.get("cache"))
    units = codes_of(speech, scales=(1,), words=config["units"], frames_per_code=1)
    generator = Generator(config["width"], config["latent"], config["units"])
    discriminators = Discriminators(config["discriminator_width"])
    for module, name in (
        (generator, "generator_weights"),
        (discriminators, "discriminator_weights"),
    ):
        if name in config:
            read_weights(module, config[name])
    dataset = Windows(speech, units, config["frames"])
    filters = torch.from_numpy(mel_filters().T.astype(np.float32))

    def inputs(batch: Batch) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        _, mels_BMN, units_BN, pitch_B2N = batch
        shape = len(mels_BMN), config["latent"], mels_BMN.shape[-1]
        return mels_BMN, units_BN, pitch_B2N, torch.randn(shape, device=mels_BMN.device)

    def discriminator_loss(module: nn.Module, batch: Batch) -> Tensor:
        real_B1T = batch[0]
        with torch.no_grad():
            made_B1T, _ = generator(*inputs(batch))
        found = module(torch.cat((real_B1T, made_B1T.to(real_B1T.dtype))))  # both in one call
        lost = real_B1T.new_zeros(())
        for *_, scores in found:
            real, made = scores.float().chunk(2)
            lost = lost + _sum_of_means((real - 1).square()) + _sum_of_means(made.square())
        return lost

    def generator_loss(module: nn.Module, batch: Batch) -> Tensor:
        real_B1T = batch[0]
        made_B1T, divergence_BDN = module(*inputs(batch))
        lost = _sum_of_means(divergence_BDN.float())
        distance = (_log_mels(made_B1T.float(), filters) - _log_mels(real_B1T, filters)).abs()
        lost = lost + WEIGHT_OF_MELS * _sum_of_means(distance)
        for *layers, scores in discriminators(torch.cat((real_B1T.to(made_B1T.dtype), made_B1T))):
            lost = lost + _sum_of_means((scores.float().chunk(2)[1] - 1).square())
            for layer in layers:
                real, made = layer.float().chunk(2)
                lost = lost + WEIGHT_OF_FEATURES * _sum_of_means((made - real.detach()).abs())
        return lost

    return (
        Recipe(
            name="discriminators",
            module=discriminators,
            loss_sum=discriminator_loss,
            dataset=dataset,
            layers=tuple(discriminators.each),
        ),
        Recipe(
            name="generator",
            module=generator,
            loss_sum=generator_loss,
            dataset=dataset,
            layers=tuple(generator.blocks),
        ),
    )


def _log_mels(sounds_B1T: Tensor, filters_FM: Tensor) -> Tensor:
    """Natural logarithms of mel magnitudes, [B, N, M], as in features.log_mels, at every second frame."""
    padded_BT = functional.pad(sounds_B1T, (WINDOW // 2, WINDOW // 2), mode="reflect").squeeze(1)
    windows = padded_BT.unfold(1, WINDOW, 2 * HOP) * torch.hann_window(
        WINDOW, periodic=False, device=padded_BT.device
    )
    powers = torch.view_as_real(torch.fft.rfft(windows)).square().sum(-1)
    magnitudes = (powers + QUIET**2).sqrt()  # the gradient of sqrt at 0 is infinite
    return (magnitudes @ filters_FM.to(magnitudes.device)).clamp(min=QUIET).log()


def _sum_of_means(values: Tensor) -> Tensor:
    """One term per stretch: the mean over all else."""
    return values.flatten(1).mean(1).sum()
