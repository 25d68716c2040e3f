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


def format_csv(view: ComparisonView) -> str:
    """Return the comparison's rows as CSV, with an empty cell for an unknown number; conclusion and
    notes are left out.
    """
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    setup = {name: view["setup"][name] for name in ("sequence_length", "steps")}
    setup |= {name: view["setup"]["provenance"].get(name) for name in PROVENANCE}
    writer.writerow([*CSV, "loss_deviation", *setup])
    for row in view["rows"]:
        deviation = stdev(row["losses"]) if len(row["losses"]) > 1 else None
        writer.writerow(
            [
                *(_get_value_at_path(row, PARTS.get(name, (name,))) for name in CSV),
                deviation,
                *map(_format_cell, setup.values()),
            ]
        )
    return text.getvalue()


def _get_value_at_path(row: Row, path: Sequence[str | int]) -> Any:
    value: Any = row
    for key in path:
        value = (value.get(key) if isinstance(value, Mapping) else value[key]) if value else None
    return _format_cell(value)


def _format_cell(value: Any) -> Any:
    # a sheet would run what begins so: OWASP, "CSV Injection"
    text = _join_lines(value) if isinstance(value, str) else ""
    return f"'{text}" if text.startswith(("=", "+", "-", "@")) else text or value


def _join_lines(text: str) -> str:
    """Return the text as one line, so that text from others cannot begin a line of the file."""
    return " ".join(text.split())


def format_markdown(view: ComparisonView) -> str:
    """Return the comparison as a Markdown table, with its caption above, and the conclusion and
    notes below.
    """
    heads, lines = _make_headings_and_cells(view)
    return str(_load_templates().markdown(heads, lines, _make_caption_and_note_lines(view, heads)))


def format_latex(view: ComparisonView) -> str:
    """Return the comparison as a LaTeX `tabular` with booktabs' rules; caption, conclusion and
    notes are comments above.
    """
    heads, lines = _make_headings_and_cells(view)
    parted = [head.removesuffix(")").split(" (") for head in heads]
    units = [f"({head[1]})" if len(head) > 1 else "" for head in parted]
    names = [head[0] for head in parted]
    return str(
        _load_templates().latex(names, units, lines, _make_caption_and_note_lines(view, heads))
    )


def _load_templates() -> Any:
    from orchestrator.backends.text_templates import load_text_template

    return load_text_template(
        "orchestrator.service.terminal",
        "comparison",
        cell=lambda text: text.replace("|", "&#124;"),
        latex=lambda text: text.translate(LATEX),
    ).module


def _make_headings_and_cells(view: ComparisonView) -> tuple[list[str], list[list[str]]]:
    """Return (headings, rows of texts) of at most eight columns; a column that no strategy has is
    left out.
    """
    rows = [
        row if row["outcome"] == "finished" else {**row, **NOT_MEASURED} for row in view["rows"]
    ]
    unit, size = _choose_unit_and_bytes([row["peak_bytes"] for row in rows])
    has_tokens = any(row["tokens_per_s"] for row in rows)
    rate = "tokens_per_s" if has_tokens else "samples_per_s"
    precisions = [row["settings"].get("precision", "") for row in rows]
    columns: dict[str, list[str]] = {
        "Strategy": _shorten_strategy_names([row["strategy"] for row in rows]),
        "Batch": [
            f"{row['micro_batch']}×{row['accumulation']}" if row["micro_batch"] else ""
            for row in rows
        ],
        "Precision": precisions if len({*filter(None, precisions)}) > 1 else [],
        "Step (s)": [_format_step(row) for row in rows],
        f"Peak ({unit})": [
            _format_significant(row["peak_bytes"] and row["peak_bytes"] / size) for row in rows
        ],
        "Tokens/s" if has_tokens else "Samples/s": [
            _format_significant(row[rate], 4) for row in rows
        ],
        "MFU (%)": [_format_significant(row["mfu"] and 100 * row["mfu"]) for row in rows],
        "Loss": [_format_loss(row) for row in rows],
        "Device-s": [_format_significant(row["device_s"]) for row in rows],
    }
    if any(columns["Precision"]):
        del columns["MFU (%)"]  # shares of different peaks
    filled = {head: cells for head, cells in columns.items() if any(cells)}
    return list(filled), [
        [_join_lines(cell) or "–" for cell in line] for line in zip(*filled.values(), strict=True)
    ]


