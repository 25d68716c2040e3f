"""GPU models named at the command line, such as `--gpu rtx3090` or `--gpu 2xa100-80gb`."""

from __future__ import annotations

import re

from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.devices import load_devices, match_devices
from orchestrator.specs.errors import SpecError, closest
from orchestrator.specs.units import BINARY_UNITS

DEVICES_PER_NODE = 8  # as servers have them: more devices are so many such nodes
CARDS_MAX = 4096
# Nobody says the host memory of a card's machine: twice the memory of its cards, and no less than
# this.
HOST_BYTES_MIN = 64 * BINARY_UNITS["GiB"]
SOURCE = "--gpu"


def cluster_of_cards(text: str) -> ClusterSpec:
    """Return a cluster of the GPUs that `text` names: `NAME`, or `NUMBERxNAME`.

    Its nodes have up to 8 GPUs, and twice their memory as host memory, at least 64 GiB. Raises SpecError where the
    catalogue has no such GPU or several, or for more than 8 that are no multiple of 8.
    """
    match = re.fullmatch(r"\s*(?:([0-9]{1,6})\s*[x*]\s*)?(.*?)\s*", text)
    assert match is not None, "every text has a name, if an empty one"
    count, name = int(match[1] or 1), match[2]
    names = match_devices(name)
    if len(names) != 1:
        near = closest(name.lower(), load_devices())
        hint = f"did you mean {near!r}?" if near else "describe the card in a file for --cluster"
        raise SpecError(
            "several cards have this name" if names else "the catalogue has no such card",
            source=SOURCE,
            got=name,
            allowed=", ".join(names or load_devices()),
            hint="name one of them" if names else hint,
        )
    per_node = min(count, DEVICES_PER_NODE)
    if not 1 <= count <= CARDS_MAX or count % per_node:
        raise SpecError(
            "no such number of cards",
            source=SOURCE,
            got=count,
            allowed="1 to 8, or a multiple of 8 up to 4096",
        )
    return _cluster(names[0], per_node, count // per_node)


def _cluster(name: str, per_node: int, nodes: int) -> ClusterSpec:
    node = NodeSpec.model_validate(
        {
            "name": "node",
            "count": nodes,
            "devices": per_node,
            "device": name,
            "host_memory": "64GiB",
        }
    )
    host_bytes = max(HOST_BYTES_MIN, 2 * per_node * node.device.memory)
    return ClusterSpec(name="cards", nodes=(node.model_copy(update={"host_memory": host_bytes}),))
