"""Memory of the optimizer: its states per parameter, and its temporary tensors during an update."""

from __future__ import annotations

import math

from orchestrator.memory.engines.moments import FP32_BYTES
from orchestrator.specs.choices import Engine, MasterWeights, Offload, Optimizer
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile, Segment, Source

ADAM_BYTES = 8  # exp_avg and exp_avg_sq in fp32 (Kingma and Ba 2015, arXiv:1412.6980)
SGD_BYTES = 4  # the momentum buffer; counted where momentum is 0 too, since the plan does not say
# Of a tensor in 8 bits: a byte of each moment, the fp32 largest values of every block, and a table
# of fp32 values for
# each moment (torchao/optim/subclass_8bit.py). Smaller tensors keep fp32
# (training/engines/eight_bit.py).
BLOCK = 256
QUANTISED_MIN = 4096
TABLES_BYTES = 2 * 256 * FP32_BYTES
# Held of each element while 8-bit AdamW updates its tensor. Compiled, two fp32 values (what
# inductor allocates for
# single_param_adam, torch 2.13.0, torchao 0.18). Operation by operation, on a virtual device: seven
# fp32 values, two
# int64 codes and two fp32 differences, and with them a mask and a third code
# (torchao/optim/quant_utils.py,
# quantize_8bit_with_qmap, its last `where`).
COMPILED_8BIT_BYTES = 8
EAGER_8BIT_BYTES = 53
# More where the weight is bf16: its gradient in fp32 (torchao/optim/adam.py, single_param_adam).
WIDENED_BYTES = 4


def estimate_optimizer_state_bytes(profile: ModelProfile, plan: Plan, shard_count: int) -> int:
    """Return the bytes of optimizer states on a rank with one of `shard_count` equal shards of the
    trained parameters.
    """
    narrow = 1 if plan.mechanics.has_fp32_states else FP32_BYTES // profile.parameter_bytes
    if plan.optimizer is Optimizer.ADAFACTOR:
        return FP32_BYTES * -(-_compute_factored_elements(profile) // shard_count)
    if plan.optimizer is Optimizer.ADAMW_8BIT:
        return sum(
            segment.count * _compute_eight_bit_state_bytes(segment, profile, plan, shard_count)
            for segment in profile.segments
        )
    return (
        (SGD_BYTES if plan.optimizer is Optimizer.SGD else ADAM_BYTES)
        // narrow
        * -(-profile.trained_parameters // shard_count)
    )


def update_temporary_bytes(
    plan: Plan, tensor_elements: int, *, is_cuda: bool, previous_elements: int = 0
) -> int:
    """Return the bytes of temporary tensors while a tensor of `tensor_elements` elements is updated.

    torch/optim: fused rules, which run on CUDA, hold none; AdamW one by one holds two, the others
    one. bitsandbytes, by which scripts have 8 bits, updates in one kernel
    (`optimizer_update_8bit_blockwise`, version 0.48). AdamW's denominator for the tensor updated
    before, of `previous_elements` elements, lives until the next one exists (torch/optim/adam.py,
    _single_tensor_adam, torch 2.13.0).
    """
    if plan.optimizer is Optimizer.ADAMW_8BIT:
        if is_cuda and plan.engine is Engine.SCRIPT:
            return 0
        widened = 0 if plan.master_weights is MasterWeights.FP32 else WIDENED_BYTES
        return tensor_elements * (COMPILED_8BIT_BYTES if is_cuda else EAGER_8BIT_BYTES + widened)
    if is_cuda and plan.offload is Offload.NONE and plan.optimizer is not Optimizer.ADAFACTOR:
        return 0
    return FP32_BYTES * (
        2 * tensor_elements + previous_elements
        if plan.optimizer is Optimizer.ADAMW
        else tensor_elements
    )


def _compute_eight_bit_state_bytes(
    segment: Segment, profile: ModelProfile, plan: Plan, shard_count: int
) -> int:
    """Return the bytes of one rank's 8-bit optimizer states for one part of a segment.

    A declared profile names no tensors, so all but the last block of a part is in 8 bits.
    transformers' Trainer keeps the states of embeddings in fp32 (transformers/trainer.py,
    create_optimizer: `register_module_override`).
    """
    if profile.source in (Source.DECLARED, Source.DECLARED_MEMORY):
        elements = -(-segment.trained_parameters // shard_count)
        return _compute_eight_bit_moment_bytes(elements - elements % BLOCK) + ADAM_BYTES * (
            elements % BLOCK
        )
    if plan.engine is Engine.SCRIPT and not segment.is_unit:
        return ADAM_BYTES * -(-segment.trained_parameters // shard_count)
    return sum(
        _compute_eight_bit_moment_bytes(-(-tensor // shard_count)) for tensor in segment.gradients
    )


def _compute_eight_bit_moment_bytes(elements: int) -> int:
    """Return the bytes of both moments of a tensor with `elements` elements on a rank; small
    tensors keep theirs in fp32.
    """
    if elements < QUANTISED_MIN or elements % BLOCK:
        return ADAM_BYTES * elements
    return 2 * (elements + FP32_BYTES * elements // BLOCK) + TABLES_BYTES


def _compute_factored_elements(profile: ModelProfile) -> int:
    """Return the elements of Adafactor's factored second moments for the whole model (Shazeer and
    Stern 2018, arXiv:1804.04235, section 3).
    """
    return sum(
        segment.count
        * (
            segment.factored
            if segment.factored is not None
            else 2 * math.isqrt(segment.trained_parameters)
        )
        for segment in profile.segments
    )
