"""Start gangs of training ranks: one process group, several runs in a row (`launch`), or the real entry (`spawn`)."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import shutil
import sys
import traceback
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest

from orchestrator.specs.choices import Engine
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import (
    AttemptFolder,
    JobFolder,
    TrainingRun,
    parse_training_run_json,
    write_json,
)
from tests.ranks import Rank, start_ranks

GLOBAL_BATCH = 8
SEQUENCE_LENGTH = 32
DECODER = DecoderSpec(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
TRAINING = TrainingSpec(
    max_steps=8, learning_rate=3e-3, clip_norm=0.5, checkpoint_every_steps=4, keep_checkpoints=9
)
COLLECTIVE_TIMEOUT = timedelta(seconds=60)
LAUNCH_TIMEOUT_S = 240
MAIN = "main"  # in place of runs: the real entry
TORCH_2_12 = tuple(map(int, importlib.metadata.version("torch").split(".")[:2])) >= (2, 12)
needs_torch_2_12 = pytest.mark.skipif(
    not TORCH_2_12, reason="this torch cuts all of a layer over the same ranks"
)


def ragged_text(folder: Path) -> tuple[str, ...]:
    """Three files with different lengths modulo the sequence length."""
    paths = []
    for index, size in enumerate((411, 1000, 77)):
        path = folder / f"text{index}.txt"
        path.write_text("".join(chr(97 + (n * n + 7 * index) % 23) for n in range(size)))
        paths.append(str(path))
    return tuple(paths)


def training_run(
    home: Path, job: str, plan: Plan, text: tuple[str, ...], **changes: Any
) -> TrainingRun:
    """A run of `job` under `home`, as its next attempt; `changes` replace fields of the TrainingRun."""
    folder = JobFolder(home, job)
    attempts = folder.path / "attempts"
    number = 1 + sum(1 for _ in attempts.iterdir()) if attempts.is_dir() else 1
    attempt = folder.attempt(number)
    attempt.path.mkdir(parents=True)
    run = TrainingRun(
        model=ModelSpec(decoder=DECODER),
        data=DataSpec(text=text, sequence_length=SEQUENCE_LENGTH),
        training=TRAINING,
        plan=plan,
        job_folder=str(folder.path),
        attempt_folder=str(attempt.path),
        epoch=number,
        device="cpu",
    )
    run = dataclasses.replace(run, **changes)
    write_json(attempt.run, run)
    return run


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Part:
    """A run of a gang, which may start from another job's checkpoint."""

    run: TrainingRun
    start_from: Path | None = None


def launch(parts: list[Part], timeout_s: float = LAUNCH_TIMEOUT_S) -> None:
    """Run the parts one after another in one process group. Raises where a rank fails."""
    world_sizes = {part.run.plan.world_size for part in parts}
    assert len(world_sizes) == 1, world_sizes
    arguments = [
        f"{AttemptFolder(part.run.attempt_folder).run}={part.start_from or ''}" for part in parts
    ]
    ranks = start_ranks("tests.training.gang", arguments, world_sizes.pop())
    codes = finish(ranks, timeout_s)
    assert not any(codes), f"exit codes {codes}"


def spawn(run: TrainingRun) -> list[Rank]:
    """`orchestrator.training.main` on every rank; it exits as under the guard, since gloo may abort at exit."""
    path = str(AttemptFolder(run.attempt_folder).run)
    return start_ranks("tests.training.gang", [MAIN, path], run.plan.world_size)


def finish(ranks: list[Rank], timeout_s: float = LAUNCH_TIMEOUT_S) -> list[int]:
    """Exit codes, or negative signal numbers; no process is left running."""
    try:
        return [rank.wait(timeout_s) for rank in ranks]
    finally:
        for rank in ranks:
            rank.kill()
            rank.wait()


def metrics(run: TrainingRun) -> list[dict[str, float]]:
    """The lines of rank 0's output."""
    path = AttemptFolder(run.attempt_folder).metrics
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def losses(run: TrainingRun) -> dict[int, float]:
    """Loss by step."""
    return {int(line["step"]): line["loss"] for line in metrics(run)}


def torch_plan(micro_batch_size: int = GLOBAL_BATCH, **fields: Any) -> Plan:
    return Plan(engine=Engine.TORCH, micro_batch_size=micro_batch_size, **fields)


def _work(arguments: list[str]) -> None:
    """Run a rank of `launch`."""
    import torch
    import torch.distributed as dist

    from orchestrator.training import loop

    rank, world_size = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    dist.init_process_group("gloo", timeout=COLLECTIVE_TIMEOUT)
    ranks = loop.RankContext(
        rank=rank, local_rank=rank, world_size=world_size, device=torch.device("cpu")
    )
    for word in arguments:
        path, _, start_from = word.partition("=")
        run = parse_training_run_json(json.loads(Path(path).read_text()))
        if start_from and rank == 0:
            source = Path(start_from)
            shutil.copytree(
                source,
                JobFolder(Path(run.job_folder).parents[1], Path(run.job_folder).name).checkpoints
                / source.name,
            )
        dist.barrier()
        assert loop.run_training(run, ranks)
    os._exit(0)  # gloo may abort on its way out


def _main(path: str) -> None:
    """Run a rank of `spawn`."""
    from orchestrator.training import main

    try:
        code = main.main([path])
    except Exception:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(
            1
        )  # while the error still holds its frames, and they the engine: gloo may abort as that goes
    sys.stderr.flush()
    os._exit(code)


if __name__ == "__main__":
    _main(sys.argv[2]) if sys.argv[1] == MAIN else _work(sys.argv[1:])
