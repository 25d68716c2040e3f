"""What layers of somebody else's training keep and work with, in bytes.

They are counted here once for all foreign engines (Korthikanti et al. 2022, arXiv:2205.05198, section 4, for the GPT
kind; the counts of memory/profiles.py for the Llama kind, whose storages were measured one by one); how an engine cuts
and gathers them is in the module of that engine.
"""

from __future__ import annotations

from orchestrator.memory.foreign.crossed import t5_layer_bytes
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import held_bytes
from orchestrator.memory.foreign.mixtures import mixture_layer
from orchestrator.memory.foreign.training import Training, adapted_projections, copies, layer_held, layer_matrices
from orchestrator.memory.hf_profiles import DecoderShape
from orchestrator.memory.profiles import decoder_profile
from orchestrator.specs.plan import ActivationCheckpointing, Precision

KEPT = "saved activations"
WORKING = "activations at work"  # logits and their gradients, or those inside of one layer


def saved_bytes(training: Training) -> int:
    """What one layer keeps of a micro-batch from forward to backward, on one tensor-parallel rank."""
    if is_t5(training):
        return _t5_bytes(training)
    shape, cut = training.shape, training.tp
    per_token = _gated_bytes(training) if shape.gated else _gpt_bytes(training)
    if shape.experts:
        per_token += _experts_bytes(training)
    if training.megatron.keeps_gathered:  # before q, k and v, and before the feed-forward block
        per_token += 2 * training.width * shape.hidden * (cut - 1) // cut
    if shape.qk_norm:  # what goes in; without a fused kernel in fp32 as well
        copy = 4 if training.low_precision and not training.kernels.fuses_norms else 0
        per_token += (training.width + copy) * (shape.query + shape.key_value) // cut
    if training.kernels.joint_projection:
        per_token += _joint_bytes(training)
    elif training.kernels.copies_groups or not (training.kernels.flash or training.framework.is_megatron):
        # keys and values of groups, copied for every head (transformers' repeat_kv)
        per_token += 2 * training.width * (shape.query - shape.key_value) // cut
    if training.adapters.rank:
        per_token += _adapted_bytes(training)
    if training.megatron.fp8:
        # transformer_engine/pytorch/module/linear.py: a product keeps its input in 8 bits; attention keeps its result
        per_token -= 2 * shape.hidden // _whole(training) + (shape.ffn - shape.query) // cut
    return training.layer_tokens * per_token + _crossing_bytes(training) + score_bytes(training)


def _whole(training: Training) -> int:
    """Ranks over which what tensor parallelism leaves whole is cut after all, along the sequence."""
    return training.tp if training.sequence_parallel else 1


def _gpt_bytes(training: Training) -> int:
    """Per token of a layer with LayerNorms and two feed-forward products (arXiv:2205.05198, section 4.1): 2h and 4h of
    q, k, v and their input, 2h of the output's; 2f twice; the norms' inputs 4h."""
    shape, width, h = training.shape, training.width, training.shape.hidden
    inside = 4 * width * h + 2 * width * shape.busy_ffn  # q, k, v, output; before and behind the activation
    if training.kernels.composed_gelu:
        # transformers/activations.py, NewGELUActivation: tanh, one more than it, half of the input; autocast
        # computes the power and what follows in fp32 (aten/src/ATen/autocast_mode.h)
        autocasts = training.autocasts and training.framework is Framework.PLAIN
        inside += 3 * (4 if autocasts else width) * shape.busy_ffn
    if training.kernels.wide_queries and training.low_precision and not training.autocasts:
        inside += 2 * (4 - width) * h  # q and k
    beside = 2 * width * h + 2 * training.stream * h  # inputs of both blocks; of both norms
    beside += 2 * h if shape.dropout else 0  # one byte per element of a mask
    return inside // training.tp + beside // _whole(training)


def _gated_bytes(training: Training) -> int:
    """Per token of a layer with RMSNorms and three feed-forward products, as `_gated_segment` has it, but cut."""
    shape, width, cut = training.shape, training.width, training.tp
    profile = _gated_segment(training)
    if shape.experts:  # what goes into experts and comes out again is cut only with the tokens
        profile -= 2 * width * shape.chosen * shape.hidden
    per_token = profile // cut + (0 if training.sequence_parallel else _norm_bytes(training) * (cut - 1) // cut)
    if training.kernels.fuses_norms:
        # one kernel keeps a norm's input, without an fp32 copy, and the product behind it its result
        per_token -= (_norm_bytes(training) - 4 * width * shape.hidden) // _whole(training)
    if training.kernels.fused:
        per_token -= width * shape.busy_ffn // cut
    if training.kernels.fuses_adapters:
        per_token -= width * shape.busy_ffn // cut
    return per_token


