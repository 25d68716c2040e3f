"""Laws of expert parallelism: the losses, first values and checkpoints of one process, wherever its experts are."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.testing._internal.distributed.fake_pg import FakeStore

from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    MasterWeights,
    Offload,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job.model import DataSpec, LoraSpec, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, TrainingRun, write_json
from orchestrator.training.contract.dispatch import Dispatch
from orchestrator.training.data.dataset import TextDataset
from orchestrator.training.engines.torch_engine import TorchEngine
from orchestrator.training.models.hf_model import make_hf_recipe
from tests.training import gang, tiny_hf
from tests.training.curves import HOPPING, hop
from tests.training.gang import GLOBAL_BATCH, TORCH_2_12, Part, needs_torch_2_12

FP32_TOLERANCE = 2e-6
LOW_TOLERANCE = 2e-3
FULL, SELECTIVE = ActivationCheckpointing.FULL, ActivationCheckpointing.SELECTIVE
EXPERTS = 4
TRAINING = dataclasses.replace(gang.TRAINING, max_steps=4)
MIXTURES: dict[str, dict[str, Any]] = {
    "mixtral": {**tiny_hf.LLAMA_LIKE, "num_local_experts": EXPERTS},
    "qwen2_moe": {
        **tiny_hf.LLAMA_LIKE,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 2,
        "moe_intermediate_size": 48,
        "shared_expert_intermediate_size": 64,
    },
    "qwen3_moe": {
        **tiny_hf.LLAMA_LIKE,
        "head_dim": 16,
        "num_experts": EXPERTS,
        "num_experts_per_tok": 3,
        "moe_intermediate_size": 48,
        "tie_word_embeddings": True,
    },
}


def plan(*, dp: int = 1, ep: int = 1, stage: int = 3, micro: int = 2, **fields: Any) -> Plan:
    return Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=dp),
        expert_parallel=ep,
        zero_stage=ZeroStage(stage if dp > 1 else 0),
        micro_batch_size=micro,
        gradient_accumulation_steps=GLOBAL_BATCH // dp // micro,
        sequence_length=gang.SEQUENCE_LENGTH,
        **fields,
    )


def model_of(family: str) -> ModelSpec:
    return ModelSpec(hf={"model_type": family, **MIXTURES[family]})


# Each with a family; of 4 ranks with ep=2 two have the same experts, and with ep=4 each has one.
PLANS: dict[str, tuple[str, Plan]] = {
    "stage 3": ("mixtral", plan(dp=2, ep=2)),
    "stage 2 selective": (
        "qwen2_moe",
        plan(dp=2, ep=2, stage=2, micro=4, activation_checkpointing=SELECTIVE),
    ),
}
LONG: dict[int, dict[str, tuple[str, Plan]]] = {
    2: {
        "full": ("qwen3_moe", plan(dp=2, ep=2, micro=1, activation_checkpointing=FULL)),
        "bf16": ("mixtral", plan(dp=2, ep=2, precision=Precision.BF16)),
        "bf16 full": (
            "qwen2_moe",
            plan(dp=2, ep=2, stage=2, precision=Precision.BF16, activation_checkpointing=FULL),
        ),
        "fp16": ("qwen3_moe", plan(dp=2, ep=2, precision=Precision.FP16)),
        "moments in 8 bits": (
            "mixtral",
            plan(dp=2, ep=2, precision=Precision.BF16, optimizer=Optimizer.ADAMW_8BIT),
        ),
        "weights in bf16": (
            "mixtral",
            plan(
                dp=2,
                ep=2,
                precision=Precision.BF16,
                optimizer=Optimizer.ADAMW_8BIT,
                master_weights=MasterWeights.BF16,
            ),
        ),
        "some full": (
            "mixtral",
            plan(dp=2, ep=2, activation_checkpointing=SELECTIVE, full_checkpointing_layers=1),
        ),
        "on host": (
            "mixtral",
            plan(dp=2, ep=2, activation_checkpointing=FULL, activation_offload=True),
        ),
    },
    4: {
        "two have the same": (
            "mixtral",
            plan(dp=4, ep=2, micro=1, activation_checkpointing=SELECTIVE),
        ),
        "one each": ("qwen3_moe", plan(dp=4, ep=4, stage=2, activation_checkpointing=FULL)),
        "stage 2": ("qwen2_moe", plan(dp=4, ep=2, stage=2)),
        "bf16": (
            "mixtral",
            plan(dp=4, ep=2, micro=1, precision=Precision.BF16, activation_checkpointing=SELECTIVE),
        ),
    },
    8: {
        "an expert on two": ("mixtral", plan(dp=8, ep=4, micro=1, activation_checkpointing=FULL)),
        "two experts on four": ("qwen2_moe", plan(dp=8, ep=2, micro=1)),
    },
}


class World:
    """Runs of mixtures of experts on one text."""

    def __init__(self, home: Path) -> None:
        self.home, self._text = home, gang.ragged_text(home)
        tiny_hf.tokenizer().save_pretrained(home / "tokenizer")
        self.data = DataSpec(
            text=self._text, tokenizer=str(home / "tokenizer"), sequence_length=gang.SEQUENCE_LENGTH
        )

    @property
    def text_dataset(self) -> TextDataset:
        """Return a dataset that no tokenizer has to prepare."""
        return TextDataset(self._text, gang.SEQUENCE_LENGTH)

    def run(self, job: str, family: str, chosen: Plan) -> TrainingRun:
        model = model_of(family)
        fields = {"model": model, "data": self.data, "training": TRAINING}
        return gang.training_run(self.home, job.replace(" ", "-"), chosen, self._text, **fields)

    def differing(self, plans: dict[str, tuple[str, Plan]]) -> dict[str, float]:
        """Run each of the plans, and one process of its family; how far off those are that differ."""
        alone = {
            family: self.run(f"one-{family}", family, plan(micro=8)) for family, _ in plans.values()
        }
        runs = {name: self.run(name, family, chosen) for name, (family, chosen) in plans.items()}
        every = [*alone.values(), *runs.values()]
        for ranks in sorted({run.plan.world_size for run in every}):
            parts = [Part(run=run) for run in every if run.plan.world_size == ranks]
            gang.launch(parts, 120.0 * len(parts))
        off = {name: _distance(run, alone[plans[name][0]]) for name, run in runs.items()}
        return {name: most for name, most in off.items() if not most <= _tolerance(runs[name])}


def _tolerance(run: TrainingRun) -> float:
    return FP32_TOLERANCE if run.plan.precision is Precision.FP32 else LOW_TOLERANCE


def _distance(run: TrainingRun, reference: TrainingRun) -> float:
    """The largest difference of their losses and, relative, of their gradients' norms."""
    steps, expected = gang.metrics(run), gang.metrics(reference)
    assert len(steps) == len(expected) == TRAINING.max_steps
    of_norms = (
        abs(step["grad_norm"] / other["grad_norm"] - 1)
        for step, other in zip(steps, expected, strict=True)
    )
    off = max(
        abs(step["loss"] - other["loss"]) for step, other in zip(steps, expected, strict=True)
    )
    return max(
        off, max(of_norms) / 10 if run.plan.precision is Precision.FP32 else 0.0
    )  # relative ones are larger


