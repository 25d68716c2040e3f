"""Deletion of ended jobs' files: the removable parts of a job's folder, with kind and size.

trash/<job id>.<16 hex digits>   a part that was renamed out of its job's folder, and is deleted next
jobs/<job id>/removed.json       {part: Removal} of the parts that have left

No link is followed, and no other file system entered. A rank may own what is deleted, but not the folders above it.
"""

from __future__ import annotations

import json
import os
import re
import secrets
import shutil
import stat
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from datetime import datetime
from pathlib import Path

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.specs.frozen import frozen
from orchestrator.specs.keep import PartKind
from orchestrator.specs.run import JobFolder
from orchestrator.training.checkpoint.folder import list_superseded

TRASH = "trash"
BLOCK_BYTES = 512  # of st_blocks
_IN_TRASH = re.compile(r".+\.[0-9a-f]{16}")


@frozen
class Part:
    """A file or folder of an ended job that is removed as a whole, with its kind and size."""

    job: str
    path: str  # below the job's folder
    kind: PartKind
    size_bytes: int
    ended_at_s: float  # of the job, in seconds since 1970


@frozen
class Removal:
    """Record of the removal of one part: time, reason, user and bytes."""

    at_s: float
    why: str
    by: str
    size_bytes: int


def list_removable_parts(
    home: Path, job_id: str, status: str, ended_at_s: float, on_entry: Callable[[], None]
) -> list[Part]:
    """Return the parts of an ended job's folder that exist and may be removed. Links are left out.

    Calls `on_entry` for each directory entry that it reads.
    """
    folder = JobFolder(home, job_id)
    output = PartKind.RESULTS if status == "succeeded" else PartKind.UNSUCCESSFUL
    kinds = {folder.path / "data": PartKind.SUPERSEDED, folder.path / "attempts": PartKind.LOGS}
    kinds |= {folder.output: output, folder.workdir: output}
    if _is_real_folder(folder.checkpoints):
        kinds |= dict.fromkeys(sorted(folder.checkpoints.iterdir()), output)
        kinds |= dict.fromkeys(list_superseded(folder.checkpoints), PartKind.SUPERSEDED)
    return [
        Part(
            job=job_id,
            path=str(path.relative_to(folder.path)),
            kind=kind,
            size_bytes=measure_size_bytes(path, on_entry),
            ended_at_s=ended_at_s,
        )
        for path, kind in kinds.items()
        if _is_real_folder(path)
    ]


def measure_size_bytes(path: Path, on_entry: Callable[[], None]) -> int:
    """Return the disk bytes of a file or folder tree; entries that vanish meanwhile count as 0.

    Calls `on_entry` for each directory entry that it reads.
    """
    total = 0
    folders = list[str]()
    device = None
    with suppress(OSError):
        first = path.lstat()
        total = first.st_blocks * BLOCK_BYTES
        device = first.st_dev
        folders = [str(path)] if stat.S_ISDIR(first.st_mode) else []
    while folders:
        with suppress(OSError), os.scandir(folders.pop()) as entries:
            for entry in entries:
                on_entry()
                with suppress(OSError):
                    entry_stat = entry.stat(follow_symlinks=False)
                    if entry_stat.st_dev == device:
                        total += entry_stat.st_blocks * BLOCK_BYTES
                        if stat.S_ISDIR(entry_stat.st_mode):
                            folders.append(entry.path)
    return total


def move_to_trash(home: Path, part: Part, removal: Removal) -> None:
    """Record the removal of a part, then move the part to the trash. On OSError the part stays in
    place.

    On a full disk the record may be lost, and the part is moved all the same.
    """
    folder = JobFolder(home, part.job).path
    parent, name = os.path.split(part.path)
    (home / TRASH).mkdir(mode=0o700, exist_ok=True)
    with _open_folder(folder / parent) as source, _open_folder(home / TRASH) as trash:
        os.lstat(name, dir_fd=source)
        with suppress(OSError):
            _record_removal(folder, part.path, removal)
        os.rename(name, f"{part.job}.{secrets.token_hex(8)}", src_dir_fd=source, dst_dir_fd=trash)


def empty_trash_and_list_errors(home: Path, parts_max: int) -> list[str]:
    """Delete at most `parts_max` parts in the trash. Return one error text for each part that
    cannot be deleted.
    """
    problems = list[str]()
    deleted = 0
    with suppress(FileNotFoundError), _open_folder(home / TRASH) as trash:
        for name in filter(_IN_TRASH.fullmatch, sorted(os.listdir(trash))):
            if deleted == parts_max:
                break
            try:
                if stat.S_ISDIR(os.lstat(name, dir_fd=trash).st_mode):
                    shutil.rmtree(
                        name, dir_fd=trash
                    )  # resists links that are swapped in (shutil documentation)
                else:
                    os.unlink(name, dir_fd=trash)
                deleted += 1
            except OSError as error:
                problems.append(f"{TRASH}/{name} cannot be deleted: {error.strerror}")
    return problems


def describe_removals(home: Path, job_id: str, part_path: str | None = None) -> list[str]:
    """Return one sentence for each removed part of the job's folder: when and why. With
    `part_path`, only for the part at that path.
    """
    folder = JobFolder(home, job_id).path
    return [
        f"{part} was removed on {datetime.fromtimestamp(removal.at_s).astimezone():%Y-%m-%d %H:%M %Z} by {removal.why}"
        for part, removal in _read_removals(folder).items()
        if part_path in (None, part) and not os.path.lexists(folder / part)
    ]


def _read_removals(job_folder: Path) -> dict[str, Removal]:
    with suppress(OSError, ValueError, TypeError, AttributeError):  # none, or of another version
        notes = json.loads((job_folder / "removed.json").read_text(encoding="utf-8"))
        return {part: Removal(**note) for part, note in notes.items()}
    return {}


def _record_removal(job_folder: Path, part_path: str, removal: Removal) -> None:
    notes = {
        part: asdict(note)
        for part, note in {**_read_removals(job_folder), part_path: removal}.items()
    }
    write_durably(job_folder / "removed.json", json.dumps(notes, indent=1))


def _is_real_folder(path: Path) -> bool:
    return path.is_dir() and not path.is_symlink()


@contextmanager
def _open_folder(folder: Path) -> Iterator[int]:
    """Open a folder that is no link, and yield its file descriptor. Raises OSError."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)
