"""The failure of an attempt from the ends of its ranks: exceptions, log lines, signals and exit
codes.
"""

from __future__ import annotations

from enum import IntEnum

from orchestrator.scheduling.failures.device_memory import is_nearly_full, make_oom_failure
from orchestrator.scheduling.failures.exit_codes import (
    ENDED_BY_US,
    FROM_OUTSIDE,
    KILLED,
    SHARED_MEMORY_LOST,
    describe_exit_code,
    find_exit_signal,
    format_signal_name,
)
from orchestrator.scheduling.failures.log_scan import find_log_findings
from orchestrator.scheduling.failures.program_faults import find_faulty_thing
from orchestrator.scheduling.failures.signatures import (
    COMPLAINTS,
    SUSPECTS,
    find_extent_of_hardware_error,
)
from orchestrator.scheduling.failures.unexplained import (
    MESSAGE_CHARACTERS_MAX,
    cut_excerpt,
    join_lines,
    make_unexplained_failure,
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

_ENDED_BY_LAUNCHER = " received by PID "  # in torchrun's line about a rank that it ended


def diagnose_ranks(
    attempt: Attempt, evidence: Evidence, command: Argv, device_bytes: int | None
) -> Failure:
    """Return the failure of the rank whose end explains the attempt's end best.

    Of several equal ones it is the rank that `order_by_suspicion` puts first. `device_bytes` is the
    memory of one device, None where unknown.
    """
    suspects = order_by_suspicion(evidence)
    stale = next((end for end in suspects if end.exit_code == STALE_EXIT_CODE), None)
    if stale is not None:
        return Failure(
            kind=FailureKind.PREEMPTED,
            rank=stale.rank,
            reason="a newer attempt had taken its place",
        )
    judged = [_judge_rank(attempt, evidence, end, command, device_bytes) for end in suspects]
    # the exception of the rank that ended first decides, whatever others met later
    if suspects[0].rank == evidence.first_ended_rank and judged[0][0] is EndWeight.RAISED:
        return judged[0][1]
    return min(judged, key=lambda pair: pair[0])[1]


class EndWeight(IntEnum):
    """How well the end of one rank explains the end of the attempt; the smallest value explains it
    best.
    """

    NAMED = 0  # an exception with a known cause, or one that blames the program
    RAISED = 1  # an exception of unknown cause
    WORDS = 2  # a log line names a cause
    CRASHED = 3  # by a signal of its own, or the first to end
    SIGNAL = 4  # ended from outside
    WAITED = 5  # it waited in vain for others, or was told to end
    SILENT = 6  # an exit code alone, 0 among them
    COMPLAINT = 7  # about the end of others
    FOLLOWED = 8  # ended by us after another


def _judge_rank(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    command: Argv,
    device_bytes: int | None,
) -> tuple[EndWeight, Failure]:
    """Return (how well this rank's end explains the attempt's end, the failure that the rank's end
    alone would be).
    """
    report = _find_report_of_rank(evidence, end)
    finding = _find_decisive_finding(end, report, command)
    if finding is None:
        return _judge_exit(attempt, evidence, end, report, command)
    if finding.cause in (Cause.RAISED, Cause.DEFERRED):
        failure = make_unexplained_failure(attempt, evidence, end, report, finding, command)
        assert failure.ending is not None, "nothing explains it"
        if finding.cause is Cause.DEFERRED:
            return EndWeight.SILENT, failure
        return EndWeight.NAMED if failure.ending.is_own else EndWeight.RAISED, failure
    named = make_finding_failure(attempt, evidence, end, finding, device_bytes)
    if finding.cause in COMPLAINTS:
        if _failed_without_error_first(evidence, end, finding):
            silent = make_unexplained_failure(attempt, evidence, end, None, None, command)
            return EndWeight.CRASHED, silent
        return _judge_complaint_about_others(evidence, end, finding, named)
    if named is None:
        return _judge_exit(attempt, evidence, end, report, command)
    return EndWeight.NAMED if finding.is_exception else EndWeight.WORDS, named


def _failed_without_error_first(evidence: Evidence, end: RankEnd, finding: Finding) -> bool:
    """Return whether torchrun saw another rank fail first than the one that complains, and that
    rank left no error.

    `finding` is the complaint. Such a rank left by `os._exit`, by `sys.exit` with a text, or crashed.
    """
    root = end.root_rank
    is_from_launcher = _ENDED_BY_LAUNCHER in finding.line
    if root is None or (finding.rank in (None, root) and not is_from_launcher):
        return False
    if _find_signal_failure(evidence, end) is not None:
        return False
    ranks_with_errors = {entry.rank for entry in end.findings}
    ranks_with_errors |= {report.rank for report in evidence.errors}
    return bool(end.root_exit_code) and root not in ranks_with_errors


def _judge_complaint_about_others(
    evidence: Evidence, end: RankEnd, finding: Finding, failure_of_cause: Failure | None
) -> tuple[EndWeight, Failure]:
    """Return the weight and failure of a rank that complains about other ranks, or waited in vain
    for them.

    `failure_of_cause` is the failure by the cause in `finding`, its log line; None where that is
    refuted.
    """
    if (
        failure_of_cause is not None
        and finding.cause is not Cause.SECONDARY
        and not evidence.host_oom_kills
    ):
        return EndWeight.WAITED, failure_of_cause
    signalled = _find_signal_failure(evidence, end)
    reason = f"its ranks only complain about each other: {finding.line[:MESSAGE_CHARACTERS_MAX]}"
    return EndWeight.COMPLAINT, signalled or Failure(kind=FailureKind.NODE_LOST, reason=reason)


def _judge_exit(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    report: ErrorReport | None,
    command: Argv,
) -> tuple[EndWeight, Failure]:
    """Return the weight and failure of a rank of which only the exit code is known."""
    is_first = end.rank == evidence.first_ended_rank
    signalled = _find_signal_failure(evidence, end)
    if signalled is not None and signalled.kind is FailureKind.HOST_OOM:
        return EndWeight.NAMED, signalled
    if signalled is not None:
        followed = (
            end.exit_code in ENDED_BY_US and not is_first and _has_failed_before(evidence, end)
        )
        return EndWeight.FOLLOWED if followed else EndWeight.SIGNAL, signalled
    if evidence.disk_full and end.exit_code not in (0, None):
        return EndWeight.WORDS, _make_disk_full_failure(end)
    failure = make_unexplained_failure(attempt, evidence, end, report, None, command)
    if end.exit_code == 0:
        # where others only complain, they complain that it left
        return EndWeight.SILENT, failure
    if failure.ending is not None and failure.ending.is_own:
        return EndWeight.NAMED, failure
    is_crash = find_exit_signal(end.exit_code) is not None
    return EndWeight.CRASHED if is_crash or is_first else EndWeight.SILENT, failure


def _make_disk_full_failure(end: RankEnd) -> Failure:
    """Return the failure of a rank without a known cause whose disk was full at its end.

    Such a rank could not write its error to its log. A bug of its own shows itself in the next
    attempt, which waits for room.
    """
    how = describe_exit_code(end.exit_code)
    reason = f"rank {end.rank} {how}; the disk was full, so its log may lack the error"
    return Failure(
        kind=FailureKind.DISK_FULL,
        rank=end.rank,
        reason=reason,
        excerpt=cut_excerpt(end.log_tail),
    )


def _has_failed_before(evidence: Evidence, end: RankEnd) -> bool:
    """Return whether another rank failed by itself, after which the backend ended this one."""
    others = (other for other in evidence.ranks if other.rank != end.rank)
    return any(other.exit_code and other.exit_code not in ENDED_BY_US for other in others)


def _find_report_of_rank(evidence: Evidence, end: RankEnd) -> ErrorReport | None:
    """Return the guard's report of the exception that ended this rank, or a rank that its launcher
    started; else None.

    Of several reports, that of the rank which the launcher saw fail first is returned.
    """
    others = {other.rank for other in evidence.ranks} - {end.rank}
    reports = [report for report in evidence.errors if report.rank not in others]
    key = lambda report: (report.rank != end.root_rank, report.rank != end.rank)  # noqa: E731
    return min(reports, key=key, default=None)


def _find_decisive_finding(
    end: RankEnd, report: ErrorReport | None, command: Argv
) -> Finding | None:
    """Return the line that says what ended the rank: from the guard's report, else from its log;
    None without either.

    Where the report only complains about other ranks, the log may name the cause. A signal that
    ended the rank outweighs an exception in its log that no rule knows; a later line that names a
    cause is then returned.
    """
    findings = list_log_findings(end, command)
    if report is not None:
        reported = next(iter(find_log_findings(report.traceback)), None)
        if reported is None:
            reported = Finding(cause=Cause.RAISED, line=report.type, excerpt=report.traceback)
        if reported.cause not in (*COMPLAINTS, *SUSPECTS):
            return replace(reported, rank=report.rank, is_exception=True)
        if not findings or findings[0].cause in COMPLAINTS:
            return replace(reported, rank=report.rank, is_exception=True)
    if not findings:
        return None
    first = findings[0]
    if find_exit_signal(end.exit_code) in FROM_OUTSIDE and first.cause is Cause.RAISED:
        later = (f for f in findings[1:] if f.offset > first.offset and f.cause is not Cause.RAISED)
        return next(later, None)
    return first


def make_finding_failure(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    finding: Finding | None,
    device_bytes: int | None,
) -> Failure | None:
    """Return the failure that the rank's decisive log line (the finding) names; None if it names
    none, or is refuted.
    """
    kind = (
        None
        if finding is None
        else _confirm_kind_of_cause(end, finding, evidence, attempt, device_bytes)
    )
    if finding is None or kind is None:
        return None
    if kind is FailureKind.DEVICE_OOM and finding.oom is not None:
        return make_oom_failure(attempt, finding.oom, finding)
    return Failure(
        kind=kind,
        rank=end.rank if finding.rank is None else finding.rank,
        phase=finding.phase,
        reason=join_lines(finding.line),
        excerpt=cut_excerpt(finding.excerpt),
        broken=find_extent_of_hardware_error(finding.line)
        if finding.cause is Cause.HARDWARE
        else None,
        about=find_faulty_thing(finding.line) if kind is FailureKind.USER_ERROR else None,
    )


def _confirm_kind_of_cause(
    end: RankEnd, finding: Finding, evidence: Evidence, attempt: Attempt, device_bytes: int | None
) -> FailureKind | None:
    """Return the kind of failure for the cause that a log line names; None where other evidence
    refutes that cause.
    """
    nearly_full = is_nearly_full(attempt, evidence, device_bytes)
    kinds: dict[Cause, FailureKind | None] = {
        Cause.NOT_OOM: FailureKind.HUNG if _had_collective_timeout(end) else FailureKind.USER_ERROR,
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


def _had_collective_timeout(end: RankEnd) -> bool:
    """Return whether a collective operation of this rank timed out, because ranks no longer ran the
    same operations.
    """
    return any(finding.cause is Cause.TIMEOUT for finding in end.findings)


def _find_signal_failure(evidence: Evidence, end: RankEnd) -> Failure | None:
    """Return the failure for the signal that ended the rank, or the rank that its launcher saw fail
    first.

    None without a signal, and for a crash, which does not tell its cause.
    """
    rank = end.rank
    code = end.exit_code
    if code == 1 and end.root_rank is not None and end.root_exit_code is not None:
        rank = end.root_rank
        code = end.root_exit_code
    number = find_exit_signal(code)
    if number is None:
        return None
    name = format_signal_name(number)
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
    return Failure(kind=kind, rank=rank, reason=reason, excerpt=cut_excerpt(end.log_tail))


def blame_oom_killer_if_active(evidence: Evidence, failure: Failure) -> Failure:
    """Return the failure, changed to HOST_OOM if the kernel killed processes for memory during the
    attempt.

    It is unchanged where an exception or broken hardware explains the end: the kernel's counter is
    the whole node's.
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


def list_log_findings(end: RankEnd, command: Argv) -> tuple[Finding, ...]:
    """Return the lines of the rank's log that may explain its end; from the log's end alone if no
    more was scanned.
    """
    return end.findings or find_log_findings(end.log_tail, command)


def order_by_suspicion(evidence: Evidence) -> list[RankEnd]:
    """Return the ends of the ranks, the one that most likely caused the attempt's end first.

    First comes the rank that ended first, then failed ones, then the rest. Ranks that the backend
    ended by a signal come last among the failed ones. Where the kernel killed for memory, the
    killed rank comes before those.
    """

    def suspicion_key(end: RankEnd) -> tuple[bool, bool, bool, bool, int]:
        return (
            end.rank != evidence.first_ended_rank,
            end.exit_code == 0,
            end.exit_code in ENDED_BY_US,
            evidence.host_oom_kills > 0 and end.exit_code != -KILLED,
            end.rank,
        )

    return sorted(evidence.ranks, key=suspicion_key)
