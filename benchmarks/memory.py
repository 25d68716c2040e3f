"""How well is memory predicted? Against exactly counted peaks of real ranks on virtual devices.

The closed form and the trace over their full matrices, and what planning promises over random draws: all that the long
tests of tests/memory run, by the same functions. About 40 minutes on two cores that others use too (2026-11).
"""

from __future__ import annotations

import tempfile
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from rich.console import Console
from rich.table import Table

from benchmarks.figure import Figure, at_most, informs, say
from orchestrator.planning.frontier import MARGIN
from orchestrator.specs.choices import Engine
from orchestrator.specs.plan import Plan
from tests.memory import matrix, test_traced
from tests.memory.matrix import Row
from tests.memory.test_closed_form import MEAN_ERROR_MAX
from tests.memory.test_fits import DRAWS, PIECES, REFUSED_MAX, count_refused, piece


def figures() -> list[Figure]:
    """Mean and worst error of both predictions; plans that did not fit as promised, or were refused in vain."""
    with tempfile.TemporaryDirectory() as folder:
        say("the closed form over its matrix")
        closed = matrix.full(Path(folder) / "closed")
        say("the trace over its matrix")
        traced = test_traced.full(Path(folder) / "traced")
        found = _errors("closed form", closed, 100 * MEAN_ERROR_MAX, None)
        found += _errors(
            "trace", traced, 100 * test_traced.MEAN_ERROR_MAX, 100 * test_traced.WORST_ERROR_MAX
        )
        return found + _promises(Path(folder))


def _errors(
    how: str, rows: Mapping[str, Sequence[Row]], mean_max: float, worst_max: float | None
) -> list[Figure]:
    errors = [100 * row.error for each in rows.values() for row in each]
    worst = max(map(abs, errors))
    short = [
        row
        for each in rows.values()
        for row in each
        if row.measured_bytes > row.predicted_bytes * MARGIN
    ]
    if short:
        print(matrix.table(short))
    engines: dict[tuple[str, str], list[float]] = defaultdict(list)
    for family, each in rows.items():
        for row in each:
            engines[family, _engine(row.plan)].append(100 * row.error)
    Console().print(_table(how, engines))
    return [
        at_most(
            f"{how}: mean error of the allocated peak, either way", _mean(errors), "%", mean_max
        ),
        informs(f"{how}: worst error", worst, "%")
        if worst_max is None
        else at_most(f"{how}: worst error", worst, "%", worst_max),
        informs(f"{how}: largest overestimate", max(errors), "%"),
        informs(f"{how}: largest underestimate", max(0.0, -min(errors)), "%"),
        at_most(
            f"{how}: plans called fitting that did not fit, of {len(errors)}",
            len(short),
            "plans",
            0,
        ),
        *(
            informs(f"{how}: mean error, {family}, {engine}", _mean(each), "%")
            for (family, engine), each in engines.items()
        ),
    ]


def _promises(folder: Path) -> list[Figure]:
    refusals = fitting = broken = 0
    for number in range(PIECES):
        say(f"draws {number * DRAWS} to {(number + 1) * DRAWS} of {PIECES * DRAWS}")
        try:
            in_vain, would_fit = count_refused(piece(number), folder / str(number))
        except AssertionError as error:
            print(error)
            broken += 1
        else:
            refusals, fitting = refusals + in_vain, fitting + would_fit
    share = 100 * refusals / max(1, fitting)
    launches = (
        f"launches of {DRAWS} draws, of {PIECES}, in which a plan called fitting ran out of memory"
    )
    return [
        at_most(launches, broken, "launches", 0),
        at_most(f"plans refused in vain, of {fitting} that fit", share, "%", 100 * REFUSED_MAX),
    ]


def _engine(plan: Plan) -> str:
    if plan.layout.pp > 1:
        return "pipeline"
    if plan.layout.tp > 1:
        return "tensor parallel"
    if plan.engine is Engine.DEEPSPEED:
        return f"ZeRO-{int(plan.zero_stage)}"
    return "FSDP2" if plan.zero_stage else "DDP"


def _table(how: str, engines: Mapping[tuple[str, str], Sequence[float]]) -> Table:
    shown = Table(title=how, title_justify="left", box=None, pad_edge=False, header_style="bold")
    for column in ("FAMILY", "ENGINE", "PLANS", "MEAN %", "LOWEST %", "HIGHEST %"):
        shown.add_column(column, justify="left" if column in ("FAMILY", "ENGINE") else "right")
    for (family, engine), errors in engines.items():
        numbers = (_mean(errors), min(errors), max(errors))
        shown.add_row(family, engine, str(len(errors)), *(f"{number:.2f}" for number in numbers))
    return shown


def _mean(errors: Sequence[float]) -> float:
    return sum(map(abs, errors)) / len(errors)
