"""How long does planning take? `orc plan` with its start for 70B and 405B on clusters; its answer alone for 7B; and a
trace of 70B on one core, with the same again from where it is kept. Beside it, what it gains for 70B that the first
layers alone may be recomputed in full.

The bars are on the clock. Beside it stands processor time: where it is far below, other work was on the machine.
"""

from __future__ import annotations

import gc
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.figure import Figure, at_most, informs
from orchestrator.service.commands.plan import JobPlans, plan_job
from orchestrator.service.intake.profiling import TraceScope, trace_model
from orchestrator.specs.choices import Precision
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.job.sections import GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_cluster, parse_job

ROOT = Path(__file__).parents[1]
RUNS, TRACES = 5, 3
# The shape of Llama-2-7B (meta-llama/Llama-2-7b-hf config.json).
SEVEN_B = DecoderSpec(
    vocab_size=32000,
    hidden_size=4096,
    intermediate_size=11008,
    num_hidden_layers=32,
    num_attention_heads=32,
)
# The shape of Llama-3-70B (meta-llama/Meta-Llama-3-70B config.json).
SEVENTY_B: dict[str, int] = {
    "vocab_size": 128256,
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
}
MODELS = {
    "decoder": ModelSpec(decoder=DecoderSpec(**SEVENTY_B)),
    "transformers": ModelSpec(hf={"model_type": "llama", **SEVENTY_B}),
}


def figures() -> list[Figure]:
    small = [_of_a_process("search") for _ in range(RUNS)]
    return [
        *_two("orc plan, 70B on 64 x 8", _orc_plan_s("70b", "64x8-h100-80gb"), "s", 1.0),
        *_two("orc plan, 405B on 512 x 8", _orc_plan_s("405b", "512x8-h100-80gb"), "s", 2.0),
        *_two(
            "7B on 1 x 8, nothing remembered",
            [(1e3 * wall, 1e3 * busy) for wall, busy in small],
            "ms",
            50,
        ),
        at_most(
            "70B on 64 x 8: step over that of layers all checkpointed alike",
            _step_ratio(),
            "",
            0.90,
        ),
        *(figure for name in MODELS for figure in _traces(name)),
    ]


def _step_ratio() -> float:
    """Predicted step of what `orc plan` chooses, over that where no plan recomputes its first layers only."""
    job, cluster = ROOT / "jobs/llama/llama_70b.yaml", ROOT / "clusters/64x8-h100-80gb.yaml"
    spec = parse_job(job.read_text(), str(job))
    nodes = make_idle_nodes(parse_cluster(cluster.read_text(), str(cluster)))
    alike = spec.model_copy(update={"plan": (("full_checkpointing_layers", 0),)})
    taken, before = (_chosen_step_s(plan_job(variant, nodes)) for variant in (spec, alike))
    return taken / before


def _chosen_step_s(found: JobPlans) -> float:
    assert found["chosen"] is not None, found["nothing_fits"]
    return found["frontier"][found["chosen"]]["step_s"]


def _traces(name: str) -> list[Figure]:
    traces, again = zip(*(_of_a_process("trace", name) for _ in range(TRACES)), strict=True)
    return [
        *_two(f"70B traced on one core, {name}", traces, "s", 20),
        *_two(
            f"70B traced before, {name}",
            [(1e3 * wall, 1e3 * busy) for wall, busy in again],
            "ms",
            50,
        ),
    ]


def _of_a_process(*what: str) -> Any:
    """What a new process of this file says of that."""
    return json.loads(_run(sys.executable, "-m", "benchmarks.plan", *what))


def _two(
    figure: str, taken: Sequence[tuple[float, float]], unit: str, limit: float
) -> list[Figure]:
    """Medians of the time on the clock, with its bar, and of processor time."""
    wall, busy = (statistics.median(one) for one in zip(*taken, strict=True))
    return [
        at_most(f"{figure}, median", wall, unit, limit),
        informs(f"{figure}, processor time, median", busy, unit),
    ]


def _orc_plan_s(model: str, cluster: str) -> list[tuple[float, float]]:
    """Seconds of the clock and of processors, of every run but the first, which fills the page cache."""
    taken_s = []
    for _ in range(RUNS + 1):
        began_s, busy_s = time.perf_counter(), _children_s()
        files = (f"jobs/llama/llama_{model}.yaml", "--cluster", f"clusters/{cluster}.yaml")
        _run(sys.executable, "-m", "orchestrator.cli", "plan", *files)
        taken_s.append((time.perf_counter() - began_s, _children_s() - busy_s))
    return taken_s[1:]


def _children_s() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _run(*command: str) -> bytes:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout


def search() -> tuple[float, float]:
    """Seconds of the clock and of the processor of what `orc plan` asks for 7B on 8 GPUs."""
    spec = _job(ModelSpec(decoder=SEVEN_B), tokens=4096)
    path = ROOT / "clusters/1x8-h100-80gb.yaml"
    nodes = make_idle_nodes(parse_cluster(path.read_text(), str(path)))
    gc.disable()  # as `orc plan` does
    began_s, busy_s = time.perf_counter(), time.process_time()
    plan_job(spec, nodes)
    return time.perf_counter() - began_s, time.process_time() - busy_s


def trace(name: str) -> list[tuple[float, float]]:
    """Seconds of the clock and of the processor of the model's profile, twice: the second is kept from the first."""
    os.sched_setaffinity(0, {min(os.sched_getaffinity(0))})
    spec, taken = _job(MODELS[name], tokens=8192), []
    with tempfile.TemporaryDirectory() as home:
        for _ in range(2):
            began_s, busy_s = time.perf_counter(), time.process_time() + _children_s()
            trace_model(spec, Path(home), "job.yaml", TraceScope())
            taken.append(
                (time.perf_counter() - began_s, time.process_time() + _children_s() - busy_s)
            )
    return taken


def _job(model: ModelSpec, *, tokens: int) -> JobSpec:
    return JobSpec(
        name="planned",
        gpus=GpuRange(min=1, max=8),
        global_batch_size=64,
        precision=Precision.BF16,
        model=model,
        data=DataSpec(text=("text",), sequence_length=tokens),
    )


if __name__ == "__main__":
    print(json.dumps(search() if sys.argv[1] == "search" else trace(sys.argv[2])))
