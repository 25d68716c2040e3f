"""Synthetic videos of a speaking face: the mouth opens in proportion to the loudness of the speech.

Latents replace those of a video auto-encoder: the first four principal components of every 8 x 8 patch. They are
computed once and memory-mapped.

Shape suffixes: V stretches, N video frames, C channels, Y and X places, A mel frames of a video frame, M mel bands.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from jobs.audio.features import HOP, Speech, mapped, once
from jobs.audio.speech import RATE_HZ
from orchestrator.training.contract.recipe import Batch

VIDEO_HZ = 25  # LatentSync's
CHANNELS = 4
PATCH = 8  # pixels
MEL_FRAMES = 4  # around the middle of a video frame, which is 3.4 of them long


@dataclass(frozen=True, slots=True, kw_only=True)
class Latents:
    """Latents of video stretches, and their sound."""

    latents_VCNYX: np.ndarray
    sound_VNAM: np.ndarray


class Stretches:
    """A stretch, a reference stretch of the same length, which gives the appearance, and its sound."""

    def __init__(self, found: Latents) -> None:
        self._found = found

    def __len__(self) -> int:
        return len(self._found.latents_VCNYX)

    def token_count(self, index: int) -> int:  # noqa: ARG002
        """Each stretch adds one term to the loss sum."""
        return 1

    def batch(self, indices: Sequence[int]) -> Batch:
        """Latents and reference latents [B, C, N, Y, X], and sound [B, N, A, M]."""
        others = [(index + 1) % len(self) for index in indices]
        latents, sound = self._found.latents_VCNYX, self._found.sound_VNAM
        arrays = (latents[list(indices)], latents[others], sound[list(indices)])
        return tuple(map(torch.from_numpy, arrays))


def latents_of(speech: Speech, *, frames: int, resolution: int) -> Latents:
    """Every whole stretch of `frames` pictures of `resolution` pixels; computed if the speech's cache lacks them."""
    said = {"speech": speech.key, "frames": frames, "resolution": resolution}

    def write(into: Path) -> None:
        stretches = [
            each for clip in range(len(speech.texts)) for each in _heard(speech, clip, frames)
        ]
        sound_VNAM = np.stack(stretches)
        videos = np.stack([_drawn(each, resolution) for each in sound_VNAM])
        np.save(into / "sound.npy", sound_VNAM)
        np.save(into / "latents.npy", _components(videos))

    found = once(speech.cache, "latents", said, write)
    return Latents(
        latents_VCNYX=mapped(found / "latents.npy"), sound_VNAM=mapped(found / "sound.npy")
    )


def _heard(speech: Speech, clip: int, frames: int) -> list[np.ndarray]:
    """Mel frames around each video frame of every whole stretch of the clip, [N, A, M] each."""
    mels_TM = speech.mels_TM[speech.frames(clip)]
    count = int(len(mels_TM) * HOP / RATE_HZ * VIDEO_HZ) // frames * frames
    middles = (np.arange(count) + 0.5) / VIDEO_HZ * RATE_HZ / HOP
    near = np.clip(
        middles[:, None].astype(int) + np.arange(MEL_FRAMES) - MEL_FRAMES // 2, 0, len(mels_TM) - 1
    )
    return np.split(mels_TM[near], count // frames) if count else []


def _drawn(sound_NAM: np.ndarray, resolution: int) -> np.ndarray:
    """A head, two eyes and a mouth, grey from -1 to 1, float32 [N, pixels, pixels]."""
    loudness_N = sound_NAM.mean(axis=(1, 2))
    opening_N = np.clip((loudness_N + 9) / 9, 0, 1)[:, None, None]
    y, x = np.meshgrid(*[np.linspace(-1, 1, resolution)] * 2, indexing="ij")
    head = x**2 / 0.6 + y**2 < 0.8
    eyes = (np.abs(x) - 0.3) ** 2 + (y + 0.3) ** 2 < 0.01
    mouth_N = x**2 / 0.1 + (y - 0.4) ** 2 / (0.002 + 0.04 * opening_N) < 1
    return (np.where(head, 0.5, -0.5) - 1.0 * (eyes | mouth_N)).astype(np.float32)


def _components(videos_VNPP: np.ndarray) -> np.ndarray:
    """The principal components of all patches, each of variance 1, float32 [V, C, N, Y, X]."""
    videos, frames, pixels, _ = videos_VNPP.shape
    places = pixels // PATCH
    cut = videos_VNPP.reshape(videos, frames, places, PATCH, places, PATCH).transpose(
        0, 1, 2, 4, 3, 5
    )
    patches = cut.reshape(-1, PATCH * PATCH)
    patches = patches - patches.mean(axis=0)
    _, vectors = np.linalg.eigh(patches.T @ patches)
    found = patches @ vectors[:, -CHANNELS:]
    found /= np.maximum(found.std(axis=0), 1e-6)
    return (
        found.reshape(videos, frames, places, places, CHANNELS)
        .transpose(0, 4, 1, 2, 3)
        .astype(np.float32)
    )
