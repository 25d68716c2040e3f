"""ModelProfile, the memory and compute cost of a model, and MemoryEstimate, the memory of one rank of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.frozen import frozen
from orchestrator.specs.str_enum import StrEnum


@frozen
class LossChunks:
    """Memory of a loss that is computed in chunks of tokens, beside the saved bytes of its segment."""

    chunk_tokens: int
    sample_tokens: int
    per_sample_bytes: int  # of all tokens: its input
    peaks: tuple[
        tuple[int, int], ...
    ]  # (bytes per token of the chunk, fixed bytes): the largest counts
    gradients: int  # elements of the weight whose gradient it makes in the forward pass already

    def compute_peak_bytes(self, micro_batch_size: int) -> int:
        """Return the peak bytes of the loss's forward pass."""
        tokens = min(self.chunk_tokens, micro_batch_size * self.sample_tokens)
        largest = max(per_token * tokens + fixed for per_token, fixed in self.peaks)
        return micro_batch_size * self.per_sample_bytes + largest


Product = tuple[int, int, int]  # of matrices: rows, inner, columns


class BackwardPeak(NamedTuple):
    """A moment of a backward pass that may be the memory peak: gradients in elements, activations
    in bytes per sample.
    """

    own: int  # elements of its gradients that exist
    fresh: int  # part of `own` just made, and not yet where the engine stores gradients
    transient_bytes: int  # above the saved bytes, per sample; negative where part of these is freed
    mode: ActivationCheckpointing | None = None  # kind of checkpointing; None: any


@frozen
class Segment:
    """`count` equal parts (such as layers) of a model. Bytes and FLOPs are per part; activations also per sample."""

    name: str
    count: int
    parameters: int
    saved_bytes: int  # kept from forward to backward, per sample
    checkpointed_bytes: int  # saved per sample under full checkpointing
    transient_bytes: int  # above the saved bytes at the part's peak, per sample
    forward_flops: float  # per sample
    forward_transient_bytes: int = 0  # above the saved bytes in its forward pass, per sample
    # low-precision copies of its weights that autocast keeps from forward to backward
    cast_bytes: int = 0
    largest_parameter: int = 0  # elements of its largest tensor
    # elements of a shared weight's gradients that come up in its backward pass
    summed_gradients: int = 0
    # elements of a shared weight's gradient that waits for those of its earlier uses
    waiting_gradients: int = 0
    # elements of trained tables that ZeRO-3 lets go of when all has gone backward, as no input asks
    looked_up: int = 0
    # of `parameters`, those that have gradients and optimizer states; None: all
    trained: int | None = None
    frozen_bytes: int = 0  # stored size of frozen parameters, instead of 4 bytes each
    # saved per sample under selective checkpointing; None: unavailable
    selective_bytes: int | None = None
    # above the saved bytes at its peak, under selective checkpointing
    selective_transient_bytes: int = 0
    # rows and columns of all its matrices, and its vectors; None: as if one square
    factored: int | None = None
    chunks: LossChunks | None = None  # of a loss that never holds all of its logits
    matmuls: tuple[Product, ...] = ()  # products with weights: (rows per sample, inputs, outputs)
    unit: bool = False  # counts as a layer although no other part is like it
    tensors: tuple[
        int, ...
    ] = ()  # elements of what is trained, as its gradients come; none: as if one tensor
    # elements of the parameters of the largest module with several parameters
    side_by_side: int = 0
    # elements of weights of which the forward pass saves views, not the parameters themselves
    viewed: int = 0
    leaf: tuple[
        int, ...
    ] = ()  # elements of what is trained of a module that ZeRO-3 takes as one, as it was registered
    # elements of the part's gradients by which those of the leaf have all been made
    leaf_until: int = 0
    # elements of the last parameter of its module; None: of the first in `tensors`
    last_parameter: int | None = None
    peaks: tuple[
        BackwardPeak, ...
    ] = ()  # none: one, when its largest gradient has been made, of `transient_bytes`
    arrivals: tuple[
        BackwardPeak, ...
    ] = ()  # the most that is live as its gradients come, up to so many; none: unknown
    # recomputed parts keep their input, and its gradient, to the end of backward
    holds_boundaries: bool = False
    registered: tuple[
        int, ...
    ] = ()  # `tensors` in the order of the module; none: in that of its forward pass
    # what context-parallel ranks exchange for it in a forward pass, per sample
    exchanged_bytes: int = 0
    # of `parameters`, those of experts, of which expert-parallel ranks hold an equal part each
    experts: int = 0
    # what expert-parallel ranks send to the experts of it in a forward pass, per sample
    routed_bytes: int = 0
    # What operators other than products and attention read and write, per sample; 0: nobody
    # counted.
    forward_moved_bytes: int = 0
    backward_moved_bytes: int = 0

    @property
    def is_unit(self) -> bool:
        """Whether the parts are layers, which are sharded one by one; all other parts are sharded
        together.
        """
        return self.unit or self.count > 1

    @property
    def trained_parameters(self) -> int:
        return self.parameters if self.trained is None else self.trained

    @property
    def gradients(self) -> tuple[int, ...]:
        """Elements of each gradient of one part, in the order in which the backward pass makes
        them.
        """
        return self.tensors or ((self.trained_parameters,) if self.trained_parameters else ())

    @property
    def last_gradient(self) -> int:
        """Elements of the gradient whose parameter comes last in its module."""
        return sum(self.tensors[:1]) if self.last_parameter is None else self.last_parameter

    @property
    def largest_gradient(self) -> int:
        """Elements of the largest trained tensor."""
        return max(self.tensors, default=min(self.largest_parameter, self.trained_parameters))

    def compute_weight_bytes(self, bytes_per_weight: int) -> int:
        """Return the bytes of one part's weights at `bytes_per_weight` each; frozen ones in a
        narrower format count as stored.
        """
        frozen = bytes_per_weight * (self.parameters - self.trained_parameters)
        return bytes_per_weight * self.trained_parameters + (
            min(self.frozen_bytes, frozen) if self.frozen_bytes else frozen
        )


