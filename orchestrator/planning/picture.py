"""Text chart of the frontier (plans that no other beats): step time against device bytes."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import NamedTuple

from orchestrator.specs.frozen import frozen
from orchestrator.specs.units import BINARY_UNITS, SECOND_UNITS, format_bytes

COLUMNS = 78
ROWS = 17
LABEL_COLUMNS = 10  # left of the axis: "512 MiB", "1.25 GiB"
# highest over lowest: beyond, ticks are powers; below, they are equal steps
WIDE_BYTES = 4.0
WIDE_SECONDS = 8.0
STEPS_WANTED = 7
# at least so many between two labels
ROWS_BETWEEN = 2
COLUMNS_BETWEEN = 3
COLUMNS_A_TICK = 10
PADDING = 0.05  # of the span: room beyond the outermost points
PADDING_MIN = math.log(1.06)
# the end of the memory over the highest point: so near it is always in the picture
LIMIT_NEAR = 1.5


class Tick(NamedTuple):
    """A round value of an axis, with its label."""

    value: float
    label: str


class Mark(StrEnum):
    """The status of a plan in the chart; later marks are drawn over earlier ones."""

    TOO_BIG = "too big"
    FITS = "fits"
    REFUTED = "ran out of memory"
    CHOSEN = "chosen"
    PREDICTED = "predicted"
    MEASURED = "measured"


SYMBOLS = {
    Mark.TOO_BIG: "·",
    Mark.FITS: "○",
    Mark.REFUTED: "✗",
    Mark.CHOSEN: "●",
    Mark.PREDICTED: "◇",
    Mark.MEASURED: "◆",
}


@frozen
class Point:
    """A plan in a chart, with `label` beside it and its name in the legend."""

    step_s: float
    needed_bytes: int
    mark: Mark
    label: str = ""
    name: str = ""
    within_s: tuple[float, float] | None = None  # 95 % interval of its step time


@frozen
class Picture:
    """A chart of the plans of one job on one kind of device, with the limit of its memory."""

    device: str
    capacity_bytes: int
    points: tuple[Point, ...]

    @property
    def span_s(self) -> tuple[float, float]:
        """(Least, largest) step time that the chart shows."""
        return _pad_low_and_high(
            [
                seconds
                for point in self.points
                for seconds in (point.step_s, *(point.within_s or ()))
            ]
        )

    @property
    def span_bytes(self) -> tuple[float, float]:
        """(Least, largest) bytes that the chart shows."""
        needs = [point.needed_bytes for point in self.points]
        return _pad_low_and_high([self.capacity_bytes, *needs] if self.has_limit else needs)

    @property
    def has_limit(self) -> bool:
        """Whether the chart shows the device's capacity; far above all points, it would leave half
        of it empty.
        """
        needs = [point.needed_bytes for point in self.points]
        return self.capacity_bytes / max(needs) <= max(LIMIT_NEAR, max(needs) / min(needs))


@dataclass(frozen=True, slots=True)
class _Axis:
    """A logarithmic scale over cells 0 to `cells` - 1."""

    low: float
    high: float
    cells: int

    def find_cell(self, value: float) -> int:
        share = math.log(value / self.low) / math.log(self.high / self.low)
        return round(share * (self.cells - 1))


def draw_lines(picture: Picture) -> list[str]:
    """Return the chart as lines of at most COLUMNS characters, with logarithmic scales."""
    assert picture.points, "nothing to draw"
    across = _Axis(*picture.span_s, COLUMNS - LABEL_COLUMNS - 1)
    up = _Axis(*picture.span_bytes, ROWS)
    grid = [[" "] * across.cells for _ in range(ROWS)]
    if picture.has_limit:
        grid[up.find_cell(picture.capacity_bytes)] = ["╌"] * across.cells
    order = list(Mark)
    for point in sorted(picture.points, key=lambda point: order.index(point.mark)):
        _draw_point(grid, across.find_cell(point.step_s), up.find_cell(point.needed_bytes), point)
    ends = f" memory ends: {format_bytes(picture.capacity_bytes)} "
    if picture.has_limit:
        _write_into_dashes(grid[up.find_cell(picture.capacity_bytes)], ends)
    ticks = choose_byte_ticks(*picture.span_bytes, ROWS // ROWS_BETWEEN)
    labels = {up.find_cell(value): text for value, text in ticks}
    lines = [
        f"{'needs':>{LABEL_COLUMNS - 1}}{'' if picture.has_limit else f' (above all, {ends.strip()})'}"
    ]
    for row in range(ROWS - 1, -1, -1):
        lines.append(
            f"{labels.get(row, ''):>{LABEL_COLUMNS - 1}} {'┤' if row in labels else '│'}{''.join(grid[row])}"
        )
    return [line.rstrip() for line in (*lines, *_draw_axis_and_legend(picture, across))]


def describe_legend(picture: Picture) -> str:
    """Return text with the meaning of each symbol in the chart."""
    used = {point.mark for point in picture.points}
    return "   ".join(f"{SYMBOLS[mark]} {mark}" for mark in reversed(Mark) if mark in used)


def choose_byte_ticks(low_bytes: float, high_bytes: float, count_max: int) -> list[Tick]:
    """Return at most `count_max` axis values from `low_bytes` to `high_bytes`: powers of two, or
    equal steps where the range is narrow.
    """
    unit = max(unit for unit in BINARY_UNITS.values() if unit <= max(1, high_bytes))
    if high_bytes / low_bytes >= WIDE_BYTES:
        values = [
            2.0**power
            for power in range(
                math.ceil(math.log2(low_bytes)), math.floor(math.log2(high_bytes)) + 1
            )
        ]
    else:
        values = [unit * value for value in _list_equal_steps(low_bytes / unit, high_bytes / unit)]
    return [
        Tick(value, _format_in_largest_unit(value, BINARY_UNITS))
        for value in _thin_out(values, count_max)
    ]


def choose_second_ticks(low_s: float, high_s: float, count_max: int) -> list[Tick]:
    """Return at most `count_max` axis values from `low_s` to `high_s`, each round in its own unit.

    Where the range is narrow, they are equal steps.
    """
    if high_s / low_s >= WIDE_SECONDS:
        values = [value for value in _list_round_seconds(low_s, high_s) if low_s <= value <= high_s]
        return [
            Tick(value, _format_in_largest_unit(value, SECOND_UNITS))
            for value in _thin_out(values, count_max)
        ]
    name = [name for name, unit in SECOND_UNITS.items() if unit == 1 or 2 * unit <= high_s][-1]
    unit = SECOND_UNITS[name]
    return [
        Tick(unit * value, f"{value:.4g} {name}")
        for value in _thin_out(_list_equal_steps(low_s / unit, high_s / unit), count_max)
    ]


def _list_round_seconds(low_s: float, high_s: float) -> Iterator[float]:
    """Yield round times in seconds: 1, 2 and 5 times powers of ten below a second; then 1, 2, 5,
    10, 20 s and min; then hours.
    """
    for power in range(math.floor(math.log10(low_s)), 0):
        yield from (digit * 10.0**power for digit in (1, 2, 5))
    for unit in (SECOND_UNITS["s"], SECOND_UNITS["min"]):
        yield from (float(digit * unit) for digit in (1, 2, 5, 10, 20))
    for power in range(math.ceil(math.log10(max(1.0, high_s / SECOND_UNITS["h"]))) + 1):
        yield from (digit * 10.0**power * SECOND_UNITS["h"] for digit in (1, 2, 5))


def _thin_out(values: list[float], count_max: int) -> list[float]:
    return values[:: -(-len(values) // count_max)]


def _format_in_largest_unit(value: float, units: Mapping[str, int]) -> str:
    name = max((name for name in units if units[name] <= max(1, value)), key=units.__getitem__)
    return f"{value / units[name]:.4g} {name}"


def _pad_low_and_high(values: Sequence[float]) -> tuple[float, float]:
    low = min(values)
    high = max(values)
    room = math.exp(max(PADDING_MIN, PADDING * math.log(high / low)))
    return low / room, high * room


def _list_equal_steps(low: float, high: float) -> list[float]:
    least = (high - low) / STEPS_WANTED
    power = 10.0 ** math.floor(math.log10(least))
    step = power * next(digit for digit in (1, 2, 5, 10) if digit * power >= least)
    return [count * step for count in range(math.ceil(low / step), math.floor(high / step) + 1)]


def _draw_point(grid: list[list[str]], column: int, row: int, point: Point) -> None:
    line = grid[row]
    line[column] = SYMBOLS[point.mark]
    end = column + 1 + len(point.label)
    if (
        point.label
        and end <= len(line)
        and all(character in " ╌" for character in line[column + 1 : end])
    ):
        line[column + 1 : end] = point.label


def _write_into_dashes(line: list[str], text: str) -> None:
    """Write the text over the dashes of a line, as far right as only dashes are there; nowhere if
    it does not fit.
    """
    for column in range(len(line) - len(text), 0, -1):
        if all(character == "╌" for character in line[column : column + len(text)]):
            line[column : column + len(text)] = text
            return


def _draw_axis_and_legend(picture: Picture, time_axis: _Axis) -> Iterator[str]:
    """Yield the lines of the axis of seconds, with its labels, and the legend."""
    name = "step time"
    ruler = ["─"] * time_axis.cells
    texts = [" "] * time_axis.cells
    end = time_axis.cells - len(name) - COLUMNS_BETWEEN
    free = 0
    for value, text in choose_second_ticks(*picture.span_s, time_axis.cells // COLUMNS_A_TICK):
        cell = time_axis.find_cell(value)
        if free <= cell <= end - len(text):
            ruler[cell] = "┬"
            texts[cell : cell + len(text)] = text
            free = cell + len(text) + COLUMNS_BETWEEN
    texts[-len(name) :] = name
    margin = " " * LABEL_COLUMNS
    yield f"{margin}└{''.join(ruler)}"
    yield f"{margin} {''.join(texts)}"
    yield f"{margin} {describe_legend(picture)}"
