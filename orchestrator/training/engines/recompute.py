"""Activation checkpointing, compilation and offload of a recipe's layers, before any engine wraps them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.utils.checkpoint import (
    CheckpointPolicy,
    checkpoint,
    create_selective_checkpoint_contexts,
)

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.errors import SpecError
from orchestrator.training.engines.batch_norm import keeping_running_statistics, list_batch_norms
from orchestrator.training.engines.sequence_parallel import SUMMED_PRODUCT
from orchestrator.training.guard.virtual_device import use_host_memory

aten = torch.ops.aten
# Expensive operations, which selective checkpointing saves: matrix products, convolutions and
# attention.
KEPT = frozenset(
    {
        aten.mm.default,
        aten.addmm.default,
        aten.bmm.default,
        aten.baddbmm.default,
        aten.convolution.default,
        aten._scaled_dot_product_flash_attention.default,
        aten._scaled_dot_product_efficient_attention.default,
        SUMMED_PRODUCT,  # of sequence-parallel ranks
        aten._scaled_dot_product_cudnn_attention.default,
        aten._scaled_dot_product_flash_attention_for_cpu.default,
    }
)


def apply_checkpointing(
    layers: Sequence[nn.Module],
    mode: ActivationCheckpointing,
    full_layers: int = 0,
    stage_layers: Sequence[range] = (),
) -> None:
    """Apply activation checkpointing to every layer, in place.

    The first `full_layers` layers of each pipeline stage are recomputed in full. `stage_layers` are
    the layer indices of each stage; () means one stage.
    """
    if mode is ActivationCheckpointing.NONE:
        return
    full: set[int] = set()
    for stage in stage_layers or (range(len(layers)),):
        full.update(stage[:full_layers])
    for index, layer in enumerate(layers):
        _checkpoint_layer(layer, ActivationCheckpointing.FULL if index in full else mode)


def _checkpoint_layer(layer: nn.Module, mode: ActivationCheckpointing) -> None:
    settings: dict[str, Any] = {"use_reentrant": False}
    norms = list_batch_norms(layer)
    if norms:
        settings["context_fn"] = functools.partial(_make_contexts, mode, norms)
    elif mode is ActivationCheckpointing.SELECTIVE:  # torch.compile supports only this function
        settings["context_fn"] = functools.partial(
            create_selective_checkpoint_contexts, _keep_costly_results
        )
    layer.forward = functools.partial(checkpoint, layer.forward, **settings)


def offload_layer_inputs(layers: Iterable[nn.Module]) -> None:
    """Make the layers' inputs, which full checkpointing saves, wait in host memory; in place, after
    compilation.
    """
    for layer in layers:
        layer.forward = functools.partial(_with_input_on_host, layer.forward)


def _with_input_on_host(forward: Callable[..., Any], x: Tensor, *args: Any, **kwargs: Any) -> Any:
    """Call a recomputed layer, with the saved copy of its first argument in host memory."""

    # Not with the tensor itself, since autograd keeps the hook.
    pack = functools.partial(_pack, address=x.data_ptr(), shape=x.shape)
    with torch.autograd.graph.saved_tensors_hooks(pack, _unpack):
        return forward(x, *args, **kwargs)


def _pack(saved: Tensor, *, address: int, shape: torch.Size) -> Tensor | _OnHost:
    return _OnHost(saved) if saved.data_ptr() == address and saved.shape == shape else saved


def _unpack(saved: Tensor | _OnHost) -> Tensor:
    return saved.on_device() if isinstance(saved, _OnHost) else saved


class _OnHost:
    """A copy of a tensor in host memory; pinned if the tensor is on CUDA, so that no copy waits for
    the host.
    """

    def __init__(self, tensor: Tensor) -> None:
        self._device = tensor.device
        with use_host_memory():
            pinned = tensor.device.type == "cuda"
            self._copy = torch.empty(
                tensor.shape, dtype=tensor.dtype, device="cpu", pin_memory=pinned
            )
            self._copy.copy_(tensor, non_blocking=pinned)

    def on_device(self) -> Tensor:
        on_device = torch.empty_like(self._copy, device=self._device)
        return on_device.copy_(self._copy, non_blocking=True)


def _make_contexts(mode: ActivationCheckpointing, norms: list[_BatchNorm]) -> tuple[Any, Any]:
    """Return (context of the forward pass, context of its recomputation)."""
    if mode is ActivationCheckpointing.SELECTIVE:
        forward, again = create_selective_checkpoint_contexts(_keep_costly_results)  # type: ignore[no-untyped-call]
        return forward, _recomputing(again, norms)
    return contextlib.nullcontext(), _recomputing(contextlib.nullcontext(), norms)


@contextlib.contextmanager
def _recomputing(
    selective: contextlib.AbstractContextManager[Any], norms: list[_BatchNorm]
) -> Iterator[None]:
    with keeping_running_statistics(norms), selective:
        yield


def _keep_costly_results(
    _context: object, operation: object, *_: object, **__: object
) -> CheckpointPolicy:
    return CheckpointPolicy.MUST_SAVE if operation in KEPT else CheckpointPolicy.PREFER_RECOMPUTE


def compile_layers(layers: Sequence[nn.Module]) -> None:
    """Compile every layer separately, in place: equal layers share one compilation, and hooks stay outside.

    A virtual device does not count the internal allocations of compiled code (measured: 3.5 of 6.5 MiB). Raises
    SpecError for recomputed layers with BatchNorm: torch.compile accepts no context around the recomputation, and
    without it their statistics would be updated twice.
    """
    for layer in layers:
        if isinstance(layer.forward, functools.partial) and list_batch_norms(layer):
            raise SpecError(
                "cannot be compiled",
                path="training.compile",
                got="activation checkpointing of layers with BatchNorm",
                hint="turn off one of the two",
            )
        layer.forward = torch.compile(layer.forward)
