"""The training loop: data, one small all-reduce per step, checkpoints, and the end of the training."""

from __future__ import annotations

import gc
import json
import signal
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from orchestrator.specs.frozen import frozen
from orchestrator.specs.run import AttemptFolder, TrainingRun
from orchestrator.training import progress
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.checkpoint import SavedCheckpoint, TrainingProgress
from orchestrator.training.checkpoint.resume import find_newest_intact
from orchestrator.training.checkpoint.saver import CheckpointSaver
from orchestrator.training.contract.engine import Engine
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.data.dataset import list_global_batch, split_micro_batches
from orchestrator.training.engines import freezing

SAVING_TIMEOUT = timedelta(
    hours=1
)  # longest wait for a slower rank's write; a dead rank is noticed at once
# longest wait of a failing attempt for the save in flight; its evidence is delayed as long
LAST_SAVE_S = 30.0


@frozen
class RankContext:
    """The position of this process among the ranks, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def run_training(run: TrainingRun, ranks: RankContext) -> bool:
    """Train from the newest intact checkpoint to the last step; return False if SIGTERM ended it
    early, after a save.

    Raises StaleAttempt on every rank if a newer attempt (launch of the job) exists when a
    checkpoint is published.
    """
    stop = _collect_stop_signals()
    checkpoints = Path(run.job_folder) / "checkpoints"
    if ranks.rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.remove_unfinished(checkpoints, run.epoch)
    background = dist.new_group(backend="gloo", timeout=SAVING_TIMEOUT)
    saver = CheckpointSaver(run, ranks.device, background)
    newest = find_newest_intact(checkpoints, background)
    saved = checkpoint.open_checkpoint(newest) if newest else None
    cursor = saved.cursor if saved else TrainingProgress()
    stopped = False
    while cursor.step < run.training.max_steps and not stopped:
        try:
            cursor, stopped = _train_until_unfreezing(run, ranks, saver, saved, stop)
        except Exception:  # the next attempt resumes from the save in flight
            saver.wait_at_most(LAST_SAVE_S)
            raise
        saved = SavedCheckpoint(
            path=checkpoint_folder.get_complete_checkpoint_path(checkpoints, cursor.step),
            cursor=cursor,
        )
        gc.collect()  # engines are in reference cycles, and the next engine needs their memory
    return cursor.step >= run.training.max_steps


def _train_until_unfreezing(
    run: TrainingRun,
    ranks: RankContext,
    saver: CheckpointSaver,
    resume_from: SavedCheckpoint | None,
    stop_signals: list[int],
) -> tuple[TrainingProgress, bool]:
    """Train until more parameters unfreeze or to the end, and save; return (progress, whether any
    rank received SIGTERM).
    """
    cursor = resume_from.cursor if resume_from else TrainingProgress()
    stopping = False
    thaw = freezing.find_next_thaw_step(cursor.step, run.training.freeze)
    last = run.training.max_steps
    if thaw is not None:
        last = min(thaw, last)
    recipe = build_recipe(run)
    engine = build_engine(run, recipe, ranks.device, resume_from)
    saver.prepare(engine.state())
    while cursor.step < last and not stopping:
        cursor, stopping = _run_step(run, ranks, recipe, engine, saver, cursor, stop_signals)
        if (
            stopping
            or cursor.step == last
            or cursor.step % run.training.checkpoint_every_steps == 0
        ):
            saver.save(engine.state(), cursor)
    saver.free_host_memory()
    return cursor, stopping


def _collect_stop_signals() -> list[int]:
    """Return a list to which each SIGTERM that this process receives is added."""
    received: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)

    signal.signal(signal.SIGTERM, note)
    return received


def _run_step(
    run: TrainingRun,
    ranks: RankContext,
    recipe: Recipe,
    engine: Engine,
    saver: CheckpointSaver,
    cursor: TrainingProgress,
    stop_signals: list[int],
) -> tuple[TrainingProgress, bool]:
    """Run an optimizer step; return (progress after it, whether any rank received SIGTERM).

    `cursor` is the progress before the step. Raises on every rank if any rank failed to save a
    checkpoint.
    """
    began_s = time.monotonic()
    plan = run.plan
    dataset = recipe.dataset
    samples = list_global_batch(
        cursor.samples, plan.global_batch_size, len(dataset), run.training.seed
    )
    tokens = sum(dataset.token_count(sample) for sample in samples)
    dp_rank = plan.layout.data_parallel_index_of(ranks.rank)
    together = plan.layout.dp if run.training.sync_batch_norm else 1
    mine = split_micro_batches(
        samples,
        dp_rank,
        plan.micro_batch_size,
        plan.gradient_accumulation_steps,
        normalised_ranks=together,
    )
    result = engine.step(cursor.step, (dataset.batch(indices) for indices in mine), tokens)
    status = [result.loss, float(bool(stop_signals)), float(saver.failed)]
    shared = torch.tensor(status, dtype=torch.float64, device=ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(shared)
    loss, stopping, failed = shared.tolist()
    if failed:
        saver.wait()
        raise RuntimeError("another rank could not save its part of a checkpoint")
    cursor = TrainingProgress(step=cursor.step + 1, samples=cursor.samples + plan.global_batch_size)
    if ranks.rank == 0:
        line = {
            "step": cursor.step,
            "loss": loss,
            "step_s": time.monotonic() - began_s,
            "tokens": tokens,
            "grad_norm": result.grad_norm,
        }
        if (peak_bytes := progress.peak_bytes()) is not None:
            line["peak_bytes"] = peak_bytes
        with AttemptFolder(run.attempt_folder).metrics.open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
    progress.step_completed(cursor.step, loss)
    return cursor, stopping > 0
