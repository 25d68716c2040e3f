"""Live nodes from Ray, and their devices from NVML."""

from __future__ import annotations

import logging
import re
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.backends.attempts.launch_request import LaunchNode
from orchestrator.backends.attempts.ports import LiveNode
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.backends.ray.link import AgentLink, read_devices
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, NodeSpec
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.frozen import frozen

NODE_LABEL = "orc-node"
DEVICE_LABEL = "orc-device"

log = logging.getLogger(__name__)


@frozen
class RayNode(LiveNode):
    """A live node of Ray, with its description from the cluster file; `id` is Ray's NodeID."""

    ray_gpus: int  # as Ray counts them; 0 on virtual devices


class RayNodes:
    """The live nodes of a Ray cluster; see the protocol `NodeSource`."""

    def __init__(self, cluster: ClusterSpec, link: AgentLink) -> None:
        self._cluster = cluster
        self._link = link

    def set_cluster(self, cluster: ClusterSpec) -> None:
        """Use this cluster description for nodes from now on."""
        self._cluster = cluster

    def list_live_nodes(self) -> dict[str, LiveNode]:
        """Return every live node by name. Raises ClusterAway."""
        return {**select_live_nodes(self._cluster, self._link.list_nodes())}

    def read_devices(self, node: LiveNode) -> NvmlReading:
        """Return NVML's reading of the node's devices. A node that does not answer gives a reading
        with an error.
        """
        return read_devices(self._link, node)


def select_live_nodes(
    cluster: ClusterSpec, ray_nodes: Iterable[Mapping[str, Any]]
) -> dict[str, RayNode]:
    """Return {node name: node} of the live Ray nodes that have resources `gpu<i>` and a known kind
    of device.
    """
    nodes: dict[str, RayNode] = {}
    for entry in sorted(
        ray_nodes, key=lambda entry: (entry.get("Labels", {}).get(NODE_LABEL, ""), entry["NodeID"])
    ):
        indices = [
            int(match[1])
            for name in entry["Resources"]
            if (match := re.fullmatch(r"gpu(\d+)", name))
        ]
        if not entry["Alive"] or not indices:
            continue
        labels = entry.get("Labels", {})
        name = labels.get(NODE_LABEL) or entry["NodeManagerHostname"]
        if name in nodes:  # two unlabelled raylets on one machine
            name = f"{name}-{entry['NodeID'][:6]}"
        spec = next((node for node in cluster.nodes if name in node.names), None)
        device = find_device_kind(cluster, spec, labels.get(DEVICE_LABEL))
        if device is None:
            log.warning(
                "node %s is left out: label it %s=<a device of cluster %s>",
                name,
                DEVICE_LABEL,
                cluster.name,
            )
            continue
        nodes[name] = RayNode(
            id=entry["NodeID"],
            launch=LaunchNode(
                name=name,
                address=entry["NodeManagerAddress"],
                device=device,
                devices=1 + max(indices),
                cpus=max(1, int(entry["Resources"].get("CPU", 1))),
                device_ids=_list_device_ids(spec, 1 + max(indices)),
            ),
            host_memory_bytes=spec.host_memory
            if spec
            else int(entry["Resources"].get("memory", 0)),
            rack=spec.rack if spec else "",
            ray_gpus=int(entry["Resources"].get("GPU", 0)),
        )
    return nodes


def _list_device_ids(spec: NodeSpec | None, device_count: int) -> tuple[DeviceId, ...]:
    """Return the driver's ids of the node's devices; () where Ray has other devices than the
    cluster file.
    """
    if spec is None or len(spec.device_ids) != device_count:
        return ()
    return spec.device_ids


def find_device_kind(
    cluster: ClusterSpec, node: NodeSpec | None, device_label: str | None
) -> DeviceSpec | None:
    """Return the kind of a node's devices: by its label, else by the cluster file, else the only
    kind.

    None where that is unclear.
    """
    kinds = {spec.device.name: spec.device for spec in cluster.nodes}
    if device_label is not None:
        return kinds.get(device_label)
    if node is not None:
        return node.device
    return next(iter(kinds.values())) if len(kinds) == 1 else None
