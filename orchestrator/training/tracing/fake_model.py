"""Models without memory: fake tensors as parameters, and fixes for code that inspects values."""

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
def move_parameters_to_meta() -> Iterator[None]:
    """Open a context in which each parameter moves to the meta device when a module registers it;
    other tensors stay real.
    """

    def moved(_module: nn.Module, _name: str, parameter: Tensor | None) -> Tensor | None:
        if parameter is None or parameter.is_meta:
            return parameter
        return nn.Parameter(parameter.detach().to("meta"), requires_grad=parameter.requires_grad)

    handle = register_module_parameter_registration_hook(moved)  # type: ignore[arg-type]
    try:
        yield
    finally:
        handle.remove()


def replace_by_fake_tensors(
    module: nn.Module,
    fake_mode: FakeTensorMode,
    dtype: torch.dtype | None,
    note_buffer: Callable[[Tensor, Tensor], None] | None,
) -> dict[Tensor, float]:
    """Replace a module's parameters and buffers by fake CPU tensors, in place; `dtype` replaces
    that of floating parameters.

    Returns {parameter: bytes per element before}. `note_buffer` is called with each new buffer and
    the buffer that it replaces.
    """
    made: dict[Tensor, nn.Parameter] = {}
    held_bytes: dict[Tensor, float] = {}
    with fake_mode:
        for part in module.modules():
            for name, parameter in part._parameters.items():
                if parameter is not None and parameter not in made:
                    stored = dtype if dtype and parameter.is_floating_point() else parameter.dtype
                    values = torch.empty(parameter.shape, dtype=stored, device="cpu")
                    new = made[parameter] = nn.Parameter(
                        values, requires_grad=parameter.requires_grad
                    )
                    held_bytes[new] = parameter.element_size()
                if parameter is not None:
                    part._parameters[name] = made[parameter]
            for name, buffer in part._buffers.items():
                if buffer is not None:
                    new_buffer = part._buffers[name] = torch.empty(
                        buffer.shape, dtype=buffer.dtype, device="cpu"
                    )
                    if note_buffer is not None:
                        note_buffer(new_buffer, buffer)
    return held_bytes


@contextlib.contextmanager
def fake_as_with_values() -> Iterator[None]:
    """Open a context in which transformers 5.23 treats fake tensors as real, finite ones.

    - Fake positions cannot be read: it then assumes packed samples and makes masks that our trainings do not have
      (masking_utils.py).
    - Grouped expert products are registered for bf16 only, which is true of no device (torch/_meta_registrations.py,
      2.13.0). transformers' fallback has their sizes (integrations/moe.py).
    - Some families look for overflows in fp16, to clamp them (models/bart/modeling_bart.py).
    """
    instead: dict[str, tuple[str, Callable[..., Any]]] = {
        "transformers.masking_utils": ("find_packed_sequence_indices", lambda _positions: None),
        "transformers.integrations.moe": (
            "_can_use_grouped_mm",
            lambda _, weight, __: weight.dtype is torch.bfloat16,
        ),
    }
    with contextlib.ExitStack() as stack:
        for module, (name, function) in instead.items():
            if module in sys.modules:
                stack.enter_context(patch(f"{module}.{name}", function))
        for name, answer in (("isfinite", True), ("isinf", False), ("isnan", False)):
            stack.enter_context(
                patch.object(
                    torch, name, _make_constant_function(getattr(torch, name), constant=answer)
                )
            )
        yield


def _make_constant_function(
    function: Callable[[Tensor], Tensor], *, constant: bool
) -> Callable[[Tensor], Tensor]:
    """Return a function of values that runs as before, so that its tensors count, but returns a
    tensor of `constant`.
    """

    def asked(values: Tensor) -> Tensor:
        function(values)
        return torch.tensor(constant)

    return asked
