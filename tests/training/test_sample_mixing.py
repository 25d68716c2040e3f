"""The guard sees in a loss's graph what makes another micro-batch another training, and nothing where nothing does."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

from orchestrator.scheduling.failures.observation import list_record_warnings
from orchestrator.specs.attempt import Attempt, Evidence, Heartbeat
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import Change
from orchestrator.training.guard.sample_mixing import list_mixing_operations
from tests.scheduling.factories import attempt

IMAGES, CLASSES = torch.randn(6, 3, 8, 8), torch.randint(0, 5, (6,))
NORM = "batch norm in 2 layers"
NEGATIVES = "a loss whose negatives are the other samples"


def network(*layers: nn.Module) -> nn.Module:
    return nn.Sequential(nn.Conv2d(3, 4, 3), *layers, nn.Flatten(), nn.LazyLinear(5))


def classify(module: nn.Module, images: Tensor = IMAGES) -> Tensor:
    return functional.cross_entropy(module(images), CLASSES[: len(images)])


def contrast(rows: int, groups: int, **options: float) -> Tensor:
    tower = nn.Linear(3, 7)
    scores = tower(torch.randn(rows, 3)) @ tower(torch.randn(rows * groups, 3)).T
    return nn.CrossEntropyLoss(**options)(scores, torch.arange(rows) * groups)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("loss", "expected"),
    [
        (lambda: classify(network(nn.BatchNorm2d(4), nn.ReLU(), nn.BatchNorm2d(4))), (NORM,)),
        (lambda: classify(network(nn.BatchNorm2d(4), nn.BatchNorm2d(4)).eval()), ()),
        (lambda: classify(network(nn.InstanceNorm2d(4, affine=True)), IMAGES[:1]), ()),
        (lambda: classify(network(nn.GroupNorm(2, 4))), ()),
        (lambda: contrast(6, 1) + contrast(6, 1), (NEGATIVES,)),
        (lambda: contrast(5, 8, label_smoothing=0.1), (NEGATIVES,)),
        (lambda: functional.cross_entropy(nn.Linear(3, 48)(torch.randn(24, 3)), CLASSES.repeat(4)), ()),
        (lambda: nn.Linear(3, 1)(torch.randn(4, 3)).pow(2).mean(), ()),
    ],
)  # fmt: skip
def test_a_loss_tells_what_mixes_its_samples(
    loss: Callable[[], Tensor], expected: tuple[str, ...]
) -> None:
    assert list_mixing_operations(loss()) == expected


@pytest.mark.parametrize(("setting", "told"), [("micro_batch_size", True), ("zero_stage", False)])
def test_a_record_says_where_another_micro_batch_changed_the_training(
    setting: str, told: bool
) -> None:
    changed = Change(setting=setting, before="128", after="8")
    beat = Heartbeat(
        rank=0,
        step=1,
        steps_done=1,
        step_s=1.0,
        peak_bytes=1,
        phase="forward",
        at_s=0.0,
        mixing=(NORM,),
    )
    cut: Attempt = replace(attempt(), change=(changed,), evidence=Evidence(heartbeats=(beat,)))
    sentences = [text for text in list_record_warnings(cut) if NORM in text]
    assert bool(sentences) == told
    assert all("micro-batch 8 instead of 128" in text for text in sentences)
