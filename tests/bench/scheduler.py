"""`make bench-scheduler`: our queue beside other people's, on published traces and shaken copies of them.

One world for all: same jobs, same true times, same launch cost. What each queue is told: ours the measured times of all
numbers of devices (with an error where it says so), peers the time of the number that the user asked for, with the best
plan for it. Nobody learns while it runs. Every figure over shaken inputs is the mean, with the range in its name.
"""

from __future__ import annotations

import random
import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from math import log
from pathlib import Path
from statistics import fmean

from orchestrator.backends.traces import Arrival, Trace, misjudged, read_trace, shaken, told
from orchestrator.scheduling.step import step
from orchestrator.service.controller import Controller
from orchestrator.service.simulate import (
    FOREVER_S,
    Outcome,
    Report,
    Trouble,
    Unkept,
    alone_s,
    backend_for,
    quantile,
    report_on,
    simulate,
)
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.job import JobSpec
from orchestrator.specs.state import Action, Event, JobStatus, Released, State, Submitted
from tests.bench import peers
from tests.bench.figure import Figure, at_least, at_most, informs

TRACES = Path(__file__).parents[2].parent / "shared" / "traces"
SHAKES = 10
ARRIVAL_S, LENGTH = 60.0, 0.05  # arrivals by up to a minute, lengths by up to 5 % (reference/scheduling.md, 6.3)
PLANS_LAUNCH_S = 260.0  # what AlibabaPAI/reconfigurable-dl-scheduler charges for a launch or a new plan
# Nodes for each cluster's trace: a quarter, and a twentieth, of its jobs come when the devices that were asked for by
# then are more than there are.
DEADLINES = {"01": (22, 33), "05": (12, 20), "06": (21, 36), "07": (42, 64)}
PHILLY_NODES = 64
PENDING = (1000, 2000, 5000, 10_000)
RUNNING = 500
DECISIONS = 2000  # measured at each depth
PEERS = (peers.FIFO, peers.EASY, peers.SJF, peers.LAS)  # without deadlines EDF is FIFO with backfill
Play = Callable[[Trace, int], Sequence[Outcome]]  # a trace and a seed to what became of its jobs


def figures() -> list[Figure]:
    """Everything that a simulation can show; needs the published traces, except for the time of decisions."""
    found = decision_figures(PENDING, DECISIONS)
    if TRACES.exists():
        found += plans_figures(SHAKES) + deadline_figures(DEADLINES, SHAKES) + philly_figures()
    return found


def cluster_of(nodes: int, launch_s: float, devices: int = 8) -> ClusterSpec:
    """Nodes of eight A800, as the plans were measured on."""
    return ClusterSpec(
        name=f"{nodes}x{devices}-a800",
        nodes=(NodeSpec(name="node", count=nodes, devices=devices, device="a800-80gb", host_memory="1TiB"),),
        launch_cost=f"{launch_s}s",
    )


def published(*parts: str) -> Trace:
    def no_files(path: Path) -> JobSpec:
        raise AssertionError(path)

    return read_trace(TRACES.joinpath(*parts), no_files)


def ours(cluster: ClusterSpec, sigma: float = 0.0) -> Play:
    """Our queue, told times whose logarithm is off by `sigma`."""
    return lambda trace, seed: simulate(misjudged(trace, sigma, seed), cluster, seed=seed).outcomes


def theirs(peer: peers.Peer, cluster: ClusterSpec) -> Play:
    return lambda trace, seed: peers.play(peer, trace, cluster, seed=seed)


def shakes(trace: Trace, count: int) -> list[Trace]:
    return [shaken(trace, seed, arrival_s=ARRIVAL_S, length=LENGTH) for seed in range(count)]


def over(cluster: ClusterSpec, traces: Sequence[Trace], play: Play) -> list[Report]:
    return [report_on(trace, cluster, seed, play(trace, seed)) for seed, trace in enumerate(traces)]


def ranged(name: str, values: Sequence[float]) -> str:
    return f"{name} ({min(values):.4g} to {max(values):.4g})"


# ------------------------------------------------------------------------------------------ plans with measured speeds


