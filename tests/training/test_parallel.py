"""Laws of tensor and pipeline parallelism: same values and names, no parts of other ranks.

`test_equality.py` holds the losses.
"""

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

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, ZeroStage
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DecoderSpec
from orchestrator.specs.plan import Plan
from orchestrator.training.contract.recipe import Recipe, materialise
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines import pipeline
from orchestrator.training.engines.recompute import apply_checkpointing, compile_layers
from orchestrator.training.engines.tensor_parallel import shard_recipe
from orchestrator.training.models.decoder import make_decoder_recipe
from tests.training import gang
from tests.training.gang import GLOBAL_BATCH

MICRO_BATCH = 2  # the same everywhere, since dropout is on (but over tensor-parallel ranks)
DECODER = dataclasses.replace(
    gang.DECODER, num_hidden_layers=3, tie_word_embeddings=True, dropout=0.1
)
FOUR_LAYERS = dataclasses.replace(DECODER, num_hidden_layers=4)
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE


def plan(
    *,
    dp: int = 1,
    tp: int = 1,
    pp: int = 1,
    stage: int = 0,
    micro: int = MICRO_BATCH,
    **fields: Any,
) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=dp, tp=tp, pp=pp),
        zero_stage=ZeroStage(stage),
        micro_batch_size=micro,
        gradient_accumulation_steps=GLOBAL_BATCH // dp // micro,
        **fields,
    )


@pytest.mark.parametrize(
    ("mode", "allowed"), [(FULL, False), (SELECTIVE, False), (ActivationCheckpointing.NONE, True)]
)
def test_recomputed_batch_norms_are_not_compiled(
    mode: ActivationCheckpointing, allowed: bool
) -> None:
    layers = [nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2))]
    apply_checkpointing(layers, mode)
    with (
        contextlib.nullcontext()
        if allowed
        else pytest.raises(SpecError, match="cannot be compiled")
    ):
        compile_layers(layers)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


def _recipe(tmp_path: Path, spec: DecoderSpec = DECODER) -> Recipe:
    return make_decoder_recipe(
        spec, TextDataset(gang.ragged_text(tmp_path), gang.SEQUENCE_LENGTH), seed=0
    )


def _materialise(stages: tuple[Recipe, ...]) -> None:
    for stage in stages:
        materialise(stage.module, stage.module, stage, torch.device("cpu"))


@pytest.mark.parametrize("per_rank", [1, 2])
def test_the_ranks_of_a_pipeline_share_the_parameters_out_and_make_no_others(
    tmp_path: Path, per_rank: int
) -> None:
    """Values and names are those of a single process; tied ends exist on both stages."""
    whole = _recipe(tmp_path, FOUR_LAYERS)
    materialise(whole.module, whole.module, whole, torch.device("cpu"))
    expected = dict(whole.module.named_parameters())
    chosen = plan(pp=2, micro=1, pipeline_stages_per_rank=per_rank)
    owners: dict[str, int] = dict.fromkeys(expected, 0)
    for rank in range(2):
        recipe = _recipe(tmp_path, FOUR_LAYERS)
        share = pipeline.split_model(recipe, chosen, rank)
        assert len(share.stages) == per_rank
        _materialise(share.stages)
        for name, parameter in recipe.module.named_parameters():
            assert torch.equal(parameter, expected[share.names[name]]), name
            owners[share.names[name]] += 1
        assert share.shared == ("embed_tokens.weight",)
        for stage in share.stages:
            assert {id(tensor) for tensor in stage.module.parameters()} <= {
                id(tensor) for tensor in recipe.module.parameters()
            }
    assert owners == {name: 2 if name == "embed_tokens.weight" else 1 for name in expected}


@pytest.mark.parametrize(
    ("ends", "per_rank", "expected"),
    [((0, 0), 1, (3, 4)), ((5, 2), 1, (5, 2)), ((3, 1), 2, (5, 2))],
)
def test_the_ends_of_a_pipeline_have_as_many_layers_as_its_plan_says(
    tmp_path: Path, ends: tuple[int, int], per_rank: int, expected: tuple[int, int]
) -> None:
    settings = dict(zip(("first_stage_layers", "last_stage_layers"), ends, strict=True))
    chosen, seven = (
        plan(pp=2, micro=1, pipeline_stages_per_rank=per_rank, **settings),
        {"num_hidden_layers": 7},
    )
    shares = [
        pipeline.split_model(_recipe(tmp_path, dataclasses.replace(DECODER, **seven)), chosen, rank)
        for rank in range(2)
    ]
    assert tuple(sum(len(stage.layers) for stage in share.stages) for share in shares) == expected


def test_a_materialised_model_frees_the_stages_of_other_ranks(tmp_path: Path) -> None:
    recipe = _recipe(tmp_path, FOUR_LAYERS)
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    everything = {
        name: weakref.ref(parameter) for name, parameter in recipe.module.named_parameters()
    }
    pipeline.split_model(recipe, plan(pp=2, micro=1), 1)
    alive = {name for name, parameter in everything.items() if parameter() is not None}
    assert alive == {
        name for name in everything if name.startswith(("layers.2", "layers.3", "norm", "embed"))
    }


