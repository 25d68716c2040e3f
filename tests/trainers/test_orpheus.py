"""Orpheus's traps: a config file in its working directory, no arguments, and a model that only fits sharded."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.specs.choices import Sharding, ZeroStage
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import JobFolder
from tests.fake_card import MIB, environment
from tests.trainers.driver import Drive, card_cluster, checkout, cluster, log, story


def orpheus(folder: Path, **changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "orpheus",
            "command": "python train.py",
            "workdir": str(folder / "finetune"),
            "launch": "accelerate",
            "gpus": 2,
            "global_batch_size": 2,
            "config": {"file": "config.yaml"},
            "knobs": {
                "micro_batch_size": {"key": "batch_size"},
                "zero_stage": {"accelerate": "fsdp"},
                "output_dir": {"key": "save_folder", "relative": True},
            },
            "success": {"artifacts": ["done"]},
            "progress": r"'epoch': (\d+)",
            "profile": {
                "parameters": 300_000,
                "layers": 4,
                "activations_per_sample": "64KiB",
            },  # a seventh of the truth
            **changes,
        }
    )


@pytest.mark.long
def test_out_of_memory_in_the_optimizer_at_batch_1_is_cured_by_shards_not_by_a_smaller_batch(
    tmp_path: Path,
) -> None:
    folder, home = checkout("orpheus", tmp_path / "orpheus"), tmp_path / "home"
    job = Drive(home, cluster("32MiB")).run(orpheus(folder))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    assert first.evidence is not None
    assert {report.phase for report in first.evidence.ooms} == {"optimizer"}
    assert (first.plan.zero_stage, first.plan.micro_batch_size) == (ZeroStage.NONE, 1)
    assert second.plan.zero_stage is not ZeroStage.NONE
    assert (second.plan.sharding, second.plan.global_batch_size) == (Sharding.FSDP, 2)
    assert "FSDP: " in log(home, 2)
    assert set(re.findall(r"samples (\d+)", log(home, 2))) == {"2"}


@pytest.mark.long
def test_the_script_finds_our_config_where_it_looks_and_the_users_stays_as_it_was(
    tmp_path: Path,
) -> None:
    folder, home = checkout("orpheus", tmp_path / "orpheus"), tmp_path / "home"
    before = (folder / "finetune/config.yaml").read_text()
    job = Drive(home, cluster("256MiB")).run(orpheus(folder))
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert (folder / "finetune/config.yaml").read_text() == before
    assert not (folder / "finetune/wandb").exists(), "nothing is left in the user's folder"
    work = JobFolder(home, "job").attempt(1).path / "work"
    assert (work / "tokens.txt").is_symlink()
    assert yaml.safe_load((work / "config.yaml").read_text())["batch_size"] == 1


@pytest.mark.long
def test_on_cards_accelerate_shards_transformers_trainer_by_fsdp_to_its_end(tmp_path: Path) -> None:
    """The run uses nccl and bf16; no card holds 16 bytes for each of 26M parameters at any batch size."""
    folder, home = checkout("orpheus", tmp_path / "orpheus"), tmp_path / "home"
    cards = environment(tmp_path, [1552, 1552])
    job = Drive(home, card_cluster(cards)).run(
        orpheus(
            folder,
            command="python train_on_gpus.py",
            env=cards,
            precision="bf16",
            profile={
                "parameters": 10_000_000,
                "layers": 6,
                "activations_per_sample": "4MiB",
            },  # of 26M
        )
    )
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["finished"]), (
        job.reason,
        log(home, 1),
    )
    (only,) = job.attempts
    assert only.plan.sharding is Sharding.FSDP
    assert only.evidence is not None
    assert (only.evidence.virtual, only.evidence.unwatched) == (False, ())
    assert [(beat.rank, beat.steps_done) for beat in only.evidence.heartbeats] == [(0, 4), (1, 4)]
    assert all(0 < beat.peak_bytes < 400 * MIB for beat in only.evidence.heartbeats)
    assert (home / "jobs/job/output/done").read_text() == "True"
