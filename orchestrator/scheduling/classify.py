"""Why did an attempt end? Structured evidence first, counters next, log text last."""

from __future__ import annotations

import signal

from orchestrator.scheduling.signatures import Cause, Match, last_traceback, read_log
from orchestrator.specs.attempt import Attempt, Evidence, Failure, FailureKind, OomReport, RankEnd
from orchestrator.specs.run import STALE_EXIT_CODE
from orchestrator.specs.state import Job
from orchestrator.specs.units import format_bytes, format_seconds

EXCERPT_CHARACTERS_MAX = 4000
FROM_OUTSIDE = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT, signal.SIGHUP)
NEARLY_FULL = 0.9  # a cuDNN or cuBLAS failure below this share of the device is a driver or shape error


def classify(job: Job, attempt: Attempt, evidence: Evidence, capacity_bytes: int | None = None) -> Failure | None:
    """What the evidence means; None where the attempt succeeded.

    `capacity_bytes` is the device's memory, where known: ambiguous texts count as out of memory only near it.
    """
    if evidence.launch_error is not None:
        return Failure(kind=FailureKind.STARTUP, reason=f"could not be launched: {evidence.launch_error}")
    succeeded = bool(evidence.ranks) and all(end.exit_code == 0 for end in evidence.ranks)
    if succeeded and not evidence.missing_artifacts and not evidence.nodes_lost:
        return None
    if evidence.stopped and job.cancelling:
        return Failure(kind=FailureKind.CANCELLED, reason="ended because its cancellation was asked for")
    if evidence.ooms:
        return _device_oom(attempt, evidence)
    if evidence.nodes_lost:
        lost = ", ".join(evidence.nodes_lost)
        return Failure(kind=FailureKind.NODE_LOST, reason=f"lost contact with {lost} while it ran")
    if evidence.hung_for_s is not None:
        return Failure(
            kind=FailureKind.HUNG,
            reason=f"no training step for {format_seconds(evidence.hung_for_s)}",
            excerpt=_tail(_suspects(evidence)[0].log_tail if evidence.ranks else ""),
        )
    if not evidence.ranks:
        return Failure(kind=FailureKind.NODE_LOST, reason="nothing is known of its processes")
    return _from_ranks(job, attempt, evidence, capacity_bytes)


def _device_oom(attempt: Attempt, evidence: Evidence) -> Failure:
    report = next((r for r in evidence.ooms if r.rank == evidence.first_ended_rank), evidence.ooms[0])
    needed = needed_bytes(report)
    asked = "an unknown amount" if report.requested_bytes is None else format_bytes(report.requested_bytes)
    facts = (
        f"rank {report.rank} ran out of device memory after step {report.step} ({report.phase}): "
        f"asked for {asked} with {format_bytes(report.live_bytes)} of {format_bytes(report.capacity_bytes)} in use"
    )
    if report.foreign_bytes and needed <= attempt.correction * attempt.estimate.allocated_bytes:
        return Failure(
            kind=FailureKind.CROWDED,
            rank=report.rank,
            reason=f"{facts}; {format_bytes(report.foreign_bytes)} of it held by other processes",
            excerpt=_tail(report.message),
        )
    return Failure(kind=FailureKind.DEVICE_OOM, rank=report.rank, reason=facts, excerpt=_tail(report.message))


def needed_bytes(report: OomReport) -> int:
    """What the rank would have needed at the least, in allocated bytes."""
    at_least = report.live_bytes + (report.requested_bytes or 0)
    return at_least if report.foreign_bytes else max(at_least, report.capacity_bytes + 1)


def _from_ranks(job: Job, attempt: Attempt, evidence: Evidence, capacity_bytes: int | None) -> Failure:
    """The cause that exit codes and logs name; survivors' complaints count only when nothing else is said."""
    suspects = _suspects(evidence)
    command = job.spec.command or ()
    for end in suspects:
        if end.exit_code == STALE_EXIT_CODE:
            return Failure(kind=FailureKind.PREEMPTED, rank=end.rank, reason="a newer attempt had taken its place")
        failure = (
            _from_report(evidence, end)
            or _from_text(attempt, evidence, end, command, capacity_bytes)
            or _from_signal(evidence, end)
        )
        if failure:
            return failure
        if end.exit_code and not _complains_of_others(evidence, end, command):
            return _user_error(evidence, end)
    if all(end.exit_code for end in suspects):
        return Failure(kind=FailureKind.NODE_LOST, reason="its ranks only complain about each other")
    return _user_error(evidence, suspects[0])


