"""`make bench-scheduler`: the policy `adaptive` ("ours") beside the other policies, on published and shaken traces.

One scheduler and one world for all: same jobs, same true times, same launch cost. `adaptive` is told the measured times
of all numbers of devices (with an error where it says so). The others get jobs with the number of devices that the user
asked for, and the best plan for it. No policy learns while it runs. Every figure over shaken inputs is the mean, with
the range in its name.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from heapq import heappop, heappush
from pathlib import Path
from statistics import fmean

from rich.console import Console

from benchmarks.decisions import decision_figures
from benchmarks.draws import stream
from benchmarks.figure import Figure, at_least, at_most, informs, say
from benchmarks.measured import Arrival, misjudge, simulate
from benchmarks.peers import Peer
from benchmarks.promises import promise_figures
from benchmarks.side_by_side import Measured, SideBySide, measured, ranged
from benchmarks.trace_files import read_trace
from orchestrator.backends.simulated.traces import Trace, make_trace
from orchestrator.service.commands.simulate import (
    Simulated,
    compute_training_time_alone_s,
    make_report,
)
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.job.trainer import Resume
from orchestrator.specs.order import Order
from orchestrator.specs.policy import Objective, PolicySpec

TRACES = Path(__file__).parents[2] / "shared" / "traces"
SHAKES = 10
LARGE, SHAKES_LARGE = 10_000, 3  # of a trace of so many jobs, which takes a minute for each queue
ARRIVAL_S, LENGTH = (
    60.0,
    0.05,
)  # arrivals by up to a minute, lengths by up to 5 % (reference/scheduling.md, 6.3)
# what AlibabaPAI/reconfigurable-dl-scheduler charges for a launch or a new plan
PLANS_LAUNCH_S = 260.0
# Nodes for each cluster's trace: a quarter, and a twentieth, of its jobs come when the devices that
# were asked for by
# then are more than there are.
DEADLINES = {"01": (22, 33), "05": (12, 20), "06": (21, 36), "07": (42, 64)}
# pkusys/ElasticFlow, figure 8a: 195 jobs on 16 nodes with four T4, of which it meets 72.8 %. Its
# simulator charges who
# starts, or changes its devices, 2 s, as much once more, and for each time that these double
# (scheduler/utils.py).
ELASTICFLOW = ("elasticflow", "traces_for_ElasticFlow", "elasticVpollux_e.csv")
ELASTICFLOW_LAUNCH_S = 16.0  # of all 64 devices
# of the jobs come when more devices are asked for than there are: a queue decides who is late
BUSY = 0.1
PHILLY_NODES = 64
PENDING = (1000, 2000, 5000, 10_000)
DECISIONS = 2000  # measured at each depth
PEERS = (Order.FIFO, *Peer)
YARDSTICK = 5_000_000
Play = Callable[[Trace, int], Simulated]  # a trace and a seed to what became of its jobs
OURS = "ours"
BOUND = "bound of any queue"


def figures() -> list[Figure]:
    """Everything that a simulation can show; needs the published traces, except for the time of decisions."""
    began_s = time.monotonic()
    shown = SideBySide()
    found = [
        *published_of_peers(),
        informs(f"this machine: a loop of {YARDSTICK:,} additions of squares", yardstick_s(), "s"),
    ]
    found += decision_figures(cluster_of(256, 30.0), PENDING, DECISIONS)
    if TRACES.exists():
        found += plans_figures(SHAKES, shown)
        found += promise_figures(
            TRACES / "plans" / "workloads",
            cluster_of(8, PLANS_LAUNCH_S),
            lambda trace: shakes(trace, SHAKES),
            shown,
        )
        found += deadline_figures(DEADLINES, SHAKES, shown)
        found += elasticflow_figures(SHAKES, shown) + philly_figures(shown)
        Console(width=170).print(shown.table())
    took_s = time.monotonic() - began_s
    return [*found, *shown.figures(), informs("this benchmark, on the wall", took_s / 60, "min")]


def yardstick_s() -> float:
    """Processor seconds that a plain loop takes on this machine, now."""
    total, began_s = 0, time.thread_time()
    for number in range(YARDSTICK):
        total += number * number
    return time.thread_time() - began_s


def cluster_of(nodes: int, launch_s: float, devices: int = 8) -> ClusterSpec:
    """Nodes of eight A800, as the plans were measured on."""
    return ClusterSpec(
        name=f"{nodes}x{devices}-a800",
        nodes=(
            NodeSpec(
                name="node", count=nodes, devices=devices, device="a800-80gb", host_memory="1TiB"
            ),
        ),
        launch_cost=f"{launch_s}s",
    )


def published_of_peers() -> list[Figure]:
    """What others published of Tiresias, as data: no input of these runs is in shared/traces.

    petuum/adaptdl (osdi21-artifact) ran it for Pollux, and pkusys/ElasticFlow for its figure 8a.
    """
    return [
        informs("Tiresias, as published: mean completion of Pollux's workload 6", 3469.69375, "s"),
        informs("Tiresias, as published: deadlines met of ElasticFlow's 195 jobs", 0.2872, ""),
    ]


def published(*parts: str) -> Trace:
    return read_trace(TRACES.joinpath(*parts))


def ours(cluster: ClusterSpec, sigma: float = 0.0) -> Play:
    """Our queue, told times whose logarithm is off by `sigma`."""
    return lambda trace, seed: simulate(misjudge(trace, sigma, seed), cluster)


def theirs(order: str, cluster: ClusterSpec) -> Play:
    """Another policy, with as many devices for each job as its user asked for; slowdowns count from the best number."""

    def play(trace: Trace, _: int) -> Simulated:
        asked = replace(trace, arrivals=tuple(map(as_asked, trace.arrivals)))
        run = simulate(asked, cluster.replace_order(order))
        devices = sum(node.devices * node.count for node in cluster.nodes)
        outcomes = tuple(
            replace(
                one, alone_s=cluster.launch_cost + compute_training_time_alone_s(arrival, devices)
            )
            for arrival, one in zip(trace.arrivals, run.outcomes, strict=True)
        )
        return replace(
            run,
            report=make_report(trace, cluster.replace_order(order), outcomes),
            outcomes=outcomes,
        )

    return play


def shake(trace: Trace, seed: int, *, arrival_s: float, length: float) -> Trace:
    """Return the trace with arrivals moved by up to `arrival_s`, and lengths by up to a share of `length`.

    Deadlines move with their jobs (Tsafrir, Ouaknine and Feitelson, IPDPS 2007: one trace alone proves nothing).
    """
    draw = stream(seed, "shaken")
    moved = []
    for arrival in trace.arrivals:
        by_s = max(draw.uniform(-arrival_s, arrival_s), -arrival.at_s)
        steps = max(1, round((arrival.spec.steps or 1) * draw.uniform(1 - length, 1 + length)))
        spec = arrival.spec.model_copy(update={"steps": steps})
        deadline_s = None if arrival.deadline_s is None else arrival.deadline_s + by_s
        moved.append(replace(arrival, at_s=arrival.at_s + by_s, spec=spec, deadline_s=deadline_s))
    return make_trace(trace.name, moved)


def shakes(trace: Trace, count: int) -> list[Trace]:
    return [shake(trace, seed, arrival_s=ARRIVAL_S, length=LENGTH) for seed in range(count)]


def over(traces: Sequence[Trace], play: Play) -> list[Measured]:
    return [measured(play(trace, seed)) for seed, trace in enumerate(traces)]


def mean_of(measure: str, runs: Sequence[Measured]) -> float:
    return fmean(one[measure] for one in runs)


# ------------------------------------------------------------------------------------------ plans with measured speeds


def plans_figures(count: int, shown: SideBySide) -> list[Figure]:
    """`base.csv` on 8 nodes x 8 GPUs with 260 s to launch. Without deadlines `edf` is `easy`."""
    trace, cluster = published("plans", "workloads", "base.csv"), cluster_of(8, PLANS_LAUNCH_S)
    alike = shakes(trace, count)
    found = bounds_as_published("base", trace, cluster)
    shown.add("base on 8x8", BOUND, [bounds(one, cluster) for one in alike])
    for name, play, completion_s, makespan_s in (
        (OURS, ours(cluster), 1100.0, 61_500.0),
        (
            "ours, for the makespan",
            ours(cluster.model_copy(update={"policy": PolicySpec(objective=Objective.MAKESPAN)})),
            1850.0,
            58_680.0,
        ),
        ("ours, told lognormal(0.5)", ours(cluster, 0.5), 1800.0, None),
        *((order.value, theirs(order, cluster), None, None) for order in PEERS),
    ):
        say(f"base.csv, {count} shaken inputs: {name}")
        exact, runs = measured(play(trace, 0)), over(alike, play)
        shown.add("base on 8x8", name, runs)
        found += [
            informs(f"base, {name}: {measure}, as published", exact[measure], "s")
            for measure in ("mean completion", "makespan")
        ]
        for measure, limit_s in (("mean completion", completion_s), ("makespan", makespan_s)):
            values = [one[measure] for one in runs]
            if limit_s is not None:
                found.append(
                    at_most(ranged(f"base, {name}: {measure}", values), fmean(values), "s", limit_s)
                )
        found.append(
            at_most(f"base, {name}: jobs not finished", mean_of("jobs not finished", runs), "", 0)
        )
    say(f"base.csv, {count} shaken inputs: other costs of a launch, and no choice of devices")
    for launch_s in (20.0, 60.0):
        hardware = cluster_of(8, launch_s)
        for name, play in ((OURS, ours(hardware)), (Peer.SJF.value, theirs(Peer.SJF, hardware))):
            completions = [one["mean completion"] for one in over(alike, play)]
            title = ranged(
                f"base, {name}: mean completion with {launch_s:.0f} s to launch", completions
            )
            found.append(informs(title, fmean(completions), "s"))
    say(f"base.csv, {count} shaken inputs: jobs that cannot be moved")
    held = [replace(one, arrivals=tuple(map(immovable, one.arrivals))) for one in alike]
    completions = [one["mean completion"] for one in over(held, ours(cluster))]
    title = ranged("base, ours where no job can be moved: mean completion", completions)
    found.append(at_most(title, fmean(completions), "s", 1500.0))
    rigid = [replace(one, arrivals=tuple(map(as_asked, one.arrivals))) for one in alike]
    completions = [one["mean completion"] for one in over(rigid, ours(cluster))]
    title = ranged("base, ours without a choice of devices: mean completion", completions)
    return [*found, informs(title, fmean(completions), "s")]


def bounds_as_published(name: str, trace: Trace, cluster: ClusterSpec) -> list[Figure]:
    return [
        informs(f"{name}: bound of {measure}, as published", value, "s")
        for measure, value in bounds(trace, cluster).items()
    ]


def bounds(trace: Trace, cluster: ClusterSpec) -> Measured:
    """What no queue can beat: every job alone, and all work without gaps, on as few devices as waste nothing."""
    devices = sum(node.devices * node.count for node in cluster.nodes)
    alone = [
        cluster.launch_cost + compute_training_time_alone_s(arrival, devices)
        for arrival in trace.arrivals
    ]
    completions, end_s = without_gaps(
        [
            (arrival.at_s, least_device_s(arrival, cluster.launch_cost) / devices)
            for arrival in trace.arrivals
        ]
    )
    pairs = zip(trace.arrivals, alone, strict=True)
    ends = [arrival.at_s + alone_s for arrival, alone_s in pairs]
    return {"mean completion": max(fmean(alone), fmean(completions)), "makespan": max(*ends, end_s)}


def least_device_s(arrival: Arrival, launch_s: float) -> float:
    """Device-seconds of a job on the number of devices that wastes least."""
    assert arrival.spec.steps is not None, arrival.spec.name
    return min(
        count * (launch_s + arrival.spec.steps * step_s) for count, step_s in arrival.spec.speeds
    )


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


def immovable(arrival: Arrival) -> Arrival:
    """The job, which resumes from no checkpoint."""
    knobs = arrival.spec.knobs.model_copy(update={"resume_from": None})
    spec = arrival.spec.model_copy(update={"knobs": knobs, "resume": Resume()})
    return replace(arrival, spec=spec)


def as_asked(arrival: Arrival) -> Arrival:
    """The job with no choice but the number of devices that its user asked for, where the trace tells that."""
    if arrival.rigid_devices is None:
        return arrival
    speeds = tuple(one for one in arrival.spec.speeds if one[0] == arrival.rigid_devices)
    assert speeds, arrival.spec.name
    gpus = arrival.spec.gpus.model_copy(
        update={"min": arrival.rigid_devices, "max": arrival.rigid_devices}
    )
    return replace(arrival, spec=arrival.spec.model_copy(update={"speeds": speeds, "gpus": gpus}))


# ----------------------------------------------------------------------------------------------------------- deadlines


def deadline_figures(
    nodes: Mapping[str, tuple[int, int]], count: int, shown: SideBySide
) -> list[Figure]:
    """Production traces with deadlines, on a busy and on a large cluster: against `edf`, and against each job alone.

    Twice that of `edf` is asked for where the cluster is busy. Elsewhere `edf` alone meets too many for that, and what
    each job could do alone is asked for, within a tenth.
    """
    found = []
    for number, sizes in nodes.items():
        trace = published("deadlines", f"cluster{number}.csv")
        alike = shakes(trace, count if len(trace.arrivals) < LARGE else SHAKES_LARGE)
        for size in sizes:
            cluster, where = cluster_of(size, 0.0), f"cluster{number} on {size}x8"
            met, edf, alone, slower = _deadlines_met(where, alike, cluster, shown)
            crowd = share(comes_to_a_crowd(trace, 8 * size))
            over_edf, of_bound = (
                f"{where}: deadlines met over those of edf",
                f"{where}: deadlines met over the bound",
            )
            is_busy = crowd >= BUSY
            found += [
                informs(
                    f"{where}: jobs that come when more devices are asked for than there are",
                    crowd,
                    "",
                ),
                informs(
                    ranged(f"{where}: deadlines that each job alone can meet", alone),
                    fmean(alone),
                    "",
                ),
                at_most(f"{where}: mean completion over that of edf", slower, "x", 1.0),
                at_least(over_edf, met / edf, "x", 2.0)
                if is_busy
                else informs(over_edf, met / edf, "x"),
                informs(of_bound, met / fmean(alone), "")
                if is_busy
                else at_least(of_bound, met / fmean(alone), "", 0.9),
            ]
    return found


def elasticflow_figures(count: int, shown: SideBySide) -> list[Figure]:
    """The trace of a peer that was made for deadlines, with the speeds that it measured; none where it is not here."""
    if not TRACES.joinpath(*ELASTICFLOW).exists():
        say(f"ElasticFlow's trace is not here ({'/'.join(ELASTICFLOW)})")
        return []
    trace, where = published(*ELASTICFLOW), "ElasticFlow on 16x4"
    alike, cluster = shakes(trace, count), cluster_of(16, ELASTICFLOW_LAUNCH_S, 4)
    met, edf, alone, slower = _deadlines_met(where, alike, cluster, shown)
    harder = []
    for title, play, least in (
        ("launches of 60 s", ours(cluster_of(16, 60.0, 4)), 0.80),
        ("told lognormal(0.5)", ours(cluster, 0.5), 0.78),
    ):
        say(f"{where}, {len(alike)} shaken inputs: {title}")
        shares = [one["deadlines met"] for one in over(alike, play)]
        harder.append(
            at_least(ranged(f"{where}, {title}: deadlines met", shares), fmean(shares), "", least)
        )
    return [
        at_least(f"{where}: deadlines met (ElasticFlow's own: 0.728)", met, "", 0.82),
        *harder,
        at_most(f"{where}: mean completion over that of edf", slower, "x", 1.0),
        informs(f"{where}: deadlines met over those of edf", met / edf, "x"),
        informs(
            ranged(f"{where}: deadlines that each job alone can meet", alone), fmean(alone), ""
        ),
    ]


def _deadlines_met(
    where: str, alike: Sequence[Trace], cluster: ClusterSpec, shown: SideBySide
) -> tuple[float, float, list[float], float]:
    """Shares of deadlines met by our queue, by `edf` and by each job alone; our mean completion over that of `edf`."""
    runs = {}
    for name, play in (
        (OURS, ours(cluster)),
        *((order.value, theirs(order, cluster)) for order in PEERS),
    ):
        say(f"{where}, {len(alike)} shaken inputs: {name}")
        runs[name] = over(alike, play)
        shown.add(where, name, runs[name])
    alone = [share(can_be_met(one, cluster)) for one in alike]
    shown.add(where, "bound of each job alone", [{"deadlines met": one} for one in alone])
    mine, edf = runs[OURS], runs[Peer.EDF.value]
    slower = mean_of("mean completion", mine) / mean_of("mean completion", edf)
    return mean_of("deadlines met", mine), mean_of("deadlines met", edf), alone, slower


def comes_to_a_crowd(trace: Trace, devices: int) -> list[bool]:
    """Whether each job comes when more devices are asked for than there are, had every job begun when it came."""
    ends: list[tuple[float, int]] = []
    asked, found = 0, []
    for one in sorted(trace.arrivals, key=lambda arrival: arrival.at_s):
        while ends and ends[0][0] <= one.at_s:
            asked -= heappop(ends)[1]
        count = one.rigid_devices or one.spec.gpus.max
        asked += count
        assert one.spec.steps is not None, one.spec.name
        heappush(ends, (one.at_s + one.spec.steps * dict(one.spec.speeds)[count], count))
        found.append(asked > devices)
    return found


def can_be_met(trace: Trace, cluster: ClusterSpec) -> list[bool]:
    """Whether each job would be in time if it had the cluster for itself."""
    devices = sum(node.devices * node.count for node in cluster.nodes)
    return [
        one.at_s + cluster.launch_cost + compute_training_time_alone_s(one, devices)
        <= one.deadline_s
        for one in trace.arrivals
        if one.deadline_s is not None
    ]


def share(holds: Iterable[bool]) -> float:
    return fmean(map(float, holds))


# -------------------------------------------------------------------------------------------------------------- Philly


def philly_figures(shown: SideBySide) -> list[Figure]:
    """Four months of 15 virtual clusters on one cluster: the whole trace, once."""
    trace, cluster = published("philly", "philly.csv"), cluster_of(PHILLY_NODES, 30.0)
    name = f"philly on {PHILLY_NODES}x8"
    say(f"{name}, {len(trace.arrivals)} jobs: {OURS}")
    begin_s = time.process_time()
    run = simulate(trace, cluster)
    replay_s, decided_s, mine = time.process_time() - begin_s, sum(run.decisions_s), measured(run)
    yard_s = yardstick_s()
    del run
    say(f"{name}: {Peer.EASY}")
    backfilled = measured(theirs(Peer.EASY, cluster)(trace, 0))
    shown.add(name, OURS, [mine])
    shown.add(name, Peer.EASY.value, [backfilled])
    ratio = mine["mean completion"] / backfilled["mean completion"]
    return [
        at_most(
            f"{name}: replay of {len(trace.arrivals)} jobs on one core", replay_s, "CPU s", 120.0
        ),
        informs(f"{name}: of it in decisions", decided_s, "s"),
        informs(f"{name}: that loop of {YARDSTICK:,} right after it", yard_s, "CPU s"),
        at_most(f"{name}: mean completion over that of {Peer.EASY}", ratio, "x", 0.5),
        at_most(f"{name}: jobs not finished", mine["jobs not finished"], "", 0),
    ]
