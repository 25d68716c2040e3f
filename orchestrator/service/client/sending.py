"""Uploads files that jobs name to the service of another machine, if it lacks them."""

from __future__ import annotations

import gzip
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path

from orchestrator.service.client.client import Client
from orchestrator.service.client.logins import Login, logins_file
from orchestrator.service.intake.intake import (
    JobSource,
    ReadJob,
    read_job,
    read_jobs,
    read_jobs_elsewhere,
)
from orchestrator.service.transfer.archive import Listing, list_files
from orchestrator.service.transfer.ignore import read_ignore
from orchestrator.service.transfer.store import LIMITS, PREFIX
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.paths import change_paths, list_paths
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import Override

COMPRESSION = 6
IN_MEMORY_BYTES = 2**24


def read_jobs_for(
    service: Path | Login,
    files: Sequence[JobSource],
    overrides: Sequence[Override] = (),
    home: Path | None = None,
    *,
    only_one: bool = False,
) -> list[JobSpec]:
    """Return the jobs in these files, for the service. For another machine, their files are uploaded first.

    Raises SpecError; with `only_one`, for an array too.
    """
    if isinstance(service, Path):
        if only_one:
            return [read_job(file, overrides, home) for file in files]
        return [spec for file in files for spec in read_jobs(file, overrides, home)]
    jobs = [
        job
        for file in files
        for job in read_jobs_elsewhere(file, overrides, home, only_one=only_one)
    ]
    with closing(Client(service)) as client:
        return with_uploads(client, jobs)


def with_uploads(client: Client, jobs: Sequence[ReadJob]) -> list[JobSpec]:
    """Return the jobs with each path of this machine replaced by its upload, after sending what is missing.

    A working directory is one upload. A file or folder outside it is another. Raises SpecError where one is too large.
    """
    uploads = {
        root: _list_root(root)
        for root in dict.fromkeys(root for job in jobs for root in _roots(job))
    }
    digests = {root: _digest(listing) for root, listing in uploads.items()}
    missing = set(client.missing_uploads(sorted(set(digests.values())))) if digests else set()
    for digest, listing in {
        digests[root]: uploads[root] for root in uploads if digests[root] in missing
    }.items():
        _send(client, digest, listing)
    return [_with_upload_paths(job, digests) for job in jobs]


def _roots(job: ReadJob) -> Iterator[Path]:
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


def _list_root(root: Path) -> Listing:
    is_ignored = read_ignore(root) if root.is_dir() else (lambda _: False)
    tokens = logins_file()
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


def _digest(listing: Listing) -> str:
    try:
        return listing.digest()
    except OSError as error:
        raise SpecError(f"cannot be read: {error}", source=str(listing.root)) from None


def _send(client: Client, digest: str, listing: Listing) -> None:
    with tempfile.SpooledTemporaryFile(IN_MEMORY_BYTES) as file:
        with gzip.GzipFile(fileobj=file, mode="wb", compresslevel=COMPRESSION, mtime=0) as archive:
            for chunk in listing.stream():
                archive.write(chunk)
        size_bytes = file.tell()
        file.seek(0)
        client.upload(digest, iter(lambda: file.read(2**20), b""), size_bytes)


def _with_upload_paths(job: ReadJob, digests: dict[Path, str]) -> JobSpec:
    roots = list(_roots(job))

    def upload_path(key: str, path: str) -> str:
        if key not in job.local_keys:
            return path
        root = next(root for root in roots if Path(path).is_relative_to(root))
        inner = Path(path).relative_to(root if root.is_dir() else root.parent).as_posix()
        return f"{PREFIX}{digests[root]}" if inner == "." else f"{PREFIX}{digests[root]}/{inner}"

    return change_paths(job.spec, upload_path)
