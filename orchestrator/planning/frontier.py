"""The frontier: the plans of a job that no other plan beats, and which of them fit in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import inf
from operator import itemgetter
from typing import NamedTuple

from orchestrator.memory.calibration import calibrate as calibration
from orchestrator.memory.calibration.calibrate import EVEN, Calibration
from orchestrator.memory.calibration.calibrate import MARGIN as MARGIN
from orchestrator.planning.cost import Hardware
from orchestrator.specs.choices import Degradation
from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.units import format_bytes


@frozen
class Candidate:
    """A legal plan with its predicted costs, and how much it alters the requested training."""

    plan: Plan
    estimate: MemoryEstimate
    step_s: float
    degradation: Degradation
    host_bytes: int = 0  # of host memory that a node needs whose devices its ranks fill
    busy_share: float | None = None  # of a step in which a device runs kernels; None: not predicted
    host_memory: float = inf  # that such a node has, in bytes

    @property
    def fits_host(self) -> bool:
        """Whether a node has enough host memory for the plan."""
        return self.host_bytes <= self.host_memory


@dataclass(frozen=True, slots=True)
class Frontier:
    """The plans that no other plan beats: mildest degradation first, and fastest first within a
    class.
    """

    candidates: tuple[Candidate, ...]
    looked: int = 0  # plans that the search examined


def estimate_node_host_bytes(plan: Plan, estimate: MemoryEstimate, hardware: Hardware) -> int:
    """Return the host bytes that the plan needs on a node whose devices it fills.

    On a virtual device, device memory is host memory.
    """
    virtual = estimate.device_bytes if hardware.device.kind.traits.is_virtual else 0
    return min(plan.world_size, hardware.devices_per_node) * (estimate.host_bytes + virtual)


def estimate_needed_device_bytes(candidate: Candidate, calibrated: Calibration) -> int:
    """Return the free bytes that the candidate needs on each device: the corrected estimate times
    its margin.
    """
    return calibration.estimate_needed_bytes(candidate.plan, candidate.estimate, calibrated)


def estimate_candidate_fit_probability(
    candidate: Candidate, capacity_bytes: int, calibrated: Calibration
) -> float:
    """Return the probability that the candidate fits in `capacity_bytes` per device; 0 where a node
    lacks host memory for it.
    """
    if not candidate.fits_host:
        return 0.0
    return calibration.estimate_fit_probability(
        candidate.plan, candidate.estimate, calibrated, capacity_bytes
    )


def fits_device(candidate: Candidate, capacity_bytes: int, calibrated: Calibration) -> bool:
    """Return whether a device holds the corrected estimate with its margin, and a node the host
    memory.

    A plan that already ran out of memory on such a device does not fit.
    """
    is_within = (
        candidate.fits_host
        and estimate_needed_device_bytes(candidate, calibrated) <= capacity_bytes
    )
    return is_within and not calibrated.has_run_out(
        candidate.plan, candidate.estimate, capacity_bytes
    )


class CandidateRoom(NamedTuple):
    """A candidate with the bytes that it may use on each device."""

    candidate: Candidate
    capacity_bytes: int


def find_likeliest_fitting(
    rooms: Iterable[CandidateRoom], calibrated: Calibration
) -> Candidate | None:
    """Return the candidate that most probably fits the bytes that it may use; None where every
    probability is below 50 %.

    A plan of 50 % fits, but for its margin. A job that ran out of memory tries any remaining plan,
    however unlikely, since it has already paid for more than a launch.
    """
    chances = [
        (estimate_candidate_fit_probability(candidate, capacity_bytes, calibrated), candidate)
        for candidate, capacity_bytes in rooms
    ]
    best, candidate = max(chances, key=itemgetter(0), default=(0.0, None))
    return candidate if best >= EVEN or (best > 0 and calibrated.belief is not None) else None


def list_fitting(
    frontier: Frontier,
    capacity_bytes: int,
    calibrated: Calibration,
    refuted: frozenset[Plan] = frozenset(),
) -> Iterator[Candidate]:
    """Yield the candidates that fit `capacity_bytes` per device and are not in `refuted`, in the
    frontier's order.
    """
    return (
        candidate
        for candidate in frontier.candidates
        if candidate.plan not in refuted and fits_device(candidate, capacity_bytes, calibrated)
    )


def find_rejection_reason(
    candidate: Candidate,
    capacity_bytes: int,
    calibrated: Calibration,
) -> str | None:
    """Return a sentence on why the candidate cannot be used; None where it can."""
    needed = estimate_needed_device_bytes(candidate, calibrated)
    if needed > capacity_bytes:
        needs = f"needs {format_bytes(needed)} of {format_bytes(capacity_bytes)}"
        return f"{needs}; worst moment: {candidate.estimate.moment}"
    if not candidate.fits_host:
        has = format_bytes(candidate.host_memory)
        return f"needs {format_bytes(candidate.host_bytes)} of host memory on a node that has {has}"
    if not fits_device(candidate, capacity_bytes, calibrated):
        return "ran out of memory before, in another job of this family"
    return None
