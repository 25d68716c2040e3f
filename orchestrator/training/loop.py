"""The training loop: data by step, one small all-reduce per step, checkpoints, and how it ends."""

from __future__ import annotations

import gc
import json
import signal
import time
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

import torch
import torch.distributed as dist

from orchestrator.specs.run import AttemptFolder, TrainingRun
from orchestrator.training import checkpoint, checkpoint_folder, freezing, progress
from orchestrator.training.checkpoint import Cursor, Saved
from orchestrator.training.dataset import global_batch, micro_batches
from orchestrator.training.engine import Engine, build_engine, build_recipe
from orchestrator.training.recipe import Recipe


class StaleAttempt(Exception):
    """A newer attempt of the job exists: this one may publish nothing."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Ranks:
    """Where this process stands in the gang."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def train(run: TrainingRun, ranks: Ranks) -> bool:
    """Run to the last step, from the newest complete checkpoint; False where SIGTERM ended it early (and it was saved).

    Raises StaleAttempt on every rank where a newer attempt exists when a checkpoint is to be published.
    """
    stop = _listen_for_stop()
    checkpoints = Path(run.job_folder) / "checkpoints"
    if ranks.rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.remove_unfinished(checkpoints, run.epoch)
    newest = _agree_on_newest(checkpoints, ranks)
    saved = checkpoint.opened(newest) if newest else None
    cursor = saved.cursor if saved else Cursor()
    while cursor.step < run.training.max_steps:
        saved, stopped = _phase(run, ranks, checkpoints, saved, stop)
        cursor = saved.cursor
        if stopped:
            return cursor.step == run.training.max_steps
        gc.collect()  # engines hold themselves in cycles: the next one needs their memory
    return True


def _phase(
    run: TrainingRun, ranks: Ranks, checkpoints: Path, saved: Saved | None, stop: list[int]
) -> tuple[Saved, bool]:
    """Train up to where more parameters thaw, or to the end: the checkpoint there, and whether a rank was to stop."""
    cursor = saved.cursor if saved else Cursor()
    last = min(freezing.next_thaw(cursor.step, run.training.freeze) or run.training.max_steps, run.training.max_steps)
    recipe = build_recipe(run)
    engine = build_engine(run, recipe, ranks.device, saved)
    stopping = False
    while cursor.step < last and not stopping:
        cursor, stopping = _step(run, ranks, recipe, engine, cursor, stop)
        if stopping or cursor.step == last or cursor.step % run.training.checkpoint_every_steps == 0:
            _checkpoint(run, ranks, checkpoints, engine, cursor)
    return Saved(path=checkpoint_folder.complete_path(checkpoints, cursor.step), cursor=cursor), stopping


def _listen_for_stop() -> list[int]:
    """A list that SIGTERM makes non-empty."""
    received: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)

    signal.signal(signal.SIGTERM, note)
    return received


def _agree_on_newest(checkpoints: Path, ranks: Ranks) -> Path | None:
    """Rank 0's answer, on every rank."""
    newest = checkpoint_folder.latest_complete(checkpoints) if ranks.rank == 0 else None
    step = torch.tensor(checkpoint_folder.step_of(newest) if newest else -1, device=ranks.device)
    dist.broadcast(step, src=0)
    return checkpoint_folder.complete_path(checkpoints, int(step)) if int(step) >= 0 else None


def _step(
    run: TrainingRun, ranks: Ranks, recipe: Recipe, engine: Engine, cursor: Cursor, stop: list[int]
) -> tuple[Cursor, bool]:
    """One optimizer step: where the training is after it, and whether any rank was asked to stop."""
    began_s = time.monotonic()
    plan, dataset = run.plan, recipe.dataset
    samples = global_batch(cursor.samples, plan.global_batch_size, len(dataset), run.training.seed)
    tokens = sum(dataset.token_count(sample) for sample in samples)
    dp_rank = ranks.rank // plan.layout.tp % plan.layout.dp  # of mesh axes pp, dp, tp
    mine = micro_batches(samples, dp_rank, plan.micro_batch_size, plan.gradient_accumulation_steps)
    result = engine.step(cursor.step, (dataset.batch(indices) for indices in mine), tokens)
    shared = torch.tensor([result.loss, float(bool(stop))], dtype=torch.float64, device=ranks.device)
    dist.all_reduce(shared)
    loss, stopping = shared.tolist()
    cursor = Cursor(step=cursor.step + 1, samples=cursor.samples + plan.global_batch_size)
    if ranks.rank == 0:
        line = {
            "step": cursor.step,
            "loss": loss,
            "step_s": time.monotonic() - began_s,
            "tokens": tokens,
            "grad_norm": result.grad_norm,
        }
        with AttemptFolder(run.attempt_folder).metrics.open("a") as metrics:
            metrics.write(json.dumps(line) + "\n")
    progress.step_completed(cursor.step, loss)
    return cursor, stopping > 0


def _checkpoint(run: TrainingRun, ranks: Ranks, checkpoints: Path, engine: Engine, cursor: Cursor) -> None:
    """Write and publish the checkpoint of this step; no rank returns before it is in place. Raises StaleAttempt."""
    checkpoint.save(checkpoint_folder.writing_path(checkpoints, run.epoch, cursor.step), engine.state(), cursor)
    dist.barrier()
    stale = torch.tensor(0, device=ranks.device)
    if ranks.rank == 0:
        if checkpoint_folder.is_stale(Path(run.job_folder) / "epoch", run.epoch):
            stale += 1
        else:
            checkpoint_folder.publish(checkpoints, run.epoch, cursor.step, run.training.keep_checkpoints)
    dist.broadcast(stale, src=0)
    if stale.item():
        raise StaleAttempt
