"""Laws of `orc init` for command lines as people paste them: nothing typed is lost, and no number is invented."""

from __future__ import annotations

import itertools
import json
import random
import re
import shlex
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import pytest

from orchestrator.backends.attempts.workdir import rewrite_config
from orchestrator.planning.render import RenderedCommand, render_script_command
from orchestrator.planning.request import read_script_request
from orchestrator.service.commands.init.meanings import find_quantity_and_count
from orchestrator.service.commands.init.named_files import read_settings_file
from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.intake.intake import read_cluster
from orchestrator.specs.choices import ActivationCheckpointing, Engine, ParallelLayout, ZeroStage
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job, parse_jobs
from orchestrator.specs.plan import Plan

EIGHT = Path(__file__).parents[2] / "clusters/1x8-h100-80gb.yaml"


def parser(*flags: str) -> str:
    """Source of a script with argparse: `--lr=1e-4` has a default, `--amp!` is a switch."""
    lines = ["import argparse", "p = argparse.ArgumentParser()"]
    for flag in flags:
        name, equals, default = flag.partition("=")
        if name.endswith("!"):
            lines.append(f"p.add_argument({name[:-1]!r}, action='store_true')")
        else:
            lines.append(
                f"p.add_argument({name!r}, type=str"
                + (f", default={default}" if equals else "")
                + ")"
            )
    return "\n".join([*lines, "a = p.parse_args()", ""])


PLAIN = parser("--batch-size=8", "--lr=1e-3", "--data", "--output")
HF = """import transformers
from dataclasses import dataclass, field
@dataclass
class ModelArguments:
    model_name_or_path: str = field(default="facebook/opt-125m")
@dataclass
class DataArguments:
    data_path: str = field(default=None)
@dataclass
class TrainingArguments(transformers.TrainingArguments):
    cache_dir: str = field(default=None)
    optim: str = field(default="adamw_torch")
    model_max_length: int = field(default=512)
parser = transformers.HfArgumentParser((ModelArguments, DataArguments, TrainingArguments))
"""
NANOGPT = """import os
gradient_accumulation_steps = 5 * 8
batch_size = 12
block_size = 1024
config_keys = [k for k, v in globals().items()]
exec(open('configurator.py').read())
ddp = int(os.environ.get('RANK', -1)) != -1
if ddp:
    from torch.distributed import init_process_group
    gradient_accumulation_steps //= ddp_world_size
"""
ACCELERATED = "from accelerate import Accelerator\n" + parser(
    "--train_batch_size=16", "--gradient_accumulation_steps=1", "--mixed_precision", "--output_dir", "--learning_rate",
    "--pretrained_model_name_or_path", "--max_train_steps", "--gradient_checkpointing!", "--resume_from_checkpoint",
) + "Accelerator()\n"  # fmt: skip
OWN_ACCELERATED = (
    "from accelerate import Accelerator\n" + parser("--batch_size=4", "--lr=1") + "Accelerator()\n"
)
HYDRA = "import hydra\n@hydra.main(config_path='conf', config_name='config')\ndef main(cfg): ...\n"
DDP = PLAIN + "from torch.distributed import init_process_group\ninit_process_group()\n"
CONFIGURED = parser("--config", "-v!") + "import yaml, json\n"
CLICK = """import click
@click.command()
@click.option("--batch-size", "-b", default=16)
@click.option("--accum", default=1)
@click.option("--amp/--no-amp", default=False)
def main(batch_size, accum, amp): ...
"""
TYPER = "import typer\ndef main(data: str, batch_size: int = 4, accum_steps: int = 1): ...\ntyper.run(main)\n"
DATACLASS = (
    "from dataclasses import dataclass\n@dataclass\nclass Config:\n"
    "    batch_size: int = 8\n    lr: float = 1e-3\n"
)
FSDP = """compute_environment: LOCAL_MACHINE
distributed_type: FSDP
fsdp_config: {fsdp_sharding_strategy: FULL_SHARD, fsdp_offload_params: false}
mixed_precision: bf16
num_machines: 1
num_processes: 8
"""
ZERO = """distributed_type: DEEPSPEED
deepspeed_config: {gradient_accumulation_steps: 4, gradient_clipping: 0.5, zero_stage: 2}
mixed_precision: bf16
num_processes: 2
"""
DS = {
    "train_micro_batch_size_per_gpu": 16, "gradient_accumulation_steps": 1, "gradient_clipping": 0.5,
    "optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "bf16": {"enabled": True},
    "scheduler": {"type": "WarmupLR", "params": {"warmup_num_steps": 10}},
}  # fmt: skip
DS_AUTO = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {},
}
DS_STAGED = {
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "zero_optimization": {"stage": 2, "reduce_bucket_size": 2e8, "overlap_comm": True},
}
DS_OFFLOADED = {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}}
SBATCH = """#!/bin/bash
#SBATCH --job-name=tune
#SBATCH --nodes=2
#SBATCH --gpus-per-node=4
#SBATCH --time=12:00:00
module load cuda/12.1
export NCCL_DEBUG=INFO
srun torchrun --nnodes $SLURM_NNODES --nproc_per_node 4 --rdzv_endpoint $MASTER:29500 train.py --batch-size 4 --lr 3e-4
"""
SHELL = """#!/usr/bin/env bash
set -e
BS=${BS:-24}
LR=2e-5
export TOKENIZERS_PARALLELISM=false
torchrun --standalone \\
    --nproc_per_node=2 \\
    train.py --batch-size $BS --lr $LR "$@"
"""
DS_OWN = parser("--local_rank=-1", "--steps=6", "--deepspeed='ds.json'") + "import deepspeed\n"
ARRAY = """#!/bin/bash
#SBATCH --job-name=tune
#SBATCH --gres=gpu:4
#SBATCH -t 1-12:30:00
#SBATCH --array=0-3%2
#SBATCH --mem=64G --requeue
#SBATCH --account=lab
#SBATCH --qos=high
#SBATCH --output=%x.out
#SBATCH --dependency=afterok:81
#SBATCH --begin=22:00
#SBATCH --mail-user=me
python train.py --batch-size 32 --lr $SLURM_ARRAY_TASK_ID
"""
TOML = "[train]\nbatch_size = 48\nlr = 0.001\n"
YAML = "# mine\nmodel: {width: 64}\ntrain:\n  batch_size: 48\n  accumulate: 2\n  lr: 1.0e-3\n"
LLAMA_YAML = "model_name_or_path: m\nper_device_train_batch_size: 2\ngradient_accumulation_steps: 8\nbf16: true\n"
AXOLOTL = (
    "base_model: m\nmicro_batch_size: 2\ngradient_accumulation_steps: 4\n"
    "bf16: auto\ngradient_checkpointing: true\n"
)
CONSTANT = "import torch\nBATCH_SIZE = 128\nEPOCHS = 1\nfor batch in load(BATCH_SIZE): ...\n"
WHISPER = """from transformers import Seq2SeqTrainer, Seq2SeqTrainingArguments
training_args = Seq2SeqTrainingArguments(output_dir="./whisper", per_device_train_batch_size=16,
    gradient_accumulation_steps=2, learning_rate=1e-5, max_steps=4000, fp16=True, per_device_eval_batch_size=8)
"""
YOLO = """import argparse
p = argparse.ArgumentParser()
p.add_argument("--batch-size", type=int, default=16, help="total batch size for all GPUs, -1 for autobatch")
p.add_argument("--weights"); p.add_argument("--data"); p.add_argument("--device")
"""
IMAGENET = parser("--batch-size=256", "--dist-url") + (
    "import torch.multiprocessing as mp\nmp.spawn(w, nprocs=ngpus_per_node)\n"
    "args.batch_size = int(args.batch_size / ngpus_per_node)\n"
)
LIGHTNING = "from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n"


