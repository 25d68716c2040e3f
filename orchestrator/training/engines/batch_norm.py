"""BatchNorm support: its output depends on which samples are normalised together, so the job sets their number.

With `training.batch_norm_samples: N` every plan normalises over N samples at a time. That is one micro-batch
(micro_batch_size = N), or with `sync_batch_norm` the simultaneous micro-batches of all data-parallel ranks
(micro_batch_size x dp = N). Losses equal those of one process with micro-batches of N samples.

Without it, a plan of one rank that takes the global batch at once normalises over all of it; no other plan is made.

Running statistics equal that process's as well. A micro-batch with statistics s updates r to (1 - momentum) r +
momentum s, which is linear in r. After n micro-batches a rank that began at r has (1 - momentum)^n r + c, where c
depends on its micro-batches only. One process would run the ranks' micro-batches rank by rank. So RunningStatistics
sums every rank's c after each step, each scaled by (1 - momentum) per micro-batch of the later ranks.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterable, Iterator

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.modules.batchnorm import _BatchNorm

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.training.contract.collectives import all_reduce_sum, exchange_with_gradient
from orchestrator.training.contract.engine import Engine, State
from orchestrator.training.contract.recipe import Batch
from orchestrator.training.contract.results import StepResult


def list_batch_norms(module: nn.Module) -> list[_BatchNorm]:
    """Return the module's BatchNorm layers that use batch statistics; those in evaluation mode do
    not.
    """
    return [part for part in module.modules() if isinstance(part, _BatchNorm) and part.training]


def prepare_batch_norms(layers: list[_BatchNorm], plan: Plan, training: TrainingSpec) -> None:
    """Make the layers compute statistics in fp32 over `training.batch_norm_samples` samples, in
    place.

    Raises SpecError if the plan gives another number of samples, or the job sets no number and the
    plan splits its global batch.
    """
    if not layers:
        return
    samples = training.batch_norm_samples
    path = "training.batch_norm_samples"
    if samples is None and plan.world_size == plan.gradient_accumulation_steps == 1:
        samples = plan.micro_batch_size
    if samples is None:
        raise SpecError(
            "the model has BatchNorm: training depends on how many samples are normalised together",
            path=path,
            allowed=f"a number of samples, such as {plan.micro_batch_size}; every plan then keeps to it",
            hint="with `sync_batch_norm: true` they may be spread over several devices",
        )
    together = plan.micro_batch_size * (plan.layout.dp if training.sync_batch_norm else 1)
    if together != samples:
        where = "micro_batch_size x dp" if training.sync_batch_norm else "micro_batch_size"
        raise SpecError(
            f"the plan normalises {where} = {together} samples together", path=path, got=samples
        )
    if plan.world_size > plan.layout.dp:
        raise SpecError(
            "a model with BatchNorm runs data parallel only", path="plan.layout", got=plan.layout
        )
    if any(layer.momentum is None for layer in layers):
        raise SpecError(
            "BatchNorm needs a momentum: its statistics fade",
            path="model.factory",
            got="momentum=None",
        )
    if (
        any(isinstance(layer, nn.SyncBatchNorm) for layer in layers)
        and not training.sync_batch_norm
    ):
        raise SpecError(
            "the model has SyncBatchNorm", path="training.sync_batch_norm", allowed="true"
        )
    forward = _normalise_over_all_ranks if training.sync_batch_norm else _normalise_over_own_samples
    for layer in layers:
        layer.forward = functools.partial(forward, layer)  # type: ignore[method-assign]


@contextlib.contextmanager
def keeping_running_statistics(layers: Iterable[_BatchNorm]) -> Iterator[None]:
    """Open a context for recomputed forward passes, in which the layers' running statistics are not
    updated again.
    """
    originals = [(layer, dict(layer._buffers)) for layer in layers]
    for layer, buffers in originals:
        layer._buffers.update(
            {name: None if value is None else value.clone() for name, value in buffers.items()}
        )
    try:
        yield
    finally:
        for layer, buffers in originals:
            layer._buffers.update(buffers)


class RunningStatistics:
    """Engine for several ranks that wraps another engine, and keeps BatchNorm's running statistics
    equal to those of one process.
    """

    def __init__(self, engine: Engine, layers: list[_BatchNorm]) -> None:
        self._engine = engine
        self._layers = [layer for layer in layers if layer.running_mean is not None]

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        before = self._list_running_statistics()
        counted = self._list_batch_counts()
        result = self._engine.step(step, micro_batches, tokens)
        self._combine_over_ranks(before, counted)
        return result

    def state(self) -> State:
        return self._engine.state()

    def _combine_over_ranks(
        self, previous_statistics: list[Tensor], batch_counts: list[int]
    ) -> None:
        ranks = dist.get_world_size()
        rank = dist.get_rank()
        added = []
        faded = []
        for layer, old, new, count, now in zip(
            self._layers,
            previous_statistics,
            self._list_running_statistics(),
            batch_counts,
            self._list_batch_counts(),
            strict=True,
        ):
            assert layer.momentum is not None
            assert layer.num_batches_tracked is not None
            keep = (1 - layer.momentum) ** (now - count)
            added.append((new - keep * old) * keep ** (ranks - 1 - rank))
            faded.append(old * keep**ranks)
            layer.num_batches_tracked.add_((now - count) * (ranks - 1))
        total = torch.cat(added)
        dist.all_reduce(total)
        total += torch.cat(faded)
        for layer, statistics in zip(
            self._layers, torch.split(total, [len(old) for old in previous_statistics]), strict=True
        ):
            mean, variance = statistics.chunk(2)
            layer.running_mean.copy_(mean)  # type: ignore[union-attr]
            layer.running_var.copy_(variance)  # type: ignore[union-attr]

    def _list_running_statistics(self) -> list[Tensor]:
        """Return the running means, then the running variances, of every layer."""
        return [
            torch.cat((layer.running_mean, layer.running_var)).float()  # type: ignore[arg-type]
            for layer in self._layers
        ]

    def _list_batch_counts(self) -> list[int]:
        return torch.stack([layer.num_batches_tracked for layer in self._layers]).tolist()  # type: ignore[misc]


def _normalise_over_own_samples(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Return BatchNorm's output with statistics over this rank's samples alone.

    torch's function requires weights and running statistics of one precision.
    """
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    assert layer.momentum is not None
    tracking = layer.track_running_stats and layer.running_mean is not None
    if tracking:
        assert layer.num_batches_tracked is not None
        layer.num_batches_tracked.add_(1)
    return functional.batch_norm(
        x,
        layer.running_mean if tracking else None,
        layer.running_var if tracking else None,
        layer.weight.float() if layer.affine else None,
        layer.bias.float() if layer.affine else None,
        training=True,
        momentum=layer.momentum,
        eps=layer.eps,
    )


