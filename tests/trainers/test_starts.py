"""The law of forked ranks: over the trainers, a forked and a fresh start give equal outputs, records and losses."""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import pytest

from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.run import JobFolder
from tests.backends.test_forks import PlainLauncher
from tests.trainers.driver import SCRIPTS, Drive, checkout, cluster, story
from tests.trainers.test_latentsync import latentsync
from tests.trainers.test_orpheus import orpheus
from tests.trainers.test_parler import parler

HF = {
    "name": "hf",
    "trainer": "hf",
    "launch": "ranks",
    "command": "python hf.py --max_steps 4 --save_steps 2 --report_to none --use_cpu --die_at 3 "
    "--per_device_train_batch_size 16",
    "workdir": str(SCRIPTS / "frameworks"),
    "steps": 4,
    "probe": "never",
    "global_batch_size": 16,
}
DIFFUSION = {
    "name": "diffusion",
    "trainer": "diffusers",
    "launch": "ranks",
    "command": "python diffusion.py --train_batch_size 64 --mixed_precision no --die_at 3",
    "probe": "never",
    "workdir": str(SCRIPTS / "frameworks"),
    "steps": 4,
    "global_batch_size": 64,
}
OWN = {
    "name": "own",
    "global_batch_size": 8,
    "gpus": 2,
    "probe": "never",
    "model": {
        "decoder": {
            "vocab_size": 256,
            "hidden_size": 64,
            "intermediate_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 2,
        }
    },
    "training": {"max_steps": 4, "checkpoint_every_steps": 2},
}
# A bar is drawn again after a tenth of a second: how many of them a log has is of its time.
BARS = r"[^\r\n]*(it/s|s/it)[^\r\n]*[\r\n]*"
# what else in a log is of its time or process
NOISE = (
    r"'train_(runtime|\w+_second)': '?[\d.]+'?|[\d.]+ ?s\b"
    r"|train-[\d_:.-]+|[\d:]+\.\d+ \d+ torch"
)
DRAWN = {"master_port", ".metadata", "manifest"}  # a checkpoint's own have its time
TIMES = {
    "at_s",
    "step_at_s",
    "step_s",
    "pid",
    "uuid",
    "seconds",
    "tokens_per_s",
}  # what no two runs share


def spec_of(trainer: str, folder: Path) -> tuple[JobSpec, str, int]:
    """Return a trainer's job whose ranks we start, the memory of a device, and how many there are."""
    ranks = {"launch": "ranks", "env": {}}
    if trainer == "parler":
        return parler(checkout(trainer, folder / trainer)), "16MiB", 1
    if trainer == "orpheus":
        output = {"key": "save_folder", "relative": True}
        knobs = {"micro_batch_size": {"key": "batch_size"}, "output_dir": output}
        return orpheus(checkout(trainer, folder / trainer), **ranks, knobs=knobs), "64MiB", 2
    if trainer == "latentsync":
        return latentsync(checkout(trainer, folder / trainer), **ranks), "64MiB", 2
    if trainer == "own":
        (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
        data = {"text": [str(folder / "corpus.txt")], "sequence_length": 64}
        return JobSpec.model_validate({**OWN, "data": data}), "256MiB", 2
    raw, memory = {"hf": (HF, "40MiB"), "diffusion": (DIFFUSION, "30MiB")}[trainer]
    return JobSpec.model_validate(raw), memory, 1


def record_of(folder: Path, drive: Drive, spec: JobSpec) -> tuple[list[str], dict[str, Any]]:
    """Return how each rank was started, and all that the job leaves, without times and paths of its folder."""
    job = drive.run(spec)
    left = JobFolder(drive.home, "job")
    record: dict[str, Any] = {
        "story": story(job),
        "plans": [attempt.plan for attempt in job.attempts],
    }
    starts: list[str] = []
    for path in sorted(left.path.rglob("*")):
        name = re.sub(r"train-[\d_:.-]+", "train", str(path.relative_to(left.path)))
        if path.is_dir() or path.name in DRAWN or path.name.startswith("system."):
            continue
        if path.name == "starts":
            starts += [line.partition(": ")[2] for line in path.read_text().splitlines()]
        elif path.name.endswith(".heartbeat.json") and path.parent.name != str(len(job.attempts)):
            continue  # the last of a rank that was killed is as old as its interval
        elif path.suffix in (".json", ".jsonl"):
            record[name] = [without_times(json.loads(row)) for row in rows_of(path)]
        elif path.suffix == ".log":
            text = path.read_text().replace(str(folder), "FOLDER")
            record[name] = re.sub(NOISE, "-", re.sub(BARS, "", text))
        else:
            record[name] = path.read_bytes()
    return starts, record


def rows_of(path: Path) -> list[str]:
    text = path.read_text()
    return text.splitlines() if path.suffix == ".jsonl" else [text]


def without_times(row: Any) -> Any:
    if isinstance(row, list):
        return [without_times(part) for part in row]
    if not isinstance(row, dict):
        return row
    return {name: without_times(part) for name, part in row.items() if name not in TIMES}


@pytest.mark.parametrize(
    "trainer",
    [
        "parler",
        pytest.param("own", marks=pytest.mark.long),
        pytest.param("orpheus", marks=pytest.mark.long),
        pytest.param("latentsync", marks=pytest.mark.long),
        pytest.param("hf", marks=pytest.mark.long),
        pytest.param("diffusion", marks=pytest.mark.long),
    ],
)
def test_forked_and_fresh_starts_give_equal_outputs_records_and_losses(
    tmp_path: Path, trainer: str
) -> None:
    records = []
    for launcher in (None, PlainLauncher):
        folder = tmp_path / "run"
        folder.mkdir()
        spec, memory, devices = spec_of(trainer, folder)
        drive = Drive(folder / "home", cluster(memory, devices=devices))
        if launcher is not None:
            drive.launcher = launcher
        starts, record = record_of(folder, drive, spec)
        assert set(starts) == {"forked" if launcher is None else "told to"}
        assert "finished" in record["story"]
        records.append(record)
        folder.rename(tmp_path / f"{len(records)}")
    forked, fresh = records
    assert forked.keys() == fresh.keys()
    for name in forked:
        assert forked[name] == fresh[name], name
