"""Failures by the ends of ranks: by exceptions, log lines, signals and exit codes, whichever says most."""

from __future__ import annotations

from enum import IntEnum

from orchestrator.scheduling.failures.device_memory import is_nearly_full, oom_failure
from orchestrator.scheduling.failures.exit_codes import (
    ENDED_BY_US,
    FROM_OUTSIDE,
    KILLED,
    SHARED_MEMORY_LOST,
    exit_signal,
    signal_name,
)
from orchestrator.scheduling.failures.log_scan import read_log
from orchestrator.scheduling.failures.program_faults import about_line
from orchestrator.scheduling.failures.signatures import COMPLAINTS, SUSPECTS, broken_extent
from orchestrator.scheduling.failures.unexplained import (
    MESSAGE_CHARACTERS_MAX,
    cut_tail,
    in_one_line,
    unexplained_failure,
)
from orchestrator.specs.attempt import (
    Attempt,
    Cause,
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    RankEnd,
)
from orchestrator.specs.command_line import Argv
from orchestrator.specs.replace import replace
from orchestrator.specs.run import STALE_EXIT_CODE


def failure_of_ranks(
    attempt: Attempt, evidence: Evidence, command: Argv, capacity_bytes: int | None
) -> Failure:
    """Return the failure of the rank whose end says most; of equal ones, that of the first suspect."""
    suspects = suspects_of(evidence)
    stale = next((end for end in suspects if end.exit_code == STALE_EXIT_CODE), None)
    if stale is not None:
        return Failure(
            kind=FailureKind.PREEMPTED,
            rank=stale.rank,
            reason="a newer attempt had taken its place",
        )
    judged = [_judge_rank(attempt, evidence, end, command, capacity_bytes) for end in suspects]
    # the exception of the rank that ended first decides, whatever others met later
    if suspects[0].rank == evidence.first_ended_rank and judged[0][0] is Weight.RAISED:
        return judged[0][1]
    return min(judged, key=lambda pair: pair[0])[1]


class Weight(IntEnum):
    """How much the end of one rank explains the end of all; the least value says most."""

    NAMED = 0  # an exception with a known cause, or one that blames the program
    RAISED = 1  # an exception of unknown cause
    WORDS = 2  # a log line names a cause
    CRASHED = 3  # by a signal of its own, or the first to end
    SIGNAL = 4  # ended from outside
    WAITED = 5  # it waited in vain for others, or was told to end
    SILENT = 6  # an exit code alone
    COMPLAINT = 7  # about the end of others
    FOLLOWED = 8  # ended by us after another, or with 0


def _judge_rank(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    command: Argv,
    capacity_bytes: int | None,
) -> tuple[Weight, Failure]:
    """Return what one rank's end says of its cause, and the failure that it would be alone."""
    report = _report_of(evidence, end)
    finding = _decisive_finding(end, report, command)
    if finding is None:
        return _judge_exit(attempt, evidence, end, report, command)
    if finding.cause in (Cause.RAISED, Cause.DEFERRED):
        failure = unexplained_failure(attempt, evidence, end, report, finding, command)
        assert failure.ending is not None, "nothing explains it"
        if finding.cause is Cause.DEFERRED:
            return Weight.SILENT, failure
        return Weight.NAMED if failure.ending.is_own else Weight.RAISED, failure
    named = failure_of_finding(attempt, evidence, end, finding, capacity_bytes)
    if finding.cause in COMPLAINTS:
        return _judge_complaint(evidence, end, finding, named)
    if named is None:
        return _judge_exit(attempt, evidence, end, report, command)
    return Weight.NAMED if finding.is_exception else Weight.WORDS, named


def _judge_complaint(
    evidence: Evidence, end: RankEnd, finding: Finding, named: Failure | None
) -> tuple[Weight, Failure]:
    """Return the failure of a rank that complains about others, or that waited in vain for them."""
    if named is not None and finding.cause is not Cause.SECONDARY and not evidence.host_oom_kills:
        return Weight.WAITED, named
    signalled = _failure_of_signal(evidence, end)
    reason = f"its ranks only complain about each other: {finding.line[:MESSAGE_CHARACTERS_MAX]}"
    return Weight.COMPLAINT, signalled or Failure(kind=FailureKind.NODE_LOST, reason=reason)


