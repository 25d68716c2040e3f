"""Laws of the benchmark of the scheduler, on small worlds in seconds."""

from __future__ import annotations

from io import StringIO

import pytest
from rich.console import Console

from benchmarks import decisions, scheduler
from benchmarks.__main__ import table
from benchmarks.figure import at_most, informs
from benchmarks.measured import Arrival
from benchmarks.peers import Peer
from benchmarks.side_by_side import UNITS, SideBySide
from benchmarks.trace_files import job_spec_from_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.specs.order import Order

ONE_NODE = scheduler.cluster_of(1, 10.0)


def arrival(at_s: float, steps: int, speeds: dict[int, float], **fields: object) -> Arrival:
    return Arrival(at_s=at_s, spec=job_spec_from_trace("job", speeds, steps), **fields)


def test_other_policies_get_what_users_asked_for_and_adaptive_may_choose() -> None:
    """Eight devices are barely faster than one: who must take what was asked for runs one job after the other."""
    jobs = tuple(arrival(0.0, 100, {1: 1.0, 8: 0.9}, rigid_devices=8) for _ in range(4))
    trace = Trace(name="night", arrivals=jobs)
    for play, width in ((scheduler.ours(ONE_NODE), 1), (scheduler.theirs(Peer.EASY, ONE_NODE), 8)):
        outcomes = play(trace, 0).outcomes
        assert {
            process.attempt.plan.world_size for outcome in outcomes for process in outcome.attempts
        } == {width}
        assert {outcome.alone_s for outcome in outcomes} == {10.0 + 90.0}, (
            "alone is the best number of devices for all"
        )
    rigid = Trace(name="night", arrivals=tuple(map(scheduler.as_asked, jobs)))
    (first, *_) = scheduler.ours(ONE_NODE)(rigid, 0).outcomes
    assert first.attempts[0].attempt.plan.world_size == 8


def test_backfill_takes_what_the_head_cannot_use_and_never_delays_it() -> None:
    trace = Trace(
        name="night",
        arrivals=(
            arrival(0.0, 100, {4: 1.0}, rigid_devices=4),
            arrival(1.0, 100, {8: 1.0}, rigid_devices=8),  # waits for all devices until 110 s
            arrival(2.0, 500, {4: 1.0}, rigid_devices=4),  # would delay it
            arrival(3.0, 50, {4: 1.0}, rigid_devices=4),  # ends before
        ),
    )
    started = [
        outcome.started_at_s for outcome in scheduler.theirs(Peer.EASY, ONE_NODE)(trace, 0).outcomes
    ]
    assert started == [0.0, 110.0, 220.0, 3.0]
    in_order = [
        outcome.started_at_s
        for outcome in scheduler.theirs(Order.FIFO, ONE_NODE)(trace, 0).outcomes
    ]
    assert in_order == [0.0, 110.0, 220.0, 220.0]


def test_the_bound_is_what_a_job_alone_could_do() -> None:
    """Ten seconds to launch, 100 steps of a second on one device, of half a second on two."""
    deadlines = (59.0, 61.0, 200.0)
    jobs = tuple(
        arrival(0.0, 100, {1: 1.0, 2: 0.5}, deadline_s=deadline_s) for deadline_s in deadlines
    )
    assert scheduler.can_be_met(Trace(name="night", arrivals=jobs), ONE_NODE) == [False, True, True]


def test_a_job_comes_to_a_crowd_where_more_devices_are_asked_for_than_there_are() -> None:
    """Two that last 100 s ask for five of eight each; the third comes when the first has gone."""
    jobs = tuple(
        arrival(at_s, 100, {5: 1.0}, rigid_devices=5) for at_s in (0.0, 50.0, 120.0, 221.0)
    )
    assert scheduler.comes_to_a_crowd(Trace(name="night", arrivals=jobs), 8) == [
        False,
        True,
        True,
        False,
    ]


