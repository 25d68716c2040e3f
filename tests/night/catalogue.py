"""The table of a night: each kind of job with its job file, and the ends that are right for it.

A kind is a row here and a program in `programs/`: docs/extending/night-kind.md adds one.
"""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

ROOT = Path(__file__).parents[2]
PROGRAMS = Path(__file__).with_name("programs")
FOLDER = "{folder}"  # in a job file: a folder of the job's own


def loop_file(
    program: str,
    steps: int,
    batch: int = 8,
    *,
    launch: str = "gpus: 1",
    evaluates: str = "",
    checkpoints: str = "checkpoint-*.pt",
) -> str:
    """Return the job file of a program that takes the flags of `programs/loop.py`."""
    return f"""\
command: python {program} --steps {steps}
{launch}
global_batch_size: {batch}
steps: {steps}
probe: never
knobs:
  micro_batch_size: {{flag: --batch-size, default: {batch}{evaluates}}}
  gradient_accumulation_steps: {{flag: --accumulate, default: 1}}
  output_dir: {{flag: --output}}
  resume_from: {{flag: --resume}}
resume: {{checkpoints: {checkpoints}}}
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Kind:
    """A kind of job, and its row of the table."""

    name: str
    job: str = ""  # its job file, without name, user and workdir
    typed: tuple[str, ...] = ()  # instead of a job file: what a user types after `orc init`
    needs: tuple[str, ...] = ()  # libraries without which the kind is skipped
    prepare: Callable[[Path], None] | None = None  # writes what the program reads into its folder
    steps: int  # of the whole training
    ends: frozenset[str] = frozenset({"succeeded"})  # statuses that are right
    failures: frozenset[str] = frozenset()  # kinds that its attempts may have without a fault
    attempts_max: int = 1  # where no fault met them
    telling: str = ""  # pattern of the line that says why it failed
    logged: str = ""  # pattern of what `orc logs` shows of the failure; "": the telling line
    advice: str = ""  # pattern of what the report says to do about its failure
    leaves: str = ""  # a file that a success leaves, with {folder}
    # law that it breaks today -> issue that will mend it
    mended_by: Mapping[str, str] = field(default_factory=dict)

    @property
    def fails(self) -> bool:
        """Whether its right end is a failure, of which a notice is sent."""
        return "succeeded" not in self.ends

    def why_skipped(self) -> str | None:
        """Return why this machine cannot run it; None where it can."""
        absent = [name for name in self.needs if importlib.util.find_spec(name) is None]
        return f"no {absent[0]}: pip install '.[night]'" if absent else None


def make_tiny_model(folder: Path) -> None:
    """Write a tiny Llama with a tokenizer to `model` in the folder."""
    command = [sys.executable, "-m", "jobs.finetune.tiny_model", str(folder / "model")]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=240)


RANKS = "gpus: 2\nlaunch: torchrun"
BUG = frozenset({"unknown", "user_error"})  # an end that nothing explains, and the same once more
KINDS = (
    Kind(
        name="hf-trainer",
        needs=("transformers", "accelerate"),
        job="""\
trainer: hf
launch: ranks
command: python hf_trainer.py --max_steps 20 --save_steps 5 --report_to none --per_device_train_batch_size 8
gpus: 1
global_batch_size: 8
steps: 20
probe: never
success: {artifacts: [model.safetensors]}
""",
        steps=20,
    ),
    Kind(
        name="trl",
        needs=("trl", "datasets"),
        prepare=make_tiny_model,
        job="""\
trainer: trl
launch: ranks
precision: fp32
command: python trl_sft.py --max_steps 10 --save_steps 5 --report_to none --per_device_train_batch_size 8
gpus: 1
global_batch_size: 8
steps: 10
probe: never
success: {artifacts: [model.safetensors]}
""",
        steps=10,
    ),
    Kind(
        name="adapter",
        needs=("transformers", "peft"),
        prepare=make_tiny_model,
        job="""\
