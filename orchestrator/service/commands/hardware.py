"""Selects the hardware for which a job is planned."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import closing
from pathlib import Path

from orchestrator.service.client.logins import Login
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.intake.cluster_file import load_cluster
from orchestrator.service.intake.intake import read_cluster
from orchestrator.service.intake.rates import add_cached_rates
from orchestrator.specs.cluster import Node, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.observation import Observation
from orchestrator.specs.run import DEFAULT_HOME


def select_nodes_and_observations(
    service: Path | Login, cluster_file: Path | None, gpu_option: str | None = None
) -> tuple[Sequence[Node], Sequence[Observation]]:
    """Return (nodes to plan for, measurements made on them).

    The nodes are the GPUs that `--gpu` names, or the given cluster, with all memory free; else the
    live cluster, else the stored cluster of `orc up`. Raises SpecError without a cluster file or
    such a GPU, ServiceError if the service does not answer.
    """
    if gpu_option is not None:
        if cluster_file is not None:
            raise SpecError(
                "cards or a cluster file, not both",
                source="--gpu",
                got=gpu_option,
                hint="leave out --cluster",
            )
        return make_idle_nodes(parse_cards(gpu_option)), ()
    home = service if isinstance(service, Path) else DEFAULT_HOME.expanduser()
    if cluster_file is not None or (isinstance(service, Path) and not _is_up(service)):
        return make_idle_nodes(
            add_cached_rates(read_cluster(cluster_file) if cluster_file else load_cluster(home))
        ), ()
    from orchestrator.service.client.client import Client
    from orchestrator.service.views.records import parse_node_view, parse_observations_view

    with closing(Client(service)) as client:
        live = client.fetch_cluster()
    return [parse_node_view(node) for node in live["nodes"]], parse_observations_view(
        live["observations"]
    )


def _is_up(home: Path) -> bool:
    if not (home / "service.json").exists():
        return False
    from orchestrator.service.client.client import (
        is_up,
    )  # late: it imports httpx, which planning does not need

    return is_up(home)
