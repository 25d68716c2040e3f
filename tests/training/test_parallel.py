"""Laws of tensor, pipeline and hybrid-sharded parallelism: same losses and names, no parts of other ranks."""

from __future__ import annotations

import contextlib
import dataclasses
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B
from torch.distributed.tensor import DTensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, Precision, ZeroStage
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DecoderSpec, Freeze, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from orchestrator.training.contract.recipe import Recipe, materialise
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines import pipeline
from orchestrator.training.engines.recompute import compile_layers, recompute
from orchestrator.training.engines.tensor_parallel import tensor_parallel
from orchestrator.training.models.decoder import decoder_recipe
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH, Part

FP32_TOLERANCE = 2e-6  # measured: 1.1e-6
LOW_TOLERANCE = 2e-3  # measured: 1.6e-3
MICRO_BATCH = 2  # the same everywhere, since dropout is on (but over tensor-parallel ranks)
RESUME_STEP = 4
DECODER = dataclasses.replace(gang.DECODER, num_hidden_layers=3, tie_word_embeddings=True, dropout=0.1)
FOUR_LAYERS = dataclasses.replace(DECODER, num_hidden_layers=4)
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE
BF16, FP16 = Precision.BF16, Precision.FP16


def plan(*, dp: int = 1, tp: int = 1, pp: int = 1, stage: int = 0, micro: int = MICRO_BATCH, **fields: Any) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=dp, tp=tp, pp=pp),
        zero_stage=ZeroStage(stage),
        micro_batch_size=micro,
        gradient_accumulation_steps=GLOBAL_BATCH // dp // micro,
        **fields,
    )


ON_TWO_RANKS = {
    "tp": plan(tp=2, activation_checkpointing=SELECTIVE),
    "pp": plan(pp=2),
    "pp deep first": plan(pp=2, first_stage_layers=2, last_stage_layers=1),
}
ON_FOUR_RANKS = {"pp x tp": plan(tp=2, pp=2)}
LONG = {
    2: {
        "tp fsdp2 fp16": plan(tp=2, stage=3, activation_checkpointing=FULL, precision=FP16),
        "pp fsdp2 bf16": plan(pp=2, stage=2, activation_checkpointing=FULL, precision=BF16),
        "tp bf16": plan(tp=2, precision=BF16),
        "tp fp16": plan(tp=2, precision=FP16),
        "tp stage 2": plan(tp=2, stage=2, activation_checkpointing=SELECTIVE),
        "pp fp16": plan(pp=2, precision=FP16, activation_checkpointing=SELECTIVE),
        "pp fsdp2": plan(pp=2, stage=2),
        "pp fsdp2 fp16": plan(pp=2, stage=2, precision=FP16),
    },
    4: {
        "tp x fsdp2": plan(dp=2, tp=2, stage=3),
        "pp x ddp": plan(dp=2, pp=2),
        "hsdp": plan(dp=4, dp_replicate=2, stage=3),
        "hsdp stage 2 bf16": plan(dp=4, dp_replicate=2, stage=2, precision=BF16),
        "tp 2 x fsdp2 stage 2": plan(dp=2, tp=2, stage=2, precision=BF16, activation_checkpointing=FULL),
        "pp x fsdp2": plan(dp=2, pp=2, stage=2, activation_checkpointing=SELECTIVE),
        "pp x fsdp2 fp16": plan(dp=2, pp=2, stage=2, precision=FP16),
        "pp x tp fsdp2": plan(tp=2, pp=2, stage=2),
        "pp x tp bf16": plan(tp=2, pp=2, precision=BF16),
        "interleaved x ddp": plan(dp=2, pp=2, micro=1, pipeline_stages_per_rank=2),
        "interleaved x fsdp2": plan(dp=2, pp=2, stage=2, micro=1, pipeline_stages_per_rank=2),
        "interleaved x tp": plan(tp=2, pp=2, micro=1, pipeline_stages_per_rank=2),
        "pp 4": plan(pp=4),
        "pp 4 with one layer last": plan(pp=4, last_stage_layers=1),
        "pp x fsdp2 deep first": plan(dp=2, pp=2, stage=2, first_stage_layers=4, last_stage_layers=1),
        "interleaved with fewer micro-batches than stages": plan(
            dp=2, pp=2, pipeline_stages_per_rank=2, first_stage_layers=2, last_stage_layers=1
        ),
        "interleaved x fsdp2 with fewer micro-batches than stages": plan(
            dp=2, pp=2, stage=2, pipeline_stages_per_rank=2, activation_checkpointing=SELECTIVE
        ),
        "interleaved x tp with fewer micro-batches than stages": plan(tp=2, pp=2, micro=4, pipeline_stages_per_rank=2),
    },
    8: {
        "pp x dp x tp": plan(dp=2, tp=2, pp=2, stage=2),
        "hsdp x tp": plan(dp=4, tp=2, dp_replicate=2, stage=3),
        "pp x hsdp": plan(dp=4, pp=2, dp_replicate=2, stage=2, micro=1),
        "interleaved x dp x tp bf16": plan(
            dp=2, tp=2, pp=2, stage=2, micro=1, pipeline_stages_per_rank=2, precision=BF16
        ),
    },
}


