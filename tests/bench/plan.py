"""How long does planning take? `orc plan` for 70B on 64 nodes x 8 GPUs, its start included; 7B on 8 GPUs, without."""

from __future__ import annotations

import statistics
import subprocess
import sys
import time
from pathlib import Path

from orchestrator.planning.search import Hardware, frontier
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
    command = (
        *(sys.executable, "-m", "orchestrator.cli", "plan", "jobs/llama/llama_70b.yaml"),
        *("--cluster", "clusters/64x8-h100-80gb.yaml"),
    )
    alone = (sys.executable, "-m", "tests.bench.plan")
    return [
        at_most("orc plan, 70B on 64 x 8, median", statistics.median(_taken_s(command)), "s", 1.0),
        at_most("7B on 1 x 8, nothing remembered, median", 1e3 * statistics.median(_printed(alone)), "ms", 50),
    ]


def _taken_s(command: tuple[str, ...]) -> list[float]:
    taken_s = []
    for _ in range(RUNS + 1):  # the first fills the page cache
        began_s = time.perf_counter()
        subprocess.run(command, cwd=ROOT, check=True, stdout=subprocess.DEVNULL)
        taken_s.append(time.perf_counter() - began_s)
    return taken_s[1:]


def _printed(command: tuple[str, ...]) -> list[float]:
    return [float(subprocess.run(command, cwd=ROOT, check=True, capture_output=True).stdout) for _ in range(RUNS)]


def seven_b_s() -> float:
    """Seconds for the frontier of 7B on 8 GPUs, in a process that has planned nothing yet."""
    spec = JobSpec(
        name="seven-b",
        gpus=GpuRange(min=1, max=8),
        global_batch_size=64,
        precision=Precision.BF16,
        model=ModelSpec(decoder=SEVEN_B),
        data=DataSpec(text=("text",), sequence_length=4096),
    )
    path = ROOT / "clusters/1x8-h100-80gb.yaml"
    cluster = parse_cluster(path.read_text(), str(path))
    node = cluster.nodes[0]
    hardware = Hardware(
        device=node.device, devices_per_node=node.devices, nodes=1, network_bandwidth=cluster.network_bandwidth
    )
    began_s = time.perf_counter()
    frontier(spec, hardware)
    return time.perf_counter() - began_s


if __name__ == "__main__":
    print(seven_b_s())
