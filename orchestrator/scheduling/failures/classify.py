"""Classifies the end of an attempt: structured evidence first, counters next, log text last."""

from __future__ import annotations

import re

from orchestrator.scheduling.base.time_limits import over_limit
from orchestrator.scheduling.failures.endings import PROGRAM_TYPES, ending_of, read_exceptions
from orchestrator.scheduling.failures.exit_codes import (
    ENDED_BY_US,
    FROM_OUTSIDE,
    KILLED,
    SHARED_MEMORY_LOST,
    exit_signal,
    signal_name,
)
from orchestrator.scheduling.failures.meeting import lone_ranks, lone_ranks_in_words
from orchestrator.scheduling.failures.out_of_memory import (
    caught_in_words,
    find_refuting_report,
    oom_needed_bytes,
)
from orchestrator.scheduling.failures.phases import GUARD_PHASES
from orchestrator.scheduling.failures.signatures import (
    COMPLAINTS,
    SUSPECTS,
    broken_extent,
    last_traceback,
    read_log,
)
from orchestrator.scheduling.failures.verdict import UNREADABLE
from orchestrator.specs.attempt import (
    PROBE_STEPS,
    Attempt,
    Cause,
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    OomReport,
    Phase,
    RankEnd,
)
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.run import STALE_EXIT_CODE
from orchestrator.specs.units import format_bytes, format_seconds

EXCERPT_CHARACTERS_MAX = 4000
MESSAGE_CHARACTERS_MAX = 200  # of an exception that stands in a reason
UNTOLD = (
    FailureKind.HOST_OOM,
    FailureKind.HUNG,
    FailureKind.PROBED,
)  # what a process past its cap may look like
HOW_TO_BE_WATCHED = (
    "its children need PYTHONPATH and ORC_GUARD as the program found them, an interpreter of Python 3.10 or newer, "
    "and none of its flags -I, -E and -S"
)
_SHORTAGES = {kind.value for kind in FailureKind if kind.shortage}
EXPLAINING = (  # the end of any rank
    *(Cause.DEVICE_OOM, Cause.HOST_OOM, Cause.SHARED_MEMORY, Cause.HARDWARE),
    *(cause for cause in Cause if cause.value in _SHORTAGES),
)
_WANTS_CUDA = re.compile(r"(?i)\bcuda\b|\bgpus?\b|nvidia")
# a cuDNN or cuBLAS failure below this share of the device is a driver or shape error
NEARLY_FULL = 0.9


def classify(
    job: Job, attempt: Attempt, evidence: Evidence, capacity_bytes: int | None = None
) -> Failure | None:
    """Return the diagnosed failure of an ended attempt; None where it succeeded.

    `capacity_bytes` is the device's memory, where known. Ambiguous log texts count as out of memory only near it.
    """
    failure = _classify(job, attempt, evidence, capacity_bytes)
    if evidence.virtual and evidence.unwatched and (failure is None or failure.kind in UNTOLD):
        reason = f"it ran past the cap of its virtual device: {evidence.unwatched[0]}; {HOW_TO_BE_WATCHED}"
        return Failure(
            kind=FailureKind.GUARD_ABSENT,
            reason=reason,
            excerpt=_tail("\n".join(evidence.unwatched)),
        )
    return failure


def _classify(
    job: Job, attempt: Attempt, evidence: Evidence, capacity_bytes: int | None
) -> Failure | None:
    if (failure := _launch_failure(job, evidence)) is not None:
        return failure
    swallowed = _find_swallowed_oom(job, evidence)
    ran_out = bool(evidence.ooms) or swallowed is not None
    if (
        attempt.probe
        and evidence.stopped
        and not ran_out
        and (not job.cancelling or _has_measured(evidence))
    ):
        return _probe_failure(attempt)
    succeeded = bool(evidence.ranks) and all(end.exit_code == 0 for end in evidence.ranks)
    # a probe writes into a folder of its own
    is_complete = attempt.probe or not evidence.missing_artifacts
    if swallowed is None and (
        evidence.finished or (succeeded and is_complete and not evidence.nodes_lost)
    ):
        return _probe_failure(attempt) if attempt.probe else None
    if evidence.stopped and job.cancelling:
        return Failure(
            kind=FailureKind.CANCELLED, reason="ended because its cancellation was asked for"
        )
    command = job.spec.command or ()
    if evidence.ooms:
        report = next(
            (r for r in evidence.ooms if r.rank == evidence.first_ended_rank), evidence.ooms[0]
        )
        return _oom_failure(attempt, report, _finding_of(evidence, report, command))
    if swallowed is not None:
        failure = _oom_failure(attempt, swallowed, _finding_of(evidence, swallowed, command))
        return replace(failure, reason=f"{failure.reason}; {caught_in_words(evidence)}")
    if (failure := _outside_failure(job, attempt, evidence)) is not None:
        return failure
    if evidence.hung_for_s is not None:
        return _hang_failure(attempt, evidence, command, capacity_bytes)
    if not evidence.ranks:
        return Failure(kind=FailureKind.NODE_LOST, reason="nothing is known of its processes")
    return _check_oom_kills(evidence, _failure_of_ranks(attempt, evidence, command, capacity_bytes))