def plans_figures(count: int) -> list[Figure]:
    """`base.csv` on 8 nodes x 8 GPUs with 260 s to launch."""
    trace, cluster = published("plans", "workloads", "base.csv"), cluster_of(8, PLANS_LAUNCH_S)
    alike = shakes(trace, count)
    found = [*bound_figures("base", trace, cluster)]
    for name, play, completion_s, makespan_s in (
        ("ours", ours(cluster), 1500.0, 58_680.0),
        ("ours, told lognormal(0.5)", ours(cluster, 0.5), 1800.0, None),
        *((peer.name, theirs(peer, cluster), None, None) for peer in PEERS),
    ):
        say(f"base.csv, {count} shaken inputs: {name}")
        exact = report_on(trace, cluster, 0, play(trace, 0))
        reports = over(cluster, alike, play)
        found += [
            informs(f"base, {name}: mean completion, as published", exact["mean_completion_s"], "s"),
            informs(f"base, {name}: makespan, as published", exact["makespan_s"], "s"),
            *_means(f"base, {name}", reports, completion_s, makespan_s),
        ]
    for launch_s in (20.0, 60.0):
        hardware = cluster_of(8, launch_s)
        for name, play in (("ours", ours(hardware)), (peers.SJF.name, theirs(peers.SJF, hardware))):
            completions = [one["mean_completion_s"] for one in over(hardware, alike, play)]
            title = ranged(f"base, {name}: mean completion with {launch_s:.0f} s to launch", completions)
            found.append(informs(title, fmean(completions), "s"))
    rigid = [replace(one, arrivals=tuple(map(as_asked, one.arrivals))) for one in alike]
    completions = [one["mean_completion_s"] for one in over(cluster, rigid, ours(cluster))]
    found.append(
        informs(ranged("base, ours without a choice of devices: mean completion", completions), fmean(completions), "s")
    )
    return found


def bound_figures(name: str, trace: Trace, cluster: ClusterSpec) -> list[Figure]:
    """What no queue can beat: every job alone, and all work without gaps, on as few devices as waste nothing."""
    devices = sum(node.devices * node.count for node in cluster.nodes)
    alone = [cluster.launch_cost + alone_s(one, devices) for one in trace.arrivals]
    completions, end_s = without_gaps(
        [(one.at_s, least_device_s(one, cluster.launch_cost) / devices) for one in trace.arrivals]
    )
    ends = [one.at_s + alone_one for one, alone_one in zip(trace.arrivals, alone, strict=True)]
    return [
        informs(f"{name}: bound of mean completion, as published", max(fmean(alone), fmean(completions)), "s"),
        informs(f"{name}: bound of makespan, as published", max(*ends, end_s), "s"),
    ]


def least_device_s(arrival: Arrival, launch_s: float) -> float:
    """Device-seconds of a job on the number of devices that wastes least."""
    assert arrival.spec.steps is not None, arrival.spec.name
    return min(count * (launch_s + arrival.spec.steps * step_s) for count, step_s in arrival.spec.speeds)


def without_gaps(work: Sequence[tuple[float, float]]) -> tuple[list[float], float]:
    """Completions, and the last end, of (arrival, seconds) on one machine that does the shortest rest first.

    No schedule of that machine has a smaller mean (Schrage 1968, Operations Research 16:687).
    """
    coming, rest, now_s = deque(sorted(work)), list[tuple[float, float]](), 0.0
    completions: list[float] = []
    while coming or rest:
        now_s = now_s if rest else max(now_s, coming[0][0])
        while coming and coming[0][0] <= now_s:
            at_s, left_s = coming.popleft()
            heappush(rest, (left_s, at_s))
        left_s, at_s = heappop(rest)
        until_s = min(now_s + left_s, coming[0][0]) if coming else now_s + left_s
        if until_s < now_s + left_s:
            heappush(rest, (left_s - (until_s - now_s), at_s))
        else:
            completions.append(until_s - at_s)
        now_s = until_s
    return completions, now_s


def say(what: str) -> None:
    """One line of progress."""
    print(f"  {what} ...", flush=True)


def as_asked(arrival: Arrival) -> Arrival:
    """The job with no choice but the number of devices that its user asked for."""
    speeds = tuple(one for one in arrival.spec.speeds if one[0] == arrival.rigid_devices)
    assert speeds, arrival.spec.name
    gpus = arrival.spec.gpus.model_copy(update={"min": arrival.rigid_devices, "max": arrival.rigid_devices})
    return replace(arrival, spec=arrival.spec.model_copy(update={"speeds": speeds, "gpus": gpus}))