class TracedMoment(NamedTuple):
    """A candidate for the memory peak in a traced training step. A tuple to save space: a job's record holds dozens.

    Bytes are those of live tensors, without parameters, buffers and gradients stored at their parameters. Parameters
    and gradients are counted in elements.
    """

    mode: ActivationCheckpointing
    turn: int  # index of the recipe that trains, where several alternate
    segment: int  # index of the running segment in the profile
    position: int  # of the part in its segment, deepest first
    backward: bool
    starts: bool  # before any operation of the part
    fixed_bytes: int
    sample_bytes: int
    own: int  # gradient elements of the layer in its backward pass
    done: int  # all other gradient elements
    ends_done: int  # part of `done` that belongs to no layer
    units_done: int  # parameters of layers that have finished their backward pass
    # of recipes in turn under FSDP2, where those that stand still have gradients all the same
    sharded: bool = False
    outside: bool = False  # in the loss outside of the model, before its gradient reaches the model
    # of a gradient that has just come, the last of `own`, which here are those of any part; else 0
    fresh: int = 0
    # as under ZeRO-3, where a product saves what it was given although its weight is frozen
    zero3: bool = False


class Source(StrEnum):
    """Where a profile comes from, which decides how far it can be trusted."""

    CLOSED_FORM = "closed form"
    TRACED = "traced"
    DECLARED = "declared"
    DECLARED_MEMORY = "declared, without FLOPs"  # of a script: how long a sample takes is not said
    PROBED = "probed"  # a line through what a script was measured to need at two micro-batches
    # nothing is known of a script: its own micro-batch is taken to fill a device
    ASSUMED = "assumed"


# Of CUDA's caching allocator: a small and a large segment of which next to nothing is used
# (kSmallBuffer and
# kLargeBuffer in c10/cuda/CUDACachingAllocator.cpp).
SEGMENTS_BYTES = (2 + 20) * 2**20
UNTIMED = (Source.PROBED, Source.ASSUMED)  # say nothing of seconds: only the order of their plans
WITHOUT_SECONDS = (
    *UNTIMED,
    Source.DECLARED_MEMORY,
)  # the same, until an attempt has measured a step


@frozen
class MeasuredLine:
    """A script's measured memory per rank as a line: bytes = fixed_bytes + sample_bytes x
    micro-batch size.
    """

    fixed_bytes: int
    sample_bytes: int
    is_of_one_rank: bool  # which had no buckets for gradients


@frozen
class OwnSettings:
    """The settings that a script uses by default; assumptions about its memory are relative to
    them.
    """

    micro_batch_size: int
    sequence_length: int | None  # None: it has no knob for it
    precision: Precision


