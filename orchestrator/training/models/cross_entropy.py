"""Cross entropy from hidden states: logits exist only for a chunk of tokens at a time.

The loss is a sum, so its gradient with respect to the logits follows from the logits alone: softmax minus one-hot. The
forward pass computes both gradients chunk by chunk, and the backward pass only scales them. Nothing is computed twice.
Memory: logits [CHUNK_TOKENS, V] instead of [N, V], and the weight's gradient, which is needed anyway.

Shape suffixes: N tokens, C tokens of a chunk, D hidden, V vocabulary (this rank's part of it under tensor parallel).
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Shard
from torch.nn import functional

from orchestrator.training.contract.collectives import all_gather, reduce_scatter
from orchestrator.training.contract.recipe import IGNORED_LABEL

# 0.5 GB of fp32 logits at a vocabulary of 128,000; matrix products of this size are efficient
CHUNK_TOKENS = 1024


def linear_cross_entropy(hidden_ND: Tensor, weight: Tensor, labels_N: Tensor) -> Tensor:
    """Return the cross entropy of `hidden @ weight.T`, summed over tokens whose label is not ignored; scalar, fp32.

    `weight` is [V, D]. As a DTensor it is sharded by vocabulary over a tensor-parallel mesh, and the loss is equal on
    its ranks (Shoeybi et al. 2019, arXiv:1909.08053, section 3). `labels` are those of all tokens. `hidden` may have
    all, too, or this rank's equal share of them, padded at the end: then chunks are gathered, and their gradients
    reduce-scattered.
    """
    if not isinstance(weight, DTensor):
        return _LinearCrossEntropy.apply(hidden_ND, weight, labels_N, 0, None)  # type: ignore[no-untyped-call]
    assert weight.placements == (Shard(0),), weight.placements
    mesh = weight.device_mesh
    width = weight.shape[0]
    first = mesh.get_local_rank() * -(-width // mesh.size())  # torch.chunk's cut
    local_VD = weight.to_local()
    return _LinearCrossEntropy.apply(hidden_ND, local_VD, labels_N, first, mesh.get_group())  # type: ignore[no-untyped-call]


class _LinearCrossEntropy(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        hidden_ND: Tensor,
        weight_VD: Tensor,
        labels_N: Tensor,
        first: int,
        group: dist.ProcessGroup | None,
    ) -> Tensor:
        device = hidden_ND.device.type
        dtype = (
            torch.get_autocast_dtype(device)
            if torch.is_autocast_enabled(device)
            else hidden_ND.dtype
        )
        cast_VD = weight_VD.to(dtype)
        needs_hidden, needs_weight = ctx.needs_input_grad[:2]
        loss = torch.zeros((), dtype=torch.float32, device=hidden_ND.device)
        hidden_grad = torch.empty_like(hidden_ND) if needs_hidden else None
        weight_grad = torch.zeros_like(weight_VD, dtype=torch.float32) if needs_weight else None
        spread = (
            _SpreadTokens(group, len(hidden_ND), labels_N)
            if group and len(hidden_ND) < len(labels_N)
            else None
        )
        step = spread.chunk_tokens if spread else CHUNK_TOKENS
        with torch.autocast(device, enabled=False):
            for start in range(0, len(hidden_ND), step):
                rows = slice(start, start + step)
                chunk_CD = hidden_ND[rows].to(dtype)
                labels_C = labels_N[rows]
                if spread:
                    chunk_CD = spread.gather(chunk_CD)
                    labels_C = spread.labels(rows)
                chunk_loss, grad_CV = _compute_loss_and_gradient(
                    chunk_CD @ cast_VD.T, labels_C - first, group
                )
                loss += chunk_loss
                grad_CV = grad_CV.to(dtype)
                own_grad = None if hidden_grad is None else hidden_grad[rows]
                add_chunk_gradients(
                    grad_CV, chunk_CD, cast_VD, None if spread else own_grad, weight_grad
                )
                if spread and own_grad is not None:
                    spread.sum_into(own_grad, grad_CV @ cast_VD)
                del grad_CV
            if hidden_grad is not None and group is not None and not spread:
                dist.all_reduce(hidden_grad, group=group)
        ctx.hidden_grad = hidden_grad
        ctx.weight_grad = None if weight_grad is None else weight_grad.to(weight_VD.dtype)
        return loss

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, Tensor | None, None, None, None]:
        hidden_grad = ctx.hidden_grad
        weight_grad = ctx.weight_grad
        ctx.hidden_grad = ctx.weight_grad = None
        for grad_part in (hidden_grad, weight_grad):
            if grad_part is not None:
                grad_part.mul_(grad)
        return hidden_grad, weight_grad, None, None, None


class _SpreadTokens:
    """Tokens that the ranks of a group hold in equal shares, processed chunk by chunk."""

    def __init__(self, group: dist.ProcessGroup, own_token_count: int, labels_N: Tensor) -> None:
        self._group = group
        ranks = group.size()
        padding = own_token_count * ranks - len(labels_N)
        self._labels = functional.pad(labels_N, (0, padding), value=IGNORED_LABEL).view(
            ranks, own_token_count
        )
        self.chunk_tokens = max(1, CHUNK_TOKENS // ranks)  # of one rank

    def labels(self, rows: slice) -> Tensor:
        """Return the labels of the chunk of all ranks together, rank after rank."""
        return self._labels[:, rows].flatten()

    def gather(self, chunk: Tensor) -> Tensor:
        whole = chunk.new_empty(self._group.size() * len(chunk), chunk.shape[1])
        all_gather(whole, chunk.contiguous(), group=self._group)
        return whole

    def sum_into(self, own_rows: Tensor, all_rows: Tensor) -> None:
        """Sum `all_rows` over the ranks, and write this rank's rows of the sum to `own_rows`."""
        reduce_scatter(own_rows, all_rows.to(own_rows.dtype), group=self._group)


