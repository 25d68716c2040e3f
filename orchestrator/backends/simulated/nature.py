"""The true step times, memory peaks and delays of a simulated cluster, which the scheduler only predicts."""

from __future__ import annotations

import random
from typing import Protocol

from orchestrator.specs.attempt import Attempt
from orchestrator.specs.job_record import Job

Span = tuple[float, float]  # drawn from evenly

STEP_FACTORS = (0.7, 1.5)  # true / predicted step time over families
# of the logarithm of true / predicted peak over families: mostly within a factor of two
PEAK_SPREAD = 0.4


class Nature(Protocol):
    """True behaviour of attempts, which the scheduler sees only in their evidence."""

    @property
    def startup_s(self) -> Span:
        """(shortest, longest) seconds from launch to the first step."""

    @property
    def stop_share(self) -> Span:
        """(smallest, largest) share of its grace period that an attempt takes to end."""

    @property
    def save_s(self) -> float:
        """Seconds after that in which a stopped attempt saves and trains no more."""

    @property
    def release_s(self) -> Span:
        """(shortest, longest) seconds from the last process's end until devices report their memory free."""

    def step_s(self, job: Job, attempt: Attempt) -> float:
        """Return the true seconds of an optimizer step."""

    def peak_bytes(self, job: Job, attempt: Attempt, capacity_bytes: int) -> int:
        """Return the true allocated peak in bytes; `capacity_bytes` is what its devices have for tensors."""


class Hidden:
    """True behaviour in which each family's step time and peak deviate from their predictions."""

    startup_s = (2.0, 20.0)
    stop_share = (0.0, 1.0)
    save_s = 0.0
    release_s = (0.5, 5.0)

    def __init__(self, seed: int) -> None:
        self._seed = seed

    def step_s(self, job: Job, attempt: Attempt) -> float:
        return attempt.step_s * self._factors(job)[0]

    def peak_bytes(self, job: Job, attempt: Attempt, capacity_bytes: int) -> int:  # noqa: ARG002
        return round(attempt.estimate.allocated_bytes * self._factors(job)[1])

    def _factors(self, job: Job) -> tuple[float, float]:
        draw = stream(self._seed, "hidden", job.spec.family_name)
        return draw.uniform(*STEP_FACTORS), draw.lognormvariate(0.0, PEAK_SPREAD)


def stream(seed: int, *what: str) -> random.Random:
    """Return a random generator that depends only on the seed and on `what`, not on the order of events."""
    return random.Random("/".join((str(seed), *what)))
