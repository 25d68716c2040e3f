"""What the allocator holds beside what is live where layers keep what they made, and where logits stay: replays.

On the model of the allocator that test_reserved.py replays checkpointed decoders on.
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from orchestrator.memory.foreign.reserved import POOL_RATIO_APART, POOL_RATIO_HELD, POOL_RATIO_KEPT
from tests.memory.foreign.test_reserved import FFN, HIDDEN, LAYERS, Allocator, Head, fused, plain
from tests.memory.foreign.test_reserved import step as checkpointed

WIDTHS = [2, 4, 4, 2, 2, 2, 2, 2, 2, 2, 4, 4]  # of what a layer keeps under autocast, bytes of an element


def apart(allocator: Allocator, tokens: int, vocabulary: int, *, stay: bool = False) -> None:
    """Logits, their copies and their gradients, where labels are shifted; the loop lets go of the logits or not."""
    take, give = allocator.take, allocator.give
    whole = tokens * vocabulary
    logits, upcast = take(2 * whole), take(4 * whole)
    if not stay:
        give(logits)
    log_softmax = take(4 * whole)
    give(upcast)
    of_loss, of_logits = take(4 * whole), take(4 * whole)
    give(of_loss)
    give(log_softmax)
    low = take(2 * whole)
    give(of_logits)
    give(low)
    if stay:
        give(logits)


def held(allocator: Allocator, tokens: int, vocabulary: int) -> None:
    apart(allocator, tokens, vocabulary, stay=True)


def keeping(allocator: Allocator, tokens: int, vocabulary: int, head: Head) -> None:
    """A training step whose layers keep what they made."""
    sizes = [tokens * HIDDEN * width for width in WIDTHS] + 4 * [2 * tokens * FFN]
    kept = [[allocator.take(size) for size in sizes] for _ in range(LAYERS)]
    head(allocator, tokens, vocabulary)
    for blocks in reversed(kept):
        waiting = []
        for size, block in zip(reversed(sizes), reversed(blocks), strict=True):
            waiting.append(allocator.take(size))
            allocator.give(block)
            if len(waiting) > 2:
                allocator.give(waiting.pop(0))
        for block in waiting:
            allocator.give(block)


Step = Callable[[Allocator, int, int, Head], None]


def ratio(vocabulary: int, tokens: int, head: Head, step: Step) -> float:
    """Reserved after 20 steps over the live peak of one."""
    allocator, one = Allocator(), Allocator()
    step(one, tokens, vocabulary, head)
    for _ in range(20):
        step(allocator, tokens, vocabulary, head)
    return allocator.reserved_bytes / one.peak_bytes


@pytest.mark.parametrize(("head", "even"), [(apart, POOL_RATIO_APART), (held, POOL_RATIO_HELD)])
def test_logits_that_stay_serve_as_nobody_elses_block(head: Head, even: float) -> None:
    assert ratio(151_936, 2_048, head, checkpointed) == pytest.approx(even, abs=0.05)


@pytest.mark.parametrize(("head", "vocabulary"), [(plain, 151_936), (plain, 32_000), (held, 32_000), (fused, 32_000)])
def test_where_layers_keep_what_they_made_next_to_nothing_is_wasted(head: Head, vocabulary: int) -> None:
    assert ratio(vocabulary, 4_096, head, keeping) == pytest.approx(POOL_RATIO_KEPT, abs=0.07)
