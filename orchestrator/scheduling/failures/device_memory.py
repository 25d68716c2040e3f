"""Failures of device memory: the failure made of an out-of-memory report, and whether a device was
nearly full.
"""

from __future__ import annotations

from orchestrator.scheduling.failures.out_of_memory import compute_oom_needed_bytes
from orchestrator.scheduling.failures.phases import GUARD_PHASES
from orchestrator.scheduling.failures.unexplained import cut_excerpt
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


def make_oom_failure(attempt: Attempt, report: OomReport, finding: Finding | None) -> Failure:
    """Return the failure for a rank's out-of-memory report; `finding` is the log line of the same
    error, or None.

    Its kind is MEMORY_CONTENTION where other processes held the missing memory, else DEVICE_OOM.
    """
    phase = _find_phase(report, finding)
    amount = (
        "an unknown amount"
        if report.requested_bytes is None
        else format_bytes(report.requested_bytes)
    )
    facts = (
        f"rank {report.rank} ran out of device memory after step {report.step} ({_describe_phase(report, phase)}): "
        f"asked for {amount} with {format_bytes(report.live_bytes)} of {format_bytes(report.capacity_bytes)} in use"
    )
    kind = FailureKind.DEVICE_OOM
    if (
        report.foreign_bytes
        and compute_oom_needed_bytes(report)
        <= attempt.correction * attempt.estimate.allocated_bytes
    ):
        kind = FailureKind.MEMORY_CONTENTION
        facts = f"{facts}; {format_bytes(report.foreign_bytes)} of it held by other processes"
    return Failure(
        kind=kind, rank=report.rank, phase=phase, reason=facts, excerpt=cut_excerpt(report.message)
    )


def _find_phase(report: OomReport, finding: Finding | None) -> Phase | None:
    """Return the phase in which the out-of-memory error came; None if unknown.

    The guard's word counts first, then the traceback or the log.
    """
    if report.phase in GUARD_PHASES:
        return GUARD_PHASES[report.phase]
    if finding is not None and finding.phase is not None:
        return finding.phase
    return {"startup": Phase.STARTUP, "forward": Phase.TRAINING}.get(report.phase)


def _describe_phase(report: OomReport, phase: Phase | None) -> str:
    """Return the phase as text; the word of the guard (our code in each rank), such as `backward`,
    where it is more precise.
    """
    return (
        report.phase
        if phase in (None, Phase.TRAINING) and report.phase
        else phase or "in an unknown phase"
    )


def is_nearly_full(attempt: Attempt, evidence: Evidence, device_bytes: int | None) -> bool:
    """Return whether the attempt's peak bytes are close to the memory of one device.

    The peak is the measured one, else the predicted one. Returns False where `device_bytes` is
    None.
    """
    peak_bytes = max(
        (beat.peak_bytes for beat in evidence.heartbeats), default=attempt.estimate.allocated_bytes
    )
    return device_bytes is not None and peak_bytes >= NEARLY_FULL * device_bytes
