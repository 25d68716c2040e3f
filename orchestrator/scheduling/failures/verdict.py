"""Verdicts: how a job continues after an unexplained end, or after a shortage such as a full disk.

`docs/reference/failures-and-retries.md` has a table of numbered rows. For an unexplained end, the
first row that applies decides. Other failures have no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.scheduling.failures.endings import ended_after_same_time, ended_at_same_point
from orchestrator.scheduling.failures.places import (
    RECENT_S,
    ended_alike_elsewhere,
    find_suspects_and_accusers,
    format_devices_or_nodes,
    list_placement_devices,
    list_placement_nodes,
    may_be_device_fault,
    select_recent_ends_of_others,
)
from orchestrator.specs.attempt import Attempt, Ending, Failure, FailureKind, Shortage, Verdict
from orchestrator.specs.cluster import Node
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.suspension import UnexplainedEnd

# with earlier ending: an outside service fails
JOBS_OF_SERVICE = 3
NODES_OF_SERVICE = 2
OUTSIDE_SERVICE = Shortage(missing="outside service")
# waits after an end within the training
TRAINED_FIRST_S = 30.0
TRAINED_MAX_S = 600.0
PROGRAM_WAIT_S = 2.0  # where the exception blames the program, time changes nothing
STARTUP_WAITS_S = (30.0, 120.0)
REFUSED_WAITS_S = (
    60.0,
    1200.0,
)  # a hub or a network that refused is most often back within 20 minutes
ADVANCE_S = 600.0  # of training: an attempt that gains so much uses no budget
# interruptions in a row after one step and about one time: nothing outside knows a program's steps
INTERRUPTIONS_ALIKE = 3
INTERRUPTION = "an interruption"
# what may be trained again: so much of the job, or so long
REPEATED_SHARE = 0.25
REPEATED_S = 7200.0


ON_ERROR = Verdict(row=4, wait_s=PROGRAM_WAIT_S)
PROGRAM_ROWS = (5, 7, 10)  # they end the job, and blame its program
NEAR_LIMIT_ROW = 12  # the next attempt takes a plan with less memory, where there is one
SHORTAGE_ROW = 13
UNREADABLE = Verdict(row=14, wait_s=None)  # a training that may have succeeded is not done again


def add_verdict(
    job: Job,
    attempt: Attempt,
    failure: Failure,
    unexplained_ends: Sequence[UnexplainedEnd],
    nodes: Sequence[Node],
) -> Failure:
    """Return the failure with its verdict (whether and when the job is tried again) and the reason
    for it.

    `unexplained_ends` are the remembered ones of all jobs, `nodes` the live nodes. A failure that
    is neither unexplained nor a shortage is returned unchanged. Where the verdict ends the job, its
    kind may become USER_ERROR.
    """
    assert attempt.ended_at_s is not None
    if failure.kind.shortage is not None:
        return _add_verdict_on_shortage(job, attempt, failure, failure.kind.shortage)
    if failure.kind is FailureKind.PREEMPTED and _was_interrupted_alike(job, attempt):
        ending = _make_interruption_ending(attempt)
        reason = f"{failure.reason}, as before after step {ending.step}: by itself, or by a limit"
        failure = replace(failure, kind=FailureKind.UNKNOWN, reason=reason, ending=ending)
    if failure.ending is None:
        return failure
    others = select_recent_ends_of_others(unexplained_ends, job, attempt.ended_at_s)
    verdict, reason = _find_verdict_and_reason(job, attempt, failure, failure.ending, others, nodes)
    kind = (
        FailureKind.USER_ERROR
        if verdict.wait_s is None and verdict.row in PROGRAM_ROWS
        else failure.kind
    )
    return replace(failure, kind=kind, verdict=verdict, reason=f"{failure.reason}; {reason}")


def _was_interrupted_alike(job: Job, attempt: Attempt) -> bool:
    """Return whether this interruption is at least the third in a row after the same step.

    Then the program interrupts itself, or a limit that nobody sees does: the attempts ran for about
    as long, too. Attempts that were interrupted before their first step do not count.

    A machine that is taken away every hour also leaves equal steps, if they are slow. But the job
    advances there: attempts of ADVANCE_S or more count only where the known checkpoint stayed.
    """
    ending = _make_interruption_ending(attempt)
    earlier = [entry for entry in job.attempts[: attempt.number - 1] if not entry.probe]
    previous = earlier[1 - INTERRUPTIONS_ALIKE :]
    if ending.step is None or len(previous) < INTERRUPTIONS_ALIKE - 1:
        return False
    if not all(_is_interruption_like(entry, ending) for entry in previous):
        return False
    saved_steps = {entry.facts.checkpoint_step for entry in (*previous, attempt)}
    if None in saved_steps:
        return ending.elapsed_s < ADVANCE_S
    return len(saved_steps) == 1


def _is_interruption_like(attempt: Attempt, ending: Ending) -> bool:
    """Return whether an attempt was interrupted after the same step and time as this ending."""
    alike = _make_interruption_ending(attempt)
    failure = attempt.failure
    if failure is None or alike.step != ending.step:
        return False
    is_interruption = failure.kind is FailureKind.PREEMPTED or failure.ending == alike
    return is_interruption and ended_after_same_time(alike, ending)


def _make_interruption_ending(attempt: Attempt) -> Ending:
    """Return the features of an interruption: the last step that any rank counted, and the run
    time.

    It may pass, so that it accuses no device.
    """
    return Ending(
        signature=INTERRUPTION,
        step=max((beat.step for beat in attempt.heartbeats), default=0) or None,
        elapsed_s=max(0.0, attempt.end_or(attempt.launched_at_s) - attempt.launched_at_s),
        is_own=False,
        may_pass=True,
    )


def _add_verdict_on_shortage(
    job: Job, attempt: Attempt, failure: Failure, shortage: Shortage
) -> Failure:
    """Return the failure with the verdict for a shortage, such as a full disk: a wait and a new
    attempt, or the job's end.

    The job ends where it trained for long and left no checkpoint, or has waited for as long as it
    may.
    """
    assert attempt.ended_at_s is not None
    waits = [
        earlier
        for earlier in _list_attempts_since_checkpoint(job, attempt)
        if earlier.failure and earlier.failure.verdict and earlier.failure.kind is failure.kind
    ]
    wait_s = _wait_for_shortage_s(waits, attempt.ended_at_s, shortage)
    if attempt.ended_at_s - attempt.launched_at_s > REPEATED_S and not _get_saved_step(attempt):
        lost = describe_missing_checkpoint(job.spec)
        wait_s = None
        reason = f"{lost}: too much would be trained again{describe_unmatched_patterns(job.spec, attempt)}"
    elif wait_s is None:
        reason = f"no {shortage.missing} for {shortage.total_s / 3600:g} hours"
    else:
        reason = f"waits {wait_s:.0f} s for {shortage.missing}"
    return replace(
        failure,
        verdict=Verdict(row=SHORTAGE_ROW, wait_s=wait_s),
        reason=f"{failure.reason}; {reason}",
    )


def _wait_for_shortage_s(
    earlier_attempts: Sequence[Attempt], at_s: float, shortage: Shortage
) -> float | None:
    """Return the seconds to wait before the next attempt; None where the job has waited for as long
    as it may.

    `earlier_attempts` are those that ended for the same shortage, oldest first. Each wait is twice
    as long as the last.
    """
    if earlier_attempts and at_s - earlier_attempts[0].end_or(at_s) > shortage.total_s:
        return None
    return min(shortage.first_s * 2 ** len(earlier_attempts), shortage.longest_s)


def _find_verdict_and_reason(
    job: Job,
    attempt: Attempt,
    failure: Failure,
    ending: Ending,
    ends_of_other_jobs: Sequence[UnexplainedEnd],
    nodes: Sequence[Node],
) -> tuple[Verdict, str]:
    """Return (the verdict of the first row that applies, the reason as text).

    Rows are those of the table in `docs/reference/failures-and-retries.md`. Rows about this job
    alone come before rows that compare several jobs.
    """
    retries = job.spec.retries
    before = _list_unexplained_attempts(job, attempt)
    if (
        _may_retry_exit_code(job, attempt)
        and len(_select_attempts_of_row(before, 4)) < retries.on_error
    ):
        return ON_ERROR, f"retries.on_error allows {retries.on_error} restarts"
    if failure.near_limit and not _select_attempts_of_row(before, NEAR_LIMIT_ROW):
        verdict = Verdict(row=NEAR_LIMIT_ROW, wait_s=PROGRAM_WAIT_S, budget="unknown")
        return verdict, "unexplained, near its limit: one attempt with less memory"
    if ending.is_own and ending.step is None:
        when = ", before its first step" if _ran_with_guard(attempt) else ""
        return Verdict(row=10, wait_s=None), f"the program's own error{when}"
    # what a service refuses before the first step may be refused again; the same end within the training is a repeat
    if not ending.may_pass or ending.step is not None:
        for earlier in reversed(before):  # other ends may lie between
            previous = earlier.failure.ending if earlier.failure else None
            if (
                previous
                and previous.signature == ending.signature
                and ended_at_same_point(previous, ending)
            ):
                return _judge_repeated_end(attempt, earlier, ending, nodes)
    if not ending.is_own:
        places, _ = find_suspects_and_accusers(job, attempt, ends_of_other_jobs, nodes)
        if (
            places
            and may_be_device_fault(ending)
            and not ended_alike_elsewhere(job, attempt, ending)
        ):
            return Verdict(
                row=1, wait_s=0.0, budget="node", elsewhere=True
            ), f"{format_devices_or_nodes(places)} is suspect"
        if _is_service_failure(attempt, ending, ends_of_other_jobs):
            return _judge_end_of_outside_service(job, attempt)
    verdict, reason = (
        _judge_end_before_training(attempt, ending, before)
        if ending.step is None
        else _judge_end_in_training(job, attempt, ending, before)
    )
    is_second = bool(before) and not ending.may_pass
    return replace(verdict, elsewhere=is_second), reason


def _list_unexplained_attempts(job: Job, attempt: Attempt) -> list[Attempt]:
    """Return the job's attempts before this one that ended for no known reason."""
    return [
        earlier
        for earlier in job.attempts[: attempt.number - 1]
        if earlier.failure and earlier.failure.ending
    ]


