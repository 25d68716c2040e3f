"""A rank that measures where each plan's memory peaks: `python -m tests.training.peaks FOLDER RUN_JSON...`."""

from __future__ import annotations

import gc
import json
import os
import sys
from pathlib import Path

import torch
import torch.distributed as dist

from orchestrator.specs.run import TrainingRun, parse_training_run_json
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint.checkpoint import SavedCheckpoint, TrainingProgress
from orchestrator.training.checkpoint.host_copy import HostCopy
from orchestrator.training.guard.virtual_device import VirtualDevice
from tests.training.gang import COLLECTIVE_TIMEOUT

STEPS = 2
UNLIMITED_BYTES = 2**40


def main(folder: Path, runs: list[TrainingRun]) -> None:
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    peaks = []
    for number, run in enumerate(runs):
        saved = SavedCheckpoint(
            path=folder / f"checkpoint-{number}", cursor=TrainingProgress(step=STEPS)
        )
        peaks.append(_fresh(run, saved) | _resumed(run, saved))
    (folder / f"peaks-{os.environ['RANK']}.json").write_text(json.dumps(peaks))
    os._exit(0)  # gloo may abort on its way out


def _fresh(run: TrainingRun, saved: SavedCheckpoint) -> dict[str, int]:
    gc.collect()
    with VirtualDevice(UNLIMITED_BYTES) as device:
        recipe = build_recipe(run)
        engine = build_engine(run, recipe, torch.device("cpu"), None)
        built = device.peak_bytes
        device.reset_recent_peak()
        micro_batch, accumulation = run.plan.micro_batch_size, run.plan.gradient_accumulation_steps
        for _ in range(STEPS):
            batches = (recipe.dataset.batch(range(micro_batch)) for _ in range(accumulation))
            engine.step(0, batches, tokens=100)
        trained = device.recent_peak_bytes
        device.reset_recent_peak()
        copy = HostCopy(engine.state(), torch.device("cpu"), dist.group.WORLD)
        copy.copy_state(engine.state())
        checkpoint.save_state(saved.path, copy.state, saved.cursor)
        saving = device.recent_peak_bytes
        del engine, recipe, batches
        gc.collect()
        return {"build": built, "train": trained, "save": saving, "left": device.live_bytes}


def _resumed(run: TrainingRun, saved: SavedCheckpoint) -> dict[str, int]:
    gc.collect()
    with VirtualDevice(UNLIMITED_BYTES) as device:
        build_engine(run, build_recipe(run), torch.device("cpu"), saved)
        return {"resume": device.peak_bytes}


if __name__ == "__main__":
    main(
        Path(sys.argv[1]),
        [parse_training_run_json(json.loads(Path(path).read_text())) for path in sys.argv[2:]],
    )