def test_stages_one_after_another_give_the_loss_of_the_whole_model(tmp_path: Path) -> None:
    spec = dataclasses.replace(FOUR_LAYERS, dropout=0.0)
    whole = _recipe(tmp_path, spec)
    materialise(whole.module, whole.module, whole, torch.device("cpu"))
    batch = whole.dataset.batch([0, 1])
    stages: dict[int, Recipe] = {}
    for rank in range(2):
        share = pipeline.split_model(
            _recipe(tmp_path, spec), plan(pp=2, micro=1, pipeline_stages_per_rank=2), rank
        )
        _materialise(share.stages)
        stages |= {rank + 2 * turn: stage for turn, stage in enumerate(share.stages)}
    x, ends = batch[0], stages[3].stages
    assert ends
    for index in range(4):
        x = ends.hidden(stages[index].module, x)
    loss = ends.loss_sum(stages[3].module, x, batch[1]).item()
    assert loss == pytest.approx(whole.loss_sum(whole.module, batch).item())


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
    ("change", "pp", "message"),
    [
        (_without_stages, 2, "no pipeline stages"),
        (_with_a_parameter_of_no_stage, 2, "no pipeline stage"),
        (_with_a_weight_shared_by_two_layers, 4, "may share"),
        (lambda recipe: recipe, 8, "needs a layer"),
    ],
)
def test_a_model_that_cannot_be_cut_into_stages_is_refused(
    tmp_path: Path, change: Any, pp: int, message: str
) -> None:
    spec = dataclasses.replace(FOUR_LAYERS, tie_word_embeddings=False)
    with pytest.raises(SpecError, match=message):
        pipeline.split_model(change(_recipe(tmp_path, spec)), plan(pp=pp, micro=1), 1)


def test_layers_of_the_first_and_the_last_stage_may_share_a_weight(tmp_path: Path) -> None:
    recipe = _with_a_weight_shared_by_two_layers(_recipe(tmp_path, FOUR_LAYERS))
    share = pipeline.split_model(recipe, plan(pp=2, micro=1), 0)
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
    with pytest.raises(torch.OutOfMemoryError, match="full"), pipeline.unwrapping_out_of_memory():
        step()


@pytest.mark.usefixtures("four_ranks")
def test_every_parameter_is_a_dtensor_with_this_ranks_part_of_the_whole_values(
    tmp_path: Path,
) -> None:
    spec = dataclasses.replace(DECODER, num_key_value_heads=4)
    whole, cut = _recipe(tmp_path, spec), _recipe(tmp_path, spec)
    mesh = init_device_mesh("cpu", (4,), mesh_dim_names=("tp",))
    placed = shard_recipe(cut, mesh, MICRO_BATCH, gang.SEQUENCE_LENGTH)
    for recipe, place in ((whole, None), (cut, placed.place)):
        materialise(recipe.module, recipe.module, recipe, torch.device("cpu"), place)
    expected = dict(whole.module.named_parameters())
    parameters = dict(cut.module.named_parameters())
    assert parameters.keys() == expected.keys()
    assert cut.module.lm_head.weight is cut.module.embed_tokens._parameters["weight"]  # type: ignore[union-attr]
    for name, parameter in parameters.items():
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
    ("spec", "change", "message"),
    [
        (
            {},
            lambda recipe: dataclasses.replace(recipe, tensor_parallel={}),
            "no tensor-parallel plan",
        ),
        ({}, lambda recipe: recipe, "num_key_value_heads = 2"),
        ({"num_key_value_heads": 4, "vocab_size": 258}, lambda recipe: recipe, "vocab_size = 258"),
        (
            {"num_key_value_heads": 4, "intermediate_size": 66},
            lambda recipe: recipe,
            "intermediate_size = 66",
        ),
        (
            {"num_key_value_heads": 4},
            lambda recipe: _plan_of(recipe, __nowhere="colwise"),
            "no module matches",
        ),
        (
            {"num_key_value_heads": 4},
            lambda recipe: _plan_of(recipe, norm="diagonal"),
            "no such word",
        ),
        (
            {"num_key_value_heads": 4},
            lambda recipe: _plan_of(recipe, layers="colwise"),
            "have a weight",
        ),
        (
            {"num_key_value_heads": 4},
            lambda recipe: _plan_of(recipe, lm_head="rowwise"),
            "two ways",
        ),
    ],
)
def test_a_model_that_cannot_be_cut_over_tensor_parallel_ranks_is_refused(
    tmp_path: Path, spec: dict[str, int], change: Any, message: str
) -> None:
    recipe = change(_recipe(tmp_path, dataclasses.replace(DECODER, **spec)))  # type: ignore[arg-type]
    with pytest.raises(SpecError, match=message):
        shard_recipe(
            recipe,
            init_device_mesh("cpu", (4,), mesh_dim_names=("tp",)),
            MICRO_BATCH,
            gang.SEQUENCE_LENGTH,
        )