def _may_retry_exit_code(job: Job, attempt: Attempt) -> bool:
    """Return whether the job's `retries.exit_codes` is empty, or lists an exit code of the attempt."""
    codes = job.spec.retries.exit_codes
    return not codes or any(end.exit_code in codes for end in attempt.facts.ranks)


def _judge_repeated_end(
    attempt: Attempt, alike_attempt: Attempt, ending: Ending, nodes: Sequence[Node]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) where the job ended the same way at the same point as in
    `alike_attempt`.

    These are rows 5 to 7 of the table of verdicts.
    """
    point = f"after step {ending.step}"
    if ending.step is None:
        point = "before its first step" if _ran_with_guard(attempt) else "alike"
    devices = list_placement_devices(attempt.placement)
    if not devices & list_placement_devices(alike_attempt.placement):
        earlier = format_devices_or_nodes(list_placement_devices(alike_attempt.placement))
        places = f"on {earlier} and on {format_devices_or_nodes(devices)}"
        return Verdict(row=5, wait_s=None), f"the program's own error: twice {point}, {places}"
    others = sum(len(node.free_bytes) for node in nodes) - len(devices)
    if (
        others >= len(devices)
        and not ending.is_own
        and not _select_attempts_of_row([alike_attempt], 6)
    ):
        return Verdict(
            row=6, wait_s=0.0, budget="unknown", elsewhere=True
        ), f"twice {point}: tried elsewhere"
    reason = f"the program's own error: twice {point}"
    return Verdict(
        row=7, wait_s=None
    ), reason if ending.is_own else f"{reason}, and no other device could tell"


def _is_service_failure(
    attempt: Attempt, ending: Ending, ends_of_other_jobs: Sequence[UnexplainedEnd]
) -> bool:
    """Return whether an outside service seems to fail: enough jobs ended alike on enough nodes
    within RECENT_S seconds.

    This is the condition of row 2 of the table of verdicts.
    """
    assert attempt.ended_at_s is not None
    alike = [
        end
        for end in ends_of_other_jobs
        if attempt.ended_at_s - end.at_s <= RECENT_S and end.ending.signature == ending.signature
    ]
    nodes = list_placement_nodes(attempt.placement).union(
        *(list_placement_nodes(end.placement) for end in alike)
    )
    return len({end.job for end in alike}) + 1 >= JOBS_OF_SERVICE and len(nodes) >= NODES_OF_SERVICE


def _judge_end_of_outside_service(job: Job, attempt: Attempt) -> tuple[Verdict, str]:
    """Return (verdict, reason) where several jobs ended alike because the same outside service
    failed (row 2).
    """
    assert attempt.ended_at_s is not None
    waits = _select_attempts_of_row(_list_attempts_since_checkpoint(job, attempt), 2)
    wait_s = _wait_for_shortage_s(waits, attempt.ended_at_s, OUTSIDE_SERVICE)
    how_long = (
        f", for {OUTSIDE_SERVICE.total_s / 3600:g} hours"
        if wait_s is None
        else f": waits {wait_s:.0f} s"
    )
    return Verdict(
        row=2, wait_s=wait_s
    ), f"an {OUTSIDE_SERVICE.missing} failed several jobs alike{how_long}"


def _judge_end_before_training(
    attempt: Attempt, ending: Ending, earlier_attempts: Sequence[Attempt]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) where no step was counted and nothing blames the program (row 11)."""
    count = len(_select_attempts_of_row(earlier_attempts, 11))
    wait_s = (
        _wait_after_refusal_s(earlier_attempts)
        if ending.may_pass
        else STARTUP_WAITS_S[min(count, len(STARTUP_WAITS_S) - 1)]
    )
    return (
        Verdict(row=11, wait_s=wait_s, budget="startup"),
        f"{'no step was made' if _ran_with_guard(attempt) else 'nothing explains it'}: again after {wait_s:.0f} s",
    )


