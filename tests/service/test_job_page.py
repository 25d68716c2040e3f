"""Laws of a job's page: its memory chart has the device's end and the fatal moment, and it says what runs where."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

from orchestrator.service.pages.frame import load_macros
from orchestrator.service.pages.job import (
    FILES_MAX,
    Curves,
    add_failure_memory,
    draw_charts,
    list_artifact_names_and_bytes,
    list_job_facts,
    make_memory_rows,
)
from orchestrator.specs.job_record import Job
from orchestrator.specs.parse import parse_job
from orchestrator.specs.run import JobFolder
from tests.service.worlds import World

MIB = 2**20
CURVES = [
    Curves(
        number=1,
        loss=[(1.0, 2.0)],
        step_s=[(1.0, 0.1)],
        peak_bytes=[(1.0, 100.0 * MIB), (2.0, 90.0 * MIB)],
    )
]


def view(kind: str | None, peak_bytes: int = 254 * MIB) -> Any:
    failure = None if kind is None else {"kind": kind}
    return {"attempts": [{"number": 1, "peak_bytes": peak_bytes, "failure": failure}]}


def test_the_memory_of_an_attempt_that_ran_out_ends_with_what_was_in_use() -> None:
    (ended,) = add_failure_memory(CURVES, view("device_oom"))
    assert ended.peak_bytes[-1] == (3.0, 254.0 * MIB)
    assert add_failure_memory(CURVES, view("user_error")) == CURVES
    assert add_failure_memory(CURVES, view(None)) == CURVES


def test_the_memory_chart_has_the_end_of_the_device() -> None:
    chart = draw_charts(CURVES, 256 * MIB)["peak_bytes"]
    assert "device ends: 256 MiB" in chart
    assert "device ends" not in draw_charts(CURVES, None)["peak_bytes"]


def test_facts_are_the_command_the_folder_and_the_commit_where_they_are_known(
    tmp_path: Path,
) -> None:
    text = f"name: a\ncommand: [python, train.py, a b]\nglobal_batch_size: 8\nworkdir: {tmp_path}\n"
    spec = parse_job(text, "job.yaml")
    job = Job(id="a-1", spec=spec, order=1, submitted_at_s=0.0)
    assert list_job_facts(job) == {"Command": "python train.py 'a b'", "Folder": str(tmp_path)}
    source = SimpleNamespace(commit="0123456789abcdef" * 3, dirty=True)
    saved = Job(
        id="a-1", spec=spec.model_copy(update={"source": source}), order=1, submitted_at_s=0.0
    )
    assert list_job_facts(saved)["Commit"] == "0123456789ab with changes"


def test_a_bar_of_memory_has_the_end_of_the_device_and_is_red_where_it_ran_out() -> None:
    attempt = {
        "predicted_bytes": 300 * MIB,
        "device": "d",
        "outcome": "device_oom",
        "ended_at_s": 1.0,
    }
    job: Any = {"attempts": [view("device_oom")["attempts"][0] | attempt], "progress": None}
    meter = load_macros("charts").meter
    for capacities, end in (({"d": 256 * MIB}, f'class="end" x="{99 * 256 / 300:.1f}"'), ({}, "")):
        (row,) = make_memory_rows(job, capacities)
        bar = meter("measured", row["peak"], row["most"], row["tone"], row["capacity"])
        assert 'class="bar over"' in bar
        assert end in bar if end else 'class="end"' not in bar


def test_the_output_is_listed_with_its_newest_files_and_no_link_is_followed(tmp_path: Path) -> None:
    assert list_artifact_names_and_bytes(tmp_path, "a-1") == []
    folder = JobFolder(tmp_path, "a-1").output
    (folder / "checkpoint").mkdir(parents=True)
    (folder / "link").symlink_to("/etc/passwd")
    (folder / "model.bin").write_bytes(b"123")
    shown = dict(list_artifact_names_and_bytes(tmp_path, "a-1"))
    assert (shown["checkpoint"], shown["model.bin"], shown["link"]) == (None, 3, len("/etc/passwd"))
    for number in range(2 * FILES_MAX):
        (folder / f"{number}").touch()
    assert len(list_artifact_names_and_bytes(tmp_path, "a-1")) == FILES_MAX


def test_facts_name_variables_and_say_no_value_of_one() -> None:
    spec = parse_job(
        "name: a\ncommand: python a.py\nglobal_batch_size: 8\nworkdir: /srv\nenv: {A: hush}\n",
        "job.yaml",
    )
    assert list_job_facts(Job(id="a-1", spec=spec, order=1, submitted_at_s=0.0))["Variables"] == "A"


def test_a_running_job_of_ours_says_that_its_curves_are_yet_to_come(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    page = world.client.get(f"/ui/jobs/{job_id}").text
    assert "No curves yet" in page
    assert "does not report its steps" not in page