def _normalise_over_all_ranks(layer: _BatchNorm, x: Tensor) -> Tensor:
    """Return BatchNorm's output with statistics over all ranks' inputs, [N, C, ...] each; torch's
    does not support CPU tensors.
    """
    layer._check_input_dim(x)  # type: ignore[no-untyped-call]
    wide = x.float()
    dims = [dim for dim in range(x.dim()) if dim != 1]
    shape = [-1 if dim == 1 else 1 for dim in range(x.dim())]
    count = _sum_over_ranks(wide.new_tensor([x.numel() / x.shape[1]]))
    mean = _sum_over_ranks(wide.sum(dims)) / count
    centred = wide - mean.view(shape)
    variance = _sum_over_ranks(centred.square().sum(dims)) / count
    if layer.track_running_stats and layer.running_mean is not None:
        assert layer.running_var is not None
        assert layer.num_batches_tracked is not None
        assert layer.momentum is not None
        with torch.no_grad():
            layer.running_mean.lerp_(mean, layer.momentum)
            layer.running_var.lerp_(variance * count / (count - 1), layer.momentum)
            layer.num_batches_tracked.add_(1)
    normal = centred * torch.rsqrt(variance + layer.eps).view(shape)
    if layer.affine:
        normal = normal * layer.weight.float().view(shape) + layer.bias.float().view(shape)
    return normal.to(x.dtype)


def _sum_over_ranks(values: Tensor) -> Tensor:
    """Return the sum over all ranks; its gradient is the sum of all ranks' gradients."""
    return exchange_with_gradient(values, all_reduce_sum, all_reduce_sum)