def _experts_bytes(training: Training) -> int:
    """Per token: what goes into its experts and comes out of them, beside what these keep inside."""
    if training.framework is not Framework.MEGATRON:
        return 2 * _copy_bytes(training)
    # core/transformer/moe/experts.py multiplies with a token's weights before the second product, not behind it; only
    # behind a gated activation one kernel does so, and else what the activation returns is kept as well
    shape = training.shape
    returned = 0 if shape.gated else training.width * shape.chosen * shape.ffn // training.tp
    return _copy_bytes(training) + returned


def _t5_bytes(training: Training) -> int:
    """Of a layer of transformers' T5, in the mean of both sides."""
    lengths = training.sequence_length, training.target_length or training.sequence_length
    per_sample = t5_layer_bytes(training.shape, lengths, low=training.low_precision, autocasts=training.autocasts)
    adapted = training.layer_tokens * _adapted_bytes(training) if training.adapters.rank else 0
    return training.micro_batch_size * per_sample + adapted


def _copy_bytes(training: Training) -> int:
    """Of a token: what goes into its experts. Ranks that cut experts have all tokens of each other there."""
    shape = training.shape
    return training.width * shape.chosen * shape.hidden * training.expert_tp // training.tp


def _crossing_bytes(training: Training) -> int:
    """What a layer keeps in the mean as some attend to another sequence: queries, output and norm, and of an encoder's
    tokens keys and values (a text that music is made to is short)."""
    shape, width = training.shape, training.width
    beside = width + training.stream + (1 if shape.dropout else 0)
    kept = training.target_tokens * (2 * width // training.tp + beside // _whole(training))
    if shape.crossed < shape.layers:
        kept += training.tokens * 2 * width // training.tp
    return kept * shape.hidden * shape.crossed // shape.layers


def is_t5(training: Training) -> bool:
    """Whether layers are transformers' T5, whose scores are whole; Megatron's has learned positions instead."""
    return training.shape.crossed > 0 and training.shape.flash is False


def _joint_bytes(training: Training) -> int:
    """Per token: what is kept of the product that q, k and v are cut out of (litgpt/model.py, CausalSelfAttention).

    v is a view of it and holds all of it, though q and k were rotated into new tensors; keys and values of groups are
    copied for every head instead.
    """
    shape = training.shape
    if shape.key_value == shape.query:
        return training.width * (shape.query + shape.key_value)
    return training.width * 2 * (shape.query - shape.key_value)


def _adapted_bytes(training: Training) -> int:
    """Per token: what a layer keeps more, or less, than if all of it were trained (memory/adapters.py).

    A frozen norm does not keep what its weight multiplies, as none does that is one kernel, nor a frozen projection its
    input. Adapters of one input share it, but fp32 ones cast what is not fp32, each for itself, and dropout makes a
    copy with a mask of one byte. Attention keeps its own result.
    """
    shape, width = training.shape, training.width
    adapted = adapted_projections(training)
    times = {name: copies(training, name)[1] for name in shape.projections}
    kept = width * training.adapters.rank * sum(times[name] for name in adapted)
    if shape.gated and not training.kernels.fuses_norms:
        kept -= 2 * training.stream * shape.hidden
    if (
        shape.experts and not training.adapters.keeps_quantised_inputs
    ):  # the router's, and what the shared expert takes in
        kept -= width * (shape.hidden + shape.shared_ffn)
    casts = training.adapters.fp32 and training.low_precision
    alone = (casts or training.adapters.dropout) and not training.kernels.fuses_adapters
    for names in (("q", "k", "v"), ("up", "gate"), ("down",)):
        inputs = shape.projections[names[0]][0] * times[names[0]]
        shared = not alone and any(name in adapted for name in names)
        kept -= 0 if shared or training.adapters.keeps_quantised_inputs else width * inputs
    if alone:
        each = width + (1 if training.adapters.dropout else 0)
        kept += each * sum(inputs * times[name] for name, (inputs, _) in adapted.items())
    if training.adapters.keeps_outputs:
        kept += 2 * width * sum(outputs * times[name] for name, (_, outputs) in adapted.items())
    return kept


def _gated_segment(training: Training, *, selective: bool = False) -> int:
    """Per token: the count of memory/profiles.py, from where the low-precision norm without an fp32 copy differs."""
    shape = training.shape
    spec = DecoderShape(
        vocab_size=shape.vocab,
        hidden_size=shape.hidden,
        intermediate_size=0 if shape.experts else shape.ffn,
        num_hidden_layers=shape.layers,
        num_attention_heads=shape.heads,
        kv_heads=shape.kv_heads,
        head_dim=shape.head_dim,
        tie_word_embeddings=shape.tied,
    )
    precision = Precision.BF16 if training.low_precision else Precision.FP32
    profile = decoder_profile(spec, "foreign", precision, 1, 1, training.stream == 4)
    layer = mixture_layer(profile, shape) if shape.experts else profile.segments[1]
    if selective:
        return layer.selective_bytes or layer.saved_bytes
    # transformers' norms keep their input in fp32 alone (hf_profiles.as_transformers)
    return layer.saved_bytes - (4 * shape.hidden if precision is Precision.BF16 and training.stream == 2 else 0)


def _norm_bytes(training: Training) -> int:
    """Per token, of `_gated_segment`: both norms and the inputs of the projections behind them."""
    if not training.low_precision:
        return 24 * training.shape.hidden
    return (26 if training.stream == 4 else 16) * training.shape.hidden


def score_bytes(training: Training) -> int:
    """Attention that holds its scores: 5 a s^2 b with dropout (section 4.1), of which the mask is one byte.

    transformers computes the softmax in fp32 and casts it back (modeling_llama.py, eager_attention_forward), so does
    autocast (aten/src/ATen/autocast_mode.h, its fp32 list).
    """
    if training.kernels.flash or is_t5(training):
        return 0
    shape = training.shape
    source, target = training.sequence_length, training.target_length or training.sequence_length
    decoders = shape.crossed
    squares = (shape.layers - decoders) * source**2 + decoders * target**2
    if decoders < shape.layers:
        squares += decoders * source * target
    each = _kept_score(training) + _softmax_input(training) + (training.width if shape.capped else 0)
    return each * shape.heads * training.micro_batch_size * squares // shape.layers // training.tp


def _kept_score(training: Training) -> int:
    """Bytes that are kept of one score."""
    shape, width = training.shape, training.width
    if training.kernels.own_score_bytes and training.low_precision and not training.autocasts:
        return training.kernels.own_score_bytes
    if shape.gated and training.low_precision:
        return width + 4
    mask = 1 if shape.dropout else 0
    if training.autocasts:
        return width + 4 + mask
    return 2 * width + mask if shape.dropout else width


def _softmax_input(training: Training) -> int:
    """Bytes of one score that torch's softmax kept beside its result until 1.11; Megatron has a kernel of its own."""
    if not training.platform.before_torch_1_11 or training.framework.is_megatron:
        return 0
    wide = training.autocasts or (training.shape.gated and training.low_precision)
    return 4 if wide else training.width


def _working_score(training: Training) -> int:
    """Bytes of one score above what is kept of it, as attention goes backward.

    The softmax's result is there, its gradient, the product of both and what it returns (aten/src/ATen/native/cuda/
    SoftMax.cu, softmax_backward_cuda_out). Megatron's kernel works in place (megatron/fused_kernels/
    scaled_masked_softmax_cuda.cu).
    """
    width = training.width
    if is_t5(training):
        return 4
    if training.framework.is_megatron:
        return 2 * width
    casts = training.shape.gated or training.kernels.own_score_bytes >= width + 4
    wide = training.autocasts or (casts and training.low_precision)
    return max(2 * width, 4 * (4 if wide else width) - _kept_score(training))


def transient_bytes(training: Training) -> int:
    """Above what is saved, at the peak of a layer's backward pass: gradients inside of the feed-forward part, or later
    those of scores, when what that part kept is gone.

    Liger's kernel (liger_kernel/ops/swiglu.py) and those of Unsloth write two of the three over their inputs.
    """
    shape, width = training.shape, training.width
    products = (3 if shape.gated else 2) if not training.kernels.in_place else 1
    inside = products * width * shape.busy_ffn // training.tp
    if shape.experts:  # or those of what experts return, before and behind their weights (memory/experts.py, `_peaks`)
        inside = max(inside, 3 * _copy_bytes(training))
    each = 0 if training.kernels.flash else _working_score(training)
    scores = each * shape.heads * training.sequence_length // training.tp - _feed_forward_bytes(training)
    return training.tokens * (max(inside, scores) + 2 * training.stream * shape.hidden)


def _feed_forward_bytes(training: Training) -> int:
    """Per token: what the feed-forward part keeps at its inner width, as `_gpt_bytes` and `_gated_bytes` have it."""
    shape, kernels = training.shape, training.kernels
    if shape.experts or is_t5(training):
        return 0
    times = 4 - kernels.fused - kernels.fuses_adapters if shape.gated else 2
    if training.adapters.rank and "down" not in adapted_projections(training):
        times -= 1
    return times * training.width * shape.ffn // training.tp


def boundary_bytes(training: Training) -> int:
    """What goes into a layer of one micro-batch, in the mean: what the one before hands on, or the embedding."""
    layers, adapters = training.shape.layers, training.adapters
    narrow = training.stream - training.weight_bytes if adapters.norms_fp32 and not adapters.ends_fp32 else 0
    width = training.stream * layers - narrow
    return training.layer_tokens * width * training.shape.hidden // layers // _whole(training)


def kept_bytes(training: Training) -> int:
    """What one layer keeps of a micro-batch under the training's checkpointing."""
    if training.checkpointing is ActivationCheckpointing.FULL:
        return 0 if training.offload_activations else boundary_bytes(training) // training.layers_made_again
    if training.checkpointing is ActivationCheckpointing.SELECTIVE:
        # products and attention are kept (memory/profiles.py); Megatron's recomputes the scores alone
        products = saved_bytes(training) - score_bytes(training)
        if training.alternate_products:
            return min(products, training.tokens * _alternate_bytes(training) // training.tp)
        if training.shape.gated and not training.framework.is_megatron:
            products = min(products, training.tokens * _gated_segment(training, selective=True) // training.tp)
        return products
    return saved_bytes(training)


def hidden_bytes(training: Training) -> int:
    """Inputs of one layer's products with quantised matrices, of a micro-batch, that checkpointing does not free."""
    if not training.adapters.hides_quantised_inputs or training.checkpointing is not ActivationCheckpointing.FULL:
        return 0
    shape = training.shape
    return training.tokens * training.width * (2 * shape.hidden + shape.query + shape.busy_ffn)


def _alternate_bytes(training: Training) -> int:
    """Per token: its input, what attention returns, and of the products every second, from the first on.

    torchtitan/distributed/activation_checkpoint.py, `mm_count`; the products come in the order q, k, v, o, gate, up,
    down.
    """
    shape = training.shape
    products = shape.query + shape.key_value + (0 if shape.experts else shape.ffn + shape.hidden)
    return training.stream * shape.hidden + training.width * (products + shape.query) + 4 * shape.heads


def working_bytes(training: Training) -> int:
    """What the backward pass of one layer has above what all layers keep."""
    full = training.checkpointing is ActivationCheckpointing.FULL
    again = training.layers_made_again * saved_bytes(training) if full else 0
    if training.checkpointing is ActivationCheckpointing.SELECTIVE:
        again = saved_bytes(training) - kept_bytes(training)
    dequantised = 0
    if training.adapters.base_bytes is not None:
        dequantised = 2 * max(inputs * outputs for inputs, outputs in training.shape.projections.values())
    # FSDP gathers weights in the type that autocast wants
    sharded = training.framework.is_fsdp and not training.fsdp.gathers_fp32
    casts = 0 if sharded or training.checkpointing is NONE or not training.autocasts else 2 * cast_elements(training)
    return again + transient_bytes(training) + dequantised + casts + held_bytes(training)


NONE = ActivationCheckpointing.NONE


def cast_bytes(training: Training) -> int:
    """Low-precision copies of one layer's fp32 matrices that are there from forward to backward.

    Autocast keeps those of what is trained (aten/src/ATen/autocast_mode.cpp, cached_cast), backward those of the rest.
    """
    if not training.autocasts or training.checkpointing is not NONE or training.framework is Framework.FSDP1:
        return 0
    return 2 * cast_elements(training)


def cast_elements(training: Training) -> int:
    """Elements of one layer that autocast makes copies of."""
    held = layer_held(training).trained
    return held + layer_matrices(training) if training.adapters.rank else held
