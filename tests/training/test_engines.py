"""Laws of the engines: every plan gives the loss curve of one process, from the start and after any restart."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

from orchestrator.specs.choices import ActivationCheckpointing, Engine, Offload, ParallelLayout, Precision, ZeroStage
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH, Part

FP32_TOLERANCE = 2e-6  # measured: 5e-7
BF16_TOLERANCE = 2e-3  # measured: 9e-4
RESUME_STEP = 4
LAST_STEP = gang.TRAINING.max_steps

FULL = ActivationCheckpointing.FULL
BF16 = Precision.BF16


def plan(engine: Engine, stage: int, *, dp: int = 2, accumulation: int = 1, **fields: Any) -> Plan:
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(dp=dp),
        micro_batch_size=GLOBAL_BATCH // dp // accumulation,
        gradient_accumulation_steps=accumulation,
        **fields,
    )


TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED
pytestmark = [pytest.mark.long, pytest.mark.timeout(1200)]  # test_equality.py has one plan of every kind in make test
ON_TWO_RANKS = {
    "ddp": plan(TORCH, 0),
    "ddp accumulation": plan(TORCH, 0, accumulation=4),
    "ddp checkpointing": plan(TORCH, 0, activation_checkpointing=FULL),
    "fsdp2": plan(TORCH, 3),
    "fsdp2 accumulation checkpointing": plan(TORCH, 3, accumulation=2, activation_checkpointing=FULL),
    "fsdp2 offload": plan(TORCH, 3, offload=Offload.PARAMETERS),
    "deepspeed 0 accumulation": plan(DEEPSPEED, 0, accumulation=2),
    "deepspeed 1": plan(DEEPSPEED, 1),
    "deepspeed 1 accumulation checkpointing": plan(DEEPSPEED, 1, accumulation=4, activation_checkpointing=FULL),
    "deepspeed 2": plan(DEEPSPEED, 2, accumulation=2),
    "deepspeed 2 offload": plan(DEEPSPEED, 2, accumulation=2, offload=Offload.OPTIMIZER),
    "deepspeed 3": plan(DEEPSPEED, 3),
    "deepspeed 3 accumulation checkpointing": plan(DEEPSPEED, 3, accumulation=2, activation_checkpointing=FULL),
    "deepspeed 3 offload": plan(DEEPSPEED, 3, accumulation=2, offload=Offload.PARAMETERS),
    "ddp bf16": plan(TORCH, 0, accumulation=2, precision=BF16),
    "fsdp2 bf16": plan(TORCH, 3, precision=BF16, activation_checkpointing=FULL),
    "deepspeed 1 bf16": plan(DEEPSPEED, 1, accumulation=2, precision=BF16),
    "deepspeed 2 bf16": plan(DEEPSPEED, 2, accumulation=2, precision=BF16),
    "deepspeed 3 bf16": plan(DEEPSPEED, 3, accumulation=2, precision=BF16),
}
ON_ONE_RANK = {
    "torch accumulation checkpointing": plan(TORCH, 0, dp=1, accumulation=4, activation_checkpointing=FULL),
    "fsdp2": plan(TORCH, 3, dp=1),
    "deepspeed 2 offload": plan(DEEPSPEED, 2, dp=1, accumulation=2, offload=Offload.OPTIMIZER),
    "deepspeed 3": plan(DEEPSPEED, 3, dp=1),
}
CHAIN = (  # two ranks, one, two: one step per plan, each from another initial seed
    *(plan(TORCH, 0), plan(DEEPSPEED, 3), plan(TORCH, 3), plan(DEEPSPEED, 2, accumulation=2)),
    *(plan(DEEPSPEED, 1, dp=1), plan(TORCH, 0, dp=1), plan(DEEPSPEED, 3, dp=1), plan(TORCH, 3, dp=1)),
    *(plan(DEEPSPEED, 0), plan(DEEPSPEED, 3, offload=Offload.PARAMETERS), plan(DEEPSPEED, 1), plan(TORCH, 0)),
)


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Loss by step: of one uninterrupted process, and of every plan from the start and from DDP's checkpoint."""

    reference: dict[int, float]
    fresh: dict[str, dict[int, float]]
    resumed: dict[str, dict[int, float]]
    chain_reference: dict[int, float]
    chain: dict[int, float]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    home = tmp_path_factory.mktemp("home")
    text = gang.ragged_text(home)
    two, chain = _two_ranks(home, text), _chain(home, text)
    one = {
        name: gang.training_run(home, f"one-{number}", chosen, text)
        for number, (name, chosen) in enumerate(ON_ONE_RANK.items())
    }
    reference = gang.training_run(home, "reference", gang.torch_plan(), text)
    chain_reference = _factory_run(home, "chain-reference", gang.torch_plan(), text, seed=0, max_steps=len(CHAIN))
    gang.launch([*two, *map(_part, chain[:4])])
    gang.launch([*map(_part, [*chain[4:8], reference, chain_reference, *one.values()])])
    gang.launch([*map(_part, chain[8:])])
    runs = {part.run.job_folder.rpartition("/")[2]: part.run for part in two}
    names = list(ON_TWO_RANKS)
    return Curves(
        reference=gang.losses(reference),
        fresh={f"2 ranks {name}": gang.losses(runs[f"fresh-{number}"]) for number, name in enumerate(names)}
        | {f"1 rank {name}": gang.losses(run) for name, run in one.items()},
        resumed={name: gang.losses(runs[f"resumed-{number}"]) for number, name in enumerate(names)},
        chain_reference=gang.losses(chain_reference),
        chain={step: loss for run in chain for step, loss in gang.losses(run).items()},
    )


