"""Laws of a crowd: age, deadlines and told lengths go first only for a share, so that nobody else pays for them.

Traces of benchmarks/traces; the other crowds are drawn.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from math import e
from pathlib import Path
from statistics import fmean

import pytest

from benchmarks.measured import Arrival, simulate
from benchmarks.peers import Peer
from benchmarks.scheduler import as_asked, cluster_of
from benchmarks.side_by_side import Measured, measured
from benchmarks.trace_files import job_spec_from_trace, read_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.scheduling.base.credit import AGED, PRESSING
from orchestrator.scheduling.policies import adaptive
from orchestrator.specs.replace import replace

TRACES = Path(__file__).parents[2] / "benchmarks" / "traces"
LAUNCH_S = 30.0
MEAN_S = 1200.0  # of a drawn job
WIDTHS = (1, 1, 1, 2, 4)
DEVICES = 16


def beside_shortest_first(file: str, nodes: int) -> tuple[Measured, Measured]:
    """Return what our queue and shortest job first show, with as many devices as each job asked for."""
    trace = read_trace(TRACES / file)
    rigid = replace(trace, arrivals=tuple(map(as_asked, trace.arrivals)))
    cluster = cluster_of(nodes, LAUNCH_S, 4)
    adaptive_run = simulate(rigid, cluster)
    shortest = simulate(rigid, cluster.replace_order(Peer.SJF))
    return measured(adaptive_run), measured(shortest)


def crowd(
    seed: int,
    *,
    load: float,
    jobs: int,
    users: int = 1,
    deadline: Callable[[random.Random, int], float | None] = lambda draw, user: None,  # noqa: ARG005
    told: Callable[[int], float] = lambda user: 1.0,  # noqa: ARG005
) -> Trace:
    """Return a stream of jobs. `deadline` is in lengths of the job; `told` is a job's told length over its own."""
    draw = random.Random(f"crowd {seed}")
    rate = load * DEVICES / (MEAN_S * fmean(WIDTHS))
    arrivals, at_s = [], 0.0
    for _ in range(jobs):
        at_s += draw.expovariate(rate)
        width, user = draw.choice(WIDTHS), draw.randrange(users)
        length_s = max(30, round(draw.lognormvariate(0.0, 1.0) * MEAN_S / e**0.5))
        lengths = deadline(draw, user)
        share = told(user)
        spec = job_spec_from_trace("job", {width: share}, length_s)
        arrivals.append(
            Arrival(
                at_s=at_s,
                spec=spec.model_copy(update={"user": f"user-{user}"}),
                deadline_s=None if lengths is None else at_s + LAUNCH_S + lengths * length_s,
                rigid_devices=width,
                step_factor=1.0 / share,
            )
        )
    return Trace(name="crowd", arrivals=tuple(arrivals))


def mean_h(trace: Trace, of: Callable[[Arrival], bool]) -> float:
    """Return the mean hours from submission to end of some jobs."""
    outcomes = simulate(trace, cluster_of(DEVICES // 8, LAUNCH_S)).outcomes
    taken_s = []
    for arrival, outcome in zip(trace.arrivals, outcomes, strict=True):
        if of(arrival):
            assert outcome.ended_at_s is not None
            taken_s.append(outcome.ended_at_s - outcome.submitted_at_s)
    return fmean(taken_s) / 3600.0


def is_honest(arrival: Arrival) -> bool:
    return int(str(arrival.spec.user).rpartition("-")[2]) % 2 == 1


def test_in_a_lasting_backlog_the_mean_is_near_that_of_shortest_first() -> None:
    """The mean was 2.29 and 1.11 times as long while everything past its limit went first."""
    for file, nodes, slowdown in (("gavel_2869ce.csv", 2, 1.5), ("sia_rate50_3.csv", 16, 2.0)):
        queue, shortest = beside_shortest_first(file, nodes)
        assert queue["mean completion"] <= 1.15 * shortest["mean completion"], file
        assert queue["worst slowdown"] <= slowdown * shortest["worst slowdown"], file


def test_a_backlog_that_is_all_past_its_limit_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "AGED", replace(AGED, share=1000.0))
    with pytest.raises(AssertionError):
        test_in_a_lasting_backlog_the_mean_is_near_that_of_shortest_first()


def test_under_overload_most_deadlines_are_met_however_long_it_lasts() -> None:
    """A fixed number was met at a load of 1.3, whether the stream lasted 12 hours or 48."""
    for jobs in (400, 1600):
        trace = crowd(1, load=1.3, jobs=jobs, deadline=lambda draw, _: draw.uniform(1.5, 6.0))
        run = measured(simulate(trace, cluster_of(DEVICES // 8, LAUNCH_S)))
        assert run["deadlines met"] >= 0.55


def mean_with_deadlines_s(share: float) -> float:
    """Return the mean completion of sia_rate50_3 where this share of the jobs is due in 1.2 to 4 lengths."""
    trace, draw = read_trace(TRACES / "sia_rate50_3.csv"), random.Random("due")
    arrivals = []
    for arrival in map(as_asked, trace.arrivals):
        lengths = draw.uniform(1.2, 4.0)
        assert arrival.spec.steps is not None
        due_s = arrival.at_s + LAUNCH_S + lengths * arrival.spec.steps  # of a second
        arrivals.append(replace(arrival, deadline_s=due_s if draw.random() < share else None))
    rigid = replace(trace, arrivals=tuple(arrivals))
    return measured(simulate(rigid, cluster_of(16, LAUNCH_S, 4)))["mean completion"]


def test_deadlines_of_half_the_jobs_leave_the_others_their_share() -> None:
    """The mean is 1.8 times as long where whatever presses goes first."""
    assert mean_with_deadlines_s(0.5) <= 1.3 * mean_with_deadlines_s(0.0)


def test_deadlines_without_a_bound_are_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adaptive, "PRESSING", replace(PRESSING, share=1000.0))
    with pytest.raises(AssertionError):
        test_deadlines_of_half_the_jobs_leave_the_others_their_share()


@pytest.mark.parametrize("game", ["deadlines", "lengths"])
def test_honest_users_lose_little_beside_half_who_claim_deadlines_or_tenths_of_lengths(
    game: str,
) -> None:
    honest, beside = [], []
    for seed in range(3):
        plain = crowd(seed, load=0.9, jobs=300, users=10)
        if game == "deadlines":
            gamed = crowd(
                seed,
                load=0.9,
                jobs=300,
                users=10,
                deadline=lambda _, user: None if user % 2 else 10.0,
            )
        else:
            gamed = crowd(
                seed, load=0.9, jobs=300, users=10, told=lambda user: 1.0 if user % 2 else 0.1
            )
        honest.append(mean_h(plain, is_honest))
        beside.append(mean_h(gamed, is_honest))
    assert fmean(beside) <= 1.2 * fmean(honest)  # as 1.4 h are of 1.18 h
