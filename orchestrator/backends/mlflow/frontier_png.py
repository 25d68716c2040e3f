"""Plans by memory and step time as a picture for MLflow and papers: the points and marks of the terminal."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from orchestrator.planning.picture import Mark, Picture, choose_byte_ticks, choose_second_ticks
from orchestrator.specs.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

INCHES = (8.0, 4.8)
LEGEND_INCHES = 0.2  # for a line of two names
DOTS_PER_INCH = 120
TICKS_MAX = 7
# Colour-blind safe (Okabe and Ito 2008, Color Universal Design), and told apart by shape as well.
COLOURS = ("#0072b2", "#d55e00", "#009e73", "#cc79a7", "#e69f00", "#56b4e9", "#000000")
SHAPES = {
    Mark.TOO_BIG: "o",
    Mark.REFUTED: "X",
    Mark.PREDICTED: "D",
    Mark.MEASURED: "D",
}  # where colours are names
STYLES: dict[Mark, dict[str, Any]] = {
    Mark.TOO_BIG: {"marker": "o", "s": 16, "color": "#b0b0b0"},
    Mark.FITS: {
        "marker": "o",
        "s": 34,
        "facecolors": "white",
        "edgecolors": "#0072b2",
        "linewidths": 1.4,
    },
    Mark.REFUTED: {"marker": "X", "s": 70, "color": "#d55e00"},
    Mark.CHOSEN: {"marker": "o", "s": 80, "color": "#009e73"},
    Mark.PREDICTED: {
        "marker": "D",
        "s": 40,
        "facecolors": "white",
        "edgecolors": "#0072b2",
        "linewidths": 1.4,
    },
    Mark.MEASURED: {"marker": "D", "s": 50, "color": "#009e73"},
}


def draw_figure(title: str, picture: Picture, label_prefix: str = "attempt ") -> Figure:
    """Return a figure of step time against bytes per device, both logarithmic.

    `label_prefix` precedes the numbers at points, such as "attempt ". Points with names get a colour
    for each name, and the names are in the legend.
    """
    from matplotlib.figure import (
        Figure,
    )  # mlflow brings matplotlib; pyplot keeps state, which threads share

    names = tuple(dict.fromkeys(point.name for point in picture.points if point.name))
    width, height = INCHES
    size = width, height + LEGEND_INCHES * (len(names) // 2)
    drawn = Figure(figsize=size, dpi=DOTS_PER_INCH, layout="constrained")
    axes = drawn.add_subplot()
    axes.set(xscale="log", yscale="log", xlim=picture.span_s, ylim=picture.span_bytes)
    _draw_limit(axes, picture)
    if names:
        _scatter_names(axes, picture, names)
    else:
        _scatter_marks(axes, picture)
    for point in picture.points:
        if point.label:
            place = point.step_s, point.needed_bytes
            axes.annotate(
                f"{label_prefix}{point.label}",
                place,
                xytext=(7, 5),
                textcoords="offset points",
                fontsize=9,
                zorder=9,
            )
    places, labels = zip(*choose_second_ticks(*picture.span_s, TICKS_MAX), strict=True)
    axes.set_xticks(places, labels)
    places, labels = zip(*choose_byte_ticks(*picture.span_bytes, TICKS_MAX), strict=True)
    axes.set_yticks(places, labels)
    axes.minorticks_off()
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    is_measured = any(point.mark is Mark.MEASURED for point in picture.points)
    axes.set_xlabel(f"time of an optimizer step{'' if is_measured else ' (predicted)'}")
    axes.set_ylabel("memory that each device needs")
    axes.set_title(f"{title} on {picture.device}", loc="left", fontsize=11)
    drawn.legend(
        loc="outside lower center", ncols=2 if names else len(STYLES), fontsize=9, frameon=False
    )
    return drawn


def _draw_limit(axes: Axes, picture: Picture) -> None:
    """Draw a line at the device's memory, or a text if the memory is above the axis."""
    text = f"memory ends: {format_bytes(picture.capacity_bytes)}"
    height = picture.capacity_bytes
    coordinates = "data"
    if picture.has_limit:
        axes.axhspan(
            picture.capacity_bytes, picture.span_bytes[1], color="#e69f00", alpha=0.08, linewidth=0
        )
        axes.axhline(picture.capacity_bytes, color="#e69f00", linestyle="--", linewidth=1.4)
    else:
        text = f"memory ends above, at {format_bytes(picture.capacity_bytes)}"
        height = 1
        coordinates = "axes fraction"
    axes.annotate(
        text,
        (1.0, height),
        xycoords=("axes fraction", coordinates),
        xytext=(-5, 4),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
        color="#9a6a00",
    )


def _scatter_marks(axes: Axes, picture: Picture) -> None:
    for order, (mark, style) in enumerate(STYLES.items(), start=2):
        points = [point for point in picture.points if point.mark is mark]
        if points:
            places = [point.step_s for point in points], [point.needed_bytes for point in points]
            axes.scatter(*places, label=mark.value, zorder=order, **style)


def _scatter_names(axes: Axes, picture: Picture, names: Sequence[str]) -> None:
    """Draw each point in the colour of its name. Measured points are filled, with the interval of
    their step time.
    """
    labels = {point.name: f"{point.label} {point.name}" for point in picture.points if point.label}
    colours = {name: COLOURS[number % len(COLOURS)] for number, name in enumerate(names)}
    for point in picture.points:
        colour = colours[point.name]
        is_open = point.mark in (Mark.PREDICTED, Mark.TOO_BIG)
        face = "white" if is_open else colour
        label = labels.pop(point.name, None) if point.label else None
        place = [point.step_s], [point.needed_bytes]
        axes.scatter(
            *place,
            s=50,
            marker=SHAPES[point.mark],
            facecolors=face,
            edgecolors=colour,
            label=label,
            zorder=4,
        )
        if point.within_s is not None:
            low, high = point.within_s
            sides = [[point.step_s - low], [high - point.step_s]]
            axes.errorbar(
                *place, xerr=sides, fmt="none", ecolor=colour, elinewidth=1.2, capsize=3, zorder=3
            )
    for mark in dict.fromkeys(point.mark for point in picture.points):
        face = "white" if mark in (Mark.PREDICTED, Mark.TOO_BIG) else "#606060"
        axes.scatter(
            [],
            [],
            s=50,
            marker=SHAPES[mark],
            facecolors=face,
            edgecolors="#606060",
            label=mark.value,
        )
