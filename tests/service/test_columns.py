"""A column is declared once, as docs/extending/column.md does: terminal, pages, `orc watch` and JSON have it."""

from __future__ import annotations

import importlib.util
import io
import math
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from rich.console import Console

from orchestrator.service.terminal import access, tables, watch
from orchestrator.service.views import columns
from orchestrator.service.views.columns import Column, select_columns
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import Node
from orchestrator.specs.job_record import Job
from tests.service.worlds import World

ROOT = Path(__file__).parents[2]
PAGE = ROOT / "docs/extending/column.md"
FILE = "orchestrator/service/views/columns.py"
JOB_TABLES = {
    *("queue", "watch"),
    *("running", "waiting", "ended"),
}


def lines(table: Any, width: int = 200) -> list[str]:
    console = Console(file=io.StringIO(), width=width)
    console.print(table)
    return console.file.getvalue().splitlines()  # type: ignore[attr-defined]


def cells_of(page: str, heading: str) -> list[str]:
    return re.findall(rf'data-label="{heading}" class="[^"]*">\s*([^<]*?)\s*</td>', page)


def columns_with_the_example(folder: Path) -> ModuleType:
    """Return the module of columns, changed as the page shows."""
    (block,) = re.findall(r"```diff\n(.*?)```", PAGE.read_text(), flags=re.DOTALL)
    copy = folder / FILE
    copy.parent.mkdir(parents=True)
    copy.write_text((ROOT / FILE).read_text())
    subprocess.run(["git", "apply", "-"], input=block, text=True, cwd=folder, check=True)
    spec = importlib.util.spec_from_file_location("columns_with_the_example", copy)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


def test_the_example_of_the_page_is_one_change_that_every_place_shows(
    world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    module = columns_with_the_example(tmp_path)
    (example,) = [new for new in module.COLUMNS[Job] if new.key == "ooms"]
    assert {*example.tables.split()} == JOB_TABLES
    shown = module.Column("ooms", "OOMs", example.tables, value_of=example.value_of)
    monkeypatch.setitem(columns.COLUMNS, Job, (*columns.COLUMNS[Job], shown))
    world.controller.drain_node("virtual", undo=False)
    world.submit()
    jobs = world.client.get("/jobs").json()["jobs"]
    assert [job["ooms"] for job in jobs] == [0]
    for table in (tables.make_queue_table(jobs), watch._make_jobs_table(jobs)):
        heading, row = lines(table)
        assert (heading.split()[-1], row.split()[-1]) == ("OOMS", "0")
    assert cells_of(world.client.get("/ui/queue").text, "OOMs") == ["0"]
    assert cells_of(world.client.get("/ui/overview").text, "OOMs") == ["0"]
    world.controller.drain_node("virtual", undo=True)
    world.turn_until("succeeded", 1)
    assert cells_of(world.client.get("/ui/queue").text, "OOMs") == ["0"]


def test_a_long_queue_is_lines_of_the_same_cells(world: World) -> None:
    world.submit()
    (job,) = world.client.get("/jobs").json()["jobs"]
    few = lines(tables.make_queue_table([job]), width=400)
    many = tables.make_queue_table([job] * (tables.STYLED_MAX + 1))
    assert isinstance(many, str)
    heading, first, *others = many.splitlines()
    assert [heading.split(), first.split()] == [few[0].split(), few[1].split()]
    assert others == [first] * tables.STYLED_MAX


def test_a_rare_column_stands_in_a_terminal_only_where_a_row_has_a_value() -> None:
    rows = [{"priority": 0, "team": None}]
    assert "priority" not in [column.key for column in select_columns("queue", rows)]
    assert "priority" in [
        column.key for column in select_columns("queue", [*rows, {"priority": 3}])
    ]


def test_a_column_of_attempts_reaches_the_terminal_the_page_of_the_job_and_json(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column(
        "name_length",
        "Letters",
        "attempts sides",
        value_of=lambda attempt: len(attempt.name),
    )
    monkeypatch.setitem(columns.COLUMNS, Attempt, (*columns.COLUMNS[Attempt], column))
    job_id = world.submit()
    world.turn_until("succeeded", 1)
    job = world.client.get(f"/jobs/{job_id}").json()["job"]
    (attempt,) = job["attempts"]
    assert attempt["name_length"] == len(f"{job_id}-1")
    heading, row = lines(tables.make_attempts_table([job]))
    assert (heading.split()[-1], row.split()[-1]) == ("LETTERS", str(attempt["name_length"]))
    page = world.client.get(f"/ui/jobs/{job_id}").text
    assert re.search(
        rf'<th scope="row">Letters</th><td class="num">{attempt["name_length"]}</td>', page
    )


def test_a_column_of_nodes_reaches_the_terminal_the_page_of_the_cluster_and_json(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column(
        "devices",
        "Devices in all",
        "nodes node_lines cards",
        value_of=lambda node: node.devices * 1000,
    )
    monkeypatch.setitem(columns.COLUMNS, Node, (*columns.COLUMNS[Node], column))
    nodes = world.client.get("/cluster").json()["nodes"]
    (count,) = [node["devices"] for node in nodes]
    assert count >= 1000
    for table in (tables.make_nodes_table(nodes, []), watch._make_nodes_table(nodes)):
        heading, row = lines(table)
        assert "DEVICES IN ALL" in heading
        assert str(count) in row
    page = world.client.get("/ui/cluster").text
    assert f'devices in all <span class="num">{count}</span>' in page


def test_a_number_that_json_cannot_write_is_unknown(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column(
        "ratio", "Ratio", "queue waiting", value_of=lambda job: job.order / math.inf * math.inf
    )
    monkeypatch.setitem(columns.COLUMNS, Job, (*columns.COLUMNS[Job], column))
    world.controller.drain_node("virtual", undo=False)
    world.submit()
    jobs = world.client.get("/jobs").json()["jobs"]
    assert [job["ratio"] for job in jobs] == [None]
    assert lines(tables.make_queue_table(jobs))[1].split()[-1] == "-"
    assert cells_of(world.client.get("/ui/queue").text, "Ratio") == ["–"]


def test_a_column_of_the_audit_reaches_the_terminal_and_its_page(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    column = Column("action", "What was asked", "audit")
    monkeypatch.setitem(columns.COLUMNS, "account", (*columns.COLUMNS["account"], column))
    world.submit()
    rows = world.client.get("/audit").json()["rows"]
    heading, row = lines(access._make_table("audit", rows))
    assert heading.rstrip().endswith("WHAT WAS ASKED")
    assert row.rstrip().endswith("POST /jobs lm-1")
    page = world.client.get("/ui/audit").text
    assert '<th scope="col">What was asked</th></tr>' in page
    assert "<td>POST /jobs lm-1</td></tr>" in page
