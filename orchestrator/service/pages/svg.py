"""Charts as SVG. Each has a title and a description for screen readers; colours are in the style sheet."""

from __future__ import annotations

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

from markupsafe import Markup, escape

from orchestrator.planning.picture import Mark, Picture, choose_byte_ticks, choose_second_ticks
from orchestrator.service.pages.frame import load_macros
from orchestrator.specs.frozen import frozen
from orchestrator.specs.units import format_bytes

WIDTH = 640
HEIGHT = 274
LEFT = 88
RIGHT = 16
TOP = 14
BOTTOM = 34
DOTS_MAX = 400  # of a line: more are averaged
TICKS = 5
AXIS_BOTTOM = 48  # with a line for the name of the axis
LANE = 18
GAP = 6
LABEL_WIDTH, CAUSE_WIDTH = 132, 176  # of the names beside a Gantt chart and a waterfall
_SHAPES = load_macros(
    "charts",
    WIDTH=WIDTH,
    HEIGHT=HEIGHT,
    LEFT=LEFT,
    RIGHT=RIGHT,
    TOP=TOP,
    AXIS_BOTTOM=AXIS_BOTTOM,
    LANE=LANE,
    GAP=GAP,
)


class Line(NamedTuple):
    """A curve of a chart: its name, the CSS class that gives its colour, and its points."""

    name: str
    tone: str
    points: Sequence[Point]


class Cause(NamedTuple):
    """A bar of a waterfall chart: what the memory is used for, and its bytes."""

    name: str
    count_bytes: int


Point = tuple[float, float]  # x, y


@frozen
class Bar:
    """A time span in a lane of a Gantt chart."""

    lane: int
    from_s: float
    until_s: float
    tone: str
    tooltip: str
    label: str = ""
    early_s: float | None = None  # of the range of its start
    late_s: float | None = None  # of the range of its end


@dataclass(frozen=True, slots=True)
class _Scale:
    low: float
    high: float
    start: float
    end: float
    is_log: bool = False

    def compute_position(self, value: float) -> float:
        low, high = (
            (math.log(self.low), math.log(self.high)) if self.is_log else (self.low, self.high)
        )
        value = math.log(max(value, 1e-12)) if self.is_log else value
        share = (value - low) / (high - low) if high > low else 0.5
        return round(self.start + share * (self.end - self.start), 1)


def draw_curves(
    title: str,
    curves: Sequence[Line],
    *,
    unit: str = "",
    from_zero: bool = False,
    clips_outliers: bool = False,
    limit_value: float | None = None,
) -> Markup:
    """Return a chart of curves over optimizer steps, with a line at `limit_value`; empty without
    points.
    """
    curves = [curve._replace(points=_thin_points(curve.points)) for curve in curves if curve.points]
    if not curves:
        return Markup("")
    steps = [step for curve in curves for step, _ in curve.points]
    values = sorted(value for curve in curves for _, value in curve.points)
    low = 0.0 if from_zero else values[0]
    high = values[-1]
    if clips_outliers:  # one slow step does not flatten all others
        high = min(high, 2.0 * values[int(0.98 * (len(values) - 1))])
    high = high if limit_value is None else max(high, limit_value)
    room = 0.06 * (high - low) or abs(high) * 0.1 or 1.0
    across = _Scale(min(steps), max(max(steps), min(steps) + 1), LEFT, WIDTH - RIGHT)
    up = _Scale(low if from_zero else low - room, high + room, HEIGHT - AXIS_BOTTOM, TOP)
    step_ticks = _choose_values_and_labels(across.low, across.high, is_whole=True)
    paths = [
        " ".join(
            f"{across.compute_position(step)},{max(TOP, up.compute_position(value))}"
            for step, value in curve.points
        )
        for curve in curves
    ]
    beside = _choose_values_and_labels(up.low, up.high)
    drawn = _SHAPES.lines(curves, paths, across, up, step_ticks, beside, unit, limit_value)
    return _wrap_svg(title, _SHAPES.ends(curves, unit), WIDTH, HEIGHT, drawn)


def draw_frontier(picture: Picture, title: str = "", label_prefix: str = "attempt ") -> Markup:
    """Return a chart of plans: step time against needed bytes, both logarithmic, with the memory
    limit as a line.

    `label_prefix` precedes the label of each point.
    """
    across = _Scale(*picture.span_s, LEFT, WIDTH - RIGHT, is_log=True)
    up = _Scale(*picture.span_bytes, HEIGHT - AXIS_BOTTOM, TOP, is_log=True)
    seconds = choose_second_ticks(*picture.span_s, 8)
    sizes = choose_byte_ticks(*picture.span_bytes, 6)
    order = list(Mark)
    points = sorted(picture.points, key=lambda point: order.index(point.mark))
    ends = "ends:" if picture.has_limit else "ends above, at"
    limit = f"memory {ends} {format_bytes(picture.capacity_bytes)}"
    counts = ", ".join(
        f"{count} {mark}" for mark, count in Counter(point.mark for point in points).items()
    )
    return _wrap_svg(
        title or f"Plans on {picture.device}",
        f"{counts}; {limit}. The table below has each plan.",
        WIDTH,
        HEIGHT,
        _SHAPES.frontier(picture, points, limit, across, up, seconds, sizes, label_prefix),
    )


