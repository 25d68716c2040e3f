"""Operations as autograd remembers them, and what is live at the worst moment of the way back through them."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple


class Peak(NamedTuple):
    """Bytes at the worst moment of a step."""

    kept: int
    working: int  # gradients of activations, and what a convolution works in
    gradients: int


@dataclass(eq=False, slots=True)
class Storage:
    size: int


@dataclass(frozen=True, eq=False, slots=True)
class Value:
    """A batch of images, or of vectors as images of one pixel."""

    storage: Storage
    count: int  # images, or regions of them
    channels: int
    height: int
    width: int
    element_bytes: int
    trained: bool = True  # it has a gradient

    @property
    def elements(self) -> int:
        return self.count * self.channels * self.height * self.width

    @property
    def bytes(self) -> int:
        return self.element_bytes * self.elements


class Step(NamedTuple):
    """One operation as the way back sees it."""

    inputs: tuple[Value, ...]
    output: Value
    saved: tuple[Storage, ...]
    weights: int = 0
    work_bytes: int = 0
    views: bool = False  # gradients of what goes in are views of that of what comes out


def kept_bytes(steps: Sequence[Step]) -> int:
    """What autograd has saved after these steps, every storage once."""
    return sum(storage.size for storage in {each for step in steps for each in step.saved})


def worst_moment(steps: Sequence[Step], samples: Storage, gradient_bytes: int | None) -> Peak:
    """The way back from the loss to the first operation, samples held by the training itself.

    `gradient_bytes`: of all weights, there from the start; None where they come with the steps.
    """
    held = Counter(storage for step in steps for storage in step.saved)
    held[samples] += 1
    kept, working = sum(storage.size for storage in held), 0
    gradients = gradient_bytes or 0
    users: Counter[Storage] = Counter()  # values whose gradient lies there
    found: dict[Value, Storage] = {}
    peaks = [Peak(kept, working, gradients)]
    for step in reversed(steps):
        given = found.pop(step.output, None) or Storage(step.output.bytes)
        if not users[given]:  # of a loss
            users[given] += 1
            working += given.size
        gradients += 4 * step.weights if gradient_bytes is None else 0
        for value in step.inputs:
            if not value.trained:
                continue
            is_view = step.views and value.element_bytes == step.output.element_bytes
            made = given if is_view else Storage(value.bytes)
            working += 0 if users[made] else made.size
            users[made] += 1
            peaks.append(Peak(kept, working + step.work_bytes, gradients))
            first = found.get(value)
            if first is None:
                found[value] = made
                continue
            # Where others see the first, or it is a part of more (torch/csrc/autograd/input_buffer.cpp, accumulate).
            if users[first] > 1 or first.size > value.bytes:
                found[value] = total = Storage(value.bytes)
                users[total] += 1
                working += total.size
                peaks.append(Peak(kept, working + step.work_bytes, gradients))
                working -= _dropped(users, first)
            working -= _dropped(users, made)
        peaks.append(Peak(kept, working + step.work_bytes, gradients))
        working -= _dropped(users, given)
        kept -= sum(_dropped(held, storage) for storage in step.saved)
    return max(peaks, key=sum)


def _dropped(users: Counter[Storage], storage: Storage) -> int:
    """Bytes that are free once one user less has it."""
    users[storage] -= 1
    return 0 if users[storage] else storage.size
