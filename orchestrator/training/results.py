"""What a training step leaves behind."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StepResult:
    """This rank's share of the global batch's mean loss, and the global gradient norm before clipping."""

    loss: float
    grad_norm: float
