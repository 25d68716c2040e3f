"""Shapes: how a plan's ranks spread over equal nodes, whichever nodes these are."""

from __future__ import annotations

from functools import lru_cache

from orchestrator.specs.engines import facts_of
from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan

SPREAD_MAX = 2  # times the fewest nodes that hold a gang: over more it would rather wait than talk


@frozen
class GangShape:
    """A number of devices, spread evenly over nodes. `shares` are devices per node, in order of preference."""

    devices: int
    shares: tuple[int, ...]  # devices of each node, fewest nodes first

    @property
    def crosses_nodes(self) -> bool:
        """Whether even the smallest number of nodes that can hold it is above one."""
        return self.shares[0] < self.devices


@lru_cache(maxsize=4096)
def find_gang_shape(plan: Plan, devices_per_node: int, nodes: int) -> GangShape | None:
    """Return how a plan's ranks may spread over the nodes of a group; None where they cannot.

    Ranks form a regular mesh: every node holds equally many. Tensor-parallel ranks stay inside a node. So do
    context-parallel ones where the node is large enough, except those of a script, which splits its work itself.
    """
    devices = plan.world_size
    layout = plan.layout
    inside = layout.cp * layout.tp if layout.cp * layout.tp <= devices_per_node else layout.tp
    if not facts_of(plan.engine).is_ours:
        inside = 1
    shares = [
        share
        for share in range(min(devices, devices_per_node), 0, -1)
        if devices % share == 0 and share % inside == 0 and devices // share <= nodes
    ]
    fewest_nodes = -(-devices // devices_per_node)
    tight = [share for share in shares if devices // share <= SPREAD_MAX * fewest_nodes] or shares[
        :1
    ]
    return GangShape(devices=devices, shares=tuple(tight)) if tight else None