@needs_torch_2_12
def test_ranks_that_hold_other_experts_have_the_losses_of_one_process(tmp_path: Path) -> None:
    assert World(tmp_path).differing(PLANS) == {}


@needs_torch_2_12
@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("ranks", LONG)
def test_every_legal_kind_of_plan_spreads_experts_alike(ranks: int, tmp_path: Path) -> None:
    assert World(tmp_path).differing(LONG[ranks]) == {}


@pytest.mark.long
@needs_torch_2_12
def test_a_rank_to_which_no_token_comes_trains_as_one_process(tmp_path: Path) -> None:
    """Two tokens of a sample with an expert each: of 32 passes of a layer one of two ranks has none in every eighth."""
    world = World(tmp_path)
    model = ModelSpec(hf={"model_type": "mixtral", **MIXTURES["mixtral"], "num_experts_per_tok": 1})
    short = dataclasses.replace(world.data, sequence_length=2)
    single, two = (
        dataclasses.replace(
            world.run(name, "mixtral", dataclasses.replace(chosen, sequence_length=2)), model=model
        )
        for name, chosen in (("one", plan(micro=8)), ("two", plan(dp=2, ep=2, micro=1)))
    )
    for run in (single, two):
        write_json(AttemptFolder(run.attempt_folder).run, dataclasses.replace(run, data=short))
        gang.launch([Part(run=run)])
    assert _distance(two, single) <= FP32_TOLERANCE


