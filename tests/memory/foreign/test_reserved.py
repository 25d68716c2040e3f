"""What the caching allocator holds beside what is live: the ratios of memory/foreign/reserved.py, replayed."""

from __future__ import annotations

import random
import statistics
from collections.abc import Callable

import pytest

from orchestrator.memory.foreign.convolutional import walked
from orchestrator.memory.foreign.convolutional_nets import NETS
from orchestrator.memory.foreign.reserved import (
    POOL_RATIO,
    POOL_RATIO_CONVOLUTIONAL,
    POOL_RATIO_FUSED,
    POOL_RATIO_FUSED_VARYING,
    POOL_RATIO_LABELS,
    POOL_RATIO_LABELS_VARYING,
    POOL_RATIO_VARYING,
)
from orchestrator.training.allocator import Block, CachingAllocator
from tests.memory.foreign.torch_nets import step_events

HIDDEN, FFN, LAYERS = 4096, 11008, 16
LENGTHS = (7.84, 0.69)  # log-normal: mean 3,234 and deviation 2,548 tokens, as ms-swift states of its dataset


class Allocator(CachingAllocator):
    """One that counts what is live."""

    def __init__(self) -> None:
        super().__init__()
        self.live_bytes = self.peak_bytes = 0

    def take(self, size: int) -> Block:
        block = super().take(size)
        self.live_bytes += block.size
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)
        return block

    def give(self, block: Block) -> None:
        self.live_bytes -= block.size
        super().give(block)


Head = Callable[["Allocator", int, int], None]


def plain(allocator: Allocator, tokens: int, vocabulary: int) -> None:
    """Logits, their copies and their gradients, where logits are shifted."""
    take, give = allocator.take, allocator.give
    whole, shifted = tokens * vocabulary, (tokens - 1) * vocabulary
    logits, copy, upcast, log_softmax = take(2 * whole), take(2 * shifted), take(4 * shifted), take(4 * shifted)
    give(upcast)
    give(copy)
    outputs = take(4 * whole)  # accelerate's fp32 copy
    give(logits)
    give(outputs)
    of_loss, of_logits = take(4 * shifted), take(4 * shifted)
    give(of_loss)
    give(log_softmax)
    low = take(2 * shifted)
    give(of_logits)
    padded = take(2 * whole)
    give(low)
    give(padded)


def labels(allocator: Allocator, tokens: int, vocabulary: int) -> None:
    """Logits, their copies and their gradients, where labels are shifted."""
    take, give = allocator.take, allocator.give
    whole = tokens * vocabulary
    logits, upcast, log_softmax = take(2 * whole), take(4 * whole), take(4 * whole)
    give(upcast)
    of_logits = take(4 * whole)
    give(log_softmax)
    low = take(2 * whole)
    give(of_logits)
    give(low)
    give(logits)


def fused(allocator: Allocator, tokens: int, vocabulary: int) -> None:
    """Logits of a chunk at a time."""
    take, give = allocator.take, allocator.give
    gradient, chunk = take(2 * tokens * HIDDEN), max(1, tokens * HIDDEN // vocabulary) * vocabulary
    for _ in range(vocabulary // HIDDEN):
        low, high = take(2 * chunk), take(4 * chunk)
        give(low)
        give(high)
    give(gradient)


def step(allocator: Allocator, tokens: int, vocabulary: int, head: Head) -> None:
    """One checkpointed training step under autocast, one sample."""
    take, give = allocator.take, allocator.give

    def layer(*, backward: bool) -> None:
        widths = [2, 4, 4, 2, 2, 2, 2, 2, 2, 2, 4, 4]
        blocks = [take(tokens * HIDDEN * width) for width in widths] + [take(2 * tokens * FFN) for _ in range(4)]
        waiting: list[Block] = []
        for block in reversed(blocks):
            if backward:
                waiting.append(take(block.size))
            give(block)
            if len(waiting) > 2:
                give(waiting.pop(0))
        for block in waiting:
            give(block)

    kept = []
    for _ in range(LAYERS):
        kept.append(take(2 * tokens * HIDDEN))
        layer(backward=False)
    head(allocator, tokens, vocabulary)
    for block in kept:
        layer(backward=True)
        give(block)


def ratio(vocabulary: int, limit: int, seed: int | None, head: Head = plain) -> float:
    """Reserved after 60 steps over the live peak of one sample at the limit; without a seed all are as long as that."""
    allocator, longest, lengths = Allocator(), Allocator(), random.Random(seed)
    step(longest, limit, vocabulary, head)
    for _ in range(60):
        tokens = limit if seed is None else limit + 1
        while not 91 <= tokens <= limit:
            tokens = round(lengths.lognormvariate(*LENGTHS))
        step(allocator, tokens, vocabulary, head)
    return allocator.reserved_bytes / longest.peak_bytes


def test_samples_of_one_length_hold_half_as_much_again() -> None:
    assert ratio(151_936, 2_048, None) == pytest.approx(POOL_RATIO, abs=0.05)


@pytest.mark.parametrize(
    ("head", "limit", "even", "spread"),
    [
        (labels, 2_048, POOL_RATIO_LABELS, POOL_RATIO_LABELS_VARYING),
        (fused, 8_192, POOL_RATIO_FUSED, POOL_RATIO_FUSED_VARYING),
    ],
)
def test_with_fewer_sizes_of_logits_the_pool_wastes_less(head: Head, limit: int, even: float, spread: float) -> None:
    assert ratio(151_936, 2_048, None, head) == pytest.approx(even, abs=0.05)
    found = statistics.median(ratio(151_936, limit, seed, head) for seed in range(3))
    assert found == pytest.approx(spread, abs=0.2)


def classifier_ratio(net: str, batch: int) -> float:
    """Reserved after three steps of Adam over what was live, in the peak's activations."""
    events, held = step_events(NETS[net], batch, 224)
    allocator = Allocator()
    weights = [size for number, size in events if number in held]
    for size in weights:
        allocator.take(size)
    for turn in range(3):
        live: dict[int, Block] = {}
        for number, size in events:
            if size and number not in held:
                live[number] = allocator.take(size)
            elif number in live:
                allocator.give(live.pop(number))
        if turn == 0:
            for size in (*weights, *weights):
                allocator.take(size)
        for block in [*map(allocator.take, weights), *live.values()]:  # of the step; gradients
            allocator.give(block)
    peak = walked(NETS[net], batch, (224, 224), low=False, transposes=False).peak
    return 1 + (allocator.reserved_bytes - allocator.peak_bytes) / (peak.kept + peak.working)


def test_steps_of_convolutional_nets_leave_less_between() -> None:
    found = [classifier_ratio(net, 32) for net in ("mobilenet_v2", "resnet50")]
    assert statistics.mean(found) == pytest.approx(POOL_RATIO_CONVOLUTIONAL, abs=0.05)


@pytest.mark.long
def test_samples_of_many_lengths_hold_about_three_times_as_much() -> None:
    found = [
        ratio(vocabulary, limit, seed)
        for vocabulary in (32_000, 64_000, 151_936)
        for limit in (512, 2_048, 8_192)
        for seed in range(4)
    ]
    assert statistics.median(found) == pytest.approx(POOL_RATIO_VARYING, abs=0.3)
    assert min(found) > 1.3 * POOL_RATIO
