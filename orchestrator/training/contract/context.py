"""Context parallelism by all-to-alls (DeepSpeed's Ulysses; Jacobs et al. 2023, arXiv:2309.14509).

Each rank has an equal run of every sample's tokens. Attention alone needs all of them: there a rank has all tokens of
its share of the heads, and all-to-alls go there and back. So a causal mask costs every rank the same, and any kernel
attends. Ring attention would allow more ranks than heads; torch 2.13 has it for CUDA's kernels only
(torch/distributed/tensor/experimental/_context_parallel/_attention.py).

Shape suffixes: B samples, T tokens, t tokens of one rank, N heads, n heads of one rank, H head width.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.training.contract.collectives import all_to_all

Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # queries, keys, values [B, n, T, H] to outputs [B, T, n, H]


class Context:
    """A context-parallel group, whose ranks hold equal runs of every sample's tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group, self.ranks, self.rank = group, group.size(), group.rank()
        self._windows: dict[tuple[int, int], Tensor] = {}  # by length and window; layers share one

    def own(self, x_BT: Tensor) -> Tensor:
        """Return this rank's part [B, t] of whole samples' tokens, or of any values per token."""
        return x_BT.chunk(self.ranks, dim=1)[self.rank]

    def first(self, own_count: int) -> int:
        """Return the position in its sample of this rank's first token."""
        return self.rank * own_count

    def window_mask(self, x_BnTH: Tensor, window: int | None) -> Tensor | None:
        """Return the causal mask [T, T] in which a token attends to itself and `window` - 1 before it.

        None where the window holds all tokens: a causal kernel needs no mask.
        """
        length = x_BnTH.shape[2]
        if window is None or window >= length:
            return None
        if (length, window) not in self._windows:
            at_T = torch.arange(length, device=x_BnTH.device)
            behind_TT = at_T[:, None] - at_T[None, :]
            self._windows[length, window] = (behind_TT >= 0) & (behind_TT < window)
        return self._windows[length, window]

    def attend(self, q_BNtH: Tensor, k_BKtH: Tensor, v_BKtH: Tensor, attention: Attend) -> Tensor:
        """Return the output of `attention` for this rank's tokens and all heads [B, t, N, H].

        Fewer key-value heads than ranks are repeated, so that each rank has the one that its queries need.
        """
        again = max(1, self.ranks // k_BKtH.shape[1])
        keys_and_values = (
            x.repeat_interleave(again, dim=1) if again > 1 else x for x in (k_BKtH, v_BKtH)
        )
        out_BTnH = attention(
            *(self._to_heads(x).transpose(1, 2) for x in (q_BNtH, *keys_and_values))
        )
        return _ToTokens.apply(out_BTnH, self.group)  # type: ignore[no-untyped-call]

    def _to_heads(self, x_BNtH: Tensor) -> Tensor:
        return _ToHeads.apply(x_BNtH.transpose(1, 2), self.group)  # type: ignore[no-untyped-call]


class _ToHeads(torch.autograd.Function):
    """[B, t, N, H] to [B, T, n, H]."""

    @staticmethod
    def forward(ctx: Any, x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_heads(x_BtNH, group)

    @staticmethod
    def backward(ctx: Any, grad_BTnH: Tensor) -> tuple[Tensor, None]:
        return _to_tokens(grad_BTnH, ctx.group), None


class _ToTokens(torch.autograd.Function):
    """[B, T, n, H] to [B, t, N, H]."""

    @staticmethod
    def forward(ctx: Any, x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
        ctx.group = group
        return _to_tokens(x_BTnH, group)

    @staticmethod
    def backward(ctx: Any, grad_BtNH: Tensor) -> tuple[Tensor, None]:
        return _to_heads(grad_BtNH, ctx.group), None


def _to_heads(x_BtNH: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent_RBtnH = _cut(x_BtNH, 2, group).movedim(2, 0).contiguous()
    return _exchange(sent_RBtnH, group).movedim(0, 1).flatten(1, 2)


def _to_tokens(x_BTnH: Tensor, group: dist.ProcessGroup) -> Tensor:
    sent_RBtnH = _cut(x_BTnH, 1, group).movedim(1, 0).contiguous()
    return _exchange(sent_RBtnH, group).movedim(0, 2).flatten(2, 3)


def _cut(x: Tensor, axis: int, group: dist.ProcessGroup) -> Tensor:
    """The axis as two: rank, and what is of that rank."""
    return x.unflatten(axis, (group.size(), -1))  # type: ignore[no-untyped-call]


def _exchange(sent: Tensor, group: dist.ProcessGroup) -> Tensor:
    """Return the received rows: row r came from rank r."""
    received = torch.empty_like(sent)
    all_to_all(received, sent, group=group)
    return received
