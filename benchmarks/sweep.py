"""`python -m benchmarks sweep`: every number of the queue's tuning, halved and doubled, on shaken copies of base.csv.

Mean completion and makespan where all jobs can be moved, and where none can. A number that moves neither by 1 % has no
effect there.
"""

from __future__ import annotations

from dataclasses import fields, replace

import orchestrator.scheduling.base.tuning as tuned
from benchmarks.figure import Figure, informs, say
from benchmarks.scheduler import (
    PLANS_LAUNCH_S,
    SHAKES,
    TRACES,
    cluster_of,
    immovable,
    mean_of,
    ours,
    over,
    published,
    shakes,
)

FACTORS = (0.5, 1.0, 2.0)


def figures() -> list[Figure]:
    """The table; none where the published traces are not here."""
    if not TRACES.exists():
        return []
    cluster, movable = (
        cluster_of(8, PLANS_LAUNCH_S),
        shakes(published("plans", "workloads", "base.csv"), SHAKES),
    )
    held = [replace(one, arrivals=tuple(map(immovable, one.arrivals))) for one in movable]
    found, usual = [], tuned.TUNING
    try:
        for field in fields(usual):
            for factor in FACTORS:
                value = factor * getattr(usual, field.name)
                say(f"base.csv, {SHAKES} shaken inputs: {field.name} = {value:g}")
                tuned.TUNING = replace(usual, **{field.name: value})
                for title, traces in (("movable", movable), ("immovable", held)):
                    runs = over(traces, ours(cluster))
                    found += [
                        informs(
                            f"{field.name} = {value:g}, {title}: {measure}",
                            mean_of(measure, runs),
                            "s",
                        )
                        for measure in ("mean completion", "makespan")
                    ]
    finally:
        tuned.TUNING = usual
    return found
