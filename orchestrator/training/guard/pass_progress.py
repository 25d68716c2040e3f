"""How far had a forward or backward pass come? Allocations beside those of the same pass of the last complete step."""

from __future__ import annotations

import types
from collections.abc import Callable
from typing import Any


class Passes:
    """Counts allocations only where passes begin and end, so that a training step costs nothing more.

    How many tensors a pass makes depends on the model's code, not on how long or how many its samples are.
    """

    def __init__(self, allocations: Callable[[], int]) -> None:
        self._allocations, self._began = allocations, 0
        self._forward: int | None = None  # allocations of the forward pass whose backward pass runs
        self._now: list[tuple[int, int]] = []  # (forward, backward) of each pass of this step
        self._last: list[tuple[int, int]] = []  # of the last complete step

    def begin(self) -> None:
        """A forward pass begins."""
        self._began, self._forward = self._allocations(), None

    def turn(self) -> None:
        """The backward pass begins."""
        now = self._allocations()
        self._forward, self._began = now - self._began, now

    def end(self) -> None:
        """The backward pass is done."""
        now = self._allocations()
        if self._forward is not None:
            self._now.append((self._forward, now - self._began))
        self._began, self._forward = now, None

    def complete_step(self) -> None:
        """An optimizer step is complete."""
        if self._now:
            self._last, self._now = self._now, []

    def done(self, phase: str) -> float | None:
        """The share of the pass in `phase` that is done; None where no such pass was complete before."""
        known = self._last[len(self._now) : len(self._now) + 1] or self._now[-1:] or self._last[-1:]
        if not known or phase not in ("forward", "backward"):
            return None
        whole = known[0][0] if phase == "forward" else known[0][1]
        return min(1.0, (self._allocations() - self._began) / whole) if whole > 0 else None


def modules_done(frame: types.FrameType | None) -> float | None:
    """The share of a model's innermost modules that are registered before the one that runs; None where none runs.

    Of the outermost module on the stack of `frame`: most are registered in the order in which they run. All count as
    done where code of the whole model runs, outside of its modules: that is most often the loss of its head.
    """
    running: list[Any] = []
    while frame is not None:
        if frame.f_code.co_name == "_call_impl":  # torch.nn.Module.__call__; it lets go of its locals as it is left
            running.append(frame.f_locals.get("self"))
        frame = frame.f_back
    running = [one for one in running if hasattr(one, "modules") and hasattr(one, "children")]
    if not running:
        return None
    leaves = [id(one) for one in running[-1].modules() if not any(True for _ in one.children())]
    here = {id(one) for one in running[0].modules()}
    before = next((place for place, leaf in enumerate(leaves) if leaf in here), None)
    if before is None or len(leaves) < 2:
        return None
    return 1.0 if here.issuperset(leaves) else before / len(leaves)
