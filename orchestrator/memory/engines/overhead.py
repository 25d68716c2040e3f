"""Device memory outside PyTorch's allocator: the CUDA context and communicators.

Before any measurement on this kind of device, constants from other devices; afterwards the measurements.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import lru_cache
from statistics import median_high

from orchestrator.specs.choices import ParallelLayout
from orchestrator.specs.group_values import group_values
from orchestrator.specs.observation import Observation
from orchestrator.specs.plan import Plan

# With the kernels that a training has loaded, on an H100 under torch 2.11.0 and CUDA 13.0. Before
# the first kernel it
# is 552 MB (tests/gpu/measured/, 2026-11-26). An A100 under torch 2.1.1 had 505 MB
# (stas00/ml-engineering
# training/performance/README.md).
CONTEXT_BYTES = 789_000_000
# One communicator of 1 rank: the same H100, NCCL 2.28. Of 2 ranks, and of more: NVIDIA/nccl issue
# 964.
COMMUNICATOR_BYTES = {1: 589_000_000, 2: 544_000_000}
LARGE_COMMUNICATOR_BYTES = 688_000_000

# measurements are rounded up to these: what is searched anew for every few pages gains nothing
STEP_BYTES = 32 * 2**20
COUNTED = 32  # newest measurements that count of each supposed overhead


def estimate_overhead_bytes(plan: Plan) -> int:
    """Return the assumed bytes of a CUDA context and of the plan's communicators.

    Communicators exist for all ranks together, and along every smaller axis of the mesh. Expert parallelism adds a mesh
    of its own (training/engines/expert_parallel.py). One rank alone has a communicator only under FSDP2 and DeepSpeed.
    """
    if plan.world_size == 1 and not plan.mechanics.talks_alone:
        return CONTEXT_BYTES
    return _estimate_layout_bytes(plan.layout, plan.dp_replicate, plan.expert_parallel)


@lru_cache(maxsize=4096)
def _estimate_layout_bytes(layout: ParallelLayout, dp_replicate: int, expert_parallel: int) -> int:
    world = layout.world_size
    axes = [layout.cp, layout.tp, layout.pp, layout.dp_cp // dp_replicate, dp_replicate]
    groups = [world, *(degree for degree in axes if 1 < degree < world)]
    if expert_parallel > 1:
        groups += [expert_parallel, world // expert_parallel]
    return CONTEXT_BYTES + sum(
        COMMUNICATOR_BYTES.get(degree, LARGE_COMMUNICATOR_BYTES) for degree in groups
    )


@dataclass(frozen=True, slots=True)
class MeasuredOverhead:
    """The measured device memory outside the allocator on one kind of device."""

    measured: tuple[
        tuple[int, int], ...
    ] = ()  # supposed bytes, and measured bytes of plans with those

    def compute_bytes(self, plan: Plan) -> int:
        """Return the bytes that the plan's ranks use outside the allocator: the assumed bytes,
        corrected by the nearest measurement.
        """
        supposed_bytes = estimate_overhead_bytes(plan)
        if not self.measured:
            return supposed_bytes
        nearest_bytes, measured_bytes = min(
            self.measured, key=lambda pair: abs(pair[0] - supposed_bytes)
        )
        return max(0, supposed_bytes + measured_bytes - nearest_bytes)


SUPPOSED_OVERHEAD = MeasuredOverhead()


def measure_overhead(observations: Iterable[Observation]) -> MeasuredOverhead:
    """Return the measured memory outside the allocator on one kind of device: the upper median for
    each assumed size.

    `observations` are of that device and of one torch, oldest first, and of any model family, since
    a CUDA context does not depend on the model. Foreign programs that come and go during an attempt
    are outliers in both directions.
    """
    by_supposed = group_values(
        (estimate_overhead_bytes(observation.plan), observation.overhead_bytes)
        for observation in observations
        if observation.overhead_bytes is not None
    )
    return MeasuredOverhead(
        tuple(
            (supposed, _round_to_step(median_high(measured[-COUNTED:])))
            for supposed, measured in sorted(by_supposed.items())
        )
    )


def _round_to_step(count_bytes: int) -> int:
    return -(-count_bytes // STEP_BYTES) * STEP_BYTES
