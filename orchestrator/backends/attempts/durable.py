"""Crash-safe files: written completely or not at all. Standard library only."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import threading
from pathlib import Path
from typing import BinaryIO

from orchestrator.specs.frozen import frozen
from orchestrator.specs.json_object import JsonObject

REPORT_BYTES_MAX = 2**20  # of a JSON file that a rank wrote
DISK_FULL = (errno.ENOSPC, errno.EDQUOT)
# of the home folder: no fault of an attempt
DISK_AWAY = (*DISK_FULL, errno.EROFS, errno.EIO)
EPOCH_BYTES_MAX = 32
PRIVATE = 0o600  # mode of a file that its owner alone may read


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace `path` by `text` atomically, and sync it to disk. The umask applies to `mode`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with contextlib.suppress(FileNotFoundError):
        # of an earlier process of this id, or planted: it is not written through
        temporary.unlink()
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def open_untrusted(path: Path) -> BinaryIO:
    """Open a file that a user's rank may have written, for reading. It never follows links or
    blocks on pipes.

    Raises OSError.
    """
    return os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")


def read_json(path: Path) -> JsonObject:
    """Return the JSON object in a file. Raises OSError, and ValueError for another content."""
    with open_untrusted(path) as file:
        text = file.read(REPORT_BYTES_MAX + 1)
    if len(text) > REPORT_BYTES_MAX:
        raise ValueError(f"it has more than {REPORT_BYTES_MAX} bytes")
    try:
        data = json.loads(text)
    except RecursionError:
        raise ValueError("it is nested too deeply") from None
    except ValueError:
        raise ValueError("it is no JSON") from None
    if not isinstance(data, dict):
        raise ValueError("it is no JSON object")
    return data


def open_to_append(path: Path) -> BinaryIO:
    """Open a file for unbuffered appending, in a folder that a rank may write to. Never follows links.

    Raises OSError.
    """
    flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW | os.O_NONBLOCK
    return open(os.open(path, flags, 0o666), "ab", buffering=0)


@frozen
class Fence:
    """The fencing number (a counter that grows with each new owner) of the service that owns the
    journal.

    It is stored in a folder that all owners share, as a file's name: an older owner can then never
    replace a newer number.
    """

    folder: str
    number: int

    def store_number(self) -> None:
        """Store the fencing number in the folder durably, and remove older numbers. Raises
        OSError.
        """
        folder = Path(self.folder)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / str(self.number)).touch()
        for older in self._list_stored_numbers():
            if older < self.number:
                (folder / str(older)).unlink(missing_ok=True)

    @property
    def is_superseded(self) -> bool:
        """Whether a newer owner of the journal has stored its number."""
        return max(self._list_stored_numbers(), default=0) > self.number

    def _list_stored_numbers(self) -> list[int]:
        with contextlib.suppress(FileNotFoundError):
            return [int(name) for name in os.listdir(self.folder) if name.isdecimal()]
        return []


def read_attempt_number(path: Path) -> int:
    """Return the number of the job's newest attempt from a file; 0 where the file is missing or
    holds no number.
    """
    try:
        with path.open() as file:
            return int(file.read(EPOCH_BYTES_MAX))
    except (
        FileNotFoundError,
        ValueError,
    ):  # ValueError: a job that runs as the service wrote to it
        return 0
