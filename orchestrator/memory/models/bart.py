"""An encoder-decoder of the BART family as transformers has one, in closed form.

Attention is flash attention under a mask. Every layer widens the mask to its own compute type, so a layer's saved bytes
grow with the square of the sequence, but not with the number of heads. Encoder and decoder see `sequence_length` tokens
each (data/tokenised.py), and all logits exist at once. Every coefficient is a slope of live bytes over one of the
sizes, operation by operation. They meet traced steps of 8 models to the byte (transformers 5.23, torch 2.13.0,
2026-11).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from orchestrator.memory.models.encoder_decoder import embedding, head
from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.profile import BackwardPeak, ModelProfile, Segment, Source

# What BartConfig of transformers 5.23 says where config.json says nothing.
DEFAULTS: Mapping[str, Any] = {
    "vocab_size": 50265,
    "max_position_embeddings": 1024,
    "d_model": 1024,
    "encoder_layers": 12,
    "encoder_ffn_dim": 4096,
    "encoder_attention_heads": 16,
    "decoder_layers": 12,
    "decoder_ffn_dim": 4096,
    "decoder_attention_heads": 16,
    "dropout": 0.1,
}
# Where the closed form holds; BartConfig has the same where config.json says nothing.
ALIKE: Mapping[str, Any] = {
    "attention_dropout": 0.0,
    "activation_dropout": 0.0,
    "encoder_layerdrop": 0.0,
    "decoder_layerdrop": 0.0,
    "activation_function": "gelu",
    "tie_word_embeddings": True,
}
# Other names that its configuration takes, and that its files say beside these.
OTHER_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Side:
    """The layers of the encoder or the decoder."""

    layers: int
    feed_forward: int
    heads: int
    attentions: int  # in a layer


@dataclass(frozen=True, slots=True, kw_only=True)
class BartShape:
    """Sizes of an encoder-decoder of the BART family; one table serves both and the head."""

    vocab_size: int
    hidden: int
    positions: int  # rows of a table of them, of which each side has one
    encoder: Side
    decoder: Side


def bart_shape(model: ModelSpec, config: Mapping[str, Any]) -> BartShape | None:
    """What the closed form has to know of a configuration; None where it does not hold: without dropout, whose masks
    it counts, with dropout elsewhere, with another activation, where layers are left out, or with adapters."""
    if config.get("model_type") != "bart" or model.lora is not None:
        return None
    said = {**DEFAULTS, **config}
    if any(said.get(name, same) != same for name, same in ALIKE.items()) or not said["dropout"]:
        return None
    if any(said.get(other, said[name]) != said[name] for other, name in OTHER_NAMES.items()):
        return None
    if any(not isinstance(said[name], int) for name in DEFAULTS if name != "dropout"):
        return None
    encoder, decoder = (
        Side(
            layers=said[f"{name}_layers"],
            feed_forward=said[f"{name}_ffn_dim"],
            heads=said[f"{name}_attention_heads"],
            attentions=attentions,
        )
        for name, attentions in (("encoder", 1), ("decoder", 2))
    )
    return BartShape(
        vocab_size=said["vocab_size"],
        hidden=said["d_model"],
        positions=said["max_position_embeddings"] + 2,  # BartLearnedPositionalEmbedding's offset
        encoder=encoder,
        decoder=decoder,
    )


def bart_profile(
    shape: BartShape, family: str, precision: Precision, sequence_length: int, *, autocast: bool, cuda: bool
) -> ModelProfile:
    """The closed form, per sample of `sequence_length` tokens in and as many out.

    `cuda`: whether dropout keeps its masks in bytes, as there (tracing/cuda_autocast.py). The gradients of the table's
    three uses meet at either embedding. Decoder layers share what the encoder returned; under autocast they keep casts
    of it.
    """
    s, h, table, low = sequence_length, shape.hidden, shape.vocab_size * shape.hidden, precision is not Precision.FP32
    stream = 4 * h if autocast or not low else 2 * h
    positions, rows, v = shape.positions * h, shape.positions, shape.vocab_size
    numbers = 4 if low and not autocast else 0  # of a norm's mean and deviation, less
    mask = h if cuda else stream
    given = s * (2 * stream + mask + 16 - numbers)
    weight_made = 2 * h - (4 if autocast else 2) * v if low else 4 * h
    first = embedding(
        "embedding",
        (h, h, positions, table),
        rows + v + 4 * h,
        table=table,
        looked_up=positions + table,
        saved_bytes=s * (stream + mask + 32 - numbers),
    )
    between = embedding(
        "between encoder and decoder",
        (h, h, positions),
        rows + 3 * h,
        table=table,
        looked_up=positions,
        saved_bytes=given - (s * stream if autocast else 0),
        kept_bytes=given + s * s,
    )
    last = head(
        (),
        logits=(s, h, v),
        saved_bytes=s * ((2 if low else 4) * h + 4 * v),
        forward_bytes=4 * s * v,
        weight_made_bytes=s * weight_made,
        casts=autocast,
    )
    encoder, decoder = (
        _layers(name, side, h, s, table, low=low, autocast=autocast, cuda=cuda)
        for name, side in (("encoder", shape.encoder), ("decoder", shape.decoder))
    )
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.CLOSED_FORM,
        segments=(first, encoder, between, decoder, last),
        workspace_bytes=4 * shape.vocab_size,  # a bias of logits, which is not trained
        attention="memory-efficient",
        updated_before_largest=_updated_before_largest(shape),
    )


def _layers(name: str, side: Side, h: int, s: int, table: int, *, low: bool, autocast: bool, cuda: bool) -> Segment:
    """The layers of one side. One of the decoder attends twice, and its gradient comes with that of what the encoder
    returned. Beside them waits the gradient of the table, from the head on.

    An attention keeps its input, queries, keys, values, what it returned and the log-sum-exp, the mask, and of its
    output the dropout's mask and the norm's input; a feed-forward part its input, what goes into its activation and
    comes out, and the same of its output. Under autocast every product casts its input for itself.
    """
    f, attentions, width, wide = side.feed_forward, side.attentions, 2 if low else 4, h * side.feed_forward
    stream = 4 * h if autocast else width * h
    widths = (18, 6) if autocast else (6 * width, 2 * width)  # of h, in an attention and a feed-forward part
    mask = h if cuda else width * h  # of what either returns
    spared = width * h - mask  # of that which is gone when the last products go backward
    numbers = 8 if autocast or not low else 4
    attention = widths[0] * h + mask + 4 * side.heads + width * s + numbers
    saved = attentions * attention + widths[1] * h + mask + 2 * width * f + numbers
    selective = attentions * ((10 if low else 20) * h + 4 * side.heads) + (6 if autocast else 2 * width) * h + width * f
    matrices = 2 * wide + attentions * 4 * h * h
    passed = 0 if autocast else 3 * width * h  # live when all but the first products have gone backward

    def peak(made: int, transient: int, *, fresh: int = 0, mode: ActivationCheckpointing | None = None) -> BackwardPeak:
        own = made // 2 if autocast else made  # a weight's copy goes when its gradient has come
        return BackwardPeak(own + fresh, fresh, s * (attentions * stream + transient), mode)

    peaks = [
        peak(0, spared + (width * f - 4 * h if autocast else width * (f - h)), fresh=wide),
        peak(wide, spared - (8 * h + 4 * f if autocast else width * (f + h)), fresh=wide),
        peak(matrices - h * h, passed - saved, fresh=h * h),
    ]
    if autocast:  # what is computed again is whole for a moment
        recomputed = (ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE)
        peaks += [peak(0, 4 * h), *(peak(0, 12 * h, mode=mode) for mode in recomputed)]
    projections = (h, h * h) * 4
    tensors = (h, h, h, wide, f, wide, *((h, h, *projections) * attentions))
    return Segment(
        name=name,
        count=side.layers,
        unit=True,
        parameters=sum(tensors),
        saved_bytes=s * saved,
        checkpointed_bytes=s * stream,
        selective_bytes=s * selective,
        transient_bytes=0,
        forward_flops=2.0 * s * matrices + attentions * 4.0 * s * s * h,
        cast_bytes=2 * matrices if autocast else 0,
        largest_parameter=max(wide, h * h),
        waiting_gradients=table,
        factored=2 * (h + f) + attentions * 8 * h + sum(tensors) - matrices,
        tensors=tensors,
        matmuls=(*((s, h, h),) * (4 * attentions), (s, h, f), (s, f, h)),
        peaks=tuple(peaks),
    )


def _updated_before_largest(shape: BartShape) -> int:
    """See ModelProfile: the table goes first, then the encoder's positions; matrices stand behind biases."""
    h, table, positions = shape.hidden, shape.vocab_size * shape.hidden, shape.positions * shape.hidden
    f = max(shape.encoder.feed_forward, shape.decoder.feed_forward)
    in_turn = (2 * table, table + 2 * positions, positions + 2 * h * h, f + 2 * f * h, h + 2 * h * h)
    return max(in_turn) - 2 * max(table, positions, f * h, h * h)