def _means(name: str, reports: Sequence[Report], completion_s: float | None, makespan_s: float | None) -> list[Figure]:
    """Mean over the shakes, with the range."""

    def figure(what: str, values: Sequence[float], unit: str, limit: float | None) -> Figure:
        title = ranged(f"{name}: {what}", values)
        return informs(title, fmean(values), unit) if limit is None else at_most(title, fmean(values), unit, limit)

    return [
        figure("mean completion", [one["mean_completion_s"] for one in reports], "s", completion_s),
        figure("p99 completion", [one["p99_completion_s"] for one in reports], "s", None),
        figure("makespan", [one["makespan_s"] for one in reports], "s", makespan_s),
        figure("worst slowdown", [one["worst_slowdown"] for one in reports], "x", None),
        figure("GPU-hours", [one["gpu_hours"] for one in reports], "h", None),
        figure("restarts a job", [one["restarts"] / one["jobs"] for one in reports], "", None),
        figure("jobs not finished", [one["jobs"] - one["finished"] for one in reports], "", 0),
    ]


# ----------------------------------------------------------------------------------------------------------- deadlines


def deadline_figures(nodes: Mapping[str, tuple[int, int]], count: int) -> list[Figure]:
    """Production traces with deadlines, on a busy and on a large cluster: against EDF, and against each job alone."""
    found = []
    for number, (busy, large) in nodes.items():
        alike = shakes(published("deadlines", f"cluster{number}.csv"), count)
        for size in (busy, large):
            say(f"cluster{number} on {size}x8, {count} shaken inputs")
            cluster = cluster_of(size, 0.0)
            bounds = [share(can_be_met(one, cluster)) for one in alike]
            met, edf = (
                [one["deadlines_met"] / one["deadlines"] for one in over(cluster, alike, play)]
                for play in (ours(cluster), theirs(peers.EDF, cluster))
            )
            where, of_bound = f"cluster{number} on {size}x8", fmean(met) / fmean(bounds)
            found += [
                informs(ranged(f"{where}: deadlines that each job alone can meet", bounds), fmean(bounds), ""),
                informs(ranged(f"{where}: deadlines met, {peers.EDF.name}", edf), fmean(edf), ""),
                informs(ranged(f"{where}: deadlines met, ours", met), fmean(met), ""),
                at_least(f"{where}: deadlines met over EDF's", fmean(met) / fmean(edf), "x", 2.0),
                at_least(f"{where}: deadlines met over the bound", of_bound, "", 0.9)
                if size == large
                else informs(f"{where}: deadlines met over the bound", of_bound, ""),
            ]
    return found


def can_be_met(trace: Trace, cluster: ClusterSpec) -> list[bool]:
    """Whether each job would be in time if it had the cluster for itself."""
    devices = sum(node.devices * node.count for node in cluster.nodes)
    return [
        one.at_s + cluster.launch_cost + alone_s(one, devices) <= one.deadline_s
        for one in trace.arrivals
        if one.deadline_s is not None
    ]


def share(holds: Iterable[bool]) -> float:
    return fmean(map(float, holds))


# -------------------------------------------------------------------------------------------------------------- Philly


def philly_figures() -> list[Figure]:
    """Four months of 15 virtual clusters on one cluster: the whole trace, once."""
    trace, cluster = published("philly", "philly.csv"), cluster_of(PHILLY_NODES, 30.0)
    say(f"philly, {len(trace.arrivals)} jobs")
    begin_s = time.process_time()
    run = simulate(trace, cluster, seed=0)
    replay_s = time.process_time() - begin_s
    backfilled = report_on(trace, cluster, 0, peers.play(peers.EASY, trace, cluster, seed=0))
    report, name = run.report, f"philly on {PHILLY_NODES}x8"
    ratio = report["mean_completion_s"] / backfilled["mean_completion_s"]
    return [
        at_most(f"{name}: replay of {report['jobs']} jobs on one core", replay_s, "CPU s", 120.0),
        informs(f"{name}: of it in decisions", sum(run.decisions_s), "s"),
        informs(f"{name}, ours: mean completion", report["mean_completion_s"], "s"),
        informs(f"{name}, {peers.EASY.name}: mean completion", backfilled["mean_completion_s"], "s"),
        at_most(f"{name}: mean completion over that of {peers.EASY.name}", ratio, "x", 0.5),
        informs(f"{name}, ours: p99 completion", report["p99_completion_s"], "s"),
        informs(f"{name}, {peers.EASY.name}: p99 completion", backfilled["p99_completion_s"], "s"),
        informs(f"{name}, ours: worst slowdown", report["worst_slowdown"], "x"),
        informs(f"{name}, {peers.EASY.name}: worst slowdown", backfilled["worst_slowdown"], "x"),
        informs(f"{name}, ours: makespan", report["makespan_s"], "s"),
        informs(f"{name}, {peers.EASY.name}: makespan", backfilled["makespan_s"], "s"),
        at_most(f"{name}: jobs not finished", report["jobs"] - report["finished"], "", 0),
        informs(f"{name}: GPU-hours", report["gpu_hours"], "h"),
    ]


