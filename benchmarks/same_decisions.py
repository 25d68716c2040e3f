"""Digests of what the queue decides, so that a change of structure can show that it changed no decision.

    python -m benchmarks.same_decisions > before           # at one commit
    python -m benchmarks.same_decisions | diff before -    # at another

One line each for 200 seeded nights (100 of them with shared users) and for three published traces where they are here.
"""

from __future__ import annotations

import hashlib
import random
from collections.abc import Sequence

from benchmarks.measured import simulate
from benchmarks.scheduler import (
    DEADLINES,
    PHILLY_NODES,
    PLANS_LAUNCH_S,
    TRACES,
    cluster_of,
    published,
)
from orchestrator.service.commands.simulate import Outcome
from tests.scheduling.world import MemoryJournal, backend_of, play, random_crowd, random_scenario

NIGHTS = 100  # of each kind


def night(seed: int, *, is_shared: bool) -> str:
    """Digest of all launches and stops of one night, in their order."""
    draw, journal = random.Random(seed), MemoryJournal()
    scenario = random_crowd(draw) if is_shared else random_scenario(draw, jobs=draw.randint(1, 12))
    state = play(scenario, journal, backend_of(scenario))
    ends = [f"{job.id} {job.status} {len(job.attempts)}" for job in state.jobs.values()]
    return digest([*journal.decided, *ends])


def trace(outcomes: Sequence[Outcome]) -> str:
    """Digest of every attempt of a simulated trace: its devices and its times."""
    lines = []
    for one in outcomes:
        for process in one.attempts:
            placed = [(part.node, *part.devices) for part in process.attempt.placement]
            lines.append(f"{one.name} {process.launched_at_s!r} {process.ended_at_s!r} {placed}")
    return digest(lines)


def digest(lines: Sequence[str]) -> str:
    return hashlib.sha256("\n".join(lines).encode()).hexdigest()[:16]


def main() -> None:
    for is_shared in (False, True):
        for seed in range(NIGHTS):
            print(
                f"night {'shared' if is_shared else 'alone'} {seed} {night(seed, is_shared=is_shared)}"
            )
    if not TRACES.exists():
        return
    nodes = DEADLINES["05"][0]
    for name, parts, count, launch_s in (
        ("plans", ("plans", "workloads", "base.csv"), 8, PLANS_LAUNCH_S),
        ("deadlines 05", ("deadlines", "cluster05.csv"), nodes, 30.0),
        ("philly", ("philly", "philly.csv"), PHILLY_NODES, 30.0),
    ):
        print(
            f"trace {name} {trace(simulate(published(*parts), cluster_of(count, launch_s)).outcomes)}"
        )


if __name__ == "__main__":
    main()
