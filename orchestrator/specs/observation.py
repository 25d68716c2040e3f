"""Observation: predicted and measured memory and speed of an attempt (one launch of a job)."""

from __future__ import annotations

from dataclasses import dataclass

from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MomentBytes, OwnSettings


@dataclass(frozen=True, slots=True, kw_only=True)
class Observation:
    """Predicted and measured memory and speed of one attempt. Calibration learns from them."""

    job: str  # Job.key
    number: int  # of the attempt
    device: str  # DeviceSpec.name
    family: str
    torch_version: str  # that it ran under; "" where no rank told
    plan: Plan
    moments: tuple[MomentBytes, ...]  # as predicted, before any correction: those that can become the worst
    predicted_bytes: int  # allocated, before any correction
    measured_bytes: int  # allocated; where it ran out of memory: what it needed at least
    ran_out: bool
    step_ratio: float | None  # measured / predicted seconds of a step, where both are known
    at_s: float  # when it ended
    probe: bool = False  # nothing was predicted: it tells what a micro-batch needs
    phase: str = ""  # where it ran out of memory, in the guard's words; "" elsewhere, or where unknown
    pass_done: float | None = None  # share of that forward or backward pass that was done; None: unknown
    steps_done: int = 0  # that it completed in this attempt before it ran out of memory
    steps_left: int | None = None  # of the training at that point; None: unknown, or it did not run out
    finished: bool = False  # it ended the training, and did at least half of it
    overhead_bytes: int | None = None  # that its worst device held beside PyTorch's allocator; None: not told
    relative_to: OwnSettings | None = None  # as of its attempt