# ---------------------------------------------------------------------------------------------------- time of decisions


def decision_figures(depths: Sequence[int], decisions: int) -> list[Figure]:
    """Of one `step` on 2,048 devices: full, with so many jobs waiting, one in for each that ends."""
    found, means = [], {}
    for pending in depths:
        say(f"{decisions} decisions with {pending} pending")
        running, unsorted_s = decisions_at(pending, decisions)
        taken_s = sorted(unsorted_s)
        means[pending] = fmean(taken_s)
        limit_ms = {1000: 50.0, 10_000: 250.0}.get(pending)
        name, p99_ms = f"2,048 GPUs, {pending} pending", 1e3 * quantile(taken_s, 0.99)
        found += [
            informs(f"{name}: decision p50", 1e3 * quantile(taken_s, 0.5), "ms"),
            at_most(f"{name}: decision p99", p99_ms, "ms", limit_ms)
            if limit_ms
            else informs(f"{name}: decision p99", p99_ms, "ms"),
            informs(f"{name}: jobs running", running, ""),
            informs(f"{name}: decision max", 1e3 * taken_s[-1], "ms"),
        ]
    few, many = min(depths), max(depths)
    growth, allowed = means[many] / means[few], many * log(many) / (few * log(few))
    found.append(at_most(f"growth of the mean decision from {few} to {many} pending", growth, "x", allowed))
    return found


def decisions_at(pending: int, decisions: int) -> tuple[int, list[float]]:
    """Jobs that ran at the end, and seconds of each decision on a submission or on devices that came free.

    Starts and ends of attempts, which free nothing yet, are decided upon as well; they take microseconds and are left
    out, so that a quantile says something about the rest.
    """
    draw = random.Random(pending)
    kinds = [_kind(draw) for _ in range(40)]
    cluster = cluster_of(256, 30.0)
    arrivals = [
        Arrival(at_s=0.0, spec=draw.choice(kinds).model_copy(update={"steps": draw.randint(100, 20_000)}))
        for _ in range(pending + RUNNING + decisions)
    ]
    coming = iter(arrivals)
    backend = backend_for(Trace(name="deep", arrivals=tuple(arrivals)), cluster, seed=0, trouble=Trouble())
    taken_s: list[float] = []
    ended = 0

    def decide(state: State, event: Event) -> tuple[State, tuple[Action, ...]]:
        nonlocal ended
        begin_s = time.perf_counter()
        decided = step(state, event)
        if ended and isinstance(event, Submitted | Released):
            taken_s.append(time.perf_counter() - begin_s)
        ended += isinstance(event, Released)
        return decided

    controller = Controller(Unkept(), backend, backend.now, decide=decide)
    controller.turn(0.0)
    for _ in range(pending + RUNNING):
        controller.submit(next(coming).spec)
    while len(taken_s) < decisions:
        before = ended
        controller.turn(FOREVER_S)
        for _ in range(ended - before):
            controller.submit(next(coming).spec)
    running = sum(job.status is JobStatus.RUNNING for job in controller.state.jobs.values())
    return running, taken_s[:decisions]


def _kind(draw: random.Random) -> JobSpec:
    """Jobs of one kind, for up to eight devices."""
    alone_s, scaling, most = draw.uniform(0.1, 5.0), draw.uniform(0.5, 0.95), draw.choice((1, 2, 4, 8, 8))
    return told("kind", {n: alone_s / n**scaling for n in (1, 2, 4, 8) if n <= most}, 1)
