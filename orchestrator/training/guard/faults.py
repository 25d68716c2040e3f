"""How does `orc rehearse` make a rank fail for real?"""

from __future__ import annotations

import os
import signal
import time

ORPHAN_S = 30.0  # how long a rank waits to be taken down with its launcher


def raise_fault(kind: str, virtual_capacity_bytes: int | None) -> None:
    """Make the failure named by a FaultKind happen in this process, now.

    `oom` asks the device for all of its memory. `kill`, `node` and `hang` do not return; `preempt` returns where the
    script handles SIGTERM.
    """
    if kind == "oom":
        _ask_for_everything(virtual_capacity_bytes)
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


def _ask_for_everything(virtual_capacity_bytes: int | None) -> None:
    import torch  # only a process that trains with torch gets here

    if virtual_capacity_bytes is not None:
        torch.empty(virtual_capacity_bytes, dtype=torch.uint8)  # beside the model, which is there already
    elif torch.cuda.is_available():
        torch.empty(torch.cuda.get_device_properties().total_memory, dtype=torch.uint8, device="cuda")
    raise torch.cuda.OutOfMemoryError("Device out of memory (rehearsed: this device has no memory of its own).")