@pytest.mark.long
@needs_torch_2_12
@pytest.mark.parametrize(
    "legs",
    [
        (
            plan(dp=2),
            plan(dp=2, ep=2),
            plan(micro=8),
            plan(dp=2, ep=2, stage=2, micro=4),
            plan(dp=2, stage=2),
        ),
        pytest.param(
            (
                *(
                    plan(dp=4, ep=4),
                    plan(dp=4, ep=2, micro=1),
                    plan(dp=4),
                    plan(dp=2, ep=2, stage=2),
                ),
                *(
                    plan(dp=8, ep=4, micro=1),
                    plan(dp=8, ep=2, micro=1),
                    plan(micro=8),
                    plan(dp=4, ep=2, stage=2),
                ),
            ),
            marks=(pytest.mark.long, pytest.mark.timeout(1800)),
        ),
    ],
)
def test_a_training_hops_in_and_out_of_expert_parallelism_and_its_curve_stays_the_same(
    tmp_path: Path, legs: tuple[Plan, ...]
) -> None:
    """Every leg begins with weights of its own, which the checkpoint has to replace."""
    data = World(tmp_path).data

    def model(run: TrainingRun, seed: int) -> ModelSpec:
        run = dataclasses.replace(run, model=model_of("mixtral"), data=data)
        config = {"run": dataclasses.asdict(run), "seed": seed}
        return ModelSpec(
            factory=f"{Path(__file__).with_name('seeded_lora.py')}:build", config=config
        )

    chain, expected = hop(
        tmp_path / "hops", legs, dataclasses.replace(HOPPING, max_steps=len(legs)), model
    )
    assert chain == pytest.approx(expected, abs=FP32_TOLERANCE, rel=0)


@pytest.fixture
def four_ranks() -> Iterator[None]:
    """A fake process group of four in which this process is rank 1."""
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=4)
    yield
    dist.destroy_process_group()


@needs_torch_2_12
@pytest.mark.usefixtures("four_ranks")
def test_a_rank_starts_with_the_values_that_one_process_gives_its_experts(tmp_path: Path) -> None:
    world = World(tmp_path)
    run = world.run("one", "mixtral", plan(dp=4, ep=2, micro=1))
    recipe = make_hf_recipe(run, world.text_dataset)
    name = "model.layers.1.mlp.experts.down_proj"
    whole = torch.empty(recipe.module.get_parameter(name).shape)
    assert recipe.initialise is not None
    recipe.initialise(name, whole)
    TorchEngine(recipe, run.plan, run.training, torch.device("cpu"), None)
    parameter: Any = recipe.module.get_parameter(name)
    assert parameter.shape == whole.shape
    assert torch.equal(
        parameter.to_local(), whole[2:3]
    )  # of the four experts ranks 1 and 3 have the last two


@pytest.mark.usefixtures("four_ranks")
@pytest.mark.parametrize(
    ("family", "degree", "message"),
    [
        ("llama", 2, "this model has no experts to spread"),
        ("mixtral", 4, "no divisor of its 6 experts"),
    ],
)
def test_a_model_whose_experts_cannot_be_spread_is_refused(
    tmp_path: Path, family: str, degree: int, message: str
) -> None:
    sizes = {**tiny_hf.LLAMA_LIKE, **({"num_local_experts": 6} if family == "mixtral" else {})}
    world = World(tmp_path)
    run = world.run("one", "mixtral", plan(dp=4, ep=degree))
    run = dataclasses.replace(run, model=ModelSpec(hf={"model_type": family, **sizes}))
    with pytest.raises(SpecError, match=message):
        TorchEngine(
            make_hf_recipe(run, world.text_dataset),
            run.plan,
            run.training,
            torch.device("cpu"),
            None,
        )


