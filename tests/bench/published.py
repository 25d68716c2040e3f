"""How well is the memory of other people's trainings predicted? Against published measurements, beside other tools."""

from __future__ import annotations

import csv
import statistics
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from rich.console import Console
from rich.table import Table

from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import Described, described_row
from orchestrator.memory.foreign.training import Training
from orchestrator.service.published import capacity_bytes_of, fits_in
from orchestrator.specs.errors import SpecError
from orchestrator.specs.profile import MemoryEstimate
from tests.bench.figure import Figure, at_most, informs

PUBLISHED = Path(__file__).parents[3] / "shared" / "ground_truth" / "published.csv"
# Published figures that were gathered once the model stood, run before it saw them, and then explained one by one:
# what they taught is in orchestrator/memory/foreign*.py, so they guard that and say nothing about rows still unseen.
COLLECTED = Path(__file__).parent / "collected.csv"
GIB = 2**30
WIDTH = 150  # of the tables, also where they are piped
# Tools that ask torch or the driver divide by 2^20 or 2^30 and often write MB or GB: nvidia-smi counts MiB, Megatron's
# and mmcv's logs bytes / 2^20. Where torch's count is given in "GB" the unit is taken at its word, but for OpenMMLab's
# tables, which divide their logs' figure by 1024 (open-mmlab/mmdetection .dev_scripts/gather_models.py).
TORCH_UNITS = {"GiB": GIB, "MiB": 2**20, "GB": 10**9, "MB": 2**20, "bytes": 1}
DRIVER_UNITS = TORCH_UNITS | {"GB": GIB}
# Where the driver's count is what came on top while the training ran, its context taken off: experiments/evaluation.py
# of Stone-ResearchLife/xMem, get_ground_value_from_nvml. All its figures are whole segments, multiples of 2 MiB.
ABOVE_START = frozenset({"Stone-ResearchLife/xMem"})


# Columns that say how a model is trained, and on what, but not which.
SETTINGS = ("source_path", "framework", "gpu", "n_gpus", "dp_or_fsdp", "tp", "pp", "sharding", "micro_batch", "seq_len",
            "precision", "act_ckpt")  # fmt: skip


class Kind(NamedTuple):
    """Which memory a row reports, and what of an estimate is compared with it."""

    name: str
    predicted: Callable[[MemoryEstimate], int]
    units: Mapping[str, int]


ALLOCATED = Kind("allocated", lambda estimate: estimate.allocated_bytes, TORCH_UNITS)
RESERVED = Kind("reserved", lambda estimate: estimate.reserved_bytes, TORCH_UNITS)
DEVICE = Kind("device", lambda estimate: estimate.device_bytes, DRIVER_UNITS)


class Compared(NamedTuple):
    """A row that was described and measured."""

    row: Mapping[str, str]
    training: Training
    kind: Kind
    measured_bytes: int
    predicted_bytes: int

    @property
    def error(self) -> float:
        return self.predicted_bytes / self.measured_bytes - 1


def figures() -> list[Figure]:
    """Errors over all rows of quality A and B, by source, framework and kind, beside what other tools give."""
    if not PUBLISHED.exists():
        print("no published measurements beside the repository (shared/ground_truth/published.csv): nothing to compare")
        return []
    rows, later = _rows(PUBLISHED), _rows(COLLECTED)
    compared, excluded = compared_rows(rows)
    collected, _ = compared_rows(later)
    console = Console(width=WIDTH)
    console.print(_errors_table("the published rows", compared))
    console.print(_errors_table("the rows collected later", collected), _excluded_table(excluded))
    counted = [one for one in compared if one.kind is not DEVICE]
    verdicts, later_verdicts = _Verdicts(rows), _Verdicts(later)
    console.print("called fitting, but ran out of memory:", *(verdicts.short or ["none"]))
    console.print("called too large, but ran:", *(verdicts.refused or ["none"]))
    for one in verdicts.short:
        console.print(beside_what_ran(one, rows), highlight=False)
    return [
        *_figures_of(f"all {len(counted)} rows of allocated or reserved bytes", counted, limit=8),
        *(
            figure
            for kind in (ALLOCATED, RESERVED, DEVICE)
            for figure in _figures_of(f"{kind.name} bytes", [one for one in compared if one.kind is kind])
        ),
        *(
            informs(f"mean error of {name} on the same rows", 100 * _mean_error(counted, tool), "%")
            for name, tool in TOOLS.items()
        ),
        at_most(f"plans called fitting that ran out of memory, of {verdicts.ran_out}", len(verdicts.short), "rows", 0),
        at_most(f"plans called too large that ran, of {verdicts.ran}", verdicts.refused_percent, "%", 5),
        informs("rows with a measurement that are excluded", sum(excluded.values()), "rows"),
        *_figures_of(f"{len(collected)} rows collected later", collected),
        informs(
            f"rows collected later that are called fitting, of {later_verdicts.ran_out} that ran out of memory",
            len(later_verdicts.short),
            "rows",
        ),
        informs(
            f"rows collected later that are called too large, of {later_verdicts.ran} that ran",
            later_verdicts.refused_percent,
            "%",
        ),
    ]


