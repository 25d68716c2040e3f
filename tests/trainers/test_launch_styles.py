"""Laws of every launcher: each rank is capped, watched and reported, and ends with the attempt."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest

from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import alive
from tests.trainers.driver import Drive, cluster, log, story
from tests.uncompiled import WITHOUT_COMPILER

RANKS = (
    WITHOUT_COMPILER
    + """
import os, sys
from torch import nn

torch.distributed.init_process_group("gloo")
rank = torch.distributed.get_rank()
print(f"rank {rank} of {os.environ['WORLD_SIZE']} is process {os.getpid()} and was told {sys.argv[1:]}", flush=True)
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(3):
    model(torch.ones(1, 8)).sum().backward()
    torch.distributed.all_reduce(model.weight.grad)
    if rank == 1 and step == 2:
        torch.zeros(64, 2**20)
    optimizer.step()
"""
)


@pytest.mark.parametrize(
    "launch",
    [
        "torchrun",
        pytest.param("accelerate", marks=pytest.mark.long),
        pytest.param("deepspeed", marks=pytest.mark.long),
    ],
)
def test_ranks_of_another_launcher_are_guarded(launch: str, tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(RANKS)
    spec = JobSpec.model_validate(
        {
            "name": "ranks",
            "command": "python -u train.py --mine",
            "workdir": str(tmp_path),
            "launch": launch,
            "gpus": 2,
            "global_batch_size": 2,
            "retries": {"oom": 0},
        }
    )
    job = Drive(tmp_path / "home", cluster("64MiB")).run(spec)
    evidence = job.attempts[0].evidence
    assert evidence is not None
    output = log(tmp_path / "home", 1)
    assert [(report.rank, report.step, report.capacity_bytes) for report in evidence.ooms] == [
        (1, 2, 64 * 2**20)
    ], output
    assert [beat.rank for beat in evidence.heartbeats] == [0, 1]
    assert [end.rank for end in evidence.ranks] == [0], "one process of ours for both"
    arguments = f"['--local_rank={1}', '--mine']" if launch == "deepspeed" else "['--mine']"
    assert f"and was told {arguments}" in output
    pids = [
        int(pid) for pid in re.findall(r"rank \d of 2 is process (\d+)", output)
    ]  # two ranks may write into one line
    assert len(pids) == 2
    assert os.getpid() not in pids
    assert alive(pids) == []
    assert not (JobFolder(tmp_path / "home", "job").attempt(1).path / "rank1.log").exists()


FORKS = """
import multiprocessing, os, sys
import torch
from torch import nn

def run(rank):
    torch.distributed.init_process_group("gloo", init_method="env://", rank=rank, world_size=2)
    model = nn.parallel.DistributedDataParallel(nn.Linear(8, 8))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for batch in torch.utils.data.DataLoader(torch.ones(3, 8), num_workers=1, collate_fn=collate):
        model(batch).sum().backward()
        optimizer.step()
    if rank == 1:
        torch.zeros(64, 2**20)

def collate(samples):
    torch.zeros(64, 2**20)  # of the host: a loader's worker has no device
    return torch.stack(samples)

context = multiprocessing.get_context("fork")
children = [context.Process(target=run, args=(rank,)) for rank in range(2)]
for child in children:
    child.start()
for child in children:
    child.join()
"""


@pytest.mark.long
def test_ranks_that_a_script_forks_are_capped_and_reported_and_their_loaders_are_not(
    tmp_path: Path,
) -> None:
    """The script imports torch and enters the device before it forks; it always exits 0."""
    (tmp_path / "train.py").write_text(FORKS)
    spec = JobSpec.model_validate(
        {
            "name": "forks",
            "command": "python train.py",
            "workdir": str(tmp_path),
            "launch": "self",
            "gpus": 2,
            "global_batch_size": 2,
            "retries": {"oom": 0},
        }
    )
    job = Drive(tmp_path / "home", cluster("64MiB")).run(spec)
    evidence = job.attempts[0].evidence
    assert evidence is not None
    output = log(tmp_path / "home", 1)
    assert [(report.rank, report.step, report.capacity_bytes) for report in evidence.ooms] == [
        (1, 3, 64 * 2**20)
    ], output
    assert [(beat.rank, beat.steps_done) for beat in evidence.heartbeats] == [(0, 3), (1, 3)]


APART = """
{compiler}
import os, sys
from torch import nn
{first}
model = nn.Linear(8, 8)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
for step in range(int(sys.argv[1])):
    model(torch.ones(1, 8)).sum().backward()
    optimizer.step()
"""
JOINS = "torch.distributed.init_process_group('gloo')"
ENDLESS = 10**6  # steps: minutes, where nothing ends it


def apart(folder: Path, steps: int, *, first: str = "", gpus: int = 2, **changes: object) -> Job:
    """The job of a script that trains on each rank, after `first`, without asking for the others."""
    (folder / "train.py").write_text(APART.format(compiler=WITHOUT_COMPILER, first=first))
    (folder / "horovod.py").write_text("")
    fields = {
        "name": "apart",
        "command": f"python train.py {steps}",
        "workdir": str(folder),
        "probe": "never",
    }
    spec = JobSpec.model_validate({**fields, "gpus": gpus, "global_batch_size": gpus, **changes})
    return Drive(folder / "home", cluster("64MiB")).run(spec)


@pytest.mark.parametrize("launch", ["ranks", pytest.param("torchrun", marks=pytest.mark.long)])
def test_ranks_that_train_without_meeting_are_ended_and_the_reason_says_so(
    launch: str, tmp_path: Path
) -> None:
    job = apart(tmp_path, ENDLESS, launch=launch)
    assert story(job) == ["user_error"], log(tmp_path / "home", 1)
    for phrase in ("2 ranks trained without meeting", "init_process_group", "`gpus: 1`"):
        assert phrase in job.reason
    evidence = job.attempts[0].evidence
    assert evidence is not None
    assert max(beat.steps_done for beat in evidence.heartbeats) < ENDLESS


@pytest.mark.long
@pytest.mark.parametrize("first", [JOINS, pytest.param("import horovod", marks=pytest.mark.long)])
def test_ranks_that_met_or_may_have_met_are_left_alone(first: str, tmp_path: Path) -> None:
    job = apart(tmp_path, 20, first=first)
    assert story(job) == ["finished"], log(tmp_path / "home", 1)
    assert "process group" not in job.reason


@pytest.mark.long
@pytest.mark.parametrize(("gpus", "size"), [(2, 1), pytest.param(1, 2, marks=pytest.mark.long)])
def test_a_process_group_of_another_size_than_planned_is_told(
    gpus: int, size: int, tmp_path: Path
) -> None:
    """Each rank makes a group by itself, the larger of which has a backend that sends nothing."""
    of_pytorch = "from torch.testing._internal.distributed.fake_pg import FakeStore\n"
    group = f"torch.distributed.init_process_group('fake', store=FakeStore(), rank=0, world_size={size})"
    job = apart(tmp_path, 20, first=of_pytorch + group, gpus=gpus)
    assert story(job) == ["finished"], log(tmp_path / "home", 1)
    assert f"process group of {size}, where the plan has {gpus}" in job.reason
