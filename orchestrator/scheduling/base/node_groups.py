"""Groups of equal nodes. The plans of a job are searched once per group."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from itertools import groupby
from math import inf

from orchestrator.planning.search import Hardware
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import Node


@dataclass(frozen=True, slots=True, kw_only=True)
class Group:
    """Nodes with the same kind and number of devices."""

    hardware: Hardware
    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        return self.hardware.devices_per_node * self.hardware.nodes


def groups_of(nodes: Iterable[Node]) -> list[Group]:
    """Return the nodes grouped by kind, fastest devices first."""

    def kind(node: Node) -> tuple[float, int, str]:
        return (
            -node.device.peak_flops(Precision.FP16),
            -node.devices,
            node.device.model_dump_json(),
        )

    return [_group(tuple(members)) for _, members in groupby(sorted(nodes, key=kind), key=kind)]


def _group(nodes: tuple[Node, ...]) -> Group:
    hardware = Hardware(
        device=nodes[0].device,
        devices_per_node=nodes[0].devices,
        nodes=len(nodes),
        network_bandwidth=min(node.network_bandwidth for node in nodes),
        host_memory=min(
            node.host_free_bytes or inf for node in nodes
        ),  # 0: a Ray that was told none
    )
    return Group(hardware=hardware, nodes=nodes)