def _from_report(evidence: Evidence, end: RankEnd) -> Failure | None:
    """A Python exception that the guard reported, unless its text names a cause of another class."""
    for report in evidence.errors:
        if report.rank == end.rank and read_log(report.traceback) is None:
            return Failure(
                kind=FailureKind.USER_ERROR,
                rank=end.rank,
                reason=f"{report.type} in {report.phase} after step {report.step}",
                excerpt=_tail(report.traceback),
            )
    return None


def _from_text(
    attempt: Attempt, evidence: Evidence, end: RankEnd, command: tuple[str, ...], capacity_bytes: int | None
) -> Failure | None:
    text = _own_words(evidence, end)
    match = read_log(text, command)
    if match is None:
        return None
    kind = _kind(match, evidence, attempt, capacity_bytes)
    if kind is None:
        return None
    return Failure(kind=kind, rank=end.rank, reason=match.line[:400], excerpt=_tail(last_traceback(text)))


def _kind(match: Match, evidence: Evidence, attempt: Attempt, capacity_bytes: int | None) -> FailureKind | None:
    peak = max((beat.peak_bytes for beat in evidence.heartbeats), default=attempt.estimate.allocated_bytes)
    nearly_full = capacity_bytes is not None and peak >= NEARLY_FULL * capacity_bytes
    kinds = {
        Cause.NOT_OOM: FailureKind.USER_ERROR,
        Cause.HANG: FailureKind.HUNG,
        Cause.DEVICE_OOM: FailureKind.DEVICE_OOM,
        Cause.DEVICE_OOM_SUSPECT: FailureKind.DEVICE_OOM if nearly_full else FailureKind.USER_ERROR,
        Cause.SHARED_MEMORY: FailureKind.HOST_OOM,
        Cause.HOST_OOM: FailureKind.HOST_OOM,
        Cause.HOST_OOM_SUSPECT: FailureKind.HOST_OOM if evidence.host_oom_kills else FailureKind.PREEMPTED,
        Cause.DISK_FULL: FailureKind.DISK_FULL,
        Cause.SECONDARY: None,
    }
    return kinds[match.cause]


def _from_signal(evidence: Evidence, end: RankEnd) -> Failure | None:
    if end.exit_code is None or end.exit_code >= 0:
        return None
    number = -end.exit_code
    name = signal.Signals(number).name if number in signal.valid_signals() else f"signal {number}"
    if number == signal.SIGKILL and evidence.host_oom_kills:
        kind, reason = FailureKind.HOST_OOM, f"rank {end.rank} was killed by the kernel for memory"
    elif number in FROM_OUTSIDE:
        kind, reason = FailureKind.PREEMPTED, f"rank {end.rank} was ended from outside by {name}"
    elif number == signal.SIGBUS:
        kind, reason = FailureKind.HOST_OOM, f"rank {end.rank} ended by SIGBUS: shared memory"
    else:
        kind, reason = FailureKind.USER_ERROR, f"rank {end.rank} crashed by {name}"
    return Failure(kind=kind, rank=end.rank, reason=reason, excerpt=_tail(end.log_tail))


def _user_error(evidence: Evidence, end: RankEnd) -> Failure:
    if end.exit_code == 0 and evidence.missing_artifacts:
        reason = f"exited 0 without leaving {', '.join(evidence.missing_artifacts)}"
    else:
        reason = f"rank {end.rank} exited with code {end.exit_code}"
    excerpt = last_traceback(end.log_tail)
    return Failure(kind=FailureKind.USER_ERROR, rank=end.rank, reason=reason, excerpt=_tail(excerpt))


def _suspects(evidence: Evidence) -> list[RankEnd]:
    """The ranks in the order in which they are asked: the one that ended first, then failures, then the rest.

    Signalled ranks stand last among the failures: it is how we end the survivors. Where the kernel killed for memory,
    the killed one comes before those that we ended.
    """

    def doubt(end: RankEnd) -> tuple[bool, bool, bool, bool, int]:
        return (
            end.rank != evidence.first_ended_rank,
            end.exit_code == 0,
            end.exit_code in (-signal.SIGTERM, -signal.SIGKILL),
            evidence.host_oom_kills > 0 and end.exit_code != -signal.SIGKILL,
            end.rank,
        )

    return sorted(evidence.ranks, key=doubt)


def _complains_of_others(evidence: Evidence, end: RankEnd, command: tuple[str, ...]) -> bool:
    match = read_log(_own_words(evidence, end), command)
    return match is not None and match.cause is Cause.SECONDARY


def _own_words(evidence: Evidence, end: RankEnd) -> str:
    """The exception that the guard reported, or the end of the log where it reported none."""
    return next((report.traceback for report in evidence.errors if report.rank == end.rank), end.log_tail)


def _tail(text: str) -> str:
    return text[-EXCERPT_CHARACTERS_MAX:]
