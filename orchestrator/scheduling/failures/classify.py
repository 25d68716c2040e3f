"""Diagnoses how an attempt ended, from reports of the guard first, then counters, then the log's
text.
"""

from __future__ import annotations

from orchestrator.scheduling.base.time_limits import make_time_limit_failure
from orchestrator.scheduling.failures.device_memory import is_nearly_full, make_oom_failure
from orchestrator.scheduling.failures.done_steps import (
    describe_done_steps,
    is_before_last_step,
    made_all_declared_steps,
)
from orchestrator.scheduling.failures.exit_codes import (
    FROM_OUTSIDE,
    find_exit_signal,
    format_signal_name,
)
from orchestrator.scheduling.failures.log_scan import find_log_findings
from orchestrator.scheduling.failures.meeting import (
    count_unconnected_ranks,
    describe_unconnected_ranks,
)
from orchestrator.scheduling.failures.out_of_memory import (
    describe_caught_errors,
    find_refuting_report,
)
from orchestrator.scheduling.failures.ranks import (
    blame_oom_killer_if_active,
    diagnose_ranks,
    list_log_findings,
    make_finding_failure,
    order_by_suspicion,
)
from orchestrator.scheduling.failures.signatures import (
    COMPLAINTS,
    SUSPECTS,
)
from orchestrator.scheduling.failures.unexplained import cut_excerpt
from orchestrator.scheduling.failures.verdict import UNREADABLE
from orchestrator.specs.attempt import (
    PROBE_STEPS,
    Attempt,
    Cause,
    Evidence,
    Failure,
    FailureKind,
    Finding,
    OomReport,
)
from orchestrator.specs.command_line import Argv
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.units import format_seconds

UNTOLD = (
    FailureKind.HOST_OOM,
    FailureKind.HUNG,
    FailureKind.PROBED,
)  # what a process past its cap may look like
HOW_TO_BE_WATCHED = (
    "its children need PYTHONPATH and ORC_GUARD as the program found them, an interpreter of Python 3.10 or newer, "
    "and none of its flags -I, -E and -S"
)


def classify_end(
    job: Job, attempt: Attempt, evidence: Evidence, device_bytes: int | None = None
) -> Failure | None:
    """Return the diagnosed failure of an ended attempt; None where it succeeded.

    `device_bytes` is the memory of one of its devices, None where unknown. An ambiguous log line
    counts as out of memory only if the device was nearly full.
    """
    failure = _classify_end(job, attempt, evidence, device_bytes)
    if failure is not None and _may_be_memory_shortage(attempt, evidence, failure, device_bytes):
        failure = replace(failure, near_limit=True)
    if evidence.virtual and evidence.unwatched and (failure is None or failure.kind in UNTOLD):
        reason = f"it ran past the cap of its virtual device: {evidence.unwatched[0]}; {HOW_TO_BE_WATCHED}"
        return Failure(
            kind=FailureKind.GUARD_ABSENT,
            reason=reason,
            excerpt=cut_excerpt("\n".join(evidence.unwatched)),
        )
    return failure


def _may_be_memory_shortage(
    attempt: Attempt, evidence: Evidence, failure: Failure, device_bytes: int | None
) -> bool:
    """Return whether device memory may have run out in an attempt whose end nothing else explains.

    It may if its devices were nearly full, or if the script had caught an out-of-memory error in
    the step in which it ended. A mistake of the program counts only in the second case.
    """
    if failure.ending is None:
        return False
    done = {beat.rank: beat.steps_done for beat in evidence.heartbeats}
    if any(report.steps_done == done.get(report.rank) for report in evidence.caught):
        return True
    return not (failure.ending.is_own or failure.ending.may_pass) and is_nearly_full(
        attempt, evidence, device_bytes
    )


