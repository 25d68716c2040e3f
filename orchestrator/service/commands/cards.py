"""GPU models named at the command line, such as `--gpu rtx3090` or `--gpu 2xa100-80gb`."""

from __future__ import annotations

import contextlib
import re

from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.devices import find_matching_devices, load_devices
from orchestrator.specs.errors import SpecError, suggest_word
from orchestrator.specs.units import BINARY_UNITS, parse_bandwidth, parse_bytes

DEVICES_PER_NODE = 8  # as servers have them: more devices are so many such nodes
CARDS_MAX = 4096
# Nobody says the host memory of a card's machine: twice the memory of its cards, and no less than
# this.
HOST_BYTES_MIN = 64 * BINARY_UNITS["GiB"]
SOURCE = "--gpu"
BANDWIDTH_MAX = 10**13  # bytes per second of a node
FORMS = "rtx3090, 2xa100-80gb:1TiB, 16xh100-80gb@400Gb or 2x4xa100-80gb"


FORM = re.compile(
    r"\s*(?:(?:(?P<nodes>[0-9]{1,6})\s*[x*]\s*)?(?P<count>[0-9]{1,6})\s*[x*]\s*)?"
    r"(?P<name>[^@:]*?)\s*(?::\s*(?P<host>[^@]*?)\s*)?(?:@\s*(?P<network>.*?))?\s*"
)
GIGABITS = re.compile(r"([0-9]{1,6}(?:\.[0-9]{1,3})?) ?Gb(?:it)?(?:/s|ps)?")  # of a network card


def parse_cards(gpu_option: str) -> ClusterSpec:
    """Return the cluster that `--gpu` describes: `NODESxNUMBERxNAME`, and optionally `:HOST` and
    `@NETWORK`.

    Without NODES its nodes have up to 8 GPUs. HOST is a node's host memory, such as `1TiB`; without
    it, twice the memory of its GPUs, at least 64 GiB. NETWORK is a node's bandwidth to the others,
    such as `400Gb` or `50GB/s`. Raises SpecError where the catalogue has no such GPU or several,
    and for other numbers.
    """
    match = FORM.fullmatch(gpu_option)
    if match is None:
        raise SpecError("not the name of cards", source=SOURCE, got=gpu_option, allowed=FORMS)
    name = match["name"]
    names = find_matching_devices(name)
    if len(names) != 1:
        hint = suggest_word(
            name.lower(), load_devices(), "describe the card in a file for --cluster"
        )
        raise SpecError(
            "several cards have this name" if names else "the catalogue has no such card",
            source=SOURCE,
            got=name,
            allowed=", ".join(names or load_devices()),
            hint="name one of them" if names else hint,
        )
    cluster = _make_cluster(
        names[0], *_split_gpus_per_node_and_nodes(match, gpu_option), match["host"]
    )
    if match["network"] is None:
        return cluster
    return _set_network(cluster, match["network"])


def _split_gpus_per_node_and_nodes(match: re.Match[str], text: str) -> tuple[int, int]:
    """Return (GPUs per node, number of nodes) of the text that `match` has matched.

    Raises SpecError for a number of GPUs that does not make equal nodes.
    """
    count = int(match["count"] or 1)
    if match["nodes"]:
        per_node = count
        nodes = int(match["nodes"])
        rest = 0
    else:
        per_node = max(1, min(count, DEVICES_PER_NODE))
        nodes, rest = divmod(count, per_node)
    if rest or not 1 <= nodes * per_node <= CARDS_MAX:
        raise SpecError(
            "no such number of cards",
            source=SOURCE,
            got=text,
            allowed="1 to 8, a multiple of 8 up to 4096, or NODESxNUMBER, such as 2x4xa100-80gb",
        )
    return per_node, nodes


def _set_network(cluster: ClusterSpec, bandwidth_text: str) -> ClusterSpec:
    """Return the cluster with this bandwidth between its nodes. Raises SpecError for a text that is
    no bandwidth.
    """
    gigabits = GIGABITS.fullmatch(bandwidth_text)
    bandwidth = 0
    if gigabits is not None:
        bandwidth = int(float(gigabits[1]) * 10**9 / 8)
    else:
        with contextlib.suppress(ValueError):
            bandwidth = parse_bandwidth(bandwidth_text)
    if not 0 < bandwidth <= BANDWIDTH_MAX:
        allowed = "400Gb, 50GB/s or the like"
        raise SpecError(
            "no bandwidth of a network", source=SOURCE, got=bandwidth_text, allowed=allowed
        )
    return cluster.model_copy(update={"network_bandwidth": bandwidth})


def _make_cluster(
    gpu_name: str, gpus_per_node: int, node_count: int, host_memory: str | None
) -> ClusterSpec:
    node = NodeSpec.model_validate(
        {
            "name": "node",
            "count": node_count,
            "devices": gpus_per_node,
            "device": gpu_name,
            "host_memory": "64GiB",
        }
    )
    host_bytes = max(HOST_BYTES_MIN, 2 * gpus_per_node * node.device.memory)
    if host_memory is not None:
        try:
            host_bytes = parse_bytes(host_memory)
        except ValueError as error:
            what = f"no host memory of a node: {error}"
            raise SpecError(
                what, source=SOURCE, got=host_memory, allowed="1TiB or the like"
            ) from None
    return ClusterSpec(name="cards", nodes=(node.model_copy(update={"host_memory": host_bytes}),))