def _launch_failure(job: Job, evidence: Evidence) -> Failure | None:
    """Return the failure of an attempt that could not start, or whose ranks trained alone; else None."""
    if (
        evidence.collect_error is not None and not job.cancelling
    ):  # whether it had succeeded is not known
        reason = f"its evidence cannot be read: {evidence.collect_error}"
        return Failure(kind=FailureKind.UNKNOWN, reason=reason, verdict=UNREADABLE)
    if evidence.no_program:
        return Failure(
            kind=FailureKind.USER_ERROR, reason=f"could not be started: {evidence.launch_error}"
        )
    if evidence.launch_error is not None:
        return Failure(
            kind=FailureKind.STARTUP, reason=f"could not be launched: {evidence.launch_error}"
        )
    lone = lone_ranks(evidence.heartbeats)
    if lone and not job.cancelling:  # no other plan and no other place would make it right
        return Failure(kind=FailureKind.USER_ERROR, reason=lone_ranks_in_words(lone))
    return None


def _outside_failure(job: Job, attempt: Attempt, evidence: Evidence) -> Failure | None:
    """Return the failure of an attempt that we stopped, or that lost its node; else None."""
    if evidence.stopped and attempt.over_limit:
        return over_limit(job, attempt)
    if evidence.stopped and attempt.moved_for:
        return Failure(kind=FailureKind.MOVED, reason=attempt.moved_for)
    if evidence.nodes_lost:
        lost = ", ".join(evidence.nodes_lost)
        return Failure(kind=FailureKind.NODE_LOST, reason=f"lost contact with {lost} while it ran")
    return None


def _find_swallowed_oom(job: Job, evidence: Evidence) -> OomReport | None:
    """Return the out-of-memory error that a script caught and that counts as its failure; None without one.

    A job may accept what its script catches, but not where it hung afterwards or left without its artifacts.
    """
    report, stood_still = find_refuting_report(evidence), evidence.hung_for_s is not None
    if stood_still or job.spec.on_caught_oom == "recover":
        without_reason = (
            all(end.exit_code == 0 for end in evidence.ranks) and evidence.missing_artifacts
        )
        return report or (evidence.caught[0] if evidence.caught and without_reason else None)
    return None


def _has_measured(evidence: Evidence) -> bool:
    beats = evidence.heartbeats
    return bool(beats) and all(beat.steps_done >= PROBE_STEPS for beat in beats)


def _probe_failure(attempt: Attempt) -> Failure:
    """Return the end of a probe that has measured its plan."""
    return Failure(
        kind=FailureKind.PROBED, reason=f"measured at micro-batch {attempt.plan.micro_batch_size}"
    )


