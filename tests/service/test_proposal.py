"""Laws of `orc init`: a script is read and never run, and its proposal can be planned unchanged."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.intake.intake import read_cluster, read_job
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec

CLUSTER = Path(__file__).parents[2] / "clusters/1x8-h100-80gb.yaml"
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


SAVING = """
import argparse, os, torch
from pathlib import Path
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=8)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--out")
parser.add_argument("--resume")
args = parser.parse_args()
out = Path(args.out)
for step in range(9):
    torch.save(model, NAME)
torch.save(model, out / "model.pt")
"""


ACCELERATE = """
import argparse, os
from accelerate import Accelerator
parser = argparse.ArgumentParser()
parser.add_argument("--per_device_train_batch_size", type=int, default=8)
parser.add_argument("--gradient_accumulation_steps", type=int, default=2)
parser.add_argument("--gradient_checkpointing", action="store_true")
parser.add_argument("--output_dir", required=True)
parser.add_argument("--resume_from_checkpoint")
args = parser.parse_args()
accelerator = Accelerator()
folder = os.path.join(args.output_dir, f"NAME")
accelerator.save_state(output_dir=folder)
"""
RENAMING = """
import argparse, os, torch, utils
parser = argparse.ArgumentParser()
parser.add_argument("--bs", type=int, default=8)
parser.add_argument("--FLAG", required=True)
args = parser.parse_args()
for step in range(9):
    file = f"{args.FLAG}/G_{step}.pth"
    torch.save(net, file + ".tmp")
    os.replace(file + ".tmp", file)
    file = os.path.join(args.FLAG, "D_{}.pth".format(step))
    utils.save_checkpoint(net, optimizer, 0.1, step, file)
