"""Files that survive a crash: written whole or not at all. Standard library only."""

from __future__ import annotations

import os
import threading
from pathlib import Path

PRIVATE = 0o600  # mode of a file that its owner alone may read


def write_durably(path: Path, text: str, mode: int = 0o666) -> None:
    """Replace `path` by `text`, whole or not at all, and have it on the disk. The umask cuts `mode`."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, mode)
    with os.fdopen(descriptor, "w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def read_epoch(path: Path) -> int:
    """Number of the job's newest attempt; 0 before the first launch."""
    try:
        return int(path.read_text())
    except FileNotFoundError:
        return 0
