"""What a training step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """What a step leaves: `loss` is this rank's share, and the shares of all ranks add up to the global batch's mean.

    `grad_norm` is the global norm before clipping; infinite or NaN where a fp16 step overflowed and was left out.
    """

    loss: float
    grad_norm: float