def _run(home: Path, job: str, chosen: Plan, text: tuple[str, ...], spec: DecoderSpec, **training: Any) -> TrainingRun:
    changed = dataclasses.replace(gang.TRAINING, **training)
    return gang.training_run(home, job, chosen, text, model=ModelSpec(decoder=spec), training=changed)


def _drawing_alike(spec: DecoderSpec, chosen: Plan) -> DecoderSpec:
    """The decoder with dropout where the plan draws the masks of one process: not for a rank's own tokens."""
    return dataclasses.replace(spec, dropout=0.0) if chosen.layout.tp > 1 else spec


def _draws(run: TrainingRun) -> bool:
    assert run.model.decoder
    return run.model.decoder.dropout > 0


def _differences(run: TrainingRun, reference: TrainingRun) -> dict[int, float]:
    expected = gang.losses(reference)
    return {step: abs(loss - expected[step]) for step, loss in gang.losses(run).items()}


def _check(run: TrainingRun, reference: TrainingRun, steps: int = gang.TRAINING.max_steps) -> None:
    found = _differences(run, reference)
    assert len(found) == steps, run.plan
    assert max(found.values()) < (FP32_TOLERANCE if run.plan.precision is Precision.FP32 else LOW_TOLERANCE), run.plan


def _step_folder(home: Path, job: str) -> Path:
    return JobFolder(home, job).checkpoints / f"step-{RESUME_STEP:08d}"


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Runs by name: one process, every layout from the start, layouts from one process's checkpoint, and back."""

    reference: TrainingRun
    undropped: TrainingRun  # one process without dropout
    fresh: dict[str, TrainingRun]
    resumed: dict[str, TrainingRun]
    back: dict[str, TrainingRun]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    home = tmp_path_factory.mktemp("home")
    text = gang.ragged_text(home)
    plans = ON_TWO_RANKS | ON_FOUR_RANKS
    specs = {name: _drawing_alike(DECODER, chosen) for name, chosen in plans.items()}
    reference = _run(home, "reference", plan(), text, DECODER)
    undropped = _run(home, "undropped", plan(), text, dataclasses.replace(DECODER, dropout=0.0))
    fresh = {name: _run(home, name.replace(" ", "-"), chosen, text, specs[name]) for name, chosen in plans.items()}
    resumed = {
        name: _run(home, f"to-{name}".replace(" ", "-"), chosen, text, specs[name]) for name, chosen in plans.items()
    }
    back = {name: _run(home, f"from-{name}".replace(" ", "-"), plan(), text, specs[name]) for name in plans}
    gang.launch([Part(run=reference), Part(run=undropped)])
    for names in (ON_TWO_RANKS, ON_FOUR_RANKS):
        parts = [Part(run=fresh[name]) for name in names]
        sources = {name: _step_folder(home, "reference" if specs[name].dropout else "undropped") for name in names}
        gang.launch([*parts, *(Part(run=resumed[name], start_from=sources[name]) for name in names)])
    gang.launch([Part(run=back[name], start_from=_step_folder(home, name.replace(" ", "-"))) for name in plans])
    return Curves(reference=reference, undropped=undropped, fresh=fresh, resumed=resumed, back=back)


