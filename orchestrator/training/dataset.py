"""Text files as samples, and the order in which training sees them.

A position counts samples over the whole training: optimizer step n (from 1) takes positions (n-1)*B to n*B-1 of a
global batch of B samples, whatever the layout. Which sample stands at a position follows from the seed alone.
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
from orchestrator.training.recipe import IGNORED_LABEL

BYTE_VOCABULARY = 256
FEISTEL_ROUNDS = 4  # a strong pseudorandom permutation from 4 on (Luby and Rackoff 1988, theorem 2)


class TextDataset:
    """Files as bytes; sample i holds at most `sequence_length` tokens of one file, each with its successor as label.

    The bytes are memory-mapped: they cost page cache, not tensors.
    """

    def __init__(self, files: Sequence[str], sequence_length: int) -> None:
        self.sequence_length = sequence_length
        self._files = [_mapped(Path(name)) for name in files]
        samples = (-(-max(0, len(file) - 1) // sequence_length) for file in self._files)
        self._ends = list(accumulate(samples))
        if not self._ends or self._ends[-1] == 0:
            raise SpecError("the text holds no sample: a sample needs two bytes", path="data.text", got=list(files))

    def __len__(self) -> int:
        return self._ends[-1]

    def token_count(self, index: int) -> int:
        """Tokens of a sample that have a label."""
        file, start = self._place(index)
        return min(self.sequence_length, len(file) - 1 - start)

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        """Tokens and labels, int64 [len(indices), sequence_length], padded by token 0 and label -100."""
        tokens = torch.zeros(len(indices), self.sequence_length, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, index in enumerate(indices):
            file, start = self._place(index)
            piece = torch.from_numpy(file[start : start + self.sequence_length + 1].astype(np.int64))
            tokens[row, : len(piece) - 1] = piece[:-1]
            labels[row, : len(piece) - 1] = piece[1:]
        return tokens, labels

    def _place(self, index: int) -> tuple[np.ndarray, int]:
        """The file of a sample and the sample's first byte in it."""
        assert 0 <= index < len(self), index
        file = bisect_right(self._ends, index)
        before = self._ends[file - 1] if file else 0
        return self._files[file], (index - before) * self.sequence_length


def _mapped(path: Path) -> np.ndarray:
    if not path.is_file():
        raise SpecError("no such text file", path="data.text", got=str(path))
    if path.stat().st_size == 0:  # mmap refuses an empty file
        return np.empty(0, dtype=np.uint8)
    return np.memmap(path, dtype=np.uint8, mode="r")


def sample_at(position: int, size: int, seed: int) -> int:
    """The sample at a position: every epoch of `size` positions is another permutation of all samples."""
    epoch, value = divmod(position, size)
    half_bits = max(1, ((size - 1).bit_length() + 1) // 2)
    value = _feistel(value, half_bits, f"{seed}:{epoch}")
    while value >= size:  # cycle walking (Black and Rogaway 2002, section 3); the domain is below 4 * size + 4
        value = _feistel(value, half_bits, f"{seed}:{epoch}")
    return value


def _feistel(value: int, half_bits: int, key: str) -> int:
    """A permutation of the numbers below 4 ** half_bits."""
    mask = (1 << half_bits) - 1
    left, right = value >> half_bits, value & mask
    for turn in range(FEISTEL_ROUNDS):
        digest = hashlib.blake2b(f"{key}:{turn}:{right}".encode(), digest_size=8).digest()
        left, right = right, left ^ (int.from_bytes(digest, "big") & mask)
    return left << half_bits | right


def global_batch(first_position: int, count: int, size: int, seed: int) -> list[int]:
    """The samples at `count` positions from `first_position` on."""
    return [sample_at(first_position + offset, size, seed) for offset in range(count)]


def micro_batches(samples: Sequence[int], rank: int, micro_batch_size: int, accumulation: int) -> list[Sequence[int]]:
    """Data-parallel rank `rank`'s consecutive slice of a global batch, cut into micro-batches."""
    first = rank * accumulation * micro_batch_size
    return [
        samples[first + turn * micro_batch_size : first + (turn + 1) * micro_batch_size] for turn in range(accumulation)
    ]
