"""Cleans up after an attempt on a node: ends processes with its mark, and removes swap files of its ranks.

Standard library only.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from orchestrator.backends.attempts.durable import open_untrusted, read_json
from orchestrator.backends.attempts.process_census import MARK, marked_processes
from orchestrator.specs.run import AttemptFolder, training_run_from_json


def mark_of(folder: AttemptFolder, node: str) -> str:
    """Return the mark that all of the attempt's processes on this node carry; unique across homes."""
    return f"{folder.path}@{node}"


def clean_up(mark: str, attempt_folder: str, sessions: Sequence[int] = ()) -> None:
    """End every process that an attempt left on this node, and remove its ranks' swap files here."""
    kill_marked(mark, sessions)
    folder = _swap_folder(AttemptFolder(attempt_folder).run)
    if folder is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or a newer attempt swaps beside it
        folder.parent.rmdir()


def _swap_folder(path: Path) -> Path | None:
    """The swap folder of a run that this service described; None for a script, or a file of somebody else's."""
    try:
        with open_untrusted(path) as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
        return training_run_from_json(read_json(path)).swap_folder if is_ours else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def kill_marked_below(home: Path) -> None:
    """SIGKILL every process of this user that a launcher of this home started on this node."""
    below = f"{MARK}={home}{os.sep}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if any(
                variable.startswith(below)
                for variable in (entry / "environ").read_bytes().split(b"\0")
            ):
                os.kill(int(entry.name), signal.SIGKILL)


def kill_marked(mark: str, sessions: Sequence[int] = ()) -> int:
    """SIGKILL every process of this user with the launcher's mark or in a session of its ranks; return the number.

    Reaches processes that outlived their rank (loader workers, daemons). Never ends the caller.
    """
    ended = 0
    for entry in marked_processes(mark, sessions):
        with contextlib.suppress(OSError):  # gone meanwhile
            os.kill(int(entry.name), signal.SIGKILL)
            ended += 1
    return ended
