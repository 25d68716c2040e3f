"""A rank that compares its weights with those of its peers: `python -m tests.training.copies RUN_JSON...`.

It fails where two ranks hold parts of one name and shape that are said to be copies, with other values.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.specs.run import TrainingRun, parse_training_run_json
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.checkpoint.fragment import make_chunks
from orchestrator.training.data.dataset import list_global_batch, split_micro_batches
from tests.training.gang import COLLECTIVE_TIMEOUT

STEPS = 3


def main(runs: list[TrainingRun]) -> None:
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    for run in runs:
        mine = _held_values(run)
        everyone: list[dict[str, list[float]]] = [{} for _ in range(dist.get_world_size())]
        dist.all_gather_object(everyone, mine)
        shared = [name for name in everyone[0] if name in everyone[1]]
        assert shared, "the ranks hold nothing together"
        for name in shared:
            assert everyone[0][name] == everyone[1][name], name
    os._exit(0)  # gloo may abort on its way out


def _held_values(run: TrainingRun) -> dict[str, list[float]]:
    """The values of what a rank holds after some steps, by name and offset."""
    recipe = build_recipe(run)
    engine = build_engine(run, recipe, torch.device("cpu"), None)
    plan, rank = run.plan, dist.get_rank()
    for step in range(STEPS):
        samples = list_global_batch(
            step * plan.global_batch_size, plan.global_batch_size, len(recipe.dataset), 0
        )
        shares = split_micro_batches(
            samples,
            plan.layout.data_parallel_index_of(rank),
            plan.micro_batch_size,
            plan.gradient_accumulation_steps,
        )
        engine.step(step, (recipe.dataset.batch(indices) for indices in shares), tokens=100)
    return {
        f"{name} at {offsets}": part.float().flatten().tolist()
        for name, value in engine.state().items()
        if name.startswith("model.")
        for offsets, part in make_chunks(value).parts.items()
    }


if __name__ == "__main__":
    main([parse_training_run_json(json.loads(Path(path).read_text())) for path in sys.argv[1:]])
