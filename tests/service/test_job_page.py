"""Laws of a job's page: its memory chart has the device's end and the fatal moment, and it says what runs where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.service.pages.job import Curves, charts, facts_of, with_fatal_moments
from orchestrator.specs.job_record import Job
from orchestrator.specs.parse import parse_job

MIB = 2**20
CURVES = [Curves(number=1, loss=[(1.0, 2.0)], step_s=[(1.0, 0.1)], peak_bytes=[(1.0, 100.0 * MIB), (2.0, 90.0 * MIB)])]


def view(kind: str | None, peak_bytes: int = 254 * MIB) -> Any:
    failure = None if kind is None else {"kind": kind}
    return {"attempts": [{"number": 1, "peak_bytes": peak_bytes, "failure": failure}]}


def test_the_memory_of_an_attempt_that_ran_out_ends_with_what_was_in_use() -> None:
    (ended,) = with_fatal_moments(CURVES, view("device_oom"))
    assert ended.peak_bytes[-1] == (3.0, 254.0 * MIB)
    assert with_fatal_moments(CURVES, view("user_error")) == CURVES
    assert with_fatal_moments(CURVES, view(None)) == CURVES


def test_the_memory_chart_has_the_end_of_the_device() -> None:
    chart = charts(CURVES, 256 * MIB)["peak_bytes"]
    assert "device ends: 256 MiB" in chart
    assert "device ends" not in charts(CURVES, None)["peak_bytes"]


def test_facts_are_the_command_the_folder_and_the_commit_where_they_are_known(tmp_path: Path) -> None:
    text = f"name: a\ncommand: [python, train.py, a b]\nglobal_batch_size: 8\nworkdir: {tmp_path}\n"
    spec = parse_job(text, "job.yaml")
    job = Job(id="a-1", spec=spec, order=1, submitted_at_s=0.0)
    assert facts_of(job) == {"Command": "python train.py 'a b'", "Folder": str(tmp_path)}
    source = SimpleNamespace(commit="0123456789abcdef" * 3, dirty=True)
    saved = Job(id="a-1", spec=spec.model_copy(update={"source": source}), order=1, submitted_at_s=0.0)
    assert facts_of(saved)["Commit"] == "0123456789ab and changes"
