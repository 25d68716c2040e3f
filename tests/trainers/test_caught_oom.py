"""A script that catches out-of-memory errors and continues: its lost steps decide, not its exit code."""

from __future__ import annotations

from pathlib import Path

import pytest

from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from tests.trainers.driver import Drive, cluster, log, story
from tests.trainers.test_ways_to_torch import CUDA_WORDS, on
from tests.uncompiled import WITHOUT_COMPILER

# Its batch needs 1 MiB a sample. Without a virtual device it raises what CUDA would, where a device
# of 48 MiB had none.
SKIPS = f"""
{WITHOUT_COMPILER}
import argparse, os
from torch import nn

parser = argparse.ArgumentParser()
parser.add_argument("--batch", type=int, default=64)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--steps", type=int, default=50)
parser.add_argument("--long-at", type=int)
args = parser.parse_args()
model = nn.Linear(8, 8)
if "RANK" in os.environ:
    torch.distributed.init_process_group("gloo")
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
done = 0

def batch(step):
    samples = args.batch if args.long_at is None else 64 if step == args.long_at else 1
    if samples > 48 and not {{virtual}}:
        raise torch.OutOfMemoryError({CUDA_WORDS!r})
    return torch.zeros(samples, 2**18)[:, :8]

for step in range(args.steps):
    try:
        for _ in range(args.accumulate):
            model(batch(step)).sum().backward()
        if "RANK" in os.environ:
            torch.distributed.all_reduce(model.weight.grad)
        optimizer.step()
        done += 1
    except torch.OutOfMemoryError:
        print("skipping batch", flush=True)
    optimizer.zero_grad()
print("trained" if done == args.steps else f"{{{{done}}}} steps", "by batches of", args.batch)
"""


def run_skips(
    tmp_path: Path, devices: str, *arguments: str, ranks: int = 1, **changes: object
) -> Job:
    (tmp_path / "skips.py").write_text(SKIPS.format(virtual=devices == "virtual"))
    fields = {
        "name": "skips",
        "command": ["python", "skips.py", *arguments],
        "workdir": str(tmp_path),
        "gpus": ranks,
        "global_batch_size": 64 * ranks,
        "probe": "never",
        "knobs": {
            "micro_batch_size": {"flag": "--batch", "default": 64},
            "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        },
        **changes,
    }
    nodes = cluster("48MiB") if devices == "virtual" else on(devices)
    return Drive(tmp_path / "home", nodes).run(JobSpec.model_validate(fields))


DEVICES = pytest.mark.parametrize("devices", ["virtual", "none"])
SHORT = pytest.mark.parametrize(
    "devices", [pytest.param("virtual", marks=pytest.mark.long), "none"]
)


@pytest.mark.long
@SHORT
def test_a_script_that_skips_every_batch_has_run_out_of_memory_and_is_recovered(
    devices: str, tmp_path: Path
) -> None:
    """The script exits 0 without an optimizer step, on each of two ranks."""
    job = run_skips(tmp_path, devices, "--steps", "3", ranks=2)
    assert job.status is JobStatus.SUCCEEDED, job.reason
    assert story(job)[0] == "device_oom"
    assert story(job)[-1] == "finished"
    first, *_, last = job.attempts
    assert first.failure is not None
    assert "the script caught 3 out-of-memory errors and completed 0 steps" in first.failure.reason
    assert "skipping batch" in log(tmp_path / "home", 1)
    assert last.plan.micro_batch_size < 64
    assert last.plan.global_batch_size == 128
    assert "trained by batches of" in log(tmp_path / "home", last.number)


@SHORT
def test_a_script_that_loses_one_step_of_fifty_ends_well_with_a_warning(
    devices: str, tmp_path: Path
) -> None:
    job = run_skips(tmp_path, devices, "--long-at", "20")
    assert story(job) == ["finished"]
    assert job.status is JobStatus.SUCCEEDED
    assert "the script caught 1 out-of-memory error and completed 49 steps" in job.reason


@DEVICES
@pytest.mark.parametrize(
    ("long_at", "outcome"), [("4", "device_oom"), ("9", "device_oom"), ("8", "finished")]
)
@pytest.mark.long
def test_losing_more_than_a_tenth_of_the_steps_fails_and_so_does_losing_the_last(
    long_at: str, outcome: str, devices: str, tmp_path: Path
) -> None:
    steps = "5" if long_at == "4" else "10"
    job = run_skips(tmp_path, devices, "--long-at", long_at, "--steps", steps, retries={"oom": 0})
    assert story(job) == [outcome]


@pytest.mark.long
def test_a_job_may_accept_what_its_script_catches(tmp_path: Path) -> None:
    job = run_skips(tmp_path, "virtual", "--steps", "3", on_caught_oom="accept")
    assert story(job) == ["finished"]
    assert "the script caught 3 out-of-memory errors and completed 0 steps" in job.reason


@pytest.mark.long
@DEVICES
def test_a_success_that_fails_after_caught_errors_is_recovered(
    devices: str, tmp_path: Path
) -> None:
    """A lost step of fifty is little, but nothing else explains the missing success line."""
    job = run_skips(
        tmp_path, devices, "--long-at", "20", success={"log": "^trained"}, retries={"oom": 0}
    )
    assert story(job) == ["device_oom"]
