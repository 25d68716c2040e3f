"""Cleans up after an attempt on a node: ends processes with its mark, and removes swap files of its ranks.

Standard library only.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
from collections.abc import Sequence
from pathlib import Path

from orchestrator.backends.attempts.process_census import MARK, marked_processes
from orchestrator.specs.run import AttemptFolder, training_run_from_json


def mark_of(folder: AttemptFolder, node: str) -> str:
    """Return the mark that all of the attempt's processes on this node carry; unique across homes."""
    return f"{folder.path}@{node}"


def clean_up(mark: str, attempt_folder: str, sessions: Sequence[int] = ()) -> None:
    """End every process that an attempt left on this node, and remove its ranks' swap files here."""
    kill_marked(mark, sessions)
    path = AttemptFolder(attempt_folder).run
    # a script has none
    run = training_run_from_json(json.loads(path.read_text())) if path.exists() else None
    if run is None or run.swap_folder is None:
        return
    shutil.rmtree(run.swap_folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or a newer attempt swaps beside it
        run.swap_folder.parent.rmdir()


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