@pytest.mark.skipif(TORCH_2_12, reason="torch 2.12 spreads them")
@pytest.mark.usefixtures("four_ranks")
def test_a_torch_that_cannot_spread_experts_refuses_and_says_what_to_do(tmp_path: Path) -> None:
    world = World(tmp_path)
    run = world.run("one", "mixtral", plan(dp=4, ep=2, micro=1))
    with pytest.raises(
        SpecError, match=r"plan\.expert_parallel: torch 2\.11.*\n.*\n.*torch 2\.12 or newer"
    ):
        TorchEngine(
            make_hf_recipe(run, world.text_dataset),
            run.plan,
            run.training,
            torch.device("cpu"),
            None,
        )


def test_an_adapted_model_keeps_its_experts_together(tmp_path: Path) -> None:
    world = World(tmp_path)
    run = world.run("one", "mixtral", plan(dp=2))
    adapted = dataclasses.replace(run.model, lora=LoraSpec(rank=2))
    assert make_hf_recipe(run, world.text_dataset).experts is not None
    assert (
        make_hf_recipe(dataclasses.replace(run, model=adapted), world.text_dataset).experts is None
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"zero_stage": ZeroStage.NONE}, "FSDP2's: engine=torch with zero_stage 2 or 3"),
        ({"engine": Engine.DEEPSPEED}, "FSDP2's: engine=torch"),
        ({"engine": Engine.SCRIPT}, "FSDP2's: engine=torch"),
        ({"expert_parallel": 3}, "expert_parallel=3 does not divide dp=4"),
        ({"expert_parallel": 0}, "at least 1"),
        ({"layout": ParallelLayout(dp=2, tp=2)}, "cp=tp=pp=1"),
        ({"layout": ParallelLayout(dp=2, cp=2)}, "cp=tp=pp=1"),
        ({"layout": ParallelLayout(dp=2, pp=2), "zero_stage": ZeroStage.GRADIENTS}, "cp=tp=pp=1"),
        ({"dp_replicate": 2}, "dp_replicate=1"),
        ({"offload": Offload.PARAMETERS}, "offload=none"),
        (
            {"optimizer_in_backward": True, "gradient_accumulation_steps": 1},
            "optimizer_in_backward=false",
        ),
    ],
)
def test_a_plan_spreads_experts_over_fsdp2s_ranks_only(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(IllegalPlan, match=message):
        dataclasses.replace(plan(dp=4, ep=2, micro=1), **changes)


@pytest.mark.parametrize("chosen", [[[0, 1], [2, 0]], [[1, 2], [1, 2]]])
def test_one_rank_answers_what_its_experts_say_of_each_token(chosen: list[list[int]]) -> None:
    """A group of one: expert e multiplies by e + 1, whatever the order in which tokens chose."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        dispatch = Dispatch(dist.group.WORLD, 3)
        x = torch.tensor([[1.0, 2.0], [3.0, 5.0]], requires_grad=True)
        weights = torch.tensor([[0.25, 0.5], [1.0, 2.0]])

        def experts(came: Tensor, ends: Tensor) -> Tensor:
            starts = [0, *ends.tolist()[:-1]]
            return torch.cat(
                [
                    came[a:b] * (e + 1)
                    for e, (a, b) in enumerate(zip(starts, ends.tolist(), strict=True))
                ]
            )

        answers = dispatch.answer(x, torch.tensor(chosen), weights, experts)
        factors = ((torch.tensor(chosen) + 1) * weights).sum(dim=1, keepdim=True)
        assert torch.equal(answers, x * factors)
        answers.sum().backward()
        assert torch.equal(x.grad, factors.expand(2, 2))
    finally:
        dist.destroy_process_group()
