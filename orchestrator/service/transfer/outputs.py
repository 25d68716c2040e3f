"""What a job left behind, for `orc get`."""

from __future__ import annotations

from pathlib import Path

from orchestrator.service.transfer.archive import UPLOADED_AT_S, Limits, Listing, listed
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder, uploaded

LIMITS = Limits(entries=1_000_000, total_bytes=2**50)


def output_of(home: Path, job: Job) -> Listing:
    """What of the job is fetched: its output folder, or what its script changed in its own working directory.

    Nothing outside the job's folder is read. Raises ServiceError where there is nothing.
    """
    folder, spec = JobFolder(home, job.id), job.spec
    root = folder.output
    if spec.is_script and spec.knobs.output_dir is None:
        if uploaded(home, spec.workdir or "") is None:
            raise ServiceError(f"{job.id} has no output folder: it writes to {spec.workdir} on the service's machine")
        root = folder.workdir
    try:
        return listed(root, LIMITS, lambda path: root == folder.workdir and _came_by_upload(root / path))
    except OSError as error:
        raise ServiceError(f"{job.id} has left no output: {error.strerror or error}") from None


def _came_by_upload(path: Path) -> bool:
    """Whether a file of a working directory is as it was uploaded, or Python's cache."""
    if path.name == "__pycache__":
        return True
    return not path.is_symlink() and path.is_file() and path.stat().st_mtime == UPLOADED_AT_S
