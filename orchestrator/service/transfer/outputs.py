"""The output of a job, for `orc get`."""

from __future__ import annotations

import json
from pathlib import Path

from orchestrator.backends.attempts.ended_files import describe_removals
from orchestrator.service.transfer.archive import Limits, Listing, list_files
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import UPLOADED_AT_S, JobFolder, find_upload

ENTRIES_MAX = 1_000_000  # of an output folder
LIMITS = Limits(entries=ENTRIES_MAX, total_bytes=2**50)


def list_output_files(home: Path, job: Job) -> Listing:
    """Return the files of a job to download: its output folder, or what its script changed in its
    working directory.

    Nothing outside the job's folder is read. Raises ServiceError where there is nothing.
    """
    folder = JobFolder(home, job.id)
    spec = job.spec
    in_workdir = spec.is_script and spec.knobs.output_dir is None
    if in_workdir and find_upload(home, spec.workdir or "") is None:
        raise ServiceError(
            f"{job.id} has no output folder: it writes to {spec.workdir} on the service's machine"
        )
    try:
        if not in_workdir:
            return list_files(folder.output, LIMITS)
        uploaded_paths = set(json.loads(folder.uploaded.read_text()))
        return list_files(
            folder.workdir,
            LIMITS,
            lambda path: _is_no_output_file(folder.workdir, path, uploaded_paths),
        )
    except OSError as error:
        removed = describe_removals(home, job.id, "workdir" if in_workdir else "output")
        raise ServiceError(
            f"{job.id} has left no output: {(*removed, error.strerror or str(error))[0]}"
        ) from None


def _is_no_output_file(workdir: Path, path: str, uploaded_paths: set[str]) -> bool:
    """Return whether a file of a working directory is unchanged since its upload, or belongs to
    Python's cache.
    """
    if path.endswith("/"):
        return path.endswith("__pycache__/")
    file = workdir / path
    return path in uploaded_paths and (file.is_symlink() or file.lstat().st_mtime == UPLOADED_AT_S)
