"""The production `Backend`: attempts on a Ray cluster."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.watch import Ownership
from orchestrator.backends.ray.link import Link, LinkedLaunchers
from orchestrator.backends.ray.nodes import RayNodes
from orchestrator.specs.cluster import ClusterSpec


class RayBackend(ProcessBackend):
    """Runs attempts on one Ray cluster, which may be unreachable at any time."""

    def __init__(
        self,
        home: Path,
        cluster: ClusterSpec,
        locate: Callable[[], str],
        ownership: Ownership,
        clock: Callable[[], float] = time.time,
        serving: threading.Event | None = None,
    ) -> None:
        """`locate` gives Ray's address whenever it is looked for; it may raise ServiceError. Waits for nothing.

        No attempt is watched before `serving` is set; None: they are watched at once.
        """
        self._link = Link(home, locate)
        nodes = RayNodes(cluster, self._link)
        launchers = LinkedLaunchers(self._link)
        super().__init__(home, cluster, nodes, launchers, ownership, clock, serving)

    @property
    def problem(self) -> str | None:
        """Text on why Ray cannot be reached and since when; None where it can."""
        return self._link.problem

    def close(self) -> None:
        """Stop watching and disconnect; running attempts continue."""
        super().close()
        self._link.close()
