"""An encoder-decoder of the T5 family as transformers has one, in closed form.

Its attention adds a learned bias of positions. A CPU makes all scores at once; the kernel of CUDA takes a bias as large
as the scores. A layer's saved bytes therefore grow with the square of the sequence. Encoder and decoder see
`sequence_length` tokens each (data/tokenised.py), and all logits exist at once. Every coefficient is a slope of live
bytes over one of the sizes, operation by operation. They meet traced steps of 14 models to the byte (transformers 5.23,
torch 2.13.0, 2026-11); with CUDA's kernels, the saved and the backward bytes of 9 models.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.memory.models.encoder_decoder import embedding, head
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.profile import BackwardPeak, ModelProfile, Segment, Source
from orchestrator.specs.replace import replace

# What T5Config of transformers 5.23 says where config.json says nothing.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 32128,
    "d_model": 512,
    "d_kv": 64,
    "d_ff": 2048,
    "num_layers": 6,
    "num_heads": 8,
    "relative_attention_num_buckets": 32,
    "dropout_rate": 0.1,
    "feed_forward_proj": "relu",
}
# Other names that its configuration takes, where encoder and decoder get different numbers of layers.
OTHER_NAMES = {"hidden_size", "num_attention_heads", "num_hidden_layers", "head_dim"}
GATED = {"relu": False, "gated-gelu": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Shape:
    """Sizes of an encoder-decoder of the T5 family; one table serves both and the head."""

    vocab_size: int
    hidden: int
    query: int  # heads times their width
    heads: int
    feed_forward: int
    gated: bool
    encoder_layers: int
    decoder_layers: int
    buckets: int  # of relative positions, each with a bias for every head

    @property
    def table(self) -> int:
        return self.vocab_size * self.hidden

    @property
    def feed_forward_matrices(self) -> tuple[int, ...]:
        return (self.hidden * self.feed_forward,) * (3 if self.gated else 2)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Bytes:
    """Of one token: what the parts of a layer save, and what is live of it at its worst moments."""

    stream: int  # of a hidden state that layers hand on
    attention: int
    bias: int  # of what a kernel adds to the scores of each sample
    feed_forward: int
    activated: int  # of what a feed-forward part saves, between its products
    selective_attention: int
    selective_feed_forward: int
    attended: int  # live when the gradients of the scores are made
    recomputed: int  # live when the scores are computed again
    passed: int  # live when all but the first norm of the layer has gone backward
    spared: int = 0  # of a mask of what a part returns, which CUDA keeps in bytes
    spared_inside: int = 0  # of that within a feed-forward part
    held: int = 0  # by its last product and what it was cast from, where no scores make a worse moment


def t5_shape(model: ModelSpec, config: Mapping[str, Any]) -> T5Shape | None:
    """What the closed form has to know of a configuration; None where it does not hold: without dropout, whose masks
    it counts and under which cross attention takes another kernel, with another activation, or with adapters."""
    if config.get("model_type") != "t5" or model.lora is not None or OTHER_NAMES & config.keys():
        return None
    if config.get("tie_word_embeddings") is False:  # a head of its own: T5 v1.1, flan-T5
        return None
    said = {**DEFAULTS, **config}
    said["num_decoder_layers"] = said.get("num_decoder_layers") or said["num_layers"]
    sizes = [name for name in (*DEFAULTS, "num_decoder_layers") if name not in ("dropout_rate", "feed_forward_proj")]
    if any(not isinstance(said[name], int) for name in sizes) or not said["dropout_rate"]:
        return None
    if said["feed_forward_proj"] not in GATED:
        return None
    return T5Shape(
        vocab_size=said["vocab_size"],
        hidden=said["d_model"],
        query=said["num_heads"] * said["d_kv"],
        heads=said["num_heads"],
        feed_forward=said["d_ff"],
        gated=GATED[said["feed_forward_proj"]],
        encoder_layers=said["num_layers"],
        decoder_layers=said["num_decoder_layers"],
        buckets=said["relative_attention_num_buckets"],
    )


def t5_profile(
    shape: T5Shape,
    family: str,
    precision: Precision,
    sequence_length: int,
    *,
    autocast: bool,
    cuda: bool,
) -> ModelProfile:
    """The closed form, per sample of `sequence_length` tokens in and as many out, on a CPU or as CUDA has it."""
    low = precision is not Precision.FP32
    bytes_of = _bytes_of(shape, sequence_length, precision, autocast=autocast)
    if cuda:
        bytes_of = _on_cuda(bytes_of, shape, sequence_length, 2 if low else 4, autocast=autocast)
    encoder, decoder = (
        _layers(shape, bytes_of, sequence_length, low=low, autocast=autocast, decoder=decoder)
        for decoder in (False, True)
    )
    first, between, last = _ends(shape, sequence_length, low=low, autocast=autocast, cuda=cuda)
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.CLOSED_FORM,
        segments=(first, encoder, between, decoder, last),
        workspace_bytes=shape.decoder_layers * bytes_of.bias * sequence_length,  # those that all samples share
        attention="memory-efficient" if cuda else "",
        updated_before_largest=_updated_before_largest(shape),
    )


def _bytes_of(shape: T5Shape, sequence_length: int, precision: Precision, *, autocast: bool) -> _Bytes:
    """A part keeps its input, that normed, and what the norm returns, which every product casts for itself under
    autocast; the mask of its output's dropout, and in fp16 its sum, which is clamped; of an attention queries, keys,
    values, the softmax of scores, the mask of its dropout and what that returns; of a feed-forward part what its
    activation saves."""
    h, q, f, scores, gated = shape.hidden, shape.query, shape.feed_forward, shape.heads * sequence_length, shape.gated
    if precision is Precision.FP32:
        activated = (32 if gated else 12) * f
        return _Bytes(
            stream=4 * h,
            attention=16 * h + 16 * q + 12 * scores + 4,
            bias=0,
            feed_forward=16 * h + activated + 4,
            activated=activated,
            selective_attention=4 * h + 16 * q + 4 * scores,
            selective_feed_forward=8 * h + (8 if gated else 4) * f,
            attended=12 * h + 20 * q + 16 * scores + 4,
            recomputed=12 * h + 32 * q + 16 * scores + 4,
            passed=20 * h + 4 * q,
        )
    activated = (16 if gated else 6) * f
    stream = 4 * h if autocast else 2 * h
    clamped = 2 * h if precision is Precision.FP16 and not autocast else 0
    return _Bytes(
        stream=stream,
        attention=(16 if autocast else 12) * h + clamped + 14 * q + 12 * scores + 4,
        bias=0,
        feed_forward=(14 if autocast and gated else 12) * h + clamped + activated + 4,
        activated=activated,
        selective_attention=2 * h + 10 * q + 4 * scores,
        selective_feed_forward=2 * h + stream + (4 if gated else 2) * f,
        attended=(14 if autocast else 10) * h + 20 * q + 16 * scores + 4,
        recomputed=(20 if autocast else 10) * h + 40 * q + (20 if autocast else 16) * scores + 4,
        passed=(12 if autocast else 20) * h,
    )


def _on_cuda(found: _Bytes, shape: T5Shape, sequence_length: int, width: int, *, autocast: bool) -> _Bytes:
    """The same with the kernels of CUDA, as training/tracing/cuda_autocast.py has them from their sources.

    That of attention keeps queries, keys, values, its result and a number for each row of scores. It is given a bias,
    of which one in a layer is each sample's own, and what it makes again is never the worst. Dropout keeps its masks in
    bytes. Under autocast the powers of a gate's GELU are fp32, and so is what is dropped behind them.
    """
    q, rows, scores = shape.query, 4 * shape.heads, shape.heads * sequence_length
    before = 16 if width == 4 else 14
    powers = 10 * shape.feed_forward if shape.gated and autocast else 0
    spared, spared_inside = (width - 1) * shape.hidden, ((4 if powers else width) - 1) * shape.feed_forward
    held = 6 * shape.hidden + 4 * shape.feed_forward if shape.gated else 8 * shape.hidden + 2 * shape.feed_forward
    return replace(
        found,
        attention=found.attention - 12 * scores + (4 * width - before) * q + rows - spared,
        bias=width * scores,
        feed_forward=found.feed_forward + powers - spared_inside - spared,
        activated=found.activated + powers - spared_inside,
        selective_attention=found.selective_attention - 4 * scores + (0 if width == 4 else -2) * q + rows,
        attended=found.attended - 16 * scores + (8 * width - 20) * q + width * scores + rows,
        recomputed=0,
        spared=spared,
        spared_inside=spared_inside,
        held=held if autocast else 0,
    )


def _layers(shape: T5Shape, of: _Bytes, s: int, *, low: bool, autocast: bool, decoder: bool) -> Segment:
    """The layers of one side. One of the decoder attends twice, and its gradient comes with that of what the encoder
    returned. Beside them wait the gradient of the table, from the head on, and those of the biases of positions."""
    h, q, f, width = shape.hidden, shape.query, shape.feed_forward, 2 if low else 4
    attentions = 2 if decoder else 1
    matrices, projections = shape.feed_forward_matrices, (h * q,) * 4
    all_matrices, largest = sum(matrices) + attentions * sum(projections), matrices[0]
    saved = of.feed_forward + attentions * of.attention + of.bias
    others = (attentions - 1) * of.attention  # saved by the attention that goes backward last
    again = others + of.recomputed - saved

    def peak(made: int, transient: int, *, fresh: int = 0, mode: ActivationCheckpointing | None = None) -> BackwardPeak:
        own = made // 2 if autocast else made  # a weight's copy goes when its gradient has come
        return BackwardPeak(own + fresh, fresh, s * (attentions * of.stream + transient), mode)

    first = width * f - (2 * h if autocast else 0) + of.spared
    second = 6 if autocast else width if shape.gated else 2 * width
    peaks = [
        peak(0, first, fresh=largest),
        peak(largest, -second * f + of.spared + of.spared_inside, fresh=largest),
        peak(sum(matrices), (8 if low else 4) * h - of.activated + of.spared),
        peak(sum(matrices) + h * q, others + of.attended + (0 if decoder else of.bias) - saved),
        peak(all_matrices - h * q, of.passed - saved, fresh=h * q),
        peak(0, again, mode=ActivationCheckpointing.FULL),
        # what was computed again is whole: what the layer returned, and its last part, whose mask is there twice
        peak(0, 2 * of.stream + width * h - of.spared, mode=ActivationCheckpointing.FULL),
        peak(0, again + width * (2 * h + f), mode=ActivationCheckpointing.SELECTIVE),
    ]
    if autocast:
        peaks[1:1] = peak(0, first + of.held), peak(largest, 4 * f - 2 * h + of.spared)
    attending = ((s, h, q), (s, h, q), (s, h, q), (s, q, h))
    return Segment(
        name="decoder" if decoder else "encoder",
        count=shape.decoder_layers if decoder else shape.encoder_layers,
        unit=True,
        parameters=all_matrices + (1 + attentions) * h,
        saved_bytes=s * saved,
        checkpointed_bytes=s * of.stream,
        selective_bytes=s * (of.selective_feed_forward + attentions * of.selective_attention),
        transient_bytes=0,
        forward_flops=2.0 * s * all_matrices + attentions * 4.0 * s * s * q,
        cast_bytes=2 * all_matrices if autocast else 0,
        largest_parameter=max(largest, h * q),
        waiting_gradients=shape.table + (2 if of.bias else 2 * attentions) * shape.heads * s * s,
        factored=len(matrices) * (h + f) + attentions * 4 * (h + q) + (1 + attentions) * h,
        tensors=(*matrices, h, *((*projections, h) * attentions)),
        matmuls=(*(attending * attentions), *(((s, h, f),) * (len(matrices) - 1)), (s, f, h)),
        peaks=tuple(peaks),
    )


def _ends(shape: T5Shape, s: int, *, low: bool, autocast: bool, cuda: bool) -> tuple[Segment, Segment, Segment]:
    """Embedding of the input; what is between encoder and decoder; the last norm, the head and the loss.

    The gradients of the table's three uses meet at either embedding. The biases of positions, which are parameters of
    the first layers, count here. Decoder layers share what the encoder returned; under autocast they keep casts of it.
    """
    h, v, table, biases = shape.hidden, shape.vocab_size, shape.table, shape.buckets * shape.heads
    stream, widened = (2 * h, 4 * h) if low and not autocast else (4 * h, 0)
    mask = h if cuda else stream
    passed = s * (3 * stream + 2 * mask + widened + 12)
    lost = s * (3 * stream + mask - (2 * h if autocast else 0) + widened + 4 * v + 4)

    positions = shape.buckets + shape.heads
    weight_made = stream - mask + (2 * h - 4 * v if autocast else stream - (2 * v if low else 0))
    return (
        embedding(
            "embedding",
            (biases, table),
            v + h + positions,
            table=table,
            looked_up=biases + table,
            saved_bytes=s * (mask + s + 16),
        ),
        embedding(
            "between encoder and decoder",
            (biases, h),
            h + positions,
            table=table,
            looked_up=biases,
            saved_bytes=passed - (s * stream if autocast else 0),
            kept_bytes=passed,
        ),
        head(
            (h,),
            logits=(s, h, v),
            saved_bytes=lost,
            forward_bytes=(6 if low else 4) * s * v,
            weight_made_bytes=s * weight_made,
            casts=autocast,
        ),
    )


def _updated_before_largest(shape: T5Shape) -> int:
    """See ModelProfile: the table goes first, then a query's projection; matrices of a feed-forward part in a row."""
    table, wide, narrow = shape.table, shape.feed_forward_matrices[0], shape.hidden * shape.query
    in_turn = (2 * table, table + 2 * narrow, 3 * narrow, narrow + 2 * wide, 3 * wide, wide + 2 * narrow)
    return max(in_turn) - 2 * max(table, wide, narrow)
