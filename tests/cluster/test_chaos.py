"""Checks of the judge of nights of faults: schedules repeat, and each law finds its planted breach."""

from __future__ import annotations

from pathlib import Path

from tests.cluster.chaos import (
    KINDS,
    changed_curves,
    not_recorded_once,
    overlaps,
    schedule,
    undisturbed,
)

DEVICE, OTHER = ("n0", 0), ("n0", 1)


def test_a_seed_draws_the_same_faults_and_fewer_are_the_first_of_more() -> None:
    assert schedule(7, 50) == schedule(7, 200)[:50]
    assert schedule(7, 50) != schedule(8, 50)
    assert {fault.kind for fault in schedule(7, 200)} == set(KINDS)
    assert all(fault.lasts_s <= KINDS[fault.kind] for fault in schedule(7, 200))


def test_two_attempts_on_a_device_at_once_are_found() -> None:
    apart = [(DEVICE, "a-1", 0.0, 5.0), (DEVICE, "b-1", 5.0, 9.0), (OTHER, "c-1", 1.0, 9.0)]
    assert overlaps(apart) == []
    assert overlaps([*apart, (DEVICE, "d-1", 4.9, 5.0)]) == ["a-1 and d-1 on n0:0"]
    inside = [(DEVICE, "long", 0.0, 9.0), (DEVICE, "short", 1.0, 2.0), (DEVICE, "late", 8.0, 9.0)]
    assert overlaps(inside) == ["long and short on n0:0", "long and late on n0:0"]


def test_a_curve_that_changed_or_lacks_a_step_is_found(tmp_path: Path) -> None:
    wanted = undisturbed(tmp_path, 3)
    assert wanted == undisturbed(tmp_path / "again", 3)
    assert wanted != undisturbed(tmp_path / "other", 4)
    whole = [{"step": step, "loss": loss} for step, loss in wanted.items()]
    assert changed_curves({"job": whole}, {"job": wanted}) == []
    assert changed_curves({"job": [*whole, whole[0]]}, {"job": wanted}) == [], (
        "a step that was repeated"
    )
    assert changed_curves({"job": whole[:-1]}, {"job": wanted}) == ["job"]
    assert changed_curves({"job": [*whole, {"step": 1, "loss": 0.0}]}, {"job": wanted}) == ["job"]


def test_an_attempt_without_exactly_one_ended_record_is_found() -> None:
    both = [("a-1", True), ("b-1", True)]
    assert not_recorded_once(["a-1", "b-1"], both) == []
    assert not_recorded_once(["a-1", "b-1"], both[:1]) == ["b-1"], "none"
    assert not_recorded_once(["a-1", "b-1"], [*both, both[0]]) == ["a-1"], "two"
    assert not_recorded_once(["a-1", "b-1"], [*both, ("a-1", False)]) == ["a-1"], (
        "a second one that runs for ever"
    )
    assert not_recorded_once(["a-1", "b-1"], [both[0], ("b-1", False)]) == ["b-1"], (
        "one that has not ended"
    )
    assert not_recorded_once(["a-1"], both) == ["b-1"], "one of no attempt"
