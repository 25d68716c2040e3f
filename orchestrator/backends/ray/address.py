"""Runs Ray's command line so that Ray uses one fixed address of this machine.

python -m orchestrator.backends.ray.address 127.0.0.1 start --head ...
"""

from __future__ import annotations

import os
import sys

from orchestrator.backends.ray.lean import PLAINLY, make_lean

LOOPBACK = "127.0.0.1"


def main() -> None:
    """Run Ray's command line with the first argument as the address of this machine."""
    stay_at(sys.argv.pop(1))
    if PLAINLY not in os.environ and (reason := make_lean()) is not None:
        print(f"Ray starts with all of its processes: {reason}", flush=True)
    from ray.scripts.scripts import main as ray_command

    sys.exit(ray_command())  # type: ignore[no-untyped-call]


def stay_at(host: str) -> None:
    """Make Ray in this process use `host` as the address of this machine.

    Ray replaces a given 127.0.0.1 by the address of the default route (`ray/_private/services.py`,
    resolve_ip_for_localhost) and then listens on every interface; with 127.0.0.1 enforced, all of it stays there. A
    machine with several addresses, or without a default route, uses the given one.
    """
    from ray._private import services

    services.get_node_ip_address = lambda address=None: host  # noqa: ARG005


if __name__ == "__main__":
    main()
