"""Converts a plan to a DeepSpeed configuration, with DeepSpeed's bucket sizes."""

from __future__ import annotations

import torch

from orchestrator.specs.choices import Offload, OffloadTarget, Precision, ZeroStage
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan


@frozen
class Buckets:
    """DeepSpeed's buffer sizes and limits, in elements (not bytes)."""

    reduce: int
    allgather: int
    prefetch: int  # stage 3: gathered ahead of use
    live: int  # stage 3: limit on gathered parameters, where prefetch and reuse would keep more
    reuse: int  # stage 3: a parameter used again within this distance stays gathered
    persistent: int  # stage 3: parameters smaller than this are never partitioned
    swapped: int  # NVMe: elements of the master read at a time, with its gradient and moments


# Virtual devices are small: DeepSpeed's defaults (5e8 elements) would keep everything and hide what
# a stage saves.
CPU_BUCKETS = Buckets(
    reduce=2**19, allgather=2**19, prefetch=0, live=0, reuse=0, persistent=1_000, swapped=2**18
)
# Reduce and gather: a tenth of the defaults, 0.2 GB in fp32, still large messages. Swapped: a tenth
# of the default,
# four buffers of 0.4 GB. The rest are the defaults (deepspeed/runtime/zero/config.py).
CUDA_BUCKETS = Buckets(
    reduce=50_000_000,
    allgather=50_000_000,
    prefetch=50_000_000,
    live=1_000_000_000,
    reuse=1_000_000_000,
    persistent=100_000,
    swapped=100_000_000,
)


def make_deepspeed_settings(
    plan: Plan,
    training: TrainingSpec,
    device: torch.device,
    file_offload: dict[str, JsonObject] | None = None,
) -> JsonObject:
    """Return the plan as a DeepSpeed configuration; `file_offload` is what
    `deepspeed_nvme.make_offload_settings` returned, or None.
    """
    buckets = CUDA_BUCKETS if device.type == "cuda" else CPU_BUCKETS
    zero: JsonObject = {
        "stage": int(plan.zero_stage),
        "reduce_bucket_size": buckets.reduce,
        "allgather_bucket_size": buckets.allgather,
        "overlap_comm": device.type == "cuda"
        and plan.zero_stage is ZeroStage.PARAMETERS,  # the default, made explicit
        "stage3_prefetch_bucket_size": buckets.prefetch,
        "stage3_max_live_parameters": buckets.live,
        "stage3_max_reuse_distance": buckets.reuse,
        "stage3_param_persistence_threshold": buckets.persistent,
    }
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    if plan.offload_target is OffloadTarget.NVME:
        assert file_offload is not None, "offload to NVMe needs its folder"
        zero |= {"sub_group_size": buckets.swapped, **file_offload}
    else:
        if plan.offload is not Offload.NONE:
            zero["offload_optimizer"] = host
        if plan.offload is Offload.PARAMETERS:
            zero["offload_param"] = host
    return {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "zero_optimization": zero,
        "bf16": {"enabled": plan.precision is Precision.BF16},
        # Our own loss scale is set before every step: DeepSpeed would change its scale within a
        # step.
        "fp16": {"enabled": plan.precision is Precision.FP16, "loss_scale": 1.0},
        # Explicit: unset means 1.0, not off. At stage 0 DeepSpeed does not return the norm, so the
        # engine clips.
        "gradient_clipping": (training.clip_norm or 0.0)
        if plan.zero_stage is not ZeroStage.NONE
        else 0.0,
        # torch.optim.AdamW: DeepSpeed's own would be compiled at start
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }
