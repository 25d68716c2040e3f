"""LatentSync's traps: errors that it swallows until all ranks stand still, a new folder at each start, no optimizer."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
import yaml

from orchestrator.specs.job import JobSpec
from orchestrator.specs.plan import ActivationCheckpointing
from orchestrator.specs.state import JobStatus
from tests.trainers.driver import Drive, checkout, cluster, log, story


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
def test_an_error_that_the_script_swallows_ends_as_a_hang_with_its_cause_and_is_cured(tmp_path: Path) -> None:
    folder, home = checkout("latentsync", tmp_path / "latentsync"), tmp_path / "home"
    job = Drive(home, cluster("56MiB")).run(latentsync(folder))
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["device_oom", "finished"]), job.reason
    first, second = job.attempts
    assert first.evidence is not None
    assert second.evidence is not None
    assert first.evidence.hung_for_s is not None, "nothing but the watchdog saw it"
    assert [report.rank for report in first.evidence.ooms] == [1]
    assert second.plan.activation_checkpointing is ActivationCheckpointing.FULL
    assert "resumed at 1, without the optimizer" in log(home, 2), "found below another start's folder"
    assert second.evidence.lost == ("the state of the optimizer",)
    assert set(re.findall(r"samples (\d+)", log(home, 1) + log(home, 2))) == {"8"}
    assert yaml.safe_load((folder / "configs/stage2.yaml").read_text())["data"]["batch_size"] == 1, "only copies change"
