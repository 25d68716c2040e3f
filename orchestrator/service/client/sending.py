"""Uploads files that jobs name to the service of another machine, if it lacks them."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from orchestrator.service.client.client import Client
from orchestrator.service.client.logins import Login, get_logins_file
from orchestrator.service.intake.intake import (
    JobSource,
    ReadJob,
    read_job,
    read_jobs,
    read_jobs_for_service,
)
from orchestrator.service.transfer.archive import Listing, list_files
from orchestrator.service.transfer.ignore import make_ignore_check
from orchestrator.service.transfer.store import LIMITS, PREFIX
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.paths import change_paths, list_paths
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import Override

COMPRESSION = 6
IN_MEMORY_BYTES = 2**24


def read_and_upload_jobs(
    service: Path | Login,
    job_files: Sequence[JobSource],
    overrides: Sequence[Override] = (),
    home: Path | None = None,
    *,
    only_one: bool = False,
) -> list[JobSpec]:
    """Return the jobs in these job files, with overrides applied.

    For a service on another machine, the files that the jobs name are uploaded first. Raises
    SpecError; with `only_one`, also for an array of jobs.
    """
    if isinstance(service, Path):
        if only_one:
            return [read_job(file, overrides, home) for file in job_files]
        return [spec for file in job_files for spec in read_jobs(file, overrides, home)]
    jobs = [
        job
        for file in job_files
        for job in read_jobs_for_service(file, overrides, home, only_one=only_one)
    ]
    with closing(Client(service)) as client:
        return upload_files(client, jobs)


def upload_files(client: Client, jobs: Sequence[ReadJob]) -> list[JobSpec]:
    """Upload the jobs' local files that the service lacks, and return the jobs with uploads in
    place of local paths.

    A working directory is one upload. A file or folder outside it is another. Raises SpecError
    where one is too large.
    """
    uploads = {
        root: _list_files_to_upload(root)
        for root in dict.fromkeys(root for job in jobs for root in _list_upload_roots(job))
    }
    digests = {root: _compute_listing_digest(listing) for root, listing in uploads.items()}
    missing = set(client.list_missing_uploads(sorted(set(digests.values())))) if digests else set()
    for digest, listing in {
        digests[root]: uploads[root] for root in uploads if digests[root] in missing
    }.items():
        _send_archive(client, digest, listing)
    return [_replace_local_paths(job, digests) for job in jobs]


def _list_upload_roots(job: ReadJob) -> Iterator[Path]:
    """Yield the paths of a job to upload: its working directory, then each path outside it."""
    workdir = (
        Path(job.spec.workdir)
        if job.spec.workdir is not None and "workdir" in job.local_keys
        else None
    )
    if workdir is not None:
        yield workdir
    for key, path in list_paths(job.spec):
        if key in job.local_keys and (workdir is None or not Path(path).is_relative_to(workdir)):
            yield Path(path)


def _list_files_to_upload(root: Path) -> Listing:
    is_ignored = make_ignore_check(root) if root.is_dir() else (lambda _: False)
    tokens = get_logins_file()
    try:
        listing = list_files(root, LIMITS, lambda path: is_ignored(path) or root / path == tokens)
    except OSError as error:
        raise SpecError(
            f"cannot be read: {error.strerror}", source=str(error.filename or root)
        ) from None
    if listing.left_out:
        raise SpecError(
            "not a file, or a link that leaves the folder",
            source=str(root),
            got=", ".join(listing.left_out[:3]),
            hint="name it in `.orcignore`, or copy what it leads to",
        )
    return listing


def _compute_listing_digest(listing: Listing) -> str:
    try:
        return listing.compute_digest()
    except OSError as error:
        raise SpecError(f"cannot be read: {error}", source=str(listing.root)) from None


def _send_archive(client: Client, digest: str, listing: Listing) -> None:
    with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION, mtime=0) as archive:
            for chunk in listing.iterate_bytes():
                archive.write(chunk)
        size_bytes = file.tell()
        file.seek(0)
        client.upload(digest, iter(lambda: file.read(2**20), b""), size_bytes)


def _replace_local_paths(job: ReadJob, digests: dict[Path, str]) -> JobSpec:
    roots = list(_list_upload_roots(job))

    def upload_path(key: str, path: str) -> str:
        if key not in job.local_keys:
            return path
        root = next(root for root in roots if Path(path).is_relative_to(root))
        inner = Path(path).relative_to(root if root.is_dir() else root.parent).as_posix()
        return f"{PREFIX}{digests[root]}" if inner == "." else f"{PREFIX}{digests[root]}/{inner}"

    return change_paths(job.spec, upload_path)
