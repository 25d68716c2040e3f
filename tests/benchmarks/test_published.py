"""Published rows are jobs: every word of theirs is known, and the plan is one that a search would make."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.__main__ import main
from benchmarks.published_rows import FOLDER, read_rows
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import list_plans
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.service.commands.plan import parse_plan
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.parse import parse_job_data

HEADER = "{source: s, url: u, looked_at: true, rows: [%s]}"
ROW = "{id: a, at: b, job: {}, plan: {}, cluster: %s, measured: {%s: 1}, outcome: %s}"


def test_there_are_eighty_rows_and_each_is_one() -> None:
    rows = read_rows()
    assert len(rows) >= 80
    assert len({row.name for row in rows}) == len(rows)


def test_the_plan_of_a_row_is_one_that_the_search_makes() -> None:
    for row in read_rows()[::4]:
        spec = parse_job_data({"name": row.name, **row.job}, row.source)
        plan = parse_plan(spec, [(key, str(value)) for key, value in row.plan.items()])
        (group,) = group_equal_nodes(make_idle_nodes(row.cluster))
        assert plan in set(list_plans(read_plan_request(spec), group.hardware)), row.name


@pytest.mark.parametrize(
    ("row", "unknown"),
    [
        (ROW % ("1x1-a100-80gb", "active", "ran"), "active"),
        (ROW % ("1x1-a100-80gb", "device", "OK"), "OK"),
        (ROW % ("a100", "device", "ran"), "a100"),
        ((ROW % ("1x1-a100-80gb", "device", "ran")).replace("plan", "plans"), "plans"),
    ],
)
def test_an_unknown_word_is_an_error(row: str, unknown: str, tmp_path: Path) -> None:
    (tmp_path / "source.yaml").write_text(HEADER % row)
    with pytest.raises(ValueError, match=unknown):
        read_rows(tmp_path)


def test_rows_of_others_are_printed_as_a_line_of_readme_and_a_refused_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    data = yaml.safe_load((FOLDER / "torchtitan.yaml").read_text())
    rows = data["rows"]
    impossible = {**rows[0], "id": "impossible", "plan": {**rows[0]["plan"], "dp": 1_000}}
    data |= {"looked_at": False, "rows": [*rows, impossible]}
    path = tmp_path / "rows.yaml"
    path.write_text(yaml.safe_dump(data))
    assert main(["published", "--rows", str(path)]) == 0
    printed = capsys.readouterr().out
    measured = sum("measured" in row for row in rows)
    assert f"| published GPU memory, 1 sources | {measured} measured | all |" in printed
    assert "not answered: impossible: " in printed
    assert f"{len(rows)} of {len(rows) + 1} rows were answered" in printed


@pytest.mark.parametrize("text", ["[", "rows", "{source: s}", HEADER % "a", HEADER % "{id: a}"])
def test_a_file_that_has_no_rows_is_one_line(
    text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "rows.yaml"
    path.write_text(text)
    assert main(["published", "--rows", str(path)]) == 2
    assert "rows.yaml" in capsys.readouterr().out
