"""Laws of the parts of an update: schedule, freezing, loss scale, chunked loss, seeds, optimizer states."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from orchestrator.memory.engines import optimizers
from orchestrator.specs.choices import ActivationCheckpointing, Optimizer
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import Freeze, Schedule, TrainingSpec
from orchestrator.training.contract.loss_scale import GROWTH_INTERVAL, INITIAL, LossScale
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.engines import eight_bit
from orchestrator.training.engines.freezing import (
    find_next_thaw_step,
    find_thaw_step,
    freeze_parameters,
)
from orchestrator.training.engines.optimizers import (
    STEPS,
    OptimizerUpdates,
    compute_clipping_factor,
    compute_gradient_norm,
    scale_gradients,
)
from orchestrator.training.engines.randomness import Randomness
from orchestrator.training.engines.recompute import apply_checkpointing
from orchestrator.training.engines.schedule import compute_learning_rate_after
from orchestrator.training.models import cross_entropy
from orchestrator.training.models.cross_entropy import linear_cross_entropy

CPU = torch.device("cpu")
OPTIMIZERS = (Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR)


@given(schedule=st.sampled_from(Schedule), warmup=st.integers(0, 20), steps=st.integers(1, 60))
def test_a_learning_rate_rises_then_never_rises_again_and_stays_within_its_bounds(
    schedule: Schedule, warmup: int, steps: int
) -> None:
    training = TrainingSpec(
        max_steps=steps,
        schedule=schedule,
        warmup_steps=warmup,
        learning_rate=0.5,
        min_learning_rate=0.1,
    )
    rates = [compute_learning_rate_after(training, step) for step in range(steps + 5)]
    peak = min(warmup, len(rates) - 1)
    assert all(0 < rate <= 0.5 for rate in rates)
    assert rates[:peak] == sorted(rates[:peak])
    assert rates[peak:] == sorted(rates[peak:], reverse=True)
    if warmup < len(rates):
        assert rates[warmup] == pytest.approx(0.5)
    if schedule is not Schedule.CONSTANT and warmup < steps:
        assert rates[-1] == pytest.approx(0.1)


def test_a_cosine_is_half_way_down_in_the_middle() -> None:
    training = TrainingSpec(max_steps=100, schedule=Schedule.COSINE, learning_rate=1.0)
    assert compute_learning_rate_after(training, 50) == pytest.approx(0.5)
    assert compute_learning_rate_after(training, 25) == pytest.approx(
        (1 + math.cos(math.pi / 4)) / 2
    )


def test_the_longest_of_several_freezes_counts() -> None:
    freeze = (
        Freeze(parameters="a.*", until_step=3),
        Freeze(parameters="*.w", until_step=5),
        Freeze(parameters="z*"),
    )
    assert [find_thaw_step(name, freeze) for name in ("a.b", "a.w", "b.c", "z.w")] == [
        3,
        5,
        0,
        None,
    ]
    assert [find_next_thaw_step(step, freeze) for step in (0, 2, 3, 4, 5)] == [3, 3, 5, 5, None]


def test_a_checkpoint_has_exactly_the_parameters_that_some_step_trains() -> None:
    module = nn.ModuleDict(
        {"base": nn.Linear(2, 2), "late": nn.Linear(2, 2), "head": nn.Linear(2, 2)}
    )
    module["base"].requires_grad_(False)
    freeze = (Freeze(parameters="late.*", until_step=4), Freeze(parameters="head.bias"))
    assert freeze_parameters(module, freeze, step=0) == {"late.weight", "late.bias", "head.weight"}
    assert {name for name, parameter in module.named_parameters() if parameter.requires_grad} == {
        "head.weight"
    }


def test_freezing_nothing_or_everything_is_refused() -> None:
    with pytest.raises(SpecError, match="no parameter matches"):
        freeze_parameters(nn.Linear(2, 2), (Freeze(parameters="wieght", until_step=1),), step=0)
    with pytest.raises(SpecError, match="every parameter is frozen"):
        freeze_parameters(nn.Linear(2, 2), (Freeze(parameters="*", until_step=1),), step=0)


def test_a_loss_scale_halves_on_overflow_and_doubles_after_its_interval() -> None:
    scale = LossScale()
    assert not scale.update(math.inf)
    assert not scale.update(math.nan)
    assert scale.factor == INITIAL / 4
    assert all(scale.update(1.0) for _ in range(GROWTH_INTERVAL))
    assert scale.factor == INITIAL / 2


@settings(deadline=None, max_examples=30)
@given(tokens=st.integers(1, 40), chunk=st.integers(1, 12), masked=st.integers(1, 5))
def test_the_chunked_loss_and_its_gradients_are_those_of_the_whole(
    tokens: int, chunk: int, masked: int
) -> None:
    generator = torch.Generator().manual_seed(tokens)
    hidden = torch.randn(tokens, 8, generator=generator, requires_grad=True)
    weight = torch.randn(11, 8, generator=generator, requires_grad=True)
    labels = torch.randint(11, (tokens,), generator=generator)
    labels[::masked] = -100
    expected = functional.cross_entropy(
        hidden @ weight.T, labels, ignore_index=-100, reduction="sum"
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(cross_entropy, "CHUNK_TOKENS", chunk)
        loss = linear_cross_entropy(hidden, weight, labels)
    torch.testing.assert_close(loss, expected, rtol=1e-5, atol=1e-5)
    wanted = torch.autograd.grad(expected * 0.3, (hidden, weight))
    torch.testing.assert_close(
        torch.autograd.grad(loss * 0.3, (hidden, weight)), wanted, rtol=1e-5, atol=1e-6
    )


def test_a_frozen_head_costs_no_gradient() -> None:
    hidden, weight = torch.randn(5, 4, requires_grad=True), torch.randn(7, 4)
    linear_cross_entropy(hidden, weight, torch.arange(5)).backward()
    assert hidden.grad is not None
    assert weight.grad is None


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_update_equals_plain_torch_with_states_that_begin_on_their_own(
    optimizer: Optimizer,
) -> None:
    """States of zeros before the first update must be what torch makes in it; clipping must be torch's."""
    training = TrainingSpec(
        optimizer=optimizer, learning_rate=0.1, clip_norm=0.5, schedule=Schedule.LINEAR
    )
    tuned, plain = _twins()
    updates = OptimizerUpdates(tuned.named_parameters(), training, CPU, steps_done=0)
    updates.allocate()
    reference = {
        Optimizer.ADAMW: lambda p: torch.optim.AdamW(
            p, lr=0.1, betas=(0.9, 0.95), weight_decay=0.1
        ),
        Optimizer.SGD: lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, weight_decay=0.1),
        Optimizer.ADAFACTOR: lambda p: torch.optim.Adafactor(p, lr=0.1, weight_decay=0.1),
    }[optimizer](plain.parameters())
    falling = torch.optim.lr_scheduler.LambdaLR(
        reference, lambda step: 1 - step / training.max_steps
    )
    for step in range(4):
        for module in (tuned, plain):
            (module(torch.ones(3, 4)) ** 2).sum().backward()
        norm = compute_gradient_norm(tuned.parameters()).item()
        assert norm == pytest.approx(torch.nn.utils.clip_grad_norm_(plain.parameters(), 0.5).item())
        scale_gradients(tuned.parameters(), compute_clipping_factor(norm, 0.5))
        updates.prepare(step)
        updates.optimizer.step()
        updates.count()
        reference.step()
        falling.step()
        for module in (tuned, plain):
            module.zero_grad()
    torch.testing.assert_close(
        dict(tuned.named_parameters()), dict(plain.named_parameters()), rtol=0, atol=1e-7
    )