def _rows(path: Path) -> list[dict[str, str]]:
    with path.open(newline="", encoding="utf-8") as file:
        return [row for row in csv.DictReader(file) if row["quality"] in ("A", "B")]


def compared_rows(rows: list[dict[str, str]]) -> tuple[list[Compared], Counter[tuple[str, str]]]:
    """Rows with measured memory as they compare, and those that do not, counted by source and reason."""
    found: list[Compared] = []
    excluded: Counter[tuple[str, str]] = Counter()
    for row in rows:
        if not row["mem"]:
            continue
        kind, described = _kind(row), _described(row)
        if isinstance(described, str):
            excluded[row["source_repo"], described] += 1
        elif described.is_lower_bound:
            excluded[row["source_repo"], "batch or sequence length is not stated"] += 1
        elif kind is None:
            excluded[row["source_repo"], f"which memory was measured is not stated ({row['mem_kind']})"] += 1
        else:
            units = DRIVER_UNITS if row["source_repo"].startswith("open-mmlab/") else kind.units
            measured = round(float(row["mem"]) * units[row["mem_unit"]])
            capacity_bytes = capacity_bytes_of(row["gpu_mem_GB"], row["gpu"])
            predicted = kind.predicted(estimate_foreign(described.training, capacity_bytes))
            found.append(Compared(row, described.training, kind, measured, predicted))
    return found, excluded


def _described(row: Mapping[str, str]) -> Described | str:
    try:
        return described_row(row)
    except SpecError as error:
        return error.what


def _kind(row: Mapping[str, str]) -> Kind | None:
    return RESERVED if row["source_repo"] in ABOVE_START else kind_of(row["mem_kind"])


def kind_of(said: str) -> Kind | None:
    """Which of the three totals a row's `mem_kind` means; None where it says neither.

    torch's active bytes are its allocated ones and what waits for another stream; mmcv and torchtune log the former.
    """
    said = said.lower()
    if any(word in said for word in ("nvidia", "nvml", "per gpu")) and "active" not in said:
        return DEVICE
    if "reserved" in said:
        return RESERVED
    if any(word in said for word in ("alloc", "active", "cuda mem")):
        return ALLOCATED
    return None


class _Verdicts:
    """What planning would say of the rows that say whether they fitted; of those that leave too much open, nothing."""

    def __init__(self, rows: list[dict[str, str]]) -> None:
        self.short: list[str] = []  # called fitting, but ran out of memory
        self.refused: list[str] = []  # called too large, but ran
        self.ran = self.ran_out = 0
        for row in rows:
            described, capacity_bytes = _described(row), capacity_bytes_of(row["gpu_mem_GB"], row["gpu"])
            if not row["fits"] or capacity_bytes is None or isinstance(described, str):
                continue
            fits, ran, ran_out = fits_in(described, capacity_bytes), *map(row["fits"].startswith, ("OK", "OOM"))
            self.ran, self.ran_out = self.ran + ran, self.ran_out + ran_out
            self.short += [row["id"]] if ran_out and fits else []
            self.refused += [row["id"]] if ran and fits is False else []

    @property
    def refused_percent(self) -> float:
        return 100 * len(self.refused) / self.ran


def beside_what_ran(short: str, rows: list[dict[str, str]]) -> str:
    """What the row that ran out of memory has above the nearest that ran under the same settings on the same devices.

    Both outcomes together ask that this difference takes more than the device had left in the run that was measured.
    """
    row = next(one for one in rows if one["id"] == short)
    capacity_bytes = capacity_bytes_of(row["gpu_mem_GB"], row["gpu"])
    assert capacity_bytes is not None, f"{short} has a verdict"

    def predicted_bytes(of: Mapping[str, str]) -> int:
        return estimate_foreign(described_row(of).training, capacity_bytes).device_bytes

    needed = predicted_bytes(row)
    ran = [
        one
        for one in rows
        if one["fits"].startswith("OK") and one["mem"] and all(one[name] == row[name] for name in SETTINGS)
    ]
    if not ran:
        return f"{short}: nothing ran under the same settings"
    nearest = min(ran, key=lambda one: abs(predicted_bytes(one) - needed))
    measured_bytes = float(nearest["mem"]) * DRIVER_UNITS[nearest["mem_unit"]]
    spare_bytes, more_bytes = capacity_bytes - measured_bytes, needed - predicted_bytes(nearest)
    return (
        f"{short} ({row['model']}, {row['arch'][:14]}), predicted {needed / GIB:.1f} GiB, ran out of memory. "
        f"{nearest['id']} ({nearest['model']}, {nearest['arch'][:14]}) ran under the same settings in "
        f"{measured_bytes / GIB:.0f} GiB: to tell them apart, what makes {more_bytes / GIB:+.1f} GiB of the "
        f"prediction has to take {spare_bytes / GIB:.0f} GiB"
    )


