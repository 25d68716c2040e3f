"""What the allocator holds beyond what is live."""

from __future__ import annotations

from bisect import bisect_left, insort

from orchestrator.memory.foreign.activations import is_t5
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import held_bytes, logit_blocks
from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.training import Training
from orchestrator.specs.plan import ActivationCheckpointing

# Reserved over allocated bytes of what comes and goes in a step, by replaying 60 steps of a checkpointed decoder with
# the plain loss on a model of the caching allocator (best fit, splits, no merging of segments), 2026-11: logits and
# their copies differ in size by a row or by their type, so they cannot share blocks. Samples of one length and a
# vocabulary of 151,936 gave 1.45; lengths spread below the limit 2.05 to 6.2 (vocabularies of 32,000 to 151,936, limits
# of 512 to 8,192, four orders each), of which this is the median. tests/memory/foreign/test_reserved.py does it again.
POOL_RATIO = 1.45
POOL_RATIO_VARYING = 2.9
POOL_RATIO_LABELS = 1.17  # where no copy of the logits is a row shorter, and a gradient takes the place of one
POOL_RATIO_LABELS_VARYING = 2.03
POOL_RATIO_APART = 1.29  # and every gradient has a place of its own
POOL_RATIO_APART_VARYING = 2.43
POOL_RATIO_HELD = 1.13  # and the logits stay to the end of the backward pass
POOL_RATIO_HELD_VARYING = 2.15
POOL_RATIO_FUSED = 1.15  # without logits, but for those of a chunk; and the lengths spread, median of three orders
POOL_RATIO_FUSED_VARYING = 1.45
# Of convolutional nets, the median of forty replays: ten of the nets at 32 and 128 images, in fp32 and under autocast,
# with what convolutions work in. They gave 1.05 to 1.20, ResNet-18 1.35 and those of VGG 1.40 to 1.68.
POOL_RATIO_CONVOLUTIONAL = 1.13
# Where layers keep what they made, nothing comes and goes between them: 1.0 to 1.16 whatever the loss, and 1.3 to 1.6
# (tests/memory/foreign/test_reserved_kept.py).
POOL_RATIO_KEPT = 1.05
POOL_RATIO_KEPT_VARYING = 1.5
POOL_RATIO_EXPANDABLE = 1.05  # segments grow and are cut page by page


def reserved_of(
    training: Training, allocated_bytes: int, activation_bytes: int, kept_bytes: int, pooled_bytes: int
) -> int:
    """What the allocator holds while nothing presses: states lie where they were put, activations move.

    `kept_bytes` are those of the activations that wait for their backward pass.
    """
    even, varying = POOL_RATIO, POOL_RATIO_VARYING
    if training.checkpointing is ActivationCheckpointing.NONE:
        even, varying = POOL_RATIO_KEPT, POOL_RATIO_KEPT_VARYING
    elif training.loss is Loss.FUSED:
        even, varying = POOL_RATIO_FUSED, POOL_RATIO_FUSED_VARYING
    elif training.framework is Framework.MEGATRON and not training.platform.is_old:  # as `head_bytes` says
        even, varying = POOL_RATIO_LABELS, POOL_RATIO_LABELS_VARYING
    elif training.loss in (Loss.LABELS, Loss.LOW):
        even, varying = POOL_RATIO_APART, POOL_RATIO_APART_VARYING
        if training.holds_outputs:
            even, varying = POOL_RATIO_HELD, POOL_RATIO_HELD_VARYING
    ratio = varying if training.lengths_vary else even
    if not training.shape.repeats:
        ratio = POOL_RATIO_CONVOLUTIONAL
    if training.platform.expandable_segments:
        ratio = POOL_RATIO_EXPANDABLE
    wasted = round((ratio - 1) * activation_bytes)
    if training.pp > 1 and training.framework.is_megatron and not training.lengths_vary:
        # blocks of one size that wait for their turn serve each other (tests/memory/foreign/test_megatron.py)
        wasted = min(wasted, round((POOL_RATIO_KEPT - 1) * kept_bytes + (ratio - 1) * (activation_bytes - kept_bytes)))
    if activation_bytes and not training.platform.expandable_segments:
        wasted = max(wasted, unshared_bytes(training))
    return allocated_bytes + wasted + pooled_bytes


def unshared_bytes(training: Training) -> int:
    """Bytes of the segments of scores and of logits that are free while the most of both is in use.

    A free segment serves blocks that are not larger: logits take what the scores of the forward pass have left, and the
    scores of the backward pass what logits have left. Where layers keep what they made, smaller blocks have cut up the
    former by then. tests/memory/foreign/test_scores.py replays traces of whole steps.
    """
    shape, width = training.shape, training.width
    if training.kernels.flash or training.framework.is_megatron or not shape.repeats or is_t5(training):
        return 0
    scores = training.tokens * shape.heads * training.sequence_length // training.tp
    wide = 4 if training.autocasts or (shape.gated and training.low_precision) else width  # inside of the softmax
    recomputes = training.checkpointing is not ActivationCheckpointing.NONE
    result = [wide * scores] if recomputes else []  # else it is kept
    cast = [wide * scores] if wide > width else []
    # of the product and its scaled or masked copy; of that, its cast and what the softmax returns
    forth = [[width * scores] * 2, [width * scores, *cast, *result]]
    back = [wide * scores] * 3 + result  # of the result's gradient, their product, and what the softmax hands on
    held, logits = held_bytes(training), logit_blocks(training)
    segments = _Segments()
    for blocks in forth:
        segments.serve(blocks)
    segments.keep(held)
    left = len(segments.free)
    segments.serve(logits)
    if not recomputes:
        segments.free = segments.free[left:]
    segments.serve(back)
    return segments.bytes - max(*map(sum, forth), held + max(sum(logits), sum(back)))


class _Segments:
    """Those that a device gave for blocks that came and went."""

    def __init__(self) -> None:
        self.bytes = 0
        self.free: list[int] = []  # the oldest first

    def serve(self, blocks: list[int]) -> None:
        """All of them at once, the largest first; what is new for one serves others later."""
        room, new = sorted(self.free), []
        for block in sorted(blocks, reverse=True):
            if (at := bisect_left(room, block)) < len(room):
                insort(room, room.pop(at) - block)
            else:
                new.append(block)
        self.bytes += sum(new)
        self.free += new

    def keep(self, block: int) -> None:
        """One that stays."""
        fitting = [piece for piece in self.free if piece >= block]
        if fitting:
            self.free[self.free.index(min(fitting))] -= block
        else:
            self.bytes += block
