"""The ModelProfile (memory and compute cost) of a job's model: by closed form, trace or the user's declaration."""

from __future__ import annotations

from functools import lru_cache

from orchestrator.memory.model_request import ModelRequest, RankShare, read_model_request
from orchestrator.memory.models.hf import DecoderShape, adapt_to_transformers, find_model_shape
from orchestrator.specs.choices import MasterWeights, Precision
from orchestrator.specs.job.model import DecoderSpec, ModelSpec
from orchestrator.specs.job.sections import DeclaredProfile
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.mechanics import ScriptFsdp
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import (
    BackwardPeak,
    LossChunks,
    ModelProfile,
    Segment,
    Source,
    TracedProfile,
)
from orchestrator.specs.replace import replace

# Activations of a user's model in bf16 or fp16 over those in fp32: norms, residuals and losses stay
# fp32 under
# autocast. From the closed form below at h = q = kv, f = 4h: (26 + 8 + 32) / (24 + 16 + 64).
LOW_SHARE = 0.65
CHUNK_TOKENS = 1024  # of training/models/cross_entropy.py (a test compares the two)


def uses_autocast(plan: Plan) -> bool:
    """Return whether the plan computes in low precision with fp32 weights; otherwise weights have
    the compute type.
    """
    is_low = plan.precision is not Precision.FP32 and plan.master_weights is MasterWeights.FP32
    return is_low and plan.mechanics.autocasts


