"""The interface between a training loop and the guard: the loop reports its steps, the guard their peak memory."""

from __future__ import annotations

from collections.abc import Callable

Listener = Callable[[int, float | None], None]
Meter = Callable[[], int]

_listeners: list[Listener] = []
_meters: list[Meter] = []


def listen(listener: Listener) -> None:
    """Register `listener(step, loss)`, which is called after every optimizer step that this process
    reports.
    """
    _listeners.append(listener)


def step_completed(step: int, loss: float | None = None) -> None:
    """Report that optimizer step `step` is complete, with its loss; steps are counted from 1 over
    all attempts.
    """
    for listener in _listeners:
        listener(step, loss)


def measure(meter: Meter) -> None:
    """Register the function that `peak_bytes` calls: it returns the peak bytes of this rank's
    device since its last call.
    """
    _meters.append(meter)


def peak_bytes() -> int | None:
    """Return the peak bytes of live tensors since the last call, on this rank's device; None without a guard."""
    return max((meter() for meter in _meters), default=None)
