"""Which devices does a gang get? Whole nodes first, then as few nodes as possible; all or nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from orchestrator.specs.attempt import NodeDevices, Placement
from orchestrator.specs.cluster import Node
from orchestrator.specs.state import State

Device = tuple[str, int]  # node name, device index


def busy_devices(state: State) -> frozenset[Device]:
    """Devices of every attempt that runs, or whose memory is not reported free again."""
    return frozenset(
        (part.node, index)
        for job in state.jobs.values()
        for attempt in job.attempts
        if not attempt.released
        for part in attempt.placement
        for index in part.devices
    )


def place(count: int, nodes: Sequence[Node], usable: Callable[[Node, int], bool]) -> Placement | None:
    """`count` usable devices on as few nodes as possible, or None where there are too few.

    A gang that fits into one node goes to the fullest node that holds it; a larger one takes the emptiest nodes.
    Every node of a larger gang gives the same number of devices, so that ranks form a regular mesh.
    """
    free = {node.name: tuple(i for i in range(node.devices) if usable(node, i)) for node in nodes}
    single = [name for name, devices in free.items() if len(devices) >= count]
    if single:
        name = min(single, key=lambda name: (len(free[name]), name))
        return (NodeDevices(node=name, devices=free[name][:count]),)
    for per_node in _equal_shares(count, max((len(devices) for devices in free.values()), default=0)):
        holders = sorted(name for name, devices in free.items() if len(devices) >= per_node)
        if len(holders) * per_node >= count:
            return tuple(NodeDevices(node=name, devices=free[name][:per_node]) for name in holders[: count // per_node])
    return None


def _equal_shares(count: int, most: int) -> Iterable[int]:
    return (share for share in range(most, 0, -1) if count % share == 0)
