"""Published memory figures as jobs: a row is a job, the settings of a plan, a cluster and what was measured.

`at` is the file or page of the source, with its commit. Where a table leaves a setting to the framework (the type of
weights, a recipe's adapters), the row says what that code does.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NamedTuple

import yaml

from orchestrator.service.commands.plan import CandidateView, estimate_plan
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.parse import parse_job_data

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
        spec = parse_job_data({"name": self.name, **self.job}, self.source)
        given = [(key, str(value)) for key, value in self.plan.items()]
        return estimate_plan(spec, given, make_idle_nodes(self.cluster))


class FileError(ValueError):
    """A file of rows that cannot be read, or has an unknown key or word."""


def read_rows(folder: Path = FOLDER) -> list[Row]:
    """The rows of every file in the folder. Raises FileError as `read_file` does."""
    rows = list[Row]()
    for path in sorted(folder.glob("*.yaml")):
        rows += read_file(path)
    return rows


def read_file(path: Path) -> Iterator[Row]:
    """Yield the rows of one file. Raises FileError for an unreadable file, a missing or an unknown key or word."""
    try:
        data = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError, yaml.YAMLError) as error:
        raise FileError(f"{path}: {error}") from None
    only(data, SOURCE_KEYS, path.name, needed=SOURCE_KEYS - {"models", "devices"})
    if not isinstance(data["rows"], list):
        raise FileError(f"{path.name}: rows is no list")
    for row in data["rows"]:
        only(row, ROW_KEYS, f"{path.name}: a row", needed=ROW_KEYS - {"measured"})
        where = f"{path.name}: {row['id']}"
        measured = row.get("measured", {})
        only(measured, set(KINDS), where)
        if row["outcome"] not in OUTCOMES:
            raise FileError(f"{where}: outcome {row['outcome']!r} is none of {', '.join(OUTCOMES)}")
        kind = next((each for each in KINDS if each in measured), None)
        yield Row(
            source=data["source"],
            looked_at=data["looked_at"],
            name=row["id"],
            job=row["job"],
            plan=row["plan"],
            cluster=cluster_of(row["cluster"], data.get("devices", {}), where),
            kind=kind,
            measured_bytes=round(measured[kind] * GIB) if kind else 0,
            ran=row["outcome"] == "ran",
        )


def cluster_of(
    name: str, devices: Mapping[str, Any], where: str, network: str = "100GB/s"
) -> ClusterSpec:
    """`2x8-a100-80gb`: nodes, devices of each, and a device of the catalogue or of the file."""
    match = re.fullmatch(r"(\d+)x(\d+)-([a-z0-9-]+)", str(name))
    if match is None:
        raise FileError(f"{where}: cluster {name!r} is not NODESxDEVICES-DEVICE")
    nodes, count, device = int(match[1]), int(match[2]), devices.get(match[3], match[3])
    node = {
        "name": "node",
        "count": nodes,
        "devices": count,
        "device": device,
        "host_memory": "1TiB",
    }
    return ClusterSpec.model_validate({"name": name, "nodes": [node], "network_bandwidth": network})


def only(raw: object, allowed: set[str], where: str, *, needed: Iterable[str] = ()) -> None:
    """Raise FileError where this is no mapping, has another key than these, or lacks a needed one."""
    if not isinstance(raw, Mapping):
        raise FileError(f"{where}: {raw!r} is no mapping of {', '.join(sorted(allowed))}")
    if unknown := sorted(set(raw) - allowed):
        raise FileError(
            f"{where}: unknown {', '.join(unknown)}; allowed are {', '.join(sorted(allowed))}"
        )
    if missing := sorted(set(needed) - set(raw)):
        raise FileError(f"{where}: without {', '.join(missing)}")
