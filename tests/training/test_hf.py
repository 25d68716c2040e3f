"""Laws of transformers models: our loss is theirs, and every layout trains them as one process would."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from peft import PeftModel
from torch.distributed.checkpoint.filesystem import FileSystemReader
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoModelForSeq2SeqLM,
    AutoTokenizer,
)

from orchestrator.memory.models import experts
from orchestrator.memory.models import hf as hf_profiles
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, Freeze, LoraSpec, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder, TrainingRun
from orchestrator.training.build import build_recipe
from orchestrator.training.contract.recipe import IGNORED_LABEL, Recipe, materialise
from orchestrator.training.data.dataset import list_global_batch
from orchestrator.training.export import export_model
from orchestrator.training.models import hf_parallel
from orchestrator.training.models.hf_model import _make_decoder_inputs
from tests.training import gang, tiny_hf

TOLERANCE = 2e-6
STEPS = 4
TRAINED = ("llama", "qwen2", "gpt2", "t5", "qwen3")
TENSOR_PARALLEL = ("qwen2", "t5")
TRAINING = dataclasses.replace(gang.TRAINING, max_steps=STEPS, checkpoint_every_steps=100)
LONGER = dataclasses.replace(TRAINING, max_steps=STEPS + 1)
FROZEN = dataclasses.replace(TRAINING, max_steps=1, freeze=(Freeze(parameters="*embed_tokens*"),))
LORA = LoraSpec(rank=4, alpha=8.0)
HOPS = ("ddp", "fsdp2", "zero 2", "ddp")  # one step each
ADAPTED = ("fsdp2", "zero 3")


def plan(engine: Engine, stage: int, accumulation: int = 1, **fields: Any) -> Plan:
    return Plan(
        engine=engine,
        zero_stage=ZeroStage(stage),
        layout=ParallelLayout(dp=2),
        micro_batch_size=gang.GLOBAL_BATCH // 2 // accumulation,
        gradient_accumulation_steps=accumulation,
        **fields,
    )


ON_TWO_RANKS = {
    "ddp": plan(Engine.TORCH, 0),
    "fsdp2": plan(Engine.TORCH, 3, 2),
    "zero 2": plan(Engine.DEEPSPEED, 2, 2),
    "zero 3": plan(Engine.DEEPSPEED, 3),
}
TP = gang.torch_plan(layout=ParallelLayout(tp=2))
PP = gang.torch_plan(
    gang.GLOBAL_BATCH // 4, layout=ParallelLayout(pp=2), gradient_accumulation_steps=4
)


def combine(pp: int, tp: int, dp: int, cp: int = 1, **fields: Any) -> Plan:
    accumulation = 4 if pp > 1 else 1
    layout = ParallelLayout(pp=pp, tp=tp, dp=dp, cp=cp)
    micro = gang.GLOBAL_BATCH // dp // accumulation
    return gang.torch_plan(micro, layout=layout, gradient_accumulation_steps=accumulation, **fields)


ON_FOUR_RANKS = {
    "tp x fsdp2": combine(1, 2, 2, zero_stage=ZeroStage.PARAMETERS),
    "pp x tp": combine(2, 2, 1),
    "pp x fsdp2": combine(2, 1, 2, zero_stage=ZeroStage.GRADIENTS),
    "pp x ddp": combine(2, 1, 2),
    "cp x pp": combine(2, 1, 1, 2, sequence_length=gang.SEQUENCE_LENGTH),
    "cp": combine(
        *(1, 1, 1, 4),
        zero_stage=ZeroStage.PARAMETERS,
        activation_checkpointing=ActivationCheckpointing.SELECTIVE,
        sequence_length=gang.SEQUENCE_LENGTH,
    ),
}


class World:
    """Folders of tiny models and data, and runs on them."""

    def __init__(self, home: Path) -> None:
        self.home = home
        text = home / "text.txt"
        text.write_text(tiny_hf.text())
        self.text = DataSpec(text=(str(text),), sequence_length=gang.SEQUENCE_LENGTH)
        chat = tiny_hf.chat_file(home / "chat.jsonl")
        self.chat = DataSpec(chat=(str(chat),), sequence_length=gang.SEQUENCE_LENGTH)

    def run(
        self, job: str, family: str, plan: Plan, lora: LoraSpec | None = None, **changes: Any
    ) -> TrainingRun:
        folder = self.home / family
        if not folder.is_dir():
            tiny_hf.folder(self.home, family)
        data = self.chat if family in ("t5", "bart") else self.text
        fields = {
            "model": ModelSpec(hf=str(folder), lora=lora),
            "data": data,
            "training": TRAINING,
            **changes,
        }
        return gang.training_run(self.home, job, plan, (), **fields)


def real(recipe: Recipe) -> Recipe:
    materialise(recipe.module, recipe.module, recipe, torch.device("cpu"))
    return recipe


def own_loss_sum(model: Any, batch: Any) -> torch.Tensor:
    """transformers' own loss of a batch, summed over its labels."""
    tokens, labels = batch
    if model.config.is_encoder_decoder:
        mask = tokens != model.config.pad_token_id
        return (
            model(input_ids=tokens, attention_mask=mask, labels=labels).loss
            * (labels != IGNORED_LABEL).sum()
        )
    return model(input_ids=tokens, labels=labels, shift_labels=labels, num_items_in_batch=1).loss


