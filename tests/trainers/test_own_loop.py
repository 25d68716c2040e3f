"""The loop that docs/guides/own-script.md shows is proposed by `orc init`, and trains once."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.service.commands.init.proposal import propose_job_file
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import parse_job
from orchestrator.specs.run import JobFolder
from tests.trainers.driver import Drive, cluster, log, story

GUIDE = Path(__file__).parents[2] / "docs/guides/own-script.md"
HEAD = """
import argparse, os, torch
parser = argparse.ArgumentParser()
parser.add_argument("--batch-size", type=int, default=4)
parser.add_argument("--accumulate", type=int, default=1)
parser.add_argument("--save-every", type=int, default=5)
parser.add_argument("--output", required=True)
parser.add_argument("--resume")
args = parser.parse_args()
model = torch.nn.Linear(4, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
step = 0
if args.resume:
    state = torch.load(args.resume)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    step = state["step"]
loader = [torch.ones(args.batch_size, 4)] * (20 - step) * args.accumulate
loss_of = lambda model, batch: model(batch).square().mean()
"""
END = """
print("trained to step", step)
torch.save(model.state_dict(), f"{args.output}/model.pt")
"""


@pytest.mark.long
def test_the_proposal_for_the_loop_of_the_docs_trains_once(tmp_path: Path) -> None:
    block = re.search(r"## Make your script survive.*?```python\n(.*?)```", GUIDE.read_text(), re.S)
    assert block is not None
    (tmp_path / "train.py").write_text(f"{HEAD}{block[1]}{END}")
    spec = parse_job(propose_job_file(["train.py"], tmp_path, {}), "proposal", [("probe", "never")])
    assert (spec.success.artifacts, spec.resume.checkpoints) == (
        ("model.pt",),
        ("checkpoint-*.pt",),
    )
    job = Drive(tmp_path / "home", cluster("256MiB", devices=1)).run(spec)
    assert (job.status, story(job)) == (JobStatus.SUCCEEDED, ["finished"]), job.reason
    assert log(tmp_path / "home", 1).count("trained to step 20") == 1
    names = {path.name for path in JobFolder(tmp_path / "home", job.id).output.iterdir()}
    assert {"model.pt", "checkpoint-5.pt", "checkpoint-20.pt"} <= names
    assert "partial.tmp" not in names
