"""Sequence parallelism (Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2): ranks split the tokens.

Tensor parallelism alone repeats everything between sharded modules on every rank. Here every rank has an equal run of
the micro-batch's tokens instead, all samples behind each other; zeros fill up the last run. A sharded module gathers
the tokens of all ranks, and its partial sums are reduce-scattered. Both together move as much as one all-reduce.

Shape suffixes: B samples, T tokens, D hidden, N tokens of one rank, F columns of one rank; R = B T.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.distributed_c10d import GroupName, _resolve_process_group  # type: ignore[attr-defined]
from torch.nn import functional

from orchestrator.specs.errors import SpecError
from orchestrator.training.contract.collectives import (
    all_gather,
    exchange_with_gradient,
    reduce_scatter,
)


class TokenSplit:
    """The split of every micro-batch's tokens over the ranks of a tensor-parallel group."""

    def __init__(self, group: dist.ProcessGroup, sample_count: int, tokens_per_sample: int) -> None:
        """Make the split; every micro-batch has `sample_count` (B) samples of `tokens_per_sample`
        (T) tokens.
        """
        self.group = group
        self._samples = sample_count
        self._length = tokens_per_sample
        self._own_count = -(
            -sample_count * tokens_per_sample // group.size()
        )  # N, padding included

    def sum_tokens(self, x_BTD: Tensor) -> Tensor:
        """Return this rank's tokens [1, N, D] of the sum over the ranks (a reduce-scatter)."""
        return exchange_with_gradient(x_BTD, self._reduce_scatter_sum, self._gather_all_tokens)

    def make_stand_in(self, x_1ND: Tensor) -> Tensor:
        """Return a tensor [B, T, D] without memory, from whose shape a model makes its positions
        and masks.
        """
        x_BTD = x_1ND.detach()[:, :1].expand(self._samples, self._length, -1)
        x_BTD.own = x_1ND  # type: ignore[attr-defined]
        return x_BTD

    def gather(self, x_1ND: Tensor) -> Tensor:
        """Return all tokens [B, T, D] for a sharded module; its ranks' gradients are summed.

        `multiply_column_parallel` needs only this rank's tokens for the backward pass, and reads them from
        the result.
        """
        if torch.is_autocast_enabled(x_1ND.device.type):
            x_1ND = x_1ND.to(torch.get_autocast_dtype(x_1ND.device.type))
        x_BTD: Any = exchange_with_gradient(
            x_1ND, self._gather_all_tokens, self._reduce_scatter_sum
        )
        x_BTD.own = x_1ND.detach()
        x_BTD.gathered = GatheredInput(self)
        return x_BTD

    def _gather_all_tokens(self, x_1ND: Tensor) -> Tensor:
        return self.finish_gathering_all(*self.begin_gathering_all(x_1ND))

    def begin_gathering_all(self, x_1ND: Tensor) -> tuple[Tensor, dist.Work | None]:
        """Start gathering; return (all ranks' tokens [R + padding, D], the pending gather to wait
        for, or None).
        """
        x_RD = x_1ND.new_empty(self.group.size() * self._own_count, x_1ND.shape[-1])
        work = all_gather(x_RD, x_1ND.flatten(0, 1).contiguous(), group=self.group, async_op=True)
        return x_RD, work

    def finish_gathering_all(self, x_RD: Tensor, work: dist.Work | None) -> Tensor:
        if work is not None:
            work.wait()
        return x_RD[: self._samples * self._length].view(self._samples, self._length, -1)

    def _reduce_scatter_sum(self, x_BTD: Tensor) -> Tensor:
        return _reduce_scatter(x_BTD.flatten(0, 1), self.group).unsqueeze(0)


class GatheredInput:
    """State that the products of one gathered input share, so that their backward passes gather the
    input again only once.
    """

    def __init__(self, tokens: TokenSplit) -> None:
        self.tokens = tokens
        self._readers = 0
        self._coming: tuple[Tensor, dist.Work | None] | None = None

    def add_reader(self) -> None:
        """Count one more product that needs the gathered input in its backward pass."""
        self._readers += 1

    def begin_gathering(self, x_1ND: Tensor) -> None:
        """Start gathering the input again, unless another product already has."""
        if self._coming is None:
            self._coming = self.tokens.begin_gathering_all(x_1ND)

    def finish_gathering(self) -> Tensor:
        """Return the gathered input [B, T, D]; the call of the last product frees it."""
        assert self._coming is not None
        x_BTD = self.tokens.finish_gathering_all(*self._coming)
        self._readers -= 1
        if not self._readers:
            self._coming = None
        return x_BTD


def get_own_tokens(x_BTD: Tensor) -> Tensor:
    """Return the tokens of this rank for which a stand-in was made.

    Raises SpecError if the model replaced the stand-in by another tensor.
    """
    own_1ND: Tensor | None = getattr(x_BTD, "own", None)
    if own_1ND is None:
        raise SpecError(
            "the model changes hidden states before its first layer",
            path="tensor_parallel",
            allowed="an embedding that layers follow",
            hint="leave out `gathered`",
        )
    return own_1ND