@pytest.mark.parametrize("name", [*ON_TWO_RANKS, *ON_FOUR_RANKS])
def test_every_layout_gives_the_losses_of_one_process(curves: Curves, name: str) -> None:
    _check(curves.fresh[name], curves.reference if _draws(curves.fresh[name]) else curves.undropped)


@pytest.mark.parametrize("name", [*ON_TWO_RANKS, *ON_FOUR_RANKS])
def test_a_training_goes_on_in_another_layout_and_back(curves: Curves, name: str) -> None:
    for run in (curves.resumed[name], curves.back[name]):
        reference = curves.reference if _draws(run) else curves.undropped
        _check(run, reference, steps=gang.TRAINING.max_steps - RESUME_STEP)


def test_a_training_goes_on_with_another_number_of_layers_recomputed_in_full(curves: Curves, tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    first, then = (
        plan(dp=2, stage=3, activation_checkpointing=SELECTIVE, full_checkpointing_layers=layers) for layers in (1, 2)
    )
    before, after = _run(tmp_path, "first", first, text, DECODER), _run(tmp_path, "then", then, text, DECODER)
    gang.launch([Part(run=before), Part(run=after, start_from=_step_folder(tmp_path, "first"))])
    _check(before, curves.reference)
    _check(after, curves.reference, steps=gang.TRAINING.max_steps - RESUME_STEP)


def test_a_training_goes_on_with_other_layers_in_its_stages(curves: Curves, tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    before, after = (_run(tmp_path, name, ON_TWO_RANKS[name], text, DECODER) for name in ("pp deep first", "pp"))
    gang.launch([Part(run=before), Part(run=after, start_from=_step_folder(tmp_path, "pp deep first"))])
    _check(before, curves.reference)
    _check(after, curves.reference, steps=gang.TRAINING.max_steps - RESUME_STEP)


def test_the_reference_learns(curves: Curves) -> None:
    """Otherwise equal curves would prove little."""
    found = gang.losses(curves.reference)
    assert found[gang.TRAINING.max_steps] < found[1] - 0.2


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", LONG)
def test_every_layout_gives_the_losses_of_one_process_at_length(tmp_path: Path, ranks: int) -> None:
    text = gang.ragged_text(tmp_path)
    spec = dataclasses.replace(FOUR_LAYERS, num_hidden_layers=5)
    runs = [
        _run(tmp_path, f"job-{n}", chosen, text, _drawing_alike(spec, chosen))
        for n, chosen in enumerate(LONG[ranks].values())
    ]
    reference = {
        (micro, run.model): _run(tmp_path, f"reference-{n}", plan(micro=micro), text, run.model.decoder)
        for n, ((micro, _), run) in enumerate({(each.plan.micro_batch_size, each.model): each for each in runs}.items())
    }
    gang.launch([Part(run=run) for run in reference.values()])
    gang.launch([Part(run=run) for run in runs], timeout_s=1500)
    for run in runs:
        _check(run, reference[run.plan.micro_batch_size, run.model])


@pytest.mark.long
@pytest.mark.timeout(900)
def test_compiled_layers_give_the_losses_of_layers_that_are_not(tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    spec = dataclasses.replace(DECODER, num_hidden_layers=2, dropout=0.0)
    reference = _run(tmp_path, "reference", plan(), text, spec)
    layouts = (
        plan(dp=2, activation_checkpointing=SELECTIVE),
        plan(dp=2, stage=3, activation_checkpointing=FULL, precision=BF16),
        plan(tp=2),
        plan(tp=2, stage=3, activation_checkpointing=SELECTIVE),
        plan(pp=2, stage=2),
    )
    runs = [_run(tmp_path, f"job-{n}", each, text, spec, compile=True) for n, each in enumerate(layouts)]
    gang.launch([Part(run=reference)])
    gang.launch([Part(run=run) for run in runs], timeout_s=800)
    for run in runs:
        _check(run, reference)


@pytest.mark.parametrize(("mode", "allowed"), [(FULL, False), (SELECTIVE, False), (ActivationCheckpointing.NONE, True)])
def test_recomputed_batch_norms_are_not_compiled(mode: ActivationCheckpointing, allowed: bool) -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]
    recompute(layers, mode)
    with contextlib.nullcontext() if allowed else pytest.raises(SpecError, match="cannot be compiled"):
        compile_layers(layers)


@pytest.mark.long
@pytest.mark.timeout(900)
def test_stages_that_train_nothing_at_first_or_at_all_change_nothing(tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    spec = dataclasses.replace(FOUR_LAYERS, tie_word_embeddings=False, dropout=0.0)
    frozen_first = (Freeze(parameters="embed*", until_step=3), Freeze(parameters="layers.[01].*", until_step=5))
    frozen_last = tuple(Freeze(parameters=name) for name in ("layers.[23].*", "norm*", "lm_head*"))
    for number, freeze in enumerate((frozen_first, frozen_last)):
        reference = _run(tmp_path, f"reference-{number}", plan(), text, spec, freeze=freeze)
        layouts = (plan(dp=2, pp=2), plan(dp=2, pp=2, stage=2), plan(pp=4), plan(pp=2, tp=2))
        runs = [_run(tmp_path, f"job-{number}-{n}", each, text, spec, freeze=freeze) for n, each in enumerate(layouts)]
        gang.launch([Part(run=reference)])
        gang.launch([Part(run=run) for run in runs], timeout_s=400)
        for run in runs:
            _check(run, reference)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def _recipe(tmp_path: Path, spec: DecoderSpec = DECODER) -> Recipe:
    return decoder_recipe(spec, TextDataset(gang.ragged_text(tmp_path), gang.SEQUENCE_LENGTH), seed=0)


def _materialise(stages: tuple[Recipe, ...]) -> None:
    for stage in stages:
        materialise(stage.module, stage.module, stage, torch.device("cpu"))


@pytest.mark.parametrize("per_rank", [1, 2])
def test_the_ranks_of_a_pipeline_share_the_parameters_out_and_make_no_others(tmp_path: Path, per_rank: int) -> None:
    """With the values and names of one process; tied ends exist on both stages."""
    whole = _recipe(tmp_path, FOUR_LAYERS)
    materialise(whole.module, whole.module, whole, torch.device("cpu"))
    expected = dict(whole.module.named_parameters())
    chosen = plan(pp=2, micro=1, pipeline_stages_per_rank=per_rank)
    found: dict[str, int] = dict.fromkeys(expected, 0)
    for rank in range(2):
        recipe = _recipe(tmp_path, FOUR_LAYERS)
        share = pipeline.cut(recipe, chosen, rank)
        assert len(share.stages) == per_rank
        _materialise(share.stages)
        for name, parameter in recipe.module.named_parameters():
            assert torch.equal(parameter, expected[share.names[name]]), name
            found[share.names[name]] += 1
        assert share.shared == ("embed_tokens.weight",)
        for stage in share.stages:
            assert {id(each) for each in stage.module.parameters()} <= {id(each) for each in recipe.module.parameters()}
    assert found == {name: 2 if name == "embed_tokens.weight" else 1 for name in expected}


@pytest.mark.parametrize(
    ("ends", "per_rank", "expected"), [((0, 0), 1, (3, 4)), ((5, 2), 1, (5, 2)), ((3, 1), 2, (5, 2))]
)
def test_the_ends_of_a_pipeline_have_as_many_layers_as_its_plan_says(
    tmp_path: Path, ends: tuple[int, int], per_rank: int, expected: tuple[int, int]
) -> None:
    said = dict(zip(("first_stage_layers", "last_stage_layers"), ends, strict=True))
    chosen, seven = plan(pp=2, micro=1, pipeline_stages_per_rank=per_rank, **said), {"num_hidden_layers": 7}
    shares = [pipeline.cut(_recipe(tmp_path, dataclasses.replace(DECODER, **seven)), chosen, rank) for rank in range(2)]
    assert tuple(sum(len(stage.layers) for stage in share.stages) for share in shares) == expected


def test_a_materialised_model_frees_the_stages_of_other_ranks(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, FOUR_LAYERS)
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    everything = {name: weakref.ref(parameter) for name, parameter in recipe.module.named_parameters()}
    pipeline.cut(recipe, plan(pp=2, micro=1), 1)
    alive = {name for name, parameter in everything.items() if parameter() is not None}
    assert alive == {name for name in everything if name.startswith(("layers.2", "layers.3", "norm", "embed"))}


def test_stages_one_after_another_give_the_loss_of_the_whole_model(tmp_path: Path) -> None:
    spec = dataclasses.replace(FOUR_LAYERS, dropout=0.0)
    whole = _recipe(tmp_path, spec)
    materialise(whole.module, whole.module, whole, torch.device("cpu"))
    batch = whole.dataset.batch([0, 1])
    stages: dict[int, Recipe] = {}
    for rank in range(2):
        share = pipeline.cut(_recipe(tmp_path, spec), plan(pp=2, micro=1, pipeline_stages_per_rank=2), rank)
        _materialise(share.stages)
        stages |= {rank + 2 * turn: stage for turn, stage in enumerate(share.stages)}
    x, ends = batch[0], stages[3].stages
    assert ends
    for index in range(4):
        x = ends.hidden(stages[index].module, x)
    found = ends.loss_sum(stages[3].module, x, batch[1]).item()
    assert found == pytest.approx(whole.loss_sum(whole.module, batch).item())


def _without_stages(recipe: Recipe) -> Recipe:
    return dataclasses.replace(recipe, stages=None)


def _with_a_parameter_of_no_stage(recipe: Recipe) -> Recipe:
    recipe.module.register_parameter("extra", nn.Parameter(torch.empty(1, device="meta")))
    return recipe


def _with_a_weight_shared_by_two_layers(recipe: Recipe) -> Recipe:
    first, second = (recipe.layers[index].mlp.up_proj for index in (1, 3))  # type: ignore[union-attr]
    second.weight = first.weight  # type: ignore[union-attr,assignment]
    return recipe


@pytest.mark.parametrize(
    ("change", "pp", "words"),
    [
        (_without_stages, 2, "no pipeline stages"),
        (_with_a_parameter_of_no_stage, 2, "no pipeline stage"),
        (_with_a_weight_shared_by_two_layers, 4, "may share"),
        (lambda recipe: recipe, 8, "needs a layer"),
    ],
)
def test_a_model_that_cannot_be_cut_into_stages_is_refused(tmp_path: Path, change: Any, pp: int, words: str) -> None:
    spec = dataclasses.replace(FOUR_LAYERS, tie_word_embeddings=False)
    with pytest.raises(SpecError, match=words):
        pipeline.cut(change(_recipe(tmp_path, spec)), plan(pp=pp, micro=1), 1)


def test_layers_of_the_first_and_the_last_stage_may_share_a_weight(tmp_path: Path) -> None:
    recipe = _with_a_weight_shared_by_two_layers(_recipe(tmp_path, FOUR_LAYERS))
    share = pipeline.cut(recipe, plan(pp=2, micro=1), 0)
    assert set(share.shared) == {"embed_tokens.weight", "layers.1.mlp.up_proj.weight"}


@pytest.mark.usefixtures("four_ranks")
def test_an_out_of_memory_error_inside_a_stage_stays_one() -> None:
    """torch's schedule wraps it in a RuntimeError, which the guard would not recognise."""

    class Full(nn.Module):
        calls = 0

        def forward(self, x: Tensor) -> Tensor:
            self.calls += 1
            if self.calls > 1:  # the first call finds out shapes
                raise torch.OutOfMemoryError("full")
            return (x * torch.ones(1, requires_grad=True)).sum().reshape(1)

    def step() -> None:
        stage = PipelineStage(Full(), 0, 1, torch.device("cpu"), group=dist.new_group([1]))
        schedule = Schedule1F1B(stage, 1, loss_fn=lambda out, _: out.sum(), scale_grads=False)
        schedule.step(torch.ones(1), target=torch.ones(1))

    with pytest.raises(RuntimeError, match="failed to run forward") as wrapped:
        step()
    assert not isinstance(wrapped.value, torch.OutOfMemoryError)
    with pytest.raises(torch.OutOfMemoryError, match="full"), pipeline.own_out_of_memory():
        step()


@pytest.mark.usefixtures("four_ranks")
def test_every_parameter_is_a_dtensor_with_this_ranks_part_of_the_whole_values(tmp_path: Path) -> None:
    spec = dataclasses.replace(DECODER, num_key_value_heads=4)
    whole, cut = _recipe(tmp_path, spec), _recipe(tmp_path, spec)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    placed = tensor_parallel(cut, mesh, MICRO_BATCH, gang.SEQUENCE_LENGTH)
    for recipe, place in ((whole, None), (cut, placed.place)):
        materialise(recipe.module, recipe.module, recipe, torch.device("cpu"), place)
    expected = dict(whole.module.named_parameters())
    found = dict(cut.module.named_parameters())
    assert found.keys() == expected.keys()
    assert cut.module.lm_head.weight is cut.module.embed_tokens._parameters["weight"]  # type: ignore[union-attr]
    for name, parameter in found.items():
        assert isinstance(parameter, DTensor)
        axis = placed.axes[name]
        part = expected[name] if axis is None else expected[name].chunk(4, dim=axis)[1]
        assert torch.equal(parameter.to_local(), part), name
        assert parameter.to_local().untyped_storage().nbytes() == part.numel() * 4, name
    assert sum(axis is None for axis in placed.axes.values()) == 2 * 3 + 1  # norms


def _plan_of(recipe: Recipe, **entries: str) -> Recipe:
    renamed = {pattern.replace("__", "*"): word for pattern, word in entries.items()}
    return dataclasses.replace(recipe, tensor_parallel={**recipe.tensor_parallel, **renamed})


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("spec", "change", "words"),
    [
        ({}, lambda recipe: dataclasses.replace(recipe, tensor_parallel={}), "no tensor-parallel plan"),
        ({}, lambda recipe: recipe, "num_key_value_heads = 2"),
        ({"num_key_value_heads": 4, "vocab_size": 258}, lambda recipe: recipe, "vocab_size = 258"),
        ({"num_key_value_heads": 4, "intermediate_size": 66}, lambda recipe: recipe, "intermediate_size = 66"),
        ({"num_key_value_heads": 4}, lambda recipe: _plan_of(recipe, __nowhere="colwise"), "no module matches"),
        ({"num_key_value_heads": 4}, lambda recipe: _plan_of(recipe, norm="diagonal"), "no such word"),
        ({"num_key_value_heads": 4}, lambda recipe: _plan_of(recipe, layers="colwise"), "have a weight"),
        ({"num_key_value_heads": 4}, lambda recipe: _plan_of(recipe, lm_head="rowwise"), "two ways"),
    ],
)
def test_a_model_that_cannot_be_cut_over_tensor_parallel_ranks_is_refused(
    tmp_path: Path, spec: dict[str, int], change: Any, words: str
) -> None:
    recipe = change(_recipe(tmp_path, dataclasses.replace(DECODER, **spec)))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=words):
        tensor_parallel(
            recipe, init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)), MICRO_BATCH, gang.SEQUENCE_LENGTH
        )
