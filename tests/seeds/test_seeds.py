"""Laws of the five projects' own scripts: their job files change in paths and sizes alone, and each run's row holds."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

from tests.seeds.checkouts import Missing
from tests.seeds.runs import CASES, Case, edited, run

NAMES = [f"{project.CHECKOUT}-{case.place}-{case.devices}" for project, case in CASES]


@pytest.mark.parametrize(("project", "case"), CASES, ids=NAMES)
def test_a_job_file_changes_in_paths_and_sizes_alone(
    project: ModuleType, case: Case, tmp_path: Path
) -> None:
    paths = {
        "python": "/a/bin/python",
        "made": "/made",
        "checkout": str(tmp_path / project.CHECKOUT),
    }
    spec = edited(project, case, paths, {})
    plain = edited(project, Case(**{**vars(case), "options": {}, "sizes": {}}), paths, {})
    for name in (
        "launch",
        "precision",
        "success",
        "progress",
        "phases",
        "training",
        "retries",
        "degrade",
        "config",
    ):
        assert getattr(spec, name, None) == getattr(plain, name, None), name
    for (name, knob), (_, before) in zip(spec.knobs.items(), plain.knobs.items(), strict=True):
        sizes = {"default": None, "values": (), "also": ()}
        assert knob.model_copy(update=sizes) == before.model_copy(update=sizes), name


@pytest.mark.long
@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("project", "case"), CASES, ids=NAMES)
def test_a_project_recovers_or_asks_and_stands_in_mlflow(
    project: ModuleType, case: Case, tmp_path: Path
) -> None:
    try:
        row = run(project, case, tmp_path)
    except Missing as missing:
        pytest.skip(str(missing))
    assert not row.wrong, row
