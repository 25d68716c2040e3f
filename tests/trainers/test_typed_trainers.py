"""Jobs of `orc init` for installed trainers run unchanged, and run out of memory at first.

The trainers are no dependency. On the PATH: `pip install --no-deps trl datasets dill multiprocess xxhash`, or
`pip install --no-deps litgpt lightning lightning-utilities torchmetrics jsonargparse typeshed-client docstring-parser`.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from orchestrator.backends.attempts.program import read_interpreter
from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import parse_job
from tests.trainers.driver import Drive, cluster, story
from tests.training.tiny_hf import folder, text

LITGPT_MODEL = """
import sys, torch
from pathlib import Path
from litgpt import GPT, Config
from litgpt.utils import save_config
config = Config(name="tiny", block_size=512, vocab_size=320, padded_vocab_size=320, n_layer=2, n_head=4, n_embd=64,
                n_query_groups=2, intermediate_size=128, norm_class_name="RMSNorm", mlp_class_name="LLaMAMLP",
                bias=False)
torch.save(GPT(config).state_dict(), Path(sys.argv[1]) / "lit_model.pth")
save_config(config, Path(sys.argv[1]))
"""
pytestmark = pytest.mark.long


def needs(program: str) -> None:
    if shutil.which(program) is None:
        pytest.skip(f"no {program} on the PATH: the head of this file says how to install it")


def run_trainer(typed: str, home: Path, memory: str) -> Job:
    """The proposal's job after its last attempt; it starts with its own settings, without probes."""
    spec = parse_job(propose_job_file(typed.split(), home, {}), "proposal", [("probe", "never")])
    return Drive(home / "home", cluster(memory, devices=1)).run(spec)


def test_the_proposal_for_trl_recovers(tmp_path: Path) -> None:
    needs("trl")
    folder(tmp_path, "llama", vocab_size=4096)
    (tmp_path / "data").mkdir()
    rows = [json.dumps({"text": line * 8}) for line in text(60).splitlines() * 8]
    (tmp_path / "data/train.jsonl").write_text("\n".join(rows))
    typed = "trl sft --model_name_or_path llama --dataset_name data --max_steps 3 --per_device_train_batch_size 64"
    job = run_trainer(
        f"{typed} --max_length 128 --use_cpu --report_to none --gradient_checkpointing false",
        tmp_path,
        "200MiB",
    )
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job)[0] == "device_oom"
    last = job.attempts[-1].plan
    assert (last.global_batch_size, last.micro_batch_size < 64) == (64, True)


def test_the_proposal_for_litgpt_recovers_with_the_accumulation_that_it_derives(
    tmp_path: Path,
) -> None:
    needs("litgpt")
    python = read_interpreter(Path(str(shutil.which("litgpt"))))
    assert python is not None
    model = tmp_path / "model"
    model.mkdir()
    subprocess.run([python, "-c", LITGPT_MODEL, str(model)], check=True, timeout=120)
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(folder(tmp_path, "llama") / name, model)
    talks = [{"instruction": "say two", "output": "two four " * (1 + n % 5)} for n in range(160)]
    (tmp_path / "talks.json").write_text(json.dumps(talks))
    typed = "litgpt finetune_full model --data JSON --data.json_path talks.json --data.val_split_fraction 0.1"
    typed += " --data.num_workers 0 --train.epochs 1 --train.max_steps 2 --train.lr_warmup_steps 1 --precision 32-true"
    typed += (
        " --train.global_batch_size 64 --train.micro_batch_size 64 --eval.initial_validation false"
    )
    job = run_trainer(f"{typed} --eval.final_validation false --out_dir mine", tmp_path, "80MiB")
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job)[0] == "device_oom"
    last = job.attempts[-1].plan
    assert last.global_batch_size == 64
    assert last.gradient_accumulation_steps == 64 // last.micro_batch_size > 1
