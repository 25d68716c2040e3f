"""Laws of context parallelism: the losses of one process, and messages for attention alone."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, Precision, ZeroStage
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job.model import DataSpec, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from orchestrator.training.contract.context import Context
from orchestrator.training.contract.recipe import materialise
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines.recompute import recompute
from orchestrator.training.engines.torch_engine import TorchEngine
from orchestrator.training.models.decoder import decoder_recipe
from tests.training import gang, tiny_hf
from tests.training.gang import GLOBAL_BATCH, Part

FP32_TOLERANCE = 2e-6
LOW_TOLERANCE = 2e-3
RESUME_STEP = 4
# Of four context-parallel ranks two have each key-value head.
DECODER = dataclasses.replace(gang.DECODER, num_hidden_layers=2, num_key_value_heads=2, tie_word_embeddings=True)
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE


def plan(*, stage: int = 0, micro: int = 1, length: int = gang.SEQUENCE_LENGTH, **fields: Any) -> Plan:
    layout = ParallelLayout(**{axis: fields.pop(axis) for axis in ("dp", "cp", "tp", "pp") if axis in fields})
    return Plan(
        engine=Engine.TORCH,
        layout=layout,
        zero_stage=ZeroStage(stage),
        micro_batch_size=micro,
        gradient_accumulation_steps=GLOBAL_BATCH // layout.dp // micro,
        sequence_length=length,
        **fields,
    )


PLANS = {
    2: {
        "alone": plan(cp=2, micro=4),
        "fsdp2": plan(cp=2, stage=3, activation_checkpointing=SELECTIVE),
    },
    4: {
        "x tp": plan(cp=2, tp=2, stage=3, micro=2, activation_checkpointing=FULL),
        "4": plan(cp=4, micro=8, activation_checkpointing=SELECTIVE),
        "x pp": plan(cp=2, pp=2, stage=2, micro=2),
    },
}
LONG = {
    2: {
        "ddp full": plan(cp=2, micro=2, activation_checkpointing=FULL),
        "stage 2": plan(cp=2, stage=2, micro=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
        "bf16": plan(cp=2, stage=3, precision=Precision.BF16),
        "bf16 under autocast": plan(cp=2, micro=2, precision=Precision.BF16, activation_checkpointing=SELECTIVE),
        "fp16": plan(cp=2, stage=2, precision=Precision.FP16),
    },
    4: {
        "x dp": plan(dp=2, cp=2, stage=3, micro=2),
        "x dp by ddp": plan(dp=2, cp=2, micro=2, activation_checkpointing=FULL),
        "x pp alone": plan(cp=2, pp=2, activation_checkpointing=SELECTIVE),
        "x hsdp": plan(dp=2, cp=2, stage=3, micro=1),
        "x interleaved": plan(cp=2, pp=2, stage=2, micro=1, pipeline_stages_per_rank=2),
    },
    8: {
        "x hsdp": plan(dp=4, cp=2, dp_replicate=2, stage=3),
        "x dp x tp": plan(dp=2, cp=2, tp=2, stage=2, activation_checkpointing=SELECTIVE),
        "x tp x pp": plan(cp=2, tp=2, pp=2, stage=2, precision=Precision.BF16),
    },
}


def _run(home: Path, job: str, chosen: Plan, model: ModelSpec, text: tuple[str, ...]) -> TrainingRun:
    return gang.training_run(home, job.replace(" ", "-"), chosen, text, model=model)


def _model(chosen: Plan) -> ModelSpec:
    layers = max(2, chosen.layout.pp * chosen.pipeline_stages_per_rank)
    return ModelSpec(decoder=dataclasses.replace(DECODER, num_hidden_layers=layers))


def _is_alike(run: TrainingRun, reference: TrainingRun, steps: int = gang.TRAINING.max_steps) -> bool:
    """Whether the run has so many steps, each with the loss of the reference."""
    expected, found = gang.losses(reference), gang.losses(run)
    limit = FP32_TOLERANCE if run.plan.precision is Precision.FP32 else LOW_TOLERANCE
    return len(found) == steps and max(abs(loss - expected[step]) for step, loss in found.items()) < limit


def _differing(home: Path, plans: dict[str, Plan]) -> list[str]:
    """Run each of the plans, of one number of ranks, and one process of its model; returns the plans that differ."""
    text = gang.ragged_text(home)
    models = {name: _model(chosen) for name, chosen in plans.items()}
    alone = {model: _run(home, f"one-{at}", plan(), model, text) for at, model in enumerate(set(models.values()))}
    runs = {name: _run(home, name, chosen, models[name], text) for name, chosen in plans.items()}
    gang.launch([Part(run=run) for run in alone.values()])
    gang.launch([Part(run=run) for run in runs.values()], 120.0 * len(runs))
    return [name for name, run in runs.items() if not _is_alike(run, alone[models[name]])]


@pytest.mark.parametrize("ranks", PLANS)
def test_ranks_that_share_samples_have_the_losses_of_one_process(ranks: int, tmp_path: Path) -> None:
    assert _differing(tmp_path, PLANS[ranks]) == []


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", LONG)
def test_every_legal_kind_of_plan_shares_samples_alike(ranks: int, tmp_path: Path) -> None:
    assert _differing(tmp_path, LONG[ranks]) == []


def test_a_training_that_shared_samples_goes_on_in_one_process(tmp_path: Path) -> None:
    text, model = gang.ragged_text(tmp_path), ModelSpec(decoder=DECODER)
    reference = _run(tmp_path, "reference", plan(), model, text)
    there = _run(tmp_path, "there", plan(cp=2, stage=3), model, text)
    back = _run(tmp_path, "back", plan(), model, text)

    def saved(job: str) -> Path:
        return JobFolder(tmp_path, job).checkpoints / f"step-{RESUME_STEP:08d}"

    gang.launch([Part(run=reference)])
    gang.launch([Part(run=there)])
    gang.launch([Part(run=back, start_from=saved("there"))])
    assert _is_alike(back, reference, gang.TRAINING.max_steps - RESUME_STEP)


@pytest.mark.parametrize("families", [["llama", "qwen3"], pytest.param(["gemma", "qwen2"], marks=pytest.mark.long)])
def test_transformers_families_share_samples_in_their_own_attention(families: list[str], tmp_path: Path) -> None:
    text = gang.ragged_text(tmp_path)
    tiny_hf.tokenizer().save_pretrained(tmp_path / "tokenizer")
    data = DataSpec(text=text, tokenizer=str(tmp_path / "tokenizer"), sequence_length=gang.SEQUENCE_LENGTH)
    models = {each: ModelSpec(hf={"model_type": each, **tiny_hf.FAMILIES[each]}) for each in families}
    two, four = plan(cp=2, pp=2, micro=2), plan(cp=4, stage=3, micro=2, activation_checkpointing=SELECTIVE)

    def runs(kind: str, chosen: Plan) -> dict[str, TrainingRun]:
        name = "{}-{}".format
        return {
            each: gang.training_run(tmp_path, name(each, kind), chosen, text, model=model, data=data)
            for each, model in models.items()
        }

    found = {kind: runs(kind, chosen) for kind, chosen in (("one", plan()), ("two", two), ("four", four))}
    for some in found.values():
        gang.launch([Part(run=run) for run in some.values()])
    for each in families:
        assert _is_alike(found["two"][each], found["one"][each])
        assert _is_alike(found["four"][each], found["one"][each])


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize("mode", ActivationCheckpointing)
def test_a_layer_has_its_ranks_tokens_and_sends_for_attention_alone(
    tmp_path: Path, mode: ActivationCheckpointing
) -> None:
    recipe = decoder_recipe(DECODER, TextDataset(gang.ragged_text(tmp_path), gang.SEQUENCE_LENGTH), seed=0)
    recompute(recipe.layers, mode)
    context = Context(dist.group.WORLD)
    assert recipe.context_parallel
    recipe.context_parallel(context)
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    seen = []
    for layer in recipe.layers:
        layer.register_forward_hook(lambda _module, inputs, _out: seen.append(inputs[0].shape))
    tokens = torch.zeros(2, gang.SEQUENCE_LENGTH, dtype=torch.int64)
    with _Messages() as forward:
        hidden = recipe.module.hidden(context.own(tokens))  # type: ignore[operator]
    assert set(seen) == {(2, gang.SEQUENCE_LENGTH // 4, DECODER.hidden_size)}
    layers = DECODER.num_hidden_layers
    assert forward.count == {"alltoall_base_": 4 * layers}
    with _Messages() as backward:
        hidden.sum().backward()
    again = 1 if mode is ActivationCheckpointing.NONE else 2
    assert backward.count == {"alltoall_base_": 4 * layers * again}


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("layout", "length", "changes", "words"),
    [
        ({"cp": 4}, 32, {"context_parallel": None}, "cannot share a context"),
        ({"cp": 4}, 30, {}, "no divisor of sequence_length = 30"),
        ({"cp": 2, "tp": 2}, 32, {"tensor_parallel_sizes": {"num_key_value_heads": 6}}, "num_key_value_heads = 6"),
        ({"cp": 4}, 32, {"tensor_parallel_sizes": {"num_attention_heads": 6}}, "num_attention_heads = 6"),
    ],
)
def test_a_model_that_ranks_cannot_share_is_refused(
    tmp_path: Path, layout: dict[str, int], length: int, changes: dict[str, Any], words: str
) -> None:
    recipe = decoder_recipe(DECODER, TextDataset(gang.ragged_text(tmp_path), length), seed=0)
    chosen = Plan(
        engine=Engine.TORCH, layout=ParallelLayout(**layout), zero_stage=ZeroStage.PARAMETERS, micro_batch_size=8
    )
    with pytest.raises(SpecError, match=words):
        TorchEngine(dataclasses.replace(recipe, **changes), chosen, gang.TRAINING, torch.device("cpu"), None)


@pytest.mark.parametrize("engine", [Engine.DEEPSPEED, Engine.SCRIPT])
def test_a_plan_shares_samples_on_our_torch_engine_only_and_evenly(engine: Engine) -> None:
    with pytest.raises(IllegalPlan, match="cp > 1 is engine=torch's"):
        Plan(engine=engine, layout=ParallelLayout(cp=2), micro_batch_size=1)
    with pytest.raises(IllegalPlan, match="cp=2 does not divide sequence_length=31"):
        plan(cp=2, length=31)


class _Messages(TorchDispatchMode):
    """Counts collectives."""

    def __init__(self) -> None:
        super().__init__()
        self.count: Counter[str] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func.namespace == "c10d":
            self.count[func._opname] += 1
        return func(*args, **(kwargs or {}))
