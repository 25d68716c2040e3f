"""Somebody else's training, in the few words that decide its memory, and the bytes that its worst rank needs.

Layers and heads are counted here once for all foreign engines (Korthikanti et al. 2022, arXiv:2205.05198, section 4,
for the GPT kind; the counts of memory/profiles.py for the Llama kind, whose storages were measured one by one); how an
engine cuts and gathers them is in foreign_engines.py.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.memory.architectures import Architecture
from orchestrator.memory.crossed import t5_layer_bytes
from orchestrator.memory.hf_profiles import NF4_BYTES, DecoderShape
from orchestrator.memory.mixtures import mixture_layer
from orchestrator.memory.profiles import decoder_profile
from orchestrator.specs.plan import ActivationCheckpointing, Precision

# DeepSpeed: reduce_bucket_size and allgather_bucket_size, in elements (deepspeed/runtime/zero/config.py).
BUCKET_ELEMENTS = 500_000_000


class Framework(StrEnum):
    """What cuts, gathers and reduces."""

    MEGATRON = "Megatron-LM"
    MEGATRON_DEEPSPEED = "Megatron-DeepSpeed"
    FSDP1 = "FSDP1"
    FSDP2 = "FSDP2"
    DEEPSPEED = "DeepSpeed"
    DEVICE_MAP = "device_map"  # layers over devices, one after the other
    PLAIN = "plain"  # one device, or DistributedDataParallel


class Loss(StrEnum):
    """How the logits are turned into a loss."""

    PLAIN = "plain"  # fp32 logits of all tokens
    IN_PLACE = "in place"  # low-precision logits of all tokens, whose gradient takes their place
    CHUNKED = "chunked"  # low-precision logits of all tokens, fp32 of a chunk
    SHIFTED = "shifted"  # fp32 logits, and their copy without the last token, whose gradient takes its place
    COMPILED = "compiled"  # low-precision logits and gradients of all tokens
    LISTED = "listed"  # fp32 logits and log-softmax of all tokens, gradients of a chunk
    FUSED = "fused"  # logits of a chunk
    LABELS = "labels"  # the plain one, but that labels are shifted instead of logits
    LOW = "low precision"  # as the plain one, but none of them wide


class Rule(StrEnum):
    """What the optimizer keeps of a trained parameter."""

    ADAM = "Adam"
    ADAM_8BIT = "8-bit Adam"
    SGD = "SGD"
    MOMENTUM = "SGD with momentum"
    ADAFACTOR = "Adafactor"


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training as its author describes it. `shards` says over how many ranks which states are cut."""

    shape: Architecture
    framework: Framework
    micro_batch_size: int
    sequence_length: int
    target_length: int = 0  # of what a decoder behind an encoder writes; 0: as long as what is read
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1  # ranks over which the experts of a layer are spread
    expert_tp: int = 1  # ranks over which each of them is cut
    zero_stage: int = 0
    gradient_accumulation_steps: int = 1
    virtual_stages: int = 1
    stage: int | None = None  # the pipeline stage that was measured; None: the worst
    sequence_parallel: bool = False
    keeps_gathered: bool = False  # what sequence parallelism gathers before a product stays for the backward pass
    low_precision: bool = True  # bf16 or fp16 products
    autocasts: bool = False  # with weights that stay fp32
    masters: bool = False  # an fp32 copy of low-precision weights
    fp32_gradients: bool = False  # gradients are added up in fp32 beside those of the backward pass
    reduces_fp32: bool = False  # FSDP: gradients travel in fp32
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    rule: Rule = Rule.ADAM
    step_in_backward: bool = False  # gradients are used up as they come
    paged: bool = False  # optimizer states may live on the host
    low_states: bool = False  # the optimizer's states have the width of low-precision weights
    lora_rank: int = 0  # 0: all is trained
    lora_targets: tuple[str, ...] = ()  # () with a rank: all projections
    lora_fp32: bool = True
    lora_dropout: bool = False
    keeps_adapted_outputs: bool = False  # DoRA: what base and adapter return, before it is scaled
    trains_ends: bool = False  # beside adapters, copies of embedding and head (peft: modules_to_save)
    keeps_quantised_inputs: bool = False  # a product with a quantised matrix keeps its input
    base_bytes: float | None = None  # per element of the frozen matrices; None: as wide as the weights
    ends_fp32: bool = False  # the frozen embedding and head were cast up
    quantises_head: bool = False  # as the other matrices
    joint_projection: bool = False  # q, k and v are cut out of one product
    foreach: bool = False  # torch.optim's default on CUDA: one temporary of everything that is trained
    lengths_vary: bool = False  # samples are not padded or packed to one length
    first_step: bool = False  # measured after the first step: what one leaves for the next is not there yet
    loss: Loss = Loss.PLAIN
    loss_chunks: int = 8
    flash: bool = True
    in_place: bool = False  # the gradients of what an activation takes in are written over it
    fuses_adapters: bool = False  # adapters share their input with the base, and the feed-forward product is made again
    fp8: bool = False  # products of Transformer Engine in 8 bits
    composed_gelu: bool = False  # of elementary operations, each of which keeps what it multiplies
    fused: bool = False  # torch.compile, Liger or Transformer Engine: elementwise intermediates are not kept
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False
    ends_apart: bool = False  # FSDP: embedding and head are units of their own
    frozen_gradients: bool = False  # FSDP: adapters share units with frozen weights, whose gradients exist with theirs
    holds_boundaries: bool = False  # FSDP1: frozen units hold what went into them, and its gradient, to the end
    unsynced: bool = False  # FSDP: gradients are whole until the last micro-batch of a step
    alternate_products: bool = False  # selective checkpointing keeps every second matrix product, not every one
    is_old: bool = False  # from before 2023: CUDA loads all modules at start, Megatron keeps fp32 copies of gradients
    on_volta: bool = False
    on_hopper: bool = False  # or later
    expandable_segments: bool = False
    bucket_elements: int = BUCKET_ELEMENTS  # of a reduction
    overlaps: bool = False  # DeepSpeed's stages 1 and 2: one bucket fills while another is reduced
    holds_gradients: bool = False  # on the device, though the optimizer's states are on the host

    @property
    def tokens(self) -> int:
        return self.micro_batch_size * self.sequence_length

    @property
    def target_tokens(self) -> int:
        """Tokens whose loss is taken."""
        return self.micro_batch_size * (self.target_length or self.sequence_length)

    @property
    def layer_tokens(self) -> int:
        """Tokens that a layer sees, in the mean of both sides."""
        layers, crossed = self.shape.layers, self.shape.crossed
        return (self.tokens * (layers - crossed) + self.target_tokens * crossed) // layers

    @property
    def width(self) -> int:
        """Bytes of an element that a matrix product returns."""
        return 2 if self.low_precision else 4

    @property
    def weight_bytes(self) -> int:
        """Bytes of an element of the weights in use."""
        return 4 if self.autocasts or not self.low_precision else 2

    @property
    def stream(self) -> int:
        """Bytes of an element of what a layer hands on: the type of the embedding when it is used."""
        if self.framework in (Framework.FSDP1, Framework.FSDP2):
            return self.width
        return 4 if self.ends_fp32 else self.weight_bytes

    @property
    def world_size(self) -> int:
        return self.dp * self.tp * self.pp


