"""Names of checkpoints on disk, and which are complete. Standard library only: the service imports it too.

step-<8 digits>/                   complete: renamed into place by rank 0 after every rank had written
step-<8 digits>/manifest           size and CRC-32 of every other file, written last; begins with a CRC-32 of itself
.writing-<epoch>-step-<8 digits>/  being written by the attempt with that epoch, or left by it
.removing-step-<8 digits>/         being removed
damaged-step-<8 digits>/           found damaged on loading; kept for inspection

CRC-32 is the fastest checksum of the standard library that detects every error burst of up to 32 bits. It reaches
3.3 GiB/s on one core (SHA-1 2.2, BLAKE2b 1.4; Adler-32's 4.1 is weak; measured 2026-11). It detects faults of disks
and crashes, not forgery.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import zlib
from collections.abc import Iterable, Mapping
from pathlib import Path

from orchestrator.specs.frozen import frozen

MANIFEST = "manifest"
DAMAGED_KEPT = 2

_COMPLETE = re.compile(r"step-(\d{8})")
_WRITING = re.compile(r"\.writing-(\d+)-step-\d{8}")
_REMOVING = re.compile(r"\.removing-step-\d{8}")
_DAMAGED = re.compile(r"damaged-step-\d{8}")
_READ_BYTES = 2**22


@frozen
class WrittenFile:
    """Size and checksum of a file of a checkpoint."""

    size_bytes: int
    crc32: str  # 8 hexadecimal digits


def get_complete_checkpoint_path(checkpoints: Path, step: int) -> Path:
    """Return the folder of the complete checkpoint of `step`."""
    return checkpoints / f"step-{step:08d}"


def get_unfinished_checkpoint_path(checkpoints: Path, attempt_number: int, step: int) -> Path:
    """Return the folder in which this attempt writes the checkpoint of `step` until it is complete."""
    return checkpoints / f".writing-{attempt_number}-step-{step:08d}"


def read_step_of_checkpoint(checkpoint: Path) -> int:
    """Return the number of optimizer steps of a complete checkpoint, from its name."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not the name of a complete checkpoint"
    return int(match[1])


def list_published(checkpoints: Path) -> list[Path]:
    """Return every folder that is named as a complete checkpoint, oldest first. The files in it are
    not checked.
    """
    return sorted(_match_folders(checkpoints, _COMPLETE))


def list_complete(checkpoints: Path) -> list[Path]:
    """Return every checkpoint whose files all have the sizes in its manifest, oldest first."""
    return [path for path in list_published(checkpoints) if not find_damage(path, read_files=False)]


def find_latest_complete(checkpoints: Path) -> Path | None:
    """Return the complete checkpoint with the most steps; None without one."""
    return next(
        (
            path
            for path in reversed(list_published(checkpoints))
            if not find_damage(path, read_files=False)
        ),
        None,
    )


def list_superseded(checkpoints: Path) -> list[Path]:
    """Return the checkpoints that no restart needs: those older than the newest complete one, and
    unfinished or damaged ones.

    Without a complete one, all published and damaged checkpoints stay.
    """
    newest = find_latest_complete(checkpoints)
    patterns = [_WRITING, _REMOVING] if newest is None else [_WRITING, _REMOVING, _DAMAGED]
    older = (
        []
        if newest is None
        else [
            path
            for path in list_published(checkpoints)
            if read_step_of_checkpoint(path) < read_step_of_checkpoint(newest)
        ]
    )
    return older + [path for pattern in patterns for path in _match_folders(checkpoints, pattern)]


def find_damage(
    checkpoint: Path, *, read_files: bool = True, part_index: int = 0, part_count: int = 1
) -> list[str]:
    """Return defects of a published checkpoint's files, one sentence each; [] if intact.

    Without `read_files`, only sizes are compared. The files are divided into `part_count` parts,
    and only part `part_index` is checked, so that each rank can check its own.
    """
    try:
        files = read_manifest(checkpoint)
    except (OSError, ValueError) as error:
        return [f"{MANIFEST}: {_format_error(error)}"]
    mine = sorted(files)[part_index::part_count]
    return [
        problem
        for name in mine
        for problem in _find_file_damage(checkpoint / name, files[name], read_files)
    ]


def read_manifest(checkpoint: Path) -> dict[str, WrittenFile]:
    """Return {file name: size and checksum} of a checkpoint.

    Raises OSError or ValueError if the manifest is damaged.
    """
    crc, _, text = (checkpoint / MANIFEST).read_text().partition("\n")
    if crc != _format_checksum(zlib.crc32(text.encode())):
        raise ValueError("its content is not what was written")
    try:
        files = {name: WrittenFile(**written) for name, written in json.loads(text).items()}
    except (AttributeError, RecursionError, TypeError):
        raise ValueError("it is no list of files") from None
    for name, file in files.items():
        if Path(name).is_absolute() or ".." in Path(name).parts or type(file.size_bytes) is not int:
            raise ValueError(f"{name[:80]!r} is no file of a checkpoint")
    return files


