"""Sends tokens to the ranks of their experts and back by all-to-alls (arXiv:2006.16668, section 3).

Each rank holds an equal run of a layer's experts. It sends a copy of a token to every expert that the router chose, and
gets the answers back. No copy is dropped, so that the mathematics is that of one rank. How many copies come to a rank
follows from the routing: ranks exchange these numbers first.

Shape suffixes: N tokens, K experts chosen for each, S = N K copies sent, R copies received, E experts, L experts of a
rank, P ranks, D hidden.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.training.contract.collectives import all_to_all, exchange_with_gradient

# Copies [R, D], those of one expert behind each other, and where those of each end [L], to answers
# [R, D].
OwnExperts = Callable[[Tensor, Tensor], Tensor]


class Dispatch:
    """An expert-parallel group, whose ranks hold equal parts of `count` experts."""

    def __init__(self, group: dist.ProcessGroup, count: int) -> None:
        assert count % group.size() == 0, f"{count} experts on {group.size()} ranks"
        self.group = group
        self._own = count // group.size()

    def answer(
        self, x_ND: Tensor, chosen_NK: Tensor, weights_NK: Tensor, experts: OwnExperts
    ) -> Tensor:
        """Return the weighted sum [N, D] of the chosen experts' outputs for each token, wherever
        these experts are.
        """
        chosen_S, order_S = torch.sort(chosen_NK.flatten(), stable=True)
        routes = self._make_routes(chosen_S)
        answers_SD = self._collect_expert_outputs(
            x_ND, order_S // chosen_NK.shape[1], routes, experts
        )
        weighted_SD = answers_SD * weights_NK.flatten()[order_S].unsqueeze(-1)
        return (
            weighted_SD[_compute_inverse_permutation(order_S)]
            .view(*chosen_NK.shape, -1)
            .sum(dim=1)
            .to(x_ND.dtype)
        )

    def _collect_expert_outputs(
        self, x_ND: Tensor, token_S: Tensor, routes: _Routes, experts: OwnExperts
    ) -> Tensor:
        """Return the experts' outputs for the copies of these tokens, computed on the experts'
        ranks.

        No local variable outlives what is computed from it, so that memory is freed early.
        """
        came_RD = exchange_with_gradient(x_ND[token_S], routes.to_experts, routes.to_tokens)
        return exchange_with_gradient(
            experts(came_RD, routes.ends_L), routes.to_tokens, routes.to_experts
        )

    def _make_routes(self, chosen_S: Tensor) -> _Routes:
        """Return where each copy of a token goes, with copies sorted by expert."""
        ranks = self.group.size()
        sent_PL = torch.bincount(chosen_S, minlength=ranks * self._own).view(ranks, self._own)
        received_PL = torch.empty_like(sent_PL)
        all_to_all(received_PL, sent_PL, group=self.group)
        own_L = torch.arange(self._own, device=chosen_S.device)
        expert_R = own_L.repeat(ranks).repeat_interleave(received_PL.flatten())
        # the host waits for the device here
        sent, received = torch.stack((sent_PL, received_PL)).sum(dim=-1).tolist()
        return _Routes(
            group=self.group,
            sent=sent,
            received=received,
            order_R=torch.argsort(expert_R, stable=True),
            ends_L=received_PL.sum(dim=0).cumsum(dim=0, dtype=torch.int32),
        )


class _Routes(NamedTuple):
    """Where the copies of one layer's tokens go."""

    group: dist.ProcessGroup
    sent: list[int]  # copies, by rank
    received: list[int]
    order_R: Tensor  # of the received copies, by expert: they come by rank
    ends_L: Tensor

    def to_experts(self, x_SD: Tensor) -> Tensor:
        return self._exchange(x_SD, self.sent, self.received)[self.order_R]

    def to_tokens(self, x_RD: Tensor) -> Tensor:
        return self._exchange(
            x_RD[_compute_inverse_permutation(self.order_R)], self.received, self.sent
        )

    def _exchange(self, x: Tensor, sent: list[int], received: list[int]) -> Tensor:
        gathered = x.new_empty(sum(received), *x.shape[1:])
        all_to_all(gathered, x.contiguous(), received, sent, group=self.group)
        return gathered


def _compute_inverse_permutation(order: Tensor) -> Tensor:
    """Return the inverse of a permutation."""
    inverse = torch.empty_like(order)
    inverse[order] = torch.arange(len(order), device=order.device)
    return inverse
