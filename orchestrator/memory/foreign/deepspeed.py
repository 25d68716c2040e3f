"""Which bytes are live at which moment under DeepSpeed's ZeRO 1 to 3, and ColossalAI's."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.foreign.activations import KEPT, WORKING, kept_bytes, working_bytes
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.training import Live, Training, ends_held, layer_held
from orchestrator.memory.moments import Causes

PREFETCH_ELEMENTS = 50_000_000  # stage3_prefetch_bucket_size
LIVE_ELEMENTS = 1_000_000_000  # stage3_max_live_parameters (deepspeed/runtime/zero/config.py)
SUB_GROUP_ELEMENTS = 1_000_000_000  # sub_group_size


def deepspeed_moments(training: Training) -> Iterator[Live]:
    """ZeRO 0 to 3 (Rajbhandari et al. 2020, arXiv:1910.02054) with DeepSpeed's buffers, in elements of its config.

    Stage 0 cuts nothing (runtime/fp16/fused_optimizer.py).

    Its bucket has its full size however little is trained (stage_1_and_2.py, `setup_buckets`; stage3.py,
    `_setup_for_real_optimizer`), below stage 3 until gradients are reduced (`_release_ipg_buffers`). Stage 3 steps over
    one sub-group after the other, whose gradients it puts together and casts (stage3.py,
    `_prepare_fp32_grad_for_sub_group`). Stages 1 and 2 let go of the gradients of others, put theirs together, which
    are there twice beside their cast, and let go of both before they step (stage_1_and_2.py, `step`).
    ColossalAI's stages 1 and 2 (colossalai/zero/low_level/low_level_optim.py) have the same states and the same fp32
    gradients at the step, in buckets of reduce_bucket_size_in_m = 12.
    """
    stage, shards = training.zero_stage, training.dp if training.zero_stage else 1
    layer, ends = layer_held(training), ends_held(training)
    layers = training.shape.layers
    held = layer * layers + ends
    trained = held.trained
    width = training.width
    whole = width * trained + held.frozen_bytes
    resident = 0 if training.offload_parameters else -(-whole // shards) if stage == 3 else whole
    states = 0 if training.offload_optimizer else round((4 + training.optimizer.state_bytes) * trained / shards)
    sharded = 0 if training.offload_optimizer and not training.deepspeed.holds_gradients else width * trained // shards
    gradients = sharded if stage >= 2 else width * trained
    bucket = width * training.deepspeed.bucket_elements * (2 if training.deepspeed.overlaps and stage < 3 else 1)
    live, table = _gathered(training, whole) if stage == 3 else (0, 0)
    states_and_gradients: Causes = (
        ("parameters", resident),
        ("optimizer states", states),
        ("gradients", gradients),
        ("buckets", bucket),
    )
    at_head: Causes = (*states_and_gradients, ("gathered parameters", live + table))
    fixed: Causes = (*states_and_gradients, ("gathered parameters", live))
    kept = layers * kept_bytes(training)
    yield ("backward of head", (*at_head, (KEPT, kept), (WORKING, head_bytes(training))))
    yield ("backward of last layer", (*fixed, (KEPT, kept), (WORKING, working_bytes(training))))
    at_once = min(SUB_GROUP_ELEMENTS, trained // shards) if stage == 3 else trained // shards
    temporaries = (4 + (width if stage == 3 else 0) + 4 * training.optimizer.temporaries) * at_once
    if stage in (1, 2) and not training.deepspeed.holds_gradients:
        together = (2 * width + (4 if width < 4 else 0)) * at_once
        temporaries = max(gradients, together, temporaries) - gradients
        fixed = tuple(cause for cause in fixed if cause[0] != "buckets")
    yield ("optimizer step", (*fixed, ("optimizer temporaries", 0 if training.offload_optimizer else temporaries)))


def _gathered(training: Training, whole: int) -> tuple[int, int]:
    """Bytes of `whole` that stage 3 has gathered, and of the table beyond them when the head is next.

    Every module fetches a bucket ahead until LIVE_ELEMENTS are there, whatever the last one makes of it
    (deepspeed/runtime/zero/partitioned_param_coordinator.py, fetch_sub_module, since 0.6 of 2022). Before, it was one
    bucket, and what is used again soon stayed (stage3_max_reuse_distance).
    """
    width, layer, ends = training.width, layer_held(training), ends_held(training)
    if not training.platform.is_old:
        live = min(whole, width * LIVE_ELEMENTS)
        return live, min(whole - live, width * training.shape.table)
    used = width * layer.trained + layer.frozen_bytes
    live = min(used + width * ends.trained + ends.frozen_bytes, width * LIVE_ELEMENTS)
    return max(live, used + width * min(PREFETCH_ELEMENTS, layer.trained)), 0