def find_rank_profile(request: ModelRequest, rank_share: RankShare) -> ModelProfile | None:
    """Return the memory and compute cost of one rank's part of the job's model; None if it needs a
    trace.

    A declared profile comes first, then the closed form of a decoder, ours or Llama-style, then a
    trace from intake. A script's own loss is assumed to hold all logits. Closed forms assume that
    the whole model is trained. A partly frozen model is traced, except where ranks split it: its
    parts need no more.
    """
    if request.profile is not None:
        return _make_declared_profile(request, request.profile, rank_share)
    tp = rank_share.tensor_parallel
    model = request.known_model
    length = rank_share.sequence_length or request.data_length
    assert rank_share.context_parallel == 1 or request.model is not None, (
        "planning/layouts.py asks for no other"
    )
    if model is not None and model.weight_bytes_each == 2:
        rank_share = replace(rank_share, autocast=False)  # nothing is left to cast
    traced = _find_traced_profile(request.traced, rank_share, length) if tp == 1 else None
    is_whole = tp == rank_share.pipeline_parallel == rank_share.expert_parallel == 1
    shape = None if model is None else find_model_shape(model, length)
    if request.freezes and is_whole and traced is not None:
        return traced
    experts = shape.experts if isinstance(shape, DecoderShape) else None
    if model is None or shape is None or (tp > 1 and experts is not None):
        if traced is None or model is None or not request.is_script:
            return traced
        return _set_script_weights(traced, model)
    profile = make_decoder_profile(
        shape,
        request.family_name,
        rank_share.precision,
        length,
        tp,
        rank_share.autocast,
        rank_share.cuda and isinstance(shape, DecoderSpec),
        # our engine spreads tokens over the ranks that share matrices
        1 if request.is_script else tp,
        rank_share.context_parallel,
    )
    if isinstance(shape, DecoderShape):
        profile = adapt_to_transformers(
            *(profile, model, shape, length // rank_share.context_parallel),
            autocast=rank_share.autocast,
            is_cuda=rank_share.cuda,
            expert_parallel=rank_share.expert_parallel,
            receive_factor_max=rank_share.uneven,
            is_script=request.is_script,
        )
    if not request.is_script:
        return profile
    if not request.fuses_loss:
        profile = add_all_logits(profile, shape.vocab_size, length)
    return _set_script_weights(profile, model)


def _set_script_weights(profile: ModelProfile, model: ModelSpec) -> ModelProfile:
    """Return the profile with trained weights stored in the dtype that the script uses.

    Adapters stay in fp32 beside a frozen base (`autocast_adapter_dtype` in
    peft/tuners/tuners_utils.py, peft 0.19).
    """
    if model.lora is not None:
        return profile
    return replace(profile, parameter_bytes=model.weight_bytes_each)


def extend_held_boundaries(
    request: ModelRequest, profile: ModelProfile, plan: Plan
) -> ModelProfile:
    """Return the profile with layer inputs held longer, where transformers' Trainer shards LoRA on
    a frozen base by FSDP.

    Reentrant checkpointing wraps FSDP's units, whose hook for frozen weights holds the input of
    every layer, and its gradient, until the backward pass is over
    (torch/distributed/fsdp/_runtime_utils.py, `_register_post_backward_reshard_only_hook`; counted
    on two gloo ranks of torch 2.13, 2026-11). Other profiles are unchanged.
    """
    model = request.known_model
    is_wrapped = isinstance(plan.mechanics, ScriptFsdp) and request.is_by_transformers
    if not is_wrapped or model is None or model.lora is None:
        return profile
    segments = (replace(part, holds_boundaries=part.is_unit) for part in profile.segments)
    return replace(profile, segments=tuple(segments))


def is_memory_known(spec: JobSpec) -> bool:
    """Return whether the memory of the job's model is known without a trace."""
    request = read_model_request(spec)
    if request.freezes:
        return False
    return find_rank_profile(request, RankShare(precision=spec.precision)) is not None


def _find_traced_profile(
    profiles: tuple[TracedProfile, ...], share: RankShare, sequence_length: int
) -> ModelProfile | None:
    """Return the traced profile with the shortest sample length that is at least `sequence_length`;
    None without one.

    A trace on this kind of device (CUDA or not) is preferred.
    """
    fitting = [
        candidate
        for candidate in profiles
        if (candidate.profile.precision, candidate.autocast) == (share.precision, share.autocast)
        and candidate.sequence_length >= sequence_length
    ]
    best = min(
        fitting,
        key=lambda candidate: (candidate.cuda is not share.cuda, candidate.sequence_length),
        default=None,
    )
    return best.profile if best else None


def _make_declared_profile(
    request: ModelRequest, declared: DeclaredProfile, rank_share: RankShare
) -> ModelProfile:
    """Return the profile that the user declares, as `layers` equal parts and one part for the
    remainder.

    Of the bytes that a transformer layer saves, 24 of 34 are cut by tensor parallelism (Korthikanti
    et al. 2022, arXiv:2205.05198, section 4.1). A layer's output is not.
    """
    tp = rank_share.tensor_parallel
    stretch = 1.0
    if rank_share.sequence_length and request.own_length:
        stretch = rank_share.sequence_length / request.own_length
    is_lower = request.precision is Precision.FP32 and rank_share.precision is not Precision.FP32
    share = LOW_SHARE if is_lower else 1.0
    checkpointed = declared.checkpointed_per_sample
    chosen = declared.selective_per_sample
    saved_bytes = round(declared.activations_per_sample * stretch * share * (10 + 24 / tp) / 34)
    checkpointed_bytes = min(
        saved_bytes, saved_bytes if checkpointed is None else round(checkpointed * stretch * share)
    )
    selective_bytes = None if chosen is None else min(saved_bytes, round(chosen * stretch * share))
    layers = declared.layers
    parameters = -(-declared.parameters // tp)

    flops = declared.forward_flops_per_sample
    layer = Segment(
        name="layer",
        count=layers,
        parameters=parameters // layers,
        saved_bytes=saved_bytes // layers,
        checkpointed_bytes=checkpointed_bytes // layers,
        transient_bytes=0,
        forward_flops=(2.0 * declared.parameters if flops is None else flops)
        * stretch
        / layers
        / tp,
        largest_parameter=parameters // layers,
        selective_bytes=None if selective_bytes is None else selective_bytes // layers,
    )
    rest_bytes = saved_bytes % layers
    rest = replace(
        layer,
        name="rest",
        count=1,
        parameters=parameters % layers,
        saved_bytes=rest_bytes,
        checkpointed_bytes=min(rest_bytes, checkpointed_bytes % layers),
        forward_flops=0.0,
        largest_parameter=parameters % layers,
        selective_bytes=rest_bytes,
    )
    has_seconds = not request.is_script or bool(request.speeds) or flops is not None
    return ModelProfile(
        family=request.family_name,
        precision=rank_share.precision,
        source=Source.DECLARED if has_seconds else Source.DECLARED_MEMORY,
        segments=(rest, layer),
        workspace_bytes=declared.workspace,
        tensor_parallel=tp,
    )


@lru_cache(maxsize=1024)
def make_decoder_profile(
    spec: DecoderSpec | DecoderShape,
    family: str,
    precision: Precision,
    sequence_length: int,
    tp: int,
    autocast: bool,
    is_cuda: bool = False,
    sequence_parallel: int = 1,
    cp: int = 1,
) -> ModelProfile:
    """Return the closed form of `training/models/decoder.py` with `cross_entropy.py`; bytes are per sample.

    Coefficients follow from the tensors that autograd saves. Each was measured as a slope, by counting live storages of
    one layer on a CPU (torch 2.13.0, 2026-11). They agree with Korthikanti et al. 2022 (arXiv:2205.05198) for flash
    attention. In fp32 a layer keeps the inputs of its seven projections, norms with their intermediates, both factors
    of the gate, queries, keys, values, output and log-sum-exp of the attention. Under autocast the residual stream and
    the norms stay fp32, and every weight matrix is kept once more in low precision (`cast_bytes`). Where the weights
    themselves are cast, only the norms work in fp32. Tensor parallelism splits heads, feed-forward and vocabulary
    (Shoeybi et al. 2019, arXiv:1909.08053, section 3). Over `sequence_parallel` ranks it also spreads
    the tokens of norms and residual stream (training/engines/sequence_parallel.py). Over `cp` ranks each
    sample's tokens are split, and a rank attends to all of them with its share of the heads
    (training/contract/context.py). Bytes moved by operators were
    counted on meta tensors, a norm as CUDA's one kernel (2026-11-26). They are norms, rotation, gate, residual stream
    and their gradients, and under autocast the casts of what goes into products.
    """
    s = sequence_length // cp
    h = spec.hidden_size
    d = spec.head_dim
    f = spec.intermediate_size // tp
    v = spec.vocab_size // tp
    n = spec.num_attention_heads // tp
    q = n * d
    kv = spec.kv_heads * d // tp
    stream_width = h / sequence_parallel  # of the residual stream, per token of the sample
    low = precision is not Precision.FP32
    width = 2 if low else 4  # of what matrix products return
    stream = 2 if low and not autocast else 4  # of the residual stream
    matrices = 2 * h * q + 2 * h * kv + 3 * h * f
    # Norms with the inputs of the projections behind them. CUDA's norm is one kernel, which keeps
    # its input alone.
    norms = {(False, 4): 24, (True, 4): 26, (True, 2): 20}[low, stream]
    if is_cuda:
        norms -= 12 if stream == 2 else 8
    casts = 2 * matrices
    if (
        sequence_parallel > 1
    ):  # one cast is gathered for all projections, and theirs are made again in the backward pass
        if low and stream == 4:
            norms -= 6
        casts = 0
    saved = norms * stream_width + width * (2 * q + 2 * kv + 4 * f) + 4 * n + 8 / sequence_parallel
    selective = stream * stream_width + width * (2 * stream_width + 2 * q + 2 * kv + 2 * f) + 4 * n
    if spec.dropout:
        # masks, which a CPU has in the type of the input
        saved += 2 * (1 if is_cuda else width) * stream_width
    # of the residual stream, forward and backward
    moved = (66, 142) if low and autocast else (10 * width, 25 * width)
    again = max(1, cp * tp // spec.kv_heads)  # ranks that have the same key-value head
    if cp > 1:  # attention's output comes back in another tensor
        saved += width * (q + 2 * (again - 1) * kv)
    shared = v * h if spec.tie_word_embeddings else 0
    recomputed = 2 * width * f
    layer = Segment(
        name="layer",
        count=spec.num_hidden_layers,
        parameters=matrices + 2 * h,
        saved_bytes=round(s * saved),
        checkpointed_bytes=round(s * stream * stream_width),
        selective_bytes=round(s * selective),
        selective_transient_bytes=round(
            s * (recomputed + (2 if low and autocast else 4) * stream_width)
        ),
        transient_bytes=s * recomputed,
        forward_flops=s
        * (2.0 * matrices + 2.0 * sequence_length * q),  # causal attention: half of 4 s^2 q
        cast_bytes=(casts + 8 * s * d) if low and autocast else 0,
        largest_parameter=h * max(f, q),
        waiting_gradients=shared,
        factored=2 * (q + h) + 2 * (kv + h) + 3 * (f + h) + 2 * h,
        matmuls=((s, h, q), (s, h, kv), (s, h, kv), (s, q, h), (s, h, f), (s, h, f), (s, f, h)),
        tensors=(h * f, h * f, h * f, h, h * q, h * kv, h * kv, h * q, h),
        arrivals=(
            BackwardPeak(h * f, h * f, 0),
            BackwardPeak(3 * h * f, h * f, s * width * (h - 2 * f)),
            BackwardPeak(matrices + 2 * h, h * q, -s * (4 * width * f + stream * h)),
        ),
        peaks=_list_gathered_peaks(s * width, h, f, stream_width) if sequence_parallel > 1 else (),
        exchanged_bytes=s * width * (2 * q + 2 * again * kv) if cp > 1 else 0,
        forward_moved_bytes=round(s * (moved[0] * stream_width + width * (10 * (q + kv) + 5 * f))),
        backward_moved_bytes=round(s * (moved[1] * stream_width + width * (10 * (q + kv) + 9 * f))),
    )
    return ModelProfile(
        family=family,
        precision=precision,
        source=Source.CLOSED_FORM,
        segments=(
            _make_embedding_segment(
                s,
                h,
                v,
                stream_bytes=stream,
                is_tied=spec.tie_word_embeddings,
                sequence_parallel=sequence_parallel,
            ),
            layer,
            _make_head_segment(
                s,
                h,
                v,
                is_low_precision=low,
                stream_bytes=stream,
                is_tied=spec.tie_word_embeddings,
                sequence_parallel=sequence_parallel,
                is_cuda=is_cuda,
            ),
        ),
        workspace_bytes=8 * s * d,  # rotary tables
        tensor_parallel=tp,
        sequence_parallel=sequence_parallel,
        context_parallel=cp,
        updated_before_largest=_compute_updated_before_largest(h * f, h * v),
    )


def _list_gathered_peaks(
    value_bytes: int, hidden_size: int, feed_forward_size: int, stream_bytes: float
) -> tuple[BackwardPeak, ...]:
    """Return the memory peaks in the backward pass of a layer that gathers its tokens for its
    matrices.

    `value_bytes` are the bytes of one value for every token of a sample. The last matrix gathers
    the gradient of its output; or the product before it has gradients of both factors. Then two
    matrices read the input, which is gathered again, and their gradients for it add up. What
    selective checkpointing kept of the layer's output is still there. (Which of both has the most
    was counted on two and four gloo ranks of torch 2.13, 2026-11.)
    """
    of_last = max(hidden_size + feed_forward_size, 2 * feed_forward_size) + stream_bytes
    of_first = (
        max(2 * hidden_size - feed_forward_size, 3 * (hidden_size - feed_forward_size))
        + stream_bytes
    )
    last = BackwardPeak(
        hidden_size * feed_forward_size,
        hidden_size * feed_forward_size,
        round(value_bytes * of_last),
    )
    first = BackwardPeak(
        3 * hidden_size * feed_forward_size,
        hidden_size * feed_forward_size,
        round(value_bytes * of_first),
    )
    return (first,) if of_first >= of_last else (last, first)


def add_all_logits(profile: ModelProfile, vocab_size: int, sequence_length: int) -> ModelProfile:
    """Return the profile with a plain loss that holds all logits, as scripts have it: 12 bytes per
    logit.
    """
    *layers, head = profile.segments
    logits = sequence_length * vocab_size
    saved_bytes = head.saved_bytes + 4 * logits
    whole = replace(
        head,
        saved_bytes=saved_bytes,
        checkpointed_bytes=saved_bytes,
        selective_bytes=saved_bytes,
        transient_bytes=head.transient_bytes + 8 * logits,
        selective_transient_bytes=head.selective_transient_bytes + 8 * logits,
        chunks=None,
    )
    return replace(profile, segments=(*layers, whole))


def _compute_updated_before_largest(matrix_elements: int, table_elements: int) -> int:
    """Return `ModelProfile.updated_before_largest`: a feed-forward matrix is followed by another, a
    table by a norm.
    """
    return max(2 * table_elements, 3 * matrix_elements) - 2 * max(table_elements, matrix_elements)


def _make_embedding_segment(
    sequence_length: int,
    hidden_size: int,
    vocab_size: int,
    *,
    stream_bytes: int,
    is_tied: bool,
    sequence_parallel: int,
) -> Segment:
    """Return the segment of the embedding: its output, tokens and labels, and in backward the
    output's gradient.

    Over several `sequence_parallel` ranks there are two such gradients of all tokens: one as it
    came, and one without the rows of other ranks.
    """
    saved = round(sequence_length * (stream_bytes * hidden_size / sequence_parallel + 16))
    gradient = sequence_length * stream_bytes * hidden_size * (1 if sequence_parallel == 1 else 2)
    return Segment(
        name="embedding",
        count=1,
        parameters=vocab_size * hidden_size,
        saved_bytes=saved,
        checkpointed_bytes=saved,
        selective_bytes=saved,
        selective_transient_bytes=gradient,
        transient_bytes=gradient,
        forward_flops=0.0,
        largest_parameter=vocab_size * hidden_size,
        summed_gradients=3 * vocab_size * hidden_size
        if is_tied
        else 0,  # of head and embedding, and their sum
        looked_up=vocab_size * hidden_size,
        factored=vocab_size + hidden_size,
        tensors=(vocab_size * hidden_size,),
        peaks=(BackwardPeak(0, 0, gradient),) if is_tied else (),
    )


def _make_head_segment(
    sequence_length: int,
    hidden_size: int,
    vocab_size: int,
    *,
    is_low_precision: bool,
    stream_bytes: int,
    is_tied: bool,
    sequence_parallel: int,
    is_cuda: bool,
) -> Segment:
    """Return the segment of final norm and chunked loss; bytes were measured as slopes, as those of
    a layer.

    On CUDA the norm has no intermediates. The weight's gradient is made in fp32, in the forward
    pass; engines count it in their own width. Where the head shares the embedding's weight, its
    gradient waits for the embedding's. In low precision the loss has logits twice for a moment, and
    the product that is added to the gradient beside them. Over `sequence_parallel` ranks a rank has
    the norm of its own tokens, and gathers the tokens of a chunk.
    """
    stream_width = hidden_size / sequence_parallel
    saved_width, passed = (10, 14) if stream_bytes == 2 else (8, 12)
    if is_cuda:
        saved_width = stream_bytes
        passed = 2 * stream_bytes
    saved = round(sequence_length * (saved_width * stream_width + 4 / sequence_parallel))
    normed = round(sequence_length * passed * stream_width)
    if not is_low_precision:
        peaks: tuple[tuple[int, int], ...] = ((4 * vocab_size + 4 * hidden_size, 0),)
    elif stream_bytes == 4:
        peaks = (
            (6 * vocab_size + 2 * hidden_size + 8, 2 * vocab_size * hidden_size),
            (2 * vocab_size + 2 * hidden_size, 4 * vocab_size * hidden_size),
        )
    else:
        peaks = (
            (6 * vocab_size + 8, 2 * vocab_size * hidden_size),
            (2 * vocab_size, 4 * vocab_size * hidden_size),
        )
    if sequence_parallel > 1:
        width = 2 if is_low_precision else 4
        gathered = round(
            (1 if stream_bytes == width else 1 / sequence_parallel) * width * hidden_size
        )
        products = (
            width if stream_bytes > width else 0
        ) + 2 * stream_bytes  # in the stream's type, with the copy that gloo sums
        summed = (
            width * (vocab_size + hidden_size) + products * hidden_size,
            2 * vocab_size * hidden_size if is_low_precision else 0,
        )
        peaks = (*((per_token + gathered, fixed) for per_token, fixed in peaks), summed)
    made = 0 if is_tied else vocab_size * hidden_size
    return Segment(
        name="head",
        count=1,
        parameters=hidden_size + made,
        saved_bytes=saved,
        checkpointed_bytes=saved,
        selective_bytes=saved,
        selective_transient_bytes=normed,
        transient_bytes=normed,
        forward_flops=2.0 * sequence_length * vocab_size * hidden_size,
        largest_parameter=vocab_size * hidden_size,
        waiting_gradients=vocab_size * hidden_size - made,
        factored=hidden_size if is_tied else vocab_size + 2 * hidden_size,
        tensors=(hidden_size,) if is_tied else (vocab_size * hidden_size, hidden_size),
        matmuls=((sequence_length, hidden_size, vocab_size),),
        chunks=LossChunks(
            chunk_tokens=CHUNK_TOKENS,
            sample_tokens=sequence_length,
            per_sample_bytes=round(sequence_length * stream_bytes * stream_width),
            peaks=peaks,
            gradients=made,
        ),
    )
