"""How many out-of-memory failures until a job with a wrong profile, or none, runs? Jobs drawn at random, on real ranks.

    python -m benchmarks.real_recoveries [--seed SEED] [--jobs JOBS]

Each job first trains on a device that holds whatever it asks for. That tells its loss curve and its peak. Then it
trains on a virtual device with part of that memory, of which its smallest micro-batch needs less. It is driven as the
service drives it (tests/trainers/driver.py), but for Ray.
"""

from __future__ import annotations

import argparse
import json
import math
import random
import re
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.drawn_script import VOCABULARY, Model
from benchmarks.figure import Figure, at_least, at_most, informs
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import JobFolder
from tests.trainers.driver import Drive, cluster, log, story

JOBS, SEED = (
    60,
    20261124,
)  # its first jobs were seen while this file was mended; the estimator was not changed since
DRAWS_MAX = 3  # times the jobs that are asked for: some do not run out of memory
WHOLE = "16GiB"  # of the device that holds whatever a job asks for
STATE_BYTES = 16  # of a parameter: weight, gradient and AdamW's two states in fp32
KEPT_MIN = 0.2  # of its peak: a job that keeps less is drawn again, as no micro-batch would help it
STEPS = 6
LOSS = re.compile(r"^step (\d+) loss (\S+)$", re.MULTILINE)
HERE = Path(__file__).parent


@dataclass(frozen=True, slots=True, kw_only=True)
class Drawn:
    """A job, what it says of its memory, and the device that it gets."""

    said: dict[str, Any]
    kind: str
    parameters: int
    wrong: float  # how often what a sample truly keeps is what the profile says
    share: float  # of its activations that the device holds

    def spec(self, sample_bytes: float | None = None) -> JobSpec:
        """The job; `sample_bytes` is what its profile says, where it says anything."""
        if self.kind == "unknown" or sample_bytes is None:
            return JobSpec.model_validate(self.said)
        profile = {
            "parameters": self.parameters,
            "layers": 2,
            "activations_per_sample": f"{int(sample_bytes)}B",
            "forward_flops_per_sample": 1e9,
        }
        return JobSpec.model_validate(self.said | {"profile": profile})


@dataclass(frozen=True, slots=True, kw_only=True)
class Recovery:
    """How a job came through."""

    kind: str
    bursts: int
    ended: bool
    # of the largest micro-batch that the device holds, what its last attempt trained with
    micro_share: float
    # the largest difference of a loss from that of the whole device; None: it has not ended
    apart: float | None


def drawn(draw: random.Random, folder: Path) -> Drawn:
    """A model of ours on one or two ranks, or a script on one, with a profile or without."""
    kind = draw.choice(("model", "script", "unknown"))
    hidden, layers, batch = (
        draw.choice((64, 96, 128)),
        draw.choice((2, 4, 8)),
        draw.choice((16, 32, 64)),
    )
    length, seed = draw.choice((64, 128, 256)), draw.randrange(1000)
    wrong, share = math.exp(draw.uniform(math.log(1.5), math.log(30))), draw.uniform(0.3, 0.85)
    said: dict[str, Any] = {"name": "drawn", "global_batch_size": batch, "gpus": 1}
    if kind == "model":
        decoder = {
            "vocab_size": VOCABULARY,
            "hidden_size": hidden,
            "intermediate_size": 4 * hidden,
            "num_hidden_layers": layers,
            "num_attention_heads": 4,
        }
        text = folder / "corpus.txt"
        text.write_text("the quick brown fox jumps over the lazy dog. " * 4000)
        said |= {
            "gpus": draw.choice((1, 2)),
            "model": {"decoder": decoder},
            "data": {"text": [str(text)], "sequence_length": length},
            "training": {"max_steps": STEPS, "checkpoint_every_steps": 100},
        }
        parameters = 2 * VOCABULARY * hidden + layers * 16 * hidden * hidden
    else:
        knobs: dict[str, Any] = {
            "micro_batch_size": {"flag": "--batch", "default": batch},
            "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
        }
        if draw.random() < 0.3:
            knobs["activation_checkpointing"] = {"flag": "--checkpoint"}
        spread = draw.choice((0.0, 0.0, 0.2, 0.4))
        command = f"python {HERE / 'drawn_script.py'} --hidden {hidden} --layers {layers} --length {length}"
        said |= {
            "command": f"{command} --steps {STEPS} --seed {seed} --spread {spread}",
            "workdir": str(folder),
            "knobs": knobs,
            "steps": STEPS,
            "probe": "never",
        }
        parameters = sum(one.numel() for one in Model(hidden, layers, False).parameters())
    return Drawn(said=said, kind=kind, parameters=parameters, wrong=wrong, share=share)