def draw_waterfall(
    causes: Sequence[Cause],
    predicted_bytes: int,
    measured_bytes: int | None,
    capacity_bytes: int | None,
) -> Markup:
    """Return a waterfall chart of predicted bytes by cause, and their sum beside the measured peak."""
    rows: list[tuple[str, int, int, str]] = []
    end_bytes = 0
    for cause in causes:
        rows.append((cause.name, end_bytes, end_bytes + cause.count_bytes, "cause"))
        end_bytes += cause.count_bytes
    rows.append(("predicted peak", 0, predicted_bytes, "predicted"))
    if measured_bytes is not None:
        rows.append(("measured peak", 0, measured_bytes, "measured"))
    height = TOP + len(rows) * (LANE + GAP) + BOTTOM
    most = max([end for _, _, end, _ in rows] + ([capacity_bytes] if capacity_bytes else []))
    across = _Scale(0, most * 1.14, CAUSE_WIDTH, WIDTH - RIGHT)
    drawn = _SHAPES.waterfall(rows, across, height - BOTTOM + 4, capacity_bytes)
    return _wrap_svg("Bytes by cause", _SHAPES.sizes(rows), WIDTH, height, drawn)


def draw_gantt(
    title: str,
    lanes: Sequence[str],
    bars: Sequence[Bar],
    from_s: float,
    until_s: float,
    now_s: float,
    ticks: Sequence[tuple[float, str]],
) -> Markup:
    """Return a chart of time spans, one lane each, with a line for the present. `ticks` are (time,
    label).
    """
    height = TOP + len(lanes) * (LANE + GAP) + BOTTOM
    width = 960
    across = _Scale(from_s, until_s, LABEL_WIDTH, width - RIGHT)
    spans = Markup("").join(_draw_bar(bar, across, from_s, until_s) for bar in bars)
    now_x = across.compute_position(now_s) if from_s <= now_s <= until_s else None
    drawn = _SHAPES.gantt(lanes, spans, ticks, now_x, across, height - BOTTOM)
    return _wrap_svg(
        title,
        f"{len(bars)} spans in {len(lanes)} lanes; the table below has each.",
        width,
        height,
        drawn,
    )


def _draw_bar(bar: Bar, scale: _Scale, from_s: float, until_s: float) -> Markup:
    """Return one time span of the chart as SVG.

    It is an f-string: `Markup.format` took half of the overview's time (720 spans, 2026-11).
    """
    y = TOP + bar.lane * (LANE + GAP)
    start, end = (
        scale.compute_position(min(until_s, max(from_s, at_s)))
        for at_s in (bar.from_s, bar.until_s)
    )
    width = max(2.0, round(end - start, 1))
    shape = (
        f'<rect class="span {bar.tone}" x="{start}" y="{y}" width="{width}" height="{LANE}" rx="2">'
    )
    shape += f"<title>{escape(bar.tooltip)}</title></rect>"
    if bar.label and end - start > 7 * len(bar.label) + 8:
        shape += f'<text class="inside" x="{start + 5}" y="{y + 13}">{escape(bar.label)}</text>'
    if bar.early_s is not None and bar.late_s is not None:
        early, late = (
            scale.compute_position(min(until_s, max(from_s, at_s)))
            for at_s in (bar.early_s, bar.late_s)
        )
        top = y + LANE / 2 - 4
        middle = y + LANE / 2
        shape += f'<path class="band" d="M{early} {top}v8M{early} {middle}H{late}M{late} {top}v8"/>'
    return Markup(shape)


def draw_sparkline(title: str, curves: Sequence[Line], from_s: float, until_s: float) -> Markup:
    """Return a small chart of percentages over time, without axes; its text contains the newest
    values.
    """
    across = _Scale(from_s, until_s, 0, 100)
    up = _Scale(0, 100, 24, 0)
    paths = [
        " ".join(
            f"{across.compute_position(at_s)},{up.compute_position(value)}"
            for at_s, value in _thin_points(curve.points)
        )
        for curve in curves
    ]
    return Markup(_SHAPES.spark(title, curves, paths))


def _choose_values_and_labels(
    lowest: float, highest: float, *, is_whole: bool = False
) -> list[tuple[float, str]]:
    """Return (value, label) of about TICKS round values from `lowest` to `highest`; only integers
    with `is_whole`.
    """
    raw = max((highest - lowest) / TICKS, 1.0 if is_whole else 0.0)
    power = 10.0 ** math.floor(math.log10(raw))
    step = next(
        digit * power
        for digit in ((1, 2, 5, 10) if is_whole else (1, 2, 2.5, 5, 10))
        if digit * power >= raw
    )
    return [
        (count * step, f"{count * step:.6g}")
        for count in range(math.ceil(lowest / step), math.floor(highest / step) + 1)
    ]


def _thin_points(points: Sequence[Point]) -> Sequence[Point]:
    """Return at most DOTS_MAX points: means of runs of equal length, and the last point
    unchanged.
    """
    run = -(-len(points) // DOTS_MAX)
    if run <= 1:
        return points
    parts = [points[start : start + run] for start in range(0, len(points), run)]
    means = [
        (sum(x for x, _ in part) / len(part), sum(y for _, y in part) / len(part)) for part in parts
    ]
    return [*means[:-1], points[-1]]


def _wrap_svg(title: str, description: str, width: int, height: int, elements: Markup) -> Markup:
    name = re.sub(
        r"[^a-z0-9]+", "-", title.lower()
    )  # the same on every request, and one on its page
    kind = " gantt" if width > WIDTH else ""
    return Markup(_SHAPES.svg(name, title, description, kind, width, height, elements))
