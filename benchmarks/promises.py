"""Promised speeds, and plans as they were submitted: the traces `mt` and `bp` beside `base`, in the same world.

Where mt.csv and bp.csv are not in shared/traces they are made of base.csv as their README describes them: of mt 194 of
the 406 jobs are guaranteed, others in each shaken input; in bp each job's plan is the best for what it asks for.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean

from benchmarks.figure import Figure, at_least, at_most, informs, say
from benchmarks.measured import Arrival, misjudge, simulate
from benchmarks.peers import Peer
from benchmarks.side_by_side import SideBySide, measured, ranged
from benchmarks.trace_files import read_trace, request_of
from orchestrator.backends.simulated.traces import Trace
from orchestrator.service.commands.simulate import Outcome, Simulated
from orchestrator.specs.cluster import ClusterSpec

GUARANTEED = 194  # jobs of mt (reference/scheduling.md, section 2)
# mean completion of Rubick's SLA variant in its own simulator (the same section)
RUBICK_MT_S = 4017.30
KEPT = 0.99  # of the promises that were given
REFUSED = 0.02  # of the jobs that ask for one
Shaken = Callable[[Trace], Sequence[Trace]]


def promise_figures(
    folder: Path, cluster: ClusterSpec, shake: Shaken, shown: SideBySide
) -> list[Figure]:
    """What becomes of guaranteed and other jobs of mt, and of bp's jobs as they were submitted."""
    base = read_trace(folder / "base.csv")
    return [
        *_multi_tenant(folder, base, cluster, shake, shown),
        *_best_plan(folder, base, cluster, shake, shown),
    ]


def guaranteed(trace: Trace, count: int, seed: int) -> Trace:
    """The trace with so many of its jobs, drawn by `seed`, promised the speed of what they were submitted with."""
    chosen = {*random.Random(seed).sample(range(len(trace.arrivals)), count)}
    arrivals = (
        _promised(one) if number in chosen else one for number, one in enumerate(trace.arrivals)
    )
    return replace(trace, arrivals=tuple(arrivals))


def _promised(arrival: Arrival) -> Arrival:
    assert arrival.rigid_devices is not None, arrival.spec.name
    request = request_of(arrival.rigid_devices, arrival.submitted_step_s)
    return replace(arrival, spec=arrival.spec.model_copy(update={"guarantee": request}))


def with_best_plan(arrival: Arrival) -> Arrival:
    """The job submitted with the fastest plan for the number of devices that it asks for."""
    assert arrival.rigid_devices is not None, arrival.spec.name
    return replace(arrival, submitted_step_s=dict(arrival.spec.speeds)[arrival.rigid_devices])


def as_submitted(arrival: Arrival) -> Arrival:
    """The job with no choice: as many devices as it asks for, with the plan that it was submitted with."""
    assert arrival.rigid_devices is not None, arrival.spec.name
    assert arrival.submitted_step_s is not None, arrival.spec.name
    count = arrival.rigid_devices
    gpus = arrival.spec.gpus.model_copy(update={"min": count, "max": count})
    said = {"speeds": ((count, arrival.submitted_step_s),), "gpus": gpus}
    return replace(arrival, spec=arrival.spec.model_copy(update=said), shapes=())


def _all(trace: Trace, change: Callable[[Arrival], Arrival]) -> Trace:
    return replace(trace, arrivals=tuple(map(change, trace.arrivals)))


def _multi_tenant(
    folder: Path, base: Trace, cluster: ClusterSpec, shake: Shaken, shown: SideBySide
) -> list[Figure]:
    if (folder / "mt.csv").exists():
        where, inputs = "mt", shake(read_trace(folder / "mt.csv"))
    else:
        where = (
            f"mt, of base.csv with {GUARANTEED} guaranteed jobs as mt.csv is not in shared/traces"
        )
        inputs = [guaranteed(one, GUARANTEED, seed) for seed, one in enumerate(shake(base))]
    found = []
    for sigma, told in ((0.0, ""), (0.5, ", told lognormal(0.5)")):
        say(f"{where}, {len(inputs)} shaken inputs{told}")
        runs = [
            simulate(misjudge(trace, sigma, seed), cluster) for seed, trace in enumerate(inputs)
        ]
        shown.add("mt on 8x8", f"ours{told}", [measured(run) for run in runs])
        found += _of_runs(f"{where}{told}", runs, is_told=not sigma)
    alike = [_all(trace, _without_promise) for trace in inputs]
    runs = [simulate(trace, cluster) for trace in alike]
    shown.add("mt on 8x8", "ours without promises", [measured(run) for run in runs])
    return found


