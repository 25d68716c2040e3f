"""The queue policy that the docs show works as they say."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from orchestrator.scheduling.policies.registry import POLICIES
from orchestrator.service.commands.job_list import read_list
from orchestrator.service.commands.simulate import simulate
from orchestrator.specs.order import Order
from orchestrator.specs.parse import parse_cluster

PAGE = Path(__file__).parents[2] / "docs" / "extending" / "queue-policy.md"
CLUSTER = "name: one\nnodes: [{name: n, devices: 1, device: a100-80gb, host_memory: 64GiB}]\n"
JOB = "{{name: {name}, command: env, workdir: ., gpus: 1, global_batch_size: 8, steps: {steps}, speeds: {{1: 1s}}}}\n"


def test_the_policy_that_the_docs_show_starts_the_shortest_job_first(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = PAGE.read_text().partition("```python\n")[2].partition("```")[0]
    shown: dict[str, Any] = {"__name__": "sjf"}
    exec(compile(code, str(PAGE), "exec", dont_inherit=True), shown)
    for name, steps in {"first": 100, "long": 3000, "short": 500, "middle": 1000}.items():
        (tmp_path / f"{name}.yaml").write_text(JOB.format(name=name, steps=steps))
    (tmp_path / "list.yaml").write_text(
        "jobs: [{file: first.yaml}, {at: 1s, file: long.yaml}, {at: 2s, file: short.yaml},"
        " {at: 3s, file: middle.yaml}]\n"
    )
    asked = read_list(tmp_path / "list.yaml", tmp_path)
    cluster = parse_cluster(CLUSTER, "cluster").ordered(Order.EASY)

    def started() -> list[str]:
        ended = simulate(asked, cluster, seed=0).outcomes
        return [one.name for one in sorted(ended, key=lambda one: one.started_at_s or 0.0)]

    assert started() == ["first", "long", "short", "middle"]
    monkeypatch.setitem(POLICIES, Order.EASY, shown["SjfPolicy"])  # type: ignore[arg-type]
    assert started() == ["first", "short", "middle", "long"]
