"""Random draws of simulated worlds, which depend on their seed alone."""

from __future__ import annotations

import random

from orchestrator.backends.simulated.traces import Arrival, Trace
from orchestrator.specs.replace import replace


def stream(seed: int, *what: str) -> random.Random:
    """Return a random generator that depends only on the seed and on `what`, not on the order of events."""
    return random.Random("/".join((str(seed), *what)))


def misjudge(trace: Trace, sigma: float, seed: int) -> Trace:
    """Return the trace with each job's stated times multiplied by a random factor; its log has deviation `sigma`."""
    if not sigma:
        return trace
    draw = stream(seed, "misjudged")
    arrivals, *of_sweeps = (
        tuple(_misjudge_arrival(arrival, draw.lognormvariate(0.0, sigma)) for arrival in group)
        for group in (trace.arrivals, *trace.trials.values())
    )
    return replace(trace, arrivals=arrivals, trials=dict(zip(trace.trials, of_sweeps, strict=True)))


def _misjudge_arrival(arrival: Arrival, factor: float) -> Arrival:
    speeds = tuple((count, factor * step_s) for count, step_s in arrival.spec.speeds)
    spec = arrival.spec.model_copy(update={"speeds": speeds})
    if spec.guarantee is not None and spec.guarantee.step is not None:
        request = spec.guarantee.model_copy(update={"step": factor * spec.guarantee.step})
        spec = spec.model_copy(update={"guarantee": request})
    return replace(arrival, spec=spec, step_factor=arrival.step_factor / factor)
