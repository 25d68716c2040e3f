"""Published step times of tuned configurations as jobs: a row is a job, a plan, a cluster and what a step took.

Rows: tuned.yaml. Each belongs to a half that follows from its name, so that no prediction could choose it. What the
model of time gets wrong in the first half may be looked into; the second is the figure.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from benchmarks.published_rows import cluster_of, only
from orchestrator.service.commands.plan import CandidateView, estimate_plan
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data

FILE = Path(__file__).with_name("tuned.yaml")
HALVES = ("first", "second")
MEASURED = ("seconds", "tokens_per_device_s", "samples_per_s", "mfu_percent")
FILE_KEYS = {"devices", "models", "sources"}
SOURCE_KEYS = {"source", "at", "tokens", "network", "rows"}
ROW_KEYS = {
    "id",
    "half",
    "model",
    "cluster",
    "network",
    "batch",
    "tokens",
    "precision",
    "plan",
    *MEASURED,
}
MFU_PEAK_FLOPS = 989e12  # of an H100, data sheet


class Row(NamedTuple):
    """One published configuration and the seconds of its step."""

    source: str
    name: str
    half: str
    spec: JobSpec
    plan: Mapping[str, Any]
    cluster: ClusterSpec
    measured_s: float

    def answer(self) -> CandidateView:
        """What `orc estimate` says of the row's job and plan on its cluster."""
        given = [(key, str(value)) for key, value in self.plan.items()]
        return estimate_plan(self.spec, given, make_idle_nodes(self.cluster))


def read_rows(file: Path = FILE) -> list[Row]:
    """The rows of the file. Raises ValueError where a key, a half or a model is unknown."""
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    only(data, FILE_KEYS, file.name)
    rows = []
    for source in data["sources"]:
        only(source, SOURCE_KEYS, f"{file.name}: {source.get('source')}")
        rows += [
            _row(source, said, data, f"{file.name}: {said.get('id')}") for said in source["rows"]
        ]
    return rows


def half_of(name: str) -> str:
    """The half that a row of this name belongs to, as good as drawn."""
    return HALVES[hashlib.sha256(name.encode()).digest()[0] % 2]


def _row(
    source: Mapping[str, Any], said: Mapping[str, Any], data: Mapping[str, Any], where: str
) -> Row:
    only(said, ROW_KEYS, where)
    if said["half"] != half_of(said["id"]):
        raise ValueError(f"{where}: half {said['half']!r}; its name says {half_of(said['id'])!r}")
    if said["model"] not in data["models"]:
        raise ValueError(f"{where}: model {said['model']!r} is none of {', '.join(data['models'])}")
    if len(given := [key for key in MEASURED if key in said]) != 1:
        raise ValueError(
            f"{where}: measured are {', '.join(given) or 'none'}; one of {', '.join(MEASURED)} is wanted"
        )
    cluster = cluster_of(
        said["cluster"], data["devices"], where, said.get("network", source["network"])
    )
    (nodes,) = cluster.nodes
    tokens = said.get("tokens", source["tokens"])
    job = {
        "name": said["id"],
        "gpus": nodes.count * nodes.devices,
        "global_batch_size": said["batch"],
        "precision": said.get("precision", "bf16"),
        "model": data["models"][said["model"]],
        "data": {
            "tokens" if "hf" in data["models"][said["model"]] else "text": [str(FILE)],
            "sequence_length": tokens,
        },
        "training": {"max_steps": 1},
    }
    return Row(
        source=source["source"],
        name=said["id"],
        half=said["half"],
        spec=parse_job_data(job, where),
        plan=said["plan"],
        cluster=cluster,
        measured_s=_measured_s(
            said, tokens, nodes.count * nodes.devices, data["models"][said["model"]]
        ),
    )


def _measured_s(
    said: Mapping[str, Any], tokens: int, devices: int, model: Mapping[str, Any]
) -> float:
    """Seconds of a step, as published or from the published rate."""
    batch = said["batch"]
    if "seconds" in said:
        return float(said["seconds"])
    if "samples_per_s" in said:
        return float(batch / said["samples_per_s"])
    if "tokens_per_device_s" in said:
        return float(batch * tokens / (said["tokens_per_device_s"] * devices))
    shape = model["decoder"]
    hidden, layers = shape["hidden_size"], shape["num_hidden_layers"]
    # huggingface/nanotron src/nanotron/models/llama.py, get_flops: as many key heads as heads, no
    # causal half
    layer = 8 * hidden**2 + 4 * tokens * hidden + 6 * hidden * shape["intermediate_size"]
    flops = 3.0 * batch * tokens * (layers * layer + 2 * hidden * shape["vocab_size"])
    return float(flops / (said["mfu_percent"] / 100 * MFU_PEAK_FLOPS * devices))
