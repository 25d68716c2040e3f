"""Laws of `orc init`: a script is read and never run, and its proposal can be planned unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.service.commands.init.proposal import proposal
from orchestrator.service.server.intake import read_job
from orchestrator.specs.choices import Precision
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec

ARGPARSE = """
import argparse
from options import add_options

BATCH = 32
parser = argparse.ArgumentParser()
parser.add_argument("-b", "--batch-size", type=int, default=BATCH)
parser.add_argument("--grad-accum", type=int, default=2)
parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
parser.add_argument("--gradient-checkpointing", action="store_true")
parser.add_argument("--data", required=True)
add_options(parser)
open("it-was-run", "w")
"""
OPTIONS = 'def add_options(parser):\n    parser.add_argument("--out-dir")\n    parser.add_argument("--resume")\n'
TYPER = """
from typing import Annotated
import typer

def main(data: str, batch_size: Annotated[int, typer.Option("--bs")] = 4, accumulate: int = 1,
         use_checkpoint: bool = False, out_dir: str = typer.Option("out", "--out-dir"), *, resume: str = ""):
    ...

typer.run(main)
"""
HF = """
from dataclasses import dataclass, field
from typing import Optional
from transformers import HfArgumentParser, Trainer, TrainingArguments

@dataclass
class ModelArguments:
    model_name: str
    lora_rank: Optional[int] = field(default=8)

@dataclass
class MyArguments(TrainingArguments):
    beta: float = 0.1

parser = HfArgumentParser((ModelArguments, MyArguments))
model, training = parser.parse_args_into_dataclasses()
Trainer(args=training).train(resume_from_checkpoint=training.resume_from_checkpoint)
"""
SFT = """
def main(script_args, training_args):
    from trl import SFTTrainer
    SFTTrainer(args=training_args).train(resume_from_checkpoint=training_args.resume_from_checkpoint)

def make_parser():
    from trl import ModelConfig, ScriptArguments, SFTConfig, TrlParser
    dataclass_types = (ScriptArguments, SFTConfig, ModelConfig)
    return TrlParser(dataclass_types)
"""
DIFFUSERS = """
import argparse
from accelerate import Accelerator

def parse_args():
    parser = argparse.ArgumentParser()
    parser.add_argument("--pretrained_model_name_or_path", type=str, required=True)
    parser.add_argument("--train_batch_size", type=int, default=4)
    parser.add_argument("--gradient_accumulation_steps", type=int, default=1)
    parser.add_argument("--mixed_precision", choices=["no", "fp16", "bf16"], default=None)
    parser.add_argument("--output_dir", default="out")
    parser.add_argument("--resume_from_checkpoint", default=None)
    return parser.parse_args()

