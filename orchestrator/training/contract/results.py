"""The result of a training step."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """Result of a step. `loss` is this rank's part: the sum over ranks is the global batch's mean loss.

    `grad_norm` is the global norm before clipping; infinite or NaN if a fp16 step overflowed and was skipped.
    """

    loss: float
    grad_norm: float