def write_manifest(folder: Path, files: Mapping[str, WrittenFile]) -> None:
    """Write and fsync the manifest of a checkpoint whose files are on disk."""
    entries = {
        name: {"size_bytes": file.size_bytes, "crc32": file.crc32} for name, file in files.items()
    }
    text = json.dumps(entries, indent=1, sort_keys=True)
    with (folder / MANIFEST).open("w") as manifest:
        manifest.write(f"{_format_checksum(zlib.crc32(text.encode()))}\n{text}")
        manifest.flush()
        os.fsync(manifest.fileno())
    _sync_folder(folder)


def make_manifest_entry(size_bytes: int, crc32: int) -> WrittenFile:
    """Return the manifest entry of a file with this size and zlib.crc32."""
    return WrittenFile(size_bytes=size_bytes, crc32=_format_checksum(crc32))


def has_newer_attempt(number_file: Path, attempt_number: int) -> bool:
    """Return whether the file names a newer attempt (launch of the job) than this one, which then
    must not publish.
    """
    return number_file.is_file() and int(number_file.read_text()) > attempt_number


def publish_checkpoint(checkpoints: Path, attempt_number: int, step: int, keep_count: int) -> None:
    """Rename a written checkpoint to its final name, check it, then remove all but the newest
    `keep_count`.

    Raises OSError if it is damaged; older checkpoints then stay.
    """
    target = get_complete_checkpoint_path(checkpoints, step)
    if (
        target.exists()
    ):  # an earlier attempt, resumed from an older checkpoint, wrote the same content
        _remove_checkpoint(target)
    get_unfinished_checkpoint_path(checkpoints, attempt_number, step).rename(target)
    _sync_folder(checkpoints)
    wrong = find_damage(target, read_files=False)
    if wrong:
        raise OSError(f"{target} is damaged after writing: {'; '.join(wrong)}")
    newest = list_complete(checkpoints)[-keep_count:]
    for old in list_published(checkpoints):
        if read_step_of_checkpoint(old) < read_step_of_checkpoint(newest[0]):
            _remove_checkpoint(old)


def quarantine_checkpoint(checkpoint: Path) -> Path:
    """Rename a damaged checkpoint, and return its new path. Only the newest DAMAGED_KEPT damaged
    ones are kept.
    """
    target = checkpoint.with_name(f"damaged-{checkpoint.name}")
    shutil.rmtree(target, ignore_errors=True)
    checkpoint.rename(target)
    for old in sorted(_match_folders(checkpoint.parent, _DAMAGED))[:-DAMAGED_KEPT]:
        shutil.rmtree(old, ignore_errors=True)
    return target


def remove_unfinished(checkpoints: Path, attempt_number: int) -> None:
    """Remove checkpoints that this attempt and earlier ones left half written or half removed."""
    for path in _match_folders(checkpoints, _WRITING):
        match = _WRITING.fullmatch(path.name)
        if match and int(match[1]) <= attempt_number:
            shutil.rmtree(path, ignore_errors=True)
    for path in _match_folders(checkpoints, _REMOVING):
        shutil.rmtree(path, ignore_errors=True)


def _match_folders(checkpoints: Path, pattern: re.Pattern[str]) -> Iterable[Path]:
    if not checkpoints.is_dir():
        return []
    return [path for path in checkpoints.iterdir() if pattern.fullmatch(path.name)]


def _remove_checkpoint(checkpoint: Path) -> None:
    """Remove a checkpoint, renamed first, so that a partly removed one never looks complete."""
    going = checkpoint.with_name(f".removing-{checkpoint.name}")
    shutil.rmtree(going, ignore_errors=True)
    checkpoint.rename(going)
    shutil.rmtree(going, ignore_errors=True)


def _find_file_damage(path: Path, expected: WrittenFile, reads_content: bool) -> list[str]:
    try:
        size_bytes = path.stat().st_size
        if size_bytes != expected.size_bytes:
            return [f"{path.name}: {size_bytes} bytes instead of {expected.size_bytes}"]
        if reads_content and _crc32(path) != expected.crc32:
            return [f"{path.name}: its content is not what was written (CRC-32)"]
    except (OSError, ValueError) as error:  # ValueError: no name that a file can have
        return [f"{path.name}: {_format_error(error)}"]
    return []


def _crc32(path: Path) -> str:
    crc = 0
    buffer = bytearray(_READ_BYTES)
    with path.open("rb", buffering=0) as file:
        while count := file.readinto(buffer):
            crc = zlib.crc32(memoryview(buffer)[:count], crc)
    return _format_checksum(crc)


def _format_error(error: Exception) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is missing"
    return str(error.strerror if isinstance(error, OSError) else error)


def _format_checksum(crc32: int) -> str:
    return f"{crc32:08x}"


def _sync_folder(folder: Path) -> None:
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
