"""Laws of `trainer`: what a framework's name says of a job, and what the job says above it."""

from __future__ import annotations

from pathlib import Path
from typing import Any, get_args

import pytest

from orchestrator.planning.render import render_script_command
from orchestrator.planning.request import read_script_request
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.frameworks import Framework, load_knobs
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job, parse_job_data
from orchestrator.specs.plan import Plan

FRAMEWORKS = get_args(Framework)


def job(trainer: str, command: str = "python train.py", **changes: Any) -> JobSpec:
    fields = {
        "name": "a",
        "global_batch_size": 16,
        "trainer": trainer,
        "command": command,
        **changes,
    }
    return parse_job_data(fields, "job")


def render_arguments(spec: JobSpec, **changes: Any) -> tuple[str, ...]:
    plan = Plan(
        **{
            "engine": Engine.SCRIPT,
            "layout": ParallelLayout(dp=2),
            "micro_batch_size": 2,
            "gradient_accumulation_steps": 4,
            "activation_checkpointing": ActivationCheckpointing.FULL,
            "precision": spec.precision,
            **changes,
        }
    )
    command = render_script_command(
        read_script_request(spec),
        plan,
        output_dir="OUT",
        resume_from="CKPT",
        deepspeed_config_path=None,
        config_path="CONFIG",
        node_devices=(0,),
    )
    return (*command.arguments[2:], *(f"{key}={word}" for key, word in command.keys.items()))


@pytest.mark.parametrize("trainer", FRAMEWORKS)
def test_a_job_that_names_its_trainer_survives_the_way_to_the_service(trainer: str) -> None:
    command = "python train.py config.yaml --per_device_train_batch_size 4 --bf16 --deepspeed_config ds.json"
    spec = job(trainer, command)
    assert parse_job_data(spec.model_dump(mode="json"), "request") == spec
    assert spec.knobs.micro_batch_size is not None


def test_megatron_recomputes_all_layers_the_first_of_a_stage_or_none() -> None:
    spec = job("megatron", "python pretrain_gpt.py --bf16")
    none, full = ActivationCheckpointing.NONE, ActivationCheckpointing.FULL
    arguments_of = {
        (mode, layers): " ".join(
            render_arguments(spec, activation_checkpointing=mode, full_checkpointing_layers=layers)[
                5:-2
            ]
        )
        for mode, layers in ((none, 0), (none, 3), (full, 0))
    }
    assert arguments_of == {
        (none, 0): "",
        (none, 3): "--recompute-granularity full --recompute-method block --recompute-num-layers 3",
        (
            full,
            0,
        ): "--recompute-granularity full --recompute-method uniform --recompute-num-layers 1",
    }


def test_torchtitan_shards_wherever_there_are_several_ranks() -> None:
    spec = job("torchtitan", "python -m torchtitan.train")
    alone = render_arguments(spec, layout=ParallelLayout(), gradient_accumulation_steps=8)
    assert not [word for word in alone if "fsdp" in word]
    shards = {"zero_stage": ZeroStage.GRADIENTS, "sharding": Sharding.FSDP}
    assert "--parallelism.fsdp_reshard_after_forward never" in " ".join(
        render_arguments(spec, **shards)
    )


