"""The `Backend` of production: attempts on a Ray cluster."""

from __future__ import annotations

import time
from collections.abc import Callable
from pathlib import Path

import ray

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.ray import connection
from orchestrator.backends.ray.launchers import RayLaunchers
from orchestrator.backends.ray.nodes import RayNodes
from orchestrator.specs.cluster import ClusterSpec


class RayBackend(ProcessBackend):
    """Connection to one Ray cluster. A process holds at most one."""

    def __init__(self, home: Path, cluster: ClusterSpec, address: str, clock: Callable[[], float] = time.time) -> None:
        """Raises ServiceError where Ray does not answer at `address`."""
        connection.connect(address, home)
        super().__init__(home, cluster, RayNodes(cluster), RayLaunchers(), clock)

    def close(self) -> None:
        """Stop watching and disconnect; running attempts continue."""
        super().close()
        ray.shutdown()
