"""Parler-TTS's traps: a folder that is not empty, half a checkpoint, a last step to resume at, three batch sizes."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from orchestrator.backends.attempts.script_output import find_newest_checkpoint
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from tests.trainers.driver import Drive, checkout, cluster, log, story

PHASES = {
    "encoding": r"\*\*\* Encode target audio with encodec \*\*\*",
    "training": r"\*\*\*\*\* Running training \*\*\*\*\*",
    "evaluation": r"^Evaluating - ",
}


def parler(folder: Path, *arguments: str, **changes: object) -> JobSpec:
    script = ("python", "training/run_parler_tts_training.py", "--overwrite_output_dir", "true")
    return JobSpec.model_validate(
        {
            "name": "parler",
            "command": (*script, *arguments),
            "workdir": str(folder),
            "steps": 4,
            "global_batch_size": 8,
            "probe": "never",
            "knobs": {
                "micro_batch_size": {
                    "flag": "--per_device_train_batch_size",
                    "default": 8,
                    "also": [
                        {
                            "flag": "--per_device_eval_batch_size",
                            "phase": "evaluation",
                            "default": 8,
                        },
                        {
                            "flag": "--audio_encoder_per_device_batch_size",
                            "phase": "encoding",
                            "default": 8,
                        },
                    ],
                },
                "gradient_accumulation_steps": {
                    "flag": "--gradient_accumulation_steps",
                    "default": 1,
                },
                "activation_checkpointing": {
                    "flag": "--gradient_checkpointing",
                    "values": {"none": False, "full": True},
                },
                "output_dir": {"flag": "--output_dir"},
                "resume_from": {"flag": "--resume_from_checkpoint"},
            },
            "resume": {
                "checkpoints": "checkpoint-*-epoch-*",
                "holds": ["model.pt", "optimizer.pt", "state.json"],
                "step": r"checkpoint-(\d+)-epoch",
            },
            "success": {"artifacts": ["model.safetensors"], "log": r"Training finished"},
            "progress": r"Step (\d+) /",
            "phases": PHASES,
            **changes,
        }
    )


def test_out_of_memory_before_the_first_checkpoint_is_cured_in_a_folder_that_is_not_empty(
    tmp_path: Path,
) -> None:
    folder, home = checkout("parler", tmp_path / "parler"), tmp_path / "home"
    job = Drive(home, cluster("16MiB", devices=1)).run(parler(folder))
    assert (job.status, story(job)[0], story(job)[-1]) == (
        JobStatus.SUCCEEDED,
        "device_oom",
        "finished",
    ), job.reason
    last = job.attempts[-1].plan
    assert last.micro_batch_size < 8
    assert last.global_batch_size == 8
    assert set(re.findall(r"samples (\d+)", log(home, len(job.attempts)))) == {"8"}


@pytest.mark.long
def test_out_of_memory_in_the_codec_lowers_its_own_batch_and_leaves_training_alone(
    tmp_path: Path,
) -> None:
    folder, home = checkout("parler", tmp_path / "parler"), tmp_path / "home"
    job = Drive(home, cluster("110MiB", devices=1)).run(parler(folder, "--codec_frames", "8192"))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    assert first.failure is not None
    assert first.failure.phase == "encoding"
    assert second.plan.phase_batch_sizes == (("encoding", 4),)
    assert second.plan.micro_batch_size == first.plan.micro_batch_size


@pytest.mark.long
def test_half_a_checkpoint_is_passed_over_for_the_whole_one_before(tmp_path: Path) -> None:
    folder, home = checkout("parler", tmp_path / "parler"), tmp_path / "home"
    job = Drive(home, cluster("256MiB", devices=1)).run(
        parler(folder, "--max_steps", "6", "--die_at", "4", steps=6)
    )
    assert (job.status, len(job.attempts)) == (JobStatus.SUCCEEDED, 2), job.reason
    assert "Continuing training from global step 2" in log(home, 2)


def test_no_attempt_resumes_from_the_last_step(tmp_path: Path) -> None:
    spec = parler(tmp_path)
    for step in (2, 4):
        checkpoint = tmp_path / f"checkpoint-{step}-epoch-0"
        checkpoint.mkdir()
        for name in ("model.pt", "optimizer.pt", "state.json"):
            (checkpoint / name).write_text("x")
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "checkpoint-2-epoch-0")
    assert find_newest_checkpoint(spec.model_copy(update={"steps": 9}), tmp_path) == str(
        tmp_path / "checkpoint-4-epoch-0"
    )
    (tmp_path / "checkpoint-2-epoch-0/optimizer.pt").write_text("")
    assert find_newest_checkpoint(spec, tmp_path) is None


def test_a_checkpoint_without_one_of_its_files_is_passed_over(tmp_path: Path) -> None:
    checkpoint = tmp_path / "checkpoint-2-epoch-0"
    checkpoint.mkdir()
    for name in ("model.pt", "optimizer.pt"):
        (checkpoint / name).write_text("x")
    assert find_newest_checkpoint(parler(tmp_path), tmp_path) is None
    (checkpoint / "state.json").write_text("x")
    assert find_newest_checkpoint(parler(tmp_path), tmp_path) == str(checkpoint)


@pytest.mark.parametrize("torn", ["model.pt", "model.safetensors"])
def test_a_checkpoint_that_a_kill_tore_is_passed_over_for_the_one_before(
    tmp_path: Path, torn: str
) -> None:
    """No file is missing or empty; one of them is truncated."""
    spec = parler(tmp_path, resume={"checkpoints": "checkpoint*"}, steps=None)
    for step in (2, 4):
        checkpoint = tmp_path / f"checkpoint-{step}"
        checkpoint.mkdir()
        torch.save({"weight": torch.zeros(4096)}, checkpoint / "model.pt")
        save_file(
            {"weight": torch.zeros(4096), "bias": torch.zeros(8)}, checkpoint / "model.safetensors"
        )
        os.utime(checkpoint, (step, step))
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "checkpoint-4")
    whole = (tmp_path / "checkpoint-4" / torn).read_bytes()
    (tmp_path / "checkpoint-4" / torn).write_bytes(whole[: len(whole) - 16])
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "checkpoint-2")
    (tmp_path / "checkpoint-4" / torn).write_bytes(whole)
    (tmp_path / "checkpoint-2" / "notes.safetensors").write_text("of this format in name only")
    assert find_newest_checkpoint(spec, tmp_path) == str(tmp_path / "checkpoint-4")


@pytest.mark.long
def test_a_job_that_printed_its_success_line_is_not_started_again(tmp_path: Path) -> None:
    folder, home = checkout("parler", tmp_path / "parler"), tmp_path / "home"
    script = folder / "training/run_parler_tts_training.py"
    script.write_text(script.read_text() + "__import__('os').kill(__import__('os').getpid(), 9)\n")
    job = Drive(home, cluster("256MiB", devices=1)).run(parler(folder))
    assert (job.status, len(job.attempts)) == (JobStatus.SUCCEEDED, 1), job.reason
    assert job.attempts[0].evidence is not None
    assert job.attempts[0].evidence.ranks[0].exit_code == -9
