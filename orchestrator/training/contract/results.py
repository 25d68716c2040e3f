"""The result of a training step."""

from __future__ import annotations

from orchestrator.specs.frozen import frozen


@frozen
class StepResult:
    """Result of a step. `loss` is this rank's part: the sum over ranks is the global batch's mean loss.

    `grad_norm` is the global norm before clipping; infinite or NaN if a fp16 step overflowed and was skipped.
    """

    loss: float
    grad_norm: float
