"""Verdicts: how a job continues after an unexplained end, or after a shortage such as a full disk.

`docs/reference/failures-and-retries.md` has a table of numbered rows. For an unexplained end, the
first row that applies decides. Other failures have no verdict.
"""

from __future__ import annotations

from collections.abc import Sequence

from orchestrator.scheduling.failures.endings import ended_at_same_point
from orchestrator.scheduling.failures.places import (
    RECENT_S,
    devices_of_placement,
    ended_alike_elsewhere,
    find_suspects,
    format_places,
    may_accuse_device,
    nodes_of_placement,
    recent_ends_of_others,
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
    ends: Sequence[UnexplainedEnd],
    nodes: Sequence[Node],
) -> Failure:
    """Return the failure with its verdict (whether and when the job is tried again) and the reason
    for it.

    `ends` are all jobs' remembered unexplained ends, `nodes` the live nodes. A failure that is
    neither unexplained nor a shortage is returned unchanged. Where the verdict ends the job, its
    kind may become USER_ERROR.
    """
    assert attempt.ended_at_s is not None
    if failure.kind.shortage is not None:
        return _judge_shortage(job, attempt, failure, failure.kind.shortage)
    if failure.ending is None:
        return failure
    others = recent_ends_of_others(ends, job, attempt.ended_at_s)
    verdict, reason = _find_verdict(job, attempt, failure, failure.ending, others, nodes)
    kind = (
        FailureKind.USER_ERROR
        if verdict.wait_s is None and verdict.row in PROGRAM_ROWS
        else failure.kind
    )
    return replace(failure, kind=kind, verdict=verdict, reason=f"{failure.reason}; {reason}")


def _judge_shortage(job: Job, attempt: Attempt, failure: Failure, shortage: Shortage) -> Failure:
    """Return the failure with a wait before the next attempt, or without a further attempt.

    There is none where the job trained for long and left no checkpoint, or has waited for as long
    as it may.
    """
    assert attempt.ended_at_s is not None
    waits = [
        earlier
        for earlier in _attempts_since_progress(job, attempt)
        if earlier.failure and earlier.failure.verdict and earlier.failure.kind is failure.kind
    ]
    wait_s = _next_wait_s(waits, attempt.ended_at_s, shortage)
    if attempt.ended_at_s - attempt.launched_at_s > REPEATED_S and not _saved_step(attempt):
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


def _next_wait_s(waits: Sequence[Attempt], at_s: float, shortage: Shortage) -> float | None:
    """Return the seconds to wait before the next attempt; None where the job has waited for as long
    as it may.

    `waits` are the earlier attempts that ended for the same lack.
    """
    if waits and at_s - waits[0].end_or(at_s) > shortage.total_s:
        return None
    return min(shortage.first_s * 2 ** len(waits), shortage.longest_s)


def _find_verdict(
    job: Job,
    attempt: Attempt,
    failure: Failure,
    ending: Ending,
    others: Sequence[UnexplainedEnd],
    nodes: Sequence[Node],
) -> tuple[Verdict, str]:
    """Return (the verdict of the first row that applies, the reason as text).

    Rows about this job alone come before rows that compare several jobs.
    """
    retries = job.spec.retries
    before = _unexplained_attempts(job, attempt)
    if _may_retry_exit_code(job, attempt) and len(_attempts_of_row(before, 4)) < retries.on_error:
        return ON_ERROR, f"retries.on_error allows {retries.on_error} restarts"
    if failure.near_limit and not _attempts_of_row(before, NEAR_LIMIT_ROW):
        verdict = Verdict(row=NEAR_LIMIT_ROW, wait_s=PROGRAM_WAIT_S, budget="unknown")
        return verdict, "unexplained, near its limit: one attempt with less memory"
    if ending.is_own and ending.step is None:
        when = ", before its first step" if _had_guard(attempt) else ""
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
                return _judge_repeated(attempt, earlier, ending, nodes)
    if not ending.is_own:
        places, _ = find_suspects(job, attempt, others, nodes)
        if places and may_accuse_device(ending) and not ended_alike_elsewhere(job, attempt, ending):
            return Verdict(
                row=1, wait_s=0.0, budget="node", elsewhere=True
            ), f"{format_places(places)} is suspect"
        if _is_service_failure(attempt, ending, others):
            return _judge_outside_service(job, attempt)
    verdict, reason = (
        _judge_before_training(attempt, ending, before)
        if ending.step is None
        else _judge_in_training(job, attempt, ending, before)
    )
    is_second = bool(before) and not ending.may_pass
    return replace(verdict, elsewhere=is_second), reason


