"""Published memory figures as jobs: a row is a job, the settings of a plan, a cluster and what was measured.

`at` is the file or page of the source, with its commit. Where a table leaves a setting to the framework (the type of
weights, a recipe's adapters), the row says what that code does.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from orchestrator.service.commands.plan import CandidateView, estimate_plan
from orchestrator.specs.cluster import ClusterSpec, idle_nodes
from orchestrator.specs.parse import job_from_data

FOLDER = Path(__file__).parent / "published"
GIB = 2**30
Kind = Literal["allocated", "reserved", "device"]
KINDS: tuple[Kind, ...] = ("allocated", "reserved", "device")
OUTCOMES = ("ran", "out of memory")
SOURCE_KEYS = {"source", "url", "looked_at", "models", "devices", "rows"}
ROW_KEYS = {"id", "at", "job", "plan", "cluster", "measured", "outcome"}


class Row(NamedTuple):
    """One published training."""

    source: str
    looked_at: bool  # whether the source was read before the estimator was last changed
    name: str
    job: Mapping[str, Any]
    plan: Mapping[str, Any]
    cluster: ClusterSpec
    kind: Kind | None  # which memory was measured; None: only the outcome is known
    measured_bytes: int
    ran: bool

    def answer(self) -> CandidateView:
        """What `orc estimate` says of the row's job and plan on its cluster."""
        spec = job_from_data({"name": self.name, **self.job}, self.source)
        given = [(key, str(value)) for key, value in self.plan.items()]
        return estimate_plan(spec, given, idle_nodes(self.cluster))


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """The rows of every file in the folder. Raises ValueError where a key or a word is unknown."""
    return [row for path in sorted(folder.glob("*.yaml")) for row in _rows(path)]


def _rows(path: Path) -> Iterator[Row]:
    data = yaml.safe_load(path.read_text(encoding="utf-8"))
    only(data, SOURCE_KEYS, path.name)
    for said in data["rows"]:
        where = f"{path.name}: {said.get('id')}"
        only(said, ROW_KEYS, where)
        measured = said.get("measured", {})
        only(measured, set(KINDS), where)
        if said["outcome"] not in OUTCOMES:
            raise ValueError(
                f"{where}: outcome {said['outcome']!r} is none of {', '.join(OUTCOMES)}"
            )
        kind = next((each for each in KINDS if each in measured), None)
        yield Row(
            source=data["source"],
            looked_at=data["looked_at"],
            name=said["id"],
            job=said["job"],
            plan=said["plan"],
            cluster=cluster_of(said["cluster"], data.get("devices", {}), where),
            kind=kind,
            measured_bytes=round(measured[kind] * GIB) if kind else 0,
            ran=said["outcome"] == "ran",
        )


def cluster_of(
    name: str, devices: Mapping[str, Any], where: str, network: str = "100GB/s"
) -> ClusterSpec:
    """`2x8-a100-80gb`: nodes, devices of each, and a device of the catalogue or of the file."""
    found = re.fullmatch(r"(\d+)x(\d+)-([a-z0-9-]+)", name)
    if found is None:
        raise ValueError(f"{where}: cluster {name!r} is not NODESxDEVICES-DEVICE")
    nodes, count, device = int(found[1]), int(found[2]), devices.get(found[3], found[3])
    node = {
        "name": "node",
        "count": nodes,
        "devices": count,
        "device": device,
        "host_memory": "1TiB",
    }
    return ClusterSpec.model_validate({"name": name, "nodes": [node], "network_bandwidth": network})


def only(said: Mapping[str, Any], known: set[str], where: str) -> None:
    """Raises ValueError where a key is not known."""
    if unknown := sorted(set(said) - known):
        raise ValueError(
            f"{where}: unknown {', '.join(unknown)}; known are {', '.join(sorted(known))}"
        )
