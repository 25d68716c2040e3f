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
from orchestrator.backends.attempts.process_census import MARK, iterate_marked_processes
from orchestrator.specs.run import AttemptFolder, parse_training_run_json


def make_process_mark(folder: AttemptFolder, node: str) -> str:
    """Return the text by which all of the attempt's processes on this node are recognised; unique
    across home folders.
    """
    return f"{folder.path}@{node}"


def end_leftover_processes(
    mark_text: str, attempt_folder: str, session_ids: Sequence[int] = ()
) -> None:
    """End every process that an attempt left on this node, and remove its ranks' swap files here.

    `mark_text` is what `make_process_mark` returns. `session_ids` are process ids of ranks, each
    the leader of a session.
    """
    kill_marked_processes(mark_text, session_ids)
    folder = _find_swap_folder(AttemptFolder(attempt_folder).run)
    if folder is None:
        return
    shutil.rmtree(folder, ignore_errors=True)
    with contextlib.suppress(OSError):  # not there, or a newer attempt swaps beside it
        folder.parent.rmdir()


def _find_swap_folder(run_file: Path) -> Path | None:
    """Return the swap folder that an attempt's run file names.

    None for a script, or for a file that this service's user did not write.
    """
    try:
        with open_untrusted(run_file) as file:
            is_ours = os.fstat(file.fileno()).st_uid == os.geteuid()
        return parse_training_run_json(read_json(run_file)).swap_folder if is_ours else None
    except (OSError, ValueError, TypeError, LookupError, AttributeError):
        return None


def kill_processes_of_home(home: Path) -> None:
    """SIGKILL every process of this system user that a launcher of this home started on this node."""
    below = f"{MARK}={home}{os.sep}".encode()
    for entry in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # gone meanwhile, or another user's
            if any(
                variable.startswith(below)
                for variable in (entry / "environ").read_bytes().split(b"\0")
            ):
                os.kill(int(entry.name), signal.SIGKILL)


def kill_marked_processes(mark_text: str, session_ids: Sequence[int] = ()) -> int:
    """SIGKILL every process of this system user that has the launcher's mark or is in one of these
    sessions; return how many.

    These include processes that outlived their rank (data loaders, daemons), and never the caller.
    """
    ended = 0
    for entry in iterate_marked_processes(mark_text, session_ids):
        with contextlib.suppress(OSError):  # gone meanwhile
            os.kill(int(entry.name), signal.SIGKILL)
            ended += 1
    return ended
