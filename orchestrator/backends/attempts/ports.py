"""Interfaces between attempts and a cluster: its live nodes, and launchers on them. Ray and tests implement them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launch_request import LaunchNode
from orchestrator.backends.attempts.launcher import LauncherStatus, RankStart
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.command_line import Env
from orchestrator.specs.frozen import frozen
from orchestrator.specs.run import AttemptFolder, JobFolder


@frozen
class LiveNode:
    """A node of the running cluster, with its description from the cluster file."""

    id: str  # as its cluster identifies it
    launch: LaunchNode
    host_memory_bytes: int
    rack: str


class ClusterAway(ConnectionError):
    """The cluster does not answer now. Its nodes and launchers may continue without this
    service.
    """


class NodeSource(Protocol):
    """Source of live nodes and of free device memory. Called from several threads."""

    def list_live_nodes(self) -> dict[str, LiveNode]:
        """Return {node name: node} of every live node. Raises ClusterAway."""

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Use this cluster description for nodes from now on."""

    def read_devices(self, node: LiveNode) -> NvmlReading:
        """Return NVML's current reading of the node's devices. A node that does not answer gives a
        reading with an error.
        """


class LauncherGroup(Protocol):
    """The launchers of one attempt, at most one on each node of its placement (attempts/launcher.py).

    Every method may raise ClusterAway.
    """

    @property
    def nodes(self) -> tuple[str, ...]:
        """Names of nodes with an existing launcher."""

    def is_idle(self) -> bool:
        """Return whether at least one launcher exists whose ranks were never started."""

    def free_port(self, node: str) -> int:
        """Return a TCP port that is free on `node`."""

    def run_before(self, node: str, argv: Sequence[str], env: Env, workdir: str) -> int:
        """Run a command on `node` to its end, and return its exit code."""

    def start(
        self,
        ranks: Mapping[str, Sequence[RankStart]],
        ranks_per_process: Mapping[str, int],
        workdir: str,
        fence: Fence | None,
    ) -> list[LauncherStatus]:
        """Start the processes of every node, unless they were started before, and return the
        launchers' statuses.

        `ranks_per_process` has the number of ranks per process, by node. Nothing starts where `fence` is
        passed (another service owns the journal).
        """

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        """Return the changed statuses by node, None for a launcher that is gone. Waits at most
        `timeout_s` for the first change.
        """

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGTERM to the ranks of these nodes, and SIGKILL after `grace_s`. Does not wait."""

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGKILL to the ranks of these nodes after `grace_s`. Does not wait."""


class Launchers(Protocol):
    """Creates launchers on a cluster's nodes, where they outlive the service. Every method may raise ClusterAway."""

    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> LauncherGroup | str:
        """Create launchers on every node of the attempt's placement, and reserve its devices.

        Returns the launchers, or as text why they cannot be created.
        """

    def find_launchers(self, attempt: Attempt) -> LauncherGroup:
        """Return the existing launchers of `attempt`; the group is empty where there are none."""

    def end_launchers(self, attempt: Attempt) -> None:
        """End the launchers of `attempt`, and free its devices. An attempt without launchers is no
        error.
        """

    def end_orphan_processes(
        self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]
    ) -> None:
        """SIGKILL the processes that a lost launcher left on a live node, and remove their swap
        files.
        """
