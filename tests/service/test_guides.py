"""Every job file in the guides is read and planned as it stands."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from orchestrator.service.commands.plan import forecast
from orchestrator.service.server.intake import read_cluster
from orchestrator.specs.cluster import idle_nodes
from orchestrator.specs.parse import parse_job
from orchestrator.specs.plan import Precision

GUIDES = Path(__file__).parents[2] / "docs/guides"
FILES = [
    pytest.param(text, id=f"{guide.stem}-{number}")
    for guide in (GUIDES / "own-script.md", GUIDES / "frameworks.md")
    for number, text in enumerate(re.findall(r"```yaml\n(.*?)```", guide.read_text(), re.S), 1)
]


def test_there_is_a_job_file_for_each_way() -> None:
    assert len(FILES) == 4


@pytest.mark.parametrize("text", FILES)
def test_a_guides_job_file_is_planned_as_it_stands(text: str) -> None:
    spec = parse_job(text, "guide")
    assert spec.precision in tuple(Precision)
    assert spec.knobs.gradient_accumulation_steps is not None
    assert forecast(spec, idle_nodes(read_cluster(None)), ())["chosen"] is not None