def _part(run: TrainingRun) -> Part:
    return Part(run=run)


def _two_ranks(home: Path, text: tuple[str, ...]) -> list[Part]:
    """Every plan from the start, then every plan from the checkpoint that DDP left half-way."""
    checkpoint = JobFolder(home, "fresh-0").checkpoints / f"step-{RESUME_STEP:08d}"
    fresh = [Part(run=gang.training_run(home, f"fresh-{n}", p, text)) for n, p in enumerate(ON_TWO_RANKS.values())]
    resumed = [
        Part(run=gang.training_run(home, f"resumed-{n}", p, text), start_from=checkpoint)
        for n, p in enumerate(ON_TWO_RANKS.values())
    ]
    return fresh + resumed


def _chain(home: Path, text: tuple[str, ...]) -> list[TrainingRun]:
    return [
        _factory_run(home, "chain", hop, text, seed=number, max_steps=number + 1) for number, hop in enumerate(CHAIN)
    ]


def _factory_run(home: Path, job: str, hop: Plan, text: tuple[str, ...], *, seed: int, max_steps: int) -> TrainingRun:
    config = {"seed": seed, "width": 24, "depth": 2, "text": text, "sequence_length": gang.SEQUENCE_LENGTH}
    model = ModelSpec(factory=f"{Path(__file__).with_name('tiny_model.py')}:build", config=config)
    training = dataclasses.replace(gang.TRAINING, max_steps=max_steps, checkpoint_every_steps=100)
    return gang.training_run(home, job, hop, text, model=model, training=training)


def _tolerance(name: str) -> float:
    return BF16_TOLERANCE if "bf16" in name else FP32_TOLERANCE


@pytest.mark.parametrize("name", [*(f"2 ranks {n}" for n in ON_TWO_RANKS), *(f"1 rank {n}" for n in ON_ONE_RANK)])
def test_every_plan_gives_the_losses_of_one_process(curves: Curves, name: str) -> None:
    assert curves.fresh[name] == pytest.approx(curves.reference, abs=_tolerance(name), rel=0)


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_a_restart_from_ddp_under_any_plan_continues_the_same_curve(curves: Curves, name: str) -> None:
    rest = {step: loss for step, loss in curves.reference.items() if step > RESUME_STEP}
    assert curves.resumed[name] == pytest.approx(rest, abs=_tolerance(name), rel=0)


def test_a_training_may_hop_over_all_engines_and_world_sizes(curves: Curves) -> None:
    assert curves.chain == pytest.approx(curves.chain_reference, abs=FP32_TOLERANCE, rel=0)


def test_the_reference_learns(curves: Curves) -> None:
    """Otherwise equal curves would prove little."""
    assert len(curves.reference) == LAST_STEP
    assert curves.reference[LAST_STEP] < curves.reference[1] - 0.3
