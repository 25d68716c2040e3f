"""How well is a plan's step time predicted? Against published step times, of tuned configurations (benchmarks/tuned.py)
and of others (benchmarks/step_times.py), and against CPU ranks of this machine (benchmarks/cpu_ranks.py).

Plans are compared within a group: the same model, GPUs and global batch on the same machines.
"""

from __future__ import annotations

import statistics
from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from rich.console import Console
from rich.table import Table

from benchmarks import cpu_ranks, tuned
from benchmarks.figure import Figure, at_least, at_most, informs
from benchmarks.ranks import spearman
from benchmarks.step_times import DATA, Measured, Shape, sources

COMPARED_MIN = 3  # plans of a group whose order says something
LOST_MAX_PERCENT = 10  # of a group's best time, by the choice at p95
MICRO_BATCHES = (1, 2, 4, 8, 16, 32, 64)  # how far apart residuals are shown


def figures() -> list[Figure]:
    """Time of tuned configurations, order, choice and time of the plans of others, and time on CPU ranks."""
    if not DATA.is_dir():
        Console().print(f"nothing published to compare with: {DATA.name} is not here")
        return [*tuned.figures(), *cpu_ranks.figures()]
    found, regrets, consistent, least, beaten = [], [], [], [], []
    for name, rows in sources().items():
        print_residuals(name, rows)
        groups = grouped(rows).values()
        ranked = [group for group in groups if len(group) >= COMPARED_MIN]
        if ranked:
            orders = [
                spearman([r.predicted_s for r in group], [r.measured_s for r in group])
                for group in ranked
            ]
            lost = [100 * regret(group) for group in groups if len(group) > 1]
            regrets += lost
            consistent += [
                100 * regret(group)
                for group in groups
                if len(group) > 1 and not contradicts_itself(group)
            ]
            beaten += [
                fastest_layer(group) for group in groups if 100 * regret(group) > LOST_MAX_PERCENT
            ]
            least += [100 * regret(knowing_layouts(group)) for group in groups if len(group) > 1]
            known = [
                spearman(
                    [r.predicted_s for r in knowing_layouts(group)], [r.measured_s for r in group]
                )
                for group in ranked
            ]
            found += [
                at_least(
                    f"{name}: rank correlation in {len(ranked)} groups, mean",
                    statistics.mean(orders),
                    "",
                    0.95,
                ),
                informs(
                    f"{name}: rank correlation, layouts known, mean", statistics.mean(known), ""
                ),
                informs(f"{name}: rank correlation, median", statistics.median(orders), ""),
                informs(f"{name}: rank correlation, worst", min(orders), ""),
                informs(
                    f"{name}: lost by our choice in {len(lost)} groups, median",
                    statistics.median(lost),
                    "%",
                ),
                informs(f"{name}: lost by our choice, p95", compute_quantile(lost, 0.95), "%"),
                *_by_halves(f"{name}: rank correlation, mean", orders, statistics.mean, ""),
            ]
        if series := by_steps(rows):
            off = 100 * max(off_a_line(points) for points in series)
            found.append(
                informs(
                    f"{name}: {len(series)} series of batch sizes, furthest off a line", off, "%"
                )
            )
        errors = [100 * abs(row.ratio - 1) for row in rows]
        found += [
            informs(
                f"{name}: error of the time of {len(rows)} plans, median",
                statistics.median(errors),
                "%",
            ),
            informs(f"{name}: error of the time, p90", compute_quantile(errors, 0.9), "%"),
            informs(
                f"{name}: predicted over measured, median",
                statistics.median(row.ratio for row in rows),
                "",
            ),
        ]
    return [
        *tuned.figures(),
        *found,
        at_most(
            f"lost by our choice in all {len(regrets)} groups, median",
            statistics.median(regrets),
            "%",
            3,
        ),
        at_most(
            "lost by our choice in all groups, p95",
            compute_quantile(regrets, 0.95),
            "%",
            LOST_MAX_PERCENT,
        ),
        informs(f"groups in which it loses over {LOST_MAX_PERCENT} %", len(beaten), ""),
        informs(
            "layers (width, tensor-parallel degree, micro-batch) that are the fastest there",
            len(set(beaten)),
            "",
        ),
        informs("lost by our choice, layouts known, p95", compute_quantile(least, 0.95), "%"),
        informs(
            "groups whose fastest plan computed more samples in less time",
            len(regrets) - len(consistent),
            "",
        ),
        informs(
            f"lost by our choice in the {len(consistent)} others, p95",
            compute_quantile(consistent, 0.95),
            "%",
        ),
        *_by_halves(
            "lost by our choice, p95", regrets, lambda half: compute_quantile(half, 0.95), "%"
        ),
        *cpu_ranks.figures(),
    ]


