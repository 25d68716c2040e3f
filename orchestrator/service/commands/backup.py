"""`orc backup` and `orc restore`: queue, records, accounts and cluster file as one archive.

The journal has users, digests of tokens and the audit log. It holds no token in clear text, but values under `env` of
job files. Left out are the home's own token, the TLS key, checkpoints, logs and MLflow's files.
"""

from __future__ import annotations

import hashlib
import json
import lzma
import os
import shutil
import struct
import tempfile
import zipfile
import zlib
from collections.abc import Iterator
from contextlib import closing, contextmanager
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

from orchestrator.backends.journal.copy import copy_journal, read_schema
from orchestrator.backends.journal.database import SCHEMA
from orchestrator.backends.journal.journal import Journal
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.client.lifecycle import find_journal_url
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import JobFolder
from orchestrator.specs.state import State

FORMAT = 1
MANIFEST = "manifest.json"
JOURNAL = "journal.sqlite"
CLUSTER = "cluster.yaml"
MANIFEST_BYTES_MAX = 2**16
CHUNK_BYTES = 2**20
SQLITE = "sqlite:///"
# What zipfile and its decompressors raise on a file that is none, is cut off, or has other bytes.
DAMAGES = (
    *(zipfile.BadZipFile, zipfile.LargeZipFile, zlib.error, lzma.LZMAError, struct.error),
    *(NotImplementedError, RuntimeError, EOFError, ValueError, OverflowError, OSError),
)
LOST = "The journal was restored from a backup, in which this attempt ran. It counts as lost with its node.\n"
GOES_ON = "The job goes on from the newest checkpoint in its output, which was taken from {home}.\n"
BEGINS_ANEW = "The job begins anew: no output of it could be taken from {home}.\n"


@frozen
class Restored:
    """The result of a restore: where the backup comes from, the number of queued jobs, and the lost
    attempts.
    """

    created_at: str  # of the backup, in UTC
    version: str  # of the orchestrator that wrote it
    queued: int  # jobs
    lost: list[str]  # attempts that ran: their jobs restart
    anew: list[
        str
    ]  # of their jobs, those without the output of the backed-up home: they begin anew


