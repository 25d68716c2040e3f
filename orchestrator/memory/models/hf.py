"""Closed-form sizes of Llama-style transformers models, and of adapters on them.

Their layers save what our decoder's do. Slopes over hidden size, feed-forward, heads and key-value heads were measured
by counting live storages of one layer (transformers 5.23, torch 2.13.0, CPU, 2026-11). Differences are in
`as_transformers`. A family that is not here needs a declared profile.
"""

from __future__ import annotations

from collections.abc import Mapping
from itertools import starmap
from typing import Any

from orchestrator.memory.models import experts as mixtures
from orchestrator.memory.models.adapters import PROJECTIONS, AdaptedLayer, Projection
from orchestrator.memory.models.experts import FAMILIES, Experts
from orchestrator.specs.choices import Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import DecoderSpec, LoraSpec, ModelSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.profile import LossChunks, ModelProfile, Segment
from orchestrator.specs.replace import replace

# Settings of a family where config.json says nothing.
DEFAULTS: Mapping[str, JsonObject] = FAMILIES["decoders"]
# Activations that keep their input and nothing else, and the widest heads that a CPU's attention
# takes without scores.
ACTIVATIONS = ("silu", "gelu", "gelu_pytorch_tanh")
HEAD_DIM_MAX = 256
NEEDED = (
    "vocab_size",
    "hidden_size",
    "intermediate_size",
    "num_hidden_layers",
    "num_attention_heads",
)
# Families with experts whose layers are otherwise those of another.
ATTENTION = {"mixtral": "mistral", "qwen2_moe": "qwen2", "qwen3_moe": "qwen3"}
# Bytes that a layer's operators read and write for each element of the residual stream, of queries
# and keys, and of the
# feed-forward width: forwards, backwards. Norms in Python, rotation, gate, residuals and their
# gradients, and under
# autocast the casts of what goes into products (counted on meta tensors, transformers 5.24,
# 2026-11-26).
MOVED: Mapping[str, tuple[tuple[int, int, int], tuple[int, int, int]]] = {
    "fp32": ((80, 40, 20), (250, 52, 36)),
    "low": ((84, 20, 10), (222, 26, 18)),
    "autocast": ((106, 20, 10), (292, 26, 18)),
}
NORMS_OF_HEADS = (36, 96)  # of queries and keys
# Bytes of a weight in NF4 with double quantisation: 4 bits and 0.127 (arXiv:2305.14314, section 3).
NF4_BYTES = (4 + 0.127) / 8


@frozen
class DecoderShape:
    """Sizes of a Llama-style decoder; as DecoderSpec, but with any head width."""

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_hidden_layers: int
    num_attention_heads: int
    kv_heads: int
    head_dim: int
    tie_word_embeddings: bool
    dropout: float = 0.0
    experts: Experts | None = None  # instead of a feed-forward part, whose width is then 0


def read_config(model: ModelSpec) -> Mapping[str, Any]:
    """Return the configuration of a transformers model, from the job or its folder; {} where
    neither has one.
    """
    return model.hf if isinstance(model.hf, dict) else model.config


def find_model_shape(model: ModelSpec, sequence_length: int) -> DecoderSpec | DecoderShape | None:
    """Return the sizes of our decoder, or of a transformers model that `find_decoder_shape` knows;
    None for other models.
    """
    return model.decoder if model.hf is None else find_decoder_shape(model, sequence_length)