def _by_halves(
    figure: str, groups: Sequence[float], summary: Callable[[Sequence[float]], float], unit: str
) -> list[Figure]:
    """The figure of every other group, and of those between: what was seen in one half has to hold in the other."""
    if len(groups) < 2:
        return []
    halves = {"first": groups[::2], "second": groups[1::2]}
    return [
        informs(f"{figure}, {name} half of the groups", summary(half), unit)
        for name, half in halves.items()
    ]


def grouped(rows: Iterable[Measured]) -> dict[tuple[object, ...], list[Measured]]:
    found: dict[tuple[object, ...], list[Measured]] = defaultdict(list)
    for row in rows:
        found[row.group].append(row)
    return found


def regret(group: Sequence[Measured]) -> float:
    """How much longer than the fastest the plan took that we predict to be the fastest."""
    chosen = min(group, key=lambda row: row.predicted_s)
    return chosen.measured_s / min(row.measured_s for row in group) - 1


def knowing_layouts(group: Sequence[Measured]) -> list[Measured]:
    """The same plans as a model would predict them that had, of every layout here, the median error from its rows.

    What it still gets wrong differs between micro-batches of one layout: no further term of a layout can mend that.
    """
    ratios = defaultdict(list)
    for row in group:
        ratios[row.plan.layout, row.plan.zero_stage].append(row.ratio)
    known = {layout: statistics.median(found) for layout, found in ratios.items()}
    return [
        replace(row, predicted_s=row.predicted_s / known[row.plan.layout, row.plan.zero_stage])
        for row in group
    ]


def by_steps(rows: Iterable[Measured]) -> list[dict[int, float]]:
    """Seconds by number of micro-batches of what differs in nothing else, where there are enough to say something."""
    found: dict[tuple[object, ...], dict[int, float]] = defaultdict(dict)
    for row in rows:
        steps = row.plan.gradient_accumulation_steps
        found[row.group[-2:], row.plan.layout, row.plan.micro_batch_size][steps] = row.measured_s
    return [points for points in found.values() if len(points) >= COMPARED_MIN]


def off_a_line(points: dict[int, float]) -> float:
    """How far, at most, a step is off the line through all: timed ones by their noise, added up ones by nothing."""
    slope, start = statistics.linear_regression(list(points), list(points.values()))
    return max(abs(start + slope * steps - seconds) / seconds for steps, seconds in points.items())


def fastest_layer(group: Sequence[Measured]) -> tuple[object, ...]:
    """Which layer the fastest plan has: of rows that are sums, those with the same share its time."""
    fastest = min(group, key=lambda row: row.measured_s)
    shape, plan = fastest.group[-2], fastest.plan
    assert isinstance(shape, Shape)
    return shape.hidden, plan.layout.tp, plan.micro_batch_size


def contradicts_itself(group: Sequence[Measured]) -> bool:
    """Whether the fastest plan's micro-batches took less time than smaller ones of the same layout.

    In our model more work of the same kind takes longer: it cannot foresee that such a plan is the fastest.
    """
    fastest = min(group, key=lambda row: row.measured_s)
    return any(
        (row.plan.layout, row.plan.zero_stage) == (fastest.plan.layout, fastest.plan.zero_stage)
        and row.plan.micro_batch_size < fastest.plan.micro_batch_size
        and _micro_batch_s(row) > _micro_batch_s(fastest)
        for row in group
    )


def _micro_batch_s(row: Measured) -> float:
    """Of a step of so many micro-batches, that come through so many stages; the rest of a step is in it."""
    return row.measured_s / (row.plan.gradient_accumulation_steps + row.plan.layout.pp - 1)


def compute_quantile(values: Sequence[float], share: float) -> float:
    """The smallest value that `share` of them do not exceed."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def print_residuals(name: str, rows: Sequence[Measured]) -> None:
    """Predicted over measured by layout and micro-batch: median and number of plans."""
    shown = Table(
        title=f"{name}: predicted over measured", title_justify="left", box=None, pad_edge=False
    )
    for column in ("TP", "PP", *(f"MICRO {low}-{2 * low - 1}" for low in MICRO_BATCHES)):
        shown.add_column(column, justify="right", no_wrap=True)
    cells: dict[tuple[int, int], dict[int, list[float]]] = defaultdict(lambda: defaultdict(list))
    for row in rows:
        size = row.plan.micro_batch_size
        cells[row.plan.layout.tp, row.plan.layout.pp][
            max(low for low in MICRO_BATCHES if low <= size)
        ].append(row.ratio)
    for (tp, pp), by_size in sorted(cells.items()):
        shown.add_row(str(tp), str(pp), *(_cell(by_size[low]) for low in MICRO_BATCHES))
    Console(width=120).print(shown)


def _cell(ratios: Sequence[float]) -> str:
    return f"{statistics.median(ratios):.2f} ({len(ratios)})" if ratios else ""
