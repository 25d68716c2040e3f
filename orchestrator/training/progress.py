"""The interface by which a training loop reports its steps to the guard."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[int, float | None], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Register `listener(step, loss)`, called after every optimizer step that this process reports."""
    _listeners.append(listener)


def step_completed(step: int, loss: float | None = None) -> None:
    """Report that optimizer step `step` (counted from 1 over all attempts) is complete, with its loss."""
    for listener in _listeners:
        listener(step, loss)
