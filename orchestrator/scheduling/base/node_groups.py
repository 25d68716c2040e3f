"""Groups of equal nodes, on which a job's plans are the same: they are searched once per group."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import groupby
from math import inf

from orchestrator.planning.search import Hardware
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import DeviceSpec, Node
from orchestrator.specs.frozen import frozen
from orchestrator.specs.state import State


@frozen
class NodeGroup:
    """Nodes with the same kind and number of devices."""

    hardware: Hardware
    nodes: tuple[Node, ...]

    @property
    def devices(self) -> int:
        return self.hardware.devices


def group_equal_nodes(nodes: Iterable[Node]) -> list[NodeGroup]:
    """Return the nodes in groups of the same device kind and device count, fastest device kind
    first.
    """

    def sort_key(node: Node) -> tuple[float, int, str]:
        return (
            -node.device.get_peak_flops(Precision.FP16),
            -node.devices,
            node.device.model_dump_json(),
        )

    return [
        _make_node_group(tuple(members))
        for _, members in groupby(sorted(nodes, key=sort_key), key=sort_key)
    ]


def find_node_group(state: State, device_kind: str | None) -> NodeGroup | None:
    """Return the group of live nodes with this kind of device; without one, of the nodes in the
    cluster file.

    None as `device_kind` means the fastest kind. Returns None where the cluster has no such nodes.
    """
    groups = (*group_equal_nodes(state.nodes), *group_equal_nodes(state.declared))
    return next(
        (group for group in groups if device_kind in (None, group.hardware.device.name)), None
    )


def find_device_spec(state: State, device_kind: str) -> DeviceSpec | None:
    """Return the spec of this kind of device (a name such as `a100-80gb`); None where the cluster
    has none.
    """
    group = find_node_group(state, device_kind)
    return None if group is None else group.hardware.device


def _make_node_group(nodes: tuple[Node, ...]) -> NodeGroup:
    hardware = Hardware(
        device=nodes[0].device,
        devices_per_node=nodes[0].devices,
        nodes=len(nodes),
        network_bandwidth=min(node.network_bandwidth for node in nodes),
        host_memory=min(
            node.host_free_bytes or inf for node in nodes
        ),  # 0: a Ray that was told none
    )
    return NodeGroup(hardware=hardware, nodes=nodes)