def recovered(draw: random.Random, folder: Path) -> Recovery | None:
    """How the next job came through; None where it did not run out of memory, or keeps too little."""
    one = drawn(draw, folder)
    whole = Drive(folder / "whole", cluster(WHOLE)).run(one.spec())
    assert whole.status is JobStatus.SUCCEEDED, f"{whole.reason}: {one}"
    last = whole.attempts[-1]
    assert last.peak_bytes is not None
    fixed_bytes = STATE_BYTES * one.parameters
    if one.kind == "model":  # its plan may shard
        fixed_bytes = max(moment.counted_bytes for moment in last.estimate.moments)
    kept_bytes = last.peak_bytes - fixed_bytes
    if kept_bytes < KEPT_MIN * last.peak_bytes:
        return None
    sample_bytes = kept_bytes / last.plan.micro_batch_size
    room_bytes = int(fixed_bytes + max(one.share * kept_bytes, 2 * sample_bytes))
    job = Drive(folder / "part", cluster(f"{room_bytes}B")).run(one.spec(sample_bytes / one.wrong))
    bursts = story(job).count("device_oom")
    ended = job.status is JobStatus.SUCCEEDED
    print(
        f"{one.kind}, {one.wrong:.1f} times: {story(job)} {_sizes(job)} {'' if ended else job.reason}",
        flush=True,
    )
    if ended and not bursts:
        return None
    expected, found = _losses(folder / "whole", whole), _losses(folder / "part", job)
    assert len(expected) == STEPS, one
    apart = max(abs(found.get(step, math.inf) - loss) for step, loss in expected.items())
    cuts = [cut for cut in range(1, 65) if one.said["global_batch_size"] % cut == 0]
    largest = max(cut for cut in cuts if fixed_bytes + cut * sample_bytes <= room_bytes)
    return Recovery(
        kind=one.kind,
        bursts=bursts,
        ended=ended,
        micro_share=job.attempts[-1].plan.micro_batch_size / largest if job.attempts else 0.0,
        apart=apart if ended else None,
    )


def _sizes(job: Job) -> list[str]:
    def said(plan: Plan) -> str:
        return f"{plan.layout.dp}x{plan.micro_batch_size}x{plan.gradient_accumulation_steps}"

    return [said(one.plan) for one in job.attempts]


def _losses(home: Path, job: Job) -> dict[int, float]:
    """Loss by step; of two attempts that made it, the later one's."""
    found: dict[int, float] = {}
    for attempt in job.attempts:
        if job.spec.is_script:
            found |= {
                int(step): float(loss) for step, loss in LOSS.findall(log(home, attempt.number))
            }
            continue
        metrics = JobFolder(home, job.id).attempt(attempt.number).metrics
        lines = (
            [json.loads(line) for line in metrics.read_text().splitlines()]
            if metrics.exists()
            else []
        )
        found |= {int(line["step"]): line["loss"] for line in lines}
    return found


def _all(seed: int, jobs: int) -> Iterator[Recovery]:
    draw, count = random.Random(seed), 0
    for _ in range(DRAWS_MAX * jobs):
        with tempfile.TemporaryDirectory(prefix="orc") as folder:
            one = recovered(draw, Path(folder))
        if one is not None:
            count += 1
            yield one
        if count == jobs:
            return


def _median_share(found: Sequence[Recovery]) -> float:
    """Of jobs on one rank without recomputation it is exact; two ranks that shard differ in what is fixed."""
    return statistics.median(one.micro_share for one in found if one.ended)


def figures(seed: int = SEED, jobs: int = JOBS) -> list[Figure]:
    found = list(_all(seed, jobs))
    bursts = sorted(one.bursts for one in found if one.ended)
    apart = [one.apart for one in found if one.apart is not None]
    return [
        at_least(
            "real ranks: jobs that ran out of memory or were given up", len(found), "jobs", jobs
        ),
        informs(
            "real ranks: of them without a profile",
            sum(one.kind == "unknown" for one in found),
            "jobs",
        ),
        at_most(
            "real ranks: out of memory of a recovered job, mean",
            statistics.mean(bursts),
            "failures",
            1.3,
        ),
        at_most(
            "real ranks: out of memory of a recovered job, p95",
            bursts[int(0.95 * len(bursts))],
            "failures",
            2,
        ),
        at_most(
            "real ranks: given up that had a fitting plan", len(found) - len(bursts), "jobs", 0
        ),
        informs(
            "real ranks: micro-batch beside the largest that fits, median",
            _median_share(found),
            "ratio",
        ),
        at_most("real ranks: largest difference of a loss", max(apart), "loss", 2e-6),
    ]


if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("--seed", type=int, default=SEED)
    parser.add_argument("--jobs", type=int, default=JOBS)
    said = parser.parse_args()
    for figure in figures(said.seed, said.jobs):
        print(
            f"{figure['figure']}: {figure['value']:.3g} {figure['unit']} ({figure['bar']}, {figure['holds']})"
        )
