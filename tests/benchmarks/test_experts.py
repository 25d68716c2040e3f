"""Published configurations as jobs, clusters and plans."""

from __future__ import annotations

from pathlib import Path

import pytest
import yaml

from benchmarks.experts import FILE, ROWS_MIN, answered, read_rows


def test_every_configuration_has_a_plan_that_is_predicted_or_says_why_it_has_none() -> None:
    rows = read_rows()
    assert len(rows) >= ROWS_MIN
    assert all(bool(row.plan) != bool(row.cannot) for row in rows)


def test_seconds_follow_from_the_published_teraflops_by_the_papers_count() -> None:
    by_name = {row.name: row for row in read_rows()}
    # arXiv:2104.04473: 84 days for 450 billion tokens of 1T on 3,072 devices, in steps of 3,072 x
    # 2,048 tokens
    steps = 450e9 / (3072 * 2048)
    assert by_name["sc21-1t"].measured_s == pytest.approx(84 * 86400 / steps, rel=0.02)


def test_the_chosen_plan_is_as_fast_as_the_published_one_that_fits() -> None:
    row = next(row for row in read_rows() if row.name == "sc21-7.5b")
    answer = answered(row)
    assert not answer.is_refused
    assert answer.ratio is not None
    assert answer.ratio <= 1


@pytest.mark.parametrize(("key", "content"), [("plan", {}), ("colour", "red")])
def test_a_row_without_a_plan_or_with_an_unknown_key_is_refused(
    key: str, content: object, tmp_path: Path
) -> None:
    data = yaml.safe_load(FILE.read_text())
    data["sources"][0]["rows"][0][key] = content
    file = tmp_path / "experts.yaml"
    file.write_text(yaml.safe_dump(data))
    with pytest.raises(ValueError, match=r"sc21-1\.7b"):
        read_rows(file)
