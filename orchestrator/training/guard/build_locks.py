"""Let the lock of a C++ extension's build end with the process that holds it. Standard library only.

torch makes an empty file while it compiles an extension, and every other process waits until the file is gone: after a
kill, for ever (torch/utils/file_baton.py, 2.13). Here the holder also locks the file with flock(2), which the kernel
undoes when it ends. A file that nobody holds is removed by the next one that wants it.
"""

from __future__ import annotations

import contextlib
import fcntl
import importlib
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

SETTLE_S = 3.0  # between torch's making of the file and our lock on it a process may be slow
UNLOCKED_S = 900.0  # where a file system has no locks: a build takes up to 350 s on two busy cores


def install_build_locks() -> None:
    """Replace torch's locks for building C++ extensions in this process by ours. torch must be
    imported.
    """
    baton: Any = importlib.import_module("torch.utils.file_baton").FileBaton
    make = baton.try_acquire

    def try_acquire(self: Any) -> bool:
        if not make(self) and not (_remove_if_unheld(self.lock_file_path) and make(self)):
            return False
        with contextlib.suppress(OSError):  # a file system without locks
            fcntl.flock(self.fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
        return True

    def wait(self: Any) -> None:
        while os.path.exists(self.lock_file_path):
            if _remove_if_unheld(self.lock_file_path):
                raise RuntimeError(f"the build of {self.lock_file_path} was killed: start it again")
            time.sleep(self.wait_seconds)

    baton.try_acquire = try_acquire
    baton.wait = wait


def _remove_if_unheld(path: str) -> bool:
    """Remove the lock file if no process has held it for SETTLE_S seconds; return whether it was
    removed.
    """
    until_s = time.monotonic() + SETTLE_S
    while True:
        with _open_unheld(path) as is_left:
            if not is_left:
                return False
            if time.monotonic() >= until_s:
                os.remove(path)  # whoever else found it left waits for our lock on it
                return True
        time.sleep(SETTLE_S / 10)


@contextlib.contextmanager
def _open_unheld(path: str) -> Iterator[bool]:
    """Open a context in which this process locks the file; it yields whether no other process holds
    the file.

    The other process may be unguarded, without our lock.
    """
    try:
        file = os.open(path, os.O_RDONLY)
    except OSError:
        yield False
        return
    try:
        yield _is_unheld(path, file)
    finally:
        os.close(file)


def _is_unheld(path: str, file_descriptor: int) -> bool:
    try:
        fcntl.flock(file_descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return False
    except OSError:
        return time.time() - os.fstat(file_descriptor).st_mtime > UNLOCKED_S
    try:
        if os.stat(path).st_ino != os.fstat(file_descriptor).st_ino:  # made anew meanwhile
            return False
    except OSError:
        return False
    return not _is_open_elsewhere(os.fstat(file_descriptor))


def _is_open_elsewhere(status: os.stat_result) -> bool:
    """Return whether another process of this machine has the file open, as far as this user may see
    its processes.
    """
    for folder in Path("/proc").glob("[0-9]*/fd"):
        if folder.parent.name == str(os.getpid()):
            continue
        with contextlib.suppress(OSError):  # it ended, or is another user's
            for entry in folder.iterdir():
                with contextlib.suppress(OSError):
                    other = entry.stat()
                    if (other.st_dev, other.st_ino) == (status.st_dev, status.st_ino):
                        return True
    return False