def test_what_is_predicted_to_be_quantised_is_what_is() -> None:
    assert (optimizers.BLOCK, optimizers.QUANTISED_MIN) == (
        eight_bit.BLOCK,
        eight_bit.QUANTISED_MIN,
    )


def test_changes_below_what_bf16_can_tell_apart_add_up() -> None:
    """The neighbours of 1 are 1 / 256 below and 1 / 128 above: no change of a thousandth alone would ever move it."""
    weight = nn.Parameter(torch.ones(4096, dtype=torch.bfloat16))
    training = TrainingSpec(optimizer=Optimizer.ADAMW_8BIT, learning_rate=1e-3, weight_decay=0.0)
    seeds = itertools.count()
    updates = OptimizerUpdates(
        [("weight", weight)],
        training,
        CPU,
        steps_done=0,
        seed_update=lambda _: torch.manual_seed(next(seeds)),
    )
    updates.allocate()
    for _ in range(20):
        weight.grad = torch.ones_like(weight)
        updates.prepare(0)
        updates.update()
    assert weight.float().mean().item() == pytest.approx(1 - 20 * 1e-3, abs=2e-3)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_restored_by_name_continues_exactly(optimizer: Optimizer) -> None:
    freeze = (Freeze(parameters="0.*", until_step=2),)
    training = TrainingSpec(optimizer=optimizer, freeze=freeze)
    first, second = _twins()
    updates = _advance(first, training, steps=2, start=0)
    updates = _advance(first, training, steps=2, start=2, saved=updates.state())
    saved = {name: value.clone() for name, value in updates.state().items()}
    assert saved[STEPS].tolist() == [4.0, 2.0]
    second.load_state_dict(first.state_dict())
    _advance(first, training, steps=1, start=4, saved=saved)
    _advance(second, training, steps=1, start=4, saved=saved)
    torch.testing.assert_close(first.state_dict(), second.state_dict(), rtol=0, atol=0)


