"""Peak memory of a plan's most loaded rank, by cause: the maximum over candidate points of a step, per engine."""

from __future__ import annotations

from collections.abc import Iterable
from functools import lru_cache
from operator import attrgetter

from orchestrator.memory.engines import deepspeed
from orchestrator.memory.engines import torch as torch_engines
from orchestrator.memory.engines.activations import (
    find_highest_point_indices,
    list_live_activations,
)
from orchestrator.memory.engines.moments import ACTIVATIONS, FP32_BYTES, Moment, PointKind, Rank
from orchestrator.memory.engines.optimizers import ADAM_BYTES, estimate_optimizer_state_bytes
from orchestrator.memory.engines.overhead import SUPPOSED_OVERHEAD, MeasuredOverhead
from orchestrator.memory.engines.pipeline import find_pipeline_fill, list_critical_ranks
from orchestrator.memory.engines.widths import (
    check_profile_degrees,
    compute_master_bytes_per_weight,
)
from orchestrator.memory.profiles import uses_autocast
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.errors import refuse_unknown
from orchestrator.specs.mechanics import Fsdp2, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import SEGMENTS_BYTES, MemoryEstimate, ModelProfile, MomentBytes
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import SETTINGS

# Reserved over allocated: +0.9 to +13.2 % over 11 replayed allocator traces (2026-11, a model of
# the allocator, not
# compared with a device). With planning's margin of 5 % on top this covers the worst of them. A
# traced model whose own
# steps needed more gets that; none gets less, since the replay of a Llama of 1.3 billion parameters
# at seven
# micro-batches gave 0.7 to 8.8 %, up and down (training/tracing/allocator.py, 2026-11-23).
FRAGMENTATION = 1.08
Counted = list[tuple[Rank, dict[int, int]]]  # the most counted bytes of each rank, by activations
CountedMoments = list[tuple[Rank, list[tuple[Moment, int]]]]  # of each rank, with counted bytes


def estimate(
    profile: ModelProfile,
    plan: Plan,
    device: DeviceSpec,
    overhead: MeasuredOverhead = SUPPOSED_OVERHEAD,
) -> MemoryEstimate:
    """Return the peak memory of the plan's most loaded rank on `device`, by cause.

    `profile` is that of the plan's precision, sequence length, and degrees of tensor, context and
    expert parallelism. On a virtual device only live tensors count, so the three totals are equal;
    on CUDA the allocator, the context and the communicators come on top.
    """
    return DeviceBytes(profile, plan, device, overhead).estimate(plan)


