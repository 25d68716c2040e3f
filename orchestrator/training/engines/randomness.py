"""Random numbers that depend on the position in the training, not on the rank that computes them.

Before every micro-batch, and before each of its layers, the generators are seeded by (seed, step, micro-batch of the
global batch, layer). Dropout masks and a diffusion model's noise therefore survive a restart, another engine or number
of data-parallel ranks, recomputation and pipeline stages. Nothing has to be saved.

They differ if the micro-batch size differs, or if a tensor-parallel rank draws for its part of a layer or its tokens.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from orchestrator.training.contract.recipe import Recipe

# 2**64 over the golden ratio: Fibonacci hashing (Knuth, TAOCP 3, section 6.4)
_ODD = 0x9E3779B97F4A7C15
_MASK = 2**63 - 1
_UPDATE = 1  # where the seeds of updates start; those of micro-batches start at 0


class Randomness:
    """Seeds the generators before each micro-batch and layer of a recipe's module."""

    def __init__(self, recipe: Recipe, seed: int, token_part: int = 0) -> None:
        """Prepare the seeds and hooks. `token_part` is the index of the part of a sample's tokens
        that this rank's layers have.

        Different parts draw different random numbers.
        """
        self._seed = seed
        self._micro_batch = 0
        self._part = token_part
        # Not torch.manual_seed: it checks every kind of accelerator, 0.1 ms a call.
        self._generators = [torch.default_generator]
        if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
            self._generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
        for index, layer in enumerate(recipe.layers, start=1):
            layer.register_forward_pre_hook(self._seed_layer(index))

    def begin(self, steps_done: int, micro_batch_index: int) -> None:
        """Seed the generators for a micro-batch of the step that follows `steps_done` steps.

        `micro_batch_index` is its index in the global batch.
        """
        self._micro_batch = _mix_numbers(
            _mix_numbers(_mix_numbers(0, self._seed), steps_done), micro_batch_index
        )
        self._restart(self._micro_batch)

    def begin_update(self, steps_done: int, parameter_name: str) -> None:
        """Seed the generators for the update of a parameter, equally on every rank that has it."""
        of_name = int.from_bytes(
            hashlib.blake2b(parameter_name.encode(), digest_size=7).digest(), "big"
        )
        self._restart(
            _mix_numbers(_mix_numbers(_mix_numbers(_UPDATE, self._seed), steps_done), of_name)
        )

    def _seed_layer(self, layer: int) -> Callable[[nn.Module, Any], None]:
        def restart(_module: nn.Module, _inputs: Any) -> None:
            seed = _mix_numbers(self._micro_batch, layer)
            self._restart(_mix_numbers(seed, self._part) if self._part else seed)

        return restart

    def _restart(self, seed: int) -> None:
        for generator in self._generators:
            generator.manual_seed(seed)


def _mix_numbers(state: int, value: int) -> int:
    """Return a number mixed from both, by one round of splitmix64's finaliser."""
    mixed = (state * 31 + value + 1) * _ODD & (2**64 - 1)
    mixed = (mixed ^ mixed >> 30) * 0xBF58476D1CE4E5B9 & (2**64 - 1)
    return (mixed ^ mixed >> 27) & _MASK