torch.save(net, args.FLAG + "/final.pth")
"""


def propose(folder: Path, source: str) -> tuple[str, JobSpec]:
    script, file = folder / "my_train.py", folder / "job.yaml"
    script.write_text(source)
    text = propose_job_file([str(script)], folder, {})
    file.write_text(
        text if "\nglobal_batch_size:" in text else f"{text}global_batch_size: 8\n"
    )  # the user's
    return text, read_job(file)


def test_flags_of_argparse_are_read_and_never_run_in_the_modules_beside_it_too(
    tmp_path: Path,
) -> None:
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
    assert [
        (name, knob.flag or knob.switch, knob.default) for name, knob in spec.knobs.items()
    ] == [
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
    without, _ = propose(
        tmp_path, HF.replace("resume_from_checkpoint=training.resume_from_checkpoint", "")
    )
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
    assert (spec.knobs.micro_batch_size.flag, spec.knobs.micro_batch_size.default) == (
        "--train_batch_size",
        4,
    )
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
        (SPAWNING.replace("mp.spawn(print)", "mp.Process(target=print).start()"), "launch: self"),
        (LIGHTNING, "trainer: lightning"),
    ],
)
def test_unknown_settings_are_named(tmp_path: Path, source: str, message: str) -> None:
    assert message in propose(tmp_path, source)[0]


def test_a_clones_folder_names_the_job_file_of_its_project(tmp_path: Path) -> None:
    folder = tmp_path / "Orpheus-TTS/finetune"
    folder.mkdir(parents=True)
    assert "begin with its job in the repository: jobs/orpheus_tts/" in propose(folder, HYDRA)[0]
    assert "begin with its job" not in propose(tmp_path, HYDRA)[0]


@pytest.mark.parametrize("content", [b"#!/bin/sh\necho $1\n", b"\xff\xfe\x00"])
def test_a_file_that_is_no_python_script_is_refused(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "train.py").write_bytes(content)
    with pytest.raises(SpecError, match="cannot be read as Python"):
        propose_job_file([str(tmp_path / "train.py")], tmp_path, {})


def test_a_missing_script_is_reported_as_missing(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="cannot be read: No such file or directory") as refused:
        propose_job_file([str(tmp_path / "train.py")], tmp_path, {})
    assert "shell" not in str(refused.value)


def test_the_hubs_token_is_proposed_where_the_shell_has_one_and_hinted_at_where_the_script_uses_the_hub(
    tmp_path: Path,
) -> None:
    (tmp_path / "train.py").write_text(HF)
    (tmp_path / "plain.py").write_text(ARGPARSE)
    command = [str(tmp_path / "train.py")]
    with_token = propose_job_file(command, tmp_path, {"HF_TOKEN": "hf_planted"})
    assert "\nsecrets: [HF_TOKEN] #" in with_token
    assert "hf_planted" not in with_token
    assert "\n# secrets: [HF_TOKEN] #" in propose_job_file(command, tmp_path, {})
    assert "secrets" not in propose_job_file([str(tmp_path / "plain.py")], tmp_path, {})


@pytest.mark.parametrize(
    ("name", "pattern"),
    [
        ('f"{out}/ckpt_{step}.pt"', "ckpt_*.pt"),
        ('out / f"step{step:06d}" / "state.pt"', "step*/state.pt"),
        ('os.path.join(args.out, "ckpt-%d.pt" % step)', "ckpt-*.pt"),
        ('"{}/epoch_{}.pth".format(args.out, step)', "epoch_*.pth"),
        ('str(out) + "/" + "last.ckpt"', "last.ckpt"),
    ],
)
def test_checkpoints_and_results_are_proposed_from_the_names_that_the_script_saves(
    tmp_path: Path, name: str, pattern: str
) -> None:
    text, spec = propose(tmp_path, SAVING.replace("NAME", name))
    assert (spec.resume.checkpoints, spec.success.artifacts) == ((pattern,), ("model.pt",))
    assert text.count("CHECK: read from my_train.py:") == 2
    assert f"\n# A restart: it goes on from the newest checkpoint, {pattern}.\n" in text


@pytest.mark.parametrize(
    ("name", "patterns", "verdict"),
    [
        (
            "checkpoint-{step}-epoch-{epoch}",
            ("checkpoint-*-epoch-*",),
            "# A restart: it goes on from the newest",
        ),
        (
            "step_{step}",
            ("step_*", "epoch_*"),
            "# A restart: it goes on from the newest checkpoint, step_*, epoch_*.",
        ),
        (
            "{step}",
            ("step_*", "epoch_*"),
            "# CHECK: a restart goes on only if the script names its checkpoints",
        ),
    ],
)
def test_names_of_a_frameworks_checkpoints_are_promised_only_where_the_script_writes_such(
    tmp_path: Path, name: str, patterns: tuple[str, ...], verdict: str
) -> None:
    text, spec = propose(tmp_path, ACCELERATE.replace("NAME", name))
    assert (spec.trainer, spec.resume.checkpoints) == ("accelerate", patterns)
    assert f"\n{verdict}" in text
    assert spec.knobs.activation_checkpointing is not None
    assert spec.knobs.activation_checkpointing.switch == "--gradient_checkpointing"


@pytest.mark.parametrize("flag", ["model_dir", "logdir", "exp_dir", "work_dir", "save_dir"])
def test_a_folder_of_any_name_is_the_output_where_the_script_saves_into_it(
    tmp_path: Path, flag: str
) -> None:
    _, spec = propose(tmp_path, RENAMING.replace("FLAG", flag))
    assert spec.knobs.output_dir is not None
    assert spec.knobs.output_dir.flag == f"--{flag}"
    assert spec.resume.checkpoints == ("G_*.pth", "D_*.pth")
    assert spec.success.artifacts == ("final.pth",)


def test_a_folder_of_any_name_that_nothing_is_saved_into_stays_as_typed(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(
        RENAMING.replace("args.FLAG", "args.out").replace("FLAG", "model_dir")
    )
    text = propose_job_file(["python", "train.py", "--model_dir", "base"], tmp_path, {})
    assert "--model_dir base" in text
    assert "output_dir:" not in text


@pytest.mark.parametrize(
    ("typed", "noted"),
    [
        (
            ["dora", "run", "solver=musicgen/musicgen_base_32khz"],
            "jobs/musicgen/musicgen_small.yaml",
        ),
        (["accelerate", "launch", "train.py"], None),
    ],
)
def test_a_projects_own_job_is_named_and_no_option_that_was_not_typed(
    tmp_path: Path, typed: list[str], noted: str | None
) -> None:
    (tmp_path / "train.py").write_text(ACCELERATE)
    text = propose_job_file(typed, tmp_path, {})
    assert noted is None or noted in text
    assert "dropped:" not in text


def test_the_path_is_read_through_a_function_of_the_scripts_own(tmp_path: Path) -> None:
    function = (
        'def keep(state, path, name="ckpt.pt"):\n    torch.save(state, path / f"{epoch}_{name}")\n'
    )
    _, spec = propose(
        tmp_path,
        SAVING.replace("torch.save(model, NAME)", "keep(model, out)").replace(
            "for", function + "for", 1
        ),
    )
    assert spec.resume.checkpoints == ("*_ckpt.pt",)


@pytest.mark.parametrize(
    "name", ["args.path", 'f"{args.run}.pt"', '"/elsewhere/ckpt_1.pt"', 'f"ckpt_{step}.pt"']
)
def test_names_that_cannot_be_read_or_lie_elsewhere_leave_the_default_with_a_check(
    tmp_path: Path, name: str
) -> None:
    text, spec = propose(tmp_path, SAVING.replace("NAME", name))
    assert spec.resume.checkpoints == ("checkpoint*", "step-*")
    assert (
        'resume: {checkpoints: ["checkpoint*", "step-*"]} # CHECK: not read from the script' in text
    )
    assert (
        "\n# CHECK: a restart begins anew: no file name of the script matches checkpoint*, step-*.\n"
        in text
    )


@pytest.mark.parametrize(
    ("line", "verdict"),
    [
        (
            "accumulate",
            "# CHECK: does not recover from an out-of-memory failure: no knob for accumulation (the script",
        ),
        (
            "batch-size",
            "# CHECK: does not recover from an out-of-memory failure: no knob for micro-batch (the script",
        ),
        (
            "resume",
            "# CHECK: a restart begins anew: no knob for resume_from (the script has no such flag).",
        ),
        (
            "out",
            "# CHECK: its memory is not measured: no knob for output folder. Its own micro-batch is assumed",
        ),
        (
            "none",
            "# An out-of-memory failure: it goes on with a smaller micro-batch and more accumulation.",
        ),
    ],
)
def test_a_proposal_tells_near_its_top_what_the_job_recovers_from_and_if_not_why(
    tmp_path: Path, line: str, verdict: str
) -> None:
    source = "\n".join(row for row in SAVING.splitlines() if f'"--{line}"' not in row)
    text, _ = propose(tmp_path, source.replace("NAME", 'f"{out}/ckpt_{step}.pt"'))
    assert any(row.startswith(verdict) for row in text.splitlines()[:6]), text


@pytest.mark.parametrize("line", ["none", "accumulate", "batch-size", "out"])
def test_a_proposal_and_its_plan_agree_on_whether_short_attempts_measure_it(
    tmp_path: Path, line: str
) -> None:
    source = "\n".join(row for row in SAVING.splitlines() if f'"--{line}"' not in row)
    text, spec = propose(tmp_path, source)
    plans = plan_job(spec, make_idle_nodes(read_cluster(CLUSTER)), ())
    assert ("short attempts measure it first" in text) == (plans["probe"] is not None)
    assert ("assumed to fill a device" in text) == (plans["probe"] is None)
