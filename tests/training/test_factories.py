"""Laws of models from factories: convolutions, BatchNorm, a GAN and a diffusion model train alike under every plan."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, ZeroStage
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, Freeze, ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from orchestrator.training.build import build_engine
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.contract.recipe import Recipe, from_factory
from orchestrator.training.contract.results import StepResult
from orchestrator.training.engines.alternating import AlternatingEngine
from orchestrator.training.engines.batch_norm import list_batch_norms, prepare_batch_norms
from tests.training import gang
from tests.training.gang import Part
from tests.training.reseeded import EXAMPLES

FP32_TOLERANCE = 2e-6  # measured: 1e-7
STATISTICS_TOLERANCE = 1e-6  # of running means and variances around 1
CONFIGS: dict[str, dict[str, Any]] = {
    "conv_classifier": {"width": 8, "depth": 2, "samples": 50, "size": 16},
    "vocoder_gan": {"width": 16, "samples": 50, "frames": 8, "discriminator_learning_rate": 1e-3},
    "diffusion_unet": {"width": 8, "levels": 2, "samples": 50, "size": 8},
}


def plan(
    engine: Engine = Engine.TORCH, stage: int = 0, *, dp: int = 2, micro: int = 2, **fields: Any
) -> Plan:
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(dp=dp),
        micro_batch_size=micro,
        gradient_accumulation_steps=gang.GLOBAL_BATCH // micro // dp,
        **fields,
    )


TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE
PLANS = {
    "ddp": plan(activation_checkpointing=FULL),
    "fsdp2 kept": plan(stage=2, activation_checkpointing=SELECTIVE),
    "fsdp2": plan(stage=3),
    "zero 1": plan(DEEPSPEED, 1, activation_checkpointing=SELECTIVE),
    "zero 2": plan(DEEPSPEED, 2),
    "zero 3": plan(DEEPSPEED, 3, activation_checkpointing=FULL),
}
# Each plan with one example, each example by both engines; the others are long.
FEW = (
    *(("conv_classifier", name) for name in ("fsdp2 kept", "zero 2")),
    *(("vocoder_gan", name) for name in ("ddp", "zero 3")),
    *(("diffusion_unet", name) for name in ("fsdp2", "zero 1")),
)
OTHERS = sorted(set(itertools.product(CONFIGS, PLANS)) - set(FEW))
CHAIN = (plan(), plan(DEEPSPEED, 3), plan(stage=3), plan(DEEPSPEED, 2))
TRAINING = dataclasses.replace(gang.TRAINING, max_steps=len(CHAIN), checkpoint_every_steps=100)
NORMALISED = {  # a BatchNorm model: the plan, and whether its statistics are taken over both ranks
    "ddp": (plan(activation_checkpointing=FULL), False),
    "fsdp2": (plan(stage=3), False),
    "zero 2": (plan(DEEPSPEED, 2), False),
    "ddp synchronised": (plan(micro=1, activation_checkpointing=SELECTIVE), True),
    "fsdp2 synchronised": (plan(stage=3, micro=1), True),
    "zero 3 synchronised": (plan(DEEPSPEED, 3, micro=1), True),
}


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Trainings:
    """Runs of this file's plans: of each example, and of a BatchNorm model; and one process for each."""

    reference: dict[str, TrainingRun]
    runs: dict[tuple[str, str], TrainingRun]
    normalised_reference: TrainingRun
    normalised: dict[str, TrainingRun]


