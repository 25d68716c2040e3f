"""What do a wrong profile, or none, cost a job? Out-of-memory failures and time of jobs drawn at random, simulated.

    python -m benchmarks.drawn_recoveries [--seed SEED]

The production core plans, recovers and climbs back. What a plan truly needs follows from no formula of the estimator.
It knows layers of unlike size, an engine's own overhead, samples of heavy-tailed lengths, and progress told with an
error. Of a third of the models, functional ones and U-Nets, nobody can tell how far a pass came.
"""

from __future__ import annotations

import argparse
import math
import random
import statistics
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

from benchmarks.figure import Figure, at_most, informs
from orchestrator.memory.calibration.calibrate import Calibration
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Action, Launch, Stop
from orchestrator.specs.attempt import (
    LEARNED_STEPS,
    PROBE_STEPS,
    Attempt,
    Evidence,
    Heartbeat,
    OomReport,
    Pace,
    RankEnd,
)
from orchestrator.specs.choices import ActivationCheckpointing, Engine, Optimizer, ZeroStage
from orchestrator.specs.cluster import LAUNCH_COST_S, make_idle_nodes
from orchestrator.specs.events import Finished, PaceReported, Released, Started, Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.specs.state import State

JOBS, SEED = (
    200,
    2026,
)  # the priors of memory/calibration/belief.py were chosen before any seed was drawn
STEPS = 2000
CHECKPOINT_EVERY = 50  # steps: the default of `training.checkpoint_every_steps`
SAVE_S = 20.0  # of a checkpoint that an attempt leaves when it is asked to end
ATTEMPTS_MAX = 24
GIB, MIB = 2**30, 2**20
STATES = {Optimizer.ADAMW: 8, Optimizer.ADAMW_8BIT: 2, Optimizer.ADAFACTOR: 1, Optimizer.SGD: 4}
DEVICES = ("rtx3090-24gb", "a100-40gb", "a100-80gb")


@dataclass(frozen=True)
class Truth:
    """What the plans of one job truly need on one device."""

    parameters: int
    sample_bytes: float  # of a sample of median length
    kept: float  # of that, under checkpointing
    growth: float  # how the bytes of a sample grow with its length
    backward: float  # over the end of the forward pass
    engine: float  # on what is sharded
    # exponent by which the share of a pass is told wrong; None: its modules tell nothing
    told: float | None
    lengths: tuple[float, ...]  # the longest sample of each step, beside the median

    def fixed_bytes(self, plan: Plan) -> float:
        shards = plan.layout.dp // plan.dp_replicate
        parts = (
            (4, ZeroStage.PARAMETERS),
            (4, ZeroStage.GRADIENTS),
            (STATES[plan.optimizer], ZeroStage.OPTIMIZER),
        )
        whole = sum(count / (shards if plan.zero_stage >= stage else 1) for count, stage in parts)
        offloaded = 0.5 if str(plan.offload) != "none" else 1.0
        # of DDP, beside the gradients
        buckets = 4 if plan.engine is Engine.SCRIPT and plan.layout.dp > 1 else 0
        return (
            self.parameters
            * (whole * self.engine * offloaded + buckets)
            / (plan.layout.tp * plan.layout.pp)
        )

    def optimizer_bytes(self, plan: Plan) -> float:
        """Return the peak of a script's optimizer step, which takes a temporary for each parameter (`foreach`)."""
        return self.fixed_bytes(plan) + (4 * self.parameters if plan.engine is Engine.SCRIPT else 0)

    def pass_bytes(self, plan: Plan, step: int) -> float:
        kept = 1.0 if plan.activation_checkpointing is ActivationCheckpointing.NONE else self.kept
        length = self.lengths[step] ** self.growth
        return self.sample_bytes * plan.micro_batch_size * length * kept / plan.layout.tp

    def peak_bytes(self, plan: Plan, step: int) -> float:
        return max(
            self.optimizer_bytes(plan),
            self.fixed_bytes(plan) + self.pass_bytes(plan, step) * self.backward,
        )

    def most_bytes(self, plan: Plan) -> float:
        """Return the peak of the whole training."""
        return self.peak_bytes(plan, max(range(STEPS), key=self.lengths.__getitem__))

    def evidence(
        self,
        attempt: Attempt,
        capacity_bytes: float,
        memory_bytes: int,
        steps: range,
        *,
        is_stopped: bool = False,
    ) -> tuple[Evidence, int | None]:
        """Return what the ranks leave of these steps, and the step in which they ran out of memory, if they did."""
        plan, is_stopped = attempt.plan, is_stopped or attempt.probe
        burst = next((step for step in steps if self.peak_bytes(plan, step) > capacity_bytes), None)
        passed = range(steps.start, steps.stop if burst is None else burst)
        done = len(passed)
        peak = max((self.peak_bytes(plan, step) for step in passed), default=self.fixed_bytes(plan))
        beats = tuple(
            Heartbeat(
                rank=rank,
                step=passed.stop,
                steps_done=done,
                step_s=attempt.step_s if done > 1 else None,
                peak_bytes=int(min(peak, capacity_bytes)),
                phase="forward",
                at_s=0.0,
            )
            for rank in range(plan.world_size)
        )
        code = OOM_EXIT_CODE if burst is not None else -15 if is_stopped else 0
        ends = tuple(RankEnd(rank=rank, exit_code=code) for rank in range(plan.world_size))
        if burst is None:
            return Evidence(ranks=ends, heartbeats=beats, stopped=is_stopped), None
        room = capacity_bytes - self.fixed_bytes(plan)
        share = room / self.pass_bytes(plan, burst)
        phase = "optimizer" if room <= 0 else "forward" if share < 1 else "backward"
        requested = int(min(self.pass_bytes(plan, burst), capacity_bytes)) // 50
        report = OomReport(
            rank=0,
            step=burst,
            steps_done=done,
            phase=phase,
            pass_done=share**self.told if phase == "forward" and self.told is not None else None,
            requested_bytes=requested,
            live_bytes=int(capacity_bytes) - requested // 2,
            capacity_bytes=memory_bytes,
        )
        return Evidence(ranks=ends, heartbeats=beats, ooms=(report,)), burst


