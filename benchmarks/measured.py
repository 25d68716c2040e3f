"""Traces with the truth about their jobs, played in simulated time."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from benchmarks.draws import stream
from orchestrator.backends.attempts.progress import ANOTHER_PACE, PACE_STEPS
from orchestrator.backends.simulated import traces
from orchestrator.backends.simulated.backend import SimulatedBackend
from orchestrator.backends.simulated.process import SimulatedProcess
from orchestrator.backends.simulated.traces import Trace
from orchestrator.service.commands.simulate import Outcome, Simulated, make_report, simulate_on
from orchestrator.specs.attempt import Attempt, Pace
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.events import PaceReported
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.replace import replace

Shape = tuple[int, ...]  # devices on each node, most first


@frozen
class Arrival(traces.Arrival):
    """A job of a trace, with the facts that are told to the orchestrator, and the true ones."""

    rigid_devices: int | None = None  # as its user requested; None: the most that it can use
    # seconds per step on those devices with the submitted plan
    submitted_step_s: float | None = None
    shapes: tuple[
        tuple[Shape, float], ...
    ] = ()  # true seconds per step where measured for a placement
    step_factor: float = 1.0  # true / stated seconds per step, on every other placement


class PacedBackend(SimulatedBackend):
    """A simulated cluster whose attempts report their pace, where it is another than was predicted."""

    def _start_attempt(self, process: SimulatedProcess) -> None:
        super()._start_attempt(process)
        planned_s = process.attempt.step_s
        is_as_planned = 1 / ANOTHER_PACE < process.step_s / max(planned_s, 1e-9) < ANOTHER_PACE
        if process.evidence is None and not is_as_planned:
            self._schedule(PACE_STEPS * process.step_s, partial(self._pace, process, PACE_STEPS))

    def _pace(self, process: SimulatedProcess, steps_done: int) -> None:
        if process.evidence is None:
            self._emit(self._paced(process, steps_done))

    def _paced(self, process: SimulatedProcess, steps_done: int) -> PaceReported:
        return PaceReported(
            job_id=process.job.id,
            number=process.attempt.number,
            pace=Pace(steps_done=steps_done, step_s=process.step_s, at_s=self._now_s),
            at_s=self._now_s,
        )


class MeasuredBackend(PacedBackend):
    """A simulated cluster in which these jobs, in order of submission, have their true durations."""

    def __init__(self, arrivals: Sequence[traces.Arrival], cluster: ClusterSpec) -> None:
        super().__init__(cluster)
        self._arrivals = arrivals

    def _compute_true_step_s(self, job: Job, attempt: Attempt) -> float:
        return true_step_s(self._arrivals[job.order - 1], attempt)


def true_step_s(arrival: traces.Arrival, attempt: Attempt) -> float:
    """Return the step time measured on this placement, else the job's stated one with the trace's error."""
    if not isinstance(arrival, Arrival):
        return attempt.step_s
    shape = tuple(sorted((len(part.devices) for part in attempt.placement), reverse=True))
    measured = next((step_s for nodes, step_s in arrival.shapes if nodes == shape), None)
    return attempt.step_s * arrival.step_factor if measured is None else measured


def simulate(trace: Trace, cluster: ClusterSpec) -> Simulated:
    """Return the result of the trace on the cluster, with the true durations of its jobs."""
    arrivals: list[traces.Arrival] = []
    return as_measured(
        trace,
        cluster,
        arrivals,
        simulate_on(trace, cluster, arrivals, MeasuredBackend(arrivals, cluster)),
    )


def as_measured(
    trace: Trace, cluster: ClusterSpec, arrivals: Sequence[traces.Arrival], run: Simulated
) -> Simulated:
    """Return the run with what its jobs would truly have taken alone, and as requested."""
    pairs = zip(arrivals, run.outcomes, strict=True)
    outcomes = tuple(_true_outcome(arrival, outcome, cluster) for arrival, outcome in pairs)
    return replace(run, outcomes=outcomes, report=make_report(trace, cluster, outcomes))


def _true_outcome(arrival: traces.Arrival, outcome: Outcome, cluster: ClusterSpec) -> Outcome:
    if not isinstance(arrival, Arrival):
        return outcome
    factor = arrival.step_factor
    request_s = outcome.request_step_s
    trained_s = outcome.alone_s - cluster.launch_cost
    return replace(
        outcome,
        alone_s=cluster.launch_cost + (factor * trained_s if arrival.spec.speeds else trained_s),
        request_step_s=None if request_s is None else factor * request_s,
    )


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
