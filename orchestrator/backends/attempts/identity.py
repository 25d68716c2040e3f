"""Runs each user's jobs under the user's own uid, in folders that only the user and the service can open.

home/                       0711, and nothing in it is open but the way to
home/users/<name>/          0700, of the user: HOME, and caches of their own
home/jobs/<id>/             0710, of the user's group
home/jobs/<id>/attempts/N/  01777, of the service: ranks add files, and change none of others
... output, checkpoints, work, workdir, data    of the user
"""

from __future__ import annotations

import os
import pwd
import stat
from collections.abc import Iterator, Mapping
from pathlib import Path

from orchestrator.backends.attempts.launch_request import LaunchRequest
from orchestrator.backends.attempts.launcher import RUN_AS
from orchestrator.backends.attempts.script_output import FileAccess
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.paths import list_paths
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import AttemptFolder, JobFolder, find_upload, get_uploads_folder

USERS = "users"
SHARED = ("jobs", USERS, "uploads")  # folders of the home through which ranks reach their own
NOBODY = 65_534, 65_534  # uid and gid (man 7 user_namespaces: overflowuid)
ENTER = 0o711
ENTER_GROUP = 0o710
ADD = 0o1777


@frozen
class Identity:
    """The system user under which a job's processes run."""

    name: str
    uid: int
    gid: int

    def make_default_variables(self, home: Path) -> dict[str, str]:
        """Return default environment variables of the user's processes. The job's own variables override them."""
        user_home = home / USERS / self.name
        cache = str(user_home / ".cache")
        return {
            "HOME": str(user_home),
            "USER": self.name,
            "LOGNAME": self.name,
            "XDG_CACHE_HOME": cache,
        }

    def make_final_variables(self, home: Path) -> dict[str, str]:
        """Return environment variables of the user's processes that override those of the job and
        the service.
        """
        extensions = str(home / USERS / self.name / "torch_extensions")
        return {"TORCH_EXTENSIONS_DIR": extensions, RUN_AS: f"{self.uid}:{self.gid}"}


def find_identity(
    user_name: str, users: Mapping[str, UserSpec], job_source: str
) -> Identity | None:
    """Return the system user (uid and gid) for a user's processes; None where they run as the
    service's own system user.

    Raises SpecError, which names `job_source` (the job's file), for a user without a user id.
    """
    if not users or user_name in ("", _get_service_user_name()):
        return None
    user = users.get(user_name)
    if user is None:
        raise SpecError(
            "the user has no user id here",
            source=job_source,
            path="user",
            got=user_name,
            hint="the cluster file's `users` gives each user a user id, as whom jobs run",
        )
    return Identity(name=user_name, uid=user.uid, gid=user.uid if user.gid is None else user.gid)


def make_file_access(job: Job, users: Mapping[str, UserSpec], python: str) -> FileAccess:
    """Return the rights (interpreter, uid and gid) with which a job's files are searched: those of
    the job's user.

    A user who is no longer in the cluster file gets the rights of the system user nobody.
    """
    try:
        identity = find_identity(job.user, users, job.id)
    except SpecError:
        return FileAccess(python, NOBODY)
    return FileAccess(python, None if identity is None else (identity.uid, identity.gid))


def open_home(home: Path) -> None:
    """Set permissions of the home so that each user's ranks reach only that user's folders."""
    os.umask(0o077)
    for name in SHARED:
        (home / name).mkdir(exist_ok=True)
    for entry in (*home.iterdir(), *(home / "jobs").iterdir()):
        if not entry.is_symlink() and entry.stat().st_gid == os.getegid():
            entry.chmod(stat.S_IMODE(entry.stat().st_mode) & 0o700)
    for folder in (home, *(home / name for name in SHARED)):
        folder.chmod(ENTER)


def hand_files_to_user(
    identity: Identity, home: Path, job: Job, attempt_number: int, request: LaunchRequest
) -> None:
    """Give the user ownership of what the attempt's ranks write, and read access to their inputs. Raises OSError."""
    folder = JobFolder(home, job.id)
    attempt = folder.attempt(attempt_number)
    for file, _ in request.files:
        if Path(file).parent == attempt.path:
            Path(file).chmod(0o644)
    folder.epoch.chmod(0o644)
    for owned in (home / USERS / identity.name, *_list_rank_folders(folder, attempt)):
        owned.mkdir(exist_ok=True)
        if owned.lstat().st_uid != identity.uid:
            owned.chmod(0o700)
            for path in (*owned.rglob("*"), owned):
                os.chown(path, identity.uid, identity.gid, follow_symlinks=False)
    attempt.path.parent.chmod(ENTER)
    attempt.path.chmod(ADD)  # from here on other ranks of the user may add to it
    os.chown(folder.path, os.geteuid(), identity.gid)
    folder.path.chmod(ENTER_GROUP)
    for _, named in list_paths(job.spec):
        if (upload := find_upload(home, named)) is not None:
            _make_readable(upload[0], get_uploads_folder(home))


def _list_rank_folders(folder: JobFolder, attempt: AttemptFolder) -> Iterator[Path]:
    yield from (folder.output, folder.checkpoints, folder.path / "data", attempt.output)
    yield from (path for path in (folder.workdir, attempt.path / "work") if path.is_dir())


def _make_readable(upload: Path, uploads: Path) -> None:
    """Make an uploaded file tree readable for every user who knows its path, which contains its
    digest.
    """
    for path in (*reversed(upload.relative_to(uploads).parents), upload.relative_to(uploads)):
        (uploads / path).chmod(ENTER)
    for path in upload.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def _get_service_user_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