def _judge_exit(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    report: ErrorReport | None,
    command: Argv,
) -> tuple[Weight, Failure]:
    """Return the failure of a rank of which only the exit code, or the signal behind it, tells."""
    is_first = end.rank == evidence.first_ended_rank
    signalled = _failure_of_signal(evidence, end)
    if signalled is not None and signalled.kind is FailureKind.HOST_OOM:
        return Weight.NAMED, signalled
    if signalled is not None:
        followed = (
            end.exit_code in ENDED_BY_US and not is_first and _has_failed_before(evidence, end)
        )
        return Weight.FOLLOWED if followed else Weight.SIGNAL, signalled
    failure = unexplained_failure(attempt, evidence, end, report, None, command)
    if end.exit_code == 0:
        return Weight.FOLLOWED, failure
    if failure.ending is not None and failure.ending.is_own:
        return Weight.NAMED, failure
    is_crash = exit_signal(end.exit_code) is not None
    return Weight.CRASHED if is_crash or is_first else Weight.SILENT, failure


def _has_failed_before(evidence: Evidence, end: RankEnd) -> bool:
    """Return whether another rank failed by itself, so that a signal of ours ended this one."""
    others = (other for other in evidence.ranks if other.rank != end.rank)
    return any(other.exit_code and other.exit_code not in ENDED_BY_US for other in others)


def _report_of(evidence: Evidence, end: RankEnd) -> ErrorReport | None:
    """Return the exception that the guard saw end this rank, or a rank that it started as their launcher.

    Of several the one that the launcher saw fail first comes first.
    """
    others = {other.rank for other in evidence.ranks} - {end.rank}
    reports = [report for report in evidence.errors if report.rank not in others]
    key = lambda report: (report.rank != end.root_rank, report.rank != end.rank)  # noqa: E731
    return min(reports, key=key, default=None)


def _decisive_finding(end: RankEnd, report: ErrorReport | None, command: Argv) -> Finding | None:
    """Return what ended the rank: the exception of the guard's report, else what its log says.

    Where the report is a complaint, the log may name the cause. A signal that ended the rank comes before an exception
    in its log that no rule knows, and a killer of memory named below that exception before it.
    """
    findings = findings_of(end, command)
    if report is not None:
        reported = next(iter(read_log(report.traceback)), None)
        if reported is None:
            reported = Finding(cause=Cause.RAISED, line=report.type, excerpt=report.traceback)
        if reported.cause not in (*COMPLAINTS, *SUSPECTS):
            return replace(reported, rank=report.rank, is_exception=True)
        if not findings or findings[0].cause in COMPLAINTS:
            return replace(reported, rank=report.rank, is_exception=True)
    if not findings:
        return None
    first = findings[0]
    if exit_signal(end.exit_code) in FROM_OUTSIDE and first.cause is Cause.RAISED:
        later = (f for f in findings[1:] if f.offset > first.offset and f.cause is not Cause.RAISED)
        return next(later, None)
    return first


def failure_of_finding(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    finding: Finding | None,
    capacity_bytes: int | None,
) -> Failure | None:
    kind = None if finding is None else _kind_of(end, finding, evidence, attempt, capacity_bytes)
    if finding is None or kind is None:
        return None
    if kind is FailureKind.DEVICE_OOM and finding.oom is not None:
        return oom_failure(attempt, finding.oom, finding)
    return Failure(
        kind=kind,
        rank=end.rank if finding.rank is None else finding.rank,
        phase=finding.phase,
        reason=in_one_line(finding.line),
        excerpt=cut_tail(finding.excerpt),
        broken=broken_extent(finding.line) if finding.cause is Cause.HARDWARE else None,
        about=about_line(finding.line) if kind is FailureKind.USER_ERROR else None,
    )


