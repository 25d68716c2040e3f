"""How well is the step time of CPU ranks predicted once they were measured? The demo's decoder on one and two ranks.

As a program it is one rank: `python -m benchmarks.cpu_ranks FOLDER`. Steps are counted in processor time of the
busiest rank, as the rates are: what they take on ranks that have their cores for themselves.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from pathlib import Path

from benchmarks.figure import Figure, at_most, informs
from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import list_plans
from orchestrator.service.demo.run import write_demo_files
from orchestrator.service.intake.intake import read_cluster, read_job
from orchestrator.service.intake.rates import add_measured_rates
from orchestrator.specs.choices import ActivationCheckpointing, Engine, ZeroStage
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from orchestrator.specs.settings import format_plan
from tests.ranks import start_ranks
from tests.training.gang import finish

JOB, RANKS = "fits.yaml", (1, 2)
STEPS, WARM_UP = 6, 2
FACTOR = 2.0  # promised; 1.44 and 1.53 were seen beside other work (2026-11)
TIMEOUT_S = 600


def figures() -> list[Figure]:
    """Predicted over measured seconds of a step, as declared and as measured, and the worst of each either way."""
    declared = read_cluster(None)
    found: list[Figure] = []
    with tempfile.TemporaryDirectory() as folder:
        write_demo_files(Path(folder))
        spec = read_job(Path(folder) / JOB)
        taken_s = {
            plan: seconds
            for ranks in RANKS
            for plan, seconds in _measure(spec, ranks, Path(folder))
        }
        clusters = {"declared": declared, "as measured": add_measured_rates(declared)}
    for name, cluster in clusters.items():
        here = Hardware(
            device=cluster.nodes[0].device,
            devices_per_node=cluster.nodes[0].devices,
            nodes=1,
            network_bandwidth=cluster.network_bandwidth,
        )
        ratios = {
            plan: predict_step_s(find_profile(read_plan_request(spec), here, plan), plan, here)
            / taken_s[plan]
            for plan in taken_s
        }
        for plan, ratio in ratios.items():
            found.append(
                informs(f"CPU ranks, {name}: {format_plan(plan)}, predicted / measured", ratio, "")
            )
        furthest = max(max(ratio, 1 / ratio) for ratio in ratios.values())
        figure = f"CPU ranks, {name}: furthest off"
        found.append(
            informs(figure, furthest, "times")
            if cluster is declared
            else at_most(figure, furthest, "times", FACTOR)
        )
    return found


def compared(spec: JobSpec, ranks: int) -> list[Plan]:
    """DDP and FSDP2 with the largest and the smallest micro-batch."""
    node = read_cluster(None).nodes[0]
    here = Hardware(
        device=node.device, devices_per_node=node.devices, nodes=1, network_bandwidth=10**9
    )
    share = spec.global_batch_size // ranks
    return [
        plan
        for plan in list_plans(read_plan_request(spec), here)
        if plan.engine is Engine.TORCH
        and plan.layout.dp == plan.world_size == ranks
        and plan.zero_stage in (ZeroStage.NONE, ZeroStage.PARAMETERS)
        and plan.activation_checkpointing is ActivationCheckpointing.NONE
        and plan.micro_batch_size in (1, share)
    ]


def _measure(spec: JobSpec, ranks: int, folder: Path) -> list[tuple[Plan, float]]:
    """Seconds of a step of every plan on so many ranks."""
    codes = finish(start_ranks("benchmarks.cpu_ranks", [str(folder)], ranks), TIMEOUT_S)
    assert codes == [0] * ranks, codes
    of_ranks = [
        json.loads((folder / f"steps-{ranks}-{rank}.json").read_text()) for rank in range(ranks)
    ]
    return list(zip(compared(spec, ranks), map(max, zip(*of_ranks, strict=True)), strict=True))


def main(folder: Path) -> None:
    """This rank's processor seconds of a step of every plan, the median of some."""
    import torch
    import torch.distributed as dist

    from orchestrator.training.build import build_engine, build_recipe

    dist.init_process_group("gloo")
    spec, ranks = read_job(folder / JOB), dist.get_world_size()
    assert spec.model is not None
    taken_s = []
    for plan in compared(spec, ranks):
        run = TrainingRun(
            model=spec.model,
            data=spec.data,
            training=spec.training,
            plan=plan,
            job_folder="",
            attempt_folder="",
            epoch=1,
            device="cpu",
        )
        recipe = build_recipe(run)
        engine = build_engine(run, recipe, torch.device("cpu"), None)
        batches = [
            recipe.dataset.batch(list(range(plan.micro_batch_size)))
        ] * plan.gradient_accumulation_steps
        tokens = spec.data.sequence_length * plan.global_batch_size
        steps_s = []
        for number in range(WARM_UP + STEPS):
            began_s = time.process_time()
            engine.step(number, batches, tokens)
            steps_s.append(time.process_time() - began_s)
        taken_s.append(statistics.median(steps_s[WARM_UP:]))
    (folder / f"steps-{ranks}-{dist.get_rank()}.json").write_text(json.dumps(taken_s))
    dist.barrier()
    os._exit(0)  # gloo may abort on its way out


if __name__ == "__main__":
    main(Path(sys.argv[1]))
