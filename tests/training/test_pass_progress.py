"""Laws of the progress of a forward pass when memory ran out: by the modules that ran, by the loss, or unknown."""

from __future__ import annotations

import sys
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from orchestrator.training.guard.pass_progress import compute_fraction_of_modules_done

fractions: list[float | None] = []


def note() -> None:
    fractions.append(compute_fraction_of_modules_done(sys._getframe()))


class Leaf(nn.Module):
    def __init__(self, is_noted: bool) -> None:
        super().__init__()
        self.is_noted = is_noted

    def forward(self, x: Tensor) -> Tensor:
        if self.is_noted:
            note()
        return x


def chunked_loss(x: Tensor) -> Tensor:
    note()
    return x


class ContrastiveLoss(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        note()
        return x


class Model(nn.Module):
    def __init__(self, noted: int | None, hook: Callable[[Tensor], Any] | None) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Leaf(number == noted) for number in range(4))
        self.hook = hook

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        if self.hook is not None:
            self.hook(x)
        return x


def own_code(_: Tensor) -> None:
    note()


@pytest.mark.parametrize(
    ("noted", "hook", "fraction"),
    [
        (0, None, 0.0),
        (3, None, 0.75),
        (None, chunked_loss, 1.0),
        (None, ContrastiveLoss(), 1.0),
        (None, own_code, None),  # between the layers or after them: nothing tells
    ],
    ids=[
        "first layer",
        "last layer",
        "a function that computes the loss",
        "a module that does",
        "the model's own code",
    ],
)
def test_progress_counts_modules_and_is_unknown_where_none_tells(
    noted: int | None, hook: Callable[[Tensor], Any] | None, fraction: float | None
) -> None:
    fractions.clear()
    Model(noted, hook)(torch.zeros(1))
    assert fractions == [fraction]