@pytest.fixture(scope="module")
def trainings(tmp_path_factory: pytest.TempPathFactory) -> Trainings:
    home = tmp_path_factory.mktemp("home")
    batch_norm = {"example": "conv_classifier", "norm": "batch"}
    trained = Trainings(
        reference={
            example: _run(home, f"{example}-one", plan(dp=1), example=example)
            for example in CONFIGS
        },
        runs={
            (example, name): _run(home, f"{example} {name}", PLANS[name], example=example)
            for example, name in FEW
        },
        normalised_reference=_run(home, "norm-one", plan(dp=1), batch_norm_samples=2, **batch_norm),
        normalised={
            name: _run(
                home,
                f"norm-{number}",
                chosen,
                batch_norm_samples=2,
                sync_batch_norm=synced,
                **batch_norm,
            )
            for number, (name, (chosen, synced)) in enumerate(NORMALISED.items())
        },
    )
    gang.launch(
        [Part(run=run) for run in (*trained.reference.values(), trained.normalised_reference)]
    )
    gang.launch([Part(run=run) for run in (*trained.runs.values(), *trained.normalised.values())])
    return trained


def _run(
    home: Path,
    job: str,
    chosen: Plan,
    *,
    example: str,
    seed: int = 0,
    norm: str = "group",
    **training: Any,
) -> TrainingRun:
    config = {**CONFIGS[example], "example": example, "seed": seed} | (
        {"norm": norm} if norm != "group" else {}
    )
    model = ModelSpec(factory=f"{Path(__file__).with_name('reseeded.py')}:build", config=config)
    changed = dataclasses.replace(TRAINING, **training)
    return gang.training_run(home, job, chosen, (), model=model, training=changed)


def _losses(run: TrainingRun) -> object:
    return pytest.approx(gang.losses(run), abs=FP32_TOLERANCE, rel=0)


@pytest.mark.parametrize(("example", "name"), FEW)
def test_every_example_trains_under_every_plan_as_in_one_process(
    trainings: Trainings, example: str, name: str
) -> None:
    assert gang.losses(trainings.runs[example, name]) == _losses(trainings.reference[example])


@pytest.mark.long
def test_every_example_trains_under_every_other_plan_alike(
    trainings: Trainings, tmp_path: Path
) -> None:
    runs = [
        _run(tmp_path, f"{example} {name}", PLANS[name], example=example)
        for example, name in OTHERS
    ]
    gang.launch([Part(run=run) for run in runs])
    for (example, name), run in zip(OTHERS, runs, strict=True):
        assert gang.losses(run) == _losses(trainings.reference[example]), (example, name)


@pytest.mark.parametrize(
    "example",
    [
        pytest.param(name, marks=() if name == "vocoder_gan" else pytest.mark.long)
        for name in CONFIGS
    ],
)
def test_every_example_may_hop_over_all_engines(
    trainings: Trainings, example: str, tmp_path: Path
) -> None:
    """Each leg begins from other weights, which the checkpoint replaces: of both networks, in the GAN's case."""
    legs = [
        _run(tmp_path, "chain", hop, example=example, seed=leg, max_steps=leg + 1)
        for leg, hop in enumerate(CHAIN)
    ]
    gang.launch([Part(run=run) for run in legs])
    curve = {step: loss for run in legs for step, loss in gang.losses(run).items()}
    assert len(curve) == len(CHAIN)
    assert curve == _losses(trainings.reference[example])


@pytest.mark.parametrize("example", CONFIGS)
def test_every_example_learns(trainings: Trainings, example: str) -> None:
    """Otherwise equal curves would prove little."""
    curve = gang.losses(trainings.reference[example])
    assert len(curve) == TRAINING.max_steps
    assert curve[TRAINING.max_steps] < 0.97 * curve[1]


@pytest.mark.parametrize("name", NORMALISED)
def test_batch_norm_over_equally_many_samples_trains_as_in_one_process(
    trainings: Trainings, name: str
) -> None:
    assert gang.losses(trainings.normalised[name]) == _losses(trainings.normalised_reference)


@pytest.mark.parametrize("name", NORMALISED)
def test_running_statistics_are_those_of_one_process(trainings: Trainings, name: str) -> None:
    statistics, expected = (
        _statistics(trainings.normalised[name]),
        _statistics(trainings.normalised_reference),
    )
    assert set(statistics) == set(expected)
    for statistic, values in statistics.items():
        assert values.tolist() == pytest.approx(
            expected[statistic].tolist(), abs=STATISTICS_TOLERANCE
        ), statistic


