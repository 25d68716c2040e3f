"""Models without memory: their parameters as fake tensors, and what code that looks at values is told of them."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.modules.module import register_module_parameter_registration_hook


@contextlib.contextmanager
def parameters_on_meta() -> Iterator[None]:
    """Within, a module's parameters have no memory from when it registers them; all else is real."""

    def moved(_module: nn.Module, _name: str, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def without_memory(module: nn.Module, fake: FakeTensorMode, dtype: torch.dtype | None) -> dict[int, float]:
    """Let parameters and buffers be fake tensors on the CPU, in place; `dtype`: of floating parameters, if another.

    Returns by id of a parameter the bytes that an element of it had.
    """
    made: dict[int, nn.Parameter] = {}
    held_bytes: dict[int, float] = {}
    with fake:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and id(parameter) not in made:
                    kept = dtype if dtype and parameter.is_floating_point() else parameter.dtype
                    values = torch.empty(parameter.shape, dtype=kept, device="cpu")
                    new = made[id(parameter)] = nn.Parameter(values, requires_grad=parameter.requires_grad)
                    held_bytes[id(new)] = parameter.element_size()
                if parameter is not None:
                    part._parameters[name] = made[id(parameter)]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    part._buffers[name] = torch.empty(buffer.shape, dtype=buffer.dtype, device="cpu")
    return held_bytes


@contextlib.contextmanager
def as_with_values() -> Iterator[None]:
    """Within, transformers 5.23 does with fake tensors what it does with real ones, all of which are finite.

    It cannot look into positions, takes several samples to be packed into one, and makes masks that no training of ours
    has (masking_utils.py). Products grouped by experts are said to be bf16 only, which holds on no device
    (torch/_meta_registrations.py, 2.13.0): its own way to do them knows their sizes (integrations/moe.py). Some
    families look in fp16 for what has overflowed, to clamp it (models/bart/modeling_bart.py).
    """
    instead: dict[str, tuple[str, Callable[..., Any]]] = {
        "transformers.masking_utils": ("find_packed_sequence_indices", lambda _positions: None),
        "transformers.integrations.moe": ("_can_use_grouped_mm", lambda _, weight, __: weight.dtype is torch.bfloat16),
    }
    with contextlib.ExitStack() as stack:
        for module, (name, function) in instead.items():
            if module in sys.modules:
                stack.enter_context(patch(f"{module}.{name}", function))
        for name, answer in (("isfinite", True), ("isinf", False), ("isnan", False)):
            stack.enter_context(patch.object(torch, name, _answered(getattr(torch, name), answer=answer)))
        yield


def _answered(question: Callable[[Tensor], Tensor], *, answer: bool) -> Callable[[Tensor], Tensor]:
    """The question of values, with all that it makes, and an answer that a fake tensor has: a constant."""

    def asked(values: Tensor) -> Tensor:
        question(values)
        return torch.tensor(answer)

    return asked
