"""What a model costs, as a ModelProfile: the closed form of our decoder, or what the user declared."""

from __future__ import annotations

from functools import lru_cache

from orchestrator.specs.job import DeclaredProfile, JobSpec
from orchestrator.specs.model import DecoderSpec
from orchestrator.specs.plan import Precision
from orchestrator.specs.profile import ModelProfile, Segment, Source

# Activations of a user's model in bf16 over those in fp32: norms, residuals and losses stay fp32 under autocast.
# From the closed form below at h = q = kv, f = 4h: (26 + 8 + 32) / (24 + 16 + 64).
BF16_SHARE = 0.65


def profile_of(spec: JobSpec, *, precision: Precision, sequence_length: int | None) -> ModelProfile | None:
    """What the job's model costs at this precision and these tokens per sample (None: its own).

    The declared profile where there is one, else the closed form of `model.decoder`; None where neither is said.
    """
    if spec.profile is not None:
        own_length = spec.data.sequence_length if spec.model is not None else _script_length(spec)
        stretch = sequence_length / own_length if sequence_length and own_length else 1.0
        share = BF16_SHARE if (spec.precision, precision) == (Precision.FP32, Precision.BF16) else 1.0
        return _declared(spec.profile, spec.family_name, precision, stretch=stretch, share=share)
    if spec.model is not None and spec.model.decoder is not None:
        return _decoder(spec.model.decoder, spec.family_name, precision, sequence_length or spec.data.sequence_length)
    return None


def _script_length(spec: JobSpec) -> int | None:
    knob = spec.knobs.sequence_length
    return int(knob.default) if knob is not None and knob.default is not None else None


def _declared(
    declared: DeclaredProfile, family: str, precision: Precision, *, stretch: float, share: float
) -> ModelProfile:
    """`layers` equal parts, and one for what does not divide by them."""
    kept = declared.checkpointed_per_sample
    saved_bytes = round(declared.activations_per_sample * stretch * share)
    checkpointed_bytes = min(saved_bytes, saved_bytes if kept is None else round(kept * stretch * share))
    layers = declared.layers

    def part(name: str, count: int, parameters: int, saved: int, checkpointed: int, flops: float) -> Segment:
        return Segment(
            name=name,
            count=count,
            parameters=parameters,
            saved_bytes=saved,
            checkpointed_bytes=min(saved, checkpointed),
            transient_bytes=0,
            forward_flops=flops,
            largest_parameter=parameters,
        )

    rest = part("rest", 1, declared.parameters % layers, saved_bytes % layers, checkpointed_bytes % layers, 0.0)
    layer = part(
        "layer",
        layers,
        declared.parameters // layers,
        saved_bytes // layers,
        checkpointed_bytes // layers,
        (declared.forward_flops_per_sample or 2.0 * declared.parameters) * stretch / layers,
    )
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.DECLARED,
        segments=(rest, layer),
        workspace_bytes=declared.workspace,
    )


@lru_cache(maxsize=256)
def _decoder(spec: DecoderSpec, family: str, precision: Precision, sequence_length: int) -> ModelProfile:
    """The closed form of `training/decoder.py` with `loss_sum`, per sample of `sequence_length` tokens.

    Coefficients follow from the tensors that autograd saves; they were checked by counting live storages of CPU
    ranks (torch 2.13.0, 2026-11) and agree with Korthikanti et al. 2022 (arXiv:2205.05198) for flash attention. In
    fp32 a layer keeps the inputs of its seven projections, norms with their intermediates, both factors of the gate,
    queries, keys, values, output and log-sum-exp of the attention. Under bf16 autocast the residual stream and the
    norms stay fp32, and every weight matrix is kept once more in bf16 (`cast_bytes`).
    """
    s, h, f, v = sequence_length, spec.hidden_size, spec.intermediate_size, spec.vocab_size
    n, d = spec.num_attention_heads, spec.head_dim
    q, kv = n * d, spec.kv_heads * d
    bf16 = precision is Precision.BF16
    matrices = 2 * h * q + 2 * h * kv + 3 * h * f
    if bf16:
        saved = 26 * h + 4 * q + 4 * kv + 4 * n + 8 + 8 * f
        recomputed, head_saved = max(4 * f - 2 * h, 0), 6 * h + 4 + 4 * v
    else:
        saved = 24 * h + 8 * q + 8 * kv + 4 * n + 8 + 16 * f
        recomputed, head_saved = 8 * f, 8 * h + 4 + 4 * v
    tied = spec.tie_word_embeddings
    embedding = Segment(
        name="embedding",
        count=1,
        parameters=0 if tied else v * h,
        saved_bytes=s * (4 * h + 16),
        checkpointed_bytes=s * (4 * h + 16),
        transient_bytes=s * 4 * h,
        forward_flops=0.0,
        largest_parameter=v * h,
        summed_gradients=3 * v * h if tied else 0,  # of head and embedding, and their sum
    )
    layer = Segment(
        name="layer",
        count=spec.num_hidden_layers,
        parameters=matrices + 2 * h,
        saved_bytes=s * saved,
        checkpointed_bytes=s * 4 * h,
        transient_bytes=s * recomputed,
        forward_flops=s * (2.0 * matrices + 2.0 * s * q),  # causal attention: half of 4 s^2 q
        cast_bytes=(2 * matrices + 8 * s * d) if bf16 else 0,
        largest_parameter=h * max(f, q),
    )
    head = Segment(
        name="head",
        count=1,
        parameters=h + v * h,  # a shared weight has its gradient from here on
        saved_bytes=s * head_saved,
        checkpointed_bytes=s * head_saved,
        transient_bytes=s * max(8 * v, 12 * h - 4 * v),
        forward_flops=2.0 * s * v * h,
        cast_bytes=2 * v * h if bf16 else 0,
        largest_parameter=v * h,
    )
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.CLOSED_FORM,
        segments=(embedding, layer, head),
        workspace_bytes=8 * s * d,  # rotary tables
    )
