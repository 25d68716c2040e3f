"""The cluster file of a home: loading, joined machines, and writing as text."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.backends.attempts.durable import write_durably
from orchestrator.service.intake.intake import read_cluster
from orchestrator.specs import units
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec, NodeSpec, find_catalogue_device
from orchestrator.specs.devices import load_devices
from orchestrator.specs.errors import SpecError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import parse_node_data
from orchestrator.specs.written import as_yaml

FILE = "cluster.yaml"
JOINED = "joined.json"
LOOK_AT = {  # what no machine says of itself
    "network_bandwidth": "look here: bandwidth between nodes, per node and direction",
    "launch_cost": "look here: from a launch to the first training step",
}


def load_cluster_file(home: Path) -> ClusterSpec:
    """Return the cluster in the home's cluster file; without one, the built-in cluster of two
    virtual devices.

    Raises SpecError for an invalid file.
    """
    path = home / FILE
    return read_cluster(path if path.exists() else None)


def load_cluster(home: Path) -> ClusterSpec:
    """Return the home's cluster, including the machines that have joined. Raises SpecError."""
    return add_joined_nodes(load_cluster_file(home), load_joined_nodes(home))


def load_joined_nodes(home: Path) -> tuple[NodeSpec, ...]:
    """Return the machines that joined and have not left, as nodes, sorted by name."""
    path = home / JOINED
    by_name = json.loads(path.read_text(encoding="utf-8")) if path.exists() else {}
    return tuple(parse_node_data(by_name[name], str(path)) for name in sorted(by_name))


def store_joined_nodes(home: Path, nodes: Sequence[NodeSpec]) -> None:
    """Store these machines as the ones that have joined; they replace those stored before."""
    by_name = {node.name: node.model_dump(mode="json") for node in nodes}
    write_durably(home / JOINED, json.dumps(by_name, indent=1))


def add_joined_nodes(cluster: ClusterSpec, joined: Sequence[NodeSpec]) -> ClusterSpec:
    """Return the cluster with the joined machines added; a node of the same name in the cluster
    file replaces one.
    """
    own_names = {name for node in cluster.nodes for name in node.names}
    more = tuple(node for node in joined if node.name not in own_names)
    return cluster.model_copy(update={"nodes": (*cluster.nodes, *more)})


def select_nodes_of_this_machine(
    cluster: ClusterSpec, joined: Sequence[NodeSpec], node_name: str
) -> ClusterSpec:
    """Return the part of a cluster whose nodes are on this machine, which has the name `node_name`.

    This includes virtual nodes, and the GPU node with this machine's name, or the only GPU node.
    Other nodes come by `orc join`. Raises SpecError where no node is on this machine.
    """
    away = {node.name for node in joined}
    single = [
        node.model_copy(update={"name": name, "count": 1})
        for node in cluster.nodes
        for name in node.names
        if name not in away
    ]
    real = [node.name for node in single if not node.device.kind.traits.is_virtual]
    local = tuple(
        node for node in single if node.name not in real or node.name == node_name or len(real) == 1
    )
    if not local:
        hint = (
            f"give its node the name {node_name!r}: the others come by `orc join`; "
            "or name a Ray of your own with --ray"
        )
        raise SpecError(
            "no node is this machine", source=FILE, path="nodes", got=", ".join(real), hint=hint
        )
    return cluster.model_copy(update={"nodes": local})


def format_cluster(cluster: ClusterSpec, notes: Sequence[str] = ()) -> str:
    """Return the cluster as the text of a cluster file, with `notes` as comments above it."""
    content: JsonObject = cluster.model_dump(mode="json", exclude_defaults=True)
    content["nodes"] = [
        {
            **node.model_dump(mode="json", exclude_defaults=True),
            "device": _format_device(node.device),
        }
        for node in cluster.nodes
    ]
    always = cluster.model_dump(mode="json", include={"name", *LOOK_AT})
    content = {name: always[name] for name in ("name", *LOOK_AT)} | content
    text = as_yaml(_format_in_larger_units(content))
    for key, comment in LOOK_AT.items():
        text = re.sub(rf"^({key}: .*)$", rf"\1  # {comment}", text, flags=re.M)
    return "".join(f"# {note}\n" for note in notes) + text


def _format_device(device: DeviceSpec) -> Any:
    """Return the device's name if the catalogue's device of that name is equal; else its
    description as a mapping.
    """
    if device.name in load_devices() and find_catalogue_device(device.name) == device:
        return device.name
    return device.model_dump(mode="json", exclude_defaults=True)


def _format_in_larger_units(data: Any) -> Any:
    """Return the data with bytes and bytes per second as texts in larger units, if they are whole
    numbers of these.
    """
    if isinstance(data, dict):
        return {name: _format_in_larger_units(inner) for name, inner in data.items()}
    if isinstance(data, list):
        return [_format_in_larger_units(inner) for inner in data]
    for suffix, pattern, parse in (
        ("B", units.SIZE_PATTERN, units.parse_bytes),
        ("B/s", units.BANDWIDTH_PATTERN, units.parse_bandwidth),
    ):
        if isinstance(data, str) and re.fullmatch(rf"[0-9]+{suffix}", data):
            text = str(units.format_in_largest_unit(parse(data), pattern))
            return text if re.fullmatch(pattern, text) and parse(text) == parse(data) else data
    return data
