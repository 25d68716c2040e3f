"""Exports the rows of a comparison: CSV for programs, Markdown and LaTeX for papers."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Mapping, Sequence
from typing import Any

COLUMNS = {  # by what a row has
    "strategy": "strategy",
    "plan": "plan",
    "outcome": "outcome",
    "micro_batch": "micro-batch",
    "repeats": "repeats",
    "step_s": "step (s)",
    "step_within_s": "95 % interval (s)",
    "predicted_step_s": "predicted step (s)",
    "peak_bytes": "peak (bytes)",
    "predicted_peak_bytes": "predicted peak (bytes)",
    "tokens_per_s": "tokens/s",
    "mfu": "MFU",
    "loss": "loss",
    "loss_distance": "distance of losses",
    "device_s": "device-seconds",
    "money": "cost",
}
LATEX = str.maketrans({char: f"\\{char}" for char in "&%$#_{}"} | {"·": "$\\cdot$", "\\": "\\textbackslash{}"})


def _cells(row: Mapping[str, Any]) -> list[str]:
    return [_word(row.get(name)) for name in COLUMNS]


def _word(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, list | tuple):
        return " to ".join(_word(part) for part in value)
    return f"{value:.6g}" if isinstance(value, float) else str(value)


def as_csv(rows: Sequence[Mapping[str, Any]], _: Sequence[str]) -> str:
    """Return the rows as CSV with a header, without the verdict and notes."""
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(COLUMNS)
    writer.writerows(_cells(row) for row in rows)
    return text.getvalue()


def as_markdown(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Return a Markdown table of columns that any row has, with the verdict and its notes below."""
    table = [["strategy", *(COLUMNS[name] for name in _known(rows))], *_lines(rows)]
    body = [f"| {' | '.join(cell.replace('|', '&#124;') for cell in line)} |" for line in table]
    rule = f"|{'---|' * len(table[0])}"
    return "\n".join([body[0], rule, *body[1:], "", *notes, ""])


def as_latex(rows: Sequence[Mapping[str, Any]], notes: Sequence[str]) -> str:
    """Return a `tabular` with booktabs' rules, the verdict and its notes as comments."""
    table = [["strategy", *(COLUMNS[name] for name in _known(rows))], *_lines(rows)]
    body = [f"{' & '.join(cell.translate(LATEX) for cell in line)} \\\\" for line in table]
    head = f"\\begin{{tabular}}{{l{'r' * (len(table[0]) - 1)}}}"
    comments = [f"% {note}" for note in notes]
    return "\n".join(
        [*comments, head, "\\toprule", body[0], "\\midrule", *body[1:], "\\bottomrule", "\\end{tabular}", ""]
    )


def _known(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return [name for name in COLUMNS if name not in ("strategy", "plan") and any(row.get(name) for row in rows)]


def _lines(rows: Sequence[Mapping[str, Any]]) -> list[list[str]]:
    return [[row["strategy"], *(_word(row.get(name)) for name in _known(rows))] for row in rows]


WRITERS: Mapping[str, Callable[[Sequence[Mapping[str, Any]], Sequence[str]], str]] = {
    ".csv": as_csv,
    ".md": as_markdown,
    ".tex": as_latex,
}