def make_device_bytes_cache_key(plan: Plan) -> object:
    """Return a cache key of the plan; plans with equal keys may share one `DeviceBytes`.

    The key leaves out checkpointing, micro-batch size, accumulation, and the number of copies under
    hybrid sharding.
    """
    layout = plan.layout
    shards = (plan.layout.dp_cp // plan.dp_replicate, plan.dp_replicate > 1)
    return (shards, layout.cp, layout.tp, layout.pp, _SHARED(plan))


CHECKPOINTING = ("activation_checkpointing", "full_checkpointing_layers", "activation_offload")
_OWN = ("layout", "dp_replicate", "micro_batch_size", "gradient_accumulation_steps", *CHECKPOINTING)
_SHARED = attrgetter(*(setting.name for setting in SETTINGS if setting.name not in _OWN))


class DeviceBytes:
    """Device memory of plans with one `make_device_bytes_cache_key`, with fast lower bounds.

    A search drops most of its thousands of plans by their lower bound alone.
    """

    def __init__(
        self,
        profile: ModelProfile,
        plan: Plan,
        device: DeviceSpec,
        overhead: MeasuredOverhead = SUPPOSED_OVERHEAD,
    ) -> None:
        if plan.master_weights is MasterWeights.BF16:
            profile = replace(profile, parameter_bytes=compute_master_bytes_per_weight(plan))
        check_profile_degrees(profile, plan)
        self._plan = plan
        self._device = device
        self._overhead = overhead
        self._mechanics = plan.mechanics
        tells_apart = is_zero3 = False
        match self._mechanics:
            case Replicated():
                self._reduces_once = plan.layout.pp == 1 < self._mechanics.ranks
            case Fsdp2() | ScriptFsdp():
                self._reduces_once = self._mechanics.once_a_step
            case Zero():
                self._reduces_once = False
                tells_apart = deepspeed.depends_on_checkpointing(profile, self._mechanics)
                is_zero3 = (
                    self._mechanics.stage is ZeroStage.PARAMETERS
                    and get_engine_facts(plan.engine).is_ours
                )
            case _:
                refuse_unknown(self._mechanics)
        self._profile = _select_traced_moments(
            profile, is_sharded=isinstance(self._mechanics, Fsdp2), is_zero3=is_zero3
        )
        self.counts_every_mode_alike = device.kind.traits.has_caching_allocator and not tells_apart
        self._casts = uses_autocast(plan)
        self._library_bytes = device.kind.traits.library_bytes
        self._overhead_bytes_of: dict[int, int] = {}  # by copies of the shards, which alone differ
        self._counted: dict[object, Counted] = {}
        self._moments: dict[object, CountedMoments] = {}  # and their counted bytes

    def make_accumulation_cache_key(self, gradient_accumulation_steps: int) -> object:
        """Return a cache key of how gradient accumulation affects memory; with equal keys, as many
        micro-batches are in flight.
        """
        if self._reduces_once:
            return min(gradient_accumulation_steps, 3)
        return find_pipeline_fill(
            self._plan.layout.pp, self._plan.pipeline_stages_per_rank, gradient_accumulation_steps
        )

    def compute_lower_bound_without_activations(self, plan: Plan) -> int:
        """Return a lower bound of the plan's `device_bytes` for every micro-batch size.

        Where `counts_every_mode_alike`, it holds for every kind of checkpointing too.
        """
        counted = max(max(beside.values()) for _, beside in self._get_most_counted_bytes(plan))
        mode = None if self.counts_every_mode_alike else plan.activation_checkpointing
        return self._compute_reserved_bytes(counted, mode) + self._compute_overhead_bytes(plan)

    def compute_lower_bound_bytes(self, plan: Plan) -> int:
        """Return a lower bound of the plan's `device_bytes`, mostly exact, in a tenth of the time
        of `estimate`.

        It counts the moments outside the model's passes, and the pass points with the most live
        activations. Both are linear in the micro-batch size.
        """
        mode = plan.activation_checkpointing
        micro = plan.micro_batch_size
        full_layers = plan.full_checkpointing_layers
        allocated = 0
        for rank, beside in self._get_most_counted_bytes(plan):
            live = list_live_activations(
                rank,
                mode,
                has_weight_copies=self._casts,
                full_layers=full_layers,
                offloads_inputs=plan.activation_offload,
            )
            most = max(
                [counted + live[place].compute_bytes(micro) for place, counted in beside.items()]
            )
            allocated = max(allocated, most + rank.estimate_buffer_bytes(plan))
        return self._compute_reserved_bytes(allocated, mode) + self._compute_overhead_bytes(plan)

    def estimate(self, plan: Plan) -> MemoryEstimate:
        """Return the plan's memory estimate, equal to that of the function `estimate`."""
        micro = plan.micro_batch_size
        rows = []
        for rank, moments in self._get_counted_moments(plan):
            mode = plan.activation_checkpointing
            live = list_live_activations(
                rank,
                mode,
                has_weight_copies=self._casts,
                full_layers=plan.full_checkpointing_layers,
                offloads_inputs=plan.activation_offload,
            )
            buffer_bytes = rank.estimate_buffer_bytes(plan)
            for moment, counted in moments:
                rows.append(
                    (
                        rank,
                        moment,
                        counted + buffer_bytes,
                        live[moment.activations].compute_bytes(micro),
                    )
                )
        rank, worst, counted, activation = max(rows, key=lambda row: row[2] + row[3])
        beside = (
            ("pipeline buffers", rank.estimate_buffer_bytes(plan)),
            ("cuBLAS workspaces", self._library_bytes),
        )
        causes = (*worst.counted, *beside, (ACTIVATIONS, activation))
        reserved = self._compute_reserved_bytes(counted + activation, plan.activation_checkpointing)
        return MemoryEstimate(
            moment=worst.name + rank.name,
            by_cause=tuple((cause, count) for cause, count in causes if count),
            allocated_bytes=counted + activation,
            reserved_bytes=reserved,
            device_bytes=reserved + self._compute_overhead_bytes(plan),
            host_bytes=_compute_host_bytes(rank, plan),
            source=self._profile.source,
            moments=tuple(
                MomentBytes(name=moment.name, counted_bytes=counted, activation_bytes=activation)
                for _, moment, counted, activation in rows
            ),
        )

    def _compute_reserved_bytes(
        self, allocated_bytes: int, checkpointing: ActivationCheckpointing | None
    ) -> int:
        """Return the bytes that the allocator reserves for `allocated_bytes` under this kind of
        checkpointing.

        None as `checkpointing` returns the minimum over all kinds.
        """
        if not self._device.kind.traits.has_caching_allocator:
            return allocated_bytes
        factor = self._profile.get_fragmentation(checkpointing)
        return round(
            allocated_bytes * max(FRAGMENTATION, factor)
            + (SEGMENTS_BYTES if factor > FRAGMENTATION else 0)
        )

    def _compute_overhead_bytes(self, plan: Plan) -> int:
        if not self._device.kind.traits.has_context:
            return 0
        copies = plan.dp_replicate
        if copies not in self._overhead_bytes_of:
            self._overhead_bytes_of[copies] = self._overhead.compute_bytes(plan)
        return self._overhead_bytes_of[copies]

    def _get_counted_moments(self, plan: Plan) -> CountedMoments:
        full_layers = plan.full_checkpointing_layers
        key = (self._make_moments_cache_key(plan), full_layers)
        if key not in self._moments:
            self._moments[key] = []
            for rank in list_critical_ranks(self._profile, plan, full_layers=full_layers):
                moments = self._list_moments_at(rank, plan, range(len(rank.pass_points)))
                counted = [
                    (moment, moment.counted_bytes + self._library_bytes) for moment in moments
                ]
                self._moments[key].append((rank, counted))
        return self._moments[key]

    def _get_most_counted_bytes(self, plan: Plan) -> Counted:
        """Return, for every rank, {pass point: most counted bytes} of its pass points with the most
        live activations.

        Nothing else is stored: with all moments of all plans, a search spent a third of its time in
        garbage collection.
        """
        key = self._make_moments_cache_key(plan)
        if key not in self._counted:
            self._counted[key] = [
                (rank, self._count_bytes_by_point(rank, plan))
                for rank in list_critical_ranks(self._profile, plan)
            ]
        return self._counted[key]

    def _count_bytes_by_point(self, rank: Rank, plan: Plan) -> dict[int, int]:
        most: dict[int, int] = {}
        for moment in self._list_moments_at(
            rank, plan, find_highest_point_indices(rank, has_weight_copies=self._casts)
        ):
            counted = moment.counted_bytes + self._library_bytes
            most[moment.activations] = max(counted, most.get(moment.activations, 0))
        return most

    def _list_moments_at(
        self, rank: Rank, plan: Plan, point_indices: Iterable[int]
    ) -> list[Moment]:
        """Return the moments at the rank's pass points with these indices, and all moments outside
        the model's passes.
        """
        cuda = self._device.kind.traits.traces_as_cuda
        mechanics = self._mechanics
        reduces_in_buckets = isinstance(mechanics, Zero) and mechanics.stage >= ZeroStage.GRADIENTS
        if not reduces_in_buckets and not plan.optimizer_in_backward:
            point_indices = [
                place
                for place in point_indices
                if rank.pass_points[place].point is not PointKind.ARRIVAL
            ]
        match mechanics:
            case Replicated():
                return torch_engines.list_ddp_moments(
                    rank, plan, mechanics, point_indices, is_cuda=cuda
                )
            case Fsdp2() | ScriptFsdp():
                return torch_engines.list_fsdp_moments(
                    rank, plan, mechanics, point_indices, is_cuda=cuda
                )
            case Zero():
                return deepspeed.list_peak_moments(
                    rank, plan, mechanics, point_indices, is_cuda=cuda
                )
            case _:
                refuse_unknown(mechanics)

    def _make_moments_cache_key(self, plan: Plan) -> object:
        mode = None if self.counts_every_mode_alike else plan.activation_checkpointing
        return (self.make_accumulation_cache_key(plan.gradient_accumulation_steps), mode)


@lru_cache(maxsize=256)
def _select_traced_moments(
    profile: ModelProfile, *, is_sharded: bool, is_zero3: bool
) -> ModelProfile:
    """Return the profile with only those moments of its trace that apply under FSDP2 (`is_sharded`)
    or ZeRO-3; others unchanged.
    """
    is_sharded &= any(moment.sharded for moment in profile.moments)
    is_zero3 &= any(moment.zero3 for moment in profile.moments)
    moments = tuple(
        moment
        for moment in profile.moments
        if (moment.sharded, moment.zero3) == (is_sharded, is_zero3)
    )
    return profile if len(moments) == len(profile.moments) else replace(profile, moments=moments)


def _compute_host_bytes(rank: Rank, plan: Plan) -> int:
    """Return the host bytes of one rank: offloaded state, and the copy that it makes for
    checkpoints.

    Offloaded are fp32 masters, gradients and optimizer states of its shard, and parameters where
    they live there, frozen ones too. DeepSpeed's own estimate is 16 to 18 bytes per parameter of
    AdamW x 1.5 (deepspeed/runtime/zero/stage3.py); users report that less was not enough. With NVMe
    only the buffers of its swapping are in host memory.
    """
    profile = rank.profile
    copied = _compute_checkpoint_host_bytes(profile, plan)
    if plan.activation_offload:
        in_flight = ((rank.stage, 1), *rank.others)
        copied += plan.micro_batch_size * sum(
            passes * stage.layer_inputs_bytes for stage, passes in in_flight
        )
    if plan.offload is Offload.NONE:
        return copied
    trained = profile.trained_parameters
    state = 2 * FP32_BYTES * trained + estimate_optimizer_state_bytes(profile, plan, 1)
    if plan.offload is Offload.PARAMETERS:
        state += 2 * trained + profile.compute_weight_bytes(FP32_BYTES) - FP32_BYTES * trained
    whole = -(-3 * state // (2 * plan.mechanics.shards))
    if plan.offload_target is OffloadTarget.NVME:
        whole = min(whole, deepspeed.estimate_nvme_buffer_bytes(profile, plan))
    return whole + copied


def _compute_checkpoint_host_bytes(profile: ModelProfile, plan: Plan) -> int:
    """Return the bytes of a rank's host copy for checkpoints: its trained parameters and optimizer
    states in fp32.

    Of the ranks that hold the same part, one copies it (training/checkpoint/host_copy.py). A
    script's own checkpoints are not counted.
    """
    if not get_engine_facts(plan.engine).is_ours:
        return 0
    in_8_bits = plan.optimizer is Optimizer.ADAMW_8BIT
    states = (
        ADAM_BYTES * profile.trained_parameters
        if in_8_bits
        else estimate_optimizer_state_bytes(profile, plan, 1)
    )
    return -(-(FP32_BYTES * profile.trained_parameters + states) // plan.layout.dp_cp)
