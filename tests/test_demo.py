"""`make demo`: five jobs end as promised; the one that ran out of memory learned what it would have learned anyway."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

import pytest

from orchestrator.service.client import lifecycle
from orchestrator.specs.choices import Engine
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import AttemptFolder, parse_training_run_json
from tests.training.gang import finish, spawn

TOLERANCE = 1e-5  # of the loss, fp32
STEPS = 20


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The home folder of a demo that ran to its end."""
    folder = tmp_path_factory.mktemp("demo")
    try:
        shown = subprocess.run(
            [sys.executable, "-m", "orchestrator.cli", "demo", "--all", "--folder", str(folder)],
            stdout=subprocess.PIPE,
            text=True,
            timeout=800,
        )
    finally:
        lifecycle.stop_service(folder / "home", force=True)
    assert shown.returncode == 0, shown.stdout
    return folder / "home"


def curve(attempt: AttemptFolder) -> dict[int, float]:
    """Loss by optimizer step."""
    lines = map(json.loads, attempt.metrics.read_text().splitlines())
    return {line["step"]: line["loss"] for line in lines}


@pytest.mark.long
@pytest.mark.timeout(900)  # 100 s on two idle cores, 206 s on slower ones, over 280 s on busy ones
def test_a_degraded_restart_leaves_every_loss_where_it_was(home: Path, tmp_path: Path) -> None:
    attempts = sorted(
        (home / "jobs").glob("wrong-profile-*/attempts/*"), key=lambda path: int(path.name)
    )
    curves = [curve(AttemptFolder(path)) for path in attempts]
    assert len(curves) > 1
    assert max(curves[0]) < STEPS, "the first attempt ran out of memory"
    assert min(curves[-1]) > 1, "the last went on from a checkpoint"

    run = parse_training_run_json(json.loads(AttemptFolder(attempts[0]).run.read_text()))
    whole = dataclasses.replace(
        run,
        plan=Plan(engine=Engine.TORCH, micro_batch_size=16),
        job_folder=str(tmp_path),
        attempt_folder=str(tmp_path),
        epoch=1,
    )
    uninterrupted = AttemptFolder(tmp_path)
    uninterrupted.run.write_text(json.dumps(dataclasses.asdict(whole)))
    assert finish(spawn(whole), 200) == [0]
    expected = curve(uninterrupted)
    assert sorted(expected) == list(range(1, STEPS + 1))
    for losses in curves:
        assert losses == pytest.approx({step: expected[step] for step in losses}, abs=TOLERANCE)
    assert set().union(*curves) == set(expected)