def _oom_failure(attempt: Attempt, report: OomReport, finding: Finding | None) -> Failure:
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
        kind, facts = (
            FailureKind.MEMORY_CONTENTION,
            f"{facts}; {format_bytes(report.foreign_bytes)} of it held by other processes",
        )
    return Failure(
        kind=kind, rank=report.rank, phase=phase, reason=facts, excerpt=_tail(report.message)
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


def _finding_of(evidence: Evidence, report: OomReport, command: tuple[str, ...]) -> Finding | None:
    """Return the finding in a log for the same out-of-memory error; None without one."""
    for end in evidence.ranks:
        for finding in _findings(end, command)[:1]:
            if finding.cause is Cause.DEVICE_OOM and report.rank in (end.rank, finding.rank):
                return finding
    return None


def _hang_failure(
    attempt: Attempt, evidence: Evidence, command: tuple[str, ...], capacity_bytes: int | None
) -> Failure:
    """Return a hang, or the cause that a rank had named before it went on: others then wait for it for ever."""
    still = f"no training step for {format_seconds(evidence.hung_for_s or 0.0)}"
    for end in _suspects(evidence):
        finding = next(iter(_findings(end, command)), None)
        if finding is not None and finding.cause not in (*COMPLAINTS, *SUSPECTS):
            failure = _failure_of_finding(attempt, evidence, end, finding, capacity_bytes)
            if failure is not None:
                return replace(failure, reason=f"{failure.reason}; then {still}")
    tail = _suspects(evidence)[0].log_tail if evidence.ranks else ""
    return Failure(kind=FailureKind.HUNG, reason=still, excerpt=_tail(tail))


def _failure_of_ranks(
    attempt: Attempt, evidence: Evidence, command: tuple[str, ...], capacity_bytes: int | None
) -> Failure:
    """Return the cause that logs and exit codes name; complaints of survivors count only without another cause."""
    suspects = _suspects(evidence)
    complaints: list[tuple[RankEnd, Finding]] = []
    unexplained: Failure | None = None
    for end in suspects:
        if end.exit_code == STALE_EXIT_CODE:
            return Failure(
                kind=FailureKind.PREEMPTED,
                rank=end.rank,
                reason="a newer attempt had taken its place",
            )
        finding = next(iter(_findings(_with_report(evidence, end), command)), None)
        complains = finding is not None and finding.cause in COMPLAINTS
        if finding is not None and complains:
            complaints.append((end, finding))
        if unexplained is not None:  # another rank may tell why
            explained = finding is not None and finding.cause in EXPLAINING
            failure = (
                _failure_of_finding(attempt, evidence, end, finding, capacity_bytes)
                if explained
                else None
            )
            if failure is not None:
                return failure
            continue
        waited = any(complaint.cause is Cause.TIMEOUT for _, complaint in complaints)
        failure = (
            (
                None
                if complains
                else _failure_of_finding(attempt, evidence, end, finding, capacity_bytes)
            )
            or _failure_of_report(attempt, evidence, end, command)
            or (None if waited else _failure_of_signal(evidence, end))
        )
        if (
            failure is None
            and end.exit_code
            and not complains
            and not (waited and end.exit_code in ENDED_BY_US)
        ):
            failure = _unexplained_failure(attempt, evidence, end, None, command)
        if failure is not None and failure.ending is None:
            return failure
        unexplained = failure
    if unexplained is not None:
        return unexplained
    for end, finding in complaints:
        failure = (
            None
            if evidence.host_oom_kills
            else _failure_of_finding(attempt, evidence, end, finding, capacity_bytes)
        )
        if failure:
            return failure
    if all(end.exit_code for end in suspects):
        lines = "".join(
            f": {finding.line[:MESSAGE_CHARACTERS_MAX]}" for _, finding in complaints[:1]
        )
        return Failure(
            kind=FailureKind.NODE_LOST, reason=f"its ranks only complain about each other{lines}"
        )
    return _unexplained_failure(attempt, evidence, suspects[0], None, command)


def _check_oom_kills(evidence: Evidence, failure: Failure) -> Failure:
    """Return the failure, or host memory where the kernel killed for it and nothing else explains the end.

    The counter is the whole node's, so an exception that a mistake in code raises stands.
    """
    is_mistake = (
        failure.ending is not None
        and failure.ending.signature.partition(" ")[0].strip(",") in PROGRAM_TYPES
    )
    is_open = failure.ending is not None or failure.kind in (
        FailureKind.PREEMPTED,
        FailureKind.NODE_LOST,
    )
    if not evidence.host_oom_kills or not is_open or is_mistake or failure.broken is not None:
        return failure
    reason = f"the kernel killed for memory while it ran: {failure.reason}"
    return replace(failure, kind=FailureKind.HOST_OOM, reason=reason, ending=None)


def _findings(end: RankEnd, command: tuple[str, ...]) -> tuple[Finding, ...]:
    """Return the findings of the whole log where it was read, else of its end."""
    return end.findings or read_log(end.log_tail, command)


def _with_report(evidence: Evidence, end: RankEnd) -> RankEnd:
    """Return the end with the exception that the guard reported, where its log names nothing."""
    report = next((report for report in evidence.errors if report.rank == end.rank), None)
    return end if report is None or end.findings else replace(end, log_tail=report.traceback)


def _failure_of_report(
    attempt: Attempt, evidence: Evidence, end: RankEnd, command: tuple[str, ...]
) -> Failure | None:
    """Return the failure of a Python exception that the guard reported; None where it is a survivor's complaint.

    Ranks that this rank started as their launcher count, too: the one that it saw fail first comes first.
    """
    others = {other.rank for other in evidence.ranks} - {end.rank}
    reports = [report for report in evidence.errors if report.rank not in others]
    for report in sorted(
        reports, key=lambda report: (report.rank != end.root_rank, report.rank != end.rank)
    ):
        if not read_log(report.traceback):
            return _unexplained_failure(attempt, evidence, end, report, command)
    return None


def _failure_of_finding(
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
        return _oom_failure(attempt, finding.oom, finding)
    return Failure(
        kind=kind,
        rank=end.rank if finding.rank is None else finding.rank,
        phase=finding.phase,
        reason=finding.line,
        excerpt=_tail(finding.excerpt),
        broken=broken_extent(finding.line) if finding.cause is Cause.HARDWARE else None,
    )


def _kind_of(
    end: RankEnd, finding: Finding, evidence: Evidence, attempt: Attempt, capacity_bytes: int | None
) -> FailureKind | None:
    """Return the kind of failure for a log line's cause, as other evidence confirms it; None where refuted."""
    peak = max(
        (beat.peak_bytes for beat in evidence.heartbeats), default=attempt.estimate.allocated_bytes
    )
    nearly_full = capacity_bytes is not None and peak >= NEARLY_FULL * capacity_bytes
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
    }
    return kinds[finding.cause] if finding.cause in kinds else FailureKind(finding.cause.value)


def _has_timed_out(end: RankEnd) -> bool:
    """Return whether a collective timed out, since ranks had lost step with each other."""
    return any(finding.cause is Cause.TIMEOUT for finding in end.findings)


def _failure_of_signal(evidence: Evidence, end: RankEnd) -> Failure | None:
    """Return what the signal says that ended the process, or the first rank that its launcher saw fail.

    A crash by another signal says nothing of its cause.
    """
    rank, code = end.rank, end.exit_code
    if code == 1 and end.root_rank is not None and end.root_exit_code is not None:
        rank, code = end.root_rank, end.root_exit_code
    number = exit_signal(code)
    if number is None:
        return None
    name = signal_name(number)
    if number == KILLED and evidence.host_oom_kills:
        kind, reason = FailureKind.HOST_OOM, f"rank {rank} was killed by the kernel for memory"
    elif number in FROM_OUTSIDE:
        kind, reason = FailureKind.PREEMPTED, f"rank {rank} was ended from outside by {name}"
    elif number == SHARED_MEMORY_LOST:
        kind, reason = FailureKind.HOST_OOM, f"rank {rank} ended by SIGBUS: shared memory"
    else:
        return None
    return Failure(kind=kind, rank=rank, reason=reason, excerpt=_tail(end.log_tail))


def _unexplained_failure(
    attempt: Attempt,
    evidence: Evidence,
    end: RankEnd,
    report: ErrorReport | None,
    command: tuple[str, ...],
) -> Failure:
    """Return the failure of an end that nothing explains: its exception or exit code, and what it looked like."""
    if (
        report is None
        and end.exit_code == 1
        and end.root_rank is not None
        and end.root_exit_code is not None
    ):
        end = replace(end, rank=end.root_rank, exit_code=end.root_exit_code)
    ending = ending_of(attempt, evidence, end, report, command)
    excerpt = last_traceback(end.log_tail) if report is None else report.traceback
    raised = read_exceptions(excerpt)
    if end.exit_code == 0 and evidence.missing_artifacts and report is None:
        reason = f"exited 0 without leaving {', '.join(evidence.missing_artifacts)}"
    elif raised or report is not None:
        message = (
            f"{raised[-1].type}: {raised[-1].message}" if raised else report.type if report else ""
        )
        reason = f"rank {end.rank if report is None else report.rank} raised {message[:MESSAGE_CHARACTERS_MAX]}"
        reason += "" if report is None else f" in {report.phase} after step {report.step}"
    else:
        number = exit_signal(end.exit_code)
        how = (
            f"exited with code {end.exit_code}"
            if number is None
            else f"crashed by {signal_name(number)}"
        )
        line = next(
            (line.strip() for line in reversed(end.log_tail.splitlines()) if line.strip()), ""
        )
        reason = f"rank {end.rank} {how}" + (
            f": {line[:MESSAGE_CHARACTERS_MAX]}" if line and number is None else ""
        )
        if evidence.virtual and _WANTS_CUDA.search(line):
            reason += "; its devices are virtual: they are no GPUs"
    if ending.step is not None:
        kind = FailureKind.UNKNOWN
    else:
        kind = FailureKind.USER_ERROR if ending.is_own else FailureKind.STARTUP
    return Failure(
        kind=kind,
        rank=end.rank if report is None else report.rank,
        phase=None if report is None else GUARD_PHASES.get(report.phase),
        reason=reason,
        excerpt=_tail(excerpt),
        ending=ending,
    )


def _suspects(evidence: Evidence) -> list[RankEnd]:
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


def _tail(text: str) -> str:
    return text[-EXCERPT_CHARACTERS_MAX:]