@pytest.mark.parametrize(
    "family",
    [
        pytest.param(family, marks=() if family in (*TRAINED, "mixtral") else pytest.mark.long)
        for family in tiny_hf.FAMILIES
    ],
)
def test_our_loss_and_gradients_are_those_of_transformers(tmp_path: Path, family: str) -> None:
    run = World(tmp_path).run("job", family, gang.torch_plan())
    recipe, theirs = real(build_recipe(run)), tiny_hf.model(family).train()
    assert len(recipe.layers) == (4 if theirs.config.is_encoder_decoder else 2)
    batch = recipe.dataset.batch(range(4))
    loss = recipe.loss_sum(recipe.module, batch)
    expected = own_loss_sum(theirs, batch)
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    loss.backward()
    expected.backward()
    gradients = {name: parameter.grad for name, parameter in recipe.module.named_parameters()}
    for name, parameter in theirs.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("family", ["llama", "gemma", "gpt2", "t5"])
def test_random_weights_have_the_familys_own_distribution_and_follow_from_name_and_seed(
    tmp_path: Path, family: str
) -> None:
    world = World(tmp_path)
    config = {"model_type": family, **tiny_hf.FAMILIES[family]}
    data = dataclasses.replace(
        world.chat if family == "t5" else world.text, tokenizer=str(tmp_path / "tokenizer")
    )
    tiny_hf.tokenizer().save_pretrained(tmp_path / "tokenizer")
    model = ModelSpec(hf=config)
    recipe, again, other = (
        real(
            build_recipe(
                world.run(
                    f"job-{n}", family, gang.torch_plan(), model=model, data=data, training=training
                )
            )
        )
        for n, training in enumerate((TRAINING, TRAINING, dataclasses.replace(TRAINING, seed=1)))
    )
    equal = dict(again.module.named_parameters())
    differs = dict(other.module.named_parameters())
    theirs = dict(tiny_hf.model(family).named_parameters())
    for name, parameter in recipe.module.named_parameters():
        assert torch.equal(parameter, equal[name]), name
        weight = theirs[name]
        if weight.numel() >= 1000:
            assert not torch.equal(parameter, differs[name]), name
            assert parameter.std().item() == pytest.approx(weight.std().item(), rel=0.1), name
        elif weight.dim() == 1:
            assert torch.equal(parameter, weight), name