@pytest.mark.parametrize(
    ("trainer", "command", "flags"),
    [
        (
            "hf",
            "python train.py --bf16",
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4 "
            "--gradient_checkpointing true --bf16 true --resume_from_checkpoint CKPT --output_dir OUT",
        ),
        (
            "hf",
            "python train.py",  # its own precision
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4 "
            "--gradient_checkpointing true --resume_from_checkpoint CKPT --output_dir OUT",
        ),
        (
            "trl",
            "python train.py",  # in bf16, without a word
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4 "
            "--gradient_checkpointing true --resume_from_checkpoint CKPT --output_dir OUT",
        ),
        (
            "trl",
            "python train.py --bf16 false",
            "--per_device_train_batch_size 2 --per_device_eval_batch_size 8 --gradient_accumulation_steps 4 "
            "--gradient_checkpointing true --bf16 false --resume_from_checkpoint CKPT --output_dir OUT",
        ),
        (
            "accelerate",
            "python train.py",
            "--per_device_train_batch_size 2 --gradient_accumulation_steps 4 --resume_from_checkpoint CKPT "
            "--output_dir OUT",
        ),
        (
            "diffusers",
            "python train.py --mixed_precision=fp16",
            "--train_batch_size 2 --gradient_accumulation_steps 4 --gradient_checkpointing --mixed_precision fp16 "
            "--resume_from_checkpoint CKPT --output_dir OUT",
        ),
        (
            "lightning",
            "python train.py fit --trainer.precision bf16-mixed",
            "fit --data.batch_size 2 --trainer.accumulate_grad_batches 4 --trainer.precision bf16-mixed "
            "--trainer.devices 1 --trainer.num_nodes 2 --ckpt_path CKPT --trainer.default_root_dir OUT",
        ),
        (
            "deepspeed",
            "python train.py --deepspeed --deepspeed_config ds.json",
            "--deepspeed --deepspeed_config CONFIG train_micro_batch_size_per_gpu=2 gradient_accumulation_steps=4",
        ),
    ],
)
def test_a_plan_is_rendered_in_the_flags_of_the_framework(
    trainer: str, command: str, flags: str
) -> None:
    assert render_arguments(job(trainer, command)) == tuple(flags.split())


def test_values_of_the_command_are_the_defaults_of_knobs() -> None:
    spec = job(
        "hf",
        "python train.py --per_device_train_batch_size=4 --gradient_accumulation_steps 2 --fp16 true --lr 1e-4",
    )
    assert spec.command == ("python", "train.py", "--lr", "1e-4")
    assert spec.precision is Precision.FP16
    micro, accumulation = spec.knobs.micro_batch_size, spec.knobs.gradient_accumulation_steps
    assert micro is not None
    assert accumulation is not None
    assert (micro.default, accumulation.default) == (4, 2)
    assert render_arguments(spec)[-8:-4] == ("--bf16", "false", "--fp16", "true")


def test_settings_of_the_job_override_its_trainer() -> None:
    spec = job(
        "hf",
        "python train.py --gradient_checkpointing",
        launch="torchrun",
        knobs={"micro_batch_size": {"flag": "--bs", "default": 3}, "resume_from": None},
        resume={"checkpoints": "mine-*"},
        progress=r"step (\d+)",
        phases={"encoding": "codec"},
    )
    assert (spec.launch, spec.progress) == ("torchrun", r"step (\d+)")
    assert spec.knobs.micro_batch_size is not None
    assert (spec.knobs.micro_batch_size.flag, spec.knobs.micro_batch_size.also) == ("--bs", ())
    assert spec.knobs.resume_from is None
    assert spec.knobs.zero_stage is None, (
        "shards are said in accelerate's file, and torchrun reads none"
    )
    assert spec.knobs.activation_checkpointing is None, "the command says it for every plan"
    assert (spec.resume.checkpoints, spec.resume.holds) == (("mine-*",), ("trainer_state.json",))
    assert [phase for phase, _ in spec.phases] == ["training", "evaluation", "encoding"]


def test_a_default_of_its_own_leaves_a_knob_as_it_is() -> None:
    spec = job("lightning", knobs={"micro_batch_size": {"default": 8}})
    assert spec.knobs.micro_batch_size is not None
    assert (spec.knobs.micro_batch_size.flag, spec.knobs.micro_batch_size.default) == (
        "--data.batch_size",
        8,
    )


@pytest.mark.parametrize(
    ("text", "phrases"),
    [
        (
            "command: python t.py\ntrainer: hff\n",
            ["job.yaml:4: trainer", "'hff'", "did you mean 'hf'?"],
        ),
        (
            "command: accelerate launch t.py\ntrainer: hf\n",
            ["command", "leave out accelerate's own words"],
        ),
        ("command: python t.py\ntrainer: hf\nknobs: 3\n", ["job.yaml:5: knobs"]),
        ("model: {factory: m.py:make}\ntrainer: hf\n", ["needs a `command`"]),
        ('command: "python \'t"\ntrainer: hf\n', ["command", "No closing quotation"]),
        (
            "command: python t.py\ntrainer: hf\nresume: {checkpoint: a}\n",
            ["job.yaml:5: resume.checkpoint"],
        ),
    ],
)
def test_a_mistake_beside_a_trainer_is_one_error_with_its_place(
    text: str, phrases: list[str]
) -> None:
    with pytest.raises(SpecError) as refused:
        parse_job(f"name: a\nglobal_batch_size: 8\n{text}", "job.yaml")
    for part in phrases:
        assert part in str(refused.value)


