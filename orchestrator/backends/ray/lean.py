"""Starts Ray nodes with only the processes that placement groups and actors need.

A standard node has four Python processes more: the API server and the autoscaler's monitor (head), and the agents of
the dashboard and of runtime environments. Nothing here uses them. Both agents must exist, since a raylet ends with its
agent: each is a stand-in, which sleeps. Ray 2.60 has no setting for this, so private functions are replaced.
`patch_ray_or_explain` refuses a Ray that lacks them, and `embedded` starts a standard node where the lean start fails.

An actor or a task with a `runtime_env` would wait for ever on such a node. No code of ours passes any.
"""

from __future__ import annotations

import ctypes
import inspect
import signal
import subprocess
import sys
from collections.abc import Callable
from typing import Any

PLAINLY = "ORCHESTRATOR_RAY_PLAINLY"  # in the environment of a start: all processes of Ray
UNUSED_PORT = -1  # as Ray's own minimal dashboard agent writes it (ray/dashboard/agent.py)
AGENTS = {
    "--dashboard_agent_command": (
        "METRICS_AGENT_PORT_NAME",
        "METRICS_EXPORT_PORT_NAME",
        "DASHBOARD_AGENT_LISTEN_PORT_NAME",
    ),
    "--runtime_env_agent_command": ("RUNTIME_ENV_AGENT_PORT_NAME",),
}
PR_SET_PDEATHSIG = 1  # linux/prctl.h


def patch_ray_or_explain() -> str | None:
    """Replace functions of Ray in this process, so that its nodes start fewer processes; return
    None.

    Returns the reason where the functions cannot be replaced.
    """
    from ray import _raylet
    from ray._private import services

    ports: list[str] = []
    for names in AGENTS.values():
        ports.extend(names)
    missing = [name for name in (*ports, "persist_port") if not hasattr(_raylet, name)]
    missing += [
        name for name in ("start_api_server", "start_ray_process") if not hasattr(services, name)
    ]
    missing += [flag for flag in AGENTS if flag not in inspect.getsource(services)]
    if missing:
        return f"Ray has no {', '.join(missing)}"

    start_process: Callable[..., Any] = services.start_ray_process
    persist_port: Callable[..., None] = getattr(_raylet, "persist_port")  # noqa: B009 - a compiled module without types

    def start_lean_process(
        command: list[str], process_type: str, *rest: Any, **settings: Any
    ) -> Any:
        if process_type == "raylet":
            command = [_with_stand_in(word, command) for word in command]
        return start_process(command, process_type, *rest, **settings)

    def _with_stand_in(word: str, command: list[str]) -> str:
        flag, _, _ = word.partition("=")
        if flag not in AGENTS:
            return word
        session_dir = _get_flag_value("--session_dir", command)
        node_id = _get_flag_value("--node_id", command)
        for name in AGENTS[flag]:  # the raylet waits for these files
            persist_port(session_dir, node_id, getattr(_raylet, name), UNUSED_PORT)
        stand_in = [
            sys.executable,
            "-I",
            "-S",
            __file__,
            session_dir,
        ]  # `embedded` finds Ray's processes by the folder
        return f"{flag}={subprocess.list2cmdline(stand_in)}"

    services.start_ray_process = start_lean_process
    services.start_api_server = lambda *_, **__: (None, None)
    return None


def _get_flag_value(flag: str, command: list[str]) -> str:
    return next(word for word in command if word.startswith(f"{flag}=")).partition("=")[2]


def sleep_until_parent_ends() -> None:
    """Sleep until the parent process ends."""
    ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    while True:
        signal.pause()


if __name__ == "__main__":
    sleep_until_parent_ends()
