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
from orchestrator.training.checkpoint.checkpoint import Cursor, Saved
from orchestrator.training.checkpoint.resume import newest_intact
from orchestrator.training.checkpoint.saver import Saver
from orchestrator.training.contract.engine import Engine
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.data.dataset import global_batch, micro_batches
from orchestrator.training.engines import freezing

SAVING_TIMEOUT = timedelta(
    hours=1
)  # longest wait for a slower rank's write; a dead rank is noticed at once
# longest wait of a failing attempt for the save in flight; its evidence is delayed as long
LAST_SAVE_S = 30.0


@frozen
class Ranks:
    """The position of this process among the ranks, and its device."""

    rank: int
    local_rank: int
    world_size: int
    device: torch.device


def train(run: TrainingRun, ranks: Ranks) -> bool:
    """Train from the newest intact checkpoint to the last step; False if SIGTERM ended it early, after a save.

    Raises StaleAttempt on every rank if a newer attempt exists when a checkpoint is published.
    """
    stop = _listen_for_stop()
    checkpoints = Path(run.job_folder) / "checkpoints"
    if ranks.rank == 0:
        checkpoints.mkdir(parents=True, exist_ok=True)
        checkpoint_folder.remove_unfinished(checkpoints, run.epoch)
    background = dist.new_group(backend="gloo", timeout=SAVING_TIMEOUT)
    saver = Saver(run, ranks.device, background)
    newest = newest_intact(checkpoints, background)
    saved = checkpoint.open_saved(newest) if newest else None
    cursor = saved.cursor if saved else Cursor()
    stopped = False
    while cursor.step < run.training.max_steps and not stopped:
        try:
            cursor, stopped = _phase(run, ranks, saver, saved, stop)
        except Exception:  # the next attempt resumes from the save in flight
            saver.let_finish(LAST_SAVE_S)
            raise
        saved = Saved(path=checkpoint_folder.complete_path(checkpoints, cursor.step), cursor=cursor)
        gc.collect()  # engines are in reference cycles, and the next engine needs their memory
    return cursor.step >= run.training.max_steps


def _phase(
    run: TrainingRun, ranks: Ranks, saver: Saver, saved: Saved | None, stop: list[int]
) -> tuple[Cursor, bool]:
    """Train to the next thaw step or the end, and save; also returns whether any rank received SIGTERM."""
    cursor = saved.cursor if saved else Cursor()
    stopping = False
    thaw = freezing.next_thaw(cursor.step, run.training.freeze)
    last = run.training.max_steps
    if thaw is not None:
        last = min(thaw, last)
    recipe = build_recipe(run)
    engine = build_engine(run, recipe, ranks.device, saved)
    saver.prepare(engine.state())
    while cursor.step < last and not stopping:
        cursor, stopping = _step(run, ranks, recipe, engine, saver, cursor, stop)
        if (
            stopping
            or cursor.step == last
            or cursor.step % run.training.checkpoint_every_steps == 0
        ):
            saver.save(engine.state(), cursor)
    saver.release()
    return cursor, stopping


def _listen_for_stop() -> list[int]:
    """A list that becomes non-empty on SIGTERM."""
    received: list[int] = []

    def note(signal_number: int, _frame: FrameType | None) -> None:
        received.append(signal_number)

    signal.signal(signal.SIGTERM, note)
    return received


def _step(
    run: TrainingRun,
    ranks: Ranks,
    recipe: Recipe,
    engine: Engine,
    saver: Saver,
    cursor: Cursor,
    stop: list[int],
) -> tuple[Cursor, bool]:
    """Make an optimizer step; return the cursor after it, and whether any rank received SIGTERM.

    Raises on every rank if any rank failed to save a checkpoint.
    """
    began_s = time.monotonic()
    plan = run.plan
    dataset = recipe.dataset
    samples = global_batch(cursor.samples, plan.global_batch_size, len(dataset), run.training.seed)
    tokens = sum(dataset.token_count(sample) for sample in samples)
    dp_rank = plan.layout.dp_rank(ranks.rank)
    together = plan.layout.dp if run.training.sync_batch_norm else 1
    mine = micro_batches(
        samples, dp_rank, plan.micro_batch_size, plan.gradient_accumulation_steps, together=together
    )
    result = engine.step(cursor.step, (dataset.batch(indices) for indices in mine), tokens)
    status = [result.loss, float(bool(stop)), float(saver.failed)]
    shared = torch.tensor(status, dtype=torch.float64, device=ranks.device)
    if ranks.world_size > 1:
        dist.all_reduce(shared)
    loss, stopping, failed = shared.tolist()
    if failed:
        saver.wait()
        raise RuntimeError("another rank could not save its part of a checkpoint")
    cursor = Cursor(step=cursor.step + 1, samples=cursor.samples + plan.global_batch_size)
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
