"""A user's own model for the in-house engine: a decoder that learns the statements of the standard library."""

from __future__ import annotations

import ast
from collections.abc import Sequence
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from orchestrator.specs.job.model import DecoderSpec
from orchestrator.training.contract.recipe import IGNORED_LABEL, Recipe
from orchestrator.training.models.decoder import make_decoder_recipe

CORPUS = Path(__file__).parent / "corpus"  # written by corpus.py
SHORT = 200  # tokens
SAMPLES = 2000
LONG_SAMPLE = 1416  # the sample that seed 4 puts into step 8 of 16 samples each


class Statements:
    """Data set of the standard library's statements; a sample is one statement's source, and a
    batch is as wide as its longest.

    One sample has the maximum length; all others are short. Memory suffices until the long one
    comes.
    """

    def __init__(self, longest: int) -> None:
        every = [
            source[: longest + 1]
            for path in sorted(CORPUS.glob("*.txt"))
            for source in _statements(path.read_bytes())
        ]
        self._samples = [source for source in every if len(source) <= SHORT][:SAMPLES]
        self._samples[LONG_SAMPLE] = max(every, key=len)

    def __len__(self) -> int:
        return len(self._samples)

    def token_count(self, index: int) -> int:
        return len(self._samples[index]) - 1

    def batch(self, indices: Sequence[int]) -> tuple[Tensor, Tensor]:
        width = max(self.token_count(index) for index in indices)
        tokens = torch.zeros(len(indices), width, dtype=torch.int64)
        labels = torch.full_like(tokens, IGNORED_LABEL)
        for row, index in enumerate(indices):
            text = torch.tensor(list(self._samples[index]))
            tokens[row, : len(text) - 1] = text[:-1]
            labels[row, : len(text) - 1] = text[1:]
        return tokens, labels


def statements_of_the_standard_library(config: dict[str, Any]) -> Recipe:
    """Return the model, loss and data for `config`."""
    decoder = DecoderSpec(
        vocab_size=256,
        hidden_size=config["hidden_size"],
        intermediate_size=3 * config["hidden_size"],
        num_hidden_layers=config["num_hidden_layers"],
        num_attention_heads=4,
    )
    return make_decoder_recipe(decoder, Statements(config["longest"]), seed=0)


def _statements(source: bytes) -> list[bytes]:
    """`ast.get_source_segment` of each statement; that function itself splits the whole source anew on every call."""
    starts = [0, *accumulate(map(len, source.splitlines(keepends=True)))]
    return [
        source[
            starts[node.lineno - 1] + node.col_offset : starts[node.end_lineno - 1]
            + node.end_col_offset
        ]
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Assign | ast.Raise | ast.Return)
    ]
