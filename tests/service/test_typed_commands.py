"""Laws of `orc init COMMAND`: a typed command becomes a job with the same arguments, for every trainer."""

from __future__ import annotations

import os
import re
import sys
from pathlib import Path

import pytest

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.specs.choices import Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob
from orchestrator.specs.parse import parse_job

TRAIN = """
import argparse
p = argparse.ArgumentParser()
p.add_argument("-b", "--batch-size", type=int, default=8)
p.add_argument("--accumulate", type=int, default=1)
p.add_argument("--out")
p.add_argument("--deepspeed")
p.add_argument("--lr", required=True)
open("it-was-run", "w")
"""
SETUP = "def setup(train: TrainArgs = TrainArgs(global_batch_size=48, micro_batch_size=1)): ...\n"
YAML = "model_name_or_path: m\nper_device_train_batch_size: 4\nmicro_batch_size: 4\ngradient_accumulation_steps: 2\n"


@pytest.fixture
def environment(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Another environment on the PATH, with the console scripts of trainers as pip writes them."""
    bin_ = tmp_path / "env/bin"
    bin_.mkdir(parents=True)
    (bin_ / "python3.11").symlink_to(sys.executable)
    for name in (
        "trl",
        "llamafactory-cli",
        "axolotl",
        "litgpt",
        "tune",
        "accelerate",
        "torchrun",
        "deepspeed",
        "mine",
    ):
        (bin_ / name).write_text(f"#!{bin_}/python3.11\n")
        (bin_ / name).chmod(0o755)
    litgpt = tmp_path / "env/lib/python3.11/site-packages/litgpt/finetune"
    litgpt.mkdir(parents=True)
    (litgpt / "full.py").write_text(SETUP)
    monkeypatch.setenv("PATH", f"{bin_}{os.pathsep}{os.environ['PATH']}")
    (tmp_path / "train.py").write_text(TRAIN)
    (tmp_path / "pkg").mkdir()
    (tmp_path / "pkg/mod.py").write_text(TRAIN)
    (tmp_path / "cli.py").write_text(
        "from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n"
    )
    (tmp_path / "train.yaml").write_text(YAML + "bf16: true\noutput_dir: saves\n")
    (tmp_path / "x.yaml").write_text(
        "trainer: {accumulate_grad_batches: 4}\ndata: {batch_size: 6}\n"
    )
    return tmp_path


def propose(folder: Path, typed: str) -> tuple[str, JobSpec]:
    text = propose_job_file(typed.split(), folder, {})
    return text, parse_job(
        text if "\nglobal_batch_size:" in text else f"{text}global_batch_size: 8\n", "proposal"
    )


# typed => command | trainer, launch, micro-batch, global batch, devices; - stands for none
TYPED = """
trl sft --model_name_or_path m --per_device_train_batch_size 4 --output-dir o => {python} -m trl.scripts.sft --model_name_or_path m | trl accelerate 4 4 1
trl dpo --num_processes 2 => {python} -m trl.scripts.dpo | trl accelerate 8 16 2
llamafactory-cli train train.yaml => {python} -m llamafactory.launcher train.yaml | llamafactory torchrun 4 8 1
axolotl train train.yaml => {python} -m axolotl.cli.train train.yaml | axolotl accelerate 4 8 1
litgpt finetune_full ckpt --train.micro_batch_size 4 --out_dir o --devices 2 => {bin}/litgpt finetune_full ckpt | litgpt self 4 48 2
tune run full_finetune_single_device --config l/1B batch_size=2 => {bin}/tune run full_finetune_single_device --config l/1B | torchtune self 2 2 1
accelerate launch --num_processes 4 --mixed_precision bf16 train.py -b 4 --out x --lr 1 => {python} train.py --lr 1 | - accelerate 4 16 4
torchrun --standalone --nproc-per-node=4 train.py --lr 1 => {python} train.py --lr 1 | - torchrun 8 32 4
torchrun -m pkg.mod --lr 1 => {python} -m pkg.mod --lr 1 | - torchrun 8 8 1
deepspeed --num_gpus 2 train.py --deepspeed d.json --lr 1 => {python} train.py --deepspeed d.json --lr 1 | - deepspeed 8 16 2
python -m pkg.mod --lr 1 --batch-size=2 => {own} -m pkg.mod --lr 1 | - ranks 2 2 1
{python} -u train.py --lr 1 => {python} -u train.py --lr 1 | - ranks 8 8 1
python cli.py fit --config x.yaml => {own} cli.py fit --config x.yaml | lightning torchrun 6 24 1
train.py => python train.py --lr LR | - ranks 8 8 1
mine train --lr 1 => {bin}/mine train --lr 1 | - self - - 1
conda run -p env torchrun train.py --lr 1 => {own} train.py --lr 1 | - torchrun 8 8 1
"""  # noqa: E501


@pytest.mark.parametrize("line", TYPED.strip().splitlines())
def test_a_typed_command_becomes_a_job_that_keeps_it(
    environment: Path, line: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    (environment / "env/bin/python").symlink_to(sys.executable)
    interpreter = environment / "env/bin/python"
    line = line.format(
        bin=interpreter.parent, python=interpreter.with_name("python3.11"), own=interpreter
    )
    typed, command, expected = re.split(r" => | \| ", line)
    monkeypatch.chdir(environment)
    text, spec = propose(environment, typed)
    assert spec.command == tuple(command.split()), text
    knob, has_batch = spec.knobs.micro_batch_size, "\nglobal_batch_size:" in text
    summary = (
        spec.trainer,
        spec.launch,
        knob and knob.default,
        has_batch and spec.global_batch_size,
        spec.gpus.max,
    )
    assert [str(value or "-") for value in summary] == expected.split(), text
    assert spec.workdir == str(environment)
    assert not (environment / "it-was-run").exists()


def test_the_origin_of_the_interpreter_is_noted(environment: Path) -> None:
    text, _ = propose(environment, "trl sft --model_name_or_path m")
    assert f"# {environment}/env/bin/python3.11 is the interpreter of trl, not orc's own." in text


def test_a_yaml_driven_trainer_has_its_file_copied_with_each_plan(environment: Path) -> None:
    _, spec = propose(environment, "llamafactory-cli train train.yaml")
    assert spec.config is not None
    assert (spec.config.file, spec.config.flag, spec.precision) == (
        "train.yaml",
        None,
        Precision.BF16,
    )
    keys = {name: knob.key for name, knob in spec.knobs.items()}
    assert keys["output_dir"] == "output_dir"
    assert keys["resume_from"] == "resume_from_checkpoint"
    assert spec.success.artifacts == ("*.safetensors",)
    assert spec.progress is not None


def test_litgpt_divides_its_global_batch_itself_and_only_some_of_it_resumes(
    environment: Path,
) -> None:
    _, spec = propose(environment, "litgpt finetune_full ckpt")
    assert spec.knobs.derives_accumulation
    assert spec.knobs.resume_from == Knob(flag="--resume")
    assert propose(environment, "litgpt finetune_lora ckpt")[1].knobs.resume_from is None


@pytest.mark.parametrize(
    "typed",
    ["llamafactory-cli webui", "trl env", "tune ls", "accelerate config", "no-such-program"],
)
def test_a_command_that_starts_no_training_is_refused(environment: Path, typed: str) -> None:
    with pytest.raises(SpecError) as refused:
        propose(environment, typed)
    assert "allowed" in str(refused.value)


STEPS = """
--max_steps --steps --iterations --iters --num_iterations --total_iters --train_steps --max_train_steps --n_steps
--total_updates --max_update --max-updates --num-train-steps --train-iters --maxiter --MAX_ITER --number_of_steps
--train_num_steps --max_optimizer_steps trainer.max_steps= train.steps= optim.iterations=
"""
OTHER_STEPS = """
--save_steps --warmup_steps --eval_steps --logging_steps --steps_per_epoch --lr_decay_iters --num_inference_steps
--epochs --num_train_epochs --max_steps_per_episode --n_step --total_timesteps --num_train_timesteps --step --start_iter
--gradient_steps --log_iters --cooldown_iters scheduler.steps= logging.steps= checkpoint.iterations=
"""


@pytest.mark.parametrize("name", STEPS.split())
def test_a_number_of_optimizer_steps_is_known_by_any_name_that_counts_them(
    environment: Path, name: str
) -> None:
    typed = f"{name}2000" if name.endswith("=") else f"{name} 2000"
    text, spec = propose(environment, f"python train.py --lr 1 {typed}")
    assert (spec.steps, spec.command[-1].endswith("2000")) == (2000, True), text


@pytest.mark.parametrize("name", OTHER_STEPS.split())
def test_steps_of_something_else_are_no_number_of_optimizer_steps(
    environment: Path, name: str
) -> None:
    typed = f"{name}2000" if name.endswith("=") else f"{name} 2000"
    text, spec = propose(environment, f"python train.py --lr 1 {typed}")
    assert spec.steps is None
    assert "# Not known: the number of its optimizer steps." in text


def test_numbers_of_steps_that_disagree_are_named_and_none_is_taken(environment: Path) -> None:
    text, spec = propose(environment, "python train.py --lr 1 --steps 2000 --n_steps 16")
    assert spec.steps is None
    assert "# CHECK: these disagree, none is taken: --steps 2000; --n_steps 16." in text
    assert (
        propose(environment, "python train.py --lr 1 --steps 9 --max_steps 2000 --steps 2000")[
            1
        ].steps
        == 2000
    )


def test_a_default_number_of_steps_does_not_count_beside_typed_epochs(environment: Path) -> None:
    with_steps = (
        TRAIN
        + 'p.add_argument("--steps", type=int, default=70)\np.add_argument("--epochs", type=int)\n'
    )
    (environment / "train.py").write_text(with_steps)
    assert propose(environment, "python train.py --lr 1")[1].steps == 70
    assert propose(environment, "python train.py --lr 1 --epochs 3")[1].steps is None
