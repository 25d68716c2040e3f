"""What every encoder-decoder has beside its layers, where one table serves both embeddings and the head."""

from __future__ import annotations

from orchestrator.specs.profile import BackwardPeak, Segment


def embedding(
    name: str,
    tensors: tuple[int, ...],
    factored: int,
    *,
    table: int,
    looked_up: int,
    saved_bytes: int,
    kept_bytes: int | None = None,
) -> Segment:
    """What runs before the encoder, or between it and the decoder. The gradients of the table's uses meet there.

    `saved_bytes`: per sample; `kept_bytes`: the same where layers are recomputed, if it is another.
    """
    waiting = 0 if table in tensors else table
    kept = saved_bytes if kept_bytes is None else kept_bytes
    return Segment(
        name=name,
        count=1,
        parameters=sum(tensors),
        saved_bytes=saved_bytes,
        checkpointed_bytes=kept,
        selective_bytes=kept,
        transient_bytes=0,
        forward_flops=0.0,
        largest_parameter=max(tensors),
        summed_gradients=3 * table - waiting,  # of head and embeddings, and their sum
        waiting_gradients=waiting,
        looked_up=looked_up,
        factored=factored,
        tensors=tensors,
        peaks=(BackwardPeak(0, 0, 0),),
    )


def head(
    norms: tuple[int, ...],
    *,
    logits: tuple[int, int, int],
    saved_bytes: int,
    forward_bytes: int,
    weight_made_bytes: int,
    casts: bool,
) -> Segment:
    """Head and loss, whose logits are whole: kept once in fp32, and their gradients 8 bytes each for a moment.

    `logits`: rows per sample, hidden size, vocabulary. Per sample and above what is saved: `forward_bytes` of the
    forward pass, `weight_made_bytes` when the table has its first gradient, which waits for that of its other uses.
    """
    rows, hidden, vocabulary = logits
    table = hidden * vocabulary
    return Segment(
        name="head",
        count=1,
        parameters=sum(norms),
        saved_bytes=saved_bytes,
        checkpointed_bytes=saved_bytes,
        selective_bytes=saved_bytes,
        transient_bytes=2 * forward_bytes,  # of which half is there in the forward pass
        forward_flops=2.0 * rows * table,
        cast_bytes=2 * table if casts else 0,
        largest_parameter=table,
        factored=sum(norms),
        tensors=norms,
        matmuls=(logits,),
        peaks=(BackwardPeak(0, 0, 8 * rows * vocabulary), BackwardPeak(table, table, weight_made_bytes)),
    )
