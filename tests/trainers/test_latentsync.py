"""LatentSync's traps: swallowed errors until all ranks hang, a new folder at each start, no optimizer saved."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from tests.fake_card import COMMUNICATOR_BYTES, CONTEXT_BYTES, MIB, environment
from tests.trainers.driver import Drive, card_cluster, checkout, cluster, log, story


def latentsync(folder: Path, **changes: object) -> JobSpec:
    return JobSpec.model_validate(
        {
            "name": "latentsync",
            "command": "python -m scripts.train_unet",
            "env": {"PYTHONPATH": str(folder)},
            "workdir": str(folder),
            "launch": "torchrun",
            "gpus": 2,
            "global_batch_size": 8,
            "config": {"file": "configs/stage2.yaml", "flag": "--unet_config_path"},
            "knobs": {
                "micro_batch_size": {"key": "data.batch_size"},
                "activation_checkpointing": {
                    "key": "run.enable_gradient_checkpointing",
                    "values": {"none": False, "full": True},
                },
                "output_dir": {"key": "data.train_output_dir"},
                "resume_from": {"key": "ckpt.resume_ckpt_path"},
            },
            "resume": {
                "checkpoints": "train-*/checkpoints/checkpoint-*.pt",
                "step": r"checkpoint-(\d+)\.pt",
                "loses": ["the state of the optimizer"],
            },
            "success": {"artifacts": ["train-*/checkpoints/checkpoint-4.pt"]},
            "progress": r"Steps: (\d+)",
            "hang_timeout": "4s",
            "startup_timeout": "120s",
            "profile": {
                "parameters": 132352,
                "layers": 4,
                "activations_per_sample": "4MiB",
                "checkpointed_per_sample": "1MiB",
            },
            **changes,
        }
    )


@pytest.mark.long
def test_an_error_that_the_script_swallows_ends_as_a_hang_with_its_cause_and_is_cured(
    tmp_path: Path,
) -> None:
    folder, home = checkout("latentsync", tmp_path / "latentsync"), tmp_path / "home"
    job = Drive(home, cluster("56MiB")).run(latentsync(folder))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    assert first.evidence is not None
    assert second.evidence is not None
    assert first.evidence.hung_for_s is not None, "only the watchdog saw it"
    assert [report.rank for report in first.evidence.caught] == [1]
    assert second.plan.activation_checkpointing is ActivationCheckpointing.FULL
    assert "resumed at 1, without the optimizer" in log(home, 2), (
        "found below another start's folder"
    )
    assert second.evidence.lost == ("the state of the optimizer",)
    assert set(re.findall(r"samples (\d+)", log(home, 1) + log(home, 2))) == {"8"}
    assert (
        yaml.safe_load((folder / "configs/stage2.yaml").read_text())["data"]["batch_size"] == 1
    ), "only copies change"


@pytest.mark.long
@pytest.mark.parametrize(("precision", "frames"), [("fp32", 147456), ("fp16", 245760)])
def test_on_cards_a_batch_of_six_each_runs_out_of_memory_and_is_cured_by_checkpointing(
    tmp_path: Path, precision: str, frames: int
) -> None:
    """The run uses nccl and fp16 by autocast with a GradScaler; as on GPUs, the guard only watches."""
    folder, home = checkout("latentsync", tmp_path / "latentsync"), tmp_path / "home"
    config = yaml.safe_load((folder / "configs/stage2.yaml").read_text())
    config["data"].update(frames=frames, longer=0, width=8)
    config["run"].update(
        swallows=False, mixed_precision_training=precision == "fp16", max_train_steps=2
    )
    (folder / "configs/stage2.yaml").write_text(yaml.safe_dump(config))
    cards = environment(tmp_path, [1952, 1952])
    cards["PYTHONPATH"] = f"{folder}:{cards['PYTHONPATH']}"
    job = Drive(home, card_cluster(cards)).run(
        latentsync(
            folder,
            env=cards,
            global_batch_size=12,
            precision=precision,
            success={"artifacts": ["train-*/checkpoints/checkpoint-2.pt"]},
            hang_timeout="60s",
            profile={
                "parameters": 2208,
                "layers": 4,
                "activations_per_sample": "20MiB",  # of 180
                "checkpointed_per_sample": "2MiB",
            },
        )
    )
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), (
        job.reason,
        log(home, 1),
    )
    first, second = job.attempts
    assert first.evidence is not None
    assert second.evidence is not None
    for evidence in (first.evidence, second.evidence):
        assert (evidence.virtual, evidence.unwatched) == (False, ())
    report = first.evidence.ooms[0]
    assert report.capacity_bytes == pytest.approx(1952 * MIB, rel=0.01), (
        "CUDA says GiB to two digits"
    )
    assert report.foreign_bytes == 0
    assert report.overhead_bytes == CONTEXT_BYTES + COMMUNICATOR_BYTES
    assert 0 < report.live_bytes <= 800 * MIB, "what the context and the communicator leave"
    assert second.plan.activation_checkpointing is ActivationCheckpointing.FULL
    for beat in second.evidence.heartbeats:
        assert beat.steps_done == 2
        assert 0 < beat.peak_bytes <= beat.reserved_bytes
        assert beat.allocator_room_bytes == 800 * MIB
    assert set(re.findall(r"samples (\d+)", log(home, 2))) == {"12"}
