"""Observation: predicted and measured memory and speed of an attempt (one launch of a job)."""

from __future__ import annotations

from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MomentBytes, OwnSettings


@frozen
class Observation:
    """Predicted and measured memory and speed of one attempt, from which later predictions are
    calibrated.
    """

    job: str  # Job.key
    number: int  # of the attempt
    device: str  # DeviceSpec.name
    family: str
    torch_version: str  # "" if no rank reported it
    plan: Plan
    moments: tuple[MomentBytes, ...]  # predicted candidates for the memory peak, before correction
    predicted_bytes: int  # allocated, before any correction
    measured_bytes: int  # allocated; after running out of memory, the least that it needed
    ran_out: bool
    step_ratio: float | None  # measured / predicted seconds of a step; None: unknown
    at_s: float  # when it ended
    probe: bool = False  # no prediction: it measures what a micro-batch needs
    forward_bytes: int = 0  # allocated at the end of a forward pass; 0: not reported
    # phase in which it ran out of memory, as the guard reports it; "" otherwise or unknown
    phase: str = ""
    # done share of that forward or backward pass, 0 to 1; None: unknown
    pass_done: float | None = None
    steps_done: int = 0  # completed in this attempt before it ran out of memory
    # steps of the training still to do then; None: unknown, or it did not run out
    steps_left: int | None = None
    finished: bool = False  # it ended the training, and did at least half of it
    # used on the fullest device outside PyTorch's allocator; None: not reported
    overhead_bytes: int | None = None
    relative_to: OwnSettings | None = None  # as of its attempt
