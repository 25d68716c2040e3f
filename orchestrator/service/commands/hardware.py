"""The hardware for which a job is planned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from orchestrator.service.server.cluster_file import kept_cluster
from orchestrator.service.server.intake import read_cluster
from orchestrator.service.server.logins import DEFAULT_HOME, Login
from orchestrator.service.server.rates import recall_cluster
from orchestrator.specs.cluster import Node, idle_nodes
from orchestrator.specs.observation import Observation


def hardware_of(service: Path | Login, cluster: Path | None) -> tuple[Sequence[Node], Sequence[Observation]]:
    """The given cluster with all memory free, else the live one with its observations, else the one of `orc up`.

    Raises SpecError if the file is not a cluster file, ServiceError if the service does not answer.
    """
    home = service if isinstance(service, Path) else DEFAULT_HOME.expanduser()
    if cluster is not None or (isinstance(service, Path) and not _is_up(service)):
        return idle_nodes(recall_cluster(read_cluster(cluster) if cluster else kept_cluster(home))), ()
    from orchestrator.service.server.client import Client
    from orchestrator.service.views.records import node_from_view, observations_from_view

    with closing(Client(service)) as client:
        live = client.cluster()
    return [node_from_view(node) for node in live["nodes"]], observations_from_view(live["observations"])


def _is_up(home: Path) -> bool:
    if not (home / "service.json").exists():
        return False
    from orchestrator.service.server.client import is_up  # late: it imports httpx, which planning does not need

    return is_up(home)
