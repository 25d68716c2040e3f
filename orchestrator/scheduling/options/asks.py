"""What may a person allow to a job that is left without a plan? Each is another training, so no one else decides it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from orchestrator.scheduling.base.node_groups import Group
from orchestrator.scheduling.failures.observation import ran_out
from orchestrator.scheduling.options.job_options import JobOptions, job_options, learned
from orchestrator.specs.choices import Degradation
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

BATCHES_MAX = 6  # halvings of the global batch that are tried


def question_of(state: State, job: Job, groups: Sequence[Group]) -> str | None:
    """Return what a job that ran out of memory asks, with the command that allows it; None where nothing would help.

    The mildest class of degradation by which a plan may fit, else the largest of half the global batch, a quarter and
    so on.
    """
    if job.last is None or not ran_out(job.last) or job.spec.degrade.keeps_plan:
        return None
    for spec, option, meaning in _changes(job.spec):
        changed = replace(job, spec=spec)
        for group in groups:
            options = job_options(changed, group, learned(state, changed, group.hardware.device.name), 0.0)
            if isinstance(options, JobOptions) or options.likeliest is not None:
                return f"no plan of the same training is left. `orc retry {job.id} {option}` goes on with {meaning}"
    return None


def _changes(spec: JobSpec) -> Iterator[tuple[JobSpec, str, str]]:
    """The spec with each change that may be allowed, the option that allows it, and what it means."""
    for wider in (Degradation.NUMERIC, Degradation.SEMANTIC):
        if wider > spec.degrade.limit:
            word = wider.name.lower()
            degrade = spec.degrade.model_copy(update={"allow": word})
            yield spec.model_copy(update={"degrade": degrade}), f"--allow {word}", f"{word} changes"
    if spec.is_script and spec.knobs.micro_batch_size is None:
        return  # nothing would tell the script
    batch = spec.global_batch_size
    for _ in range(BATCHES_MAX):
        if batch % 2:
            return
        batch //= 2
        changed = spec.model_copy(update={"global_batch_size": batch})
        yield changed, f"--global-batch-size {batch}", f"{batch} samples a step and the same learning rate"


def with_allowed(spec: JobSpec, allow: str | None, global_batch_size: int | None) -> JobSpec:
    """Return the spec with what a person allows. Raises SpecError where nothing is, or where the two do not agree."""
    if allow is None and global_batch_size is None:
        raise SpecError(
            "nothing is allowed", path="retry", hint="say --allow numeric, --allow semantic or --global-batch-size N"
        )
    changes: dict[str, object] = {}
    if allow is not None:
        if Degradation[allow.upper()] <= spec.degrade.limit:
            raise SpecError("is allowed already", path="allow", got=allow)
        changes["degrade"] = spec.degrade.model_copy(update={"allow": allow})
    if global_batch_size is not None:
        if global_batch_size > spec.global_batch_size:
            raise SpecError("a larger batch needs more memory", path="global_batch_size", got=global_batch_size)
        changes["global_batch_size"] = global_batch_size
    return spec.model_copy(update=changes)