def find_decoder_shape(model: ModelSpec, sequence_length: int) -> DecoderShape | None:
    """Return the model's sizes for the closed form; None where that does not hold at this sequence
    length.

    Models with adapters beside a mixture of experts are traced, as are adapters outside the seven
    projections of a layer, and attention that holds its scores (`attn_implementation: eager`).
    """
    raw = read_config(model)
    family = str(raw.get("model_type"))
    mixed = family in mixtures.DEFAULTS
    if not (mixed or family in DEFAULTS) or (mixed and model.lora is not None):
        return None
    config = (
        {**mixtures.DEFAULTS[family], **mixtures.rename_expert_keys(raw)}
        if mixed
        else {**DEFAULTS[family], **raw}
    )
    experts = mixtures.find_experts(config) if mixed else None
    if mixed and experts is None:
        return None
    sizes: JsonObject = {name: config.get(name) for name in NEEDED}
    if mixed:
        sizes["intermediate_size"] = 0  # experts stand where a feed-forward part would
    is_eager = config.get("attn_implementation") == "eager"
    if is_eager or any(not isinstance(size, int) for size in sizes.values()):
        return None
    windowed = family in ("mistral", "mixtral") or config.get("use_sliding_window")
    if windowed and (config.get("sliding_window") or sequence_length) < sequence_length:
        return None  # attention through a mask
    if model.lora is not None and set(model.lora.target_modules) - set(PROJECTIONS):
        return None
    hidden = config["hidden_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    activations = {config.get("hidden_act"), config.get("hidden_activation")} - {None}
    if config.get("attention_dropout") or head_dim > HEAD_DIM_MAX or activations - set(ACTIVATIONS):
        return None
    return DecoderShape(
        **sizes,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_dim=head_dim,
        tie_word_embeddings=bool(config.get("tie_word_embeddings")),
        experts=experts,
    )


def adapt_to_transformers(
    profile: ModelProfile,
    model: ModelSpec,
    shape: DecoderShape,
    sequence_length: int,
    *,
    autocast: bool,
    is_cuda: bool,
    expert_parallel: int = 1,
    receive_factor_max: float = 1.0,
    is_script: bool = False,
) -> ModelProfile:
    """Return our decoder's profile adapted to the model's transformers family: with its biases,
    head norms and adapters.

    `is_script`: a 4-bit base model was prepared by peft, and not by our engine.
    """
    embedding, layer, head = profile.segments
    config = read_config(model)
    tp = profile.tensor_parallel
    low = profile.precision is not Precision.FP32
    family = ATTENTION.get(config["model_type"], config["model_type"])
    q = shape.num_attention_heads * shape.head_dim // tp
    kv = shape.kv_heads * shape.head_dim // tp
    more = 0
    if (family == "qwen2" and config.get("qkv_bias", True)) or config.get("attention_bias"):
        more += q + 2 * kv
    if config.get("attention_bias") and family != "qwen2":
        more += shape.hidden_size
    if config.get("mlp_bias"):
        more += 2 * shape.intermediate_size // tp + shape.hidden_size
    if family == "qwen3":
        # kept for the gradient of the norm's weight
        if model.lora is not None:
            normed = 0
        elif low:
            normed = 2
        else:
            normed = 4
        norms = (4 + normed) * (q + kv) + 4 * (q + kv) // shape.head_dim
        layer = replace(layer, saved_bytes=layer.saved_bytes + sequence_length * norms)
        more += 2 * shape.head_dim
    if (
        low and not autocast
    ):  # both norms keep their input in fp32 alone; gemma's multiply with the weight in fp32 too
        wider = 4 if family == "gemma" and model.lora is None else 0
        layer = replace(
            layer,
            saved_bytes=layer.saved_bytes
            + sequence_length * (wider - 4) * shape.hidden_size // profile.sequence_parallel,
        )
    forward_bytes, backward_bytes = _forward_and_backward_traffic_bytes(
        profile, shape, family, sequence_length, autocast=low and autocast
    )
    layer = replace(layer, forward_moved_bytes=forward_bytes, backward_moved_bytes=backward_bytes)
    if more:
        *arrivals, last = layer.arrivals
        layer = replace(
            layer,
            parameters=layer.parameters + more,
            factored=(layer.factored or 0) + more,
            tensors=(*layer.tensors, more),
            arrivals=(*arrivals, last._replace(own=last.own + more)),
        )
    if model.lora is None:
        layer = replace(layer, last_parameter=shape.hidden_size)  # a norm
    else:
        beside = _make_adapted_layer(
            model.lora, shape, is_low_precision=low, autocast=autocast, is_cuda=is_cuda
        )
        embedding, layer, head = _add_adapters(
            (embedding, layer, head),
            model.lora,
            shape,
            beside,
            sequence_length,
            model.weight_bytes_each,
            is_script=is_script,
        )
        profile = replace(profile, updated_before_largest=0)  # adapters are small beside each other
    profile = replace(profile, segments=(embedding, layer, head))
    if shape.experts is None:
        return profile
    return mixtures.add_experts(
        profile,
        shape.experts,
        shape.hidden_size,
        sequence_length,
        autocast=autocast,
        expert_parallel=expert_parallel,
        receive_factor_max=receive_factor_max,
    )


def _forward_and_backward_traffic_bytes(
    profile: ModelProfile, shape: DecoderShape, family: str, sample_tokens: int, *, autocast: bool
) -> tuple[int, ...]:
    """Return (forward, backward) bytes of memory traffic per sample of an uncompiled layer's
    operators.
    """
    tp = profile.tensor_parallel
    low = profile.precision is not Precision.FP32
    h = shape.hidden_size / profile.sequence_parallel
    f = shape.intermediate_size // tp
    rotated = (shape.num_attention_heads + shape.kv_heads) * shape.head_dim // tp
    ways = MOVED["autocast" if autocast else "low" if low else "fp32"]
    more = NORMS_OF_HEADS if family == "qwen3" else (0, 0)
    return tuple(
        round(sample_tokens * (stream * h + (turned + normed) * rotated + gated * f))
        for (stream, turned, gated), normed in zip(ways, more, strict=True)
    )


def _add_adapters(
    segments: tuple[Segment, Segment, Segment],
    lora: LoraSpec,
    shape: DecoderShape,
    adapted_layer: AdaptedLayer,
    sample_tokens: int,
    other_weight_bytes: int,
    *,
    is_script: bool,
) -> tuple[Segment, Segment, Segment]:
    """Return the segments with a frozen base and adapters beside the projections of every layer.

    The base has no gradients or states. Under low precision its matrices are held in that precision
    (models/hf_model.py), or in 4 bits and its tables in low precision (models/hf_adapters.py).
    Norms, and an embedding that is not in low precision, have `other_weight_bytes` per element: 4
    but where a script says otherwise. So have the tables beside a script's base of 4 bits
    (`prepare_model_for_kbit_training` in peft/utils/other.py, peft 0.21). A projection without an
    adapter does not keep its input. An adapter also keeps what stands between its two matrices;
    under selective checkpointing also what the second returned, since a matrix product did. A norm
    whose weight is frozen does not keep what the weight is multiplied with.
    """
    embedding, layer, head = segments
    sizes = list(adapted_layer.adapted.values())
    h = shape.hidden_size
    f = shape.intermediate_size
    width = adapted_layer.width
    low = width == 2
    autocast = adapted_layer.autocast
    trained = sum(lora.rank * (inputs + outputs) for inputs, outputs in sizes)
    table = shape.vocab_size * h
    base_width = NF4_BYTES if lora.quantise_base else width
    between = sample_tokens * width * lora.rank * len(sizes)
    returned = sample_tokens * width * sum(outputs for _, outputs in sizes)
    normed = sample_tokens * (width if low and not autocast else 4) * h
    base_inputs = sample_tokens * (10 * h + 2 * f if autocast else width * (2 * h + f))
    inputs = sample_tokens * adapted_layer.inputs_bytes
    forward = sample_tokens * adapted_layer.forward_bytes
    backward = sample_tokens * adapted_layer.backward_bytes
    moved_forward, moved_backward = adapted_layer.forward_and_backward_traffic_bytes
    frozen_layer = round(base_width * adapted_layer.matrices) + other_weight_bytes * (
        layer.parameters - adapted_layer.matrices
    )
    own_table = 0 if shape.tie_word_embeddings else table
    table_width = 2 if low and lora.quantise_base and not is_script else other_weight_bytes
    is_table = shape.tie_word_embeddings or lora.quantise_base or not low
    head_width = table_width if is_table else 2
    cast_head = 2 * table if autocast and head_width == 4 else 0
    return (
        replace(
            embedding,
            trained=0,
            frozen_bytes=table_width * table + other_weight_bytes * (embedding.parameters - table),
            summed_gradients=0,
            waiting_gradients=0,
            looked_up=0,
            factored=0,
            tensors=(),
            peaks=(),
        ),
        replace(
            layer,
            parameters=layer.parameters + trained,
            trained=trained,
            frozen_bytes=frozen_layer,
            waiting_gradients=0,
            saved_bytes=layer.saved_bytes + between + inputs - base_inputs - 2 * normed,
            transient_bytes=backward,
            forward_transient_bytes=forward,
            selective_bytes=None
            if layer.selective_bytes is None
            else layer.selective_bytes + between + returned,
            selective_transient_bytes=max(backward, forward + layer.checkpointed_bytes)
            + sample_tokens * width * h,
            cast_bytes=2 * trained if low and autocast else 0,
            forward_moved_bytes=layer.forward_moved_bytes + sample_tokens * moved_forward,
            backward_moved_bytes=layer.backward_moved_bytes + sample_tokens * moved_backward,
            factored=sum(2 * lora.rank + inputs + outputs for inputs, outputs in sizes),
            tensors=tuple(
                lora.rank * size
                for inputs, outputs in reversed(sizes)
                for size in (outputs, inputs)
            ),
            arrivals=(),
        ),
        replace(
            head,
            trained=0,
            saved_bytes=head.saved_bytes - normed,
            frozen_bytes=head_width * own_table
            + other_weight_bytes * (head.parameters - own_table),
            waiting_gradients=0,
            factored=0,
            tensors=(),
            chunks=None if head.chunks is None else _frozen_loss(head.chunks, cast_head),
        ),
    )


def _frozen_loss(chunks: LossChunks, cast_bytes: int) -> LossChunks:
    """Return the memory of a loss in chunks whose weight is frozen: it holds only logits, and
    autocast's copy of the weight.
    """
    per_token_bytes, _ = chunks.peaks[0]
    return replace(chunks, gradients=0, peaks=((per_token_bytes, cast_bytes),))


def _make_adapted_layer(
    lora: LoraSpec, shape: DecoderShape, *, is_low_precision: bool, autocast: bool, is_cuda: bool
) -> AdaptedLayer:
    h = shape.hidden_size
    f = shape.intermediate_size
    q = shape.num_attention_heads * shape.head_dim
    kv = shape.kv_heads * shape.head_dim
    sizes = (h, q), (h, kv), (h, kv), (q, h), (h, f), (h, f), (f, h)
    return AdaptedLayer(
        projections=dict(zip(PROJECTIONS, starmap(Projection, sizes), strict=True)),
        targets=lora.target_modules,
        dropout=lora.dropout > 0,
        width=2 if is_low_precision else 4,
        autocast=autocast,
        cuda=is_cuda,
    )
