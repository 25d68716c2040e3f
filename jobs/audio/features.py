"""Features of the speech, computed once and memory-mapped by later attempts: a folder of .npy files per setting.

Shape suffixes: T frames (of all clips, concatenated), F frequencies, M mel bands, D values of a frame.
"""

from __future__ import annotations

import hashlib
import itertools
import json
import os
import shutil
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from jobs.audio import speech

CACHE = Path(__file__).parent / "cache"
# samples per frame, window and bands: as HiFi-GAN at this rate (jik876/hifi-gan config_v1.json)
HOP = 256
WINDOW = 1024
MELS = 80
QUIET = 1e-5  # least mel magnitude, as there
LLOYD_ROUNDS = 8
LOWEST_PITCH_HZ, HIGHEST_PITCH_HZ = 60, 400
VOICED = 0.3  # least normalised autocorrelation of a voiced frame
FORMAT = 1  # version of the files: raise it when they change


@dataclass(frozen=True, slots=True, kw_only=True)
class Speech:
    """Sentences, and their sound as ranges of arrays: clip i is the range from ends[i - 1] to ends[i]."""

    key: str  # names what this was made from
    cache: Path
    texts: tuple[str, ...]
    descriptions: tuple[str, ...]  # of the speakers
    sound: np.ndarray  # int16, HOP samples for every frame
    mels_TM: np.ndarray  # natural logarithms, float32
    pitch_T: np.ndarray  # Hz, 0 where unvoiced, float32
    ends: np.ndarray  # in frames

    def frames(self, clip: int) -> slice:
        return slice(int(self.ends[clip - 1]) if clip else 0, int(self.ends[clip]))


