"""Hides the service's environment from other processes of its user. Standard library only."""

from __future__ import annotations

import ctypes
import json
import os
import sys

from orchestrator.backends.environment import select_inherited

# descriptor of the whole environment, for the process that is executed again
HANDED = "ORC_ENVIRONMENT"
PR_SET_DUMPABLE = 4


def reexecute_without_secret_variables() -> None:
    """Execute this process again with only the variables that jobs inherit; restore the others in
    its memory alone.

    /proc/PID/environ shows the variables with which a process was executed. After this call that
    file, the memory and the descriptors are closed to other processes of this user except root's,
    and no core is dumped (prctl(2), PR_SET_DUMPABLE).
    """
    descriptor_text = os.environ.pop(HANDED, None)
    if descriptor_text is None:
        descriptor = os.memfd_create("environment", 0)
        with os.fdopen(os.dup(descriptor), "w") as file:
            json.dump(dict(os.environ), file)
        command = [sys.executable, *sys.orig_argv[1:]]
        os.execve(command[0], command, {**select_inherited(os.environ), HANDED: str(descriptor)})
    ctypes.CDLL(None).prctl(PR_SET_DUMPABLE, 0, 0, 0, 0)
    with os.fdopen(int(descriptor_text), "r") as file:
        file.seek(0)
        os.environ.update(json.load(file))
