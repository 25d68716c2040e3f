"""Heads drawn from the installed transformers plan, and train two steps on the same batch: one rule for all."""

from __future__ import annotations

import dataclasses
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import transformers
from safetensors.torch import save_file

from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, ModelSpec, TrainingSpec
from orchestrator.training.build import build_engine, build_recipe
from orchestrator.training.models.hf_heads import SyntheticBatch
from orchestrator.training.models.hf_model import read_config
from orchestrator.training.tracing.model_builder import (
    Arithmetic,
    Request,
    build_recipe_on_meta_device,
)
from orchestrator.training.tracing.trace import trace_arithmetics
from tests.training import gang
from tests.training.heads import drawn, with_settings

SEED, BAR = 43, 0.8
MANY = 60
FEW = (
    ("fsmt", "FSMTForConditionalGeneration"),
)  # drawn by SEED, too: to list all heads takes 5 s of imports
FP32 = Arithmetic(precision=Precision.FP32, autocast=False)
NONE = ActivationCheckpointing.NONE


def request(config: dict[str, Any], **changes: Any) -> Request:
    plain = Request(
        model=ModelSpec(hf=config),
        training=TrainingSpec(),
        family="head",
        sequence_length=32,
        arithmetics=(FP32,),
        modes=(NONE,),
        any_samples=True,
    )
    return dataclasses.replace(plain, **changes)


def trains(config: dict[str, Any], home: Path) -> None:
    """Train two steps by the torch engine, on the batch that the head takes. Raises where it does not."""
    recipe = build_recipe_on_meta_device(
        request(config),
        FP32,
        transformers.CONFIG_MAPPING[config["model_type"]].from_dict(dict(config)),
    )
    data = DataSpec(sequence_length=32)
    if isinstance(recipe.dataset, SyntheticBatch):
        head: Any = getattr(transformers, config["architectures"][0])
        recipe.dataset.fit(2, head._from_config(recipe.module.config, dtype=torch.float32).train())
        data = DataSpec(tensors=(str(home / "samples.safetensors"),))
        save_file(
            {
                name: tensor.clone().contiguous()
                for name, tensor in recipe.dataset.make_named_tensors(2).items()
            },
            data.tensors[0],
        )
    run = gang.training_run(
        home, "head", gang.torch_plan(2), (), model=ModelSpec(hf=config), data=data
    )
    recipe = build_recipe(run) if data.tensors else recipe
    engine = build_engine(run, recipe, torch.device("cpu"), None)
    for step in range(2):
        loss = engine.step(step, [recipe.dataset.batch(range(2))], 2).loss
        assert loss == loss, "not a number"


@pytest.fixture(scope="module", autouse=True)
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Any:
    store = dist.FileStore(str(tmp_path_factory.mktemp("store") / "store"), 1)
    dist.init_process_group("gloo", store=store, rank=0, world_size=1)
    yield
    dist.destroy_process_group()


@pytest.mark.timeout(3600)
@pytest.mark.parametrize("count", [len(FEW), pytest.param(MANY, marks=pytest.mark.long)])
def test_drawn_heads_plan_and_train_two_steps_or_are_refused_with_the_factory_to_write(
    tmp_path: Path, count: int
) -> None:
    failures, refused = {}, 0
    heads = islice(drawn(SEED), MANY) if count == MANY else with_settings(FEW)
    for number, (head, config) in enumerate(heads):
        home = tmp_path / str(number)
        home.mkdir()
        try:
            assert trace_arithmetics(request(config))[0] is not None
        except SpecError as error:
            failures |= (
                {} if "factory" in error.hint else {head: f"refused without a way on: {error}"}
            )
            refused += 1
            continue
        except Exception as error:
            failures[head] = f"no plan: {type(error).__name__}: {error}"
            continue
        try:
            trains(config, home)
        except Exception as error:
            failures[head] = f"planned, but did not train: {type(error).__name__}: {error}"
    bar = BAR * count if count == MANY else 1
    assert not any("refused" in text for text in failures.values()), failures
    assert count - refused - len(failures) >= bar, (refused, failures)


@pytest.mark.parametrize("family", ["bert", "distilbert", "wav2vec2"])
def test_any_family_takes_its_number_of_labels_inline(family: str) -> None:
    assert read_config({"model_type": family, "num_labels": 5}).num_labels == 5
