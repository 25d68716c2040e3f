"""Scripts of common frameworks with `trainer:` and no knobs: sized, capped, recovered, resumed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.run import JobFolder
from tests.trainers.driver import Drive, cluster, log, story

SCRIPTS = Path(__file__).parent / "frameworks"


@pytest.mark.long
def test_a_script_like_the_examples_of_diffusers_recovers_and_goes_on_without_a_knob_written(
    tmp_path: Path,
) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "diffusion",
            "trainer": "diffusers",
            "launch": "ranks",  # its own way costs an import of accelerate
            "command": "python diffusion.py --train_batch_size 64 --mixed_precision no --die_at 3",
            "probe": "never",
            "workdir": str(SCRIPTS),
            "steps": 4,
            "global_batch_size": 64,
            "success": {"artifacts": ["model.pt"]},
        }
    )
    job = Drive(tmp_path, cluster("30MiB", devices=1)).run(spec)
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job) == ["device_oom", "preempted", "finished"]
    first, *_, last = job.attempts
    assert (first.plan.micro_batch_size, last.plan.global_batch_size) == (64, 64)
    assert f"per device = {last.plan.micro_batch_size}, precision no\nstep 3\nstep 4" in log(
        tmp_path, 3
    )


@pytest.mark.long
def test_a_script_of_unknown_memory_is_probed_and_never_runs_out_of_memory(tmp_path: Path) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "diffusion",
            "trainer": "diffusers",
            "launch": "ranks",
            "command": "python diffusion.py --train_batch_size 128",
            "workdir": str(SCRIPTS),
            "steps": 4,
            "global_batch_size": 128,
            "success": {"artifacts": ["model.pt"]},
        }
    )
    job = Drive(tmp_path, cluster("64MiB", devices=1)).run(spec)
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job) == ["probed", "probed", "finished"]
    probes, last = job.attempts[:2], job.attempts[2]
    assert [probe.plan.micro_batch_size for probe in probes] == [1, 8]
    assert last.plan.micro_batch_size == 64
    assert last.peak_bytes is not None
    assert 0.8 < last.estimate.allocated_bytes / last.peak_bytes < 1.25
    left = JobFolder(tmp_path, "job")
    assert sorted(path.name for path in left.output.iterdir()) == [
        "checkpoint-2",
        "checkpoint-4",
        "model.pt",
    ]
    for number in (1, 2, 3):
        assert json.loads(left.attempt(number).resume.read_text()) == {"checkpoint": None}


LLAMA = {
    "model_type": "llama",
    "vocab_size": 2048,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


@pytest.mark.long
@pytest.mark.parametrize(
    ("samples", "tokens", "precision"), [(16, 128, "fp32"), (4, 256, "fp32"), (8, 128, "bf16")]
)
def test_the_memory_of_a_script_is_predicted_from_the_model_that_it_names(
    samples: int, tokens: int, precision: str, tmp_path: Path
) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "hf",
            "trainer": "hf",
            "launch": "ranks",
            "command": f"python hf.py --max_steps 3 --use_cpu --report_to none --per_device_train_batch_size {samples} "
            f"--block_size {tokens}{' --bf16' if precision == 'bf16' else ''}",
            "workdir": str(SCRIPTS),
            "global_batch_size": samples,
            "trains": {"hf": LLAMA},
            "data": {"sequence_length": tokens},
            "success": {"artifacts": ["model.safetensors"]},
        }
    )
    job = Drive(tmp_path, cluster("512MiB", devices=1)).run(spec)
    assert story(job) == ["finished"], job.reason
    (only,) = job.attempts
    assert only.peak_bytes is not None
    assert 0.95 < only.estimate.allocated_bytes / only.peak_bytes < 1.05


@pytest.mark.long
def test_a_script_with_the_trainer_of_transformers_recovers_without_a_knob_written(
    tmp_path: Path,
) -> None:
    spec = JobSpec.model_validate(
        {
            "name": "hf",
            "trainer": "hf",
            "command": "python hf.py --max_steps 4 --save_steps 2 --report_to none --per_device_train_batch_size 16 "
            "--die_at 3",
            "workdir": str(SCRIPTS),
            "steps": 4,
            "probe": "never",
            "global_batch_size": 16,
            "success": {"artifacts": ["model.safetensors"]},
        }
    )
    job = Drive(tmp_path, cluster("40MiB", devices=1)).run(spec)
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job) == ["device_oom", "preempted", "finished"]
    last = job.attempts[-1]
    assert (last.plan.micro_batch_size, last.plan.global_batch_size) == (4, 16)
    assert "trained 4 steps of 4 samples" in log(tmp_path, 3)
    resumed = json.loads(JobFolder(tmp_path, "job").attempt(3).resume.read_text())["checkpoint"]
    assert Path(resumed).name == "checkpoint-2"
    assert last.evidence is not None
    assert last.evidence.lost == ()
