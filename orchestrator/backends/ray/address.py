"""Runs Ray's command line so that Ray uses one fixed address of this machine.

python -m orchestrator.backends.ray.address 127.0.0.1 start --head ...
"""

from __future__ import annotations

import os
import sys

from orchestrator.backends.ray.lean import PLAINLY, patch_ray_or_explain

LOOPBACK = "127.0.0.1"


def run_ray_command() -> None:
    """Run Ray's command line; the first argument is the address that Ray uses for this machine."""
    force_node_address(sys.argv.pop(1))
    if PLAINLY not in os.environ and (reason := patch_ray_or_explain()) is not None:
        print(f"Ray starts with all of its processes: {reason}", flush=True)
    from ray.scripts.scripts import main as ray_command

    sys.exit(ray_command())  # type: ignore[no-untyped-call]


def force_node_address(host: str) -> None:
    """Make Ray in this process use `host` as the address of this machine.

    Ray replaces a given 127.0.0.1 by the address of the default route (`ray/_private/services.py`,
    resolve_ip_for_localhost) and then listens on every interface. With 127.0.0.1 enforced, all of
    Ray's traffic stays on the loopback. A machine with several addresses, or without a default
    route, uses the given one.
    """
    from ray._private import services

    services.get_node_ip_address = lambda address=None: host  # noqa: ARG005


if __name__ == "__main__":
    run_ray_command()
