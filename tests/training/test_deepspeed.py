"""Laws of the DeepSpeed engine: every precision, optimizer and freezing gives the training of the torch engine."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from orchestrator.planning.render import render_deepspeed_config
from orchestrator.specs.choices import (
    Engine,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job.model import Freeze, ModelSpec, Schedule, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint import folder as checkpoint_folder
from orchestrator.training.checkpoint.checkpoint import TrainingProgress
from orchestrator.training.contract import loss_scale
from orchestrator.training.engines import deepspeed_nvme
from orchestrator.training.engines.deepspeed_settings import make_deepspeed_settings
from orchestrator.training.engines.optimizers import STEPS
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH, Part

FP32_TOLERANCE = 2e-6
LOW_TOLERANCE = 2e-3
HALF_WAY = THAW = 2
DECODER = ModelSpec(decoder=gang.DECODER)
SHORT = dataclasses.replace(
    gang.TRAINING, max_steps=4, checkpoint_every_steps=HALF_WAY, warmup_steps=3
)
WARM_UP = dataclasses.replace(SHORT, schedule=Schedule.COSINE, min_learning_rate=1e-4)
STAGED = dataclasses.replace(
    SHORT,
    freeze=(
        Freeze(parameters="*embed_tokens*", until_step=THAW),
        Freeze(parameters="layers.0.*", until_step=THAW),
        Freeze(parameters="layers.1.mlp.up_proj.weight"),
    ),
)
DROPOUT = ModelSpec(
    decoder=dataclasses.replace(gang.DECODER, dropout=0.1, tie_word_embeddings=True)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Case:
    """A case that runs on two ranks."""

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


# Below 1 MiB nothing is swapped.
LARGE = ModelSpec(
    decoder=dataclasses.replace(gang.DECODER, hidden_size=512, intermediate_size=1024)
)
FILES = {"offload_target": OffloadTarget.NVME}
BF16, FP16 = {"precision": Precision.BF16}, {"precision": Precision.FP16}
ON_HOST = {"offload": Offload.OPTIMIZER}
ALL_ON_HOST = {"offload": Offload.PARAMETERS}
SGD, ADAFACTOR = _of(Optimizer.SGD), _of(Optimizer.ADAFACTOR)
TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED

# Every case is compared with the torch engine's plain DDP in fp32 under the same training and
# model. The few have every
# optimizer, precision and place of states.
FEW = ("0 adafactor", "2 sgd on host", "2 staged bf16", "3 fp16 on host")
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
    "3 staged fp16 on host": Case(
        engine=DEEPSPEED, stage=3, training=STAGED, fields=FP16 | ALL_ON_HOST
    ),
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
    return next(
        r for r, c in REFERENCES.items() if (c.training, c.model) == (case.training, case.model)
    )


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
    trainings = [dataclasses.replace(case.training, max_steps=end) for end in ends]
    files = str(home / "nvme")
    return [
        gang.training_run(
            home, job, case.plan, text, model=case.model, training=training, nvme_folder=files
        )
        for training in trainings
    ]


def _saved(home: Path, job: str, case: Case) -> Path:
    step = THAW if case.training.freeze else HALF_WAY
    return JobFolder(home, job).checkpoints / f"step-{step:08d}"


@pytest.fixture(scope="module")
def runs_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Found]:
    """Return the runs of a case: the few cases are run together, and so are all others."""

    @functools.cache
    def run(few: bool) -> Found:
        return _run(
            tmp_path_factory.mktemp("home"), [name for name in CASES if (name in FEW) == few]
        )

    return lambda name: run(name in FEW)


def _run(home: Path, names: Sequence[str]) -> Found:
    cases = {name: CASES[name] for name in names}
    text = gang.ragged_text(home)
    needed = {"fp16", *map(_reference, names)}
    references = {
        name: _legs(home, text, f"reference {name}", REFERENCES[name]) for name in sorted(needed)
    }
    fresh = {name: _legs(home, text, f"fresh {name}", case) for name, case in cases.items()}
    resumed = {
        name: _legs(home, text, f"resumed {name}", case)[-1:] for name, case in cases.items()
    }
    back = {
        name: _legs(
            home, text, f"back {name}", REFERENCES["fp16" if "1 fp16" in name else _reference(name)]
        )[-1:]
        for name in cases
    }
    parts = [Part(run=run) for runs in (*references.values(), *fresh.values()) for run in runs]
    for name, case in cases.items():
        origin = (
            "fp16"
            if case.plan.precision is Precision.FP16 and not case.training.freeze
            else _reference(name)
        )
        parts.append(
            Part(run=resumed[name][0], start_from=_saved(home, f"reference {origin}", case))
        )
        parts.append(Part(run=back[name][0], start_from=_saved(home, f"fresh {name}", case)))
    gang.launch(parts, timeout_s=600)
    return Found(references=references, fresh=fresh, resumed=resumed, back=back)


def _plans() -> Iterator[Plan]:
    """Every plan of the DeepSpeed engine that offloads to host memory at most."""
    for stage, offload, precision, accumulation in itertools.product(
        ZeroStage, Offload, Precision, (1, 4)
    ):
        with contextlib.suppress(IllegalPlan):
            fields: dict[str, Any] = {
                "offload": offload,
                "precision": precision,
                "gradient_accumulation_steps": accumulation,
            }
            yield Plan(
                engine=DEEPSPEED,
                layout=ParallelLayout(dp=2),
                zero_stage=stage,
                micro_batch_size=3,
                **fields,
            )


def _in_common(left: dict[str, Any], other: dict[str, Any]) -> Iterator[tuple[str, Any, Any]]:
    """The keys that both files have."""
    for key in left.keys() & other.keys():
        if isinstance(left[key], dict):
            yield from _in_common(left[key], other[key])
        else:
            yield key, left[key], other[key]


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_scripts_deepspeed_file_agrees_with_our_engines(device: str) -> None:
    plans = list(_plans())
    assert len(plans) > 40
    for plan in plans:
        config = make_deepspeed_settings(plan, gang.TRAINING, torch.device(device))
        theirs = render_deepspeed_config(
            plan, clip_norm=gang.TRAINING.clip_norm, is_virtual_device=device == "cpu"
        )
        if plan.zero_stage is ZeroStage.NONE:
            assert (
                config.pop("gradient_clipping") == 0.0
            )  # there the engine clips by itself, to tell the norm
        common = list(_in_common(config, theirs))
        assert len(common) >= 9
        assert [(key, mine) for key, mine, _ in common] == [(key, its) for key, _, its in common], (
            plan
        )


def test_a_script_scales_its_losses_as_our_engines_do() -> None:
    plan = Plan(
        engine=Engine.SCRIPT, micro_batch_size=1, zero_stage=ZeroStage(2), precision=Precision.FP16
    )
    scaling = render_deepspeed_config(plan, clip_norm=1.0)["fp16"]
    assert 2.0 ** scaling["initial_scale_power"] == loss_scale.INITIAL
    assert scaling["loss_scale_window"] == loss_scale.GROWTH_INTERVAL


def _curve(runs: list[TrainingRun]) -> dict[int, float]:
    return {step: loss for run in runs for step, loss in gang.losses(run).items()}


of_every_case = pytest.mark.parametrize(
    "name", [pytest.param(name, marks=() if name in FEW else pytest.mark.long) for name in CASES]
)


@of_every_case
def test_every_case_trains_as_plain_ddp_does(runs_of: Callable[[str], Found], name: str) -> None:
    expected = _curve(runs_of(name).references[_reference(name)])
    assert len(expected) == SHORT.max_steps
    assert _curve(runs_of(name).fresh[name]) == pytest.approx(
        expected, abs=CASES[name].tolerance, rel=0
    )


@of_every_case
def test_a_training_hops_from_ddp_to_every_case_and_back(
    runs_of: Callable[[str], Found], name: str
) -> None:
    expected = _curve(runs_of(name).references[_reference(name)])
    for runs in (runs_of(name).resumed[name], runs_of(name).back[name]):
        curve = _curve(runs)
        assert SHORT.max_steps in curve
        rest = {step: expected[step] for step in curve}
        assert curve == pytest.approx(rest, abs=CASES[name].tolerance, rel=0)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # torch says that it saves and loads without a process group
def test_an_overflowed_step_is_left_out_halves_the_scale_and_goes_on(tmp_path: Path) -> None:
    """Gradients overflow in fp16 at every stage until the scale has come down from 2**19."""
    text = gang.ragged_text(tmp_path)
    start = _with_scale(tmp_path, 2.0**19)
    training = dataclasses.replace(WARM_UP, max_steps=8, checkpoint_every_steps=8)
    cases = [
        Case(engine=DEEPSPEED, stage=stage, training=training, fields=FP16 | fields)
        for stage, fields in ((1, {}), (2, ON_HOST), (3, {}))
    ]
    runs = [_legs(tmp_path, text, str(number), case)[0] for number, case in enumerate(cases)]
    gang.launch([Part(run=run, start_from=start) for run in runs])
    for number, run in enumerate(runs):
        norms = [line["grad_norm"] for line in gang.metrics(run)]
        left_out = sum(not math.isfinite(norm) for norm in norms)
        assert 1 <= left_out < len(norms) == training.max_steps - 1
        saved = JobFolder(tmp_path, str(number)).checkpoints / f"step-{training.max_steps:08d}"
        state = {loss_scale.STATE: torch.zeros(2), STEPS: torch.zeros(1)}
        checkpoint.load_state(saved, state)
        made = len(norms) - left_out
        assert state[loss_scale.STATE].tolist() == [2.0 ** (19 - left_out), made]
        assert state[STEPS].tolist() == [1 + made]


def _with_scale(home: Path, scale: float) -> Path:
    """The checkpoint of a first step in fp16, with another loss scale."""
    training = dataclasses.replace(WARM_UP, max_steps=1)
    first = Case(engine=DEEPSPEED, stage=1, training=training, fields=FP16)
    gang.launch([Part(run=_legs(home, gang.ragged_text(home), "first", first)[0])])
    old = JobFolder(home, "first").checkpoints / "step-00000001"
    metadata = FileSystemReader(old).read_metadata().state_dict_metadata
    state = {
        name: torch.empty(entry.size)
        for name, entry in metadata.items()
        if isinstance(entry, TensorStorageMetadata)
    }
    checkpoint.load_state(old, state)
    assert state[loss_scale.STATE].tolist() == [loss_scale.INITIAL, 1.0]
    state[loss_scale.STATE][0] = scale
    new = home / old.name
    checkpoint_folder.write_manifest(
        new, checkpoint.save_state(new, state, TrainingProgress(step=1, samples=GLOBAL_BATCH))
    )
    return new


def _in_files(home: Path, job: str, **changes: Any) -> TrainingRun:
    case = Case(engine=DEEPSPEED, stage=3, fields=ALL_ON_HOST | FILES)
    return gang.training_run(
        home, job, case.plan, (), **{"nvme_folder": str(home / "nvme"), **changes}
    )


def test_offload_to_files_needs_an_existing_folder(tmp_path: Path) -> None:
    for folder, message in (
        (None, "needs a folder"),
        (str(tmp_path / "nvme"), "needs a writable folder"),
    ):
        with pytest.raises(SpecError, match=message):
            deepspeed_nvme.prepare_swap_folder(_in_files(tmp_path, "a", nvme_folder=folder))


def test_a_missing_requirement_of_offload_to_files_is_named_with_its_remedy(tmp_path: Path) -> None:
    problem = deepspeed_nvme.find_nvme_obstacle(tmp_path)
    assert problem is not None
    if "is not compiled" not in problem:
        pytest.skip(problem)
    assert (
        f"TORCH_EXTENSIONS_DIR={tmp_path} {sys.executable} -m {deepspeed_nvme.__name__}" in problem
    )


def test_older_attempts_leave_no_swap_files_behind(tmp_path: Path) -> None:
    for name in ("1", "3", "model"):
        (tmp_path / name).mkdir()
    deepspeed_nvme.remove_older_swap_folders(tmp_path / "2")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3", "model"]


def _skip_without_files() -> None:
    problem = deepspeed_nvme.find_nvme_obstacle(deepspeed_nvme.find_extensions_folder())
    if problem:
        pytest.skip(problem)


def test_offload_to_files_does_not_change_a_training(tmp_path: Path) -> None:
    """Off the fp32 curve by its precision alone, a plan that swaps to files trains as the same plan in memory."""
    _skip_without_files()
    (tmp_path / "nvme").mkdir()
    text = gang.ragged_text(tmp_path)
    short = dataclasses.replace(WARM_UP, max_steps=4, learning_rate=1e-3)
    runs = {
        (number, where): _legs(
            tmp_path,
            text,
            f"{number} {where}",
            Case(
                engine=DEEPSPEED,
                stage=3,
                training=short,
                model=LARGE,
                fields=precision | offload | target,
            ),
        )
        for number, (precision, offload) in enumerate(
            itertools.product(({}, BF16), (ON_HOST, ALL_ON_HOST))
        )
        for where, target in (("memory", {}), ("files", FILES))
    }
    gang.launch([Part(run=run) for legs in runs.values() for run in legs])
    for number in range(4):
        files, memory = (_curve(runs[number, where]) for where in ("files", "memory"))
        assert len(files) == short.max_steps
        assert files == pytest.approx(memory, abs=1e-6, rel=0)


def test_a_training_hops_from_ddp_to_files_and_back(tmp_path: Path) -> None:
    _skip_without_files()
    (tmp_path / "nvme").mkdir()
    text = gang.ragged_text(tmp_path)
    short = dataclasses.replace(STAGED, learning_rate=1e-4)
    ddp = Case(engine=TORCH, stage=0, training=short, model=LARGE)
    cases = [
        Case(engine=DEEPSPEED, stage=3, training=short, model=LARGE, fields=fields | FILES)
        for fields in (ON_HOST, ALL_ON_HOST)
    ]
    reference = _legs(tmp_path, text, "ddp", ddp)
    fresh = [_legs(tmp_path, text, f"fresh {number}", case) for number, case in enumerate(cases)]
    resumed = [_legs(tmp_path, text, f"to {number}", case)[-1] for number, case in enumerate(cases)]
    back = [_legs(tmp_path, text, f"back {number}", ddp)[-1] for number in range(len(cases))]
    parts = [Part(run=run) for run in (*reference, *itertools.chain(*fresh))]
    parts += [Part(run=run, start_from=_saved(tmp_path, "ddp", ddp)) for run in resumed]
    parts += [
        Part(run=run, start_from=_saved(tmp_path, f"fresh {n}", cases[n]))
        for n, run in enumerate(back)
    ]
    gang.launch(parts)
    expected = _curve(reference)
    for runs in (*fresh, *([run] for run in (*resumed, *back))):
        curve = _curve(runs)
        assert curve == pytest.approx(
            {step: expected[step] for step in curve}, abs=FP32_TOLERANCE, rel=0
        )
        assert SHORT.max_steps in curve
    swapped = {path.parts[-3] for path in (tmp_path / "nvme").rglob("*.swp")}
    assert swapped == {"optimizer", "float32params"}
