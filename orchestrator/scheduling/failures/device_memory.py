"""Failures by device memory: what an out-of-memory report says, and whether a device was nearly full."""

from __future__ import annotations

from orchestrator.scheduling.failures.out_of_memory import oom_needed_bytes
from orchestrator.scheduling.failures.phases import GUARD_PHASES
from orchestrator.scheduling.failures.unexplained import cut_tail
from orchestrator.specs.attempt import (
    Attempt,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    OomReport,
    Phase,
)
from orchestrator.specs.units import format_bytes

# a cuDNN or cuBLAS failure below this share of the device is a driver or shape error
NEARLY_FULL = 0.9


def oom_failure(attempt: Attempt, report: OomReport, finding: Finding | None) -> Failure:
    """Return the failure of a rank that ran out of device memory, or of memory that other processes hold."""
    phase = _phase_of(report, finding)
    amount = (
        "an unknown amount"
        if report.requested_bytes is None
        else format_bytes(report.requested_bytes)
    )
    facts = (
        f"rank {report.rank} ran out of device memory after step {report.step} ({_place_of(report, phase)}): "
        f"asked for {amount} with {format_bytes(report.live_bytes)} of {format_bytes(report.capacity_bytes)} in use"
    )
    kind = FailureKind.DEVICE_OOM
    if (
        report.foreign_bytes
        and oom_needed_bytes(report) <= attempt.correction * attempt.estimate.allocated_bytes
    ):
        kind = FailureKind.MEMORY_CONTENTION
        facts = f"{facts}; {format_bytes(report.foreign_bytes)} of it held by other processes"
    return Failure(
        kind=kind, rank=report.rank, phase=phase, reason=facts, excerpt=cut_tail(report.message)
    )


def _phase_of(report: OomReport, finding: Finding | None) -> Phase | None:
    """Return the phase by the guard, which sees optimizers and backward passes; else by the traceback or the log."""
    if report.phase in GUARD_PHASES:
        return GUARD_PHASES[report.phase]
    if finding is not None and finding.phase is not None:
        return finding.phase
    return {"startup": Phase.STARTUP, "forward": Phase.TRAINING}.get(report.phase)


def _place_of(report: OomReport, phase: Phase | None) -> str:
    """Return the phase as text, with the guard's word (forward or backward) where that is more specific."""
    return (
        report.phase
        if phase in (None, Phase.TRAINING) and report.phase
        else phase or "in an unknown phase"
    )


def is_nearly_full(attempt: Attempt, evidence: Evidence, capacity_bytes: int | None) -> bool:
    """Return whether the measured peak, or without one the plan's, comes near the device's memory."""
    peak_bytes = max(
        (beat.peak_bytes for beat in evidence.heartbeats), default=attempt.estimate.allocated_bytes
    )
    return capacity_bytes is not None and peak_bytes >= NEARLY_FULL * capacity_bytes
