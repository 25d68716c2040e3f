"""How does `orc rehearse` make a rank fail for real?"""

from __future__ import annotations

import os
import signal
import time

ORPHAN_S = 30.0  # how long a rank waits to be taken down with its launcher


def raise_fault(kind: str) -> None:
    """Make the failure named by a FaultKind happen in this process, now.

    `oom` raises torch.OutOfMemoryError. `kill`, `node` and `hang` do not return; `preempt` returns where the script
    handles SIGTERM.
    """
    if kind == "oom":
        import torch  # only a process that trains with torch gets here

        raise torch.OutOfMemoryError("Device out of memory (rehearsed: raised on purpose, nothing was allocated).")
    if kind == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "node":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(ORPHAN_S)
        os._exit(1)
    elif kind == "hang":
        while True:  # unbounded on purpose: ending it is the watchdog's part of the rehearsal
            time.sleep(3600)
    else:
        raise AssertionError(f"unknown fault {kind!r}")