def by_hand(run: TrainingRun, family: str) -> tuple[dict[int, float], Any]:
    """The losses of a plain loop with the transformers model, and the trained model."""
    dataset, training = build_recipe(run).dataset, run.training
    model = tiny_hf.model(family).train()
    betas = (training.beta1, training.beta2)
    optimizer = torch.optim.AdamW(
        model.parameters(),
        lr=training.learning_rate,
        betas=betas,
        weight_decay=training.weight_decay,
    )
    losses = {}
    for step in range(STEPS):
        samples = list_global_batch(
            step * gang.GLOBAL_BATCH, gang.GLOBAL_BATCH, len(dataset), training.seed
        )
        batch = dataset.batch(samples)
        loss = own_loss_sum(model, batch) / (batch[1] != IGNORED_LABEL).sum()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), training.clip_norm)
        optimizer.step()
        losses[step + 1] = loss.item()
    return losses, model


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Curves:
    """Loss by step of what was trained, by name."""

    home: Path
    single: dict[str, dict[int, float]]
    two: dict[str, dict[int, float]]
    hand: dict[str, tuple[dict[int, float], Any]]
    runs: dict[str, TrainingRun]


@pytest.fixture(scope="module")
def curves(tmp_path_factory: pytest.TempPathFactory) -> Curves:
    world = World(tmp_path_factory.mktemp("home"))
    single = {family: world.run(f"one-{family}", family, gang.torch_plan()) for family in TRAINED}
    single["lora"] = world.run("one-lora", "llama", gang.torch_plan(), LORA)
    single["lora one step more"] = world.run(
        "one-lora", "llama", gang.torch_plan(), LORA, training=LONGER
    )
    single["mixtral"] = world.run("one-mixtral", "mixtral", gang.torch_plan(), training=FROZEN)
    two = {"llama zero 3": world.run("two", "llama", ON_TWO_RANKS["zero 3"])}
    two["t5 fsdp2"] = world.run("two-t5", "t5", ON_TWO_RANKS["fsdp2"])
    two |= {f"{family} tp": world.run(f"tp-{family}", family, TP) for family in TENSOR_PARALLEL}
    single["mistral"] = world.run(
        "one-mistral", "mistral", gang.torch_plan()
    )  # its window is half a sample
    two["mistral cp"] = world.run(
        "cp-mistral", "mistral", combine(1, 1, 1, 2, sequence_length=gang.SEQUENCE_LENGTH)
    )
    two["qwen2 pp"] = world.run("pp-qwen2", "qwen2", PP)
    two["mixtral pp"] = world.run("pp-mixtral", "mixtral", PP, training=FROZEN)
    two |= {
        f"lora {name}": world.run(f"lora {name}", "llama", ON_TWO_RANKS[name], LORA)
        for name in ADAPTED
    }
    hops = [
        world.run(
            "hops",
            "llama",
            ON_TWO_RANKS[name],
            LORA,
            training=dataclasses.replace(TRAINING, max_steps=n),
        )
        for n, name in enumerate(HOPS, start=1)
    ]
    gang.launch([gang.Part(run=run) for run in single.values()])
    gang.launch([gang.Part(run=run) for run in [*two.values(), *hops]])
    return Curves(
        home=world.home,
        single={name: gang.losses(run) for name, run in single.items()},
        two={name: gang.losses(run) for name, run in two.items()}
        | {"lora hops": {step: loss for run in hops for step, loss in gang.losses(run).items()}},
        hand={family: by_hand(single[family], family) for family in TRAINED},
        runs={**single, **two},
    )


@pytest.mark.parametrize("family", TRAINED)
def test_one_process_trains_as_a_loop_written_by_hand(curves: Curves, family: str) -> None:
    assert curves.single[family] == pytest.approx(curves.hand[family][0], abs=TOLERANCE, rel=0)
    assert len(curves.single[family]) == STEPS


@pytest.mark.parametrize(
    "name",
    [
        *(f"lora {layout}" for layout in ADAPTED),
        *(f"{family} tp" for family in TENSOR_PARALLEL),
        *("llama zero 3", "mistral cp", "qwen2 pp", "mixtral pp", "t5 fsdp2", "lora hops"),
    ],
)
def test_every_layout_trains_as_one_process(curves: Curves, name: str) -> None:
    assert curves.two[name] == pytest.approx(curves.single[name.split()[0]], abs=TOLERANCE, rel=0)


