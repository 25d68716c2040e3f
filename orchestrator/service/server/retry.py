"""Resubmission of an ended job: its spec with changed settings, and the checkpoint from which it continues."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from orchestrator.service.intake.git import read_code_source
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.job.paths import list_paths
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import Override, apply_overrides

# Keys that leave the mathematics of a training as it is. With any other key, a retry starts over: a
# checkpoint of
# another training would be continued unseen.
UNTRAINED = frozenset(
    (
        *(
            "name",
            "family",
            "priority",
            "user",
            "depends_on",
            "deadline",
            "start_window",
            "gpus",
            "guarantee",
        ),
        *(
            "objective",
            "speeds",
            "profile",
            "probe",
            "retries",
            "on_caught_oom",
            "hang_timeout",
            "startup_timeout",
        ),
        *("time_limit", "secrets", "phases", "progress"),
    )
)
TRACED_BY = (
    "model",
    "trains",
    "data",
    "training",
    "precision",
)  # keys on which a trace of the model depends
OF_THE_OLD = {
    "member": None,
    "trial": None,
    "measured": None,
    "relative_to": None,
}  # of its array, sweep and probes


class RetryStart(NamedTuple):
    """Where a retry starts: the job whose checkpoint it continues (None: from scratch), the
    checkpoint's step, and why.
    """

    continues_from: str | None  # the job with whose newest checkpoint; None: from the beginning
    step: int  # of that checkpoint
    why: str  # in words


def check_retry(job: Job, *, has_allow: bool) -> None:
    """Raise ServiceError if the job has not ended, and SpecError if an ended job was sent `--allow`.

    `--allow` answers only the question of a job that waits for its user; `has_allow` is whether it
    was sent.
    """
    if job.status is JobStatus.RUNNING or not job.status.ended:
        verb = "runs" if job.status is JobStatus.RUNNING else "waits"
        raise ServiceError(
            f"job {job.id} {verb}: `orc update {job.id}` changes its priority, deadline or time limit; "
            f"`orc cancel {job.id}` ends it, then `orc retry {job.id}` submits it again"
        )
    if has_allow:
        hint = "say --set degrade.allow=semantic, or --set global_batch_size=N"
        raise SpecError(f"{job.id} has ended, and asks nothing", source="orc retry", hint=hint)


def make_retry_spec(job: Job, settings: Sequence[Override], option_name: str) -> JobSpec:
    """Return the job's spec with the settings of `--set` applied, without its array or sweep.
    Raises SpecError.
    """
    traced = [key for key, _ in settings if key.split(".")[0] in TRACED_BY]
    if job.spec.traced and traced:
        hint = "`orc submit` its job file with this `--set`"
        raise SpecError(
            "the model would have to be traced anew", source=option_name, path=traced[0], hint=hint
        )
    spec = apply_overrides(job.spec.model_copy(update=OF_THE_OLD), settings, option_name)
    is_here = spec.workdir is not None and Path(spec.workdir).is_dir()
    return (
        spec.model_copy(update={"source": read_code_source(Path(spec.workdir or "."))})
        if is_here
        else spec
    )


def choose_start(job: Job, spec: JobSpec, changed_keys: Sequence[str]) -> RetryStart:
    """Return where a retry with these changed keys starts: from a checkpoint, or from scratch; and
    why.
    """
    changed = sorted({key.split(".")[0] for key in changed_keys} - UNTRAINED)
    saved_steps = [
        attempt.facts.checkpoint_step or 0 for attempt in job.attempts if not attempt.probe
    ]
    source, step = (
        (job.id, max(saved_steps)) if any(saved_steps) else (job.continues_from, job.continues_step)
    )
    if job.status is JobStatus.SUCCEEDED:
        why = "it had succeeded"
    elif changed:
        why = f"`{changed[0]}` changes the training"
    elif source is None:
        why = "nothing was saved"
    elif spec.user != job.spec.user:
        why = f"its checkpoints are those of {job.spec.user or 'nobody'}"
    elif spec.is_script and (spec.knobs.resume_from is None or spec.knobs.output_dir is None):
        why = "nothing tells its script another folder to resume from: `knobs.resume_from` and `knobs.output_dir` do"
    else:
        return RetryStart(
            source, step, f"continues from step {step}, the newest checkpoint of {source}"
        )
    return RetryStart(None, 0, f"starts over: {why}")


def list_changed_files(job: Job, spec: JobSpec) -> list[str]:
    """Return the files and folders of the job's data that have changed since its first attempt, by
    their times.

    Files inside a folder are not checked. Files without a size are left out: the kernel makes them,
    without a time of change.
    """
    began_s = job.attempts[0].launched_at_s if job.attempts else job.submitted_at_s
    paths = (Path(path) for key, path in list_paths(spec) if key.startswith("data."))
    statuses = {str(path): path.stat() for path in paths if path.exists()}
    return [
        path for path, status in statuses.items() if status.st_size and status.st_mtime > began_s
    ]
