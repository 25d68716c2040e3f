"""MusicGen's traps: other settings mean another folder, so it starts over; errors end in workers' logs."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from tests.fake_card import environment
from tests.trainers.driver import Drive, card_cluster, checkout, cluster, log, story

MIGRATE = Path(__file__).parents[2] / "jobs" / "musicgen" / "migrate_checkpoint.py"
JOB = MIGRATE.with_name("audiocraft.yaml")


def musicgen(folder: Path, **changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "musicgen",
            "command": (str(folder / "bin/dora"), "run", "solver=musicgen", "optim.epochs=3"),
            "env": {"PYTHONPATH": str(folder)},
            "workdir": str(folder),
            "launch": "dora",
            "gpus": 2,
            "global_batch_size": 8,
            "knobs": {
                "micro_batch_size": {"override": "dataset.batch_size", "per": "global"},
                "activation_checkpointing": {
                    "override": "transformer_lm.checkpointing",
                    "values": {"none": "none", "full": "torch"},
                },
                "output_dir": {"env": "AUDIOCRAFT_DORA_DIR"},
            },
            "resume": {
                "checkpoints": "xps/*/checkpoint.th",
                "before": ("python", str(MIGRATE), "{checkpoint}", "{arguments}"),
            },
            "success": {"artifacts": ["xps/*/done"]},
            "progress": r"Train Summary \| Epoch (\d+)",
            "profile": {
                "parameters": 132352,
                "layers": 4,
                "activations_per_sample": "1MiB",
                "checkpointed_per_sample": "512KiB",
            },
            **changes,
        }
    )


@pytest.mark.long
def test_epochs_go_on_under_the_signature_of_the_lighter_plan(tmp_path: Path) -> None:
    folder, home = checkout("musicgen", tmp_path / "musicgen"), tmp_path / "home"
    job = Drive(home, cluster("20MiB")).run(musicgen(folder))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    assert first.evidence is not None
    assert second.evidence is not None
    assert first.evidence.ooms, "the workers' own, though a framework turned it into an exit code"
    assert second.plan.activation_checkpointing is ActivationCheckpointing.FULL
    assert re.findall(r"Epoch (\d) \| samples=(\d)", log(home, 1)) == [("1", "8"), ("2", "8")]
    assert re.findall(r"Epoch (\d) \| samples=(\d)", log(home, 2)) == [("3", "8")]
    assert second.evidence.lost == ()


@pytest.mark.long
def test_without_migrating_the_checkpoint_the_restart_from_scratch_is_reported(
    tmp_path: Path,
) -> None:
    folder, home = checkout("musicgen", tmp_path / "musicgen"), tmp_path / "home"
    job = Drive(home, cluster("20MiB")).run(
        musicgen(folder, resume={"checkpoints": "xps/*/checkpoint.th"})
    )
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert job.attempts[-1].evidence is not None
    assert job.attempts[-1].evidence.lost == (
        "everything: it began at 1 again, after 2, with checkpoint.th there",
    )


def test_each_rank_finds_its_own_file_under_the_new_signature(tmp_path: Path) -> None:
    """FSDP writes a file for each rank; a file that is being written stays behind."""
    xps, old = tmp_path / "xps", tmp_path / "xps/old"
    old.mkdir(parents=True)
    for name in (
        "checkpoint.th",
        "checkpoint.th.1",
        "checkpoint.th.12",
        "checkpoint.th.1.tmp",
        "history.json",
    ):
        (old / name).write_text(name)
    argv = [sys.executable, str(MIGRATE), str(old / "checkpoint.th"), "optim.epochs=3"]
    env = {**os.environ, "AUDIOCRAFT_DORA_DIR": str(tmp_path)}
    subprocess.run(argv, cwd=MIGRATE.parents[2] / "tests/trainers/musicgen", env=env, check=True)
    (new,) = set(xps.iterdir()) - {old}
    copies = {path.name: path.read_text() for path in new.iterdir()}
    assert copies == {
        name: name
        for name in ("checkpoint.th", "checkpoint.th.1", "checkpoint.th.12", "history.json")
    }


@pytest.mark.long
def test_an_end_after_the_last_epochs_training_is_no_success(tmp_path: Path) -> None:
    """There is a checkpoint of this attempt, of the epoch before; `success` is that of the job file."""
    folder, home = checkout("musicgen", tmp_path / "musicgen"), tmp_path / "home"
    success = yaml.safe_load(JOB.read_text())["success"]
    argv = (str(folder / "bin/dora"), "run", "solver=musicgen", "optim.epochs=3", "die_in_valid=3")
    job = Drive(home, cluster("64MiB", 1)).run(
        musicgen(folder, command=argv, gpus=1, success=success)
    )
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["preempted", "finished"]), job.reason
    assert re.findall(r"Epoch (\d) \|", log(home, 2)) == ["3"]


@pytest.mark.long
def test_on_cards_one_worker_for_each_trains_over_nccl_to_its_end(tmp_path: Path) -> None:
    folder, home = checkout("musicgen", tmp_path / "musicgen"), tmp_path / "home"
    cards = environment(tmp_path, [1808, 1808])
    cards["PYTHONPATH"] = f"{folder}:{cards['PYTHONPATH']}"
    job = Drive(home, card_cluster(cards)).run(musicgen(folder, env=cards))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["finished"]), (
        job.reason,
        log(home, 1),
    )
    evidence = job.attempts[0].evidence
    assert evidence is not None
    assert (evidence.virtual, evidence.unwatched) == (False, ())
    assert [(beat.rank, beat.steps_done) for beat in evidence.heartbeats] == [(0, 6), (1, 6)]
    assert all(beat.peak_bytes > 0 and beat.allocator_room_bytes for beat in evidence.heartbeats)


def test_a_stage_takes_the_newest_checkpoint_of_the_stage_before_or_says_that_there_is_none(
    tmp_path: Path,
) -> None:
    keep = MIGRATE.with_name("keep_checkpoint.py")
    argv = [sys.executable, str(keep), "short", str(tmp_path / "stage_1.th")]
    env = {**os.environ, "ORC_HOME": str(tmp_path)}
    without = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
    assert without.returncode == 1
    assert "no checkpoint of short" in without.stderr
    # `short-and-wide-1` is another job
    for time_s, name in ((20, "short-1"), (30, "short-12"), (40, "short-and-wide-1")):
        file = tmp_path / f"jobs/{name}/output/xps/a1/checkpoint.th"
        file.parent.mkdir(parents=True)
        file.write_text(name)
        os.utime(file, (time_s, time_s))
    subprocess.run(argv, env=env, check=True)
    assert (tmp_path / "stage_1.th").read_text() == "short-12"