def _classify_end(
    job: Job, attempt: Attempt, evidence: Evidence, device_bytes: int | None
) -> Failure | None:
    """Return the failure of an ended attempt, without the checks of memory that `classify_end`
    adds; None where it succeeded.
    """
    if (failure := _find_launch_failure(job, evidence)) is not None:
        return failure
    swallowed = _find_caught_oom(job, evidence)
    ran_out = bool(evidence.ooms) or swallowed is not None
    if (
        attempt.probe
        and evidence.stopped
        and not ran_out
        and (not job.cancelling or _has_finished_probe_steps(evidence))
    ):
        return _make_probed_failure(attempt)
    succeeded = bool(evidence.ranks) and all(end.exit_code == 0 for end in evidence.ranks)
    succeeded = succeeded or _hung_after_last_step(job, attempt, evidence)
    interruption = _find_interruption(job, attempt, evidence) if succeeded else None
    is_short = (
        job.spec.success.steps == "all"
        and is_before_last_step(job, attempt, evidence)
        and not made_all_declared_steps(job, attempt, evidence)
    )
    # a probe writes into a folder of its own
    is_complete = attempt.probe or not (evidence.missing_artifacts or is_short or interruption)
    if swallowed is None and (
        evidence.finished or (succeeded and is_complete and not evidence.nodes_lost)
    ):
        return _make_probed_failure(attempt) if attempt.probe else None
    if evidence.stopped and job.cancelling:
        return Failure(
            kind=FailureKind.CANCELLED, reason="ended because its cancellation was asked for"
        )
    command = job.spec.command or ()
    if evidence.ooms:
        report = next(
            (r for r in evidence.ooms if r.rank == evidence.first_ended_rank), evidence.ooms[0]
        )
        return make_oom_failure(attempt, report, _find_oom_finding(evidence, report, command))
    if swallowed is not None:
        failure = make_oom_failure(
            attempt, swallowed, _find_oom_finding(evidence, swallowed, command)
        )
        return replace(failure, reason=f"{failure.reason}; {describe_caught_errors(evidence)}")
    if (failure := _find_outside_failure(job, attempt, evidence)) is not None:
        return failure
    if interruption is not None:
        return interruption
    if evidence.hung_for_s is not None:
        return _make_hang_failure(job, attempt, evidence, device_bytes)
    if not evidence.ranks:
        return Failure(kind=FailureKind.NODE_LOST, reason="nothing is known of its processes")
    return blame_oom_killer_if_active(
        evidence, diagnose_ranks(attempt, evidence, command, device_bytes)
    )


def _find_launch_failure(job: Job, evidence: Evidence) -> Failure | None:
    """Return the failure of an attempt that could not start, or whose ranks never joined each
    other; None otherwise.
    """
    if (
        evidence.collect_error is not None and not job.cancelling
    ):  # whether it had succeeded is not known
        return Failure(
            kind=FailureKind.UNKNOWN,
            reason=f"its evidence cannot be read: {evidence.collect_error}",
            verdict=UNREADABLE,
        )
    if evidence.no_program:
        return Failure(
            kind=FailureKind.USER_ERROR, reason=f"could not be started: {evidence.launch_error}"
        )
    if evidence.launch_error is not None:
        return Failure(
            kind=FailureKind.STARTUP, reason=f"could not be launched: {evidence.launch_error}"
        )
    lone = count_unconnected_ranks(evidence.heartbeats)
    if lone and not job.cancelling:  # no other plan and no other place would make it right
        return Failure(kind=FailureKind.USER_ERROR, reason=describe_unconnected_ranks(lone))
    return None


def _find_outside_failure(job: Job, attempt: Attempt, evidence: Evidence) -> Failure | None:
    """Return the failure of an attempt that the scheduler stopped, or that lost a node; None
    otherwise.
    """
    if evidence.stopped and attempt.over_limit:
        return make_time_limit_failure(job, attempt)
    if evidence.stopped and attempt.moved_for:
        return Failure(kind=FailureKind.MOVED, reason=attempt.moved_for)
    if evidence.nodes_lost:
        lost = ", ".join(evidence.nodes_lost)
        return Failure(kind=FailureKind.NODE_LOST, reason=f"lost contact with {lost} while it ran")
    return None


def _hung_after_last_step(job: Job, attempt: Attempt, evidence: Evidence) -> bool:
    """Return whether the attempt hung only after its last step, with all declared artifacts
    written.

    A thread, a loader's worker or a communicator may keep a finished program alive for ever.
    Without declared artifacts nobody knows whether the last save was made: then the result is
    False.
    """
    return (
        evidence.hung_for_s is not None
        and bool(job.spec.success.artifacts)
        and not (evidence.ooms or evidence.errors)
        and made_all_declared_steps(job, attempt, evidence)
    )


