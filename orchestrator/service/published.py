"""What would other people's trainings need? The rows of a CSV file, estimated one by one."""

from __future__ import annotations

import csv
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TypedDict

from rich.table import Table
from rich.text import Text

from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.published import Described, described_row
from orchestrator.memory.foreign.row import COLUMNS
from orchestrator.planning.frontier import MARGIN
from orchestrator.specs.devices import DEVICES
from orchestrator.specs.errors import SpecError
from orchestrator.specs.units import parse_bytes

NEEDED = ("model", "framework", "micro_batch", "seq_len", "precision")


class RowEstimate(TypedDict):
    """One row: either its bytes, with what was inferred, or the reason why it cannot be described."""

    id: str
    model: str
    framework: str
    allocated_gib: float | None
    reserved_gib: float | None
    device_gib: float | None
    moment: str
    by_cause_gib: dict[str, float]
    fits: bool | None  # with planning's margin, on the row's device; None: it says no size, or leaves too much open
    is_lower_bound: bool
    inferred: list[str]
    reason: str


def read_rows(path: Path) -> list[dict[str, str]]:
    """The rows of a CSV file with the columns of published.csv; further columns are left alone.

    Where there is no column `id`, a row's is its number. Raises SpecError where the file is none of that kind.
    """
    try:
        with path.open(newline="", encoding="utf-8") as file:
            reader = csv.DictReader(file)
            columns = reader.fieldnames or ()
            rows = [
                {"id": str(number), **{name: value or "" for name, value in row.items() if name}}
                for number, row in enumerate(reader, start=1)
            ]
    except OSError as error:
        raise SpecError(f"the file cannot be read: {error.strerror}", source=str(path)) from error
    except (UnicodeDecodeError, csv.Error) as error:
        raise SpecError("the file cannot be read as CSV", source=str(path), got=str(error)) from error
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise SpecError(
            f"the file has no column {', '.join(missing)}",
            source=str(path),
            allowed=", ".join((*COLUMNS, "gpu_mem_GB")),
        )
    if not rows:
        raise SpecError("the file has no rows", source=str(path), hint="one training in every line below the header")
    return rows


def estimated_row(row: Mapping[str, str]) -> RowEstimate:
    """What the training of one row needs."""
    named = {"id": row.get("id", ""), "model": row.get("model", ""), "framework": row.get("framework", "").strip()}
    try:
        described = described_row(row)
    except SpecError as error:
        return RowEstimate(
            **named,  # type: ignore[typeddict-item]
            allocated_gib=None,
            reserved_gib=None,
            device_gib=None,
            moment="",
            by_cause_gib={},
            fits=None,
            is_lower_bound=False,
            inferred=[],
            reason=error.what,
        )
    capacity_bytes = capacity_bytes_of(row.get("gpu_mem_GB", ""), row.get("gpu", ""))
    estimate = estimate_foreign(described.training, capacity_bytes)
    fits = None if capacity_bytes is None else fits_in(described, capacity_bytes)
    return RowEstimate(
        **named,  # type: ignore[typeddict-item]
        allocated_gib=_gib(estimate.allocated_bytes),
        reserved_gib=_gib(estimate.reserved_bytes),
        device_gib=_gib(estimate.device_bytes),
        moment=estimate.moment,
        by_cause_gib={cause: _gib(count) for cause, count in estimate.by_cause},
        fits=fits,
        is_lower_bound=described.is_lower_bound,
        inferred=list(described.inferred),
        reason="",
    )


def _gib(count: int) -> float:
    return round(count / 2**30, 3)


def capacity_bytes_of(size: str, gpu: str = "") -> int | None:
    """What the driver shows of a device sold with so many GB: 99 % of as many GiB; None where no size is said.

    32,510 MiB of a V100, 81,251 of an A100 with 80 GB, 24,564 of an RTX 4090. A T4, an L4, an A10 and an L40S show
    less, as check bits lie in their memory: as much as the catalogue of devices says.
    """
    try:
        shown_bytes = round(0.99 * float(size) * 2**30)
    except ValueError:
        return None
    name = re.sub(r"nvidia|tesla|geforce|[^a-z0-9]|\d+gi?b$", "", gpu.lower())
    device = DEVICES.get(f"{'a10' if name == 'a10g' else name}-{size}gb")
    return shown_bytes if device is None else min(shown_bytes, parse_bytes(device["memory"]))


def fits_in(described: Described, capacity_bytes: int) -> bool | None:
    """Whether planning would call it fitting; a lower bound can only be too large."""
    room_bytes = round(capacity_bytes / MARGIN)
    if estimate_foreign(described.training, room_bytes).device_bytes > room_bytes:
        return False
    return None if described.is_lower_bound else True


def rows_table(found: list[RowEstimate]) -> Table:
    """GiB that are allocated, reserved and needed of the device by every row, or why there are none."""
    table = Table(box=None, pad_edge=False, header_style="bold")
    table.add_column("ROW", overflow="fold")
    table.add_column("TRAINING, ITS PEAK AND WHAT WAS INFERRED", ratio=1, min_width=24, overflow="fold")
    for column in ("ALLOCATED", "RESERVED", "DEVICE"):
        table.add_column(f"{column}\nGiB", justify="right", no_wrap=True)
    table.add_column("FITS", no_wrap=True)
    for row in found:
        sizes = [row["allocated_gib"], row["reserved_gib"], row["device_gib"]]
        told = [f"at {row['moment']}", *row["inferred"]] if row["moment"] else [row["reason"]]
        table.add_row(
            row["id"],
            Text.assemble(f"{row['model']}, {row['framework']}", ("".join(f"\n  {one}" for one in told), "dim")),
            *("-" if size is None else f"{size:.2f}" for size in sizes),
            {True: "yes", False: "no", None: "-"}[row["fits"]],
        )
    return table
