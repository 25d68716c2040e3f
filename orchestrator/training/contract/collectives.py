"""Collectives of torch.distributed, re-exported under torch's names, and as steps of a backward pass."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

Change = Callable[[Tensor], Tensor]  # of values or of gradients

# torch 2.13 renamed both, and warns of the former names.
all_gather: Any = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
all_to_all: Any = dist.all_to_all_single
reduce_scatter: Any = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor


def exchange_with_gradient(x: Tensor, exchange: Change, exchange_gradient: Change) -> Tensor:
    """Return `exchange(x)`, which sends values between ranks; in backward, `exchange_gradient` is
    applied to its gradient.
    """
    return _Move.apply(x, exchange, exchange_gradient)  # type: ignore[no-untyped-call]


class _Move(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, there: Change, back: Change) -> Tensor:
        ctx.back = back
        return there(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None, None]:
        return ctx.back(grad), None, None


def all_reduce_sum(x: Tensor, group: dist.ProcessGroup | None = None) -> Tensor:
    """Return the sum of `x` over the ranks of the group; None as `group` means all ranks, or this
    one alone.
    """
    # not in place: selective checkpointing saves the output of the matrix product
    total = x.contiguous().clone()
    if dist.is_initialized():
        dist.all_reduce(total, group=group)
    return total
