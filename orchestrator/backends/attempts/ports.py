"""What attempts need of a cluster: its live nodes, and launchers on them. Ray implements both, and so do tests."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launch_request import LaunchNode
from orchestrator.backends.attempts.launcher import LauncherStatus, RankStart
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.run import AttemptFolder, JobFolder


@dataclass(frozen=True, slots=True, kw_only=True)
class LiveNode:
    """A node of the running cluster and what the specification says of it."""

    id: str  # in the words of its cluster
    launch: LaunchNode
    host_memory_bytes: int
    rack: str


class ClusterAway(ConnectionError):
    """The cluster cannot be reached now: nothing is known of its nodes and launchers, which may go on without us."""


class NodeSource(Protocol):
    """Which nodes live, and what is free on their devices. Called from several threads."""

    def live(self) -> dict[str, LiveNode]:
        """Every node that lives, by name. Raises ClusterAway."""

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Know the nodes by this description from now on."""

    def read_devices(self, node: LiveNode) -> NvmlReading:
        """Return NVML's reading of `node` now. A node that does not answer is an error in the reading."""


class LauncherGroup(Protocol):
    """The launchers of one attempt, at most one on each node of its placement (attempts/launcher.py).

    Every method may raise ClusterAway.
    """

    @property
    def nodes(self) -> tuple[str, ...]:
        """Nodes whose launcher exists."""

    def is_idle(self) -> bool:
        """Whether a launcher exists that was never told to start."""

    def free_port(self, node: str) -> int:
        """A TCP port on which `node` does not listen."""

    def run_before(self, node: str, argv: Sequence[str], env: dict[str, str], workdir: str) -> int:
        """Run a command on `node` to its end; return its exit code."""

    def start(
        self, ranks: Mapping[str, Sequence[RankStart]], counts: Mapping[str, int], workdir: str, fence: Fence | None
    ) -> list[LauncherStatus]:
        """Start the processes of each node at once, where they have not started; each stands for so many ranks.

        Nothing starts where `fence` is passed.
        """

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        """Return news of these launchers, None for one that is gone; waits at most `timeout_s` for the first."""

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGTERM to the ranks of these nodes, SIGKILL after `grace_s`; does not wait."""

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGKILL to the ranks of these nodes after `grace_s`; does not wait."""


class Launchers(Protocol):
    """Puts launchers on the nodes of a cluster, where they outlive the service. Every method may raise ClusterAway."""

    def place(self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]) -> LauncherGroup | str:
        """Return launchers on every node of the placement, which hold its devices; or why there are none."""

    def find(self, attempt: Attempt) -> LauncherGroup:
        """The launchers of `attempt` that exist."""

    def end(self, attempt: Attempt) -> None:
        """End the launchers of `attempt`, and give its devices back; none is no error."""

    def end_orphans(self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]) -> None:
        """SIGKILL what a launcher that is gone left on a node that lives, and remove the files it swapped to."""