# --------------------------------------------------------------------------------------------------------- parameters


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """Elements of a part of a model that one rank has, and bytes of those that are not trained."""

    trained: int
    frozen_bytes: int

    def __add__(self, other: Held) -> Held:
        return Held(trained=self.trained + other.trained, frozen_bytes=self.frozen_bytes + other.frozen_bytes)

    def __mul__(self, count: int) -> Held:
        return Held(trained=self.trained * count, frozen_bytes=self.frozen_bytes * count)


def layer_held(training: Training) -> Held:
    """One layer on one tensor-parallel rank: matrices are cut, norms and the biases behind sums are not."""
    shape = training.shape
    matrices, vectors = layer_matrices(training), shape.layer_vectors
    if not training.lora_rank:
        return Held(trained=matrices + vectors, frozen_bytes=0)
    base = training.base_bytes if training.base_bytes is not None else float(training.weight_bytes)
    return Held(
        trained=adapter_parameters(training) // training.tp,
        frozen_bytes=round(base * matrices) + training.weight_bytes * vectors,
    )


def layer_matrices(training: Training) -> int:
    """Elements of one layer's matrices on one rank."""
    shape = training.shape
    return (shape.layer_matrices - shape.routed_matrices) // training.tp + routed_matrices(training)


def routed_matrices(training: Training) -> int:
    """Elements of one layer's experts on one rank."""
    return training.shape.routed_matrices // (training.ep * training.expert_tp)