def test_side_by_side_has_every_measure_of_every_queue() -> None:
    shown = SideBySide()
    trace = Trace(
        name="night", arrivals=(arrival(0.0, 100, {8: 1.0}, rigid_devices=8, deadline_s=200.0),) * 2
    )
    for name, play in (
        ("ours", scheduler.ours(ONE_NODE)),
        ("fifo", scheduler.theirs(Order.FIFO, ONE_NODE)),
    ):
        shown.add("one node", name, scheduler.over([trace, trace], play))
    values = {figure["figure"]: figure["value"] for figure in shown.figures()}
    assert values["one node, fifo: makespan (220 to 220)"] == 220.0
    assert values["one node, ours: deadlines met (0.5 to 0.5)"] == 0.5
    assert len(values) == 2 * len(UNITS)
    assert shown.table().row_count == 2


def test_a_bound_stands_beside_the_queues_in_what_it_bounds() -> None:
    shown = SideBySide()
    shown.add("one node", "bound", [{"makespan": 10.0}, {"makespan": 12.0}])
    assert [figure["figure"] for figure in shown.figures()] == [
        "one node, bound: makespan (10 to 12)"
    ]
    console = Console(width=170, record=True, file=StringIO())
    console.print(shown.table())
    assert console.export_text().split("\n")[2].split()[:3] == ["one", "node", "bound"]


def test_what_is_printed_has_a_bar() -> None:
    printed = table(
        "bench",
        [
            informs("wait", 1.0, "s"),
            at_most("mean", 3.0, "s", 2.0),
            at_most("worst", 1.0, "s", 2.0),
        ],
    )
    assert [[*column.cells] for column in printed.columns][::4] == [
        ["mean", "worst"],
        ["[red]no[/]", "[green]yes[/]"],
    ]


def test_no_queue_is_before_its_bound() -> None:
    trace = Trace(name="night", arrivals=(arrival(0.0, 100, {8: 1.0, 4: 1.5}),) * 3)
    reached = scheduler.measured(scheduler.ours(ONE_NODE)(trace, 0))
    for measure, bound in scheduler.bounds(trace, ONE_NODE).items():
        assert bound <= reached[measure]


def test_the_bound_without_gaps_does_the_shortest_rest_first() -> None:
    """The long one is put aside for the short one; the machine is idle until the third comes."""
    assert scheduler.without_gaps([(0.0, 10.0), (2.0, 3.0), (50.0, 1.0)]) == (
        [3.0, 13.0, 1.0],
        51.0,
    )


def test_decisions_are_timed_while_the_queue_stays_as_deep(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(decisions, "RUNNING", 20)
    by_figure = {
        figure["figure"]: figure
        for figure in decisions.decision_figures(scheduler.cluster_of(256, 30.0), (10, 20), 40)
    }
    assert by_figure["2,048 GPUs, 10 pending: decision p50"]["value"] > 0
    assert "growth of the mean decision from 10 to 20 pending" in by_figure


def test_a_shaken_trace_is_another_day_of_the_same_kind() -> None:
    jobs = (arrival(at_s, 100, {4: 2.0}, deadline_s=at_s + 1879) for at_s in range(0, 100_000, 500))
    day = Trace(name="day", arrivals=tuple(jobs))
    other = scheduler.shake(day, 1, arrival_s=60.0, length=0.05)
    assert (
        other
        == scheduler.shake(day, 1, arrival_s=60.0, length=0.05)
        != scheduler.shake(day, 2, arrival_s=60.0, length=0.05)
    )
    assert [job.at_s for job in other.arrivals] == sorted(job.at_s for job in other.arrivals)
    for before, after in zip(day.arrivals, other.arrivals, strict=True):
        assert abs(after.at_s - before.at_s) <= 120.0
        assert 95 <= (after.spec.steps or 0) <= 105
        assert after.deadline_s == pytest.approx(after.at_s + 1879), "a deadline moves with its job"
