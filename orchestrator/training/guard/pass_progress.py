"""Estimates how far a forward or backward pass is, by its allocations relative to the last complete step."""

from __future__ import annotations

import re
import types
from collections.abc import Callable
from typing import Any

LOSS = re.compile(r"(?i)loss|cross_entropy|criterion")


class PassProgress:
    """Measures how much of a forward or backward pass is done, by the allocations until now.

    Allocations are read only at the start and end of each pass, so that nothing is added inside a
    training step. The number of tensors of a pass depends on the model's code, not on the number or
    length of its samples.
    """

    def __init__(self, count_allocations: Callable[[], int]) -> None:
        self._count_allocations = count_allocations
        self._began = 0
        self._forward: int | None = None  # allocations of the forward pass whose backward pass runs
        self._now: list[tuple[int, int]] = []  # (forward, backward) of each pass of this step
        self._last: list[tuple[int, int]] = []  # the same for the last complete step

    def begin_forward(self) -> None:
        """Record that a forward pass begins."""
        self._began = self._count_allocations()
        self._forward = None

    def begin_backward(self) -> None:
        """Record that the backward pass begins."""
        now = self._count_allocations()
        self._forward = now - self._began
        self._began = now

    def end_backward(self) -> None:
        """Record that the backward pass is done."""
        now = self._count_allocations()
        if self._forward is not None:
            self._now.append((self._forward, now - self._began))
        self._began = now
        self._forward = None

    def complete_step(self) -> None:
        """Record that an optimizer step is complete."""
        if self._now:
            self._last = self._now
            self._now = []

    def compute_fraction_done(self, phase: str) -> float | None:
        """Return the done fraction (0 to 1) of the pass in `phase`; None if no such pass has
        completed before.
        """
        reference = (
            self._last[len(self._now) : len(self._now) + 1] or self._now[-1:] or self._last[-1:]
        )
        if not reference or phase not in ("forward", "backward"):
            return None
        whole = reference[0][0] if phase == "forward" else reference[0][1]
        return min(1.0, (self._count_allocations() - self._began) / whole) if whole > 0 else None


def compute_fraction_of_modules_done(frame: types.FrameType | None) -> float | None:
    """Return the fraction (0 to 1) of the model's leaf modules registered before the running one;
    None where that says nothing.

    The model is the outermost module on the stack of `frame`. Most models register modules in
    execution order. Its loss comes last: a module or function with such a name counts as 1.0. Other
    code of the model outside its submodules may be anywhere in the pass (U-Nets, functional
    models), and gives None.
    """
    running: list[Any] = []
    functions: list[str] = []  # of the innermost module
    while frame is not None:
        if (
            frame.f_code.co_name == "_call_impl"
        ):  # torch.nn.Module.__call__; its locals are gone once it returns
            running.append(frame.f_locals.get("self"))
        elif not running:
            functions.append(frame.f_code.co_name)
        frame = frame.f_back
    running = [
        module for module in running if hasattr(module, "modules") and hasattr(module, "children")
    ]
    if not running:
        return None
    if any(
        LOSS.search(name)
        for name in (*functions, *(type(module).__name__ for module in running[:-1]))
    ):
        return 1.0
    leaves = [
        id(module) for module in running[-1].modules() if not any(True for _ in module.children())
    ]
    here = {id(module) for module in running[0].modules()}
    before = next((place for place, leaf in enumerate(leaves) if leaf in here), None)
    if before is None or len(leaves) < 2 or here.issuperset(leaves):
        return None
    return before / len(leaves)