def add_chunk_gradients(
    grad_CV: Tensor,
    chunk_CD: Tensor,
    weight_VD: Tensor,
    hidden_grad_CD: Tensor | None,
    weight_grad_VD: Tensor | None,
) -> None:
    """Write a chunk's gradient for the hidden states, and add its gradient for the weight to that
    of earlier chunks, in place.
    """
    if hidden_grad_CD is not None:
        hidden_grad_CD.copy_(grad_CV @ weight_VD)
    if weight_grad_VD is not None and grad_CV.dtype is torch.float32:
        weight_grad_VD.addmm_(grad_CV.T, chunk_CD)
    elif weight_grad_VD is not None:
        weight_grad_VD += grad_CV.T @ chunk_CD


def _compute_loss_and_gradient(
    logits_CV: Tensor, labels_C: Tensor, group: dist.ProcessGroup | None
) -> tuple[Tensor, Tensor]:
    """Return (summed loss of a chunk, its gradient for the logits), fp32; the memory of fp32 logits
    is reused.

    `labels_C` count from this rank's first vocabulary entry, so those of other ranks are outside
    the logits.
    """
    logits_CV = logits_CV.float()
    here_C = (labels_C >= 0) & (labels_C < logits_CV.shape[1])
    counted_C = here_C.clone()
    at_C = labels_C.clamp(0, logits_CV.shape[1] - 1).unsqueeze(1)
    top_C = logits_CV.amax(dim=1)
    if group is not None:
        dist.all_reduce(top_C, op=dist.ReduceOp.MAX, group=group)
    logits_CV.sub_(top_C.unsqueeze(1))
    label_logit_C = logits_CV.gather(1, at_C).squeeze(1) * here_C
    total_C = logits_CV.exp_().sum(dim=1)
    if group is not None:
        sums = torch.stack((total_C, label_logit_C, counted_C.float()))
        dist.all_reduce(sums, group=group)
        total_C = sums[0]
        label_logit_C = sums[1]
        counted_C = sums[2] > 0
    loss = ((total_C.log() - label_logit_C) * counted_C).sum()
    logits_CV.div_(total_C.unsqueeze(1))
    logits_CV.scatter_add_(1, at_C, -here_C.float().unsqueeze(1))
    return loss, logits_CV.mul_(counted_C.unsqueeze(1))


assert IGNORED_LABEL < 0, "the ignored label must be outside every vocabulary"