def test_adapters_learn_and_their_checkpoint_holds_nothing_else(curves: Curves) -> None:
    assert curves.single["lora"][STEPS] < curves.single["lora"][1] - 0.01
    for job in ("one-lora", *(f"lora {name}" for name in ADAPTED)):
        saved = JobFolder(curves.home, job).checkpoints / f"step-{STEPS:08d}"
        names = FileSystemReader(saved).read_metadata().state_dict_metadata
        parameters = [name for name in names if name.startswith("model.")]
        assert len(parameters) == 2 * 7 * 2, job  # A and B of 7 projections in 2 layers
        assert all("lora_" in name for name in parameters), job


@pytest.mark.parametrize("name", ["llama", "t5", "llama zero 3", "qwen2 tp"])
def test_the_output_is_the_trained_model_as_transformers_reads_it(
    curves: Curves, name: str
) -> None:
    family = name.split()[0]
    export_model(curves.runs[name])
    output = Path(curves.runs[name].job_folder) / "output"
    auto = AutoModelForSeq2SeqLM if family == "t5" else AutoModelForCausalLM
    model, report = auto.from_pretrained(output, output_loading_info=True)
    assert not any(report.values()), report
    trained = dict(model.named_parameters())
    for key, parameter in curves.hand[family][1].named_parameters():
        torch.testing.assert_close(trained[key], parameter, rtol=0, atol=1e-4)
        if parameter.dim() > 1:
            assert not torch.equal(parameter, dict(tiny_hf.model(family).named_parameters())[key])
    assert AutoTokenizer.from_pretrained(output).decode([70, 71]) == tiny_hf.tokenizer().decode(
        [70, 71]
    )


def test_the_output_of_adapters_is_what_peft_reads(curves: Curves) -> None:
    run = curves.runs["lora fsdp2"]
    export_model(run)
    export_model(run)  # a restarted last attempt: what stands there stays
    base = AutoModelForCausalLM.from_pretrained(str(run.model.hf)).train()
    model = PeftModel.from_pretrained(base, Path(run.job_folder) / "output")
    dataset = build_recipe(run).dataset
    order = list_global_batch(
        STEPS * gang.GLOBAL_BATCH, gang.GLOBAL_BATCH, len(dataset), run.training.seed
    )
    batch = dataset.batch(order)
    loss = own_loss_sum(model, batch) / (batch[1] != IGNORED_LABEL).sum()
    assert loss.item() == pytest.approx(
        curves.single["lora one step more"][STEPS + 1], abs=TOLERANCE
    )


def test_frozen_weights_and_converted_files_come_out_whole(curves: Curves) -> None:
    run = curves.runs["mixtral"]
    export_model(run)
    weights = dict(
        AutoModelForCausalLM.from_pretrained(Path(run.job_folder) / "output").named_parameters()
    )
    start = dict(tiny_hf.model("mixtral").named_parameters())
    unchanged = [name for name, parameter in weights.items() if torch.equal(parameter, start[name])]
    assert unchanged == ["model.embed_tokens.weight"]
    assert set(weights) == set(start)


def test_a_base_in_low_precision_gives_the_losses_of_one_in_fp32(tmp_path: Path) -> None:
    world = World(tmp_path)
    low = real(
        build_recipe(world.run("low", "llama", gang.torch_plan(precision=Precision.BF16), LORA))
    )
    whole = real(build_recipe(world.run("whole", "llama", gang.torch_plan(), LORA)))
    dtypes = {name: parameter.dtype for name, parameter in low.module.named_parameters()}
    assert dtypes["model.layers.0.mlp.up_proj.base_layer.weight"] is torch.bfloat16
    assert dtypes["model.embed_tokens.weight"] is torch.float32
    assert all(dtype is torch.float32 for name, dtype in dtypes.items() if "lora_" in name)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        losses = [
            recipe.loss_sum(recipe.module, recipe.dataset.batch([0])) for recipe in (low, whole)
        ]
    assert losses[0].item() == losses[1].item()


