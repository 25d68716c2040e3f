"""Somebody else's training, in the few words that decide its memory, and what of its model a rank holds."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.hf_profiles import NF4_BYTES
from orchestrator.memory.moments import Causes
from orchestrator.memory.updates import ADAM_8BIT_BYTES
from orchestrator.specs.plan import ActivationCheckpointing

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
    gathers_fp32: bool = False  # FSDP without a policy: autocast casts what was gathered as it is stored
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
    holds_outputs: bool = False  # what the model returned, its logits, is there until the backward pass is over
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
    transposes: bool = False  # convolutions on tensor cores over tensors that do not lie as these want them
    keeps_gradients: bool = False  # from one step to the next: zero_grad filled them with zeros until torch 2.0
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
        if self.framework in (Framework.FSDP1, Framework.FSDP2) and not self.gathers_fp32:
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


Live = tuple[str, Causes]  # a moment's name, and the bytes of every cause that is live then


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
        training.lora_rank * (inputs + outputs) * copies(training, name)[0]
        for name, (inputs, outputs) in adapted_projections(training).items()
    )


def adapted_projections(training: Training) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the projections that have adapters."""
    targets = training.lora_targets
    return {name: size for name, size in training.shape.projections.items() if not targets or name in targets}


def copies(training: Training, name: str) -> tuple[int, int]:
    """How often a projection stands in a layer of a rank, and how often a token goes through it."""
    shape = training.shape
    routed = shape.experts and name in ("up", "gate", "down")
    return (shape.experts // training.ep, shape.chosen) if routed else (1, 1)


def base_bytes_of(bits: int, *, double: bool = True) -> float:
    """Bytes per element of a frozen matrix: int8 with a scale per row, or NF4, with fp32 scales of 64 if not double."""
    if bits == 8:
        return 1.0
    return NF4_BYTES if double else 0.5 + 4 / 64


def state_bytes(training: Training) -> float:
    """Bytes of the optimizer's states per trained parameter, masters aside."""
    width = 2 if training.low_states else 4
    return {
        Rule.ADAM: 2 * width,
        Rule.ADAM_8BIT: ADAM_8BIT_BYTES,
        Rule.MOMENTUM: width,
        Rule.SGD: 0,
        Rule.ADAFACTOR: 0.01,
    }[training.rule]
