"""RVC's traps: ranks that it spawns itself, an out-of-memory failure that exits 0, restarts from scratch in silence."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml

from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from tests.fake_card import environment
from tests.trainers.driver import Drive, card_cluster, checkout, cluster, log, story

QUARANTINE = Path(__file__).parents[2] / "jobs" / "rvc" / "quarantine_checkpoint.py"
JOB = QUARANTINE.with_name("rvc_v2_48k.yaml")


def rvc(folder: Path, *arguments: str, **changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "rvc",
            "command": ("python", "train.py", "-e", "voice", "-te", "2", *arguments),
            "workdir": str(folder),
            "launch": "self",
            "gpus": {"min": 1, "max": 2},
            "global_batch_size": 16,
            "knobs": {
                "micro_batch_size": {"flag": "-bs", "multiplied_by_ranks": True},
                "devices": {"flag": "-g", "separator": "-"},
            },
            "success": {"artifacts": ["assets/weights/voice.pth"]},
            "resume": {"checkpoints": "logs/voice/G_*.pth", "step": r"G_(\d+)\.pth"},
            "progress": r"Train Epoch: (\d+)",
            # wrong on purpose: a sample keeps 2 MiB
            "profile": {"parameters": 16640, "activations_per_sample": "512KiB"},
            **changes,
        }
    )


@pytest.mark.long
def test_an_out_of_memory_failure_that_exits_0_is_seen_in_the_rank_and_cured_by_more_devices(
    tmp_path: Path,
) -> None:
    job = Drive(tmp_path / "home", cluster("32MiB")).run(rvc(checkout("rvc", tmp_path / "rvc")))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    report = first.evidence.ooms[0] if first.evidence else None
    assert report is not None
    assert (report.capacity_bytes, report.phase) == (32 * 2**20, "forward"), (
        "in a process that the script spawned"
    )
    assert (first.plan.world_size, second.plan.world_size) == (1, 2)
    assert second.evidence is not None
    assert [beat.rank for beat in second.evidence.heartbeats] == [0, 1], (
        "both, though it ends by os._exit"
    )
    assert set(re.findall(r"samples (\d+)", log(tmp_path / "home", 2))) == {"16"}, (
        "the batch that the user asked for"
    )


@pytest.mark.long
def test_exit_0_without_the_artifact_of_this_attempt_is_a_failure(tmp_path: Path) -> None:
    """There is an old voice.pth, and the rank's end is of a kind that the guard does not report."""
    folder = checkout("rvc", tmp_path / "rvc")
    (folder / "assets/weights").mkdir(parents=True)
    (folder / "assets/weights/voice.pth").write_text("of last week")
    job = Drive(tmp_path / "home", cluster("256MiB")).run(
        rvc(folder, "--fail-after", "1", retries={"node": 0})
    )
    assert job.attempts[0].failure is not None
    assert job.attempts[0].evidence is not None
    assert [end.exit_code for end in job.attempts[0].evidence.ranks] == [0]
    assert job.attempts[0].evidence.missing_artifacts == ("assets/weights/voice.pth",)


@pytest.mark.long
def test_a_job_whose_other_ranks_fail_after_its_success_line_succeeds(tmp_path: Path) -> None:
    """The ranks fail slowly after the first one left, and are killed; `success` is that of the job file."""
    success = yaml.safe_load(JOB.read_text())["success"]
    job = Drive(tmp_path / "home", cluster("256MiB")).run(
        rvc(checkout("rvc", tmp_path / "rvc"), "--abandon", "60", gpus=2, success=success)
    )
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["finished"]), job.reason
    assert job.attempts[0].evidence is not None
    assert [error.rank for error in job.attempts[0].evidence.errors] == [1]
    assert [end.exit_code for end in job.attempts[0].evidence.ranks] == [-9]


@pytest.mark.long
def test_a_restart_from_scratch_is_reported(tmp_path: Path) -> None:
    folder = checkout("rvc", tmp_path / "rvc")
    (folder / "logs/voice").mkdir(parents=True)
    (folder / "logs/voice/G_7.pth").write_text("not what torch.save wrote")
    job = Drive(tmp_path / "home", cluster("256MiB")).run(rvc(folder))
    assert story(job) == ["finished"], "its exit code and its log say nothing of it"
    assert job.attempts[0].evidence is not None
    assert job.attempts[0].evidence.lost == (
        "everything: it began at 1 again, after 7, with G_7.pth there",
    )


def test_a_pair_that_a_kill_tore_is_quarantined_before_a_restart(tmp_path: Path) -> None:
    """RVC loads the newest of each kind: a generator without its discriminator would be paired with an older one."""
    for name in ("G_5", "D_5", "G_10", "D_10", "G_15"):
        torch.save({"weight": torch.zeros(64)}, tmp_path / f"{name}.pth")
    (tmp_path / "D_10.pth").write_bytes((tmp_path / "D_10.pth").read_bytes()[:-16])
    subprocess.run([sys.executable, str(QUARANTINE), str(tmp_path / "G_5.pth")], check=True)
    assert sorted(path.name for path in tmp_path.glob("*.pth")) == ["D_5.pth", "G_5.pth"]
    assert sorted(path.name for path in tmp_path.glob("*.torn")) == [
        "D_10.torn",
        "G_10.torn",
        "G_15.torn",
    ]


@pytest.mark.long
def test_on_cards_two_ranks_that_it_spawned_train_in_fp16_over_gloo_to_its_end(
    tmp_path: Path,
) -> None:
    cards = environment(tmp_path, [1808, 1808])
    job = Drive(tmp_path / "home", card_cluster(cards)).run(
        rvc(checkout("rvc", tmp_path / "rvc"), gpus=2, env=cards, precision="fp16")
    )
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["finished"]), (
        job.reason,
        log(tmp_path / "home", 1),
    )
    evidence = job.attempts[0].evidence
    assert evidence is not None
    assert (evidence.virtual, evidence.unwatched) == (False, ())
    assert [beat.rank for beat in evidence.heartbeats] == [0, 1]
    assert all(beat.peak_bytes > 0 and beat.allocator_room_bytes for beat in evidence.heartbeats)