@dataclass(frozen=True)
class Case:
    """A command line, the files beside it, and what its proposal has to say."""

    typed: str
    batch: int | None  # samples per optimizer step; None: nothing says it
    gpus: int = 1  # at most
    files: Mapping[str, str] = field(default_factory=dict)
    has: tuple[str, ...] = ()  # in the text
    lacks: tuple[str, ...] = ()


def py(source: str, **others: str) -> dict[str, str]:
    return {"train.py": source} | {
        name.replace("__", "/").replace("_DOT_", "."): text for name, text in others.items()
    }


CASES = {
    "alpaca": Case("torchrun --nproc_per_node=4 --master_port=29500 train.py --model_name_or_path facebook/opt-6.7b --bf16 True --per_device_train_batch_size 4 --per_device_eval_batch_size 4 --gradient_accumulation_steps 8 --learning_rate 2e-5 --fsdp 'full_shard auto_wrap' --tf32 True", 128, 4, py(HF), ("trainer: hf", "facebook/opt-6.7b")),  # noqa: E501
    "alpaca-deepspeed": Case("torchrun --nproc_per_node=4 train.py --per_device_train_batch_size 4 --gradient_accumulation_steps 8 --deepspeed ds.json --bf16 True", 128, 4, py(HF, ds_DOT_json=json.dumps(DS_AUTO)), ("--deepspeed ds.json",)),  # noqa: E501
    "alpaca-staged": Case("torchrun --nproc_per_node=4 train.py --per_device_train_batch_size 4 --deepspeed ds.json", 16, 4, py(HF, ds_DOT_json=json.dumps(DS_STAGED)), ("plan: {zero_stage: 2}", "{key: zero_optimization.stage}", "reduce_bucket_size: 200000000", "overlap_comm: true")),  # noqa: E501
    "alpaca-offloaded": Case("torchrun --nproc_per_node=4 train.py --per_device_train_batch_size 4 --deepspeed ds.json", 16, 4, py(HF, ds_DOT_json=json.dumps(DS_OFFLOADED)), ("--deepspeed ds.json",), ("zero_optimization.stage",)),  # noqa: E501
    "hf-json": Case("python train.py args.json", 24, 1, py(HF, args_DOT_json='{"per_device_train_batch_size": 3, "gradient_accumulation_steps": 8}'), ("key: per_device",)),  # noqa: E501
    "hf-max-steps": Case("python train.py --model_name_or_path gpt2 --max_steps 500 --per_device_train_batch_size 2", 2, 1, py(HF), ("steps: 500", "{hf: gpt2}")),  # noqa: E501
    "accelerate-fsdp": Case("accelerate launch --config_file fsdp.yaml train.py --batch_size 16 --lr 1e-4", 128, 8, py(OWN_ACCELERATED, fsdp_DOT_yaml=FSDP), ("--config_file fsdp.yaml", "precision: bf16")),  # noqa: E501
    "accelerate-zero": Case("accelerate launch --config_file zero.yaml train.py --batch_size 8", 64, 2, py(OWN_ACCELERATED, zero_DOT_yaml=ZERO), ("--config_file zero.yaml",)),  # noqa: E501
    "diffusers": Case("accelerate launch --mixed_precision=fp16 --multi_gpu --num_processes 4 train.py --pretrained_model_name_or_path CompVis/sd-v1-4 --train_batch_size=2 --gradient_accumulation_steps=4 --gradient_checkpointing --max_train_steps=15000 --learning_rate=1e-05", 32, 4, py(ACCELERATED), ("steps: 15000", "precision: fp16", "--gradient_checkpointing")),  # noqa: E501
    "nanogpt": Case("python train.py config/small.py --batch_size=32 --compile=False", 32, 1, py(NANOGPT, config__small_DOT_py="batch_size = 64\ngradient_accumulation_steps = 1\n"), ("override: --batch_size",)),  # noqa: E501
    "nanogpt-ddp": Case("torchrun --standalone --nproc_per_node=8 train.py --batch_size=12", 480, 8, py(NANOGPT), ("gpus: 8",)),  # noqa: E501
    "hydra": Case("python train.py data.batch_size=128 trainer.max_epochs=5 +experiment=foo", 128, 1, py(HYDRA), ("override: data.batch_size",)),  # noqa: E501
    "hydra-folder": Case("python train.py data=big optim.lr=0.1", 96, 1, py(HYDRA, conf__config_DOT_yaml="defaults: [_self_, {data: small}]\noptim: {lr: 1}\n", conf__data__big_DOT_yaml="batch_size: 96\n", conf__data__small_DOT_yaml="batch_size: 4\n")),  # noqa: E501
    "dora": Case("dora run -d solver=musicgen/base dataset.batch_size=8 optim.epochs=5", 8, 1, {}, ("launch: dora",)),
    "lightning": Case("python train.py fit --config c.yaml --data.batch_size 128 --trainer.devices 2", 256, 2, py(LIGHTNING, c_DOT_yaml="trainer: {max_epochs: 3}\ndata: {batch_size: 6}\n")),  # noqa: E501
    "llamafactory": Case("llamafactory-cli train sft.yaml", 16, 1, {"sft.yaml": LLAMA_YAML}, ("config: {file: sft.yaml}",)),  # noqa: E501
    "llamafactory-flags": Case("llamafactory-cli train --stage sft --model_name_or_path m --per_device_train_batch_size 2 --gradient_accumulation_steps 8 --fp16", 16, 1, {}, ("flag: --per_device",)),  # noqa: E501
    "axolotl": Case("accelerate launch -m axolotl.cli.train a.yml", 8, 1, {"a.yml": AXOLOTL}, ("trainer: axolotl",)),
    "torchtune": Case("tune run --nproc_per_node 8 full_finetune_distributed --config llama3/8B_full batch_size=4 gradient_accumulation_steps=16", 512, 8),  # noqa: E501
    "torchtune-recipe": Case("tune run full_finetune_single_device --config llama3/8B_full", None, 1, {}, (), ("global_batch_size: 1 ",)),  # noqa: E501
    "trl": Case("trl sft --model_name_or_path m --dataset_name d --config t.yaml --num_processes 2", 24, 2, {"t.yaml": "per_device_train_batch_size: 3\ngradient_accumulation_steps: 4\n"}),  # noqa: E501
    "whisper": Case("python train.py", 32, 1, py(WHISPER), ("per_device_train_batch_size = 16 in train.py:2",)),
    "yolo": Case("python -m torch.distributed.run --nproc_per_node 2 train.py --batch-size 64 --data coco.yaml --weights yolov5s.pt --device 0,1", 64, 2, py(YOLO), ("per: global", "--weights yolov5s.pt")),  # noqa: E501
    "imagenet": Case("python train.py --batch-size 128", 128, 1, py(IMAGENET), ("launch: self",)),
    "srun": Case("srun -N1 --gres=gpu:4 --time=1:00:00 torchrun --nproc_per_node 4 train.py --batch-size 16", 64, 4, py(PLAIN), ("--time",)),  # noqa: E501
    "sbatch": Case("sbatch job.sbatch", 32, 8, py(PLAIN, job_DOT_sbatch=SBATCH), ("name: tune", "NCCL_DEBUG: ", "module load cuda/12.1", "12:00:00")),  # noqa: E501
    "plain-on-four": Case("sbatch --gres=gpu:4 job.sbatch", 32, 1, py(DDP, job_DOT_sbatch="python train.py --batch-size 32\n")),  # noqa: E501
    "srun-on-four": Case("sbatch job.sbatch", 128, 4, py(DDP, job_DOT_sbatch="#SBATCH --gres=gpu:4 -n4\nsrun python train.py --batch-size 32\n")),  # noqa: E501
    "uv": Case("uv run --with wandb train.py --batch-size 6", 6, 1, py(PLAIN), ("uv run --with wandb",)),
    "nohup": Case("nohup python -u train.py --batch-size 6 --output o > log.txt 2>&1 &", 6, 1, py(PLAIN)),
    "bash": Case("bash run.sh --data d", 48, 2, py(PLAIN, run_DOT_sh=SHELL), ("--data d", "TOKENIZERS_PARALLELISM", "--lr 2e-5")),  # noqa: E501
    "bash-assigned": Case("BS=10 ./run.sh", 20, 2, py(PLAIN, run_DOT_sh=SHELL)),
    "click": Case("python train.py -b 24 --accum 2 --amp", 48, 1, py(CLICK), ("--amp",)),
    "typer": Case("python train.py corpus --batch-size 12", 12, 1, py(TYPER), ("train.py corpus",)),
    "simple-parsing": Case("python train.py --batch_size 20", 20, 1, py(DATACLASS + "import simple_parsing\np = simple_parsing.ArgumentParser()\np.add_arguments(Config, dest='c')\n")),  # noqa: E501
    "draccus": Case("python train.py --data.batch_size=20 --lr 1", 20, 1, py(DATACLASS + "@dataclass\nclass Top:\n    data: Config\n    lr: float = 1\nimport draccus\n@draccus.wrap()\ndef main(cfg: Top): ...\n")),  # noqa: E501
    "tyro": Case("python train.py --batch-size 20", 20, 1, py(DATACLASS + "import tyro\ntyro.cli(Config)\n")),
    "jsonargparse": Case("python train.py --steps 10", 128, 1, py("from jsonargparse import CLI\ndef train(batch_size: int = 128, accumulate: int = 1, steps: int = 5): ...\nCLI(train)\n")),  # noqa: E501
    "fire-alpaca-lora": Case("python train.py --base_model m --batch_size 128 --micro_batch_size 4", 128, 1, py("import fire\ndef train(base_model: str = '', batch_size: int = 64, micro_batch_size: int = 2): ...\nfire.Fire(train)\n"), ("derived",)),  # noqa: E501
    "openrlhf": Case("deepspeed --num_gpus 4 train.py --pretrain m --micro_train_batch_size 2 --train_batch_size 64 --bf16", 64, 4, py(parser("--pretrain", "--micro_train_batch_size=8", "--train_batch_size=128", "--bf16!")), ("--bf16",)),  # noqa: E501
    "absl": Case("python train.py --train_batch=9", 9, 1, py("from absl import flags\nflags.DEFINE_integer('train_batch', 4, 'x')\n")),  # noqa: E501
    "odd-names": Case("python train.py --batch_size_per_gpu 5 --accum 3", 15, 1, py(parser("--batch_size_per_gpu=2", "--accum=1"))),  # noqa: E501
    "amp": Case("python train.py --batch-size 6 --amp --fp16", 6, 1, py(parser("--batch-size=2", "--amp!", "--fp16!")), ("train.py --amp --fp16", "# Stays as typed, the same in every plan: --amp, --fp16")),  # noqa: E501
    "deepspeed-own": Case("deepspeed --num_gpus 1 train.py --deepspeed ds.json", 16, 1, py(DS_OWN, ds_DOT_json=json.dumps(DS)), ("file: ds.json",)),  # noqa: E501
    "constant": Case("python train.py", 128, 1, py(CONSTANT), ("BATCH_SIZE = 128 in train.py:2", "os.environ.get", "env: BATCH")),  # noqa: E501
    "variable": Case("BATCH=64 python train.py", 64, 1, py("import os\nbatch_size = int(os.environ.get('BATCH', 8))\n"), ("env: BATCH",)),  # noqa: E501
    "yaml": Case("python train.py --config c.yaml", 96, 1, py(CONFIGURED, c_DOT_yaml=YAML), ("key: train.batch_size",)),
    "json": Case("python train.py --config=c.json", 48, 1, py(CONFIGURED, c_DOT_json='{"train": {"batch_size": 48}}')),
    "toml": Case("python train.py --config c.toml", 48, 1, py(CONFIGURED, c_DOT_toml=TOML), ("--config c.toml",)),
    "assignments": Case("CUDA_VISIBLE_DEVICES=0,1 WANDB_MODE=offline WANDB_API_KEY=x123 python train.py --batch-size 8", 8, 1, py(PLAIN), ("WANDB_MODE: ", "CUDA_VISIBLE_DEVICES=0,1", "secrets: [WANDB_API_KEY]"), ("x123",)),  # noqa: E501
    "env-poetry": Case("env A=1 poetry run python train.py --batch-size 7", 7, 1, py(PLAIN), ("A: ", "poetry run")),
    "conda": Case("conda run -n ml --no-capture-output python train.py --batch-size 7", 7, 1, py(PLAIN), ("conda run -n ml",)),  # noqa: E501
    "unknown-wrapper": Case("submitit-ish --queue fast python train.py --batch-size 7", 7, 1, py(PLAIN), ("submitit-ish --queue fast python train.py", "launch: self")),  # noqa: E501
    "one-text": Case("'time python train.py --batch-size 7 2>&1 | tee log'", 7, 1, py(PLAIN)),
    "starter": Case("python train.py --batch-size 7 --data d", 7, 1, {"train.py": "from kit.cli import main\nmain()\n", "src/kit/__init__.py": "", "src/kit/cli.py": "from .options import add\n", "src/kit/options.py": PLAIN}, ("knobs:",)),  # noqa: E501
    "unknown": Case("python train.py --frobnicate 3", None, 1, py("print()\n"), ("--frobnicate 3",), ("\nglobal_batch_size:",)),  # noqa: E501
}  # fmt: skip


