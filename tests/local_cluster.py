"""Launchers and nodes of this machine, in this process: the `Launchers` and `NodeSource` of tests that need no Ray."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launch_request import LaunchNode
from orchestrator.backends.attempts.launcher import Launcher, LauncherStatus, RankStart
from orchestrator.backends.attempts.leftovers import end_leftover_processes, make_process_mark
from orchestrator.backends.attempts.ports import LiveNode
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.run import AttemptFolder, JobFolder

CPUS = 2


class LocalNodes:
    """Every node of the cluster lives, on the loopback; its devices are not read."""

    def __init__(self, cluster: ClusterSpec) -> None:
        self.set_cluster(cluster)

    def set_cluster(self, cluster: ClusterSpec) -> None:
        self.nodes = {
            name: LiveNode(
                id=name,
                launch=LaunchNode(
                    name=name,
                    address="127.0.0.1",
                    device=node.device,
                    devices=node.devices,
                    device_ids=node.device_ids,
                    cpus=CPUS,
                ),
                host_memory_bytes=node.host_memory,
                rack=node.rack,
            )
            for node in cluster.nodes
            for name in node.names
        }

    def list_live_nodes(self) -> dict[str, LiveNode]:
        return dict(self.nodes)

    def read_devices(self, node: LiveNode) -> NvmlReading:
        return NvmlReading(error=f"the devices of {node.launch.name} are not read")


class LocalGroup:
    """Launchers that are objects of this process, by node."""

    def __init__(self, launchers: Mapping[str, Launcher]) -> None:
        self._launchers = dict(launchers)
        self._versions: dict[str, int] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._launchers)

    def is_idle(self) -> bool:
        return any(launcher.status()["state"] == "idle" for launcher in self._launchers.values())

    def free_port(self, node: str) -> int:
        return self._launchers[node].free_port()

    def run_before(self, node: str, argv: Sequence[str], env: dict[str, str], workdir: str) -> int:
        return self._launchers[node].run_before(argv, env, workdir)

    def start(
        self,
        ranks: Mapping[str, Sequence[RankStart]],
        counts: Mapping[str, int],
        workdir: str,
        fence: Fence | None,
    ) -> list[LauncherStatus]:
        return [
            self._launchers[node].start(ranks[node], workdir, counts[node], fence) for node in ranks
        ]

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        names = list(nodes)
        news: dict[str, LauncherStatus | None] = {}
        for node in names:
            status = self._launchers[node].wait(self._versions.get(node, 0), timeout_s / len(names))
            news[node], self._versions[node] = status, status["version"]
        return news

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        for node in nodes:
            self._launchers[node].stop(grace_s)

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        for node in nodes:
            self._launchers[node].abort(grace_s)


class LocalLaunchers:
    """Launchers of this process, which end with it."""

    def __init__(self, kind: type[Launcher] = Launcher) -> None:
        self._kind = kind
        self._groups: dict[str, dict[str, Launcher]] = {}  # by the attempt's name

    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> LocalGroup | str:
        folder = folders.attempt(attempt.number)
        self._groups[attempt.name] = {
            part.node: self._kind(
                str(folder.path),
                str(folders.epoch),
                attempt.number,
                make_process_mark(folder, live[part.node].launch.name),
                Watched(
                    node=part.node,
                    devices=part.devices,
                    is_alone=len(attempt.placement) == 1,
                    driver=live[part.node].launch.device.kind.traits.driver,
                    device_ids=live[part.node].launch.device_ids,
                ),
            )
            for part in attempt.placement
        }
        return self.find_launchers(attempt)

    def find_launchers(self, attempt: Attempt) -> LocalGroup:
        return LocalGroup(self._groups.get(attempt.name, {}))

    def end_launchers(self, attempt: Attempt) -> None:
        for launcher in self._groups.pop(attempt.name, {}).values():
            launcher.abort(0.0)

    def end_orphan_processes(
        self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]
    ) -> None:
        end_leftover_processes(
            make_process_mark(folder, node.launch.name), str(folder.path), list(pids)
        )
