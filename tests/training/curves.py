"""Curves of losses of our decoder under many plans, from the start or over a chain of restarts."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from orchestrator.specs.choices import Engine, Optimizer, ParallelLayout, Precision, ZeroStage
from orchestrator.specs.job.model import DecoderSpec, ModelSpec, Schedule, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, TrainingRun, write_json
from orchestrator.specs.settings import format_plan
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH, SEQUENCE_LENGTH, Part

DECODER = DecoderSpec(
    vocab_size=256,
    hidden_size=64,
    intermediate_size=64,
    num_hidden_layers=8,
    num_attention_heads=8,
    tie_word_embeddings=True,
)
# For all but deep pipelines and wide tensor parallelism. Of four context-parallel ranks two have
# each key-value head.
SHALLOW = dataclasses.replace(DECODER, num_hidden_layers=4, num_key_value_heads=2)
TRAINING = TrainingSpec(
    max_steps=8,
    learning_rate=1e-3,
    schedule=Schedule.COSINE,
    warmup_steps=2,
    clip_norm=0.5,
    checkpoint_every_steps=100,
    keep_checkpoints=1,
)
SHORT = dataclasses.replace(TRAINING, max_steps=4, learning_rate=3e-3)
HOPPING = dataclasses.replace(TRAINING, schedule=Schedule.CONSTANT)
# Every plan leaves its process groups behind, whose threads wake all the time: 400 of them after
# 100 plans on 4 ranks.
LAUNCHED_TOGETHER = 20
# A moment between two of 256 codes rounds the other way where a sum differs in its last bit: 2.9e-6
# on one processor.
QUANTISED = 1e-5
TOLERANCE = {Precision.FP32: 2e-6, Precision.BF16: 2e-3, Precision.FP16: 2e-3}


def plan(engine: Engine, stage: int, *, cuts: int = 1, **fields: Any) -> Plan:
    """A plan with the global batch; each rank's share is cut into `cuts` micro-batches. Fields may size axes."""
    axes = {axis: fields.pop(axis) for axis in ("dp", "cp", "tp", "pp") if axis in fields}
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(**axes),
        micro_batch_size=GLOBAL_BATCH // axes.get("dp", 1) // cuts,
        gradient_accumulation_steps=cuts,
        sequence_length=SEQUENCE_LENGTH,
        **fields,
    )


ONE_PROCESS = plan(Engine.TORCH, 0)


def losses(
    home: Path,
    chosen: Sequence[Plan],
    *,
    decoder: DecoderSpec = SHALLOW,
    training: TrainingSpec = SHORT,
    timeout_s: float = gang.LAUNCH_TIMEOUT_S,
) -> dict[Plan, dict[int, float]]:
    """Loss by step of a training under each plan; plans of one world size share a launch."""
    home.mkdir(exist_ok=True)
    text = gang.ragged_text(home)
    runs = {
        chosen_plan: decoder_run(
            home, f"plan-{n}", chosen_plan, text, decoder=decoder, training=training
        )
        for n, chosen_plan in enumerate(chosen)
    }
    for ranks in sorted({chosen_plan.world_size for chosen_plan in chosen}):
        parts = [Part(run=run) for run_plan, run in runs.items() if run_plan.world_size == ranks]
        for start in range(0, len(parts), LAUNCHED_TOGETHER):
            gang.launch(parts[start : start + LAUNCHED_TOGETHER], timeout_s)
    return {run_plan: gang.losses(run) for run_plan, run in runs.items()}


def hop(
    home: Path,
    legs: Sequence[Plan],
    training: TrainingSpec,
    model: Callable[[TrainingRun, int], ModelSpec] | None = None,
    *,
    decoder: DecoderSpec = SHALLOW,
) -> tuple[dict[int, float], dict[int, float]]:
    """Loss by step of one training whose legs, a step each, begin with other weights and load the last checkpoint.

    The last leg runs on to the end. Beside it, the losses of one uninterrupted process. The schedule must not depend
    on where a leg ends. Without a `model(run, seed)` it is our decoder.
    """
    assert training.schedule is Schedule.CONSTANT
    home.mkdir(exist_ok=True)
    text = gang.ragged_text(home)
    last = max(training.max_steps, len(legs))
    stops = [*range(1, len(legs)), last]

    def run(job: str, leg: Plan, stop: int, seed: int) -> TrainingRun:
        settings = dataclasses.replace(training, max_steps=stop)
        return decoder_run(
            home, job, leg, text, decoder=decoder, training=settings, seed=seed, model=model
        )

    runs = [
        run("chain", leg, stop, seed)
        for seed, (leg, stop) in enumerate(zip(legs, stops, strict=True))
    ]
    reference = run("reference", ONE_PROCESS, last, 0)
    for _, together in itertools.groupby([reference, *runs], key=lambda run: run.plan.world_size):
        gang.launch([Part(run=run) for run in together])
    return {step: loss for run in runs for step, loss in gang.losses(run).items()}, gang.losses(
        reference
    )


def check(curves: dict[Plan, dict[int, float]], expected: dict[int, float]) -> None:
    """Every curve is the expected one, within the tolerance of its precision; all that are not are named."""
    off = {}
    for curve_plan, curve in curves.items():
        assert curve.keys() == expected.keys(), format_plan(curve_plan)
        distance = max(abs(curve[step] - expected[step]) for step in expected)
        quantised = QUANTISED if curve_plan.optimizer is Optimizer.ADAMW_8BIT else 0.0
        if not distance <= max(TOLERANCE[curve_plan.precision], quantised):
            off[f"{curve_plan.engine} {format_plan(curve_plan)}"] = distance
    assert not off, "\n".join(f"{distance:.1e} {name}" for name, distance in off.items())


def decoder_run(
    home: Path,
    job: str,
    chosen: Plan,
    text: tuple[str, ...],
    *,
    decoder: DecoderSpec = SHALLOW,
    training: TrainingSpec = SHORT,
    seed: int = 0,
    sequence_length: int = SEQUENCE_LENGTH,
    model: Callable[[TrainingRun, int], ModelSpec] | None = None,
) -> TrainingRun:
    """A run of our decoder, or of `model(run, seed)`, whose initial values follow from the seed."""
    run = gang.training_run(home, job, chosen, text, training=training)
    config = {
        "decoder": dataclasses.asdict(decoder),
        "text": text,
        "sequence_length": sequence_length,
        "seed": seed,
    }
    seeded_model = ModelSpec(
        factory=f"{Path(__file__).with_name('seeded_decoder.py')}:build", config=config
    )
    run = dataclasses.replace(run, model=model(run, seed) if model else seeded_model)
    write_json(AttemptFolder(run.attempt_folder).run, run)
    return run