REFUSED = {
    "tp": ({"plan": TP}, "data parallel only"),
    "pp": ({"plan": PP}, "data parallel only"),
    "target": ({"lora": LoraSpec(target_modules=("nothing",))}, "q_proj"),
    "quantise": ({"lora": LoraSpec(quantise_base=True)}, "CUDA"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_adapters_that_cannot_be_trained_are_refused_with_what_is_allowed(
    tmp_path: Path, name: str
) -> None:
    changes, message = REFUSED[name]
    fields: dict[str, Any] = {"plan": gang.torch_plan(), "lora": LORA} | changes
    run = World(tmp_path).run("job", "llama", fields["plan"], fields["lora"])
    with pytest.raises(SpecError, match=message):
        build_recipe(run)


@pytest.mark.parametrize(
    ("hf", "message"),
    [
        ("/nowhere/at/all", "no such transformers model"),
        ({"model_type": "lama"}, "no such family"),
        ({"model_type": "llama", "hiden_size": 4}, "hidden_size"),
        ({"model_type": "vit"}, "no language model"),
    ],
)
def test_a_model_that_cannot_be_built_is_an_error_at_once(
    tmp_path: Path, hf: Any, message: str
) -> None:
    run = World(tmp_path).run("job", "llama", gang.torch_plan(), model=ModelSpec(hf=hf))
    with pytest.raises(SpecError, match=message):
        build_recipe(run)


def test_a_family_without_a_tensor_parallel_plan_has_none(tmp_path: Path) -> None:
    assert not build_recipe(World(tmp_path).run("job", "gpt2", gang.torch_plan())).tensor_parallel


def test_missing_weights_are_named(tmp_path: Path) -> None:
    world = World(tmp_path)
    run = world.run("job", "llama", gang.torch_plan())
    for shard in (tmp_path / "llama").glob("*.safetensors*"):
        shard.unlink()
    with pytest.raises(SpecError, match="weights"):
        build_recipe(run)


def test_the_closed_form_and_the_engines_cut_the_same_families() -> None:
    assert set(hf_parallel.STAGED) == hf_profiles.DEFAULTS.keys() | experts.DEFAULTS.keys()
    assert set(hf_parallel.PLANS) >= set(hf_profiles.DEFAULTS)


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("family", ["llama", "mistral", "qwen2", "qwen3", "gemma"])
def test_every_combination_trains_as_one_process(tmp_path: Path, family: str) -> None:
    world = World(tmp_path)
    tiny_hf.folder(tmp_path, family, num_hidden_layers=4)
    single = world.run("one", family, gang.torch_plan())
    plans = {**ON_TWO_RANKS, **ON_FOUR_RANKS, "tp": TP, "pp": PP}
    plans["interleaved"] = dataclasses.replace(PP, pipeline_stages_per_rank=2)
    several = {name: world.run(name, family, chosen) for name, chosen in plans.items()}
    for ranks, runs in ((1, [single]), (2, several.values()), (4, several.values())):
        gang.launch([gang.Part(run=run) for run in runs if run.plan.world_size == ranks])
    for name, run in several.items():
        assert gang.losses(run) == pytest.approx(gang.losses(single), abs=TOLERANCE, rel=0), name


def test_a_decoder_without_a_method_of_its_own_is_given_what_others_make_of_labels() -> None:
    config = AutoConfig.for_model("bart", **tiny_hf.FAMILIES["bart"])
    module = AutoModelForSeq2SeqLM.from_config(config)
    labels = torch.tensor([[5, 6, IGNORED_LABEL, IGNORED_LABEL], [7, 8, 9, 10]])
    bare = SimpleNamespace(config=config)
    assert (
        _make_decoder_inputs(bare, labels).tolist() == _make_decoder_inputs(module, labels).tolist()
    )
