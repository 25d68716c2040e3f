"""Laws of the DeepSpeed engine: every precision, optimizer and freezing gives the training of the torch engine."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from orchestrator.specs.model import Freeze, ModelSpec, Schedule, TrainingSpec
from orchestrator.specs.plan import Engine, Offload, Optimizer, ParallelLayout, Plan, Precision, ZeroStage
from orchestrator.specs.run import JobFolder, TrainingRun
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH, Part

FP32_TOLERANCE = 2e-6
LOW_TOLERANCE = 2e-3
HALF_WAY = 4
THAW = 3
DECODER = ModelSpec(decoder=gang.DECODER)
WARM_UP = dataclasses.replace(gang.TRAINING, schedule=Schedule.COSINE, warmup_steps=3, min_learning_rate=1e-4)
STAGED = dataclasses.replace(
    gang.TRAINING,
    warmup_steps=3,
    freeze=(
        Freeze(parameters="*embed_tokens*", until_step=THAW),
        Freeze(parameters="layers.0.*", until_step=THAW),
        Freeze(parameters="layers.1.mlp.up_proj.weight"),
    ),
)
DROPOUT = ModelSpec(decoder=dataclasses.replace(gang.DECODER, dropout=0.1, tie_word_embeddings=True))


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """What runs on two ranks."""

    engine: Engine
    stage: int
    training: TrainingSpec = WARM_UP
    model: ModelSpec = DECODER
    accumulation: int = 2
    fields: dict[str, Any] = field(default_factory=dict)

    @property
    def plan(self) -> Plan:
        return Plan(
            engine=self.engine,
            zero_stage=ZeroStage(self.stage),
            layout=ParallelLayout(dp=2),
            micro_batch_size=GLOBAL_BATCH // 2 // self.accumulation,
            gradient_accumulation_steps=self.accumulation,
            optimizer=self.training.optimizer,
            **self.fields,
        )

    @property
    def tolerance(self) -> float:
        return FP32_TOLERANCE if self.plan.precision is Precision.FP32 else LOW_TOLERANCE


def _of(optimizer: Optimizer, training: TrainingSpec = WARM_UP) -> TrainingSpec:
    return dataclasses.replace(training, optimizer=optimizer)


BF16, FP16 = {"precision": Precision.BF16}, {"precision": Precision.FP16}
ON_HOST = {"offload": Offload.OPTIMIZER}
ALL_ON_HOST = {"offload": Offload.PARAMETERS}
SGD, ADAFACTOR = _of(Optimizer.SGD), _of(Optimizer.ADAFACTOR)
TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED

# Every case is compared with the torch engine's plain DDP in fp32 under the same training and model.
CASES = {
    "0": Case(engine=DEEPSPEED, stage=0),
    "0 sgd": Case(engine=DEEPSPEED, stage=0, training=SGD),
    "0 adafactor": Case(engine=DEEPSPEED, stage=0, training=ADAFACTOR),
    "0 staged": Case(engine=DEEPSPEED, stage=0, training=STAGED),
    "1 sgd": Case(engine=DEEPSPEED, stage=1, training=SGD),
    "1 staged": Case(engine=DEEPSPEED, stage=1, training=STAGED),
    "1 fp16": Case(engine=DEEPSPEED, stage=1, fields=FP16),
    "2 sgd on host": Case(engine=DEEPSPEED, stage=2, training=SGD, fields=ON_HOST),
    "2 staged bf16": Case(engine=DEEPSPEED, stage=2, training=STAGED, fields=BF16),
    "2 staged on host": Case(engine=DEEPSPEED, stage=2, training=STAGED, fields=ON_HOST),
    "2 fp16": Case(engine=DEEPSPEED, stage=2, fields=FP16),
    "3": Case(engine=DEEPSPEED, stage=3),
    "3 sgd": Case(engine=DEEPSPEED, stage=3, training=SGD),
    "3 staged": Case(engine=DEEPSPEED, stage=3, training=STAGED),
    "3 staged fp16 on host": Case(engine=DEEPSPEED, stage=3, training=STAGED, fields=FP16 | ALL_ON_HOST),
    "3 fp16 on host": Case(engine=DEEPSPEED, stage=3, fields=FP16 | ALL_ON_HOST),
    "2 dropout": Case(engine=DEEPSPEED, stage=2, model=DROPOUT),
    "3 dropout": Case(engine=DEEPSPEED, stage=3, model=DROPOUT),
}
REFERENCES = {
    "adamw": Case(engine=TORCH, stage=0),
    "sgd": Case(engine=TORCH, stage=0, training=SGD),
    "adafactor": Case(engine=TORCH, stage=0, training=ADAFACTOR),
    "staged": Case(engine=TORCH, stage=0, training=STAGED),
    "dropout": Case(engine=TORCH, stage=0, model=DROPOUT),
    "fp16": Case(engine=TORCH, stage=0, fields=FP16),
}


def _reference(name: str) -> str:
    case = CASES[name]
    return next(r for r, c in REFERENCES.items() if (c.training, c.model) == (case.training, case.model))


@dataclass(frozen=True, slots=True, kw_only=True)
class Found:
    """Runs by name: references, cases from the start, cases from the reference half-way, and back again."""

    references: dict[str, list[TrainingRun]]
    fresh: dict[str, list[TrainingRun]]
    resumed: dict[str, list[TrainingRun]]
    back: dict[str, list[TrainingRun]]


def _legs(home: Path, text: tuple[str, ...], job: str, case: Case) -> list[TrainingRun]:
    """The runs of one job: a staged training stops where parameters thaw, and goes on in a new run."""
    ends = [THAW, case.training.max_steps] if case.training.freeze else [case.training.max_steps]
    return [
        gang.training_run(
            home, job, case.plan, text, model=case.model, training=dataclasses.replace(case.training, max_steps=end)
        )
        for end in ends
    ]


def _saved(home: Path, job: str, case: Case) -> Path:
    step = THAW if case.training.freeze else HALF_WAY
    return JobFolder(home, job).checkpoints / f"step-{step:08d}"


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> Found:
    home = tmp_path_factory.mktemp("home")
    text = gang.ragged_text(home)
    references = {name: _legs(home, text, f"reference {name}", case) for name, case in REFERENCES.items()}
    fresh = {name: _legs(home, text, f"fresh {name}", case) for name, case in CASES.items()}
    resumed = {name: _legs(home, text, f"resumed {name}", case)[-1:] for name, case in CASES.items()}
    back = {
        name: _legs(home, text, f"back {name}", REFERENCES["fp16" if "1 fp16" in name else _reference(name)])[-1:]
        for name in CASES
    }
    parts = [Part(run=run) for runs in (*references.values(), *fresh.values()) for run in runs]
    for name, case in CASES.items():
        origin = "fp16" if case.plan.precision is Precision.FP16 and not case.training.freeze else _reference(name)
        parts.append(Part(run=resumed[name][0], start_from=_saved(home, f"reference {origin}", case)))
        parts.append(Part(run=back[name][0], start_from=_saved(home, f"fresh {name}", case)))
    gang.launch(parts, timeout_s=600)
    return Found(references=references, fresh=fresh, resumed=resumed, back=back)


def _curve(runs: list[TrainingRun]) -> dict[int, float]:
    return {step: loss for run in runs for step, loss in gang.losses(run).items()}


@pytest.mark.parametrize("name", CASES)
def test_every_case_trains_as_plain_ddp_does(found: Found, name: str) -> None:
    expected = _curve(found.references[_reference(name)])
    assert len(expected) == gang.TRAINING.max_steps
    assert _curve(found.fresh[name]) == pytest.approx(expected, abs=CASES[name].tolerance, rel=0)


@pytest.mark.parametrize("name", CASES)
def test_a_training_hops_from_ddp_to_every_case_and_back(found: Found, name: str) -> None:
    expected = _curve(found.references[_reference(name)])
    for runs in (found.resumed[name], found.back[name]):
        curve = _curve(runs)
        assert gang.TRAINING.max_steps in curve
        rest = {step: expected[step] for step in curve}
        assert curve == pytest.approx(rest, abs=CASES[name].tolerance, rel=0)