def _kind_of(
    end: RankEnd, finding: Finding, evidence: Evidence, attempt: Attempt, capacity_bytes: int | None
) -> FailureKind | None:
    """Return the kind of failure for a log line's cause, as other evidence confirms it; None where refuted."""
    nearly_full = is_nearly_full(attempt, evidence, capacity_bytes)
    kinds: dict[Cause, FailureKind | None] = {
        Cause.NOT_OOM: FailureKind.HUNG if _has_timed_out(end) else FailureKind.USER_ERROR,
        Cause.HANG: FailureKind.HUNG,
        Cause.TIMEOUT: FailureKind.HUNG,
        Cause.DEVICE_OOM: FailureKind.DEVICE_OOM,
        Cause.DEVICE_OOM_SUSPECT: FailureKind.DEVICE_OOM if nearly_full else FailureKind.USER_ERROR,
        Cause.SHARED_MEMORY: FailureKind.HOST_OOM,
        Cause.HARDWARE: FailureKind.NODE_LOST,
        Cause.HOST_OOM_SUSPECT: FailureKind.HOST_OOM
        if evidence.host_oom_kills
        else FailureKind.PREEMPTED,
        Cause.SECONDARY: None,
        Cause.RAISED: None,
        Cause.DEFERRED: None,
    }
    return kinds[finding.cause] if finding.cause in kinds else FailureKind(finding.cause.value)


def _has_timed_out(end: RankEnd) -> bool:
    """Return whether a collective timed out, since ranks had lost step with each other."""
    return any(finding.cause is Cause.TIMEOUT for finding in end.findings)


def _failure_of_signal(evidence: Evidence, end: RankEnd) -> Failure | None:
    """Return what the signal says that ended the process, or the first rank that its launcher saw fail.

    A crash by another signal says nothing of its cause.
    """
    rank = end.rank
    code = end.exit_code
    if code == 1 and end.root_rank is not None and end.root_exit_code is not None:
        rank = end.root_rank
        code = end.root_exit_code
    number = exit_signal(code)
    if number is None:
        return None
    name = signal_name(number)
    if number == KILLED and evidence.host_oom_kills:
        kind = FailureKind.HOST_OOM
        reason = f"rank {rank} was killed by the kernel for memory"
    elif number in FROM_OUTSIDE:
        kind = FailureKind.PREEMPTED
        reason = f"rank {rank} was ended from outside by {name}"
    elif number == SHARED_MEMORY_LOST:
        kind = FailureKind.HOST_OOM
        reason = f"rank {rank} ended by SIGBUS: shared memory"
    else:
        return None
    return Failure(kind=kind, rank=rank, reason=reason, excerpt=cut_tail(end.log_tail))


def check_oom_kills(evidence: Evidence, failure: Failure) -> Failure:
    """Return the failure, or host memory where the kernel killed for it and nothing else explains the end.

    The counter is the whole node's, so an exception that a mistake in code raises stands.
    """
    is_mistake = failure.ending is not None and failure.ending.is_own and bool(failure.excerpt)
    is_open = failure.ending is not None or failure.kind in (
        FailureKind.PREEMPTED,
        FailureKind.NODE_LOST,
    )
    if not evidence.host_oom_kills or not is_open or is_mistake or failure.broken is not None:
        return failure
    return replace(
        failure,
        kind=FailureKind.HOST_OOM,
        reason=f"the kernel killed for memory while it ran: {failure.reason}",
        ending=None,
    )


def findings_of(end: RankEnd, command: Argv) -> tuple[Finding, ...]:
    """Return the findings of the whole log where it was read, else of its end."""
    return end.findings or read_log(end.log_tail, command)


def suspects_of(evidence: Evidence) -> list[RankEnd]:
    """Return the ranks in the order of suspicion: the one that ended first, then failures, then the rest.

    Signalled ranks stand last among the failures, since that is how we end the survivors. Where the kernel killed for
    memory, the killed one comes before those that we ended.
    """

    def doubt(end: RankEnd) -> tuple[bool, bool, bool, bool, int]:
        return (
            end.rank != evidence.first_ended_rank,
            end.exit_code == 0,
            end.exit_code in ENDED_BY_US,
            evidence.host_oom_kills > 0 and end.exit_code != -KILLED,
            end.rank,
        )

    return sorted(evidence.ranks, key=doubt)
