"""Published step times of tuned configurations: every word of a row is known, and its half follows from its name."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.tuned import Answered, half_figures, source_figures
from benchmarks.tuned_rows import FILE, HALVES, half_of, read_rows
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.service.commands.plan import parse_plan
from orchestrator.specs.cluster import make_idle_nodes


def test_there_are_forty_rows_each_is_one_and_each_half_has_a_third() -> None:
    rows = read_rows()
    assert len(rows) >= 40
    assert len({row.name for row in rows}) == len(rows)
    assert min(sum(row.half == half for row in rows) for half in HALVES) >= len(rows) / 3


def test_the_plan_of_a_row_takes_all_devices_of_its_cluster() -> None:
    for row in read_rows():
        plan = parse_plan(row.spec, [(key, str(value)) for key, value in row.plan.items()])
        (group,) = group_equal_nodes(make_idle_nodes(row.cluster))
        assert plan.world_size == group.devices, row.name


def test_seconds_follow_from_each_published_rate() -> None:
    measured_s = {row.name: row.measured_s for row in read_rows()}
    assert measured_s["kempner-7b-1"] == 3.13
    # 14,167 tokens/s of a device at 363.66 TFLOP/s, scripts/scaling_benchmarks.py @ e24d2483: of
    # the same model
    flops = 363.66e12 / 14167.25 * 256 * 4096
    assert measured_s["nanotron-3b-8"] == pytest.approx(flops / (0.4668 * 989e12 * 8), rel=1e-3)
    # 0.125M tokens of 8 devices (same table)
    assert measured_s["internlm-ckpt-8-8"] == pytest.approx(2**17 / (8 * 3314))
    assert measured_s["a800-7b-64"] == pytest.approx(64 / 4.73)


@pytest.mark.parametrize(
    ("key", "content", "unknown"),
    [
        ("colour", "red", "colour"),
        ("half", "third", "third"),
        ("half", HALVES[1 - HALVES.index(half_of("nanotron-3b-512"))], "its name says"),
        ("model", "gpt-5", "gpt-5"),
        ("seconds", 1.0, "one of"),
        ("cluster", "a100", "a100"),
    ],
)
def test_an_unknown_word_or_another_half_is_an_error(
    key: str, content: object, unknown: str, tmp_path: Path
) -> None:
    data = yaml.safe_load(FILE.read_text())
    data["sources"][0]["rows"][0][key] = content
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=unknown):
        read_rows(tmp_path / "tuned.yaml")


@pytest.mark.parametrize("where", ["file", "source"])
def test_an_unknown_key_beside_the_rows_is_an_error(where: str, tmp_path: Path) -> None:
    data = yaml.safe_load(FILE.read_text())
    (data if where == "file" else data["sources"][0])["looked_at"] = True
    (tmp_path / "tuned.yaml").write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match="looked_at"):
        read_rows(tmp_path / "tuned.yaml")


def test_a_row_is_answered_as_orc_estimate_does_and_its_error_is_of_what_was_measured() -> None:
    row = next(row for row in read_rows() if row.name == "flagperf-7b-a100-40gb")
    answer = Answered(row, row.answer())
    assert answer.view["settings"]["tp"] == "4"
    assert answer.error == pytest.approx(answer.view["step_s"] / 11.43 - 1, abs=1e-3)


def test_only_the_second_half_has_a_bar() -> None:
    row = next(row for row in read_rows() if row.name == "flagperf-7b-a100-40gb")
    answer = Answered(row, row.answer())
    answer = answer._replace(view={**answer.view, "step_s": row.measured_s / 2})
    first, second = (half_figures(half, [answer]) for half in HALVES)
    assert [figure for figure in first if figure["bar"]] == []
    (with_bar,) = (figure for figure in second if figure["bar"])
    assert with_bar["value"] == pytest.approx(50)
    assert not with_bar["holds"]


def test_a_source_of_few_rows_has_no_order() -> None:
    row = next(row for row in read_rows() if row.name == "flagperf-7b-a100-40gb")
    answer = Answered(row, row.answer())
    other_order = [
        Answered(row._replace(measured_s=6.0 - step_s), {**answer.view, "step_s": step_s})
        for step_s in (1.0, 2.0, 3.0, 4.0, 5.0)
    ]
    assert [figure for figure in source_figures("s", other_order[:4]) if figure["bar"]] == []
    (order,) = (figure for figure in source_figures("s", other_order) if figure["bar"])
    assert order["value"] == pytest.approx(-1)
    assert not order["holds"]
