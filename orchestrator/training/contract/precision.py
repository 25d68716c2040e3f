"""Torch dtypes of the low precisions, and the cast of a module's inputs to one."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from orchestrator.specs.choices import Precision

LOW_PRECISION = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


def make_input_cast_hook(low_dtype: torch.dtype) -> Callable[..., Any]:
    """Return a hook that casts a module's floating-point inputs to `low_dtype`, as FSDP2 does."""

    def cast(value: Any) -> Any:
        return (
            value.to(low_dtype)
            if isinstance(value, Tensor) and value.is_floating_point()
            else value
        )

    def rounded(_module: nn.Module, args: Any, kwargs: Any) -> Any:
        return tree_map(cast, args), tree_map(cast, kwargs)

    return rounded