def _advance(
    module: nn.Module,
    training: TrainingSpec,
    *,
    steps: int,
    start: int,
    saved: dict[str, torch.Tensor] | None = None,
) -> OptimizerUpdates:
    """Train for some steps with a new optimizer, restored from another one's state at `start`."""
    module.requires_grad_(True)
    freeze_parameters(module, training.freeze, start)
    updates = OptimizerUpdates(module.named_parameters(), training, CPU, start)
    updates.allocate()
    for name, value in updates.state(only_unfrozen_before_step=start).items():
        value.copy_((saved or {}).get(name, value))
    updates.copy_steps_to_optimizer()
    for step in range(start, start + steps):
        (module(torch.ones(3, 4)) ** 2).sum().backward()
        updates.prepare(step)
        updates.optimizer.step()
        updates.count()
        module.zero_grad()
    return updates


def _twins() -> tuple[nn.Module, nn.Module]:
    torch.manual_seed(1)
    first, second = (nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 2)) for _ in range(2))
    second.load_state_dict(first.state_dict())
    return first, second


class _Samples:
    def __len__(self) -> int:
        return 1

    def token_count(self, index: int) -> int:
        return index

    def batch(self, indices: object) -> tuple[torch.Tensor, ...]:
        raise AssertionError(indices)


@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_masks_follow_from_step_and_micro_batch_under_any_recomputation(
    mode: ActivationCheckpointing,
) -> None:
    gradients = {}
    for name, prelude in (("alone", 0), ("after others", 3)):
        torch.manual_seed(0)
        layers = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.Dropout(0.5)) for _ in range(2))
        module = nn.Sequential(*layers)
        apply_checkpointing(tuple(layers), mode)
        randomness = Randomness(
            Recipe(
                module=module,
                loss_sum=lambda m, b: m(b[0]).sum(),
                dataset=_Samples(),
                layers=tuple(layers),
            ),
            seed=5,
        )
        torch.rand(prelude)
        x = torch.ones(2, 8, requires_grad=True)
        randomness.begin(steps_done=4, micro_batch_index=1)
        module(x).square().sum().backward()
        gradients[name] = x.grad
        randomness.begin(steps_done=4, micro_batch_index=2)
        other = torch.autograd.grad(module(x).square().sum(), x)[0]
        assert not torch.equal(other, gradients[name])
    assert torch.equal(gradients["alone"], gradients["after others"])
