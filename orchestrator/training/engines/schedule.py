"""The learning-rate schedule, a function of the step number alone: nothing has to be saved."""

from __future__ import annotations

import math

from orchestrator.specs.job.model import Schedule, TrainingSpec


def compute_learning_rate_after(training: TrainingSpec, step: int) -> float:
    """Return the learning rate of the optimizer step that follows `step` completed ones.

    It rises linearly over `warmup_steps`. Then it stays constant, or decays to `min_learning_rate`
    at the last step: linearly, or on half a cosine (Loshchilov and Hutter 2017, arXiv:1608.03983,
    equation 5).
    """
    peak = training.learning_rate
    warmup = training.warmup_steps
    if step < warmup:
        return peak * (step + 1) / warmup
    if training.schedule is Schedule.CONSTANT:
        return peak
    progress = min(1.0, (step - warmup) / max(1, training.max_steps - warmup))
    left = (
        1.0 - progress
        if training.schedule is Schedule.LINEAR
        else (1.0 + math.cos(math.pi * progress)) / 2
    )
    return training.min_learning_rate + (peak - training.min_learning_rate) * left
