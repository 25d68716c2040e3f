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
from orchestrator.specs.run import AttemptFolder, JobFolder, find_upload, uploads_folder

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

    def variables(self, home: Path) -> dict[str, str]:
        """Return default environment variables of the user's processes. The job's own variables override them."""
        user_home = home / USERS / self.name
        cache = str(user_home / ".cache")
        return {
            "HOME": str(user_home),
            "USER": self.name,
            "LOGNAME": self.name,
            "XDG_CACHE_HOME": cache,
        }

    def final_variables(self, home: Path) -> dict[str, str]:
        """Return the variables of the user's processes that win over those of the job and the service."""
        extensions = str(home / USERS / self.name / "torch_extensions")
        return {"TORCH_EXTENSIONS_DIR": extensions, RUN_AS: f"{self.uid}:{self.gid}"}


def identity_of(name: str, users: Mapping[str, UserSpec], source: str) -> Identity | None:
    """Return the system user of a user's processes; None for the service's own.

    Raises SpecError, which names the job's `source`, for a user without a user id.
    """
    if not users or name in ("", _own_name()):
        return None
    user = users.get(name)
    if user is None:
        raise SpecError(
            "the user has no user id here",
            source=source,
            path="user",
            got=name,
            hint="the cluster file's `users` gives each user a user id, as whom jobs run",
        )
    return Identity(name=name, uid=user.uid, gid=user.uid if user.gid is None else user.gid)


def access_of(job: Job, users: Mapping[str, UserSpec], python: str) -> FileAccess:
    """Return the rights by which the files of a job are searched: those of its user.

    For a user who is not in the cluster file any more they are the rights of the system user nobody.
    """
    try:
        identity = identity_of(job.user, users, job.id)
    except SpecError:
        return FileAccess(python, NOBODY)
    return FileAccess(python, None if identity is None else (identity.uid, identity.gid))


def open_home(home: Path) -> None:
    """Set permissions so that other users' ranks reach only their own folders."""
    os.umask(0o077)
    for name in SHARED:
        (home / name).mkdir(exist_ok=True)
    for entry in (*home.iterdir(), *(home / "jobs").iterdir()):
        if not entry.is_symlink() and entry.stat().st_gid == os.getegid():
            entry.chmod(stat.S_IMODE(entry.stat().st_mode) & 0o700)
    for folder in (home, *(home / name for name in SHARED)):
        folder.chmod(ENTER)


def hand_over(
    identity: Identity, home: Path, job: Job, number: int, request: LaunchRequest
) -> None:
    """Give the user ownership of what the attempt's ranks write, and read access to their inputs. Raises OSError."""
    folder = JobFolder(home, job.id)
    attempt = folder.attempt(number)
    for file, _ in request.files:
        if Path(file).parent == attempt.path:
            Path(file).chmod(0o644)
    folder.epoch.chmod(0o644)
    for owned in (home / USERS / identity.name, *_written_by_ranks(folder, attempt)):
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
            _show(upload[0], uploads_folder(home))


def _written_by_ranks(folder: JobFolder, attempt: AttemptFolder) -> Iterator[Path]:
    yield from (folder.output, folder.checkpoints, folder.path / "data", attempt.output)
    yield from (path for path in (folder.workdir, attempt.path / "work") if path.is_dir())


def _show(upload: Path, uploads: Path) -> None:
    """Let every user who knows its digest read an upload."""
    for path in (*reversed(upload.relative_to(uploads).parents), upload.relative_to(uploads)):
        (uploads / path).chmod(ENTER)
    for path in upload.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or os.access(path, os.X_OK) else 0o644)


def _own_name() -> str:
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())
