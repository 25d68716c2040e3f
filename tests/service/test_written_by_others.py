"""Laws of files for people: what the owner of a job wrote is text in a sheet, in a paper and on a page."""

from __future__ import annotations

import csv
import io
import random
from itertools import chain
from typing import Any

import pytest

from orchestrator.service.terminal.comparison_files import WRITERS
from tests.service.test_compare import compared_view

FORMULAS = ("=cmd|' /C calc'!A1", "+1+cmd", "-2+3", "@SUM(A1)", "\t=1", "\r=1", " =1", "\n=1")
COMMANDS = (
    "\\input{/etc/passwd}",
    "a\n\\write18{id}",
    "a\r\\input{x}",
    "\u2028\\input{x}",
    "\x0b\\in",
)
SIGNS = ("=", "+", "-", "@")
TEXTS = ("strategy", "plan", "outcome", "device")
CASES = 40


def poisoned(draw: random.Random) -> Any:
    """Return a comparison in whose texts formulas and commands stand."""
    view: Any = compared_view()
    evil = (*FORMULAS, *COMMANDS)
    for row in view["rows"]:
        for name in draw.sample(TEXTS, 2):
            row[name] = draw.choice(evil)
        row["settings"] = {**row["settings"], "precision": draw.choice(evil)}
    view["setup"] = {**view["setup"], "model": draw.choice(evil), "device": draw.choice(evil)}
    view["setup"]["versions"] = {draw.choice(evil): draw.choice(evil)}
    view["verdict"], view["notes"] = draw.choice(evil), [draw.choice(evil)]
    return view


def test_no_cell_of_a_sheet_is_a_formula_and_numbers_stay_numbers() -> None:
    for number in range(CASES):
        view = poisoned(random.Random(number))
        view["rows"][0]["loss"] = -0.5
        _, *rows = csv.reader(io.StringIO(WRITERS[".csv"](view)))
        cells = [*chain.from_iterable(rows)]
        assert {cell for cell in cells if cell.lstrip().startswith(SIGNS)} <= {"-0.5"}


@pytest.mark.parametrize("suffix", [".tex", ".md"])
def test_no_text_makes_a_line_or_a_command_of_its_own(suffix: str) -> None:
    clean: Any = compared_view()
    lines = len(WRITERS[suffix]({**clean, "verdict": "v", "notes": ["n"]}).splitlines())
    for number in range(CASES):
        text = WRITERS[suffix](poisoned(random.Random(number)))
        assert len(text.splitlines()) == lines, text
        if suffix == ".tex":
            body = "".join(line for line in text.splitlines() if not line.startswith("%"))
            assert "\\input" not in body
            assert "\\write18" not in body
