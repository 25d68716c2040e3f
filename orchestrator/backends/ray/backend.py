"""The production `Backend`: attempts on a Ray cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.watch import Ownership
from orchestrator.backends.ray.link import AgentLink, LinkedLaunchers
from orchestrator.backends.ray.nodes import RayNodes
from orchestrator.specs.cluster import ClusterSpec


class RayBackend(ProcessBackend):
    """Runs attempts on one Ray cluster, which may be unreachable at any time."""

    def __init__(
        self,
        home: Path,
        cluster: ClusterSpec,
        find_address: Callable[[], str],
        ownership: Ownership,
        clock: Callable[[], float] = time.time,
        serving: threading.Event | None = None,
    ) -> None:
        """Make the backend without waiting. `find_address` returns Ray's address at each try to connect,
        or raises ServiceError.

        Attempts are watched once the event `serving` is set; with None, at once.
        """
        self._link = AgentLink(home, find_address)
        nodes = RayNodes(cluster, self._link)
        launchers = LinkedLaunchers(self._link)
        super().__init__(home, cluster, nodes, launchers, ownership, clock, serving)

    @property
    def problem(self) -> str | None:
        """Sentence on why Ray cannot be reached, and since when; None while it can be reached."""
        return self._link.problem

    def close(self) -> None:
        """Stop watching attempts, and disconnect; running attempts continue."""
        super().close()
        self._link.close()
