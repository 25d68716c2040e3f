"""Hardware: equal nodes of equal devices, for which plans are made."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from math import inf

from orchestrator.specs.cluster import DeviceSpec


@dataclass(frozen=True, kw_only=True)
class Hardware:
    """Equal nodes of equal devices. `network_bandwidth` is bytes/s per node and direction.

    `host_memory` is bytes per node; infinite where unknown, as in most published measurements.
    """

    device: DeviceSpec
    devices_per_node: int
    nodes: int
    network_bandwidth: int
    host_memory: float = inf
    # CUDA_LAUNCH_BLOCKING=1: the host waits for every kernel that it launched
    launches_block: bool = False

    @property
    def devices(self) -> int:
        """Number of devices on all nodes."""
        return self.devices_per_node * self.nodes

    def __hash__(self) -> int:
        return self._hash

    @cached_property
    def _hash(self) -> int:
        node = (self.device, self.devices_per_node, self.host_memory, self.launches_block)
        return hash((node, self.nodes, self.network_bandwidth))