def words_of(typed: str) -> list[str]:
    """The words of a command line; of one that was typed as one text, those within."""
    arguments = shlex.split(typed)
    return shlex.split(arguments[0]) if len(arguments) == 1 else arguments


def propose(case: Case, folder: Path) -> tuple[str, JobSpec]:
    for name, content in case.files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(content)
        (folder / name).chmod(0o755)
    text = propose_job_file(shlex.split(case.typed), folder, {})
    return text, parse_job(
        text if "\nglobal_batch_size:" in text else f"{text}global_batch_size: 1\n", "proposal"
    )


def first_attempt(spec: JobSpec) -> RenderedCommand:
    """Return the command of the plan that has the defaults of all knobs, on all devices."""
    knob, dp = spec.knobs.micro_batch_size, spec.gpus.max
    steps = spec.knobs.gradient_accumulation_steps
    counted = int(knob.default or 1) if knob is not None else max(1, spec.global_batch_size // dp)
    micro = counted // dp if knob is not None and knob.per == "global" else counted
    accumulation = (
        int(steps.default or 1)
        if steps not in (None, "derived")
        else spec.global_batch_size // (micro * dp)
    )  # type: ignore[union-attr]
    plan = Plan(
        engine=Engine.SCRIPT, layout=ParallelLayout(dp=dp), micro_batch_size=max(1, micro), precision=spec.precision,
        gradient_accumulation_steps=max(1, accumulation), activation_checkpointing=ActivationCheckpointing.NONE,
        zero_stage=dict(spec.plan).get("zero_stage", ZeroStage.NONE),
    )  # fmt: skip
    return render_script_command(
        read_script_request(spec), plan, output_dir="OUT", resume_from=None, deepspeed_config_path="NEW.json",
        config_path="COPY",
        node_devices=tuple(range(dp)),
    )  # fmt: skip


def pairs(arguments: tuple[str, ...] | list[str]) -> Iterator[tuple[str, str]]:
    """(name, value) of each flag and each key=value; a bare flag is true."""
    for word, following in itertools.zip_longest(arguments, arguments[1:], fillvalue="-"):
        if "=" in word:
            yield (
                word.partition("=")[0].lstrip("-+").replace("-", "_"),
                word.partition("=")[2].lower(),
            )
        elif word.startswith("-"):
            yield (
                word.lstrip("-").replace("-", "_"),
                "true" if following.startswith("-") else following.lower(),
            )


def list_lost(case: Case, text: str, spec: JobSpec, folder: Path) -> list[str]:
    """Return the typed parts that neither the first attempt nor a comment has."""
    attempt = first_attempt(spec)
    shown = " ".join(
        [
            *attempt.arguments,
            *(f"{name}={value}" for name, value in [*spec.env, *attempt.env.items()]),
        ]
    )
    missing = [
        part
        for word in words_of(case.typed)
        for part in re.split(r"[=\s]", word)
        if part
        and part not in shown
        and part not in text
        and not re.fullmatch(r"\d?>.*|&|\||log.*|tee|x123|-\w", part)
    ]
    rendered = dict(pairs(attempt.arguments)) | {
        name.lower(): value for name, value in attempt.env.items()
    }
    values = set(rendered.values())
    program = words_of(case.typed)
    typed = dict(
        pairs(
            program[
                next(
                    (i for i, w in enumerate(program) if w.endswith(".py") or w in ("train", "-m")),
                    0,
                ) :
            ]
        )
    )
    for name, value in typed.items():
        meaning = (find_quantity_and_count(name) or ("",))[0]
        if (
            meaning == "output_dir"
            or value == "x123"
            or (spec.config is not None and value == spec.config.file)
        ):
            continue
        if (
            rendered.get(name, value if value in values or name in shown or name in text else None)
            != value
        ):
            missing.append(f"{name}: {value}, not {rendered.get(name)}")
    parts = [part for word in words_of(case.typed) for part in word.split("=")]
    files = [part for part in parts if part.endswith((".yaml", ".yml", ".json", ".toml"))]
    used = [*attempt.arguments, *([spec.config.file] if spec.config is not None else [])]
    missing += [
        f"the file {file}"
        for file in files
        if (folder / file).is_file() and not any(file in w for w in used)
    ]
    if spec.config is not None:
        original = (folder / spec.config.file).read_text()
        copy = folder / f"copy{Path(spec.config.file).suffix}"
        copy.write_text(rewrite_config(original, attempt.keys, is_json=copy.suffix == ".json"))
        before, after = (
            read_settings_file(folder / spec.config.file) or {},
            read_settings_file(copy) or {},
        )
        missing += [
            f"{key}: {value!r} became {after.get(key)!r}"
            for key, value in before.items()
            if after.get(key) != value
            and "output" not in key
            and not (value == "auto" and after.get(key) is True)
        ]
    return missing


def verdict(case: Case, folder: Path) -> str:
    """`right`, or why not: refused, misleading (a wrong number, or something lost), without batch size, incomplete."""
    try:
        text, spec = propose(case, folder)
    except SpecError as error:
        return f"refused: {error}"
    says = "\nglobal_batch_size:" in text
    if says and spec.global_batch_size != case.batch:
        return f"misleading: global batch {spec.global_batch_size}, not {case.batch}"
    if missing := list_lost(case, text, spec, folder):
        return f"misleading: lost {missing}"
    if not says and case.batch is not None:
        return "without batch size"
    wrong = [part for part in case.has if part not in text] + [
        part for part in case.lacks if part in text
    ]
    return (
        f"incomplete: {wrong}, gpus {spec.gpus.max}"
        if wrong or spec.gpus.max != case.gpus
        else "right"
    )


@pytest.mark.parametrize("name", CASES)
def test_a_pasted_command_becomes_its_job_which_can_be_planned(tmp_path: Path, name: str) -> None:
    assert verdict(CASES[name], tmp_path) == "right", propose(CASES[name], tmp_path)[0]
    spec = propose(CASES[name], tmp_path)[1]
    assert plan_job(spec, make_idle_nodes(read_cluster(EIGHT)), ())["chosen"] is not None


@pytest.mark.parametrize(
    ("source", "has"),
    [
        (ARRAY, ("--lr '{task}'",)),
        (
            ARRAY.replace("--lr ", "--output runs/"),
            ('env: {SLURM_ARRAY_TASK_ID: "{task}"}', "--output runs/{task}"),
        ),
        (
            ARRAY.replace(" --lr $SLURM_ARRAY_TASK_ID", ""),
            ('env: {SLURM_ARRAY_TASK_ID: "{task}"}',),
        ),
    ],
)
def test_each_option_of_a_batch_file_is_in_the_job_or_has_a_comment(
    tmp_path: Path, source: str, has: tuple[str, ...]
) -> None:
    for name, content in py(PLAIN, job_DOT_sbatch=source).items():
        (tmp_path / name).write_text(content)
    text = propose_job_file(["sbatch", "job.sbatch"], tmp_path, {})
    jobs = parse_jobs(text, "proposal")
    assert [spec.member and spec.member.max_concurrent for spec in jobs] == [2] * 4
    assert {spec.time_limit for spec in jobs} == {36.5 * 3600}
    assert [
        str(index) in [*spec.command, *dict(spec.env).values()] for index, spec in enumerate(jobs)
    ] == [True] * 4
    comments = (
        "# Not needed: --mem 64G",
        "# Not needed: --requeue",
        "# Not needed: --account lab",
        "# Not needed: --output %x.out",
        "# CHECK: not in the job: --qos high: write `priority: high`.",
        "# CHECK: --dependency afterok:81: write depends_on: [JOB-81]",
        '# CHECK: --begin 22:00: write start_window: "22:00-06:00"',
        "# Not needed: --mail-user me: the cluster file's `notify` has mail, chat and webhooks for all jobs.",
    )
    assert [part for part in (*comments, *has) if part not in text] == [], text
    assert not re.search(r"# .*--(gres|job-name)", text)


@pytest.mark.parametrize(
    ("time", "seconds"),
    [("90", 5400), ("90:30", 5430), ("1:00:00", 3600), ("2-0", 172_800), ("1-2:03:04", 93_784)],
)
def test_a_time_of_slurm_becomes_the_time_limit(tmp_path: Path, time: str, seconds: int) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    text = propose_job_file(["srun", f"--time={time}", "python", "train.py"], tmp_path, {})
    assert parse_job(text, "proposal").time_limit == seconds


@pytest.mark.parametrize("option", ["--time=UNLIMITED", "--array=0-99999", "--array=1-x"])
def test_a_time_or_an_array_that_cannot_be_read_gets_a_check(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    text = propose_job_file(["srun", option, "python", "train.py"], tmp_path, {})
    assert f"# CHECK: not in the job: {option.replace('=', ' ')}: write `" in text
    assert len(parse_jobs(text, "proposal")) == 1


@pytest.mark.parametrize(
    ("text", "is_global"),
    [
        ("Batch size per GPU (effective batch size is batch_size * accum_iter * # gpus)", False),
        ("images on each gpu; the total over all gpus is that many times it", False),
        ("per-process batch, all processes together take the sum", False),
        ("this is the total batch size of all GPUs on the current node", True),
        ("Global batch over all ranks, split evenly per rank", True),
    ],
)
def test_what_a_help_text_says_first_is_what_its_number_counts(
    tmp_path: Path, text: str, is_global: bool
) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        f"p.add_argument('--batch_size', type=int, default=16, help={text!r})\np.parse_args()\n"
    )
    command = ["torchrun", "--nproc_per_node", "8", "train.py"]
    spec = parse_job(propose_job_file(command, tmp_path, {}), "proposal")
    assert spec.global_batch_size == (16 if is_global else 128)


@pytest.mark.parametrize(
    "option",
    ["type=bool, default=False", "type=strtobool, default=False", "action='store_true'"],
)
def test_a_flag_that_is_true_or_false_takes_no_checkpoint(tmp_path: Path, option: str) -> None:
    (tmp_path / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\np.add_argument('--batch-size', default=8)\n"
        f"p.add_argument('--resume', {option})\np.parse_args()\n"
    )
    for typed in ([], ["--resume"], ["--resume", "true"]):
        text = propose_job_file(["python", "train.py", *typed], tmp_path, {})
        assert "resume_from:" not in text


@pytest.mark.parametrize(
    ("flags", "ranks"),
    [
        ("--nodes 8 --gpus 4", 32),
        ("--num_nodes 2 --devices 8", 16),
        ("--nodes 2 --num_processes 16", 16),
    ],
)
def test_devices_of_a_node_count_for_each_node(tmp_path: Path, flags: str, ranks: int) -> None:
    names = flags.split()[::2]
    options = "".join(f"p.add_argument({name!r}, type=int, default=1)\n" for name in names)
    (tmp_path / "train.py").write_text(
        "import argparse\np = argparse.ArgumentParser()\n"
        f"p.add_argument('--batch-size', type=int, default=4)\n{options}p.parse_args()\n"
    )
    text = propose_job_file(["python", "train.py", *flags.split()], tmp_path, {})
    assert parse_job(text, "proposal").global_batch_size == 4 * ranks


@pytest.mark.parametrize("flags", ["--gpus 4", "--gpu_ids 0,1,2,3", "--devices 4"])
def test_devices_that_a_script_was_given_may_share_its_batch_or_not(
    tmp_path: Path, flags: str
) -> None:
    (tmp_path / "train.py").write_text(parser("--batch-size=4", flags.split()[0]))
    text = propose_job_file(["python", "train.py", *flags.split()], tmp_path, {})
    assert "4 samples a step where all 4 devices share its batch, 16 where each has one" in text
    assert "\nglobal_batch_size:" not in text
    assert f"train.py {flags}" in text


@pytest.mark.parametrize(
    ("flag", "meaning"),
    [("--total_batch_size", "in units of #tokens"), ("--batch_size", "frames per GPU")],
)
def test_a_number_that_a_help_text_says_in_tokens_is_none_of_samples(
    tmp_path: Path, flag: str, meaning: str
) -> None:
    source = f"import argparse\np = argparse.ArgumentParser()\np.add_argument({flag!r}, help={meaning!r})\n"
    (tmp_path / "train.py").write_text(
        source + "p.add_argument('--micro_batch_size')\np.parse_args()\n"
    )
    typed = ["python", "train.py", flag, "8192", "--micro_batch_size", "4"]
    text = propose_job_file(typed, tmp_path, {})
    assert "counts tokens, not samples" in text
    assert "global_batch_size: 8192" not in text


def test_a_batch_that_the_code_divides_by_its_accumulation_is_that_of_a_step(
    tmp_path: Path,
) -> None:
    source = parser("--batch_size=8", "--accum=1") + "a.batch_size = a.batch_size // a.accum\n"
    (tmp_path / "train.py").write_text(source)
    text = propose_job_file(
        ["python", "train.py", "--batch_size", "64", "--accum", "4"], tmp_path, {}
    )
    assert parse_job(text, "proposal").global_batch_size == 64


def test_a_quoted_text_over_several_lines_is_one_word(tmp_path: Path) -> None:
    """A quote that a comment or the text's end leaves open joins nothing."""
    (tmp_path / "train.py").write_text(PLAIN)
    text = "# it's a comment\npython train.py --name 'two\nlines' --lr 0.5\necho \"open\n"
    (tmp_path / "run.sh").write_text(text)
    spec = parse_job(propose_job_file(["bash", "run.sh"], tmp_path, {}), "proposal")
    assert spec.command is not None
    assert spec.command[1:] == ("train.py", "--name", "two\nlines", "--lr", "0.5")


def test_help_is_run_only_where_it_is_asked_for_and_its_flags_are_read(tmp_path: Path) -> None:
    source = (
        "import argparse, pathlib\npathlib.Path('it-ran').touch()\np = argparse.ArgumentParser()\n"
    )
    source += "p.add_argument(*['--' + 'batch-size'], type=int, default=6, help='(default: %(default)s)')\n"
    (tmp_path / "train.py").write_text(source + "p.parse_args()\n")
    assert "\nglobal_batch_size:" not in propose_job_file(["python", "train.py"], tmp_path, {})
    assert not (tmp_path / "it-ran").exists()
    assert "flag: --batch-size, default: 6" in propose_job_file(
        ["python", "train.py"], tmp_path, {}, run_help=True
    )
    (tmp_path / "train.py").write_text("raise SystemExit('no such card')\n")
    with pytest.raises(SpecError, match="no such card"):
        propose_job_file(["python", "train.py"], tmp_path, {}, run_help=True)


WRAPPERS = (
    "", "A=1 B=2 ", "env A=1 ", "nohup ", "time ", "nice -n 5 ", "uv run ", "poetry run ", "srun --mem 8G ",
    "stdbuf -oL ", "timeout 60 ", "conda run -n x ", "X=1 nohup numactl -N 0 ",
)  # fmt: skip
LAUNCHERS = (
    "python {script}", "python3 -u {script}", "deepspeed --num_gpus {n} {script}",
    "torchrun --nproc_per_node {n} {script}",
    "torchrun --standalone --nproc-per-node={n} {script}", "accelerate launch --num_processes {n} {script}",
    "python -m torch.distributed.run --nproc_per_node={n} {script}", "mystery --nproc {n} python {script}",
    "accelerate launch --num_processes={n} --use_fsdp --fsdp_offload_params false {script}",
)  # fmt: skip
MICRO = (
    "batch_size",
    "per_device_train_batch_size",
    "micro_batch_size",
    "batch_size_per_gpu",
    "train_bs",
    "bs",
)
STEPS = (
    "gradient_accumulation_steps",
    "accum",
    "grad_accum_steps",
    "accumulate_grad_batches",
    "accum_iter",
)
PARSERS = {  # source, with M and S for the names and their defaults 3 and 1; how a flag is written
    "argparse": (parser("--M=3", "--S=1", "--lr=1"), "--{} {}"),
    "dashes": (parser("--M=3", "--S=1", "--lr=1").replace("_", "-").replace("add-argument", "add_argument"), "--{} {}"),
    "joined": (parser("--M=3", "--S=1", "--lr=1"), "--{}={}"),
    "fire": ("import fire\ndef t(M=3, S=1, lr=1): ...\nfire.Fire(t)\n", "--{}={}"),
    "jsonargparse": ("from jsonargparse import auto_cli\ndef t(M: int = 3, S: int = 1): ...\nauto_cli(t)\n", "--{} {}"),
    "hf": ("from x import HfArgumentParser\nclass A:\n  M: int = 3\n  S: int = 1\nHfArgumentParser(A)\n", "--{} {}"),
    "absl": ("DEFINE_integer('M', 3, '')\nDEFINE_integer('S', 1, '')\n", "--{}={}"),
    "hydra": (HYDRA, "a.{}={}"),
    "unread": ("import own\n", "--{} {}"),
    "file": (CONFIGURED, ""),
}  # fmt: skip


@pytest.mark.parametrize("seed", range(8))
def test_no_draw_of_wrapper_launcher_parser_and_settings_loses_what_was_typed(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    for index in range(40):
        micro, steps, size, count, ranks = (
            draw.choice(MICRO),
            draw.choice(STEPS),
            *draw.choices(range(1, 40), k=3),
        )
        kind, launcher = draw.choice(list(PARSERS)), draw.choice(LAUNCHERS)
        source, form = PARSERS[kind]
        joint = "-" if kind == "dashes" else "_"
        names = micro.replace("_", joint), steps.replace("_", joint)
        source = re.sub(r"\bM\b", names[0], re.sub(r"\bS\b", names[1], source))
        files = {f"t{index}/train.py": source}
        options = [form.format(*pair) for pair in zip(names, (size, count), strict=True)]
        if kind == "file":
            suffix = draw.choice(("yaml", "json"))
            files[f"t{index}/c.{suffix}"] = json.dumps(
                {"a": {micro: size, "b": {steps: count}}, "seed": 1e-3}
            )
            options = [draw.choice(("--config ", "--config=")) + f"c.{suffix}"]
        extra = [
            "--lr 0.5",
            "--weights a.pt",
            "--flag",
            "--tf32 true",
            "--fsdp 'full_shard auto_wrap'",
            "-k 7",
        ]
        options += (
            draw.sample(extra, draw.randrange(4)) if kind != "hydra" else ["model=big", "+x.y=2"]
        )
        draw.shuffle(options)
        start = draw.choice(WRAPPERS) + launcher.format(n=ranks, script="train.py")
        several = ranks if "{n}" in launcher else 1
        case = Case(" ".join([start, *options]), size * count * several, several, {})
        for name, content in files.items():
            (tmp_path / name).parent.mkdir(exist_ok=True)
            (tmp_path / name).write_text(content)
        assert verdict(case, tmp_path / f"t{index}") == "right", (
            kind,
            case.typed,
            propose(case, tmp_path / f"t{index}")[0],
        )


OPERATORS = (";", "|", "&", ">", "&&", "||", "<", "2>&1", ">log", "&>x", ",", "a;b")


@pytest.mark.parametrize("word", OPERATORS)
def test_a_word_that_looks_like_an_operator_of_a_shell_is_a_word(tmp_path: Path, word: str) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    options = ["--ignore", word, "--lr", "0.5", "--tail"]
    argv = ["python", "train.py", *options]
    quoted = [f"python train.py --ignore '{word}' --lr 0.5 --tail 2>&1 | tee log"]
    for typed in (argv, quoted):
        spec = parse_job(propose_job_file(typed, tmp_path, {}), "proposal")
        assert spec.command is not None
        assert list(spec.command[2:]) == options


def test_a_flag_that_another_parser_requires_is_named_and_not_added(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(f"import other\n{PLAIN}")
    other = "import argparse\nargparse.ArgumentParser().add_argument('--src', required=True)\n"
    (tmp_path / "other.py").write_text(other)
    text = propose_job_file(["python", "train.py", "--lr", "0.5"], tmp_path, {})
    assert parse_job(text, "proposal").command[2:] == ("--lr", "0.5")  # type: ignore[index]
    assert "CHECK: not typed, though a parser here requires: --src" in text


@pytest.mark.parametrize("words", [["-c", "print(1)"], ["-u", "-"], ["-W", "ignore", "-c", "1"]])
def test_code_that_stands_in_no_file_is_told_as_such(tmp_path: Path, words: list[str]) -> None:
    with pytest.raises(SpecError, match="its code stands in no file"):
        propose_job_file(["python", *words], tmp_path, {})


CHARACTERS = "abXYZ019 _-=.,:;/|&<>()[]{}$`\"'\\#!*?~%^@+\n\té中"
ARRAY = """#!/bin/bash
NAME=run#1
ARGS=(
  --lr 0.5   # the rate; twice
  --note "a b; c && d"
)
ARGS+=(--more "$1")
python train.py "${ARGS[@]}" --tail it\\'s --name $NAME \\
  --quoted '$@ ${ARGS[@]} $NAME' --double "it's $NAME" 2>&1 | tee log
"""


@pytest.mark.parametrize("seed", range(4))
def test_a_command_keeps_every_word_in_argv_in_a_file_and_in_a_shell(
    tmp_path: Path, seed: int
) -> None:
    draw = random.Random(seed)
    (tmp_path / "train.py").write_text(PLAIN)
    for _ in range(25):
        texts = ["".join(draw.choices(CHARACTERS, k=draw.randrange(9))) for _ in range(5)]
        options = ["--note", texts[0], f"--tag={texts[1]}", *texts[2 : draw.randrange(2, 6)]]
        argv = ["python", "train.py", *options]
        (tmp_path / "run.sh").write_text(f"#!/bin/bash\nset -e\n{shlex.join(argv)}\n")
        for typed in (argv, [shlex.join(argv)], ["bash", "run.sh"], ["sh", "-c", shlex.join(argv)]):
            text = propose_job_file(typed, tmp_path, {})
            # a job file needs a batch, of which nothing here says the size
            text += "" if "\nglobal_batch_size:" in text else "\nglobal_batch_size: 8\n"
            spec = parse_job(text, "proposal")
            assert spec.command is not None
            assert list(spec.command[2:]) == options, typed


def test_an_array_of_a_shell_script_gives_its_words_and_no_check(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(PLAIN)
    (tmp_path / "run.sh").write_text(ARRAY)
    text = propose_job_file(["bash", "run.sh", "x y"], tmp_path, {})
    spec = parse_job(text, "proposal")
    assert spec.command is not None
    expected = "--lr 0.5 --note 'a b; c && d' --more 'x y' --tail it\\'s --name 'run#1' "
    expected += "--quoted '$@ ${ARGS[@]} $NAME' --double \"it's run#1\""
    assert list(spec.command[2:]) == shlex.split(expected)
    assert "CHECK: not in the job" not in text


OWN_FILE = """
import yaml
from transformers import TrainingArguments
config_file = "config.yaml"
with open(config_file) as file:
    config = yaml.safe_load(file)
size = config["batch_size"]
args = TrainingArguments(per_device_train_batch_size=size, output_dir=f"./{config['save_folder']}")
"""


@pytest.mark.parametrize(("loads", "is_read"), [("yaml.safe_load", True), ("own.load", False)])
def test_a_settings_file_that_stands_in_the_code_gives_its_keys(
    tmp_path: Path, loads: str, is_read: bool
) -> None:
    (tmp_path / "train.py").write_text(OWN_FILE.replace("yaml.safe_load", loads))
    (tmp_path / "config.yaml").write_text("batch_size: 4\nsave_folder: out\n")
    text = propose_job_file(["python", "train.py"], tmp_path, {})
    assert ("config: {file: config.yaml}" in text) == is_read
    assert ("micro_batch_size: {key: batch_size, default: 4}" in text) == is_read
    assert "Not read: settings by a YAML file" not in text