accelerator = Accelerator()
"""
LIGHTNING = "from lightning.pytorch.cli import LightningCLI\nLightningCLI()\n"
DEEPSPEED = """
import argparse, deepspeed
parser = argparse.ArgumentParser()
parser.add_argument("--local_rank", type=int, default=-1)
parser = deepspeed.add_config_arguments(parser)
"""
HYDRA = "import hydra\n\n@hydra.main(config_path='conf')\ndef main(config): ...\n"
SPAWNING = """
import argparse
import torch.multiprocessing as mp
parser = argparse.ArgumentParser()
parser.add_argument("-bs", type=int, default=6)
mp.spawn(print)
"""


def propose(folder: Path, source: str) -> tuple[str, JobSpec]:
    script, file = folder / "my_train.py", folder / "job.yaml"
    script.write_text(source)
    text = proposal([str(script)], folder, {})
    file.write_text(text if "\nglobal_batch_size:" in text else f"{text}global_batch_size: 8\n")  # the user's
    return text, read_job(file)


def test_flags_of_argparse_are_read_and_never_run_in_the_modules_beside_it_too(tmp_path: Path) -> None:
    (tmp_path / "options.py").write_text(OPTIONS)
    _, spec = propose(tmp_path, ARGPARSE)
    assert spec.command == ("python", "my_train.py", "--data", "DATA")
    assert spec.global_batch_size == 64, "its own batch of 32, accumulated twice"
    defaults = {name: (knob.flag or knob.switch, knob.default) for name, knob in spec.knobs.items()}
    assert defaults == {
        "micro_batch_size": ("--batch-size", 32),
        "gradient_accumulation_steps": ("--grad-accum", 2),
        "activation_checkpointing": ("--gradient-checkpointing", None),
        "precision": ("--dtype", None),
        "output_dir": ("--out-dir", None),
        "resume_from": ("--resume", None),
    }
    assert spec.knobs.precision is not None
    assert dict(spec.knobs.precision.values) == {"fp32": "float32", "bf16": "bfloat16"}
    assert not (tmp_path / "it-was-run").exists()
    assert not Path("it-was-run").exists()


def test_flags_of_typer_are_read_from_parameters(tmp_path: Path) -> None:
    _, spec = propose(tmp_path, TYPER)
    assert spec.command == ("python", "my_train.py", "DATA")
    assert [(name, knob.flag or knob.switch, knob.default) for name, knob in spec.knobs.items()] == [
        ("micro_batch_size", "--bs", 4),
        ("gradient_accumulation_steps", "--accumulate", 1),
        ("activation_checkpointing", "--use-checkpoint", None),
        ("resume_from", "--resume", None),
        ("output_dir", "--out-dir", None),
    ]


def test_transformers_trainer_is_recognised_by_what_its_parser_is_given(tmp_path: Path) -> None:
    text, spec = propose(tmp_path, HF)
    assert spec.trainer == "hf"
    assert spec.command == ("python", "my_train.py", "--model_name", "MODEL_NAME")
    assert "nothing in it uses resume_from_checkpoint" not in text
    without, _ = propose(tmp_path, HF.replace("resume_from_checkpoint=training.resume_from_checkpoint", ""))
    assert "nothing in it uses resume_from_checkpoint" in without


def test_a_script_of_trl_is_one_of_transformers_whose_precision_is_trls(tmp_path: Path) -> None:
    text, spec = propose(tmp_path, SFT)
    assert "it parses SFTConfig" in text
    assert (spec.trainer, spec.precision) == ("trl", Precision.BF16)
    assert propose(tmp_path, HF)[1].precision is Precision.FP32


def test_a_scripts_differences_from_its_framework_are_written(tmp_path: Path) -> None:
    _, spec = propose(tmp_path, DIFFUSERS)
    assert spec.trainer == "diffusers"
    assert spec.knobs.micro_batch_size is not None
    assert (spec.knobs.micro_batch_size.flag, spec.knobs.micro_batch_size.default) == ("--train_batch_size", 4)
    assert spec.knobs.activation_checkpointing is None, "it has no such flag"


def test_the_file_of_deepspeed_is_found_beside_its_script(tmp_path: Path) -> None:
    (tmp_path / "zero2.json").write_text('{"zero_optimization": {"stage": 2}}')
    _, spec = propose(tmp_path, DEEPSPEED)
    assert (spec.trainer, spec.launch) == ("deepspeed", "deepspeed")
    assert spec.config is not None
    assert (spec.config.file, spec.config.flag) == ("zero2.json", "--deepspeed_config")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (HYDRA, "Not known: how a plan tells it its batch size"),
        (HYDRA, "CHECK: nothing says the samples per optimizer step"),
        (SPAWNING, "launch: self"),
        (LIGHTNING, "trainer: lightning"),
    ],
)
def test_unknown_settings_are_named(tmp_path: Path, source: str, message: str) -> None:
    assert message in propose(tmp_path, source)[0]


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho $1\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_python_script_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.py").write_bytes(content)
    with pytest.raises(SpecError, match="cannot be read as Python"):
        proposal([str(tmp_path / "train.py")], tmp_path, {})


def test_a_missing_script_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file or directory") as refused:
        proposal([str(tmp_path / "train.py")], tmp_path, {})
    assert "shell" not in str(refused.value)


def test_the_hubs_token_is_proposed_where_the_shell_has_one_and_hinted_at_where_the_script_uses_the_hub(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(HF)
    (tmp_path / "plain.py").write_text(ARGPARSE)
    command = [str(tmp_path / "train.py")]
    with_token = proposal(command, tmp_path, {"HF_TOKEN": "hf_planted"})
    assert "\nsecrets: [HF_TOKEN] #" in with_token
    assert "hf_planted" not in with_token
    assert "\n# secrets: [HF_TOKEN] #" in proposal(command, tmp_path, {})
    assert "secrets" not in proposal([str(tmp_path / "plain.py")], tmp_path, {})
