"""How does the plan that orc chooses compare with the one that experts published? Rows: experts.yaml.

A row is a job, a cluster file and a plan. `orc plan` chooses for the job; `orc estimate --set` predicts the published
plan. Both answers come from the same models of time and memory, through the code that a user's command runs.
"""

from __future__ import annotations

import contextlib
import statistics
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import yaml
from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, at_least, at_most, informs
from orchestrator.service.commands.plan import CandidateView, estimate_plan, plan_job
from orchestrator.specs.cluster import ClusterSpec, Node, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.units import format_bytes

FILE = Path(__file__).with_suffix(".yaml")
DEVICES_PER_NODE = 8
ROWS_MIN = 25
ROW_KEYS = {"id", "model", "nodes", "device", "network", "batch", "tokens", "precision", "plan"}
MEASURED_KEYS = {"seconds", "tflops", "tokens_per_device_s"}
WIDTH = 220


class Row(NamedTuple):
    """One published configuration."""

    source: str
    # whether its step times were read before the models of time and memory were last changed
    looked_at: bool
    name: str
    spec: JobSpec
    nodes: Sequence[Node]
    plan: Mapping[str, Any]
    measured_s: float | None
    differs: str  # from the published plan
    cannot: str  # be expressed as a plan, for this reason


class Answered(NamedTuple):
    """A row with both predictions; None where there is no such plan."""

    row: Row
    theirs: CandidateView | None
    ours: CandidateView | None

    @property
    def ratio(self) -> float | None:
        """Our step time over theirs, both predicted."""
        if self.theirs is None or self.ours is None:
            return None
        return self.ours["step_s"] / self.theirs["step_s"]

    @property
    def is_refused(self) -> bool:
        """Whether the published plan does not fit by our estimate."""
        return self.theirs is not None and self.theirs["rejected"] is not None

    @property
    def error(self) -> float | None:
        """Their predicted step over the measured one, less one; None where it is another plan than the published."""
        if self.theirs is None or self.row.measured_s is None or self.row.differs:
            return None
        return self.theirs["step_s"] / self.row.measured_s - 1


def figures() -> list[Figure]:
    """Our predicted step over theirs in every row, and their predicted step beside the measured one."""
    found = [answered(row) for row in read_rows()]
    by_name = {one.row.name: one.row for one in found}
    console = Console(width=WIDTH)
    console.print(table(found))
    for note, names in notes_of(found).items():
        console.print(f"{note}: {', '.join(names)}", highlight=False)
    ratios = [one.ratio for one in found if one.ratio is not None]
    comparable = [one.ratio for one in found if one.ratio is not None and not one.is_refused]
    errors = {one.row.name: abs(one.error) for one in found if one.error is not None}
    new = [error for name, error in errors.items() if not by_name[name].looked_at]
    return [
        at_least("published configurations", len(found), "", ROWS_MIN),
        informs("those that no plan can stand for", sum(one.theirs is None for one in found), ""),
        informs("those that do not fit by our estimate", sum(one.is_refused for one in found), ""),
        at_most(
            "our predicted step over theirs, worst of those that fit", max(comparable), "", 1.0
        ),
        informs("our predicted step over theirs, worst of all", max(ratios), ""),
        informs("our predicted step over theirs, median", statistics.median(ratios), ""),
        informs(
            f"error of {len(errors)} published steps, median",
            100 * statistics.median(errors.values()),
            "%",
        ),
        informs(
            f"- of {len(new)} from sources not looked at before, median",
            100 * statistics.median(new),
            "%",
        ),
    ]


def answered(row: Row) -> Answered:
    """Both predictions of a row."""
    ours = None
    with contextlib.suppress(SpecError):  # no layout cuts its batch evenly over so many devices
        plans = plan_job(row.spec, row.nodes)
        ours = None if plans["chosen"] is None else plans["frontier"][plans["chosen"]]
    given = [(key, str(value)) for key, value in row.plan.items()]
    return Answered(row, estimate_plan(row.spec, given, row.nodes) if given else None, ours)


def read_rows(file: Path = FILE) -> list[Row]:
    """The rows of the file. Raises ValueError where a row lacks a key or has an unknown one."""
    data = yaml.safe_load(file.read_text(encoding="utf-8"))
    return [
        _row(source, said, data["devices"]) for source in data["sources"] for said in source["rows"]
    ]


