"""The 8-bit AdamW of torchao: both moments quantised in blocks (Dettmers et al. 2022, arXiv:2110.02861).

Blocks have 256 elements of a rank's part of a parameter. Moments stay in fp32 for parts below 4096 elements, or not
divisible by 256 (torchao/optim/adam.py, _new_buffer, torchao 0.18). Weights in bf16 are rounded stochastically: torchao
draws from torch's generator, so that copies of a weight stay equal where the ranks that hold them have seeded it alike.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from orchestrator.specs.job.model import TrainingSpec
from orchestrator.training.checkpoint.fragment import Chunks, Narrow, get_local_part, make_chunks

# elements
BLOCK = 256
QUANTISED_MIN = 4096


def make_eight_bit_adamw(groups: Sequence[dict[str, Any]], training: TrainingSpec) -> Any:
    """Return the 8-bit AdamW optimizer over these parameter groups."""
    from torchao.optim import AdamW8bit  # only here: it takes a second

    return AdamW8bit(
        groups,
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        bf16_stochastic_round=True,
    )


def make_optimizer_state(tensor: Tensor) -> dict[str, Any]:
    """Return a parameter's optimizer states before its first update, all moments zero.

    Moments that are not quantised are fp32 beside any weight: in bf16 a second moment would hardly
    move.
    """
    moments = {"exp_avg": True, "exp_avg_sq": False}  # whether it has a sign
    return {"step": torch.tensor(0.0)} | {
        name: _make_zero_moment(tensor, is_signed) for name, is_signed in moments.items()
    }


def _make_zero_moment(tensor: Tensor, has_sign: bool) -> Tensor:
    from torchao.optim.subclass_8bit import OptimState8bit

    local = get_local_part(tensor)
    if local.numel() < QUANTISED_MIN or local.numel() % BLOCK:
        moment = torch.zeros_like(local, dtype=torch.float32, requires_grad=False)
    else:
        moment = OptimState8bit.zeros(
            local.shape, has_sign, BLOCK, local.device, dtype=torch.float32
        )
    if not isinstance(tensor, DTensor):
        return moment
    return DTensor.from_local(
        moment,
        tensor.device_mesh,
        tensor.placements,
        run_check=False,
        shape=tensor.shape,
        stride=tensor.stride(),
    )


def prepare_moment_for_saving(moment: Tensor) -> Tensor | Chunks:
    """Return a moment in the form in which checkpoints store it, sharing its memory."""
    from torchao.optim.subclass_8bit import OptimState8bit

    local = get_local_part(moment)
    chunks = make_chunks(moment)
    return Narrow(chunks.parts, chunks.size()) if isinstance(local, OptimState8bit) else moment


def make_compilation_context(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Return a context for updates: compiled to one kernel per shape on CUDA, op by op on the CPU.

    On the CPU the compiler would take longer than the small models of virtual devices train. Both
    ways' temporaries are in memory/engines/optimizers.py.
    """
    return (
        torch.compiler.set_stance("force_eager")
        if device.type == "cpu"
        else contextlib.nullcontext()
    )
