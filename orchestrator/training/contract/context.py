"""Context parallelism by all-to-alls (DeepSpeed's Ulysses; Jacobs et al. 2023, arXiv:2309.14509).

Each rank has an equal run of every sample's tokens. Attention alone needs all of them: there a rank has all tokens of
its share of the heads, and all-to-alls go there and back. So a causal mask costs every rank the same, and any kernel
attends. Ring attention would allow more ranks than heads; torch 2.13 has it for CUDA's kernels only
(torch/distributed/tensor/experimental/_context_parallel/_attention.py).

Shape suffixes: B samples, T tokens, t tokens of one rank, N heads, n heads of one rank, H head width.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.training.contract.collectives import all_to_all, exchange_with_gradient

Attend = Callable[
    [Tensor, Tensor, Tensor], Tensor
]  # queries, keys, values [B, n, T, H] to outputs [B, T, n, H]


class Context:
    """A context-parallel group, whose ranks hold equal runs of every sample's tokens."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.ranks = group.size()
        self.rank = group.rank()
        self._windows: dict[tuple[int, int], Tensor] = {}  # by length and window; layers share one

    def own(self, x_BT: Tensor) -> Tensor:
        """Return this rank's part [B, t] of the tokens of whole samples [B, T], or of any values
        per token.
        """
        return x_BT.chunk(self.ranks, dim=1)[self.rank]

    def first(self, own_count: int) -> int:
        """Return the position in its sample of this rank's first token, where each rank has
        `own_count` tokens.
        """
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

        Where there are fewer key-value heads than ranks, they are repeated: each rank has the head
        that its queries need.
        """
        again = max(1, self.ranks // k_BKtH.shape[1])
        keys_and_values = (
            x.repeat_interleave(again, dim=1) if again > 1 else x for x in (k_BKtH, v_BKtH)
        )
        out_BTnH = attention(
            *(
                exchange_with_gradient(
                    x.transpose(1, 2),
                    self._exchange_tokens_for_heads,
                    self._exchange_heads_for_tokens,
                ).transpose(1, 2)
                for x in (q_BNtH, *keys_and_values)
            )
        )
        return exchange_with_gradient(
            out_BTnH, self._exchange_heads_for_tokens, self._exchange_tokens_for_heads
        )

    def _exchange_tokens_for_heads(self, x_BtNH: Tensor) -> Tensor:
        """Return [B, T, n, H] (all tokens, this rank's heads) from [B, t, N, H] (this rank's
        tokens, all heads).
        """
        sent_RBtnH = self._split_axis_by_rank(x_BtNH, 2).movedim(2, 0).contiguous()
        return self._exchange(sent_RBtnH).movedim(0, 1).flatten(1, 2)

    def _exchange_heads_for_tokens(self, x_BTnH: Tensor) -> Tensor:
        """Return [B, t, N, H] (this rank's tokens, all heads) from [B, T, n, H] (all tokens, this
        rank's heads).
        """
        sent_RBtnH = self._split_axis_by_rank(x_BTnH, 1).movedim(1, 0).contiguous()
        return self._exchange(sent_RBtnH).movedim(0, 2).flatten(2, 3)

    def _split_axis_by_rank(self, x: Tensor, axis: int) -> Tensor:
        """Return `x` with this axis split into two: the index of a rank, and the position within
        that rank's part.
        """
        return x.unflatten(axis, (self.ranks, -1))  # type: ignore[no-untyped-call]

    def _exchange(self, rows_by_rank: Tensor) -> Tensor:
        """Send row r to rank r of the group, and return the rows received: row r came from rank r."""
        received = torch.empty_like(rows_by_rank)
        all_to_all(received, rows_by_rank, group=self.group)
        return received