model: {hf: ./model, lora: {rank: 4, alpha: 8}}
data: {chat: [chat.jsonl], sequence_length: 64}
gpus: 1
global_batch_size: 4
training: {max_steps: 20, learning_rate: 1.0e-2, checkpoint_every_steps: 10}
""",
        steps=20,
    ),
    Kind(
        name="plain-loop",
        typed=("python", "loop.py", "--batch-size", "8", "--steps", "60"),
        steps=60,
        attempts_max=3,
        failures=frozenset({"probed"}),
    ),
    Kind(
        name="too-large",
        job=loop_file("too_large.py", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"device_oom"}),
        attempts_max=4,  # a batch of 8 is halved three times
        telling="ran out",
        advice="larger devices",
        logged="OutOfMemoryError",
    ),
    Kind(
        name="oom-at-0",
        job=loop_file("wide.py 0", 5, batch=512),
        steps=5,
        failures=frozenset({"device_oom"}),
        attempts_max=4,
    ),
    Kind(
        name="oom-at-50",
        job=loop_file("wide.py 50", 54, batch=512),
        steps=54,
        failures=frozenset({"device_oom"}),
        attempts_max=4,
    ),
    Kind(
        name="bug-at-30",
        job=loop_file("bug.py", 40),
        steps=40,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="KeyError: 'labels'",
        advice="mend the program",
    ),
    Kind(
        name="nan",
        job=loop_file("nan_loss.py --save-every 100", 40),
        steps=40,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=2,
        telling="the loss is NaN at step 30",
        advice="mend the program",
    ),
    Kind(
        name="absolute-artifact",
        job=loop_file(f"absolute.py {FOLDER}/results", 20)
        + f"success: {{artifacts: ['{FOLDER}/results/model.pt']}}\n",
        steps=20,
        leaves=f"{FOLDER}/results/model.pt",
    ),
    Kind(
        name="hang",
        job=loop_file("hang.py", 40) + "hang_timeout: 15s\n",
        steps=40,
        ends=frozenset({"failed"}),
        failures=frozenset({"hung"}),
        attempts_max=2,
        telling="no training step for 15 s",
        advice="hang_timeout",
        logged="step 14/40",
    ),
    Kind(
        name="sigterm-exit-0",
        job=loop_file("sigterm.py", 100),
        steps=100,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="handled-oom-then-bug",
        job=loop_file("handled_oom.py", 40),
        steps=40,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="KeyError: 'labels'",
        advice="mend the program",
    ),
    Kind(
        name="stops-early",
        job=loop_file("ends.py stops_early", 40),
        steps=12,
    ),
    Kind(
        name="stops-early-wants-all",
        job=loop_file("ends.py stops_early", 40) + "success: {steps: all}\n",
        steps=40,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="before the last of its steps",
        logged="step 12/40",
        advice="why it left before its end",
    ),
    Kind(
        name="no-step",
        job=loop_file("ends.py no_step", 20),
        steps=20,
    ),
    Kind(
        name="interrupted-exit-0",
        job=loop_file("ends.py interrupted", 40),
        steps=40,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="killed-for-memory",
        job=loop_file("ends.py killed_for_memory", 40),
        steps=40,
        failures=frozenset({"host_oom"}),
        attempts_max=2,
    ),
    Kind(
        name="handled-disk-then-bug",
        job=loop_file("ends.py handled_disk", 40),
        steps=40,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="KeyError: 'labels'",
        advice="mend the program",
    ),
    Kind(
        name="broken-data",
        job=loop_file("ends.py broken_data", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"user_error"}),
        telling="JSONDecodeError: Unterminated string",
        logged="Unterminated string",
        advice="look at the data",
    ),
    Kind(
        name="gone-module",
        job=loop_file("ends.py gone_module", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"user_error"}),
        telling="No module named 'module_that_nobody_installed'",
        advice="install what it names",
    ),
    Kind(
        name="hub-away",
        job=loop_file("ends.py hub_away", 20),
        steps=20,
        failures=frozenset({"startup"}),
        attempts_max=2,
    ),
    Kind(
        name="oom-in-evaluation",
        job=loop_file(
            "memory_ends.py in_evaluation",
            20,
            evaluates=", also: [{flag: --eval-batch-size, phase: evaluation, default: 8}]",
        )
        + 'phases: {evaluation: ^evaluating, training: "^step "}\n',
        steps=20,
        failures=frozenset({"device_oom"}),
        attempts_max=4,
    ),
    Kind(
        name="oom-at-save",
        job=loop_file("memory_ends.py at_save", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"device_oom"}),
        attempts_max=4,
        telling="ran out",
        advice="larger devices",
        logged="OutOfMemoryError",
    ),
    Kind(
        name="oom-leak",
        job=loop_file("memory_ends.py leak", 70),
        steps=70,
        failures=frozenset({"device_oom"}),
        attempts_max=2,
    ),
    Kind(
        name="oom-long-sample",
        job=loop_file("memory_ends.py long_sample", 20),
        steps=20,
        failures=frozenset({"device_oom"}),
        attempts_max=4,
    ),
    Kind(
        name="loader-worker-killed",
        job=loop_file("memory_ends.py loader_worker", 20),
        steps=20,
        failures=frozenset({"host_oom", "unknown"}),
        attempts_max=2,
    ),
    Kind(
        name="shared-memory",
        job=loop_file("memory_ends.py shared_memory", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"host_oom"}),
        attempts_max=4,
        telling="shared memory",
        advice="/dev/shm",
    ),
    Kind(
        name="two-ranks",
        job=loop_file("ranks.py well", 20, launch=RANKS),
        steps=20,
    ),
    Kind(
        name="bug-in-one-rank",
        job=loop_file("ranks.py bug", 20, launch=RANKS),
        steps=20,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="KeyError: 'labels'",
        advice="mend the program",
    ),
    Kind(
        name="fewer-batches",
        job=loop_file("ranks.py fewer_batches", 20, launch="gpus: 2"),
        steps=20,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="rank 1 exited with 0 while other ranks went on",
        logged="Connection closed by peer",
        advice="every rank as many batches",
    ),
    Kind(
        name="deadlock",
        job=loop_file("ranks.py deadlock", 20, launch=RANKS) + "hang_timeout: 15s\n",
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"hung"}),
        attempts_max=2,
        telling="no training step for 15 s",
        advice="hang_timeout",
        logged="step 12/20",
    ),
    Kind(
        name="stays-at-its-end",
        job=loop_file("ends.py stays", 20)
        + "hang_timeout: 15s\nsuccess: {artifacts: [model.pt]}\n",
        steps=20,
    ),
    Kind(
        name="prompt",
        job=loop_file("ends.py prompt", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"user_error"}),
        telling="EOFError",
        advice="answer by an argument",
    ),
    Kind(
        name="child-stays",
        job=loop_file("ends.py child", 20),
        steps=20,
    ),
    Kind(
        name="double-fork",
        job=loop_file("ends.py double_fork", 20),
        steps=20,
    ),
    Kind(
        name="large-log",
        job=loop_file("outputs.py large_log", 20),
        steps=20,
    ),
    Kind(
        name="long-line",
        job=loop_file("outputs.py long_line", 20),
        steps=20,
    ),
    Kind(
        name="binary-log",
        job=loop_file("outputs.py binary", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling=r"^[^\x00-\x1f\x7f]*broken batch[^\x00-\x1f\x7f]*$",
        advice="mend the program",
        logged="broken batch",
    ),
    Kind(
        name="many-files",
        job=loop_file("outputs.py many_files", 20),
        steps=20,
    ),
    Kind(
        name="links-out",
        job=loop_file("outputs.py links", 20) + f"env: {{PRECIOUS: '{FOLDER}/precious'}}\n",
        steps=20,
        leaves=f"{FOLDER}/precious/weights.bin",
    ),
    Kind(
        name="deleted-folder",
        job=loop_file("ends.py deleted_folder --save-every 20", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=BUG,
        attempts_max=3,
        telling="does not exist|No such file",
        advice="mend the program|look at the path",
    ),
    Kind(
        name="half-written",
        job=loop_file("saves.py half_written", 20),
        steps=20,
        failures=frozenset({"preempted", "unknown"}),
        attempts_max=3,
    ),
    Kind(
        name="other-shape",
        job=loop_file("ends.py other_shape", 20),
        steps=20,
        ends=frozenset({"failed"}),
        failures=frozenset({"preempted", "user_error"}),
        attempts_max=2,
        telling=r"size mismatch|Error\(s\) in loading state_dict",
        advice="mend the program",
    ),
    Kind(
        name="hub-429",
        job=loop_file("ends.py hub_429", 20),
        steps=20,
        needs=("requests",),
        failures=frozenset({"startup"}),
        attempts_max=2,
    ),
    Kind(
        name="hub-401",
        job=loop_file("ends.py hub_401", 20),
        steps=20,
        needs=("requests",),
        ends=frozenset({"failed"}),
        failures=frozenset({"user_error"}),
        telling="401 Client Error",
        advice="give its user the permission, or the key",
    ),
    Kind(
        name="port-in-use",
        job=loop_file("ends.py port_in_use", 20),
        steps=20,
        failures=frozenset({"startup"}),
        attempts_max=2,
    ),
    Kind(
        name="gan",
        job=loop_file("models.py gan", 20),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="u-net",
        job=loop_file("models.py unet", 20),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="save-latest",
        job=loop_file("saves.py latest", 20, checkpoints="latest"),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="save-in-place",
        job=loop_file("saves.py in_place", 20, checkpoints="last.pt"),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="accelerate",
        needs=("accelerate",),
        job=loop_file(
            "accelerated.py accelerate",
            20,
            launch="gpus: 1\nlaunch: accelerate",
            checkpoints="checkpoint-*",
        ),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="deepspeed",
        needs=("deepspeed",),
        job=loop_file(
            "deepspeed_loop.py deepspeed",
            20,
            launch="gpus: 1\nlaunch: torchrun",
            checkpoints="global_step*",
        ),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="lightning",
        needs=("lightning",),
        job=loop_file("lightning_fit.py", 20, checkpoints="'*.ckpt'"),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="diffusers",
        needs=("diffusers",),
        job=loop_file("diffusion.py diffusers", 20, checkpoints="checkpoint-*.pt"),
        steps=20,
        failures=frozenset({"preempted"}),
        attempts_max=2,
    ),
    Kind(
        name="sentence-transformers",
        needs=("sentence_transformers", "datasets"),
        job="""\
trainer: hf
launch: ranks
command: python sentences.py --max_steps 20 --save_steps 5 --report_to none --per_device_train_batch_size 8
gpus: 1
global_batch_size: 8
steps: 20
probe: never
success: {artifacts: [modules.json]}
""",
        steps=20,
    ),
)