def speech_of(*, clips: int, longest: int = 120, cache: str | Path | None = None) -> Speech:
    """The speech of the first `clips` sentences of up to `longest` characters; computed if `cache` lacks it."""
    folder = Path(cache) if cache else CACHE
    said = {"clips": clips, "longest": longest, "format": FORMAT}

    def write(into: Path) -> None:
        texts = speech.sentences(clips, longest)
        speakers, sounds = zip(*speech.clips(texts), strict=True)
        sounds = tuple(np.pad(sound, (0, -len(sound) % HOP)) for sound in sounds)
        np.save(into / "sound.npy", np.concatenate(sounds))
        np.save(into / "mels.npy", np.concatenate([log_mels(sound / 2**15) for sound in sounds]))
        np.save(into / "pitch.npy", np.concatenate([pitches(sound / 2**15) for sound in sounds]))
        np.save(into / "ends.npy", np.cumsum([len(sound) // HOP for sound in sounds]))
        about = {"texts": texts, "descriptions": [speaker.description for speaker in speakers]}
        (into / "texts.json").write_text(json.dumps(about))

    found = once(folder, "speech", said, write)
    about = json.loads((found / "texts.json").read_text())
    return Speech(
        key=found.name,
        cache=folder,
        texts=tuple(about["texts"]),
        descriptions=tuple(about["descriptions"]),
        sound=mapped(found / "sound.npy"),
        mels_TM=mapped(found / "mels.npy"),
        pitch_T=mapped(found / "pitch.npy"),
        ends=mapped(found / "ends.npy"),
    )


@dataclass(frozen=True, slots=True, kw_only=True)
class Codes:
    """The speech as numbers below `words`: level l has one for every scales[l] frames. `ends` count coarsest frames."""

    levels: tuple[np.ndarray, ...]
    ends: np.ndarray


def codes_of(
    speech: Speech, *, scales: Sequence[int], words: int, frames_per_code: int = 2
) -> Codes:
    """Residual vector quantisation of the log-mel frames by k-means, level after level.

    Levels of one scale are what EnCodec and DAC have (arXiv:2210.13438, section 3.2); of falling scales, what SNAC has
    (arXiv:2410.14411, section 3.1). A frame here is the mean of `frames_per_code` frames of the speech.
    """
    said = {
        "speech": speech.key,
        "scales": list(scales),
        "words": words,
        "frames_per_code": frames_per_code,
    }
    coarsest = max(scales)

    def write(into: Path) -> None:
        whole = [
            _means(speech.mels_TM[speech.frames(clip)], frames_per_code)
            for clip in range(len(speech.texts))
        ]
        padded = [
            np.pad(frames, ((0, -len(frames) % coarsest), (0, 0)), mode="edge") for frames in whole
        ]
        for number, level in enumerate(quantised(np.concatenate(padded), scales, words)):
            np.save(into / f"level{number}.npy", level)
        np.save(into / "ends.npy", np.cumsum([len(frames) // coarsest for frames in padded]))

    found = once(speech.cache, "codes", said, write)
    levels = tuple(mapped(found / f"level{number}.npy") for number in range(len(scales)))
    return Codes(levels=levels, ends=mapped(found / "ends.npy"))


def once(cache: Path, kind: str, said: dict[str, Any], write: Callable[[Path], None]) -> Path:
    """The cache folder that `write` fills for the settings `said`, atomically; reused if it exists.

    Ranks that start together may all write. The first to finish is kept, and all of them read that.
    """
    digest = hashlib.sha256(json.dumps(said, sort_keys=True).encode()).hexdigest()[:16]
    folder = cache / f"{kind}-{digest}"
    if not folder.is_dir():
        temporary = cache / f".{folder.name}-{os.getpid()}"
        temporary.mkdir(parents=True)
        write(temporary)
        try:
            temporary.rename(folder)
        except OSError:  # another rank was first
            shutil.rmtree(temporary)
    return folder


def mapped(path: Path) -> np.ndarray:
    """The memory-mapped array of a .npy file."""
    return np.load(path, mmap_mode="r")


def log_mels(sound: np.ndarray) -> np.ndarray:
    """Natural logarithms of mel magnitudes, float32 [T, M]: one frame for every HOP samples."""
    magnitudes_TF = np.abs(np.fft.rfft(_windows(sound) * np.hanning(WINDOW)))
    return np.log(np.maximum(magnitudes_TF @ mel_filters().T, QUIET)).astype(np.float32)


def mel_filters() -> np.ndarray:
    """Triangles over the frequencies, float64 [M, F], equally far apart in 2595 log10(1 + f / 700) (HTK book, 5.6)."""
    highest = 2595 * np.log10(1 + speech.RATE_HZ / 2 / 700)
    corners_hz = 700 * (10 ** (np.linspace(0, highest, MELS + 2) / 2595) - 1)
    at_hz = np.fft.rfftfreq(WINDOW, 1 / speech.RATE_HZ)
    low, middle, high = (corners_hz[i : MELS + i, None] for i in range(3))
    return np.maximum(
        0, np.minimum((at_hz - low) / (middle - low), (high - at_hz) / (high - middle))
    )


def pitches(sound: np.ndarray) -> np.ndarray:
    """Hz of the largest autocorrelation of every frame, float32 [T]; 0 for unvoiced frames."""
    windows = _windows(sound) * np.hanning(WINDOW)
    powers = np.abs(np.fft.rfft(windows, 2 * WINDOW)) ** 2
    shifted = np.fft.irfft(powers)
    first, last = speech.RATE_HZ // HIGHEST_PITCH_HZ, speech.RATE_HZ // LOWEST_PITCH_HZ
    best = first + np.argmax(shifted[:, first:last], axis=1)
    strength = shifted[np.arange(len(best)), best] / np.maximum(shifted[:, 0], 1e-9)
    return np.where(strength > VOICED, speech.RATE_HZ / best, 0).astype(np.float32)


def quantised(frames_TD: np.ndarray, scales: Sequence[int], words: int) -> list[np.ndarray]:
    """Each level's number for every `scale` frames, int16; each level quantises the residual of the last."""
    left_TD = frames_TD - frames_TD.mean(axis=0)
    levels = []
    for scale in scales:
        means_TD = _means(left_TD, scale)
        numbers, centres_VD = _k_means(means_TD, words, np.random.default_rng(len(levels)))
        left_TD = left_TD - np.repeat(centres_VD[numbers], scale, axis=0)
        levels.append(numbers.astype(np.int16))
    return levels


def _k_means(
    points: np.ndarray, count: int, generator: np.random.Generator
) -> tuple[np.ndarray, np.ndarray]:
    """The number of each point's centre, and the centres (Lloyd 1982)."""
    centres = points[generator.choice(len(points), count, replace=len(points) < count)]
    for _ in range(LLOYD_ROUNDS):
        numbers = _nearest(points, centres)
        sums, counts = np.zeros_like(centres), np.bincount(numbers, minlength=count)
        np.add.at(sums, numbers, points)
        centres = np.where(counts[:, None] > 0, sums / np.maximum(counts, 1)[:, None], centres)
    return _nearest(points, centres), centres


def _nearest(points: np.ndarray, centres: np.ndarray) -> np.ndarray:
    return np.argmin((centres**2).sum(axis=1) - 2 * points @ centres.T, axis=1)


def _means(frames_TD: np.ndarray, count: int) -> np.ndarray:
    """The mean of every `count` frames; the last group may be smaller."""
    firsts = np.arange(0, len(frames_TD), count)
    sizes = np.diff([*firsts, len(frames_TD)])
    return np.add.reduceat(frames_TD, firsts, axis=0) / sizes[:, None]


def _windows(sound: np.ndarray) -> np.ndarray:
    """Overlapping windows, centred at every HOP samples."""
    padded = np.pad(sound, (WINDOW // 2, WINDOW // 2), mode="reflect")
    return np.lib.stride_tricks.sliding_window_view(padded, WINDOW)[: len(sound) : HOP]


def starts(ends: np.ndarray) -> list[int]:
    """The start of each range."""
    return [0, *map(int, itertools.islice(ends, len(ends) - 1))]
