"""Which bytes are live at which moment under FSDP1 and FSDP2."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from orchestrator.memory.foreign.activations import KEPT, WORKING, boundary_bytes, kept_bytes, working_bytes
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.training import Held, Live, Training, ends_held, layer_held, trained_width
from orchestrator.memory.moments import Causes


def fsdp_moments(training: Training) -> Iterator[Live]:
    """Flat units: one per layer, and the root with embedding and head (Zhao et al. 2023, arXiv:2304.11277).

    Under `limit_all_gathers` two units are gathered at a time, in the type they compute in; the root stays, and the
    last layer is fetched as the backward pass begins. While a layer goes backward, what it kept gives way to its
    gradients, which are whole once when they are reduced, beside what is sent of them; in fp32 where the policy
    reduces so (torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, foreach_reduce). At stage 2 nothing is let go
    of between forward and backward. A unit with anything to train has a gradient of all of it, and under `no_sync` all
    gradients stay whole until they are reduced with those of the last micro-batch (torch/distributed/fsdp/
    fully_sharded_data_parallel.py, on `use_orig_params` and `no_sync`): FSDP1 adds them up as the backward pass returns
    them (bf16 under a policy of bf16, on two gloo ranks of torch 2.13, 2026-11), FSDP2 in the type that it reduces in
    (_fully_shard/_fsdp_param.py, `to_accumulated_grad_if_needed`). A hook that reshards a frozen unit holds its
    input (_runtime_utils.py, `_register_post_backward_reshard_only_hook`): where reentrant checkpointing wraps units,
    that of every layer is there at the end of the backward pass, with its gradient (over 12 layers on two gloo ranks of
    torch 2.13, 28 layer inputs were counted instead of 16, and 16 if not reentrant; 2026-11).
    """
    layer, ends = layer_held(training), ends_held(training)
    layers = training.shape.layers
    held = layer * layers + ends
    width = trained_width(training)
    device = 0 if training.offload_parameters else 1
    compute = 2 if training.low_precision and not training.fsdp.gathers_fp32 else 4
    cast = training if training.fsdp.gathers_fp32 else replace(training, autocasts=False)  # as a policy has it
    frozen = (layer_held(cast).frozen_bytes, ends_held(cast).frozen_bytes)
    a_layer, root = (compute * unit.trained + beside for unit, beside in zip((layer, ends), frozen, strict=True))
    root = root // 2 if training.fsdp.ends_apart else root
    ahead = layers if training.zero_stage == 2 else 1  # of the layers, those that are there as the backward pass starts
    units = (ahead if training.zero_stage == 2 else 2) * a_layer
    # apart: the head has been let go of when the last layer goes backward, its gradient is being reduced; else the
    # root's gradient is put together once the embedding's is there (split's backward pass, torch/distributed/fsdp/
    # _flat_param.py, _get_unflat_views_unaligned)
    beside, ended = (0 if training.fsdp.ends_apart else root), min(ends.trained, training.shape.table)
    fixed = _sharded(training, held) if device else (("parameters", 0), ("optimizer states", 0))
    reduce = compute + (4 if training.fsdp.reduces_fp32 and compute == 2 else 0)
    reducing = max(reduce, 2 * compute)  # gradients of a unit, and what is sent of them
    frozen_gradients = layer.frozen_bytes if training.fsdp.frozen_gradients else 0
    all_gradients = width * held.trained + layers * frozen_gradients
    shard_gradients = device * all_gradients // training.dp
    added = 4 if training.fsdp.reduces_fp32 and training.framework is Framework.FSDP2 else compute
    earlier = _earlier(training, added * held.trained + layers * frozen_gradients, shard_gradients)
    kept = layers * kept_bytes(training)

    def during(gradients: int, gathered: int, *more: tuple[str, int]) -> Causes:
        return (*fixed, ("gradients", gradients), ("gathered parameters", gathered), *more)

    inside = (WORKING, working_bytes(training))
    ahead_bytes = ahead * a_layer
    yield "backward of head", during(earlier, root + ahead_bytes, (KEPT, kept), (WORKING, head_bytes(training)))
    whole = ("whole gradients", compute * ended)
    yield "backward of last layer", during(earlier, beside + units, whole, (KEPT, kept), inside)
    whole = ("whole gradients", compute * ended + reducing * layer.trained + 2 * frozen_gradients)
    last_gone = (KEPT, kept - kept_bytes(training))
    yield "gradient reduction of last layer", during(earlier, beside + ahead_bytes, whole, last_gone)
    if training.fsdp.holds_boundaries:
        held_too = (KEPT, kept + layers * boundary_bytes(training))
        yield "backward of first layer", during(shard_gradients, beside + units, held_too, inside)
    whole = ("whole gradients", reduce * ends.trained)
    yield "gradient reduction of the root", during(shard_gradients, root, whole)
    temporaries = training.optimizer.temporaries * shard_gradients
    yield "optimizer step", (*fixed, ("gradients", shard_gradients), ("optimizer temporaries", temporaries))


def _earlier(training: Training, whole_bytes: int, shard_bytes: int) -> int:
    """Bytes of the gradients that are there when a backward pass begins, of micro-batches or steps before it."""
    if training.gradient_accumulation_steps > 1:
        return whole_bytes if training.fsdp.unsynced else shard_bytes
    return shard_bytes if training.platform.keeps_gradients else 0


def _sharded(training: Training, held: Held) -> Causes:
    """What every rank has of the parameters and of the optimizer's states."""
    states = 4 * training.optimizer.masters + training.optimizer.state_bytes
    return (
        ("parameters", -(-(trained_width(training) * held.trained + held.frozen_bytes) // training.dp)),
        ("optimizer states", round(states * held.trained / training.dp)),
    )
