"""Predicted seconds of collectives and messages over links within a node and the network between nodes."""

from __future__ import annotations

from functools import lru_cache

from orchestrator.planning.hardware import Hardware
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.frozen import frozen

# Achieved over nominal bandwidth of large messages: 235 of 300 GB/s on A100 (NVIDIA/nccl
# src/graph/tuning.cc).
LINK_EFFICIENCY = 0.78
# A step of a ring from one device to the next (NVIDIA/nccl src/graph/tuning.cc, hwLat of
# Ring/Simple: NVLink, network).
LINK_STEP_S = 3.4e-6
NETWORK_STEP_S = 9.6e-6


@frozen
class Ring:
    """Ranks that exchange messages in a ring; `bandwidth` is that of its slowest link, in bytes/s
    per direction.
    """

    ranks: int
    nodes: int
    bandwidth: float
    start_s: float

    def estimate_gather_s(self, whole_bytes: float, message_count: int = 1) -> float:
        """Return the seconds of an all-gather or reduce-scatter of `whole_bytes`, split into
        `message_count` messages.

        (n-1)/n of the bytes pass every link of n ranks.
        """
        if self.ranks == 1:
            return 0.0
        return (
            message_count * (self.start_s + self._steps_s)
            + whole_bytes * (self.ranks - 1) / self.ranks / self.bandwidth
        )

    def estimate_all_reduce_s(self, whole_bytes: float, message_count: int = 1) -> float:
        """Return the seconds of an all-reduce: those of a reduce-scatter and an all-gather, with
        the start-up time of one.
        """
        if self.ranks == 1:
            return 0.0
        return 2 * self.estimate_gather_s(whole_bytes, message_count) - message_count * self.start_s

    @property
    def _steps_s(self) -> float:
        """Seconds of start-up of a message from the first rank to the last: along a node's devices,
        then as a tree over nodes.
        """
        return (self.ranks / self.nodes - 1) * LINK_STEP_S + (
            self.nodes - 1
        ).bit_length() * NETWORK_STEP_S


def estimate_all_to_all_s(
    sent_bytes_per_device: float,
    message_count: float,
    rank_count: int,
    device_stride: int,
    hardware: Hardware,
) -> float:
    """Return the seconds of an all-to-all among every `device_stride`-th device, each sending `sent_bytes_per_device`
    in equal parts.

    Links of a node and the network work at once; each device of a node has an equal part of the
    network.
    """
    over = find_ring(rank_count, device_stride, hardware)
    per_node = hardware.devices_per_node
    link_bandwidth = hardware.device.link_bandwidth
    near = min(rank_count, max(1, per_node // device_stride))  # on the same node
    inside_s = sent_bytes_per_device * (near - 1) / rank_count / link_bandwidth
    share = min(link_bandwidth, hardware.network_bandwidth / per_node)
    outside_s = sent_bytes_per_device * (rank_count - near) / rank_count / share
    return message_count * over.estimate_gather_s(0.0) + max(inside_s, outside_s) / LINK_EFFICIENCY


@lru_cache(maxsize=4096)
def find_ring(rank_count: int, device_stride: int, hardware: Hardware) -> Ring:
    """Return the ring of `rank_count` devices that are `device_stride` apart. Rings between the same nodes
    share the network.
    """
    per_node = hardware.devices_per_node
    nodes = -(-rank_count * device_stride // per_node)
    bandwidth: float = hardware.device.link_bandwidth
    if nodes > 1:
        bandwidth = min(bandwidth, hardware.network_bandwidth / min(device_stride, per_node))
    return Ring(
        ranks=rank_count,
        nodes=min(nodes, rank_count),
        bandwidth=bandwidth * LINK_EFFICIENCY,
        start_s=hardware.device.kind.traits.collective_start_s,
    )


def estimate_send_s(message_bytes: float, device: DeviceSpec, network_bandwidth: float) -> float:
    """Return the seconds of a message between two devices: over the link, or over their part of the
    network, whichever is slower.
    """
    bandwidth = min(device.link_bandwidth, network_bandwidth)
    return device.kind.traits.collective_start_s + message_bytes / (bandwidth * LINK_EFFICIENCY)
