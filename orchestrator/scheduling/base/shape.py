"""Gang shapes: how many nodes a plan's ranks occupy, and how many devices of each, on any equal
nodes.
"""

from __future__ import annotations

from functools import lru_cache

from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan

SPREAD_MAX = 2  # times the fewest nodes that hold a gang: over more it would rather wait than talk


@frozen
class GangShape:
    """A number of devices, and how they may be split over equal nodes.

    `shares` are the possible numbers of devices per node; the first one uses the fewest nodes.
    """

    devices: int
    shares: tuple[int, ...]  # devices of each node, fewest nodes first

    @property
    def crosses_nodes(self) -> bool:
        """Whether the devices need more than one node even if they use as few nodes as possible."""
        return self.shares[0] < self.devices


@lru_cache(maxsize=4096)
def find_gang_shape(plan: Plan, devices_per_node: int, node_count: int) -> GangShape | None:
    """Return how a plan's ranks can be split over at most `node_count` equal nodes; None where they
    cannot.

    Each used node gets equally many ranks, since they form a regular mesh. Tensor-parallel ranks
    stay inside a node. So do context-parallel ones where the node is large enough. For a script no
    rank has to, since it splits its work itself.
    """
    devices = plan.world_size
    layout = plan.layout
    inside = layout.cp * layout.tp if layout.cp * layout.tp <= devices_per_node else layout.tp
    if not get_engine_facts(plan.engine).is_ours:
        inside = 1
    shares = [
        share
        for share in range(min(devices, devices_per_node), 0, -1)
        if devices % share == 0 and share % inside == 0 and devices // share <= node_count
    ]
    fewest_nodes = -(-devices // devices_per_node)
    tight = [share for share in shares if devices // share <= SPREAD_MAX * fewest_nodes] or shares[
        :1
    ]
    return GangShape(devices=devices, shares=tuple(tight)) if tight else None
