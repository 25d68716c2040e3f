"""Names of checkpoints on disk, and which of them count. Standard library only: the service asks here too.

step-<8 digits>/                   complete: renamed into place by rank 0 after every rank had written
.writing-<epoch>-step-<8 digits>/  being written by the attempt with that epoch, or left by it
"""

from __future__ import annotations

import re
import shutil
from pathlib import Path

_COMPLETE = re.compile(r"step-(\d{8})")
_WRITING = re.compile(r"\.writing-(\d+)-step-\d{8}")
_METADATA = ".metadata"  # written last by torch.distributed.checkpoint


def complete_path(checkpoints: Path, step: int) -> Path:
    """Where the complete checkpoint of `step` stands."""
    return checkpoints / f"step-{step:08d}"


def writing_path(checkpoints: Path, epoch: int, step: int) -> Path:
    """Where attempt `epoch` writes the checkpoint of `step` before it is complete."""
    return checkpoints / f".writing-{epoch}-step-{step:08d}"


def step_of(checkpoint: Path) -> int:
    """The optimizer steps behind a complete checkpoint."""
    match = _COMPLETE.fullmatch(checkpoint.name)
    assert match, f"{checkpoint} is not the name of a complete checkpoint"
    return int(match[1])


def complete(checkpoints: Path) -> list[Path]:
    """Every complete checkpoint, oldest first; empty where the folder does not exist."""
    if not checkpoints.is_dir():
        return []
    found = (path for path in checkpoints.iterdir() if _COMPLETE.fullmatch(path.name))
    return sorted(path for path in found if (path / _METADATA).is_file())


def latest_complete(checkpoints: Path) -> Path | None:
    """The complete checkpoint with the most steps, or None; unfinished ones are never returned."""
    return max(complete(checkpoints), key=step_of, default=None)


def is_stale(epoch_file: Path, epoch: int) -> bool:
    """Whether a newer attempt than `epoch` exists: then this one may publish nothing."""
    return epoch_file.is_file() and int(epoch_file.read_text()) > epoch


def publish(checkpoints: Path, epoch: int, step: int, keep: int) -> None:
    """Give a fully written checkpoint its name, then remove all but the newest `keep`."""
    target = complete_path(checkpoints, step)
    if target.exists():  # an unreadable one from before: the new one has the same content
        shutil.rmtree(target)
    writing_path(checkpoints, epoch, step).rename(target)
    for old in complete(checkpoints)[:-keep]:
        shutil.rmtree(old, ignore_errors=True)


def remove_unfinished(checkpoints: Path, epoch: int) -> None:
    """Remove what attempts up to `epoch` began to write and did not finish."""
    if not checkpoints.is_dir():
        return
    for path in checkpoints.iterdir():
        match = _WRITING.fullmatch(path.name)
        if match and int(match[1]) <= epoch:
            shutil.rmtree(path, ignore_errors=True)