def _unexplained_attempts(job: Job, attempt: Attempt) -> list[Attempt]:
    """Return the job's earlier attempts that ended for no known reason."""
    return [
        earlier
        for earlier in job.attempts[: attempt.number - 1]
        if earlier.failure and earlier.failure.ending
    ]


def _may_retry_exit_code(job: Job, attempt: Attempt) -> bool:
    """Return whether `retries.exit_codes` lists an exit code of the attempt, or is empty."""
    codes = job.spec.retries.exit_codes
    return not codes or any(end.exit_code in codes for end in attempt.facts.ranks)


def _judge_repeated(
    attempt: Attempt, last: Attempt, ending: Ending, nodes: Sequence[Node]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) of rows 5 to 7: the job ended the same way at the same point as in
    attempt `last`.
    """
    point = f"after step {ending.step}"
    if ending.step is None:
        point = "before its first step" if _had_guard(attempt) else "alike"
    devices = devices_of_placement(attempt.placement)
    if not devices & devices_of_placement(last.placement):
        places = f"on {format_places(devices_of_placement(last.placement))} and on {format_places(devices)}"
        return Verdict(row=5, wait_s=None), f"the program's own error: twice {point}, {places}"
    others = sum(len(node.free_bytes) for node in nodes) - len(devices)
    if others >= len(devices) and not ending.is_own and not _attempts_of_row([last], 6):
        return Verdict(
            row=6, wait_s=0.0, budget="unknown", elsewhere=True
        ), f"twice {point}: tried elsewhere"
    reason = f"the program's own error: twice {point}"
    return Verdict(
        row=7, wait_s=None
    ), reason if ending.is_own else f"{reason}, and no other device could tell"


def _is_service_failure(attempt: Attempt, ending: Ending, others: Sequence[UnexplainedEnd]) -> bool:
    """Return whether row 2 applies: enough jobs ended alike on enough nodes within RECENT_S
    seconds.
    """
    assert attempt.ended_at_s is not None
    alike = [
        end
        for end in others
        if attempt.ended_at_s - end.at_s <= RECENT_S and end.ending.signature == ending.signature
    ]
    nodes = nodes_of_placement(attempt.placement).union(
        *(nodes_of_placement(end.placement) for end in alike)
    )
    return len({end.job for end in alike}) + 1 >= JOBS_OF_SERVICE and len(nodes) >= NODES_OF_SERVICE


def _judge_outside_service(job: Job, attempt: Attempt) -> tuple[Verdict, str]:
    """Return (verdict, reason) of row 2: several jobs lack the same outside service."""
    assert attempt.ended_at_s is not None
    waits = _attempts_of_row(_attempts_since_progress(job, attempt), 2)
    wait_s = _next_wait_s(waits, attempt.ended_at_s, OUTSIDE_SERVICE)
    how_long = (
        f", for {OUTSIDE_SERVICE.total_s / 3600:g} hours"
        if wait_s is None
        else f": waits {wait_s:.0f} s"
    )
    return Verdict(
        row=2, wait_s=wait_s
    ), f"an {OUTSIDE_SERVICE.missing} failed several jobs alike{how_long}"


def _judge_before_training(
    attempt: Attempt, ending: Ending, before: Sequence[Attempt]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) of row 11: no step was counted, and nothing blames the program."""
    count = len(_attempts_of_row(before, 11))
    wait_s = (
        _refused_wait_s(before)
        if ending.may_pass
        else STARTUP_WAITS_S[min(count, len(STARTUP_WAITS_S) - 1)]
    )
    return (
        Verdict(row=11, wait_s=wait_s, budget="startup"),
        f"{'no step was made' if _had_guard(attempt) else 'nothing explains it'}: again after {wait_s:.0f} s",
    )


