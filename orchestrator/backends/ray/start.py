"""The `ray` command on the loopback interface: `python -m orchestrator.backends.ray.start start --head ...`."""

from __future__ import annotations

import sys

from orchestrator.backends.ray.cluster import stay_on_loopback


def main() -> None:
    """Run Ray's command line with 127.0.0.1 as the address of this machine."""
    stay_on_loopback()
    from ray.scripts.scripts import main as ray_command

    sys.exit(ray_command())  # type: ignore[no-untyped-call]


if __name__ == "__main__":
    main()
