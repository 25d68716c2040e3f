"""Keeps Ray on the loopback interface, and runs its command there.

python -m orchestrator.backends.ray.loopback start --head ...
"""

from __future__ import annotations

import sys

LOOPBACK = "127.0.0.1"


def main() -> None:
    """Run Ray's command line with 127.0.0.1 as the address of this machine."""
    stay_on_loopback()
    from ray.scripts.scripts import main as ray_command

    sys.exit(ray_command())  # type: ignore[no-untyped-call]


def stay_on_loopback() -> None:
    """Make Ray of this process call this machine 127.0.0.1.

    Ray replaces a given 127.0.0.1 by the address of the default route (`ray/_private/services.py`,
    resolve_ip_for_localhost) and then listens on every interface; told that it is 127.0.0.1, all of it stays there.
    """
    from ray._private import services

    services.get_node_ip_address = lambda address=None: LOOPBACK  # noqa: ARG005


if __name__ == "__main__":
    main()
