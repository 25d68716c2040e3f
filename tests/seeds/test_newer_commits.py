"""Laws of a project's other commit: a flag, a key or a path with another name there is one error that names it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType

import pytest
import yaml

from tests.seeds import latentsync, musicgen, orpheus, parler, rvc
from tests.seeds.checkouts import JOBS, Missing, find_checkout
from tests.seeds.runs import CASES, run

CLUSTER = JOBS.parent / "clusters/1x4-a100-80gb.yaml"
COMMAND_TIMEOUT_S = 120
WRITE_PATH = "write its path relative to `workdir`"


@dataclass(frozen=True)
class Change:
    """A change that another commit may have made, and what its answer contains."""

    project: ModuleType
    apply: Callable[[Path], object]
    answer: tuple[str, ...]


def rename(word: str, new: str, *files: str) -> Callable[[Path], object]:
    """Return what gives a word in these files of a checkout another name."""

    def apply(checkout: Path) -> None:
        for file in files:
            text = (checkout / file).read_text()
            assert word in text, f"{file} at this commit has no {word}"
            (checkout / file).write_text(text.replace(word, new))

    return apply


def move(path: str, new: str) -> Callable[[Path], object]:
    """Return what gives a file of a checkout another place."""
    return lambda checkout: (checkout / path).rename(checkout / new)


PLANNED = {
    "parler, script": Change(
        parler,
        move("training/run_parler_tts_training.py", "training/train.py"),
        ("command: the script", "'training/run_parler_tts_training.py'", WRITE_PATH),
    ),
    "orpheus, script": Change(
        orpheus,
        move("finetune/train.py", "finetune/full.py"),
        ("command: the script", "'train.py'", WRITE_PATH),
    ),
    "orpheus, config": Change(
        orpheus,
        move("finetune/config.yaml", "finetune/full.yaml"),
        ("config.file: the file", "'config.yaml'", WRITE_PATH),
    ),
    "orpheus, key": Change(
        orpheus,
        rename("batch_size:", "samples:", "finetune/config.yaml"),
        ("knobs.micro_batch_size.key: the file has no such key", "'batch_size'", "write it as"),
    ),
    "rvc, script": Change(
        rvc,
        move("train/train.py", "infer/train.py"),
        ("command: the script", "'train/train.py'", WRITE_PATH),
    ),
    "latentsync, module": Change(
        latentsync,
        move("scripts/train_unet.py", "scripts/unet.py"),
        ("command: the script", "scripts/train_unet.py'", WRITE_PATH),
    ),
    "latentsync, config": Change(
        latentsync,
        move("configs/unet/stage2.yaml", "configs/stage2.yaml"),
        ("config.file: the file", "'configs/unet/stage2.yaml'", WRITE_PATH),
    ),
    "latentsync, key": Change(
        latentsync,
        rename("enable_gradient_checkpointing", "checkpointing", "configs/unet/stage2.yaml"),
        ("knobs.activation_checkpointing.key", "'run.enable_gradient_checkpointing'", "write it"),
    ),
}
# what only the program knows
RUN = {
    "parler, flag": Change(
        parler,
        rename(
            "audio_encoder_per_device_batch_size",
            "codec_batch_size",
            "training/arguments.py",
            "training/run_parler_tts_training.py",
        ),
        ("not used by the HfArgumentParser: ['--audio_encoder_per_device_batch_size'",),
    ),
    "rvc, flag": Change(
        rvc,
        rename('"-bs", "--batch_size"', '"--batch_size"', "train/utils.py"),
        ("train.py: error: the following arguments are required: --batch_size",),
    ),
    "musicgen, key": Change(
        musicgen,
        rename("  checkpointing:", "  layer_checkpointing:", "config/model/lm/default.yaml"),
        ("full_key: transformer_lm.checkpointing",),
    ),
    "musicgen, path": Change(
        musicgen,
        move(
            "config/solver/musicgen/musicgen_base_32khz.yaml",
            "config/solver/musicgen/base_32khz.yaml",
        ),
        ("Could not find 'solver/musicgen/musicgen_base_32khz'",),
    ),
}


@pytest.mark.parametrize("name", PLANNED)
def test_what_moved_is_one_error_before_the_job_starts(name: str, tmp_path: Path) -> None:
    change = PLANNED[name]
    try:
        source = find_checkout(change.project)
    except Missing as missing:
        pytest.skip(str(missing))
    copy = tmp_path / change.project.CHECKOUT
    shutil.copytree(source, copy, ignore=shutil.ignore_patterns(".git"))
    change.apply(copy)
    job = JOBS / change.project.JOB
    workdir = tmp_path / yaml.safe_load(job.read_text())["workdir"].removeprefix("~/")
    command = (sys.executable, "-m", "orchestrator.orc", "plan", str(job))
    argv = (*command, "--set", f"workdir={workdir}", "--cluster", str(CLUSTER))
    process = subprocess.run(
        argv, capture_output=True, text=True, check=False, timeout=COMMAND_TIMEOUT_S
    )
    assert process.returncode == 2, process.stdout
    assert process.stderr.count("to do:") == 1, process.stderr
    assert all(part in process.stderr for part in change.answer), process.stderr


@pytest.mark.long
@pytest.mark.timeout(3600)
@pytest.mark.parametrize("name", RUN)
def test_what_a_program_refuses_is_one_error_with_what_to_write(name: str, tmp_path: Path) -> None:
    change = RUN[name]
    case = next(case for project, case in CASES if project is change.project)
    try:
        row = run(change.project, case, tmp_path, change.apply)
    except Missing as missing:
        pytest.skip(str(missing))
    assert len(row.attempts) == 1, "what cannot pass is not tried again"
    assert row.ended.startswith("job failed: user_error: "), row.ended
    assert all(part in row.ended for part in change.answer), row.ended
    assert "write the argument that it names" in row.advice, row.advice
