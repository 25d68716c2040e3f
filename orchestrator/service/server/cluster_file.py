"""The cluster file of a home: as text for people, and as the service takes it."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from orchestrator.service.server.intake import read_cluster
from orchestrator.specs import units
from orchestrator.specs.cluster import ClusterSpec, DeviceSpec
from orchestrator.specs.devices import DEVICES

FILE = "cluster.yaml"
LOOK_AT = {  # what no machine says of itself
    "network_bandwidth": "look here: bandwidth between nodes, per node and direction",
    "launch_cost": "look here: from a launch to the first training step",
}


def kept_cluster(home: Path) -> ClusterSpec:
    """The cluster of this home; the embedded one of two virtual devices where none is kept. Raises SpecError."""
    kept = home / FILE
    return read_cluster(kept if kept.exists() else None)


def cluster_text(cluster: ClusterSpec, notes: Sequence[str] = ()) -> str:
    """A cluster file that says `cluster`, with `notes` as comments above it; the parser reads the same cluster."""
    said: dict[str, Any] = cluster.model_dump(mode="json", exclude_defaults=True)
    said["nodes"] = [
        {**node.model_dump(mode="json", exclude_defaults=True), "device": _device(node.device)}
        for node in cluster.nodes
    ]
    always = cluster.model_dump(mode="json", include={"name", *LOOK_AT})
    said = {name: always[name] for name in ("name", *LOOK_AT)} | said
    text = yaml.safe_dump(_in_words(said), sort_keys=False, allow_unicode=True, width=10**6)
    for key, words in LOOK_AT.items():
        text = re.sub(rf"^({key}: .*)$", rf"\1  # {words}", text, flags=re.M)
    return "".join(f"# {note}\n" for note in notes) + text


def _device(device: DeviceSpec) -> Any:
    """The name of a device that is just the catalogue's, else its description."""
    if device.name in DEVICES and DeviceSpec.model_validate({"name": device.name, **DEVICES[device.name]}) == device:
        return device.name
    return device.model_dump(mode="json", exclude_defaults=True)


def _in_words(said: Any) -> Any:
    """Bytes and bytes per second in larger units, where those are exact."""
    if isinstance(said, dict):
        return {name: _in_words(one) for name, one in said.items()}
    if isinstance(said, list):
        return [_in_words(one) for one in said]
    for suffix, pattern, parse in (
        ("B", units.SIZE_PATTERN, units.parse_bytes),
        ("B/s", units.BANDWIDTH_PATTERN, units.parse_bandwidth),
    ):
        if isinstance(said, str) and re.fullmatch(rf"[0-9]+{suffix}", said):
            words = str(units.in_words(parse(said), pattern))
            return words if re.fullmatch(pattern, words) and parse(words) == parse(said) else said
    return said