def ends_held(training: Training, *, first: bool = True, last: bool = True) -> Held:
    """Embedding, head and what stands outside of the layers; a shared matrix is there once per rank that needs it."""
    shape = training.shape
    elements = 0
    if first:
        elements += shape.table // training.tp + shape.positions * shape.hidden
    if last:
        elements += (1 if shape.gated else 2) * shape.hidden
        if shape.causal and not (first and shape.tied):
            elements += shape.table // training.tp
    if not training.lora_rank:
        return Held(trained=elements, frozen_bytes=0)
    frozen_bytes = (4 if training.ends_fp32 else training.weight_bytes) * elements
    if training.quantises_head and training.base_bytes is not None and last and shape.causal:
        frozen_bytes -= round((training.weight_bytes - training.base_bytes) * shape.table)
    if not training.trains_ends:
        return Held(trained=0, frozen_bytes=frozen_bytes)
    copies = training.weight_bytes * elements  # have the type of the weights, adapters perhaps a wider one
    return Held(trained=copies // trained_width(training), frozen_bytes=frozen_bytes)


def trained_width(training: Training) -> int:
    """Bytes of an element of what is trained."""
    if training.lora_rank and training.framework is not Framework.DEEPSPEED:
        return 4 if training.lora_fp32 or not training.low_precision else 2
    return training.weight_bytes


def adapter_parameters(training: Training) -> int:
    """Elements of the adapters of one layer (Hu et al. 2021, arXiv:2106.09685): rank x (inputs + outputs) each."""
    return sum(
        training.lora_rank * (inputs + outputs) * _copies(training, name)[0]
        for name, (inputs, outputs) in adapted_projections(training).items()
    )


def adapted_projections(training: Training) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the projections that have adapters."""
    targets = training.lora_targets
    return {name: size for name, size in training.shape.projections.items() if not targets or name in targets}


def _copies(training: Training, name: str) -> tuple[int, int]:
    """How often a projection stands in a layer of a rank, and how often a token goes through it."""
    shape = training.shape
    routed = shape.experts and name in ("up", "gate", "down")
    return (shape.experts // training.ep, shape.chosen) if routed else (1, 1)


def base_bytes_of(bits: int, *, double: bool = True) -> float:
    """Bytes per element of a frozen matrix: int8 with a scale per row, or NF4, with fp32 scales of 64 if not double."""
    if bits == 8:
        return 1.0
    return NF4_BYTES if double else 0.5 + 4 / 64


# -------------------------------------------------------------------------------------------------------- activations


def saved_bytes(training: Training) -> int:
    """What one layer keeps of a micro-batch from forward to backward, on one tensor-parallel rank."""
    shape, t = training.shape, training.layer_tokens
    cut = training.tp
    whole = cut if training.sequence_parallel else 1
    if _is_t5(training):
        lengths = training.sequence_length, training.target_length or training.sequence_length
        per_sample = t5_layer_bytes(shape, lengths, low=training.low_precision, autocasts=training.autocasts)
        adapted = t * _adapted_bytes(training) if training.lora_rank else 0
        return training.micro_batch_size * per_sample + adapted
    if shape.gated:
        profile = _gated_layer(training)
        if shape.experts:  # what goes into experts and comes out again is cut only with the tokens
            profile += 2 * (_copy_bytes(training) * cut - training.width * shape.chosen * shape.hidden)
        per_token = profile // cut + (0 if training.sequence_parallel else _norm_bytes(training) * (cut - 1) // cut)
    else:
        width, h = training.width, shape.hidden
        # section 4.1: 2h and 4h of q, k, v and their input, 2h of the output's; 2f twice; the norms' inputs 4h
        inside = 4 * width * h + 2 * width * shape.busy_ffn  # q, k, v, output; before and behind the activation
        if training.composed_gelu:
            # transformers/activations.py, NewGELUActivation: tanh, one more than it, half of the input; autocast
            # computes the power and what follows in fp32 (aten/src/ATen/autocast_mode.h)
            autocasts = training.autocasts and training.framework is Framework.PLAIN
            inside += 3 * (4 if autocasts else width) * shape.busy_ffn
        beside = 2 * width * h + 2 * training.stream * h  # inputs of both blocks; of both norms
        beside += 2 * h if shape.dropout else 0  # one byte per element of a mask
        per_token = inside // cut + beside // whole + (2 * _copy_bytes(training) if shape.experts else 0)
    if training.keeps_gathered:  # before q, k and v, and before the feed-forward block
        per_token += 2 * training.width * shape.hidden * (cut - 1) // cut
    if shape.qk_norm:  # what goes in; without a fused kernel in fp32 as well
        normed = training.width if training.fused else training.width + (4 if training.low_precision else 0)
        per_token += normed * (shape.query + shape.key_value) // cut
    if training.joint_projection:
        per_token += _joint_bytes(training)
    if training.lora_rank:
        per_token += _adapted_bytes(training)
    if training.fused and shape.gated:
        # one kernel keeps a norm's input and its result, without fp32 copies; and not what silu returns
        per_token -= (_norm_bytes(training) - 4 * training.width * shape.hidden) // whole
        per_token -= training.width * shape.busy_ffn // cut
    if training.fuses_adapters and shape.gated:
        per_token -= training.width * shape.busy_ffn // cut
    if shape.experts and training.framework is Framework.MEGATRON:
        # core/transformer/moe/experts.py multiplies with a token's weights before the second product, not behind it
        per_token -= _copy_bytes(training)
    if training.fp8:
        # transformer_engine/pytorch/module/linear.py: a product keeps its input in 8 bits; attention keeps its result
        per_token -= 2 * shape.hidden // whole + (shape.ffn - shape.query) // cut
    return t * per_token + _crossing_bytes(training) + score_bytes(training)


def _copy_bytes(training: Training) -> int:
    """Of a token: what goes into its experts. Ranks that cut experts have all tokens of each other there."""
    shape = training.shape
    return training.width * shape.chosen * shape.hidden // (training.tp // training.expert_tp)


def _crossing_bytes(training: Training) -> int:
    """What a layer keeps in the mean as some attend to another sequence: queries, output and norm, and of an encoder's
    tokens keys and values (a text that music is made to is short)."""
    shape, width = training.shape, training.width
    beside = width + training.stream + (1 if shape.dropout else 0)
    whole = training.tp if training.sequence_parallel else 1
    kept = training.target_tokens * (2 * width // training.tp + beside // whole)
    if shape.crossed < shape.layers:
        kept += training.tokens * 2 * width // training.tp
    return kept * shape.hidden * shape.crossed // shape.layers


def _is_t5(training: Training) -> bool:
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
    """Per token: what a layer keeps more, or less, than if all of it were trained (memory/hf_profiles.py, `_adapted`).

    A frozen norm does not keep what its weight multiplies, nor a frozen projection its input. Adapters of one input
    share it, but fp32 ones cast it, each for itself, and dropout makes a copy with a mask of one byte. Attention keeps
    its own result.
    """
    shape, width = training.shape, training.width
    adapted = adapted_projections(training)
    times = {name: _copies(training, name)[1] for name in shape.projections}
    kept = width * training.lora_rank * sum(times[name] for name in adapted)
    if shape.gated:
        kept -= 2 * training.stream * shape.hidden
    if shape.experts and not training.keeps_quantised_inputs:  # the router's, and what the shared expert takes in
        kept -= width * (shape.hidden + shape.shared_ffn)
    alone = (training.lora_fp32 or training.lora_dropout) and not training.fuses_adapters
    for names in (("q", "k", "v"), ("up", "gate"), ("down",)):
        inputs = shape.projections[names[0]][0] * times[names[0]]
        shared = not alone and any(name in adapted for name in names)
        kept -= 0 if shared or training.keeps_quantised_inputs else width * inputs
    if alone:
        each = width + (1 if training.lora_dropout else 0)
        kept += each * sum(inputs * times[name] for name, (inputs, _) in adapted.items())
    if training.keeps_adapted_outputs:
        kept += 2 * width * sum(outputs * times[name] for name, (_, outputs) in adapted.items())
    return kept


def _gated_layer(training: Training, *, selective: bool = False) -> int:
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
    """Per token, of `_gated_layer`: both norms and the inputs of the projections behind them."""
    if not training.low_precision:
        return 24 * training.shape.hidden
    return (26 if training.stream == 4 else 16) * training.shape.hidden


def score_bytes(training: Training) -> int:
    """Attention that holds its scores: 5 a s^2 b with dropout (section 4.1), of which the mask is one byte.

    transformers computes the softmax in fp32 and casts it back (modeling_llama.py, eager_attention_forward), so does
    autocast (aten/src/ATen/autocast_mode.h, its fp32 list).
    """
    if training.flash or _is_t5(training):
        return 0
    shape, width = training.shape, training.width
    kept = 2 * width + (1 if shape.dropout else 0) if shape.dropout else width
    if shape.gated and training.low_precision:
        kept = width + 4
    elif training.autocasts:
        kept = width + 4 + (1 if shape.dropout else 0)
    source, target = training.sequence_length, training.target_length or training.sequence_length
    decoders = shape.crossed
    squares = (shape.layers - decoders) * source**2 + decoders * target**2
    if decoders < shape.layers:
        squares += decoders * source * target
    return kept * shape.heads * training.micro_batch_size * squares // shape.layers // training.tp


def transient_bytes(training: Training) -> int:
    """Above what is saved, at the peak of a layer's backward pass: gradients inside of the feed-forward part.

    Liger's kernel (liger_kernel/ops/swiglu.py) and those of Unsloth write two of the three over their inputs.
    """
    shape, width = training.shape, training.width
    products = (3 if shape.gated else 2) if not training.in_place else 1
    inside = products * width * shape.busy_ffn // training.tp
    if shape.experts:  # or those of what experts return, before and behind their weights (memory/experts.py, `_peaks`)
        inside = max(inside, 3 * _copy_bytes(training))
    # gradients of scores; transformers' softmax has its own in fp32
    each = 4 if _is_t5(training) else 2 * width + (8 if shape.gated and training.low_precision else 0)
    scores = 0 if training.flash else each * shape.heads * training.sequence_length // training.tp
    return training.tokens * (inside + 2 * training.stream * shape.hidden + scores)


def boundary_bytes(training: Training) -> int:
    """What a layer hands on, of one micro-batch."""
    cut = training.tp if training.sequence_parallel else 1
    return training.layer_tokens * training.stream * training.shape.hidden // cut


def kept_bytes(training: Training) -> int:
    """What one layer keeps of a micro-batch under the training's checkpointing."""
    if training.checkpointing is ActivationCheckpointing.FULL:
        return 0 if training.offload_activations else boundary_bytes(training)
    if training.checkpointing is ActivationCheckpointing.SELECTIVE:
        # products and attention are kept (memory/profiles.py); Megatron's recomputes the scores alone
        products = saved_bytes(training) - score_bytes(training)
        if training.alternate_products:
            return min(products, training.tokens * _alternate_bytes(training) // training.tp)
        if training.shape.gated and training.framework not in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
            products = min(products, training.tokens * _gated_layer(training, selective=True) // training.tp)
        return products
    return saved_bytes(training)


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
    again = saved_bytes(training) if training.checkpointing is ActivationCheckpointing.FULL else 0
    if training.checkpointing is ActivationCheckpointing.SELECTIVE:
        again = saved_bytes(training) - kept_bytes(training)
    dequantised = 0
    if training.base_bytes is not None:
        dequantised = 2 * max(inputs * outputs for inputs, outputs in training.shape.projections.values())
    casts = 2 * cast_elements(training) if training.autocasts and training.checkpointing is not NONE else 0
    return again + transient_bytes(training) + dequantised + casts


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
    return held + layer_matrices(training) if training.lora_rank else held


def head_bytes(training: Training) -> int:
    """Norm, logits and loss at their peak, of one micro-batch.

    Plain: fp32 logits, the copy without the last token, and its log-softmax; on the way back the latter, its gradient
    and that of the logits: 12 bytes. Labels (transformers/loss/loss_utils.py since 4.49, ForCausalLMLoss): logits,
    their fp32 copy, its log-softmax; on the way back a gradient in place of the copy. Low: the plain one without wide
    ones (Qwen/Qwen-7B, modeling_qwen.py): 6 bytes, as live storages were counted on CPU with torch 2.13, 2026-11. In
    place (flash_attn/losses/cross_entropy.py, inplace_backward): the logits alone.
    Megatron (core/tensor_parallel/cross_entropy.py): logits and their fp32 copy, whose exponential takes its place and
    becomes the gradient; in 2022, and where it is compiled (core/fusions/fused_cross_entropy.py), it stands beside.
    Fused (liger_kernel/ops/fused_linear_cross_entropy.py): logits of a chunk, as wide as the hidden states. Chunked
    (torchtune/modules/loss/ce_chunked_output_loss.py): all logits in low precision, and of one chunk what the plain
    loss has but the fp32 logits. Shifted: the plain one with a kernel that works in place; transformers 4.48 copies the
    logits to shift them. Compiled (torchtitan/components/loss.py): nothing wide is stored. Listed (litgpt/utils.py,
    chunked_cross_entropy, over outputs that Fabric casts to fp32): logits and log-softmax of all. A head in 4 bits is
    dequantised to fp16, then cast.
    """
    shape, t = training.shape, training.target_tokens
    cut = training.tp
    states = t * (training.stream + 4) * shape.hidden
    if not shape.causal:
        return states
    if training.quantises_head and training.base_bytes is not None:
        states += 4 * shape.table
    logits = t * shape.vocab // cut
    if training.framework in (Framework.MEGATRON, Framework.MEGATRON_DEEPSPEED):
        early = training.is_old or training.framework is Framework.MEGATRON_DEEPSPEED
        return states + (training.width + (8 if early or training.loss is Loss.SHIFTED else 4)) * logits
    if training.loss is Loss.FUSED:
        chunk = max(1, t * shape.hidden // max(1, shape.vocab))  # tokens (liger_kernel/ops/fused_linear_cross_entropy)
        return states + 4 * min(chunk, t) * shape.vocab
    if training.loss is Loss.CHUNKED:
        return states + training.width * logits + (8 + training.width) * logits // training.loss_chunks
    if training.loss is Loss.IN_PLACE:
        return states + training.width * logits
    if training.loss is Loss.LABELS:
        return states + (training.width + 8) * logits
    if training.loss is Loss.LOW:
        return states + 3 * training.width * logits
    if training.loss is Loss.COMPILED:
        return states + 2 * training.width * logits
    if training.loss is Loss.SHIFTED:
        return states + 8 * logits
    if training.loss is Loss.LISTED:
        return states + 8 * logits + 8 * logits // training.loss_chunks
    return states + 12 * logits
