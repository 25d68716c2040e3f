"""How long does one decision take on 2,048 GPUs, by how many jobs wait, and where teams share them?"""

from __future__ import annotations

import random
import time
from collections.abc import Sequence
from math import log
from statistics import fmean

from benchmarks.figure import Figure, at_most, informs, say
from benchmarks.measured import Arrival, MeasuredBackend
from benchmarks.trace_files import job_spec_from_trace
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.commands.simulate import FOREVER_S, NullJournal, compute_quantile
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Action
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.events import Event, Released, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.policy import UNSHARED, PolicySpec

LIMITS_MS = {1000: 50.0, 10_000: 250.0}  # of the p99, by jobs that wait
RUNNING = 500
TEAMS, USERS = 8, 5  # users of each
QUOTA = 128  # devices of each team: together half of all
SHARED = PolicySpec(
    teams=[
        {
            "name": f"team-{team}",
            "shares": 1 + team % 3,
            "quota": QUOTA,
            "users": [f"user-{team * USERS + user}" for user in range(USERS)],
        }
        for team in range(TEAMS)
    ]
)


def decision_figures(cluster: ClusterSpec, depths: Sequence[int], decisions: int) -> list[Figure]:
    """Of one decision on a full cluster, with so many waiting, one in for each that ends; shared where a bar is."""
    found, means = [], {}
    for policy, pending in [(UNSHARED, each) for each in depths] + [
        (SHARED, each) for each in depths if each in LIMITS_MS
    ]:
        name = f"2,048 GPUs, {pending} pending" + (
            ", shared by 8 teams with quotas" if policy.has_teams else ""
        )
        say(f"{decisions} decisions, {name}")
        running, unsorted_s = decisions_at(
            cluster.model_copy(update={"policy": policy}), pending, decisions
        )
        taken_s = sorted(unsorted_s)
        if not policy.has_teams:
            means[pending] = fmean(taken_s)
        p99_ms, limit_ms = 1e3 * compute_quantile(taken_s, 0.99), LIMITS_MS.get(pending)
        found += [
            informs(f"{name}: decision p50", 1e3 * compute_quantile(taken_s, 0.5), "ms"),
            at_most(f"{name}: decision p99", p99_ms, "ms", limit_ms)
            if limit_ms
            else informs(f"{name}: decision p99", p99_ms, "ms"),
            informs(f"{name}: decision max", 1e3 * taken_s[-1], "ms"),
            informs(f"{name}: jobs running", running, ""),
        ]
    few, many = min(depths), max(depths)
    growth, allowed = means[many] / means[few], many * log(many) / (few * log(few))
    found.append(
        at_most(f"growth of the mean decision from {few} to {many} pending", growth, "x", allowed)
    )
    return found


def decisions_at(cluster: ClusterSpec, pending: int, decisions: int) -> tuple[int, list[float]]:
    """Jobs that ran at the end, and processor seconds of each decision on a submission or on devices that came free.

    Starts and ends of attempts, which free nothing yet, are decided upon as well; they take microseconds and are left
    out, so that a quantile says something about the rest.
    """
    draw = random.Random(pending)
    kinds = [_kind(draw) for _ in range(40)]
    arrivals = [_arrival(draw, kinds) for _ in range(pending + RUNNING + decisions)]
    coming = iter(arrivals)
    backend = MeasuredBackend(arrivals, cluster)
    taken_s: list[float] = []
    ended = 0

    class Timed(Scheduler):
        def step(self, event: Event) -> tuple[Action, ...]:
            nonlocal ended
            begin_s = time.thread_time()
            actions = super().step(event)
            if ended and isinstance(event, Submitted | Released):
                taken_s.append(time.thread_time() - begin_s)
            ended += isinstance(event, Released)
            return actions

    controller = Controller(NullJournal(), backend, backend.current_time_s, Timed)
    controller.run_once(0.0)
    for _ in range(pending + RUNNING):
        controller.submit(next(coming).spec)
    while len(taken_s) < decisions:
        before = ended
        controller.run_once(FOREVER_S)
        for _ in range(ended - before):
            controller.submit(next(coming).spec)
    running = sum(job.status is JobStatus.RUNNING for job in controller.state.jobs.values())
    return running, taken_s[:decisions]


def _arrival(draw: random.Random, kinds: Sequence[JobSpec]) -> Arrival:
    said = {"steps": draw.randint(100, 20_000), "user": f"user-{draw.randrange(TEAMS * USERS)}"}
    return Arrival(at_s=0.0, spec=draw.choice(kinds).model_copy(update=said))


def _kind(draw: random.Random) -> JobSpec:
    """Jobs of one kind, for up to eight devices."""
    alone_s, scaling, most = (
        draw.uniform(0.1, 5.0),
        draw.uniform(0.5, 0.95),
        draw.choice((1, 2, 4, 8, 8)),
    )
    return job_spec_from_trace(
        "kind", {n: alone_s / n**scaling for n in (1, 2, 4, 8) if n <= most}, 1
    )
