"""Which bytes are live at which moment where nothing is cut, or layers lie on device after device."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.foreign.activations import KEPT, WORKING, cast_bytes, hidden_bytes, kept_bytes, working_bytes
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.heads import head_bytes
from orchestrator.memory.foreign.training import Live, Training, copies, ends_held, layer_held, trained_width
from orchestrator.memory.moments import Causes

SHARDED_DDP_BUCKET_ELEMENTS = 2**23  # for every rank: fairscale/nn/data_parallel/sharded_ddp.py, reduce_buffer_size


def plain_moments(training: Training) -> Iterator[Live]:
    """All of the model on one device, or, layer after layer, on several (`device_map`): the last has the head.

    Stages 1 and 2 of ZeRO are those of `SHARDS_STATES`: every rank steps its share of the parameters.
    """
    devices = training.pp if training.framework is Framework.DEVICE_MAP else 1
    layers = -(-training.shape.layers // devices)
    layer, ends = layer_held(training), ends_held(training, first=devices == 1)
    held = layer * layers + ends
    width = trained_width(training)
    trained = held.trained
    shards = training.dp if training.zero_stage else 1
    states = (
        0
        if training.optimizer.paged
        else round((4 * training.optimizer.masters * trained + _state_bytes(training, layers, trained)) / shards)
    )
    # of DistributedDataParallel (Li et al. 2020)
    buckets = width * trained if training.dp > 1 and not training.fsdp.replicates else 0
    if training.zero_stage == 2:
        buckets = min(buckets, width * SHARDED_DDP_BUCKET_ELEMENTS * training.dp)
    fixed: Causes = (
        ("parameters", width * trained + held.frozen_bytes),
        ("optimizer states", states),
        ("gradient buckets", buckets),
    )
    everything = width * trained
    largest = width * max(layer.trained, ends.trained)
    gradients = largest if training.optimizer.step_in_backward else everything
    gradients = gradients // shards if training.zero_stage == 2 else gradients
    kept = layers * (kept_bytes(training) + cast_bytes(training))
    accumulated = everything if training.gradient_accumulation_steps > 1 or training.platform.keeps_gradients else 0
    if training.optimizer.step_in_backward:
        accumulated = 0
    projecting = _projecting_bytes(training)
    hidden = ("inputs that checkpointing does not free", layers * hidden_bytes(training))
    at_head = (KEPT, kept), (WORKING, head_bytes(training))
    yield ("backward of head", (*fixed, ("gradients", accumulated), hidden, *at_head))
    yield (
        "backward of last layer",
        (
            *fixed,
            ("gradients", max(accumulated, width * min(trained, ends.trained + layer.trained))),
            hidden,
            (KEPT, kept),
            (WORKING, working_bytes(training) + (projecting if training.optimizer.step_in_backward else 0)),
        ),
    )
    yield (
        "backward of first layer",
        (*fixed, ("gradients", gradients), (KEPT, kept_bytes(training)), (WORKING, working_bytes(training))),
    )
    times = 0 if training.optimizer.step_in_backward else training.optimizer.temporaries
    temporaries = times * everything // shards or projecting
    yield ("optimizer step", (*fixed, ("gradients", gradients), ("optimizer temporaries", temporaries)))


def _state_bytes(training: Training, layers: int, trained: int) -> float:
    """Of the states of so many layers and what stands outside of them.

    Of a matrix of n x m, n >= m, GaLore (Zhao et al. 2024, arXiv:2403.03507) steps n x r and keeps what projects onto
    r directions, in the type of the gradients: galore_torch/galore_projector.py, where fp32 rows of it are a view of
    all m x m. What no layer has, and vectors, it steps as they are.
    """
    optimizer = training.optimizer
    if not optimizer.projected_rank:
        return optimizer.state_bytes * trained
    width = trained_width(training)
    projected, stepped, projectors = 0, 0, 0
    for name, size in training.shape.projections.items():
        less, more = sorted(size)
        rank, count = min(optimizer.projected_rank, less), layers * copies(training, name)[0]
        projected += count * less * more
        stepped += count * rank * more
        projectors += count * less * (rank if width == 2 else less)
    return optimizer.state_bytes * (trained - projected + stepped) + width * projectors


def _projecting_bytes(training: Training) -> int:
    """What GaLore needs to choose directions anew: of the largest gradient its fp32 copies, of which one is the
    decomposition's own (aten/src/ATen/native/cuda/linalg/BatchLinearAlgebraLib.cpp, svd_cusolver), and both bases.
    """
    if not training.optimizer.projected_rank:
        return 0
    return max(4 * less * (3 * more + less) for less, more in map(sorted, training.shape.projections.values()))


def walked_moments(training: Training) -> Iterator[Live]:
    """A net whose layers do not repeat on one device, its weights in fp32."""
    counted = training.shape.walked(
        training.micro_batch_size,
        low=training.low_precision,
        early=training.platform.keeps_gradients,
        accumulates=training.gradient_accumulation_steps > 1 or training.platform.keeps_gradients,
    )
    weights = 4 * counted.parameters
    fixed: Causes = (
        ("parameters", weights + 4 * counted.frozen_parameters + counted.buffer_bytes),
        ("optimizer states", round(training.optimizer.state_bytes * counted.parameters)),
        ("gradient buckets", weights if training.dp > 1 else 0),
    )
    kept, working, gradients = counted.peak
    yield "backward pass", (*fixed, ("gradients", gradients), (KEPT, kept), (WORKING, working))
    temporaries = training.optimizer.temporaries * weights
    yield "optimizer step", (*fixed, ("gradients", weights), ("optimizer temporaries", temporaries))