def drawn(draw: random.Random, number: int) -> tuple[JobSpec, str, Truth]:
    """A job, the kind of its devices, and its truth."""
    gpus, layers = draw.choice((1, 2, 4)), draw.choice((12, 24, 32))
    parameters = int(10 ** draw.uniform(7.5, 9.3))
    told = int(10 ** draw.uniform(6.5, 8.7))  # bytes of a sample
    wrong = math.exp(draw.uniform(0.0, math.log(30)))
    batch = draw.choice((32, 64, 128))
    spread = draw.choice((0.0, 0.0, 0.2, 0.5))
    common: dict[str, Any] = {"name": f"drawn{number}", "global_batch_size": batch, "gpus": gpus}
    knobs: dict[str, Any] = {
        "micro_batch_size": {"flag": "--batch", "default": draw.choice((4, 8, 16))},
        "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
    }
    if draw.random() < 0.5:
        knobs["activation_checkpointing"] = {"flag": "--checkpoint"}
    profile = {
        "parameters": parameters,
        "layers": layers,
        "activations_per_sample": f"{told}B",
        "checkpointed_per_sample": f"{told // 8}B",
        "forward_flops_per_sample": float(2 * parameters * 512),
    }
    kind = draw.choice(("model", "script", "unknown"))
    if kind == "model":
        said = {
            "model": {"factory": "recipe.py:make"},
            "profile": profile,
            "training": {"max_steps": STEPS},
        }
    else:
        said = {"command": "python train.py", "knobs": knobs, "steps": STEPS}
        if draw.random() < 0.5:
            knobs["resume_from"] = {"flag": "--resume"}
            said["resume"] = {"on_sigterm": True}
        said |= {"profile": profile} if kind == "script" else {"probe": "never"}
    truth = Truth(
        parameters=parameters,
        sample_bytes=told * wrong,
        kept=draw.uniform(0.1, 0.4),
        growth=draw.uniform(1.0, 1.3),
        backward=draw.uniform(1.0, 1.15),
        engine=draw.uniform(0.9, 1.1),
        told=None if draw.random() < 1 / 3 else draw.uniform(0.75, 1.3),
        lengths=tuple(math.exp(abs(draw.gauss(0.0, spread))) for _ in range(STEPS)),
    )
    return JobSpec.model_validate(common | said), draw.choice(DEVICES), truth


@dataclass(frozen=True, slots=True)
class Recovery:
    """How a job came through."""

    failures: int  # out-of-memory ones
    # of its last plan's step, beside the fastest plan that fits; None: it was given up
    step_ratio: float | None
    time_ratio: float | None  # of its time to the end, beside a run that began with that plan
    climbed: bool


