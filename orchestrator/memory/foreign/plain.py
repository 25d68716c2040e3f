"""Which bytes are live at which moment where nothing is cut, or layers lie on device after device."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.foreign.activations import KEPT, WORKING, cast_bytes, head_bytes, kept_bytes, working_bytes
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.training import Live, Training, ends_held, layer_held, trained_width
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
        else round((4 * training.optimizer.masters + training.optimizer.state_bytes) * trained / shards)
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
    yield ("backward of head", (*fixed, ("gradients", accumulated), (KEPT, kept), (WORKING, head_bytes(training))))
    yield (
        "backward of last layer",
        (
            *fixed,
            ("gradients", max(accumulated, width * min(trained, ends.trained + layer.trained))),
            (KEPT, kept),
            (WORKING, working_bytes(training)),
        ),
    )
    yield (
        "backward of first layer",
        (*fixed, ("gradients", gradients), (KEPT, kept_bytes(training)), (WORKING, working_bytes(training))),
    )
    temporaries = everything // shards if training.optimizer.foreach and not training.optimizer.step_in_backward else 0
    yield ("optimizer step", (*fixed, ("gradients", gradients), ("optimizer temporaries", temporaries)))


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
    temporaries = weights if training.optimizer.foreach else 0
    yield "optimizer step", (*fixed, ("gradients", weights), ("optimizer temporaries", temporaries))
