"""A training that is measured: `python -m tests.gpu.measured_rank FOLDER BYTES`, under the guard.

Its weights begin as zeros: what they are does not change what memory they need, and drawing 8 billion takes minutes.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

import torch

from orchestrator.specs.run import parse_training_run_json
from orchestrator.training.build import build_recipe
from tests.gpu.runs import train


def main(folder: Path, allocator_bytes: int) -> None:
    """Train the folder's run where PyTorch's allocator may hold so many bytes."""
    run = parse_training_run_json(json.loads((folder / "run.json").read_text()))
    device = torch.device("cuda", 0) if run.device == "cuda" else torch.device("cpu")
    if device.type == "cuda":
        total_bytes = torch.cuda.get_device_properties(device).total_memory
        torch.cuda.set_per_process_memory_fraction(min(1.0, allocator_bytes / total_bytes), device)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=torch.distributed.FileStore(str(folder / "store"), 1),
        rank=0,
        world_size=1,
        device_id=device if device.type == "cuda" else None,
    )
    recipe = replace(build_recipe(run), initialise=lambda _, values: values.zero_())
    train(run, device, recipe)


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