def _find_interruption(job: Job, attempt: Attempt, evidence: Evidence) -> Failure | None:
    """Return the failure of an attempt that a signal interrupted, though its ranks exited with 0;
    else None.

    The guard (our code in each process) sees SIGTERM and SIGINT reach the program. Without the
    guard, the log may name the signal.
    """
    if not is_before_last_step(job, attempt, evidence, if_unknown=True):
        return None
    signals = {beat.rank: beat.signal for beat in evidence.heartbeats if beat.signal}
    is_watched = any(beat.torch_version for beat in evidence.heartbeats)
    if signals:
        rank, number = next(iter(signals.items()))
        reason = (
            f"rank {rank} got {format_signal_name(number)} and exited with 0"
            f"{describe_done_steps(job, attempt, evidence)}"
        )
        return Failure(kind=FailureKind.PREEMPTED, rank=rank, reason=reason)
    for end in () if is_watched else evidence.ranks:
        finding = next(iter(list_log_findings(end, job.spec.command or ())), None)
        if finding is not None and finding.cause is Cause.PREEMPTED:
            reason = f"rank {end.rank} exited with 0 after a signal: {finding.line}"
            return Failure(kind=FailureKind.PREEMPTED, rank=end.rank, reason=reason)
    return None


def _find_caught_oom(job: Job, evidence: Evidence) -> OomReport | None:
    """Return the out-of-memory error that the script caught and that still counts as its failure;
    None without one.

    With `on_caught_oom: recover` a job may continue after such an error, but it must not hang or
    end without its artifacts.
    """
    report = find_refuting_report(evidence)
    stood_still = evidence.hung_for_s is not None
    # an exception of another cause ended that rank, or a signal did
    if report is not None and not stood_still and _has_other_cause(evidence, report.rank):
        return None
    if stood_still or job.spec.on_caught_oom == "recover":
        without_reason = (
            all(end.exit_code == 0 for end in evidence.ranks) and evidence.missing_artifacts
        )
        return report or (evidence.caught[0] if evidence.caught and without_reason else None)
    return None


def _has_other_cause(evidence: Evidence, rank: int) -> bool:
    """Return whether something other than memory ended this rank, which had caught out-of-memory
    errors.
    """
    for report in evidence.errors:
        finding = next(iter(find_log_findings(report.traceback)), None)
        if report.rank == rank:
            return finding is None or finding.cause not in (*COMPLAINTS, *SUSPECTS)
    codes = [end.exit_code for end in evidence.ranks if end.rank == rank]
    return (
        rank == evidence.first_ended_rank
        and find_exit_signal(codes[0] if codes else None) in FROM_OUTSIDE
    )


def _has_finished_probe_steps(evidence: Evidence) -> bool:
    """Return whether every rank made the PROBE_STEPS steps of a probe (a short run that measures
    memory).
    """
    beats = evidence.heartbeats
    return bool(beats) and all(beat.steps_done >= PROBE_STEPS for beat in beats)


def _make_probed_failure(attempt: Attempt) -> Failure:
    """Return the failure of kind PROBED, with which a probe ends that has measured its plan's
    memory.
    """
    return Failure(
        kind=FailureKind.PROBED, reason=f"measured at micro-batch {attempt.plan.micro_batch_size}"
    )


def _find_oom_finding(evidence: Evidence, report: OomReport, command: Argv) -> Finding | None:
    """Return the log line (a finding) of the same error as the guard's out-of-memory report; None
    without one.
    """
    for end in evidence.ranks:
        for finding in list_log_findings(end, command)[:1]:
            if finding.cause is Cause.DEVICE_OOM and report.rank in (end.rank, finding.rank):
                return finding
    return None


def _make_hang_failure(
    job: Job, attempt: Attempt, evidence: Evidence, device_bytes: int | None
) -> Failure:
    """Return the failure of an attempt that hung: of the kind that a rank's log names, else HUNG."""
    still = f"no training step for {format_seconds(evidence.hung_for_s or 0.0)}"
    if made_all_declared_steps(job, attempt, evidence):
        still += " after the last one; a job that names `success.artifacts`, and has left them, is finished then"
    for end in order_by_suspicion(evidence):
        finding = next(iter(list_log_findings(end, job.spec.command or ())), None)
        if finding is not None and finding.cause not in (*COMPLAINTS, *SUSPECTS):
            failure = make_finding_failure(attempt, evidence, end, finding, device_bytes)
            if failure is not None:
                return replace(failure, reason=f"{failure.reason}; then {still}")
    tail = order_by_suspicion(evidence)[0].log_tail if evidence.ranks else ""
    return Failure(kind=FailureKind.HUNG, reason=still, excerpt=cut_excerpt(tail))
