"""Somebody else's training, in the few words that decide its memory, and what of its model a rank holds."""

from __future__ import annotations

from dataclasses import dataclass, field

from orchestrator.memory.foreign.adapters import Adapters
from orchestrator.memory.foreign.architectures import Architecture
from orchestrator.memory.foreign.frameworks import DeepSpeed, Framework, Fsdp, Megatron
from orchestrator.memory.foreign.kernels import Kernels
from orchestrator.memory.foreign.losses import Loss
from orchestrator.memory.foreign.optimizers import Optimizer
from orchestrator.memory.foreign.platforms import Platform
from orchestrator.memory.moments import Causes
from orchestrator.specs.plan import ActivationCheckpointing


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """A training as its author describes it; what only a part of it asks stands in a record of that part."""

    shape: Architecture
    framework: Framework
    micro_batch_size: int
    sequence_length: int
    target_length: int = 0  # of what a decoder behind an encoder writes; 0: as long as what is read
    lengths_vary: bool = False  # samples are not padded or packed to one length
    gradient_accumulation_steps: int = 1
    dp: int = 1
    tp: int = 1
    pp: int = 1
    ep: int = 1  # ranks over which the experts of a layer are spread
    expert_tp: int = 1  # ranks over which each of them is cut
    sequence_parallel: bool = False
    zero_stage: int = 0
    low_precision: bool = True  # bf16 or fp16 products
    autocasts: bool = False  # with weights that stay fp32
    checkpointing: ActivationCheckpointing = ActivationCheckpointing.NONE
    layers_made_again: int = 1  # of full checkpointing, at a time: only what goes into the first of them is kept
    alternate_products: bool = False  # selective checkpointing keeps every second matrix product, not every one
    offload_optimizer: bool = False
    offload_parameters: bool = False
    offload_activations: bool = False
    loss: Loss = Loss.PLAIN
    loss_chunks: int = 8
    holds_outputs: bool = False  # what the model returned, its logits, is there until the backward pass is over
    adapters: Adapters = field(default_factory=Adapters)
    optimizer: Optimizer = field(default_factory=Optimizer)
    kernels: Kernels = field(default_factory=Kernels)
    platform: Platform = field(default_factory=Platform)
    megatron: Megatron = field(default_factory=Megatron)
    fsdp: Fsdp = field(default_factory=Fsdp)
    deepspeed: DeepSpeed = field(default_factory=DeepSpeed)

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
        """Bytes of an element of what a layer hands on: the type of the embedding in use, or of wider norms."""
        if self.framework.is_fsdp and not self.fsdp.gathers_fp32:
            return self.width
        return 4 if self.adapters.norms_fp32 else self.weight_bytes

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
    if not training.adapters.rank:
        return Held(trained=matrices + vectors, frozen_bytes=0)
    base = training.adapters.base_bytes if training.adapters.base_bytes is not None else float(training.weight_bytes)
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
    beside = Held(
        trained=shape.trained_beside if first else 0, frozen_bytes=training.width * shape.frozen_beside if first else 0
    )
    if not training.adapters.rank:
        return Held(trained=elements, frozen_bytes=0) + beside
    frozen_bytes = (4 if training.adapters.ends_fp32 else training.weight_bytes) * elements
    if training.adapters.quantises_head and training.adapters.base_bytes is not None and last and shape.causal:
        frozen_bytes -= round((training.weight_bytes - training.adapters.base_bytes) * shape.table)
    if not training.adapters.trains_ends:
        return Held(trained=0, frozen_bytes=frozen_bytes) + beside
    copies = training.weight_bytes * elements  # have the type of the weights, adapters perhaps a wider one
    return Held(trained=copies // trained_width(training), frozen_bytes=frozen_bytes) + beside


def trained_width(training: Training) -> int:
    """Bytes of an element of what is trained."""
    if training.adapters.rank and training.framework is not Framework.DEEPSPEED:
        return 4 if training.adapters.fp32 or not training.low_precision else 2
    return training.weight_bytes


def adapter_parameters(training: Training) -> int:
    """Elements of the adapters of one layer (Hu et al. 2021, arXiv:2106.09685): rank x (inputs + outputs) each."""
    return sum(
        training.adapters.rank * (inputs + outputs) * copies(training, name)[0]
        for name, (inputs, outputs) in adapted_projections(training).items()
    )


def adapted_projections(training: Training) -> dict[str, tuple[int, int]]:
    """Inputs and outputs of the projections that have adapters."""
    targets = training.adapters.targets
    return {name: size for name, size in training.shape.projections.items() if not targets or name in targets}


def copies(training: Training, name: str) -> tuple[int, int]:
    """How often a projection stands in a layer of a rank, and how often a token goes through it."""
    shape = training.shape
    routed = shape.experts and name in ("up", "gate", "down")
    return (shape.experts // training.ep, shape.chosen) if routed else (1, 1)
