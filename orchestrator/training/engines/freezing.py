"""Freezing of parameters: staged training freezes some for the first steps, adapters freeze the rest."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase

from torch import nn

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import Freeze


def find_thaw_step(parameter_name: str, freeze: Sequence[Freeze]) -> int | None:
    """Return the number of optimizer steps after which a parameter is trained; 0: at once, None:
    never.

    If several entries match, the one that freezes longest counts.
    """
    until = [entry.until_step for entry in freeze if fnmatchcase(parameter_name, entry.parameters)]
    if None in until:
        return None
    return max((step for step in until if step is not None), default=0)


def list_thaw_steps(freeze: Sequence[Freeze]) -> tuple[int, ...]:
    """Return every step at which parameters unfreeze, ascending, starting with 0."""
    return tuple(
        sorted({0, *(entry.until_step for entry in freeze if entry.until_step is not None)})
    )


def find_next_thaw_step(step: int, freeze: Sequence[Freeze]) -> int | None:
    """Return the first step after `step` at which parameters unfreeze; None without one."""
    return next((thaw for thaw in list_thaw_steps(freeze) if thaw > step), None)


def freeze_parameters(module: nn.Module, freeze: Sequence[Freeze], step: int) -> frozenset[str]:
    """Freeze, in place, the parameters that are not trained after `step` optimizer steps.

    Call it before an engine wraps the module. Returns the whole-model names that any step of the
    training changes, which a checkpoint must hold. Parameters that the model itself froze stay
    frozen. Raises SpecError if an entry matches nothing, or nothing would be trained.
    """
    named = dict(module.named_parameters())
    for entry in freeze:
        if not any(fnmatchcase(name, entry.parameters) for name in named):
            example = f"a pattern of names such as {next(iter(named), 'none')}"
            raise SpecError(
                "no parameter matches",
                path="training.freeze",
                got=entry.parameters,
                allowed=example,
            )
    trainable = {
        name: find_thaw_step(name, freeze)
        for name, parameter in named.items()
        if parameter.requires_grad
    }
    for name, thaw in trainable.items():
        named[name].requires_grad_(thaw is not None and thaw <= step)
    if not any(parameter.requires_grad for parameter in named.values()):
        raise SpecError(
            "every parameter is frozen", path="training.freeze", got=f"optimizer step {step + 1}"
        )
    return frozenset(name for name, thaw in trainable.items() if thaw is not None)
