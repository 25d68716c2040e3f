"""Token samples, and the order in which training consumes them.

A position counts samples over the whole training. With a global batch of B samples, optimizer step n (from 1) consumes
positions (n-1)*B to n*B-1, in every layout. The seed alone determines which sample has a position.
"""

from __future__ import annotations

import hashlib
from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.recipe import IGNORED_LABEL

BYTE_VOCABULARY = 256
# 4 rounds give a strong pseudorandom permutation (Luby and Rackoff 1988, theorem 2)
FEISTEL_ROUNDS = 4


class TokenStreams:
    """Samples from token streams: at most `sequence_length` tokens of one stream; labels are the
    next tokens.

    `trained`, if given, has a byte per token: only tokens with a non-zero byte are labels, and
    samples without labels are left out. Memory-mapped arrays cost page cache instead of tensors.
    """

    def __init__(
        self,
        streams: Sequence[np.ndarray],
        sequence_length: int,
        trained: Sequence[np.ndarray] | None = None,
    ) -> None:
        self.sequence_length = sequence_length
        self._streams = streams
        self._trained = trained
        self._ends = list(
            accumulate(-(-max(0, len(stream) - 1) // sequence_length) for stream in streams)
        )
        self._labels = self._kept = None
        if trained is not None:
            labels = np.concatenate(
                [
                    np.empty(0, np.int64),
                    *(_count_nonzero_rows(mask[1:], sequence_length) for mask in trained),
                ]
            )
            self._kept = np.flatnonzero(labels)
            self._labels = labels[self._kept]

    def __len__(self) -> int:
        if self._kept is None:
            if self._ends:
                return self._ends[-1]
            return 0
        return len(self._kept)

    def token_count(self, index: int) -> int:
        """Return the number of labelled tokens in a sample."""
        if self._labels is not None:
            return int(self._labels[index])
        stream, start = self._locate(index)
        return min(self.sequence_length, len(self._streams[stream]) - 1 - start)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Return (tokens, labels), int64 [len(indices), sequence_length], padded by token 0 and label -100."""
        tokens = torch.zeros(len(indices), self.sequence_length, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, index in enumerate(indices):
            stream, start = self._locate(index)
            part = slice(start, start + self.sequence_length + 1)
            piece = torch.from_numpy(self._streams[stream][part].astype(np.int64))
            tokens[row, : len(piece) - 1] = piece[:-1]
            labels[row, : len(piece) - 1] = piece[1:]
            if self._trained is not None:
                untrained = torch.from_numpy(self._trained[stream][part][1:] == 0)
                labels[row, : len(untrained)].masked_fill_(untrained, IGNORED_LABEL)
        return tokens, labels

    def _locate(self, index: int) -> tuple[int, int]:
        """Return (index of the sample's stream, its first token there)."""
        assert 0 <= index < len(self), index
        sample = index if self._kept is None else int(self._kept[index])
        stream = bisect_right(self._ends, sample)
        before = self._ends[stream - 1] if stream else 0
        return stream, (sample - before) * self.sequence_length


class TextDataset(TokenStreams):
    """Samples from files as byte tokens, one stream per file."""

    def __init__(self, files: Sequence[str], sequence_length: int) -> None:
        super().__init__([_map_file(Path(name)) for name in files], sequence_length)
        if not len(self):
            raise SpecError(
                "the text holds no sample: a sample needs two bytes",
                path="data.text",
                got=list(files),
            )


def _count_nonzero_rows(values: np.ndarray, width: int) -> np.ndarray:
    """Return the number of non-zero values in every row of `width` values; the last row may be
    shorter.
    """
    if not len(values):
        return np.empty(0, np.int64)
    return np.add.reduceat(values != 0, np.arange(0, len(values), width), dtype=np.int64)


def _map_file(path: Path) -> np.ndarray:
    if not path.is_file():
        raise SpecError("no such text file", path="data.text", got=str(path))
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def compute_sample_index(position: int, sample_count: int, seed: int) -> int:
    """Return the index of the sample at a position of the training; each epoch is its own
    permutation of the `sample_count` samples.
    """
    epoch, value = divmod(position, sample_count)
    half_bits = max(1, ((sample_count - 1).bit_length() + 1) // 2)
    value = _permute(value, half_bits, f"{seed}:{epoch}")
    while (
        value >= sample_count
    ):  # cycle walking (Black and Rogaway 2002, section 3); the domain is below 4 * size + 4
        value = _permute(value, half_bits, f"{seed}:{epoch}")
    return value


def _permute(value: int, half_bits: int, permutation_key: str) -> int:
    """Return the number to which a permutation of the numbers below 4 ** half_bits maps `value`.

    `permutation_key` selects the permutation.
    """
    mask = (1 << half_bits) - 1
    left = value >> half_bits
    right = value & mask
    for turn in range(FEISTEL_ROUNDS):
        digest = hashlib.blake2b(
            f"{permutation_key}:{turn}:{right}".encode(), digest_size=8
        ).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half_bits | right


def list_global_batch(first_position: int, count: int, sample_count: int, seed: int) -> list[int]:
    """Return the sample indices at `count` positions from `first_position` on."""
    return [
        compute_sample_index(first_position + offset, sample_count, seed) for offset in range(count)
    ]


def split_micro_batches(
    samples: Sequence[int],
    rank: int,
    micro_batch_size: int,
    accumulation: int,
    *,
    normalised_ranks: int = 1,
) -> list[Sequence[int]]:
    """Return the micro-batches of data-parallel rank `rank`: its consecutive slice of a global
    batch, split.

    If `normalised_ranks` ranks normalise over their simultaneous micro-batches, these micro-batches
    take consecutive samples instead.
    """
    firsts = (
        (
            (rank // normalised_ranks * accumulation + turn) * normalised_ranks
            + rank % normalised_ranks
        )
        * micro_batch_size
        for turn in range(accumulation)
    )
    return [samples[first : first + micro_batch_size] for first in firsts]
