"""`make bench-fairness`: two users on one cluster, one floods it. How long does the other wait?

The fair tree promises (fair_share.py): the user with the least usage per share comes first. A job of one device of
that user waits for a free device and for its own jobs ahead of it, and for no other. Each of D devices is held for L
seconds at most, launch and release included, so D come free within every L seconds. A job with k of its own user's
jobs ahead waits at most

    W(k) = (floor(k / D) + 1) * L

however many jobs others have, with teams or without. First come, first served promises no such thing: the wait grows
with the flood. Each figure is the worst of SEEDS shaken nights.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean

from benchmarks.figure import Figure, at_least, at_most, informs, say
from benchmarks.measured import Arrival, simulate
from benchmarks.scheduler import cluster_of
from benchmarks.trace_files import job_spec_from_trace
from orchestrator.backends.simulated.traces import Trace
from orchestrator.service.commands.simulate import Outcome
from orchestrator.specs.order import Order
from orchestrator.specs.policy import UNSHARED, PolicySpec

SEEDS = 10
DEVICES = 16
LAUNCH_S = 30.0
SHORTEST_S, LONGEST_S = 300, 1800  # of a job's training
FLOOD = 2000  # jobs at once: about two days of the cluster
QUIET = 100  # jobs, one after another: a tenth of the cluster
EVERY_S = 660.0  # between them, on average
ALIKE = PolicySpec(teams=[{"name": "lab", "users": ["flood", "quiet"]}])
FIFO = PolicySpec(order=Order.FIFO)
TWO_TO_ONE = PolicySpec(
    teams=[{"name": "large", "shares": 2, "users": ["ada"]}, {"name": "small", "users": ["bob"]}]
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Waited:
    """What one job of the quiet user waited, and what it was promised."""

    wait_s: float
    promise_s: float


def figures() -> list[Figure]:
    say(f"{SEEDS} nights of {FLOOD} jobs at once, under three queues")
    nights = [night(seed) for seed in range(SEEDS)]
    fair = list[Waited]()
    alone = list[Waited]()
    fifo = list[Waited]()
    for trace in nights:
        fair += waits(trace, ours(trace, ALIKE))
        alone += waits(trace, ours(trace, UNSHARED))
        fifo += waits(trace, ours(trace, FIFO))
    say(f"{SEEDS} nights of two teams with shares 2 : 1")
    large = [share_of(seed) for seed in range(SEEDS)]
    return [
        at_most(
            f"fair tree: worst wait / promise of {len(fair)} jobs beside a flood of {FLOOD}",
            worst(fair),
            "x",
            1.0,
        ),
        informs("fair tree: mean wait", fmean(one.wait_s for one in fair), "s"),
        informs("fair tree: worst wait", max(one.wait_s for one in fair), "s"),
        at_most("the same queue without teams: worst wait / promise", worst(alone), "x", 1.0),
        informs(
            "the same queue without a policy: mean wait", fmean(one.wait_s for one in alone), "s"
        ),
        at_least("FIFO: worst wait / promise (must not hold)", worst(fifo), "x", 1.0),
        informs("FIFO: mean wait", fmean(one.wait_s for one in fifo), "s"),
        at_most(
            f"shares 2 : 1: how far the larger team is off 2/3 ({min(large):.4f} to {max(large):.4f})",
            max(abs(one - 2 / 3) for one in large),
            "",
            0.01,
        ),
    ]


def night(seed: int) -> Trace:
    """One floods the queue at once, the other brings a job now and then; all take one device."""
    draw = random.Random(f"night {seed}")
    arrivals = [arrival(0.0, "flood", draw) for _ in range(FLOOD)]
    at_s = 0.0
    for _ in range(QUIET):
        at_s += draw.expovariate(1 / EVERY_S)
        arrivals.append(arrival(at_s, "quiet", draw))
    return Trace(name="flood", arrivals=tuple(arrivals))


def arrival(at_s: float, user: str, draw: random.Random) -> Arrival:
    spec = job_spec_from_trace("job", {1: 1.0}, draw.randint(SHORTEST_S, LONGEST_S))
    return Arrival(at_s=at_s, spec=spec.model_copy(update={"user": user}))


def ours(trace: Trace, policy: PolicySpec) -> tuple[Outcome, ...]:
    cluster = cluster_of(DEVICES // 8, LAUNCH_S).model_copy(update={"policy": policy})
    return simulate(trace, cluster).outcomes


def waits(trace: Trace, outcomes: Sequence[Outcome]) -> list[Waited]:
    """Of every job of the quiet user. Its user's own waiting jobs may be ahead of it."""
    longest_s = LAUNCH_S + LONGEST_S
    mine = [
        one
        for given, one in zip(trace.arrivals, outcomes, strict=True)
        if given.spec.user == "quiet"
    ]
    found = []
    for one in mine:
        assert one.started_at_s is not None
        begins_s, starts_s = one.submitted_at_s, one.started_at_s
        ahead = sum(
            begins_s <= (other.started_at_s or 0.0) <= starts_s
            for other in mine
            if other is not one
        )
        found.append(
            Waited(wait_s=starts_s - begins_s, promise_s=(ahead // DEVICES + 1) * longest_s)
        )
    return found


def worst(waited: Sequence[Waited]) -> float:
    return max(one.wait_s / one.promise_s for one in waited)


def share_of(seed: int) -> float:
    """Of the device-seconds that were used while both teams had jobs left, the larger team's."""
    draw = random.Random(f"shares {seed}")
    trace = Trace(
        name="two floods",
        arrivals=tuple(arrival(0.0, user, draw) for user in ("ada", "bob") * 1000),
    )
    outcomes = ours(trace, TWO_TO_ONE)
    users = [given.spec.user for given in trace.arrivals]
    until_s = min(
        max(
            one.started_at_s or 0.0
            for one, user in zip(outcomes, users, strict=True)
            if user == name
        )
        for name in ("ada", "bob")
    )
    held = {"ada": 0.0, "bob": 0.0}
    for one, user in zip(outcomes, users, strict=True):
        for process in one.attempts:  # a stopped job holds nothing until it goes on
            assert process.ended_at_s is not None
            held[str(user)] += max(0.0, min(process.ended_at_s, until_s) - process.launched_at_s)
    return held["ada"] / (held["ada"] + held["bob"])
