"""How long does planning take? `orc plan` with its start for 70B and 405B on clusters; its answer alone for 7B.

The bars are on the clock. Beside it stands processor time: where it is far below, other work was on the machine.
"""

from __future__ import annotations

import gc
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from orchestrator.service.forecast import forecast
from orchestrator.specs.cluster import idle_nodes
from orchestrator.specs.job import GpuRange, JobSpec
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.plan import Precision
from tests.bench.figure import Figure, at_most, informs

ROOT = Path(__file__).parents[2]
RUNS = 5
# The shape of Llama-2-7B (meta-llama/Llama-2-7b-hf config.json).
SEVEN_B = DecoderSpec(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)


def figures() -> list[Figure]:
    small = [json.loads(_run(sys.executable, "-m", "tests.bench.plan")) for _ in range(RUNS)]
    return [
        *_two("orc plan, 70B on 64 x 8", _orc_plan_s("70b", "64x8-h100-80gb"), "s", 1.0),
        *_two("orc plan, 405B on 512 x 8", _orc_plan_s("405b", "512x8-h100-80gb"), "s", 2.0),
        *_two("7B on 1 x 8, nothing remembered", [(1e3 * wall, 1e3 * busy) for wall, busy in small], "ms", 50),
    ]


def _two(figure: str, taken: Sequence[tuple[float, float]], unit: str, limit: float) -> list[Figure]:
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


def seven_b_s() -> tuple[float, float]:
    """Seconds of the clock and of the processor of what `orc plan` asks for 7B on 8 GPUs, in a new process."""
    spec = JobSpec(
        name="seven-b",
        gpus=GpuRange(min=1, max=8),
        global_batch_size=64,
        precision=Precision.BF16,
        model=ModelSpec(decoder=SEVEN_B),
        data=DataSpec(text=("text",), sequence_length=4096),
    )
    path = ROOT / "clusters/1x8-h100-80gb.yaml"
    nodes = idle_nodes(parse_cluster(path.read_text(), str(path)))
    gc.disable()  # as `orc plan` does
    began_s, busy_s = time.perf_counter(), time.process_time()
    forecast(spec, nodes)
    return time.perf_counter() - began_s, time.process_time() - busy_s


if __name__ == "__main__":
    print(json.dumps(seven_b_s()))