def recovered(draw: random.Random, number: int) -> Recovery | None:
    """Return how the next job came through; None of one that no plan holds, or that ran out of nothing.

    One that is refused at once is given up.
    """
    spec, device, truth = drawn(draw, number)
    cluster = f"name: here\nnodes: [{{name: n, devices: 4, device: {device}, host_memory: 4TiB}}]"
    nodes = make_idle_nodes(parse_cluster(cluster, "here"))
    memory, hardware = nodes[0].device.memory, group_equal_nodes(nodes)[0].hardware
    fitting = [
        candidate
        for factor in (1.0, 4.0, 16.0)
        for candidate in find_frontier(
            read_plan_request(spec), hardware, Calibration(correction=factor)
        ).candidates
        for room in [
            memory - (candidate.estimate.device_bytes - candidate.estimate.allocated_bytes)
        ]
        if truth.most_bytes(candidate.plan) <= room
    ]
    if not fitting:
        return None
    mildest = min(candidate.degradation for candidate in fitting)
    fastest_s = min(candidate.step_s for candidate in fitting if candidate.degradation == mildest)
    scheduler, at_s, failures, saved, climbed = (
        Scheduler(State(nodes=nodes, declared=nodes)),
        0.0,
        0,
        0,
        False,
    )
    actions = scheduler.step(Submitted(job_id="j", order=1, spec=spec, at_s=0.0))
    resumes = not spec.is_script or spec.knobs.resume_from is not None
    for _ in range(ATTEMPTS_MAX):
        attempt = _launched(actions)
        if attempt is None:
            return Recovery(
                failures, None, None, climbed
            )  # given up, or refused before its first attempt
        room = memory - (attempt.estimate.device_bytes - attempt.estimate.allocated_bytes)
        at_s += LAUNCH_COST_S
        steps = range(PROBE_STEPS) if attempt.probe else range(saved, STEPS)
        evidence, burst = truth.evidence(attempt, room, memory, steps)
        learned = range(saved, saved + LEARNED_STEPS)
        is_moved = False
        if failures and not attempt.probe and (burst is None or burst > learned.stop):
            is_moved = _moves(scheduler, truth, attempt, at_s, learned)
        if is_moved:
            evidence, burst = truth.evidence(attempt, room, memory, learned, is_stopped=True)
            saved, climbed = learned.stop, True
            at_s += LEARNED_STEPS * attempt.step_s + SAVE_S
        elif burst is None and not attempt.probe:
            if not failures:
                return None
            took_s, best_s = at_s + len(steps) * attempt.step_s, LAUNCH_COST_S + STEPS * fastest_s
            return Recovery(failures, attempt.step_s / fastest_s, took_s / best_s, climbed)
        elif burst is not None:
            failures += 1
            at_s += (burst - steps.start) * attempt.step_s
            if resumes and not attempt.probe:
                saved = max(saved, burst - burst % CHECKPOINT_EVERY)
        evidence = replace(evidence, checkpoint_step=saved or None)
        scheduler.step(Finished(job_id="j", number=attempt.number, evidence=evidence, at_s=at_s))
        actions = scheduler.step(Released(job_id="j", number=attempt.number, at_s=at_s))
    raise AssertionError(f"{spec.name}: {ATTEMPTS_MAX} attempts")


def _moves(scheduler: Scheduler, truth: Truth, attempt: Attempt, at_s: float, steps: range) -> bool:
    """Tell what these first steps of the attempt measured; return whether it was asked to end for a faster plan."""
    scheduler.step(Started(job_id="j", number=attempt.number, at_s=at_s))
    peak = max(truth.peak_bytes(attempt.plan, step) for step in steps)
    at_s += len(steps) * attempt.step_s
    pace = Pace(steps_done=len(steps), step_s=attempt.step_s, at_s=at_s, peak_bytes=int(peak))
    actions = scheduler.step(PaceReported(job_id="j", number=attempt.number, pace=pace, at_s=at_s))
    return any(isinstance(action, Stop) for action in actions)


def _launched(actions: tuple[Action, ...]) -> Attempt | None:
    return next((action.attempt for action in actions if isinstance(action, Launch)), None)


def _all(seed: int) -> Iterator[Recovery]:
    """Yield JOBS jobs that ran out of memory, or were refused, and had a plan that fits."""
    draw, number, count = random.Random(seed), 0, 0
    while count < JOBS:
        number += 1
        assert number < 50 * JOBS, count
        recovery = recovered(draw, number)
        if recovery is not None:
            count += 1
            yield recovery


def figures(seed: int = SEED) -> list[Figure]:
    jobs = list(_all(seed))
    failures = sorted(job.failures for job in jobs if job.step_ratio is not None)
    step_ratios = [job.step_ratio for job in jobs if job.step_ratio is not None]
    time_ratios = [job.time_ratio for job in jobs if job.time_ratio is not None]
    return [
        informs("simulated jobs that ran out of memory or were given up", len(jobs), "jobs"),
        at_most(
            "simulated: out of memory of a recovered job, mean",
            statistics.mean(failures),
            "failures",
            1.2,
        ),
        at_most(
            "simulated: out of memory of a recovered job, p95",
            failures[int(0.95 * len(failures))],
            "failures",
            2,
        ),
        at_most(
            "simulated: step time beside the fastest plan, median",
            statistics.median(step_ratios),
            "ratio",
            1.15,
        ),
        at_most(
            "simulated: time to the end beside the best plan, mean",
            statistics.mean(time_ratios),
            "ratio",
            1.05,
        ),
        informs("simulated: jobs that climbed back", sum(job.climbed for job in jobs), "jobs"),
        at_most(
            "simulated: given up that had a fitting plan", len(jobs) - len(failures), "jobs", 0
        ),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    for figure in figures(parser.parse_args().seed):
        print(
            f"{figure['figure']}: {figure['value']:.3g} {figure['unit']} ({figure['bar']}, {figure['holds']})"
        )
