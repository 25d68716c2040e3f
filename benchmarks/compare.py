"""`orc compare` beside running each plan alone: does it rank twelve strategies as they rank, and how long does it take?

One real service on two virtual devices; the plans that run alone come in another order, as jobs of their own.
"""

from __future__ import annotations

import json
import os
import random
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, at_least, at_most, informs, say
from orchestrator.service.client.client import Client
from orchestrator.service.commands.compare import Pins, choose_strategies, make_comparison_jobs
from orchestrator.service.commands.hardware import select_nodes_and_observations
from orchestrator.service.intake.intake import read_job

RANK_CORRELATION = 0.9  # Spearman's, at least
FOUR_S = 180.0  # for four strategies, at most
STEPS = 12
COMMAND_S, JOB_S = 3600, 600.0
JOB = """\
name: ranked
global_batch_size: 16
gpus: {min: 1, max: 2}
model:
  decoder: {vocab_size: 256, hidden_size: 128, intermediate_size: 384, num_hidden_layers: 4, num_attention_heads: 4}
data: {text: [corpus.txt], sequence_length: 128}
training: {max_steps: 100}
"""
TWELVE: Sequence[Mapping[str, Any]] = (
    {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 1, "activation_checkpointing": "none"},
    {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 4, "activation_checkpointing": "none"},
    {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 16, "activation_checkpointing": "none"},
    {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 1, "activation_checkpointing": "full"},
    {"dp": 1, "tp": 1, "pp": 1, "micro_batch": 16, "activation_checkpointing": "full"},
    {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "micro_batch": 1,
        "zero_stage": 0,
        "activation_checkpointing": "none",
    },
    {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "micro_batch": 8,
        "zero_stage": 0,
        "activation_checkpointing": "none",
    },
    {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "micro_batch": 1,
        "zero_stage": 3,
        "engine": "torch",
        "activation_checkpointing": "none",
    },
    {
        "dp": 2,
        "tp": 1,
        "pp": 1,
        "micro_batch": 8,
        "zero_stage": 3,
        "engine": "torch",
        "activation_checkpointing": "none",
    },
    {"dp": 1, "tp": 2, "pp": 1, "micro_batch": 2, "activation_checkpointing": "none"},
    {"dp": 1, "tp": 2, "pp": 1, "micro_batch": 16, "activation_checkpointing": "none"},
    {"dp": 1, "tp": 1, "pp": 2, "micro_batch": 2, "activation_checkpointing": "none"},
)
FOUR = (TWELVE[2], TWELVE[4], TWELVE[6], TWELVE[8])
ORC = (sys.executable, "-m", "orchestrator.cli")


def figures() -> list[Figure]:
    """The rank correlation of twelve strategies, and the seconds of four."""
    with (
        tempfile.TemporaryDirectory(prefix="orc-compare-") as folder,
        _service(Path(folder)) as home,
    ):
        wanted = choose_strategies(
            read_job(home.parent / "job.yaml", (), home),
            _written(home, TWELVE),
            *select_nodes_and_observations(home, None),
        )
        say(f"comparing {len(wanted)} strategies")
        together = _compared(home, TWELVE)
        say("running each of them alone")
        alone = _alone(home, wanted)
        say("comparing four strategies")
        began_s = time.monotonic()
        _compared(home, FOUR)
        four_s = time.monotonic() - began_s
    timed = [(row["step_s"], alone[number]) for number, row in enumerate(together["rows"])]
    both = [(one, other) for one, other in timed if one is not None and other is not None]
    for row, other in zip(together["rows"], alone, strict=True):
        print(f"{row['strategy']:40} compared {row['step_s']} s, alone {other} s", file=sys.stderr)
    correlation = rank_correlation(both)
    fastest = min(range(len(both)), key=lambda number: both[number][0])
    return [
        at_least(
            "Spearman's rank correlation of step times, compared and alone",
            correlation,
            "",
            RANK_CORRELATION,
        ),
        at_most("four strategies by one command", four_s, "s", FOUR_S),
        informs("strategies with both step times", len(both), ""),
        informs(
            "place alone of the strategy that the verdict calls fastest",
            _ranks([b for _, b in both])[fastest],
            "",
        ),
        informs("load average when it ended", os.getloadavg()[0], ""),
    ]


def rank_correlation(pairs: Sequence[tuple[float, float]]) -> float:
    """Spearman's: Pearson's correlation of the ranks."""
    return statistics.correlation(*(_ranks(list(column)) for column in zip(*pairs, strict=True)))


def _ranks(values: Sequence[float]) -> list[float]:
    """1 for the smallest; equal values share the mean of theirs."""
    ordered = sorted(values)
    return [
        statistics.fmean(place for place, one in enumerate(ordered, 1) if one == value)
        for value in values
    ]


@contextmanager
def _service(folder: Path) -> Iterator[Path]:
    """The home of a service on the embedded virtual devices, in a folder with the job."""
    home = folder / "home"
    (folder / "job.yaml").write_text(JOB)
    (folder / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog " * 5000)
    _orc(home, "up")
    try:
        yield home
    finally:
        _orc(home, "down", "--force")


def _orc(home: Path, *arguments: str) -> Any:
    environment = {name: text for name, text in os.environ.items() if not name.startswith("ORC_")}
    ended = subprocess.run(
        [*ORC, *arguments, "--json"],
        env=environment | {"ORC_HOME": str(home)},
        cwd=home.parent,
        capture_output=True,
        text=True,
        timeout=COMMAND_S,
    )
    if ended.returncode:
        raise RuntimeError(
            f"orc {' '.join(arguments)}: {ended.stdout[-2000:]} {ended.stderr[-2000:]}"
        )
    return json.loads(ended.stdout)


def _compared(home: Path, asked: Sequence[Mapping[str, Any]]) -> Any:
    length = ("--steps", str(STEPS), "--timeout", str(COMMAND_S))
    return _orc(home, "compare", "job.yaml", "--strategies", _written(home, asked), *length)


def _written(home: Path, asked: Sequence[Mapping[str, Any]]) -> str:
    file = home.parent / "strategies.yaml"
    file.write_text("".join(f"- {json.dumps(pins)}\n" for pins in asked))
    return str(file)


def _alone(home: Path, wanted: Sequence[Pins]) -> list[float | None]:
    """Step time of each plan, run as a job of its own, in another order; None where it did not finish."""
    found: list[float | None] = [None] * len(wanted)
    numbers = list(range(len(wanted)))
    random.Random(0).shuffle(numbers)
    with closing(Client(home)) as client:
        for number in numbers:
            (spec,) = make_comparison_jobs(
                read_job(home.parent / "job.yaml", (), home), [wanted[number]], STEPS
            )
            (job_id,) = client.submit_jobs([spec.model_dump(mode="json")])["ids"]
            job, version = client.fetch_job_and_version(job_id)
            until_s = time.monotonic() + JOB_S
            while job["status"] in ("queued", "running") and time.monotonic() < until_s:
                job, version = client.fetch_job_and_version(job_id, version)
            found[number] = job["attempts"][-1]["step_s"] if job["status"] == "succeeded" else None
    return found