def multiply_column_parallel(x_BTD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    """Return `x` times this rank's rows of a weight. The backward pass gathers `x` again instead of
    keeping it.

    Where a hook or the model replaced the gathered tensor by another, `x` is kept.
    """
    if not hasattr(x_BTD, "gathered"):
        return _column_product_of_tokens(x_BTD, weight_FD, bias_F)
    return _ColumnProduct.apply(x_BTD, x_BTD.own, weight_FD, bias_F, x_BTD.gathered)  # type: ignore[attr-defined, no-untyped-call]


def _column_product_of_tokens(x_BTD: Tensor, weight_FD: Tensor, bias_F: Tensor | None) -> Tensor:
    dtype = x_BTD.dtype
    return functional.linear(
        x_BTD, weight_FD.to(dtype), None if bias_F is None else bias_F.to(dtype)
    )


Gradients = tuple[Tensor | None, ...]  # of each argument; None: it needs none


class _ColumnProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any,
        x_BTD: Tensor,
        x_1ND: Tensor,
        weight_FD: Tensor,
        bias_F: Tensor | None,
        gathered: GatheredInput,
    ) -> Tensor:
        ctx.save_for_backward(x_1ND, weight_FD)
        ctx.gathered = gathered
        if ctx.needs_input_grad[2]:
            gathered.add_reader()
        return _column_product_of_tokens(x_BTD, weight_FD, bias_F)

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTF: Tensor) -> Gradients:
        x_1ND, weight_FD = ctx.saved_tensors
        needs_x, _, needs_weight, needs_bias, _ = ctx.needs_input_grad
        if needs_weight:
            ctx.gathered.begin_gathering(x_1ND)  # while the next product is computed
        grad_x = grad_BTF @ weight_FD.to(grad_BTF.dtype) if needs_x else None
        grad_weight = grad_bias = None
        if needs_weight:
            x_RD = ctx.gathered.finish_gathering().flatten(0, 1)
            grad_weight = (grad_BTF.flatten(0, 1).T @ x_RD).to(weight_FD.dtype)
        if needs_bias:
            grad_bias = grad_BTF.flatten(0, 1).sum(0).to(weight_FD.dtype)
        return grad_x, None, grad_weight, grad_bias, None


def multiply_row_parallel(x_BTF: Tensor, weight_DF: Tensor, tokens: TokenSplit) -> Tensor:
    """Return this rank's tokens [1, N, D] of the product with its weight columns, summed over the ranks.

    The tensors for the backward pass are saved before the product is made, since recomputing a layer ends there.
    """
    if torch.is_autocast_enabled(x_BTF.device.type):
        x_BTF = x_BTF.to(torch.get_autocast_dtype(x_BTF.device.type))
    product_BTD = _RowFactors.apply(x_BTF, weight_DF)  # type: ignore[no-untyped-call]
    return _RowSum.apply(product_BTD, x_BTF.detach(), weight_DF.detach(), tokens)  # type: ignore[no-untyped-call]


class _RowFactors(torch.autograd.Function):
    """Function that attaches both factors of a product to a stand-in, which has the product's shape
    but no memory.
    """

    @staticmethod
    def forward(ctx: Any, x_BTF: Tensor, weight_DF: Tensor) -> Tensor:
        ctx.save_for_backward(x_BTF, weight_DF)
        return x_BTF.new_zeros(()).expand(*x_BTF.shape[:-1], len(weight_DF))

    @staticmethod
    @torch.autograd.function.once_differentiable
    def backward(ctx: Any, grad_BTD: Tensor) -> Gradients:
        x_BTF, weight_DF = ctx.saved_tensors
        needs_x, needs_weight = ctx.needs_input_grad
        grad_x = grad_BTD @ weight_DF.to(grad_BTD.dtype) if needs_x else None
        grad_weight = None
        if needs_weight:
            grad_weight = (grad_BTD.flatten(0, 1).T @ x_BTF.flatten(0, 1)).to(weight_DF.dtype)
        return grad_x, grad_weight


class _RowSum(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, _product_BTD: Tensor, x_BTF: Tensor, weight_DF: Tensor, tokens: TokenSplit
    ) -> Tensor:
        ctx.tokens = tokens
        weight_DF = weight_DF.to(x_BTF.dtype)
        return summed_product(x_BTF.flatten(0, 1), weight_DF, tokens.group.group_name).unsqueeze(0)

    @staticmethod
    def backward(ctx: Any, grad_1ND: Tensor) -> Gradients:
        return ctx.tokens._gather_all_tokens(grad_1ND), None, None, None


@torch.library.custom_op("orchestrator::summed_product", mutates_args=())
def summed_product(x_RF: Tensor, weight_DF: Tensor, group_name: str) -> Tensor:
    """Return this rank's tokens [N, D] of `x @ weight.T`, summed over the group.

    It is one operation, so that selective checkpointing keeps its result and not the product of all
    tokens.
    """
    return _reduce_scatter(x_RF @ weight_DF.T, _resolve_process_group(GroupName(group_name)))


@summed_product.register_fake
def _(x_RF: Tensor, weight_DF: Tensor, group_name: str) -> Tensor:
    ranks = _resolve_process_group(GroupName(group_name)).size()
    return x_RF.new_empty(-(-x_RF.shape[0] // ranks), weight_DF.shape[0])


SUMMED_PRODUCT = torch.ops.orchestrator.summed_product.default


def _reduce_scatter(x_RD: Tensor, group: dist.ProcessGroup) -> Tensor:
    rows = x_RD.shape[0]
    ranks = group.size()
    count = -(-rows // ranks)
    if count * ranks > rows:
        x_RD = functional.pad(x_RD, (0, 0, 0, count * ranks - rows))
    own_ND = x_RD.new_empty(count, x_RD.shape[1])
    reduce_scatter(own_ND, x_RD.contiguous(), group=group)
    return own_ND


def sum_gradients(gradients: Sequence[Tensor], group: dist.ProcessGroup) -> None:
    """Sum gradients of one dtype over the group in one message, in place."""
    if not gradients:
        return
    flat = torch.cat([gradient.flatten() for gradient in gradients])
    dist.all_reduce(flat, group=group)
    summed = torch.split(flat, [gradient.numel() for gradient in gradients])
    torch._foreach_copy_(
        list(gradients),
        [total.view_as(part) for total, part in zip(summed, gradients, strict=True)],
    )
