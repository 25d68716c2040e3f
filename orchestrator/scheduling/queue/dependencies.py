"""Which jobs does a job come after, and what becomes of it when they end?"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.sections import Dependency
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace

ENDED = {
    JobStatus.SUCCEEDED: "succeeded",
    JobStatus.FAILED: "failed",
    JobStatus.REFUSED: "was refused",
    JobStatus.CANCELLED: "was cancelled",
}


def resolved(
    spec: JobSpec, together: Mapping[str, Sequence[str]], known: Callable[[str], Job | None]
) -> tuple[JobSpec, tuple[str, ...]]:
    """The job with the ids of those that it comes after, and which of these have ended already as it wants.

    `together` are the ids of each name that stands before it in its submission, `known` all jobs before. Raises
    SpecError where there is no such job, or where it has ended otherwise.
    """
    depends_on = tuple(
        one.model_copy(update={"job": job_id})
        for one in spec.depends_on
        for job_id in together.get(one.job, (one.job,))
    )
    given = {job_id for ids in together.values() for job_id in ids}
    satisfied = []
    for one in depends_on:
        if one.job in given:
            continue
        job = known(one.job)
        if job is None:
            hint = "`orc queue` lists the ids; what is submitted together may be named, and stands before"
            raise SpecError("there is no such job", source=spec.name, path="depends_on", got=one.job, hint=hint)
        if job.status.ended and not _is_met(one, job.status):
            what = f"{one.job} {ENDED[job.status]}: a job that runs after its success never would"
            hint = f"say {{job: {one.job}, when: always}}, or submit that job again"
            raise SpecError(what, source=spec.name, path="depends_on", got=one.job, hint=hint)
        if job.status.ended:
            satisfied.append(one.job)
    return spec.model_copy(update={"depends_on": depends_on}), tuple(satisfied)


def with_pending_dependencies(job: Job, jobs: Mapping[str, Job], satisfied: Collection[str]) -> Job:
    """The job as it is submitted: it waits for those of `jobs` that have not ended; `satisfied` have, as it wants."""
    for one in job.spec.depends_on:
        other = jobs.get(one.job)
        if other is None and one.job not in satisfied and one.when == "success":
            return _in_vain(job, one.job, "was refused")  # in the same submission: it never ran
        if other is not None and other.status.ended and not _is_met(one, other.status):
            return _in_vain(job, one.job, ENDED[other.status])
    waits_for = tuple(one for one in job.spec.depends_on if one.job in jobs and not jobs[one.job].status.ended)
    return replace(job, waits_for=waits_for, reason=_reason(waits_for) or job.reason)


def on_dependency_ended(job: Job, ended: Job) -> Job:
    """The job, now that one for which it waited has ended."""
    wanted = [one for one in job.waits_for if one.job == ended.id]
    if not all(_is_met(one, ended.status) for one in wanted):
        return _in_vain(job, ended.id, ENDED[ended.status])
    waits_for = tuple(one for one in job.waits_for if one.job != ended.id)
    return replace(job, waits_for=waits_for, reason=_reason(waits_for) or f"{ended.id} has ended")


def _is_met(dependency: Dependency, status: JobStatus) -> bool:
    return dependency.when == "always" or status is JobStatus.SUCCEEDED


def _in_vain(job: Job, other: str, ended: str) -> Job:
    return replace(job, status=JobStatus.CANCELLED, waits_for=(), reason=f"was to run after {other}, which {ended}")


def _reason(waits_for: Sequence[Dependency]) -> str:
    if not waits_for:
        return ""
    told = ", ".join(one.job if one.when == "always" else f"{one.job} to succeed" for one in waits_for[:NAMED_MAX])
    more = len(waits_for) - NAMED_MAX
    return f"waits for {told}" + (f" and {more} more" if more > 0 else "")


NAMED_MAX = 3  # in a reason
