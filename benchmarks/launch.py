"""How much longer than bare torchrun does it take from a launch to the first training step, with Ray already up?"""

from __future__ import annotations

import statistics
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path

from benchmarks.figure import Figure, at_most, informs
from orchestrator.backends.ray import embedded as embedded_ray
from orchestrator.backends.ray.backend import RayBackend
from orchestrator.specs.attempt import NodeDevices
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.job.spec import JobSpec
from tests.backends.ray_jobs import DEVICE, Alone, Reader, launch_of

SCRIPT = Path(__file__).with_name("first_step.py")
RANKS = 2
RUNS = 5
RUN_TIMEOUT_S = 120


def figures() -> list[Figure]:
    node = NodeSpec(name="local", devices=RANKS, device=DEVICE, host_memory="4GiB")  # type: ignore[arg-type]
    cluster = ClusterSpec(name="bench", nodes=(node,))
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder).resolve()
        try:
            backend = RayBackend(
                home, cluster, partial(embedded_ray.start_embedded, home, cluster), Alone()
            )
            try:
                reader = Reader(backend)
                reader.await_nodes()
                bare, ours = _measure(reader, home)
            finally:
                backend.close()
        finally:
            embedded_ray.stop_embedded(home)
    ratio = statistics.median(ours) / statistics.median(bare)
    return [
        informs("torchrun to the first step, median", statistics.median(bare), "s"),
        informs("launch to the first step, median", statistics.median(ours), "s"),
        at_most("launch / torchrun to the first step", ratio, "ratio", 1.3),
    ]


def _measure(reader: Reader, home: Path) -> tuple[list[float], list[float]]:
    _torchrun_s(home / "warm")  # fills the page cache
    bare, ours = [], []
    for run in range(RUNS):  # interleaved: the machine's mood is the same for both
        bare.append(_torchrun_s(home / f"bare{run}"))
        ours.append(_launch_s(reader, run, home / f"ours{run}"))
    return bare, ours


def _torchrun_s(mark: Path) -> float:
    command = [
        sys.executable,
        "-m",
        "torch.distributed.run",
        f"--nproc-per-node={RANKS}",
        "--standalone",
    ]
    began_s = time.time()
    subprocess.run(
        [*command, str(SCRIPT), "--mark", str(mark)],
        check=True,
        timeout=RUN_TIMEOUT_S,
        stderr=subprocess.DEVNULL,
    )
    return float(mark.read_text()) - began_s


def _launch_s(reader: Reader, run: int, mark: Path) -> float:
    command = ("python", str(SCRIPT), "--mark", str(mark))
    spec = JobSpec(name="first-step", command=command, global_batch_size=16)
    launch = launch_of(
        f"first-step-{run}", spec, (NodeDevices(node="local", devices=tuple(range(RANKS))),)
    )
    began_s = time.time()
    reader.backend.launch(launch)
    ends = reader.await_end(launch).evidence
    assert [end.exit_code for end in ends.ranks] == [0] * RANKS, ends
    return float(mark.read_text()) - began_s