def _statistics(run: TrainingRun) -> dict[str, torch.Tensor]:
    """The buffers in a run's last checkpoint."""
    recipe = from_factory(run.model.factory or "", run.model.config)
    tensors = dict(checkpoint.collect_model_state(recipe.module, frozenset()))
    home, job = Path(run.job_folder).parents[1], Path(run.job_folder).name
    checkpoint.load_state(
        JobFolder(home, job).checkpoints / f"step-{run.training.max_steps:08d}", tensors
    )
    return tensors


def test_a_batch_norm_model_is_refused_until_the_job_says_how_many_samples_it_normalises_over() -> (
    None
):
    for chosen in (plan(), plan(dp=1)):
        with pytest.raises(
            SpecError, match=r"training\.batch_norm_samples: the model has BatchNorm.*\n.*such as 2"
        ):
            _engine_of(_batch_norm_recipe(), chosen)


def test_the_global_batch_at_once_on_one_rank_normalises_over_all_of_it() -> None:
    layers = list_batch_norms(_batch_norm_recipe().module)
    prepare_batch_norms(layers, plan(dp=1, micro=gang.GLOBAL_BATCH), TrainingSpec(max_steps=1))
    assert layers
    assert all(isinstance(layer.forward, functools.partial) for layer in layers)


@pytest.mark.parametrize(
    ("chosen", "training", "message"),
    [
        (plan(micro=4), {"batch_norm_samples": 2}, "micro_batch_size = 4 samples together"),
        (
            plan(micro=2),
            {"batch_norm_samples": 2, "sync_batch_norm": True},
            "micro_batch_size x dp = 4",
        ),
        (plan(micro=1), {"batch_norm_samples": 2}, "micro_batch_size = 1 "),
    ],
)
def test_a_plan_that_normalises_over_another_number_of_samples_is_refused(
    chosen: Plan, training: dict[str, Any], message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        _engine_of(_batch_norm_recipe(), chosen, **training)


def test_batch_norm_in_evaluation_mode_needs_no_setting() -> None:
    """Batch norm in evaluation mode uses no batch statistics."""
    module = nn.BatchNorm2d(3)
    assert list_batch_norms(module) == [module]
    assert list_batch_norms(module.eval()) == []


def _batch_norm_recipe() -> Recipe:
    return from_factory(
        f"{EXAMPLES}/conv_classifier.py:build", {**CONFIGS["conv_classifier"], "norm": "batch"}
    )


def _engine_of(recipe: Recipe, chosen: Plan, **training: Any) -> Any:
    """The error of `build_engine` before it needs a process group."""
    changed = dataclasses.replace(gang.TRAINING, **training)
    run = TrainingRun(
        model=ModelSpec(factory="x.py:build"),
        data=DataSpec(),
        training=changed,
        plan=chosen,
        job_folder="",
        attempt_folder="",
        epoch=1,
        device="cpu",
    )
    return build_engine(run, recipe, torch.device("cpu"), None)


def _gan(**first: Any) -> tuple[Recipe, ...]:
    torch.manual_seed(0)
    recipe = from_factory(f"{EXAMPLES}/vocoder_gan.py:build", CONFIGS["vocoder_gan"])
    return dataclasses.replace(recipe, then=(), **first), *recipe.then


def test_in_a_recipes_turn_the_others_are_frozen() -> None:
    """Each engine leaves the other recipes' frozen parameters unchanged and without gradients."""
    recipes = _gan()
    recipe, turns = dataclasses.replace(recipes[0], then=recipes[1:]), []

    class Watching:
        def __init__(self, recipe: Recipe) -> None:
            self._own = recipe

        def step(self, step: int, micro_batches: Any, tokens: int) -> StepResult:
            for batch in micro_batches:
                self._own.loss_sum(self._own.module, batch).backward()
            trained = [
                part.name
                for part in recipes
                if all(p.requires_grad for p in part.module.parameters())
            ]
            with_gradients = [
                part.name
                for part in recipes
                if any(p.grad is not None for p in part.module.parameters())
            ]
            turns.append((step, tokens, trained, with_gradients))
            self._own.module.zero_grad()
            return StepResult(loss=2.0, grad_norm=3.0 if self._own.name == "generator" else 4.0)

        def state(self) -> Any:
            return {self._own.name: 0}

    engine = AlternatingEngine(
        recipe, plan(dp=1), gang.TRAINING, lambda turn_recipe, _training: Watching(turn_recipe)
    )
    result = engine.step(7, iter([recipe.dataset.batch([0, 1])]), 2)
    assert turns == [(7, 2, [name], [name]) for name in ("discriminator", "generator")]
    assert result == StepResult(loss=4.0, grad_norm=5.0)
    assert engine.state() == {"discriminator": 0, "generator": 0}
    assert all(p.requires_grad for turn_recipe in recipes for p in turn_recipe.module.parameters())


def test_every_recipe_has_its_own_learning_rate_and_frozen_parameters() -> None:
    recipes = _gan()
    recipe, built = dataclasses.replace(recipes[0], then=recipes[1:]), {}

    def build(turn_recipe: Recipe, training: TrainingSpec) -> Any:
        built[turn_recipe.name] = training

    job = dataclasses.replace(
        gang.TRAINING, freeze=(Freeze(parameters="generator.first.*", until_step=3),)
    )
    AlternatingEngine(recipe, plan(dp=1), job, build)
    assert built["discriminator"] == dataclasses.replace(job, learning_rate=1e-3, freeze=())
    names = ("first.weight", "first.bias")
    assert built["generator"].freeze == tuple(
        Freeze(parameters=name, until_step=3) for name in names
    )
    assert built["generator"].learning_rate == gang.TRAINING.learning_rate
    with pytest.raises(SpecError, match="no parameter matches"):
        AlternatingEngine(
            recipe,
            plan(dp=1),
            dataclasses.replace(job, freeze=(Freeze(parameters="first.*"),)),
            build,
        )


def test_several_recipes_run_data_parallel_only() -> None:
    recipes = _gan()
    tensor_parallel = Plan(engine=TORCH, layout=ParallelLayout(tp=2), micro_batch_size=8)
    with pytest.raises(SpecError, match="data parallel only"):
        _engine_of(dataclasses.replace(recipes[0], then=recipes[1:]), tensor_parallel)


def test_several_recipes_are_never_updated_in_the_backward_pass() -> None:
    recipes = _gan()
    inside = plan(dp=1, micro=gang.GLOBAL_BATCH, optimizer_in_backward=True)
    with pytest.raises(SpecError, match="gradients out of turn"):
        _engine_of(dataclasses.replace(recipes[0], then=recipes[1:]), inside)


@pytest.mark.parametrize(
    ("returned", "message"),
    [
        ("[]", "must return a Recipe"),
        ("[discriminator, 3]", "must return a Recipe"),
        ("[discriminator, discriminator]", "need a name each"),
        ("[discriminator, replace(generator, name='')]", "need a name each"),
        ("[discriminator, replace(generator, dataset=Tones(3, 8))]", "see the same samples"),
        (
            "[discriminator, replace(generator, module=discriminator.module)]",
            "a parameter belongs to one recipe",
        ),
        (
            "[discriminator, replace(generator, tensor_parallel={'first': 'colwise'})]",
            "data parallel only",
        ),
    ],
)
def test_recipes_that_cannot_train_in_turn_are_refused(
    tmp_path: Path, returned: str, message: str
) -> None:
    source = (EXAMPLES / "vocoder_gan.py").read_text()
    path = tmp_path / "model.py"
    path.write_text(
        f"{source}\n\ndef several(config):\n    from dataclasses import replace\n"
        f"    discriminator, generator = build(config)\n    return {returned}\n"
    )
    with pytest.raises(SpecError, match=message):
        from_factory(f"{path}:several", CONFIGS["vocoder_gan"])
