"""A training in this process alone: what the loop does, without checkpoints and files."""

from __future__ import annotations

import dataclasses
import time
from pathlib import Path
from typing import Any

import torch

from orchestrator.specs.choices import Engine
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.contract.engine import Engine as RunningEngine
from orchestrator.training.contract.recipe import Recipe
from orchestrator.training.data.dataset import list_global_batch, split_micro_batches
from tests.training.gang import ragged_text

SMALL = DecoderSpec(
    vocab_size=256,
    hidden_size=32,
    intermediate_size=64,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
)
BILLION = DecoderSpec(  # Llama 3.2 1B
    vocab_size=128256,
    hidden_size=2048,
    intermediate_size=8192,
    num_hidden_layers=16,
    num_attention_heads=32,
    num_key_value_heads=8,
    tie_word_embeddings=True,
)
TRAINING = TrainingSpec(max_steps=6, learning_rate=1e-3, clip_norm=0.5)


def run_of(folder: Path, device: torch.device, plan: Plan, **fields: Any) -> TrainingRun:
    """A run of the small decoder; `fields` replace the run's."""
    run = TrainingRun(
        model=ModelSpec(decoder=SMALL),
        data=DataSpec(text=ragged_text(folder), sequence_length=32),
        training=TRAINING,
        plan=plan,
        job_folder=str(folder),
        attempt_folder=str(folder),
        epoch=1,
        device=device.type,
    )
    return dataclasses.replace(run, **fields)


def plan(micro_batch_size: int = 4, gradient_accumulation_steps: int = 2, **fields: Any) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        micro_batch_size=micro_batch_size,
        gradient_accumulation_steps=gradient_accumulation_steps,
        **fields,
    )


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trained:
    """The record of a training."""

    losses: list[float]
    step_s: list[float]
    tokens: int  # of each step
    recipe: Recipe
    engine: RunningEngine


def train(run: TrainingRun, device: torch.device, recipe: Recipe | None = None) -> Trained:
    """Train all steps of a run on a single device, with the run's own model where no `recipe` is given."""
    recipe = recipe or build_recipe(run)
    engine = build_engine(run, recipe, device, None)
    losses, seconds, tokens = [], [], 0
    for step in range(run.training.max_steps):
        began_s = time.perf_counter()
        loss, tokens = take_step(run, recipe, engine, step)
        losses.append(loss)
        seconds.append(time.perf_counter() - began_s)
    return Trained(losses=losses, step_s=seconds, tokens=tokens, recipe=recipe, engine=engine)


def take_step(
    run: TrainingRun, recipe: Recipe, engine: RunningEngine, step: int
) -> tuple[float, int]:
    """Train one step; returns its loss and its tokens. The loss is read from the device: the step has ended."""
    size = run.plan.global_batch_size
    samples = list_global_batch(step * size, size, len(recipe.dataset), run.training.seed)
    tokens = sum(recipe.dataset.token_count(sample) for sample in samples)
    mine = split_micro_batches(
        samples, 0, run.plan.micro_batch_size, run.plan.gradient_accumulation_steps
    )
    batches = (recipe.dataset.batch(indices) for indices in mine)
    return engine.step(step, batches, tokens).loss, tokens