def _figures_of(what: str, compared: list[Compared], limit: float | None = None) -> list[Figure]:
    errors = [one.error for one in compared]
    sizes = [abs(error) for error in errors]
    mean = 100 * statistics.mean(sizes)
    worst = max(errors, key=abs)
    return [
        informs(f"mean error, {what}", mean, "%")
        if limit is None
        else at_most(f"mean error, {what}", mean, "%", limit),
        informs(f"median error, {what}", 100 * statistics.median(sizes), "%"),
        informs(f"worst error, {what}", 100 * worst, "%"),
        informs(f"predicted below what was measured, {what}", 100 * _under(errors), "%"),
    ]


def _under(errors: list[float]) -> float:
    return sum(error < 0 for error in errors) / len(errors)


# ------------------------------------------------------------------------------------------------------- other tools


def deepspeed_estimator(training: Training) -> float:
    """estimate_zero2/3_model_states_mem_needs (deepspeed/runtime/zero/stage_1_and_2.py, stage3.py), of this rank.

    It knows no tensor or pipeline parallelism: it is asked about the part of the model that the rank has.
    """
    shape, ranks = training.shape, max(1, training.dp)
    part = shape.parameters / (training.tp * training.pp)
    if training.zero_stage == 3:
        return 4 * max(shape.table, shape.layer_matrices) / training.tp + 18 * part / ranks
    return 2 * part + 18 * part / (ranks if training.zero_stage else 1)


def accelerate_rule(training: Training) -> float:
    """`accelerate estimate-memory`, "training with Adam": weights in their type, four times."""
    return 4.0 * training.width * training.shape.parameters


def eleuther_closed_form(training: Training) -> float:
    """EleutherAI/cookbook calc/calc_transformer_mem.py: states by ZeRO stage, s b h L (10 + 24 / t), and 5 GiB."""
    shape, ranks = training.shape, max(1, training.dp)
    part = shape.parameters / (training.tp * training.pp)
    cut = [ranks if training.zero_stage >= stage else 1 for stage in (3, 2, 1)]
    width = training.width
    states = width * part / cut[0] + width * part / cut[1] + 12 * part / cut[2]
    layers = shape.layers / training.pp
    activations = training.tokens * shape.hidden * layers * (10 + 24 / training.tp) * width / 2
    return states + activations + 5 * GIB


TOOLS: Mapping[str, Callable[[Training], float]] = {
    "DeepSpeed's estimator": deepspeed_estimator,
    "Accelerate's rule": accelerate_rule,
    "EleutherAI's closed form": eleuther_closed_form,
}


def _mean_error(compared: list[Compared], tool: Callable[[Training], float]) -> float:
    return statistics.mean(abs(tool(one.training) / one.measured_bytes - 1) for one in compared)


# ------------------------------------------------------------------------------------------------------------ tables


def _errors_table(what: str, compared: list[Compared]) -> Table:
    title = f"error of {what} by source, framework and kind"
    table = Table(title=title, title_justify="left", box=None, header_style="bold")
    for column in ("SOURCE", "FRAMEWORK", "KIND"):
        table.add_column(column, no_wrap=True, max_width=30)
    for column in ("ROWS", "MEAN", "MEDIAN", "WORST", "BELOW", *TOOLS):
        table.add_column(column, justify="right")
    groups: defaultdict[tuple[str, str, str], list[Compared]] = defaultdict(list)
    for one in compared:
        groups[one.row["source_repo"], one.row["framework"].strip(), one.kind.name].append(one)
    for group, ones in sorted(groups.items()):
        errors = [one.error for one in ones]
        sizes = [abs(error) for error in errors]
        table.add_row(
            *group,
            str(len(ones)),
            f"{statistics.mean(sizes):.1%}",
            f"{statistics.median(sizes):.1%}",
            f"{max(errors, key=abs):+.1%}",
            f"{_under(errors):.0%}",
            *(f"{_mean_error(ones, tool):.0%}" for tool in TOOLS.values()),
        )
    return table


def _excluded_table(excluded: Counter[tuple[str, str]]) -> Table:
    table = Table(title="excluded, and why", title_justify="left", box=None, header_style="bold")
    for column in ("SOURCE", "REASON", "ROWS"):
        table.add_column(column)
    for (source, reason), count in sorted(excluded.items()):
        table.add_row(source, reason, str(count))
    return table