def test_a_script_of_trl_trains_in_bf16_by_default() -> None:
    assert job("hf").precision is Precision.FP32
    assert job("trl").precision is Precision.BF16
    assert job("trl", "python train.py --bf16 false").precision is Precision.FP32
    assert job("trl", precision="fp16").precision is Precision.FP16


def test_the_guide_says_of_each_trainer_what_it_is_told() -> None:
    page = (Path(__file__).parents[2] / "docs" / "guides" / "frameworks.md").read_text()
    rows = (line.strip("| ").split(" | ") for line in page.splitlines() if line.startswith("| `"))
    table = {cells[0].strip("`"): cells[1:] for cells in rows if cells[0].strip("`") in FRAMEWORKS}
    assert table == {trainer: _table_cells(load_knobs(trainer)) for trainer in FRAMEWORKS}


def _table_cells(knobs: dict[str, Any]) -> list[str]:
    """Return the cells of a trainer in the guide's table."""
    recomputes = knobs.get("activation_checkpointing")
    modes = (
        []
        if recomputes is None
        else ["all layers", *(["selective"] if "selective" in recomputes.get("values", ()) else [])]
    )
    others = ("full_checkpointing_layers", "zero_stage", "optimizer_in_backward")
    return [", ".join(modes) or "-", *(f"`{name}`" if name in knobs else "-" for name in others)]


@pytest.mark.parametrize(
    ("trainer", "option"),
    [
        ("megatron", "--tensor-model-parallel-size 2"),
        ("megatron", "--context-parallel-size=4"),
        ("torchtitan", "--parallelism.pipeline_parallel_degree 2"),
    ],
)
def test_a_command_that_cuts_its_model_over_ranks_is_refused_unless_it_tells_its_speeds(
    trainer: str, option: str
) -> None:
    with pytest.raises(SpecError, match="plans of a script are data parallel only"):
        job(trainer, f"python train.py {option}")
    assert job(trainer, f"python train.py {option}", speeds={"8": "2.1s"}).speeds
    assert job(trainer, f"python train.py {option[:-1]}1").command


OURS = "extends: hf\nlaunch: torchrun\nknobs:\n  micro_batch_size: {flag: --samples, default: 4}\n"
JOB = "name: a\nglobal_batch_size: 16\ncommand: python train.py\ntrainer: ours.yaml\n"


def test_a_preset_file_fills_in_what_the_job_leaves_out_and_extends_a_framework() -> None:
    preset = parse_job(JOB, "job.yaml", read_text=lambda _: OURS)
    assert (preset.trainer, preset.launch) == ("hf", "torchrun")
    knob = preset.knobs.micro_batch_size
    assert knob is not None
    assert (knob.flag, knob.default) == ("--samples", 4)
    assert preset.knobs.output_dir == job("hf").knobs.output_dir
    preset_job = parse_job(
        JOB + "launch: ranks\nknobs: {micro_batch_size: {flag: --mine}}\n",
        "job.yaml",
        read_text=lambda _: OURS,
    )
    assert preset_job.knobs.micro_batch_size is not None
    assert (preset_job.launch, preset_job.knobs.micro_batch_size.flag) == ("ranks", "--mine")
    assert parse_job_data(preset.model_dump(mode="json"), "request") == preset


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("extends: hff\n", "extends a framework"),
        ("knob: {}\n", "unknown key of a preset"),
        ("- 1\n", "top level"),
        ("extends: [hf]\n", "extends a framework"),
    ],
)
def test_a_preset_file_that_is_none_is_refused_with_what_may_stand_there(
    text: str, message: str
) -> None:
    with pytest.raises(SpecError, match=message):
        parse_job(JOB, "job.yaml", read_text=lambda _: text)


def test_no_preset_file_is_read_for_a_job_that_came_without_a_file() -> None:
    with pytest.raises(SpecError, match="where the job file lies"):
        parse_job(JOB, "a page")
    with pytest.raises(SpecError):
        job("/etc/passwd.yaml")
