"""Laws of the picture in the terminal: aligned, within its width, every mark where it belongs."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.planning.picture import (
    COLUMNS,
    LABEL_COLUMNS,
    SYMBOLS,
    Mark,
    Picture,
    Point,
    choose_byte_ticks,
    choose_second_ticks,
    draw_lines,
)

MIB = 2**20
OF_A_FRONTIER = (Mark.TOO_BIG, Mark.FITS, Mark.REFUTED, Mark.CHOSEN)
OF_A_COMPARISON = (Mark.TOO_BIG, Mark.REFUTED, Mark.PREDICTED, Mark.MEASURED)


def points(marks: tuple[Mark, ...]) -> st.SearchStrategy[tuple[Point, ...]]:
    point = st.builds(
        Point,
        step_s=st.floats(1e-4, 1e4),
        needed_bytes=st.integers(1, 2**42),
        mark=st.sampled_from(marks),
        label=st.sampled_from(("", "1", "1,2")),
    )
    return st.lists(point, min_size=1, max_size=60).map(tuple)


pictures = st.builds(
    Picture,
    device=st.just("device"),
    capacity_bytes=st.integers(1, 2**42),
    points=st.sampled_from((OF_A_FRONTIER, OF_A_COMPARISON)).flatmap(points),
)
STAIRS = Picture(
    device="device",
    capacity_bytes=256 * MIB,
    points=(
        Point(step_s=0.05, needed_bytes=600 * MIB, mark=Mark.TOO_BIG),
        Point(step_s=0.07, needed_bytes=300 * MIB, mark=Mark.REFUTED, label="1"),
        Point(step_s=0.12, needed_bytes=180 * MIB, mark=Mark.CHOSEN, label="2"),
        Point(step_s=0.3, needed_bytes=90 * MIB, mark=Mark.FITS),
    ),
)


@given(pictures)
@settings(deadline=None)
def test_every_line_is_within_its_width_and_the_axes_meet(picture: Picture) -> None:
    lines = draw_lines(picture)
    assert max(map(len, lines)) <= COLUMNS <= 80
    body = [line[LABEL_COLUMNS] for line in lines[1:-2]]
    assert set(body[:-1]) <= {"│", "┤"}
    assert body[-1] == "└"


@given(pictures, st.integers(2, 12))
@settings(deadline=None)
def test_ticks_are_few_within_the_picture_ascending_and_distinct(
    picture: Picture, most: int
) -> None:
    for ticks, (low, high) in (
        (choose_byte_ticks(*picture.span_bytes, most), picture.span_bytes),
        (choose_second_ticks(*picture.span_s, most), picture.span_s),
    ):
        assert 1 <= len(ticks) <= most
        values, labels = zip(*ticks, strict=True)
        assert all(low * 0.999 <= value <= high * 1.001 for value in values)
        assert all(first < other for first, other in itertools.pairwise(values))
        assert len(set(labels)) == len(labels)


@pytest.mark.parametrize(
    ("low", "high", "labels"),
    [
        (0.04, 0.6, ["0.05 s", "0.1 s", "0.2 s", "0.5 s"]),
        (18.9, 20.6, ["19 s", "19.5 s", "20 s", "20.5 s"]),
        (20_000, 50_000, ["6 h", "8 h", "10 h", "12 h"]),
        (75, 115, ["80 s", "90 s", "100 s", "110 s"]),
        (4, 500, ["5 s", "10 s", "20 s", "1 min", "2 min", "5 min"]),
        (900, 40_000, ["20 min", "1 h", "2 h", "5 h", "10 h"]),
    ],
)
def test_times_are_labelled_in_round_numbers_of_their_unit(
    low: float, high: float, labels: list[str]
) -> None:
    assert [label for _, label in choose_second_ticks(low, high, 7)] == labels


def test_faster_is_further_left_heavier_is_higher_and_the_line_lies_between() -> None:
    lines = draw_lines(STAIRS)
    places = [
        next(
            (row, line.index(SYMBOLS[mark]))
            for row, line in enumerate(lines)
            if SYMBOLS[mark] in line
        )
        for mark in (Mark.TOO_BIG, Mark.REFUTED, Mark.CHOSEN, Mark.FITS)
    ]
    assert places == sorted(places)
    assert len({column for _, column in places}) == len({row for row, _ in places}) == 4
    (limit,) = (row for row, line in enumerate(lines) if "memory ends: 256.00 MiB" in line)
    assert places[1][0] < limit < places[2][0]


def test_attempts_stand_beside_their_marks_and_the_legend_names_what_occurs() -> None:
    lines = draw_lines(STAIRS)
    text = "\n".join(lines)
    assert "✗1" in text
    assert "●2" in text
    assert lines[-1].strip().split("   ") == [
        "● chosen",
        "✗ ran out of memory",
        "○ fits",
        "· too big",
    ]
    few = Picture(device="device", capacity_bytes=MIB, points=STAIRS.points[-1:])
    assert draw_lines(few)[-1].strip() == "○ fits"
