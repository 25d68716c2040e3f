"""The rows of a comparison as a file: raw numbers as CSV, tables for papers in Markdown and LaTeX."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from math import floor, log10
from statistics import stdev
from typing import TYPE_CHECKING, Any

from orchestrator.specs.units import BINARY_UNITS

if TYPE_CHECKING:
    from orchestrator.service.views.columns import Row
    from orchestrator.service.views.comparison import ComparisonView

# half of an interval over its middle: a wider one is not symmetric, and stands as a range
NEAR = 0.2
CSV = (  # columns; units stand last in names
    "strategy",
    "plan",
    "outcome",
    "device",
    "devices",
    "micro_batch",
    "accumulation",
    "global_batch",
    "precision",
    "learning_rate",
    "repeats",
    "first_seed",
    "last_seed",
    "step_s",
    "step_low_s",
    "step_high_s",
    "times_fastest",
    "times_low",
    "times_high",
    "predicted_step_s",
    "peak_bytes",
    "predicted_peak_bytes",
    "reserved_bytes",
    "tokens_per_s",
    "samples_per_s",
    "mfu",
    "loss",
    "loss_distance",
    "device_s",
    "money",
)
PARTS: Mapping[str, tuple[str, str | int]] = {  # column -> key of a row, and the part of its value
    "global_batch": ("settings", "global_batch_size"),
    "precision": ("settings", "precision"),
    "first_seed": ("seeds", 0),
    "last_seed": ("seeds", -1),
    "step_low_s": ("step_within_s", 0),
    "step_high_s": ("step_within_s", 1),
    "times_low": ("times_within", 0),
    "times_high": ("times_within", 1),
}
# Of all rows; learning rates and seeds stand in columns of their own.
PROVENANCE = ("model", "parameters", "data", "optimizer", "commit")
NAMES = {
    "torch_version": "torch",
    "python_version": "Python",
    "cuda_version": "CUDA",
    "driver_version": "driver",
}
NOT_MEASURED = dict.fromkeys(
    ("peak_bytes", "tokens_per_s", "samples_per_s", "mfu", "loss")
)  # where it did not finish
LATEX = str.maketrans(
    {char: f"\\{char}" for char in "&%$#_{}"}
    | {"\\": r"\textbackslash{}", "^": r"\^{}", "~": r"\textasciitilde{}"}
    | {"–": "--", "·": r"$\cdot$", "×": r"$\times$", "±": r"$\pm$"}
)


def as_csv(view: ComparisonView) -> str:
    """Return the rows as CSV, an unknown number as an empty cell; the verdict and its notes have no place there."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    setup = {name: view["setup"][name] for name in ("sequence_length", "steps")}
    setup |= {name: view["setup"]["provenance"].get(name) for name in PROVENANCE}
    writer.writerow([*CSV, "loss_deviation", *setup])
    for row in view["rows"]:
        deviation = stdev(row["losses"]) if len(row["losses"]) > 1 else None
        writer.writerow(
            [
                *(_value(row, PARTS.get(name, (name,))) for name in CSV),
                deviation,
                *map(_cell_text, setup.values()),
            ]
        )
    return text.getvalue()


def _value(row: Row, path: Sequence[str | int]) -> Any:
    value: Any = row
    for key in path:
        value = (value.get(key) if isinstance(value, Mapping) else value[key]) if value else None
    return _cell_text(value)


def _cell_text(value: Any) -> Any:
    # a sheet would run what begins so: OWASP, "CSV Injection"
    text = _line(value) if isinstance(value, str) else ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text or value


def _line(text: str) -> str:
    """Return the text as one line: what others wrote begins none of its own."""
    return " ".join(text.split())


def as_markdown(view: ComparisonView) -> str:
    """Return a table for a page, with its caption, the verdict and its notes below."""
    heads, lines = _table(view)
    return str(_templates().markdown(heads, lines, _notes(view, heads)))


def as_latex(view: ComparisonView) -> str:
    """Return a `tabular` with booktabs' rules; its caption, the verdict and its notes stand above as comments."""
    heads, lines = _table(view)
    parted = [head.removesuffix(")").split(" (") for head in heads]
    units = [f"({head[1]})" if len(head) > 1 else "" for head in parted]
    names = [head[0] for head in parted]
    return str(_templates().latex(names, units, lines, _notes(view, heads)))


def _templates() -> Any:
    from orchestrator.backends.text_templates import load_text_template

    return load_text_template(
        "orchestrator.service.terminal",
        "comparison",
        cell=lambda text: text.replace("|", "&#124;"),
        latex=lambda text: text.translate(LATEX),
    ).module