def _had_guard(attempt: Attempt) -> bool:
    """Return whether the guard ran in the program; without it, unseen steps may have been made."""
    return any(beat.torch_version for beat in attempt.heartbeats)


def _judge_in_training(
    job: Job, attempt: Attempt, ending: Ending, before: Sequence[Attempt]
) -> tuple[Verdict, str]:
    """Return (verdict, reason) of rows 7 to 9: steps were made, and a checkpoint has saved them or
    not.
    """
    if ending.may_pass:
        wait_s = _refused_wait_s(before)
    else:
        wait_s = (
            PROGRAM_WAIT_S
            if ending.is_own
            else min(TRAINED_FIRST_S * 2 ** len(before), TRAINED_MAX_S)
        )
    saved = _saved_step(attempt)
    saved_before = max(map(_saved_step, job.attempts[: attempt.number - 1]), default=0)
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
    endings = [earlier.failure.ending for earlier in before if earlier.failure]
    alike = [
        previous for previous in endings if previous and previous.signature == ending.signature
    ]
    # The last attempt that the budget allows ended as the others did, at another step.
    if len(alike) >= max(1, job.spec.retries.unknown) and not ending.may_pass:
        return Verdict(row=7, wait_s=None), f"the program's own error: {len(alike) + 1} times alike"
    return Verdict(row=9, wait_s=wait_s, budget="unknown"), "tried again"


def describe_missing_checkpoint(spec: JobSpec) -> str:
    """Return text that the last attempt left no checkpoint, or none whose step the job file can
    read.
    """
    if spec.is_script and spec.resume.step is None:
        return "no checkpoint of a known step (`resume.step` is not set)"
    return "no checkpoint"


def describe_unmatched_patterns(spec: JobSpec, attempt: Attempt) -> str:
    """Return text with the checkpoint patterns that matched nothing and the files that exist; ""
    without any.
    """
    if not attempt.facts.unmatched:
        return ""
    patterns = ", ".join(spec.resume.checkpoints)
    names = ", ".join(attempt.facts.unmatched)
    return f" (no file matches {patterns}; the output has {names}: set `resume.checkpoints` and `resume.step`)"


def _refused_wait_s(before: Sequence[Attempt]) -> float:
    """Return the seconds to wait after a network or service refused, more after the first time."""
    endings = [attempt.failure.ending for attempt in before if attempt.failure]
    count = sum(ending is not None and ending.may_pass for ending in endings)
    return REFUSED_WAITS_S[min(count, len(REFUSED_WAITS_S) - 1)]


def _attempts_since_progress(job: Job, attempt: Attempt) -> Sequence[Attempt]:
    """Return the earlier attempts since the newest checkpoint was left; () where this attempt left
    it.
    """
    before = job.attempts[: attempt.number - 1]
    saved = list(map(_saved_step, (*before, attempt)))
    return before[saved.index(max(saved)) :]


def _attempts_of_row(attempts: Sequence[Attempt], row: int) -> list[Attempt]:
    """Return those of the attempts whose verdict came from this row."""
    return [
        attempt
        for attempt in attempts
        if attempt.failure and attempt.failure.verdict and attempt.failure.verdict.row == row
    ]


def _saved_step(attempt: Attempt) -> int:
    return 0 if attempt.probe else attempt.facts.checkpoint_step or 0