@dataclass(frozen=True, kw_only=True)
class ModelProfile:
    """Memory and compute cost of a model at one precision and sequence length, as the plan search
    reads it.
    """

    family: str
    precision: Precision
    source: Source
    segments: tuple[Segment, ...]
    workspace_bytes: int = 0
    tensor_parallel: int = 1  # ranks that split its matrices; the profile is one rank's part
    sequence_parallel: int = 1  # ranks over which tokens are spread between those matrices
    context_parallel: int = 1  # ranks over which each sample's tokens are cut
    expert_parallel: int = 1  # ranks over which the experts of a layer are spread
    moments: tuple[TracedMoment, ...] = ()  # of a trace: they replace the segments' activations
    turns: tuple[int, ...] = ()  # trained parameters per alternating recipe; (): all train at once
    attention: str = ""  # the kernel that the trace assumed
    # How often over its live bytes CUDA's allocator needs, beside SEGMENTS_BYTES, under each kind
    # of checkpointing
    fragmentation: tuple[
        tuple[ActivationCheckpointing, float], ...
    ] = ()  # none: its steps were not replayed
    # elements that an update holds besides those for the largest tensor
    updated_before_largest: int = 0
    deepspeed: str | None = None  # the job's own keys of the DeepSpeed file, as JSON
    has_batch_norm: bool = False  # its training depends on which samples go together
    # of one trained weight, and of its gradient and each of its states without masters
    parameter_bytes: int = 4

    def __hash__(self) -> int:
        return self._hash

    def get_fragmentation(self, checkpointing: ActivationCheckpointing | None) -> float:
        """Return the allocator's fragmentation factor under this kind of checkpointing; 1.0 where
        unknown.

        None as `checkpointing` returns the minimum over all kinds.
        """
        return min(
            (
                factor
                for measured_mode, factor in self.fragmentation
                if checkpointing in (measured_mode, None)
            ),
            default=1.0,
        )

    @cached_property
    def _hash(self) -> int:
        return hash(
            (self.family, self.precision, self.segments, self.workspace_bytes, self.tensor_parallel)
        )

    @cached_property
    def parameters(self) -> int:
        return sum(segment.count * segment.parameters for segment in self.segments)

    @cached_property
    def trained_parameters(self) -> int:
        return sum(segment.count * segment.trained_parameters for segment in self.segments)

    def count_gathered_parameters(self, segment: Segment) -> int:
        """Return the number of parameters of one part with which a rank computes; experts of other
        ranks do not count.
        """
        return segment.parameters - segment.experts + segment.experts // self.expert_parallel

    def count_gradient_parameters(self, segment: Segment) -> int:
        """Return the number of trained parameters of one part for which a rank makes gradients."""
        return (
            segment.trained_parameters - segment.experts + segment.experts // self.expert_parallel
        )

    @cached_property
    def gathered_parameters(self) -> int:
        """Number of parameters in all parts with which a rank computes."""
        return sum(
            segment.count * self.count_gathered_parameters(segment) for segment in self.segments
        )

    @cached_property
    def largest_trained(self) -> int:
        """Elements of the largest trained tensor of the model."""
        return max(segment.largest_gradient for segment in self.segments)

    def compute_weight_bytes(self, bytes_per_weight: int) -> int:
        """Return the bytes of all weights at `bytes_per_weight` each; frozen ones in a narrower
        format count as stored.
        """
        return sum(
            segment.count * segment.compute_weight_bytes(bytes_per_weight)
            for segment in self.segments
        )

    @cached_property
    def boundary_bytes(self) -> int:
        """Bytes per sample that one layer passes to the next on this rank."""
        return max(self.segments, key=lambda segment: segment.count).checkpointed_bytes

    @cached_property
    def layer_inputs_bytes(self) -> int:
        """Bytes per sample that full checkpointing saves for all layers."""
        return sum(
            segment.count * segment.checkpointed_bytes
            for segment in self.segments
            if segment.is_unit
        )

    @cached_property
    def forward_flops(self) -> float:
        """FLOPs of the forward pass per sample."""
        return sum(segment.count * segment.forward_flops for segment in self.segments)


@frozen
class TracedProfile:
    """A traced profile, with the settings under which it was traced: tokens per sample, autocast or
    not, CUDA or not.
    """

    sequence_length: int
    autocast: bool
    profile: ModelProfile
    cuda: bool = False  # whether autocast does as on CUDA, where more operations compute in fp32


@frozen
class MomentBytes:
    """Live bytes of one rank at one candidate for the memory peak, split by how they are predicted."""

    name: str
    # parameters, gradients, optimizer states, buffers: they follow from the parameter count
    counted_bytes: int
    activation_bytes: int  # as the profile says: what measurements correct


@frozen
class MemoryEstimate:
    """Predicted peak memory, in bytes, of the rank that needs most."""

    moment: str  # when the peak comes: "forward head", "optimizer step", ...
    by_cause: tuple[
        tuple[str, int], ...
    ]  # (cause, bytes) at that moment; they add up to allocated_bytes
    allocated_bytes: int  # live tensors
    reserved_bytes: int  # what the allocator holds
    device_bytes: int  # and context, communicators, workspaces: compared with what is free
    host_bytes: int = 0
    source: Source = Source.DECLARED
    moments: tuple[
        MomentBytes, ...
    ] = ()  # every one that can become the worst when activations turn out larger

    def __post_init__(self) -> None:
        total = sum(count for _, count in self.by_cause)
        assert total == self.allocated_bytes, (
            f"causes add up to {total}, not {self.allocated_bytes}"
        )
        assert self.allocated_bytes <= self.reserved_bytes <= self.device_bytes, self
