"""The queue policy that the docs show is the one that runs, and works as they say."""

from __future__ import annotations

from pathlib import Path

from benchmarks.measured import simulate
from benchmarks.peers import Peer, sjf
from orchestrator.service.commands.job_list import read_job_list
from orchestrator.specs.parse import parse_cluster

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "queue-policy.md"
CLUSTER = "name: one\nnodes: [{name: n, devices: 1, device: a100-80gb, host_memory: 64GiB}]\n"
JOB = "{{name: {name}, command: env, workdir: ., gpus: 1, global_batch_size: 8, steps: {steps}, speeds: {{1: 1s}}}}\n"


def test_the_policy_that_the_docs_show_is_the_whole_module() -> None:
    assert f"```python\n{Path(sjf.__file__).read_text()}```" in PAGE.read_text()


def test_the_policy_that_the_docs_show_starts_the_shortest_job_first(tmp_path: Path) -> None:
    for name, steps in {"first": 100, "long": 3000, "short": 500, "middle": 1000}.items():
        (tmp_path / f"{name}.yaml").write_text(JOB.format(name=name, steps=steps))
    (tmp_path / "list.yaml").write_text(
        "jobs: [{file: first.yaml}, {at: 1s, file: long.yaml}, {at: 2s, file: short.yaml},"
        " {at: 3s, file: middle.yaml}]\n"
    )
    job_list, cluster = (
        read_job_list(tmp_path / "list.yaml", tmp_path),
        parse_cluster(CLUSTER, "cluster"),
    )

    def started(order: str) -> list[str]:
        ended = simulate(job_list, cluster.replace_order(order)).outcomes
        return [
            outcome.name
            for outcome in sorted(ended, key=lambda outcome: outcome.started_at_s or 0.0)
        ]

    assert started(Peer.EASY) == ["first", "long", "short", "middle"]
    assert started(Peer.SJF) == ["first", "short", "middle", "long"]
