"""Uploads in the home folder: `uploads/<sha256>/files`, each unpacked once, stored while a live job names it."""

from __future__ import annotations

import gzip
import os
import re
import shutil
import threading
import time
import zlib
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from orchestrator.service.transfer.archive import Limits, unpack_and_hash_archive
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.run import UPLOADED_AT_S, get_uploads_folder

LIMITS = Limits(entries=20_000, total_bytes=2**29)  # of one upload
BODY_BYTES_MAX = LIMITS.total_bytes + 2**25  # of the compressed archive: noise does not shrink
TOTAL_BYTES_MAX = 50 * 2**30  # of all uploads
KEPT_S = 7 * 86400.0  # after the last use by a job or a question
GRACE_S = 3600.0  # between a question, or an upload, and the job that names it
AT_ONCE_MAX = 8  # uploads that are unpacked
# of the uploads that arrive: a slow one holds few bytes, so it keeps no place from another
ARRIVING_BYTES_MAX = AT_ONCE_MAX * BODY_BYTES_MAX
DIGEST = re.compile(r"[0-9a-f]{64}")
PREFIX = "upload:"  # of a path in a job that came from another machine: upload:<sha256>/<path>


class Uploads:
    """The archives that clients have uploaded to a home folder, unpacked. Every method is
    thread-safe.
    """

    def __init__(
        self,
        home: Path,
        list_used_digests: Callable[[], Collection[str]],
        clock: Callable[[], float] = time.time,
    ) -> None:
        """Make the store; `list_used_digests` returns the digests of the uploads that live jobs name."""
        self._folder = get_uploads_folder(home)
        self._used = list_used_digests
        self._clock = clock
        self._lock = threading.Lock()
        self._arriving: dict[Path, int] = {}
        self._arriving_lock = threading.Lock()
        self._slots = threading.BoundedSemaphore(AT_ONCE_MAX)

    def list_missing(self, digests: Sequence[str]) -> list[str]:
        """Return those of these digests that have no upload here.

        The uploads of the others are kept for at least GRACE_S seconds.
        """
        with self._lock:
            return [digest for digest in digests if not self._mark_used_if_stored(digest)]

    @contextmanager
    def make_temporary_file_path(self) -> Iterator[Path]:
        """Open a context with the path of a temporary file for an incoming archive, to which
        `append_bytes` adds.
        """
        file = self._folder / f".{os.urandom(8).hex()}.gz"
        with self._arriving_lock:
            self._arriving[file] = 0
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            yield file
        finally:
            with self._arriving_lock:
                del self._arriving[file]
            file.unlink(missing_ok=True)

    def append_bytes(self, temporary_file: Path, chunk: bytes) -> None:
        """Append bytes to an incoming archive. Raises ServiceError where all incoming archives
        together are too large.
        """
        with self._arriving_lock:
            if sum(self._arriving.values()) + len(chunk) > ARRIVING_BYTES_MAX:
                raise ServiceError(
                    f"uploads of more than {ARRIVING_BYTES_MAX} bytes arrive already: try again"
                )
            self._arriving[temporary_file] += len(chunk)
        # no descriptor is held while a client sends
        with temporary_file.open("ab") as body:
            body.write(chunk)

    def store_upload(self, digest: str, temporary_file: Path) -> None:
        """Unpack a received archive as the upload with this digest.

        Raises SpecError for an invalid archive, ServiceError without space, or where too many are
        being unpacked.
        """
        _check_digest(digest)
        if not self._slots.acquire(blocking=False):
            raise ServiceError(f"{AT_ONCE_MAX} uploads are unpacked already: try again")
        folder = self._folder / f".{digest}.{os.urandom(4).hex()}"
        try:
            with gzip.open(temporary_file) as archive:
                actual = unpack_and_hash_archive(
                    archive.read, folder / "files", LIMITS, UPLOADED_AT_S
                )
            if actual != digest:
                hint = "files changed while they were sent: submit again"
                raise SpecError(
                    "the upload is not what its name says", got=actual, allowed=digest, hint=hint
                )
            size_bytes = sum(
                path.lstat().st_size for path in folder.rglob("*") if not path.is_dir()
            )
            (folder / "size").write_text(str(size_bytes))
            with self._lock:
                if not self._mark_used_if_stored(digest):
                    self._remove_unused_uploads(size_bytes)
                    folder.rename(self._folder / digest)
                    self._mark_used_if_stored(digest)
        except (gzip.BadGzipFile, EOFError, zlib.error) as error:
            raise SpecError(f"the upload is no gzip stream: {error}") from None
        except OSError as error:
            raise ServiceError(f"the upload cannot be stored: {error.strerror or error}") from None
        finally:
            shutil.rmtree(folder, ignore_errors=True)
            self._slots.release()

    def resolve_path(self, job_key: str, path: str) -> str:
        """Return the absolute path of a text `upload:<sha256>/<path>`; other paths are unchanged.

        Raises SpecError where there is no such upload, or where the path leaves it; the error names
        the job's `job_key`.
        """
        if not path.startswith(PREFIX):
            return path
        digest, _, inner = path.removeprefix(PREFIX).partition("/")
        _check_digest(digest)
        if ".." in inner.split("/") or inner.startswith("/"):
            raise SpecError("the path leaves its upload", path=job_key, got=path)
        with self._lock:
            if not self._mark_used_if_stored(digest):
                raise SpecError(
                    "there is no such upload",
                    path=job_key,
                    got=digest,
                    hint="submit again: it is sent anew",
                )
        return str(self._folder / digest / "files" / inner)

    def _mark_used_if_stored(self, digest: str) -> bool:
        """Record that the upload with this digest was used now; return whether there is one."""
        _check_digest(digest)
        try:
            os.utime(self._folder / digest, (now_s := self._clock(), now_s))
        except FileNotFoundError:
            return False
        return True

    def _remove_unused_uploads(self, needed_bytes: int) -> None:
        """Remove uploads that no live job names: those unused for long, then the oldest until
        `needed_bytes` are free.
        """
        used = set(self._used())
        now_s = self._clock()
        uploads = list[tuple[float, int, Path]]()
        for path in self._folder.iterdir():
            last_s = path.lstat().st_mtime
            if path.name.startswith("."):
                if last_s < now_s - GRACE_S:  # of a service that was killed
                    _remove_upload(path)
            elif path.name not in used and last_s < now_s - KEPT_S:
                _remove_upload(path)
            else:
                uploads.append((last_s, _size_bytes(path), path))
        total_bytes = sum(size_bytes for _, size_bytes, _ in uploads) + needed_bytes
        for last_s, size_bytes, path in sorted(uploads):
            if total_bytes <= TOTAL_BYTES_MAX:
                return
            if path.name not in used and last_s < now_s - GRACE_S:
                _remove_upload(path)
                total_bytes -= size_bytes
        if total_bytes > TOTAL_BYTES_MAX:
            raise ServiceError(
                f"uploads that jobs use take {TOTAL_BYTES_MAX / 2**30:.0f} GiB: wait until some of them have ended, "
                "or put data on the service's machine and name its absolute path"
            )


def _check_digest(digest: str) -> None:
    if not DIGEST.fullmatch(digest):
        raise SpecError("not a SHA-256", got=digest, allowed="64 hexadecimal digits")


def _size_bytes(upload: Path) -> int:
    try:
        return int((upload / "size").read_text())
    except (OSError, ValueError):
        return 0


def _remove_upload(path: Path) -> None:
    if path.is_dir():
        shutil.rmtree(path, ignore_errors=True)
    else:
        path.unlink(missing_ok=True)