def _table(view: ComparisonView) -> tuple[list[str], list[list[str]]]:
    """Return the heads and the lines of at most eight columns; one that no strategy has is left out."""
    rows = [
        row if row["outcome"] == "finished" else {**row, **NOT_MEASURED} for row in view["rows"]
    ]
    unit, size = _unit([row["peak_bytes"] for row in rows])
    has_tokens = any(row["tokens_per_s"] for row in rows)
    rate = "tokens_per_s" if has_tokens else "samples_per_s"
    precisions = [row["settings"].get("precision", "") for row in rows]
    columns: dict[str, list[str]] = {
        "Strategy": _short_names([row["strategy"] for row in rows]),
        "Batch": [
            f"{row['micro_batch']}×{row['accumulation']}" if row["micro_batch"] else ""
            for row in rows
        ],
        "Precision": precisions if len({*filter(None, precisions)}) > 1 else [],
        "Step (s)": [_step_text(row) for row in rows],
        f"Peak ({unit})": [_digits(row["peak_bytes"] and row["peak_bytes"] / size) for row in rows],
        "Tokens/s" if has_tokens else "Samples/s": [_digits(row[rate], 4) for row in rows],
        "MFU (%)": [_digits(row["mfu"] and 100 * row["mfu"]) for row in rows],
        "Loss": [_loss_text(row) for row in rows],
        "Device-s": [_digits(row["device_s"]) for row in rows],
    }
    if any(columns["Precision"]):
        del columns["MFU (%)"]  # shares of different peaks
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    return list(filled), [
        [_line(cell) or "–" for cell in line] for line in zip(*filled.values(), strict=True)
    ]


def _unit(counts: Sequence[int | None]) -> tuple[str, int]:
    """Return the unit for a column of bytes: GiB from one of them on, else MiB."""
    name = (
        "GiB" if max((count or 0 for count in counts), default=0) >= BINARY_UNITS["GiB"] else "MiB"
    )
    return name, BINARY_UNITS[name]


def _short_names(names: Sequence[str]) -> list[str]:
    """Return the names without the number of devices, where all have the same."""
    ends = {name.rpartition(" on ")[2] for name in names}
    return [name.rpartition(" on ")[0] if len(ends) == 1 else name for name in names]


def _step_text(row: Row) -> str:
    step_s = row["step_s"]
    within_s = row["step_within_s"]
    if row["outcome"] != "finished":
        return str(row["outcome"])
    if step_s is None or within_s is None:
        return _digits(step_s)
    half_s = (within_s[1] - within_s[0]) / 2
    if half_s <= NEAR * step_s:
        return with_error(step_s, half_s)
    return f"{_digits(step_s)} [{_digits(within_s[0])}, {_digits(within_s[1])}]"


def _loss_text(row: Row) -> str:
    losses = row["losses"] if row["loss"] is not None else ()
    return with_error(row["loss"], stdev(losses)) if len(losses) > 1 else _digits(row["loss"], 4)


def _digits(value: float | None, count: int = 3) -> str:
    """Return the number with so many significant digits; "" where it is unknown."""
    if value is None:
        return ""
    decimals = count - 1 - floor(log10(abs(value))) if value else 0
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def with_error(value: float, error: float) -> str:
    """Return the number to the digit that its error leaves certain: two digits of an error below 2, else one."""
    if not error:
        return f"{_digits(value, 4)} ± 0"
    place = floor(log10(error))
    decimals = max(0, -place + (error / 10.0**place < 2))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def _notes(view: ComparisonView, heads: Sequence[str]) -> list[str]:
    """Return the caption, the verdict and its notes, one line each."""
    return [_line(note) for note in (*_caption(view, heads), view["verdict"], *view["notes"])]


def _caption(view: ComparisonView, heads: Sequence[str]) -> list[str]:
    """Return what was compared, and what the columns mean."""
    rows = view["rows"]
    devices = {row["devices"] for row in rows if row["devices"]}
    precisions = {row["settings"].get("precision") for row in rows} - {None}
    text = _templates().caption(
        view["setup"],
        NAMES,
        heads,
        devices.pop() if len(devices) == 1 else None,
        precisions.pop() if len(precisions) == 1 else None,
        max((row["repeats"] for row in rows), default=1),
        max((row["seeds"] for row in rows), key=len, default=()),
    )
    # the last line has no words of others
    return str(text).rstrip().rsplit("\n", 1)


WRITERS: Mapping[str, Callable[[ComparisonView], str]] = {
    ".csv": as_csv,
    ".md": as_markdown,
    ".tex": as_latex,
}
