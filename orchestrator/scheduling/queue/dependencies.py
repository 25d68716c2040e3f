"""Job dependencies (`depends_on`): which job each one names, and what its end means for the
dependent job.
"""

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


def resolve_dependencies(
    spec: JobSpec, ids_by_name: Mapping[str, Sequence[str]], find_job: Callable[[str], Job | None]
) -> tuple[JobSpec, tuple[str, ...]]:
    """Return (the job with ids as its dependencies, ids of the dependencies that already ended as
    required).

    `ids_by_name` has the ids of jobs in the same submission; `find_job` returns any earlier job.
    Raises SpecError where there is no such job, or where it ended in another way than required.
    """
    depends_on = tuple(
        dependency.model_copy(update={"job": job_id})
        for dependency in spec.depends_on
        for job_id in ids_by_name.get(dependency.job, (dependency.job,))
    )
    new_ids = {job_id for ids in ids_by_name.values() for job_id in ids}
    satisfied = []
    for dependency in depends_on:
        if dependency.job in new_ids:
            continue
        job = find_job(dependency.job)
        if job is None:
            hint = "`orc queue` lists the ids; what is submitted together may be named, and stands before"
            raise SpecError(
                "there is no such job",
                source=spec.name,
                path="depends_on",
                got=dependency.job,
                hint=hint,
            )
        if job.status.ended and not _is_met(dependency, job.status):
            what = f"{dependency.job} {ENDED[job.status]}: a job that runs after its success never would"
            hint = f"say {{job: {dependency.job}, when: always}}, or submit that job again"
            raise SpecError(
                what, source=spec.name, path="depends_on", got=dependency.job, hint=hint
            )
        if job.status.ended:
            satisfied.append(dependency.job)
    return spec.model_copy(update={"depends_on": depends_on}), tuple(satisfied)


def set_pending_dependencies(
    job: Job, live_jobs: Mapping[str, Job], satisfied_job_ids: Collection[str]
) -> Job:
    """Return the submitted job with the dependencies for which it must wait; cancelled if one can
    never be met.

    `satisfied_job_ids` are dependencies that had already ended as required at submission.
    """
    for dependency in job.spec.depends_on:
        other = live_jobs.get(dependency.job)
        if (
            other is None
            and dependency.job not in satisfied_job_ids
            and dependency.when == "success"
        ):
            return _cancel_unmet_dependent(
                job, dependency.job, "was refused"
            )  # in the same submission: it never ran
        if other is not None and other.status.ended and not _is_met(dependency, other.status):
            return _cancel_unmet_dependent(job, dependency.job, ENDED[other.status])
    waits_for = tuple(
        dependency
        for dependency in job.spec.depends_on
        if dependency.job in live_jobs and not live_jobs[dependency.job].status.ended
    )
    return replace(job, waits_for=waits_for)


def remove_ended_dependency(job: Job, ended_job: Job) -> Job:
    """Return the job without its dependency on `ended_job`; cancelled if that did not end as
    required.
    """
    wanted = [dependency for dependency in job.waits_for if dependency.job == ended_job.id]
    if not all(_is_met(dependency, ended_job.status) for dependency in wanted):
        return _cancel_unmet_dependent(job, ended_job.id, ENDED[ended_job.status])
    waits_for = tuple(dependency for dependency in job.waits_for if dependency.job != ended_job.id)
    return replace(job, waits_for=waits_for, reason="")


def _is_met(dependency: Dependency, ended_status: JobStatus) -> bool:
    """Return whether the dependency is met by a job that ended with this status."""
    return dependency.when == "always" or ended_status is JobStatus.SUCCEEDED


def _cancel_unmet_dependent(job: Job, dependency_job_id: str, how_it_ended: str) -> Job:
    """Return the job cancelled, because the job on which it depends ended in another way than
    required.
    """
    return replace(
        job,
        status=JobStatus.CANCELLED,
        waits_for=(),
        reason=f"was to run after {dependency_job_id}, which {how_it_ended}",
    )
