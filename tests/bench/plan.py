"""How long does planning take? `orc plan` with its start for 70B on 64 nodes x 8; its answer alone for 405B and 7B."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.service.forecast import forecast
from orchestrator.specs.cluster import ClusterSpec, idle_nodes
from orchestrator.specs.job import GpuRange, JobSpec
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.parse import parse_cluster, parse_job
from orchestrator.specs.plan import Precision
from tests.bench.figure import Figure, at_most

ROOT = Path(__file__).parents[2]
RUNS = 5
# The shape of Llama-2-7B (meta-llama/Llama-2-7b-hf config.json).
SEVEN_B = DecoderSpec(
    vocab_size=32000, hidden_size=4096, intermediate_size=11008, num_hidden_layers=32, num_attention_heads=32
)


def figures() -> list[Figure]:
    command = (
        *(sys.executable, "-m", "orchestrator.cli", "plan", "jobs/llama/llama_70b.yaml"),
        *("--cluster", "clusters/64x8-h100-80gb.yaml"),
    )
    whole_s, largest_s, small_s = _taken_s(command), _printed_s("405b"), _printed_s("7b")
    return [
        at_most("orc plan, 70B on 64 x 8, median", statistics.median(whole_s), "s", 1.0),
        at_most("405B on 512 x 8, nothing remembered, median", statistics.median(largest_s), "s", 2.0),
        at_most("7B on 1 x 8, nothing remembered, median", 1e3 * statistics.median(small_s), "ms", 50),
    ]


def _taken_s(command: tuple[str, ...]) -> list[float]:
    taken_s = []
    for _ in range(RUNS + 1):  # the first fills the page cache
        began_s = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        taken_s.append(time.perf_counter() - began_s)
    return taken_s[1:]


def _printed_s(case: str) -> list[float]:
    """Of processes that have planned nothing yet."""
    command = (sys.executable, "-m", "tests.bench.plan", case)
    return [float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout) for _ in range(RUNS)]


def planned_s(case: str) -> float:
    """Seconds of what `orc plan` asks for: the frontier and all that is said of its plans."""
    spec, cluster = (_405b(), _h100(512)) if case == "405b" else (_7b(), _h100(1))
    nodes = idle_nodes(cluster)
    began_s = time.perf_counter()
    forecast(spec, nodes)
    return time.perf_counter() - began_s


def _405b() -> JobSpec:
    path = ROOT / "jobs/llama/llama_405b.yaml"
    return parse_job(path.read_text(), str(path))


def _7b() -> JobSpec:
    return JobSpec(
        name="seven-b",
        gpus=GpuRange(min=1, max=8),
        global_batch_size=64,
        precision=Precision.BF16,
        model=ModelSpec(decoder=SEVEN_B),
        data=DataSpec(text=("text",), sequence_length=4096),
    )


def _h100(nodes: int) -> ClusterSpec:
    path = ROOT / "clusters/64x8-h100-80gb.yaml"
    cluster = parse_cluster(path.read_text(), str(path))
    return cluster.model_copy(
        update={"nodes": tuple(node.model_copy(update={"count": nodes}) for node in cluster.nodes)}
    )


if __name__ == "__main__":
    print(planned_s(sys.argv[1]))
