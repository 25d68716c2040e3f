"""The frontier chart as a PNG for MLflow, with the same content as in the terminal."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from orchestrator.planning.picture import Mark, Picture, byte_ticks, second_ticks
from orchestrator.specs.units import format_bytes

if TYPE_CHECKING:
    from matplotlib.figure import Figure

INCHES = (8.0, 4.8)
DOTS_PER_INCH = 120
TICKS_MAX = 7
# Colour-blind safe (Okabe and Ito 2008, Color Universal Design), and told apart by shape as well.
STYLES: dict[Mark, dict[str, Any]] = {
    Mark.TOO_BIG: {"marker": "o", "s": 16, "color": "#b0b0b0"},
    Mark.FITS: {"marker": "o", "s": 34, "facecolors": "white", "edgecolors": "#0072b2", "linewidths": 1.4},
    Mark.REFUTED: {"marker": "X", "s": 70, "color": "#d55e00"},
    Mark.CHOSEN: {"marker": "o", "s": 80, "color": "#009e73"},
    Mark.PREDICTED: {"marker": "D", "s": 40, "facecolors": "white", "edgecolors": "#0072b2", "linewidths": 1.4},
    Mark.MEASURED: {"marker": "D", "s": 50, "color": "#009e73"},
}


def figure(title: str, picture: Picture, labelled: str = "attempt ") -> Figure:
    """Return a chart of step time against bytes per device, both logarithmic; `labelled` prefixes the point labels."""
    from matplotlib.figure import Figure  # mlflow brings matplotlib; pyplot keeps state, which threads share

    drawn = Figure(figsize=INCHES, dpi=DOTS_PER_INCH, layout="constrained")
    axes = drawn.add_subplot()
    axes.set(xscale="log", yscale="log", xlim=picture.span_s, ylim=picture.span_bytes)
    axes.axhspan(picture.capacity_bytes, picture.span_bytes[1], color="#e69f00", alpha=0.08, linewidth=0)
    axes.axhline(picture.capacity_bytes, color="#e69f00", linestyle="--", linewidth=1.4)
    axes.annotate(
        f"memory ends: {format_bytes(picture.capacity_bytes)}",
        (1.0, picture.capacity_bytes),
        xycoords=("axes fraction", "data"),
        xytext=(-5, 4),
        textcoords="offset points",
        horizontalalignment="right",
        fontsize=9,
        color="#9a6a00",
    )
    for order, (mark, style) in enumerate(STYLES.items(), start=2):
        points = [point for point in picture.points if point.mark is mark]
        if points:
            places = [point.step_s for point in points], [point.needed_bytes for point in points]
            axes.scatter(*places, label=mark.value, zorder=order, **style)
    for point in picture.points:
        if point.label:
            place = point.step_s, point.needed_bytes
            axes.annotate(
                f"{labelled}{point.label}", place, xytext=(7, 5), textcoords="offset points", fontsize=9, zorder=9
            )
    places, labels = zip(*second_ticks(*picture.span_s, TICKS_MAX), strict=True)
    axes.set_xticks(places, labels)
    places, labels = zip(*byte_ticks(*picture.span_bytes, TICKS_MAX), strict=True)
    axes.set_yticks(places, labels)
    axes.minorticks_off()
    axes.grid(color="#e8e8e8", linewidth=0.8)
    axes.set_axisbelow(True)
    is_measured = any(point.mark is Mark.MEASURED for point in picture.points)
    axes.set_xlabel(f"time of an optimizer step{'' if is_measured else ' (predicted)'}")
    axes.set_ylabel("memory that each device needs")
    axes.set_title(f"{title} on {picture.device}", loc="left", fontsize=11)
    drawn.legend(loc="outside lower center", ncols=len(STYLES), fontsize=9, frameon=False)
    return drawn
