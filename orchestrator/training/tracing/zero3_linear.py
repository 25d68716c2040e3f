"""DeepSpeed stage 3's linear function, reimplemented for traces, which run without DeepSpeed."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


def zero3_linear(
    input: Tensor, weight: Tensor, bias: Tensor | None = None
) -> Tensor:  # torch's name
    """Return `torch.nn.functional.linear` of the same arguments, as DeepSpeed's stage 3 computes it."""
    return Zero3Linear.apply(input, weight, bias)  # type: ignore[no-untyped-call]


class Zero3Linear(torch.autograd.Function):
    """Replaces torch's linear function and saves all inputs, even those that no gradient needs.

    Source: `LinearFunctionForZeroStage3` in deepspeed/runtime/zero/linear.py, 0.19.8.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
        ctx.save_for_backward(x, weight, bias)
        product = x.matmul(weight.t())
        return product if bias is None else product.add_(bias)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, _ = ctx.saved_tensors
        asks = ctx.needs_input_grad
        rows = grad.reshape(-1, grad.shape[-1])
        return (
            grad.matmul(weight) if asks[0] else None,
            rows.t().matmul(x.reshape(-1, x.shape[-1])) if asks[1] else None,
            rows.sum(0) if asks[2] else None,
        )