def _ran_with_guard(attempt: Attempt) -> bool:
    """Return whether our guard ran in the program; without it, steps may have been made that nobody
    counted.
    """
    return any(beat.torch_version for beat in attempt.heartbeats)


def _judge_end_in_training(
    job: Job, attempt: Attempt, ending: Ending, earlier_attempts: Sequence[Attempt]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) where steps were made, whether or not a checkpoint saved them (rows
    7 to 9).
    """
    if ending.may_pass:
        wait_s = _wait_after_refusal_s(earlier_attempts)
    else:
        wait_s = (
            PROGRAM_WAIT_S
            if ending.is_own
            else min(TRAINED_FIRST_S * 2 ** len(earlier_attempts), TRAINED_MAX_S)
        )
    saved = _get_saved_step(attempt)
    saved_before = max(map(_get_saved_step, job.attempts[: attempt.number - 1]), default=0)
    if saved > saved_before:
        budget = "" if ending.elapsed_s >= ADVANCE_S else "unknown"
        return Verdict(
            row=8, wait_s=wait_s, budget=budget
        ), f"goes on from the checkpoint of step {saved}"
    steps = job.spec.optimizer_steps
    share = (ending.step or 0) / steps if steps else 0.0
    if ending.elapsed_s > REPEATED_S and share > REPEATED_SHARE:
        unmatched = describe_unmatched_patterns(job.spec, attempt)
        reason = f"{describe_missing_checkpoint(job.spec)}: {share:.0%} of the job would be trained again{unmatched}"
        return Verdict(row=9, wait_s=None), reason
    endings = [earlier.failure.ending for earlier in earlier_attempts if earlier.failure]
    alike = [
        previous for previous in endings if previous and previous.signature == ending.signature
    ]
    # The last attempt that the budget allows ended as the others did, at another step.
    if len(alike) >= max(1, job.spec.retries.unknown) and not ending.may_pass:
        return Verdict(row=7, wait_s=None), f"the program's own error: {len(alike) + 1} times alike"
    return Verdict(row=9, wait_s=wait_s, budget="unknown"), "tried again"


def describe_missing_checkpoint(spec: JobSpec) -> str:
    """Return text that no checkpoint was left, or none of which the job file says how to read the
    step.
    """
    if spec.is_script and spec.resume.step is None:
        return "no checkpoint of a known step (`resume.step` is not set)"
    return "no checkpoint"


def describe_unmatched_patterns(spec: JobSpec, attempt: Attempt) -> str:
    """Return text with the job's checkpoint patterns, which matched nothing, and the files that
    exist.

    It is "" where a pattern matched or nothing was written.
    """
    if not attempt.facts.unmatched:
        return ""
    patterns = ", ".join(spec.resume.checkpoints)
    names = ", ".join(attempt.facts.unmatched)
    return f" (no file matches {patterns}; the output has {names}: set `resume.checkpoints` and `resume.step`)"


def _wait_after_refusal_s(earlier_attempts: Sequence[Attempt]) -> float:
    """Return the seconds to wait after a network or service refused; more after the first refusal."""
    endings = [attempt.failure.ending for attempt in earlier_attempts if attempt.failure]
    count = sum(ending is not None and ending.may_pass for ending in endings)
    return REFUSED_WAITS_S[min(count, len(REFUSED_WAITS_S) - 1)]


def _list_attempts_since_checkpoint(job: Job, attempt: Attempt) -> Sequence[Attempt]:
    """Return the attempts before this one since the newest checkpoint was left; () if this attempt
    left that.
    """
    before = job.attempts[: attempt.number - 1]
    saved = list(map(_get_saved_step, (*before, attempt)))
    return before[saved.index(max(saved)) :]


def _select_attempts_of_row(attempts: Sequence[Attempt], row_number: int) -> list[Attempt]:
    """Return those of the attempts whose verdict came from this row of the table of verdicts."""
    return [
        attempt
        for attempt in attempts
        if attempt.failure and attempt.failure.verdict and attempt.failure.verdict.row == row_number
    ]


def _get_saved_step(attempt: Attempt) -> int:
    """Return the step of the newest checkpoint that the attempt left; 0 without one."""
    return 0 if attempt.probe else attempt.facts.checkpoint_step or 0