def _row(source: Mapping[str, Any], said: Mapping[str, Any], devices: Mapping[str, Any]) -> Row:
    if missing := ROW_KEYS - set(said):
        raise ValueError(f"{said.get('id')}: without {', '.join(sorted(missing))}")
    if unknown := set(said) - ROW_KEYS - MEASURED_KEYS - {"differs", "cannot"}:
        raise ValueError(f"{said['id']}: unknown {', '.join(sorted(unknown))}")
    if bool(said["plan"]) == ("cannot" in said):
        raise ValueError(f"{said['id']}: a plan, or a reason why there is none")
    count = said["nodes"] * DEVICES_PER_NODE
    job = {
        "name": said["id"],
        "gpus": count,
        "global_batch_size": said["batch"],
        "precision": said["precision"],
        "model": {"decoder": said["model"]},
        "data": {"text": [str(FILE)], "sequence_length": said["tokens"]},
        "training": {"max_steps": 1},
    }
    node = {
        "name": "node",
        "count": said["nodes"],
        "devices": DEVICES_PER_NODE,
        "device": devices.get(said["device"], said["device"]),
        "host_memory": "2TiB",
    }
    cluster = ClusterSpec.model_validate(
        {"name": said["id"], "nodes": [node], "network_bandwidth": said["network"]}
    )
    return Row(
        source=source["source"],
        looked_at=source["looked_at"],
        name=said["id"],
        spec=parse_job_data(job, f"{FILE.name}: {said['id']}"),
        nodes=make_idle_nodes(cluster),
        plan=said["plan"],
        measured_s=_measured_s(said, count),
        differs=said.get("differs", ""),
        cannot=said.get("cannot", ""),
    )


def _measured_s(said: Mapping[str, Any], count: int) -> float | None:
    """Seconds of a step, as published or from the published rate."""
    tokens = said["batch"] * said["tokens"]
    if "seconds" in said:
        return float(said["seconds"])
    if "tokens_per_device_s" in said:
        return float(tokens / (said["tokens_per_device_s"] * count))
    if "tflops" not in said:
        return None
    model = said["model"]
    layers, hidden = model["num_hidden_layers"], model["hidden_size"]
    if (
        "num_key_value_heads" in model
    ):  # Llama 3: 6 operations per parameter and token, no recomputation counted
        return None
    # arXiv:2104.04473, equation 3: of a step in which every layer is recomputed
    beside = 1 + said["tokens"] / (6 * hidden) + model["vocab_size"] / (16 * layers * hidden)
    return float(96 * tokens * layers * hidden**2 * beside / (count * said["tflops"] * 1e12))


def table(found: Sequence[Answered]) -> Table:
    """A line for each row: both plans, their predicted and measured steps."""
    shown = Table(
        title="published configurations", title_justify="left", box=None, header_style="bold"
    )
    for column in ("ROW", "THEIRS", "OURS"):
        shown.add_column(column, no_wrap=True)
    for column in ("THEIRS S", "MEASURED S", "OURS S", "OURS/THEIRS"):
        shown.add_column(column, justify="right", no_wrap=True)
    for one in found:
        shown.add_row(*_cells(one))
    return shown


def notes_of(found: Sequence[Answered]) -> dict[str, list[str]]:
    """What holds of some rows, with their names."""
    notes: dict[str, list[str]] = defaultdict(list)
    for one in found:
        if one.row.cannot:
            notes[one.row.cannot].append(one.row.name)
        if one.row.differs:
            notes[one.row.differs].append(one.row.name)
        if one.theirs is not None and one.is_refused:
            needed, capacity = (
                format_bytes(one.theirs[key]) for key in ("needed_bytes", "capacity_bytes")
            )
            notes["theirs does not fit by our estimate"].append(
                f"{one.row.name} ({needed} of {capacity})"
            )
        if one.ours is None:
            notes["nothing of ours fits"].append(one.row.name)
    return notes


def _cells(one: Answered) -> Iterator[str]:
    yield one.row.name
    for view in (one.theirs, one.ours):
        yield "-" if view is None else _short(view["plan"])
    theirs_s = None if one.theirs is None else one.theirs["step_s"]
    ours_s = None if one.ours is None else one.ours["step_s"]
    for seconds in (theirs_s, one.row.measured_s, ours_s, one.ratio):
        yield "-" if seconds is None else f"{seconds:.2f}"


def _short(plan: str) -> str:
    """The plan without its devices and precision, in fewer words."""
    said = " · ".join(plan.split(" · ")[1:-1])
    said = said.replace("FSDP2 · reduced once a step", "ZeRO-1 by FSDP2")
    return said.replace("FSDP2 · weights kept gathered", "ZeRO-2 by FSDP2").replace(
        "checkpointing", "ckpt"
    )
