"""Audio tokens of several codebooks in parallel, in MusicGen's delay pattern.

Codebook k lags k frames behind the first (arXiv:2306.05284, section 2.3): [K, T] tokens take T + K - 1 steps.

Shape suffixes: B samples, K codebooks, T frames, S steps, V words of a codebook, L characters, D width of a text state.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from transformers import MusicgenDecoderConfig

from jobs.audio.features import Codes, Speech, mapped, once, starts
from orchestrator.training.contract.recipe import IGNORED_LABEL, Batch

PROMPT_WIDTH = 128  # bytes
BYTES = 256


class CodedSpeech:
    """Clips, or pieces of at most `frames` frames, with their texts and descriptions of the speakers.

    A batch is as wide as its longest sample. Texts have a fixed width, so that attention does not depend on the other
    samples of a batch.
    """

    def __init__(
        self, speech: Speech, codes: Codes, *, words: int, frames: int | None, texts: np.ndarray
    ) -> None:
        self._levels, self._words, self._texts = codes.levels, words, texts
        self._pieces = [
            (clip, first, min(int(end), first + frames) if frames else int(end))
            for clip, (start, end) in enumerate(zip(starts(codes.ends), codes.ends, strict=True))
            for first in range(start, int(end), frames or int(end))
        ]
        self._prompts = [
            np.frombuffer(text.encode()[:PROMPT_WIDTH], np.uint8) for text in speech.texts
        ]

    def __len__(self) -> int:
        return len(self._pieces)

    def token_count(self, index: int) -> int:
        """Every number of every codebook."""
        _, first, end = self._pieces[index]
        return len(self._levels) * (end - first)

    def batch(self, indices: Sequence[int]) -> Batch:
        """Numbers [B, K, S], labels of the same shape, texts' states [B, L, D] and texts as bytes [B, L]."""
        pieces = [self._pieces[index] for index in indices]
        width = max(end - first for _, first, end in pieces)
        found = [
            delayed(np.stack([level[first:end] for level in self._levels]), width, self._words)
            for _, first, end in pieces
        ]
        tokens, labels = (torch.from_numpy(np.stack(each)) for each in zip(*found, strict=True))
        states = torch.from_numpy(np.stack([self._texts[clip] for clip, _, _ in pieces]))
        prompts = torch.zeros(len(pieces), PROMPT_WIDTH, dtype=torch.int64)
        for row, (clip, _, _) in enumerate(pieces):
            prompts[row, : len(self._prompts[clip])] = torch.from_numpy(
                self._prompts[clip].astype(np.int64)
            )
        return tokens, labels, states, prompts


def delayed(codes_KT: np.ndarray, width: int, filler: int) -> tuple[np.ndarray, np.ndarray]:
    """Numbers and labels, int64 [K, S]: codebook k begins k steps late. S is what a sample of `width` frames takes.

    `filler` marks positions without a code: MusicGen's padding token, which is also its first.
    """
    codebooks, frames = codes_KT.shape
    steps = np.full((codebooks, width + codebooks), filler, np.int64)
    labels = np.full_like(steps, IGNORED_LABEL)
    for codebook in range(codebooks):
        at = slice(1 + codebook, 1 + codebook + frames)
        steps[codebook, at] = labels[codebook, at] = codes_KT[codebook]
    return steps[:, :-1], labels[:, 1:]


def decoder_config(said: dict[str, Any]) -> MusicgenDecoderConfig:
    """A decoder of `said` sizes; its start and padding token is the number after its words, as in MusicGen."""
    return MusicgenDecoderConfig(
        pad_token_id=said["vocab_size"], bos_token_id=said["vocab_size"], **said
    )


def states_of(config: dict[str, Any], texts: Sequence[str], cache: Path) -> np.ndarray:
    """The states of `texts` [clips, L, D], memory-mapped: from the file `text_states`, else made, `text_width` wide."""
    if "text_states" in config:
        return mapped(Path(config["text_states"]))
    said = {"texts": list(texts), "width": config["text_width"]}
    made = once(
        cache,
        "text",
        said,
        lambda into: np.save(into / "states.npy", text_states(texts, said["width"])),
    )
    return mapped(made / "states.npy")


def text_states(texts: Sequence[str], width: int) -> np.ndarray:
    """A stand-in for a frozen text encoder's states, float32 [texts, L, D]: a fixed random vector for each byte.

    Positions are added as sines (arXiv:1706.03762, section 3.5). A real encoder's states come from a file.
    """
    vectors = np.random.default_rng(0).standard_normal((BYTES, width)).astype(np.float32)
    longest = max(len(text.encode()) for text in texts)
    angles = np.arange(longest)[:, None] / 10_000 ** (np.arange(0, width, 2) / width)
    places = np.concatenate((np.sin(angles), np.cos(angles)), axis=1)[:, :width].astype(np.float32)
    found = np.zeros((len(texts), longest, width), np.float32)
    for row, text in enumerate(texts):
        read = np.frombuffer(text.encode(), np.uint8)
        found[row, : len(read)] = vectors[read] + places[: len(read)]
    return found


def loss_sum(logits_BKSV: Tensor, labels_BKS: Tensor) -> Tensor:
    """Cross entropy summed over all numbers of all codebooks."""
    flat = logits_BKSV.float().flatten(0, 2)
    return functional.cross_entropy(
        flat, labels_BKS.flatten(), ignore_index=IGNORED_LABEL, reduction="sum"
    )
