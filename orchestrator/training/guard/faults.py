"""Faults that `orc rehearse` injects into a rank."""

from __future__ import annotations

import os
import signal
import time

ORPHAN_S = 30.0  # longest wait of a rank for its launcher's end to kill it


def raise_fault(kind: str, virtual_capacity_bytes: int | None) -> None:
    """Inject the fault named by a FaultKind into this process, now.

    `oom` allocates the whole device. `kill`, `node` and `hang` do not return. `preempt` returns if the script handles
    SIGTERM.
    """
    if kind == "oom":
        _allocate_everything(virtual_capacity_bytes)
    if kind == "preempt":
        os.kill(os.getpid(), signal.SIGTERM)
    elif kind == "kill":
        os.kill(os.getpid(), signal.SIGKILL)
    elif kind == "node":
        os.kill(os.getppid(), signal.SIGKILL)
        time.sleep(ORPHAN_S)
        os._exit(1)
    elif kind == "hang":
        while True:  # unbounded on purpose: the rehearsal expects the watchdog to end it
            time.sleep(3600)
    else:
        raise AssertionError(f"unknown fault {kind!r}")


def _allocate_everything(virtual_capacity_bytes: int | None) -> None:
    import torch  # reached only in a process that trains with torch

    if virtual_capacity_bytes is not None:
        torch.empty(virtual_capacity_bytes, dtype=torch.uint8)  # the model is allocated already
    elif torch.cuda.is_available():
        torch.empty(
            torch.cuda.get_device_properties().total_memory, dtype=torch.uint8, device="cuda"
        )
    raise torch.cuda.OutOfMemoryError(
        "Device out of memory (rehearsed: this device has no memory of its own)."
    )