def write_backup(home: Path, archive: Path) -> JsonObject:
    """Write the backup's archive (mode 0600), even while the service runs, and return its manifest.

    Raises SpecError where the file exists, or where the journal is no SQLite file.
    """
    url = find_journal_url(home)
    if not url.startswith(SQLITE):
        hint = "`pg_dump --format=custom DATABASE > FILE` copies it; `pg_restore` brings it back. Keep cluster.yaml too"
        raise SpecError(
            "the journal is in PostgreSQL, which has its own backup", source=str(home), hint=hint
        )
    if archive.exists():
        raise SpecError(
            "the file exists", source=str(archive), hint="name a new one: a backup replaces none"
        )
    if not archive.absolute().parent.is_dir():
        raise SpecError("the folder does not exist", source=str(archive.parent))
    with tempfile.TemporaryDirectory(
        dir=archive.absolute().parent, prefix=".orc-backup-"
    ) as folder:
        journal_copy = Path(folder) / JOURNAL
        copy_journal(Path(url.removeprefix(SQLITE)), journal_copy)
        files = {JOURNAL: journal_copy}
        if (home / CLUSTER).exists():
            files[CLUSTER] = home / CLUSTER
        manifest = {
            "format": FORMAT,
            "version": version("orchestrator"),
            "schema": read_schema(journal_copy),
            "created_at": datetime.now(UTC).isoformat(timespec="seconds"),
            "home": str(home.resolve()),
            "files": {
                name: {"sha256": _compute_file_digest(path), "bytes": path.stat().st_size}
                for name, path in files.items()
            },
        }
        packed_file = Path(folder) / "archive"
        descriptor = os.open(packed_file, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as archive_file:
                archive_file.writestr(MANIFEST, json.dumps(manifest, indent=2))
                for name, path in files.items():
                    archive_file.write(path, name)
            file.flush()
            os.fsync(file.fileno())
        os.link(packed_file, archive)  # whole or not at all; fails where another wrote it meanwhile
    return manifest


def restore_backup(archive: Path, home: Path) -> Restored:
    """Create a home folder from the backup's archive, all or nothing.

    Attempts that ran count as lost with their nodes: `orc up` restarts their jobs as new attempts.
    Their output, with its checkpoints, is taken from the home that was backed up, if this machine
    has it. Raises SpecError where the home is not empty, or the archive is invalid, damaged, or
    newer than this version.
    """
    if home.exists() and (not home.is_dir() or any(home.iterdir())):
        raise SpecError(
            "the home is not empty",
            source=str(home),
            hint="name another with --home, or move this away",
        )
    home.parent.mkdir(parents=True, exist_ok=True)
    with (
        _open_archive(archive) as archive_file,
        tempfile.TemporaryDirectory(dir=home.parent, prefix=".orc-restore-") as folder,
    ):
        new_home = Path(folder) / "home"
        new_home.mkdir(mode=0o700)
        manifest = _read_manifest(archive_file, archive)
        for name, entry in manifest["files"].items():
            _unpack_file(archive_file, name, entry, new_home / name, archive)
        if read_schema(new_home / JOURNAL) != manifest["schema"]:
            raise _make_damage_error(
                archive, "its manifest names another schema than its journal has"
            )
        # older archives do not name it
        restored = _restore_running_jobs(
            new_home, Path(str(manifest.get("home", "unknown"))), manifest
        )
        new_home.replace(home)  # an empty folder may be there
    return restored


def _restore_running_jobs(home: Path, earlier_home: Path, manifest: JsonObject) -> Restored:
    """Take over the output of each job that ran from the earlier home, and write a log that tells
    the service of the loss.

    Returns the result of the restore.
    """
    with closing(Journal(f"{SQLITE}{home / JOURNAL}")) as journal:
        snapshot, tail = journal.load_state_and_events()
    scheduler = Scheduler(snapshot or State())
    for event, _ in tail:
        scheduler.step(event)
    jobs = scheduler.state.jobs.values()
    lost = []
    anew = []
    for job in jobs:
        attempt = job.last
        if attempt is None or job.status.ended:
            continue
        has_output = _take_over_output(JobFolder(earlier_home, job.id), JobFolder(home, job.id))
        if attempt.status is AttemptStatus.ENDED:
            continue
        log = JobFolder(home, job.id).attempt(attempt.number).log(0)
        log.parent.mkdir(parents=True)
        log.write_text(LOST + (GOES_ON if has_output else BEGINS_ANEW).format(home=earlier_home))
        lost.append(attempt.name)
        if not has_output:
            anew.append(job.id)
    return Restored(
        created_at=manifest["created_at"],
        version=manifest["version"],
        queued=sum(job.status is JobStatus.QUEUED for job in jobs),
        lost=lost,
        anew=anew,
    )


def _take_over_output(source: JobFolder, target: JobFolder) -> bool:
    """Link or copy a job's checkpoints and output into the new home; return whether it had any and
    all were taken.
    """
    pairs = [(source.checkpoints, target.checkpoints), (source.output, target.output)]
    there = [(earlier, new) for earlier, new in pairs if earlier.is_dir()]
    try:
        for earlier, new in there:
            shutil.copytree(earlier, new, symlinks=True, copy_function=_link_or_copy)
    except OSError:  # of another user, or a full disk
        for _, new in there:
            shutil.rmtree(new, ignore_errors=True)
        return False
    return bool(there)


def _link_or_copy(source: str, target: str) -> None:
    try:
        os.link(source, target, follow_symlinks=False)
    except OSError:  # another disk, or one without links
        shutil.copy2(source, target, follow_symlinks=False)


@contextmanager
def _open_archive(archive: Path) -> Iterator[zipfile.ZipFile]:
    try:
        archive_file = zipfile.ZipFile(archive)
    except FileNotFoundError:
        raise SpecError("the file does not exist", source=str(archive)) from None
    except DAMAGES as error:  # a folder, and a file that may not be read, too
        raise _make_damage_error(archive, str(error)) from None
    with archive_file:
        yield archive_file


def _iterate_chunks(
    archive_file: zipfile.ZipFile, entry_name: str, left_bytes: int, archive: Path
) -> Iterator[bytes]:
    """Yield the content of an entry of the archive, at most `left_bytes` + 1 bytes, in pieces.

    Raises SpecError for a damaged archive.
    """
    try:
        with archive_file.open(entry_name) as source:
            while left_bytes >= 0 and (chunk := source.read(min(CHUNK_BYTES, left_bytes + 1))):
                left_bytes -= len(chunk)
                yield chunk
    except KeyError:
        raise _make_damage_error(archive, f"{entry_name} is missing") from None
    except DAMAGES as error:
        raise _make_damage_error(archive, f"{entry_name}: {error}") from None


def _read_manifest(archive_file: zipfile.ZipFile, archive: Path) -> JsonObject:
    text = b"".join(_iterate_chunks(archive_file, MANIFEST, MANIFEST_BYTES_MAX, archive))
    try:
        manifest = json.loads(text)
        form = manifest["format"]
        schema = manifest["schema"]
        files = manifest["files"]
        sizes = [entry["bytes"] for entry in files.values()]
        texts = [
            manifest["version"],
            manifest["created_at"],
            schema,
            *(entry["sha256"] for entry in files.values()),
        ]
        is_whole = all(isinstance(text, str) for text in texts) and all(
            type(size) is int for size in sizes
        )
        is_ours = is_whole and {JOURNAL} <= set(files) <= {JOURNAL, CLUSTER}
    except (KeyError, TypeError, ValueError, AttributeError, RecursionError):
        is_ours = False
    if not is_ours:
        raise _make_damage_error(archive, "it has no manifest of ours")
    if form != FORMAT or schema > SCHEMA:
        got = f"format {form}, schema {schema}, of version {manifest['version']}"
        allowed = f"format {FORMAT}, schema {SCHEMA} at most"
        raise SpecError("a newer version wrote it", source=str(archive), got=got, allowed=allowed)
    return dict(manifest)


def _unpack_file(
    archive_file: zipfile.ZipFile, entry_name: str, entry: JsonObject, path: Path, archive: Path
) -> None:
    digest = hashlib.sha256()
    size_bytes = 0
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with os.fdopen(descriptor, "wb") as target:
        for chunk in _iterate_chunks(archive_file, entry_name, int(entry["bytes"]), archive):
            size_bytes += len(chunk)
            digest.update(chunk)
            target.write(chunk)
    if size_bytes != entry["bytes"] or digest.hexdigest() != entry["sha256"]:
        raise _make_damage_error(archive, f"{entry_name} is not what the manifest says")


def _compute_file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _make_damage_error(archive: Path, reason: str) -> SpecError:
    return SpecError("not a whole backup", source=str(archive), got=reason, hint="take another one")
