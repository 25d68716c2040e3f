"""AdamW as a job says it, and what every engine does around it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.specs.model import TrainingSpec

MOMENTS = ("exp_avg", "exp_avg_sq")  # torch.optim.AdamW's names


def adamw(parameters: Iterable[nn.Parameter], training: TrainingSpec, device: torch.device) -> torch.optim.AdamW:
    """AdamW for parameters on `device`: fused on CUDA; on CPU one at a time (foreach holds temporaries of all)."""
    return torch.optim.AdamW(
        [parameter for parameter in parameters if parameter.requires_grad],
        lr=training.learning_rate,
        betas=(training.beta1, training.beta2),
        weight_decay=training.weight_decay,
        foreach=False,
        fused=device.type == "cuda",
    )


def allocate_moments(optimizer: torch.optim.AdamW, tensors: Iterable[Tensor], step: int) -> None:
    """Give each tensor that the optimizer will update its state as of `step`, with moments of zero."""
    fused = optimizer.defaults["fused"]
    for tensor in tensors:
        optimizer.state[tensor] = {
            "step": torch.tensor(float(step), device=tensor.device if fused else "cpu"),
            **{moment: torch.zeros_like(tensor, requires_grad=False) for moment in MOMENTS},
        }


def clip(parameters: Sequence[nn.Parameter], clip_norm: float) -> float:
    """The global norm of all gradients before they are scaled down, in place, to `clip_norm` at most."""
    norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
    norm = norm.full_tensor() if isinstance(norm, DTensor) else norm
    torch.nn.utils.clip_grads_with_norm_(parameters, clip_norm, norm)
    return norm.item()
