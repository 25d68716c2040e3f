"""How a training loop that knows its own step tells the guard around it."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[int, float | None], None]

_listeners: list[Listener] = []


def listen(listener: Listener) -> None:
    """Have `listener(step, loss)` called after every completed optimizer step of this process."""
    _listeners.append(listener)


def step_completed(step: int, loss: float | None = None) -> None:
    """Say that optimizer step `step` (counted from 1 over all attempts) is complete, with its loss."""
    for listener in _listeners:
        listener(step, loss)