def _without_promise(arrival: Arrival) -> Arrival:
    return replace(arrival, spec=arrival.spec.model_copy(update={"guarantee": None}))


def _of_runs(where: str, runs: Sequence[Simulated], *, is_told: bool) -> list[Figure]:
    """With bars where lengths are told truly."""
    reports = [run.report for run in runs]
    kept = [one["promises_kept"] / max(1, one["promised"]) for one in reports]
    refused = [1 - one["promised"] / max(1, one["guaranteed"]) for one in reports]
    means = {name: [_mean_s(run, of) for run in runs] for name, of in KINDS.items()}
    every_s = [one["mean_completion_s"] for one in reports]
    lost = fmean(
        one["jobs"] - one["finished"] - one["guaranteed"] + one["promised"] for one in reports
    )
    names = [ranged(f"{where}: {what}", values) for what, values in (
        ("share of promises kept", kept),
        ("share of guaranteed jobs refused", refused),
        (f"mean completion (Rubick's SLA variant: {RUBICK_MT_S:,.0f} s)", every_s),
    )]  # fmt: skip
    by_kind = [
        informs(ranged(f"{where}: mean completion of {name}", values), fmean(values), "s")
        for name, values in means.items()
    ]
    if not is_told:
        return [
            informs(names[0], fmean(kept), ""),
            informs(names[2], fmean(every_s), "s"),
            *by_kind,
        ]
    return [
        at_least(names[0], fmean(kept), "", KEPT),
        at_most(names[1], fmean(refused), "", REFUSED),
        at_most(names[2], fmean(every_s), "s", RUBICK_MT_S),
        *by_kind,
        at_most(f"{where}: jobs not finished and not refused", lost, "", 0),
    ]


KINDS: Mapping[str, Callable[[Outcome], bool]] = {
    "guaranteed jobs": lambda one: one.guaranteed,
    "best-effort jobs": lambda one: not one.guaranteed,
}


def _mean_s(run: Simulated, of: Callable[[Outcome], bool]) -> float:
    return fmean(one.completion_s for one in run.outcomes if of(one) and one.ended_at_s is not None)


def _best_plan(
    folder: Path, base: Trace, cluster: ClusterSpec, shake: Shaken, shown: SideBySide
) -> list[Figure]:
    is_here = (folder / "bp.csv").exists()
    where = "bp" if is_here else "bp, of base.csv as bp.csv is not in shared/traces"
    best = read_trace(folder / "bp.csv") if is_here else _all(base, with_best_plan)
    found = []
    for name, trace in (("base", base), (where, best)):
        inputs = shake(trace)
        for queue, hardware in _queues(cluster).items():
            for how, change in (("as submitted", as_submitted), ("with a choice", None)):
                if change is None and queue != OURS:
                    continue
                say(f"{name}, {len(inputs)} shaken inputs {how}: {queue}")
                played = inputs if change is None else [_all(trace, change) for trace in inputs]
                runs = [measured(simulate(trace, hardware)) for trace in played]
                shown.add(f"{name.partition(',')[0]} on 8x8, {how}", queue, runs)
                completions = [one["mean completion"] for one in runs]
                title = ranged(f"{name}, jobs {how}, {queue}: mean completion", completions)
                found.append(informs(title, fmean(completions), "s"))
    return found


OURS = "ours"


def _queues(cluster: ClusterSpec) -> Mapping[str, ClusterSpec]:
    return {
        OURS: cluster,
        **{order.value: cluster.replace_order(order) for order in (Peer.EASY, Peer.SJF)},
    }
