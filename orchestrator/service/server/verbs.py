"""Changes that people make to an unfinished job: hold, release, suspend, resume and update. Each is one event."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from orchestrator.scheduling.base.time_limits import apply_team_limit, compute_total_run_time_s
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.events import UpdateRequested
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import Override, apply_overrides
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.units import format_seconds

UPDATABLE = ("priority", "deadline", "time_limit")  # of a submitted job; any other key is refused
Change = Callable[
    [Job, float], UpdateRequested | None
]  # of a live job, at a time; None: it is so already


def make_hold_change(user: str) -> Change:
    """Return the change that puts a waiting job on hold for this user. It raises ServiceError for a
    running job.
    """

    def change(job: Job, at_s: float) -> UpdateRequested | None:
        if job.held_by is None and job.status is JobStatus.RUNNING:
            raise ServiceError(
                f"job {job.id} runs: `orc suspend {job.id}` has it save and leave its devices"
            )
        return make_suspension_change(user)(job, at_s)

    return change


def make_suspension_change(user: str) -> Change:
    """Return the change that puts any job on hold for this user; a running job saves a checkpoint
    and frees its devices.
    """
    return _make_holder_change(user)


def make_release_change(_user: str) -> Change:
    """Return the change that ends a job's hold or suspension, so that it waits for devices again."""
    return _make_holder_change(None)


def _make_holder_change(new_holder: str | None) -> Change:
    """Return the change that puts a job on hold for a user, or releases it (None).

    It changes nothing where one holder would replace another.
    """

    def change(job: Job, at_s: float) -> UpdateRequested | None:
        if (job.held_by is None) == (new_holder is None):
            return None
        return UpdateRequested(job_id=job.id, spec=job.spec, held_by=new_holder, at_s=at_s)

    return change


VERBS: Mapping[str, Callable[[str], Change]] = {
    "hold": make_hold_change,
    "release": make_release_change,
    "suspend": make_suspension_change,
    "resume": make_release_change,
}


def make_update_change(new_settings: Sequence[Override], policy: PolicySpec) -> Change:
    """Return the change that gives a job new values of UPDATABLE keys, checked as at submission.
    Raises SpecError for others.
    """
    allowed = ", ".join(UPDATABLE)
    if not new_settings:
        raise SpecError(
            "nothing is to change", source="orc update", allowed=f"KEY=VALUE of {allowed}"
        )
    for key, value in new_settings:
        if key not in UPDATABLE:
            hint = "`orc cancel` the job, then `orc retry JOB --set` changes any key"
            what = "this key of a submitted job cannot change"
            raise SpecError(
                what, source="orc update", path=key, got=value, allowed=allowed, hint=hint
            )

    def change(job: Job, at_s: float) -> UpdateRequested | None:
        spec = apply_team_limit(
            apply_overrides(job.spec, new_settings, job.id), policy.find_team(job.user)
        )
        if (
            spec.deadline is not None
            and spec.deadline != job.spec.deadline
            and spec.deadline.compute_due_s(at_s) <= at_s
        ):
            raise SpecError(
                "the deadline is over", source=job.id, path="deadline", got=str(spec.deadline)
            )
        ran_s = compute_total_run_time_s(job, at_s)
        if (
            spec.time_limit is not None
            and spec.time_limit != job.spec.time_limit
            and spec.time_limit <= ran_s
        ):
            raise SpecError(
                "the job has run for longer",
                source=job.id,
                path="time_limit",
                got=format_seconds(spec.time_limit),
                allowed=f"more than {format_seconds(ran_s)}",
                hint=f"`orc cancel {job.id}` ends it",
            )
        is_same = spec == job.spec
        return (
            None
            if is_same
            else UpdateRequested(job_id=job.id, spec=spec, held_by=job.held_by, at_s=at_s)
        )

    return change
