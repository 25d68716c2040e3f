"""How long does planning take? `orc plan` with its start for 70B and 405B on clusters; its answer alone for 7B."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.service.forecast import forecast
from orchestrator.specs.cluster import idle_nodes
from orchestrator.specs.job import GpuRange, JobSpec
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.plan import Precision
from tests.bench.figure import Figure, at_most

ROOT = Path(__file__).parents[2]
RUNS = 5
# The shape of Llama-2-7B (meta-llama/Llama-2-7b-hf config.json).
SEVEN_B = DecoderSpec(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)


def figures() -> list[Figure]:
    small_s = [float(_run(sys.executable, "-m", "tests.bench.plan")) for _ in range(RUNS)]
    return [
        at_most("orc plan, 70B on 64 x 8, median", _orc_plan_s("70b", "64x8-h100-80gb"), "s", 1.0),
        at_most("orc plan, 405B on 512 x 8, median", _orc_plan_s("405b", "512x8-h100-80gb"), "s", 2.0),
        at_most("7B on 1 x 8, nothing remembered, median", 1e3 * statistics.median(small_s), "ms", 50),
    ]


def _orc_plan_s(model: str, cluster: str) -> float:
    taken_s = []
    for _ in range(RUNS + 1):  # the first fills the page cache
        began_s = time.perf_counter()
        files = (f"jobs/llama/llama_{model}.yaml", "--cluster", f"clusters/{cluster}.yaml")
        _run(sys.executable, "-m", "orchestrator.cli", "plan", *files)
        taken_s.append(time.perf_counter() - began_s)
    return statistics.median(taken_s[1:])


def _run(*command: str) -> bytes:
    return subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout


def seven_b_s() -> float:
    """Seconds of what `orc plan` asks for 7B on 8 GPUs, in a process that has planned nothing yet."""
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
    began_s = time.perf_counter()
    forecast(spec, nodes)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(seven_b_s())
