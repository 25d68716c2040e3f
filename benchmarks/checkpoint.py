"""How long does a training step wait for a checkpoint, and how long does it take to load one?"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from benchmarks.figure import Figure, at_most, informs
from orchestrator.specs.job.model import DecoderSpec, ModelSpec
from orchestrator.specs.run import TrainingRun, parse_training_run_json
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.checkpoint import TrainingProgress
from orchestrator.training.checkpoint.saver import CheckpointSaver
from orchestrator.training.contract.engine import Engine
from orchestrator.training.contract.recipe import Batch
from tests.ranks import start_ranks
from tests.training import gang

DECODER = DecoderSpec(
    vocab_size=4096,
    hidden_size=512,
    intermediate_size=1408,
    num_hidden_layers=8,
    num_attention_heads=8,
)
ROUNDS = 7
STEPS_BETWEEN = 2
# of a plain copy: naming the tensors and starting a thread, and noise of a shared machine
STALL_RATIO_MAX = 1.15
TIMEOUT_S = 600


def figures() -> list[Figure]:
    """One rank, which holds the whole state, on CPU. Every round measures all, so that other load meets all alike."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder)
        model = ModelSpec(decoder=DECODER)
        run = gang.training_run(
            home, "bench", gang.torch_plan(), gang.ragged_text(home), model=model
        )
        path = f"{run.attempt_folder}/run.json"
        codes = gang.finish(start_ranks("benchmarks.checkpoint", [path, folder], 1), TIMEOUT_S)
        assert codes == [0], codes
        rounds: list[dict[str, float]] = json.loads((home / "rounds.json").read_text())
    median = {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}
    ratio = statistics.median(one["stall_s"] / one["copy_s"] for one in rounds)
    return [
        informs("state of the checkpoint", median["state_bytes"] / 2**20, "MiB"),
        informs("training step, median", median["step_s"], "s"),
        informs("torch.save of the same state, median", median["torch_save_s"], "s"),
        informs("plain copy to host memory, median", median["copy_s"], "s"),
        informs("stall of a step by a save, median", median["stall_s"], "s"),
        at_most("stall / plain copy to host memory", ratio, "ratio", STALL_RATIO_MAX),
        informs("time that steps lose while it is written, median", median["lost_s"], "s"),
        informs("from the call to the published checkpoint, median", median["published_s"], "s"),
        informs("torch.load and copy of the same state, median", median["torch_load_s"], "s"),
        informs("load, median", median["load_s"], "s"),
        informs("verifying the checksums before it, median", median["verify_s"], "s"),
    ]


def main(run: TrainingRun, folder: Path) -> None:
    """Measure ROUNDS rounds in this process, the only rank; writes `rounds.json`."""
    dist.init_process_group("gloo", timeout=gang.COLLECTIVE_TIMEOUT)
    device, recipe = torch.device("cpu"), build_recipe(run)
    engine = build_engine(run, recipe, device, None)
    batch = recipe.dataset.batch(range(run.plan.micro_batch_size))
    saver = CheckpointSaver(run, device, dist.new_group(backend="gloo"))
    saver.prepare(engine.state())
    host = {
        name: torch.zeros_like(value) for name, value in engine.state().items()
    }  # there, not only promised
    for _ in range(STEPS_BETWEEN):
        engine.step(0, iter([batch]), tokens=100)
    rounds = [
        _round(run, engine, batch, saver, host, folder, number) for number in range(1, ROUNDS + 1)
    ]
    (folder / "rounds.json").write_text(json.dumps(rounds))
    os._exit(0)  # gloo may abort on its way out


def _round(
    run: TrainingRun,
    engine: Engine,
    batch: Batch,
    saver: CheckpointSaver,
    host: dict[str, Tensor],
    folder: Path,
    number: int,
) -> dict[str, float]:
    """Everything once, in seconds."""

    def step() -> None:
        engine.step(number, iter([batch]), tokens=100)

    def copy() -> None:
        state = engine.state()
        for name, value in host.items():
            value.copy_(state[name])

    whole, state = folder / "state.pt", engine.state()
    published = checkpoint_folder.get_complete_checkpoint_path(
        Path(run.job_folder) / "checkpoints", number
    )
    found = {"state_bytes": sum(value.nbytes for value in state.values())}
    found["step_s"] = statistics.median(_seconds(step) for _ in range(STEPS_BETWEEN))
    found["torch_save_s"] = _seconds(lambda: torch.save(state, whole))
    found["copy_s"] = _seconds(copy)
    began_s = time.perf_counter()
    found["stall_s"] = _seconds(lambda: saver.save(engine.state(), TrainingProgress(step=number)))
    found["lost_s"] = 0.0
    while not published.exists():
        found["lost_s"] += _seconds(step) - found["step_s"]
    saver.wait()
    found["published_s"] = time.perf_counter() - began_s
    found["torch_load_s"] = _seconds(lambda: _load(whole, state))
    found["load_s"] = _seconds(lambda: checkpoint.load_state(published, state))
    found["verify_s"] = _seconds(lambda: checkpoint_folder.find_damage(published))
    return found


def _load(path: Path, state: Mapping[str, Tensor]) -> None:
    for name, value in torch.load(path, weights_only=True).items():
        state[name].copy_(value)


def _seconds(call: Callable[[], object]) -> float:
    began_s = time.perf_counter()
    call()
    return time.perf_counter() - began_s


if __name__ == "__main__":
    main(parse_training_run_json(json.loads(Path(sys.argv[1]).read_text())), Path(sys.argv[2]))
