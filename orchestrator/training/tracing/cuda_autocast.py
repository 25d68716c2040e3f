"""Emulates CUDA on CPU tensors: autocast to fp32, attention without score matrices, byte masks, fused RMS norms."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable, Iterator
from importlib.resources import files
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils._pytree import tree_map

# Names of operators that CUDA's autocast computes in fp32: AT_FORALL_FP32 and AT_FORALL_FP32_SET_OPT_DTYPE in
# torch/include/ATen/autocast_mode.h, torch 2.13.0.
OPERATORS: dict[str, list[str]] = json.loads(
    files(__package__).joinpath("cuda_autocast.json").read_text()
)
LOW = (torch.bfloat16, torch.float16)
_AUTOCAST = torch._C.DispatchKey.AutocastCPU
_PUT_TOGETHER = torch._C.DispatchKey.CompositeImplicitAutograd  # composite operations


@contextlib.contextmanager
def autocast_as_on_cuda() -> Iterator[None]:
    """Open a context in which CPU autocast, attention, dropout and RMS norm behave as on CUDA.

    It is for fake tensors. Common behaviour of both is left to torch. Operations that only the CPU's autocast computes
    in fp32 (pooling, padding, image sampling) stay so.
    """
    library = torch.library.Library("aten", "IMPL")  # type: ignore[no-untyped-call]
    names = [(name, _make_fp32_kernel) for name in OPERATORS["fp32"]]
    names += [(name, _make_fp32_result_kernel) for name in OPERATORS["fp32_unless_said"]]
    for name, kernel in names:
        if not torch._C._dispatch_has_kernel_for_dispatch_key(f"aten::{name}", "AutocastCPU"):
            library.impl(name, kernel(_overload(name)), "AutocastCPU")  # type: ignore[no-untyped-call]
    library.impl("dropout", _dropout, "AutogradCPU")  # type: ignore[no-untyped-call]
    library.impl("rms_norm", _rms_norm, "AutogradCPU")  # type: ignore[no-untyped-call]
    attention = _make_memory_efficient_attention(functional.scaled_dot_product_attention)
    try:
        with patch.object(functional, "scaled_dot_product_attention", attention):
            yield
    finally:
        library._destroy()  # type: ignore[no-untyped-call]  # private: it ends with the context, not with the process


def _make_memory_efficient_attention(cpu_attention: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Return an attention function that saves only inputs, output and log-sum-exp, even where a CPU
    would save all scores.

    A CPU does so with dropout, and if values and keys differ in width (`use_flash_attention_cpp` in
    aten/src/ATen/native/transformers/sdp_utils_cpp.cpp). CUDA's memory-efficient kernel supports
    both (`can_use_mem_efficient_attention` in aten/src/ATen/native/transformers/cuda/sdp_utils.cpp,
    2.13.0).
    """

    def attention(
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attn_mask: Tensor | None = None,
        dropout_p: float = 0.0,
        is_causal: bool = False,
        scale: float | None = None,
        enable_gqa: bool = False,
    ) -> Tensor:
        if dropout_p == 0.0 and query.shape[-1] == value.shape[-1]:
            return cpu_attention(
                query,
                key,
                value,
                attn_mask,
                dropout_p,
                is_causal,
                scale=scale,
                enable_gqa=enable_gqa,
            )
        if enable_gqa:  # this kernel wants as many heads of keys and values as of queries
            heads = query.shape[-3] // key.shape[-3]
            key, value = (part.repeat_interleave(heads, -3) for part in (key, value))
        low = torch.get_autocast_dtype("cpu") if torch.is_autocast_enabled("cpu") else query.dtype
        # a boolean mask becomes as many numbers
        bias = attn_mask.to(low) if attn_mask is not None else None
        inputs = query.to(low), key.to(low), value.to(low), bias
        kernel = torch.ops.aten._scaled_dot_product_efficient_attention
        return kernel(*inputs, True, dropout_p, is_causal, scale=scale)[0]

    return attention


def _dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """Dropout by CUDA's fused kernel, which saves one byte per element; a CPU saves a factor as wide as the element.

    CUDA has no such kernel for in-place dropout, feature dropout, `alpha_dropout`, p = 0 and p = 1. This follows from
    the sources and was not seen on a device: `dropout` and `is_fused_kernel_acceptable` in
    aten/src/ATen/native/Dropout.cpp; `native_dropout_cuda` (result and mask) and `native_dropout_backward_cuda`
    (gradient) in native/cuda/Dropout.cu (PyTorch's main branch). Fake tensors behave the same (`native_dropout` and its
    backward in torch/_decomp/decompositions.py, 2.13.0).
    """
    if train and 0 < p < 1 and x.numel() > 0:
        return torch.ops.aten.native_dropout(x, p, train)[0]
    return torch.ops.aten.dropout.default._op_dk(_PUT_TOGETHER, x, p, train)


def _rms_norm(
    x: Tensor, shape: list[int], weight: Tensor | None = None, eps: float | None = None
) -> Tensor:
    """RMS norm by CUDA's kernel, which saves its input and one number for each row; a CPU saves every intermediate.

    As `rms_norm_symint` in aten/src/ATen/native/layer_norm.cpp chooses (2.13.0). Seen on an H100 under 2.11.0.
    """
    if weight is not None and weight.dtype is not x.dtype:
        return torch.ops.aten.rms_norm.default._op_dk(_PUT_TOGETHER, x, shape, weight, eps)
    return _FusedRmsNorm.apply(x, shape, weight)  # type: ignore[no-untyped-call]


class _FusedRmsNorm(torch.autograd.Function):
    """RMS norm that allocates what CUDA's kernels allocate; it computes no values, as fake tensors
    have none.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, shape: list[int], weight: Tensor | None) -> Tensor:
        rows = x.shape[: x.dim() - len(shape)]
        ctx.save_for_backward(x, weight, x.new_empty(rows, dtype=torch.float32))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, _: Tensor) -> tuple[Tensor, None, Tensor | None]:
        x, weight, *_rows = ctx.saved_tensors
        return torch.empty_like(x), None, None if weight is None else torch.empty_like(weight)


def _overload(name: str) -> Any:
    packet, _, overload = name.partition(".")
    return getattr(getattr(torch.ops.aten, packet), overload or "default")


def _make_fp32_kernel(operation: Any) -> Callable[..., Any]:
    def kernel(*args: Any, **kwargs: Any) -> Any:
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operation(*tree_map(_widen, args), **tree_map(_widen, kwargs))

    return kernel


def _make_fp32_result_kernel(operation: Any) -> Callable[..., Any]:
    """Return the operation with an fp32 result, unless a dtype is given; its inputs keep their
    dtype.
    """
    schema = [argument.name for argument in operation._schema.arguments]

    def kernel(*args: Any, **kwargs: Any) -> Any:
        arguments = {**dict(zip(schema, args, strict=False)), **kwargs}
        if arguments["self"].dtype in LOW and arguments.get("dtype") is None:
            arguments["dtype"] = torch.float32
        with torch._C._ExcludeDispatchKeyGuard(torch._C.DispatchKeySet(_AUTOCAST)):
            return operation(arguments.pop("self"), **arguments)

    return kernel


def _widen(value: Any) -> Any:
    return value.float() if isinstance(value, Tensor) and value.dtype in LOW else value