def _choose_unit_and_bytes(byte_counts: Sequence[int | None]) -> tuple[str, int]:
    """Return (unit, its bytes) for a column of bytes: GiB if any number reaches it, else MiB."""
    name = (
        "GiB"
        if max((count or 0 for count in byte_counts), default=0) >= BINARY_UNITS["GiB"]
        else "MiB"
    )
    return name, BINARY_UNITS[name]


def _shorten_strategy_names(names: Sequence[str]) -> list[str]:
    """Return the strategies' names, without the number of devices if all have the same."""
    ends = {name.rpartition(" on ")[2] for name in names}
    return [name.rpartition(" on ")[0] if len(ends) == 1 else name for name in names]


def _format_step(row: Row) -> str:
    step_s = row["step_s"]
    within_s = row["step_within_s"]
    if row["outcome"] != "finished":
        return str(row["outcome"])
    if step_s is None or within_s is None:
        return _format_significant(step_s)
    half_s = (within_s[1] - within_s[0]) / 2
    if half_s <= NEAR * step_s:
        return format_with_error(step_s, half_s)
    return f"{_format_significant(step_s)} [{_format_significant(within_s[0])}, {_format_significant(within_s[1])}]"


def _format_loss(row: Row) -> str:
    losses = row["losses"] if row["loss"] is not None else ()
    return (
        format_with_error(row["loss"], stdev(losses))
        if len(losses) > 1
        else _format_significant(row["loss"], 4)
    )


def _format_significant(value: float | None, significant_digits: int = 3) -> str:
    """Return the number with `significant_digits` significant digits; "" where it is unknown."""
    if value is None:
        return ""
    decimals = significant_digits - 1 - floor(log10(abs(value))) if value else 0
    return f"{round(value, decimals):.{max(0, decimals)}f}"


def format_with_error(value: float, error: float) -> str:
    """Return the number rounded to the digits that its error leaves certain.

    Two digits of the error are shown if it begins with 1, else one.
    """
    if not error:
        return f"{_format_significant(value, 4)} ± 0"
    place = floor(log10(error))
    decimals = max(0, -place + (error / 10.0**place < 2))
    return f"{value:.{decimals}f} ± {error:.{decimals}f}"


def _make_caption_and_note_lines(view: ComparisonView, headings: Sequence[str]) -> list[str]:
    """Return the caption, the conclusion and its notes, each on one line."""
    return [
        _join_lines(note)
        for note in (*_make_caption_sentences(view, headings), view["verdict"], *view["notes"])
    ]


def _make_caption_sentences(view: ComparisonView, headings: Sequence[str]) -> list[str]:
    """Return sentences that say what was compared, and what the columns mean."""
    rows = view["rows"]
    devices = {row["devices"] for row in rows if row["devices"]}
    precisions = {row["settings"].get("precision") for row in rows} - {None}
    text = _load_templates().caption(
        view["setup"],
        NAMES,
        headings,
        devices.pop() if len(devices) == 1 else None,
        precisions.pop() if len(precisions) == 1 else None,
        max((row["repeats"] for row in rows), default=1),
        max((row["seeds"] for row in rows), key=len, default=()),
    )
    # the last line has no words of others
    return str(text).rstrip().rsplit("\n", 1)


WRITERS: Mapping[str, Callable[[ComparisonView], str]] = {
    ".csv": format_csv,
    ".md": format_markdown,
    ".tex": format_latex,
}
