"""Measured peaks: the real engines on real gloo ranks under a virtual device, many plans in one launch.

As a program it is one rank: `python -m tests.memory.measure REQUEST_JSON RESULT_JSON`.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from orchestrator.specs.model import DataSpec, ModelSpec, TrainingSpec, model_from_json
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun, plan_from_json

STEPS = 2  # DDP rebuilds its buckets in the second
START_TIMEOUT_S, PLAN_TIMEOUT_S = 120, 20
UNLIMITED_BYTES = 2**50
ROOT = Path(__file__).parents[2]


def peaks(model: ModelSpec, sequence_length: int, plans: Sequence[Plan], folder: Path) -> list[int]:
    """Allocated peak of the worst rank of every plan; all plans have one world size and share one launch."""
    (world_size,) = {plan.world_size for plan in plans}
    folder.mkdir(parents=True, exist_ok=True)
    request = folder / "request.json"
    text = folder / "text.txt"
    text.write_text("All work and no play makes a dull corpus.\n" * 4000)
    request.write_text(
        json.dumps(
            {
                "model": dataclasses.asdict(model),
                "sequence_length": sequence_length,
                "text": str(text),
                "plans": [dataclasses.asdict(plan) for plan in plans],
            }
        )
    )
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    common = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    common |= {"OMP_NUM_THREADS": "1", "DS_ACCELERATOR": "cpu"}
    ranks = [
        subprocess.Popen(
            [sys.executable, "-m", "tests.memory.measure", str(request), str(folder / f"{rank}.json")],
            cwd=ROOT,
            env={**os.environ, **common, "RANK": str(rank), "LOCAL_RANK": str(rank)},
            stdout=(folder / f"{rank}.log").open("w"),
            stderr=subprocess.STDOUT,
        )
        for rank in range(world_size)
    ]
    try:
        timeout_s = START_TIMEOUT_S + PLAN_TIMEOUT_S * len(plans)
        codes = [process.wait(timeout=timeout_s) for process in ranks]
    finally:
        for process in ranks:
            process.kill()
    assert codes == [0] * world_size, (folder / "0.log").read_text()[-4000:]
    found = [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]
    return [max(each) for each in zip(*found, strict=True)]


def main(request_path: str, result_path: str) -> None:
    """Measure every plan of the request on this rank."""
    import torch.distributed as dist

    request = json.loads(Path(request_path).read_text())
    dist.init_process_group("gloo")
    Path(result_path).write_text(json.dumps([_peak_bytes(request, plan_from_json(plan)) for plan in request["plans"]]))
    os._exit(0)  # gloo may abort on its way out


def _peak_bytes(request: dict[str, Any], plan: Plan) -> int:
    import torch
    import torch.distributed as dist

    from orchestrator.training.dataset import global_batch, micro_batches
    from orchestrator.training.engine import build_engine, build_recipe
    from orchestrator.training.virtual_device import VirtualDevice

    run = TrainingRun(
        model=model_from_json(request["model"]),
        data=DataSpec(text=(request["text"],), sequence_length=request["sequence_length"]),
        training=TrainingSpec(max_steps=STEPS, optimizer=plan.optimizer),
        plan=plan,
        job_folder="",
        attempt_folder="",
        epoch=1,
        device="cpu",
    )
    with VirtualDevice(UNLIMITED_BYTES) as device:
        recipe = build_recipe(run)
        engine = build_engine(run, recipe, torch.device("cpu"), None)
        for step in range(STEPS):
            samples = global_batch(step * plan.global_batch_size, plan.global_batch_size, len(recipe.dataset), 0)
            tokens = sum(recipe.dataset.token_count(sample) for sample in samples)
            dp_rank = dist.get_rank() // plan.layout.tp % plan.layout.dp  # of mesh axes pp, dp, tp
            mine = micro_batches(samples, dp_rank, plan.micro_batch_size, plan.gradient_accumulation_steps)
            engine.step(step, (recipe.dataset.batch(indices) for indices in mine), tokens)
        del engine, recipe
        peak = device.peak_bytes
    gc.collect()
    dist.barrier()
    return peak


if __name__ == "__main__":
    main(*sys.argv[1:])
