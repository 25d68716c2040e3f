"""Time limits: the total run time that a job's attempts may use (`time_limit` of a job file).

Run time counts from an attempt's Started event to its end. Waiting and launching do not count.
"""

from __future__ import annotations

from math import inf

from orchestrator.scheduling.base.migration import can_move, make_migration
from orchestrator.specs.actions import Stop
from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    Failure,
    FailureKind,
    StopCause,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import TeamSpec
from orchestrator.specs.replace import replace
from orchestrator.specs.units import DURATION_PATTERN, format_in_largest_unit, format_seconds

ROUNDING_S = 1e-6  # by which a sum of times may fall short: floats near 2**31 s are 2e-7 s apart


def compute_total_run_time_s(job: Job, until_s: float) -> float:
    """Return the seconds that the job's attempts have run in all; a running one counts up to
    `until_s`.
    """
    return sum(_run_time_s(attempt, until_s) for attempt in job.attempts)


def compute_time_limit_left_s(job: Job) -> float:
    """Return how many seconds of the job's time limit are left after its ended attempts.

    It is at least 1, and infinity for a job without a limit.
    """
    limit_s = job.spec.time_limit
    return (
        inf
        if limit_s is None
        else max(1.0, limit_s - sum(_run_time_s(attempt, 0.0) for attempt in job.attempts))
    )


def compute_time_limit_reached_at_s(job: Job) -> float:
    """Return when the running attempt will reach the job's time limit, in seconds since 1970.

    Infinity where the job has no limit, or its last attempt does not run.
    """
    attempt = job.last
    if job.spec.time_limit is None or attempt is None or not can_move(job):
        return inf
    return (
        compute_time_limit_end_s(job, attempt) if attempt.status is AttemptStatus.RUNNING else inf
    )


def compute_time_limit_end_s(job: Job, attempt: Attempt, launch_cost_s: float = 0.0) -> float:
    """Return when the job's time limit ends this attempt, in seconds since 1970; infinity without a
    limit.

    An attempt that has not started yet is assumed to start `launch_cost_s` seconds after its
    launch.
    """
    if job.spec.time_limit is None:
        return inf
    begin_s = _start_time_s(attempt)
    if begin_s is None:
        begin_s = attempt.launched_at_s + launch_cost_s
    earlier_s = sum(_run_time_s(earlier, begin_s) for earlier in job.attempts[: attempt.number - 1])
    return begin_s + job.spec.time_limit - earlier_s


def is_over_time_limit(job: Job, at_s: float) -> bool:
    """Return whether the job's attempts have used up its time limit at `at_s`."""
    return (
        job.spec.time_limit is not None
        and compute_total_run_time_s(job, at_s) >= job.spec.time_limit - ROUNDING_S
    )


def stop_at_time_limit(job: Job, at_s: float) -> tuple[Job, Stop]:
    """Return (job, Stop action) that make the running attempt save and end, because its time limit
    is used up.
    """
    why = f"stopped: {_describe_used_limit(job.spec)}"
    job, stop = make_migration(job, StopCause.TIME_LIMIT, why, at_s)
    attempt = job.attempts[-1]
    return replace(job, attempts=(*job.attempts[:-1], replace(attempt, over_limit=True))), stop


def make_time_limit_failure(job: Job, attempt: Attempt) -> Failure:
    """Return the failure of an attempt that reached the time limit.

    Its text names the limit, the step reached, and the `orc retry` command that continues the job.
    """
    steps = [beat.step for beat in attempt.heartbeats]
    saved = attempt.facts.checkpoint_step
    reached = max([*steps, saved or 0])
    where = f" at step {reached}" if reached else ""
    save_words = f", saved at step {saved}" if saved else ", nothing was saved"
    assert job.spec.time_limit is not None, job.id
    longer = format_in_largest_unit(2 * job.spec.time_limit, DURATION_PATTERN)
    command = (
        f"`orc retry {job.id} --set time_limit={longer}` {'goes on' if saved else 'starts it anew'}"
    )
    return Failure(
        kind=FailureKind.TIME_LIMIT,
        reason=f"{_describe_used_limit(job.spec)}{where}{save_words}; {command}",
    )


def apply_team_limit(spec: JobSpec, team: TeamSpec) -> JobSpec:
    """Return the job with its team's default time limit, if the job has none.

    Raises SpecError where the job's limit exceeds the team's maximum.
    """
    longest_s = team.max_time_limit
    if spec.time_limit is None:
        default_s = team.time_limit or longest_s
        return spec if default_s is None else spec.model_copy(update={"time_limit": default_s})
    if longest_s is not None and spec.time_limit > longest_s:
        raise SpecError(
            f"longer than team {team.name!r} may run a job",
            source=spec.name,
            path="time_limit",
            got=format_seconds(spec.time_limit),
            allowed=f"at most {format_seconds(longest_s)}",
            hint="name a shorter one, or leave it out for the team's default",
        )
    return spec


def _describe_used_limit(spec: JobSpec) -> str:
    """Return a clause that says which time limit is used up."""
    assert spec.time_limit is not None, spec.name
    return f"its time limit of {format_seconds(spec.time_limit)} is over"


def _start_time_s(attempt: Attempt) -> float | None:
    """Return when the attempt started, in seconds since 1970; None where it has not.

    A running attempt of an older version may have no stored start: then it is the launch.
    """
    if attempt.started_at_s is None and attempt.status is AttemptStatus.RUNNING:
        return attempt.launched_at_s
    return attempt.started_at_s


def _run_time_s(attempt: Attempt, until_s: float) -> float:
    """Return the seconds from the attempt's start to its end, or to `until_s` if it runs; 0 if it
    never started.
    """
    begin_s = _start_time_s(attempt)
    end_s = until_s if attempt.ended_at_s is None else attempt.ended_at_s
    return 0.0 if begin_s is None else max(0.0, end_s - begin_s)
