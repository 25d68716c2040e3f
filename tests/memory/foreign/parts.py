"""A training with another word in one of its parts."""

from __future__ import annotations

from dataclasses import replace

from orchestrator.memory.foreign.training import Training


def but(training: Training, part: str, **fields: object) -> Training:
    return replace(training, **{part: replace(getattr(training, part), **fields)})
