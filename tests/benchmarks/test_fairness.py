"""Laws of the benchmark of fairness, on a small flood in seconds."""

from __future__ import annotations

import pytest

from benchmarks import fairness


def test_the_promise_holds_beside_a_flood_and_first_come_first_served_breaks_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fairness, "FLOOD", 200)
    monkeypatch.setattr(fairness, "QUIET", 8)
    trace = fairness.night(0)
    fair = fairness.waits(trace, fairness.ours(trace, fairness.ALIKE))
    fifo = fairness.waits(trace, fairness.ours(trace, fairness.FIFO))
    assert len(fair) == len(fifo) == 8
    assert fairness.worst(fair) <= 1.0 < fairness.worst(fifo)
    assert {wait.promise_s for wait in fair} == {fairness.LAUNCH_S + fairness.LONGEST_S}
