"""Files that survive a crash: written whole or not at all. Standard library only."""

from __future__ import annotations

import os
import threading
from pathlib import Path


def write_durably(path: Path, text: str) -> None:
    """Replace `path` by `text`, whole or not at all, and have it on the disk."""
    temporary = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    with temporary.open("w") as file:
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
