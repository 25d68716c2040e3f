"""Laws of the benchmark of promises and submitted plans, on small worlds in seconds."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks import promises
from benchmarks.scheduler import cluster_of
from benchmarks.side_by_side import SideBySide
from benchmarks.trace_files import read_trace

COLUMNS = (
    "name,submission_time,duration,application,num_gpus,num_cpus,bandwidth,exec_plan,steps,is_sla"
)
JOBS = (
    "a,0,9,vit,2,16,0,zero-dp,1000,0",
    "b,5,9,vit,2,16,0,ga,1000,0",
    "c,9,9,vit,1,16,0,ga,1000,0",
)
THROUGHPUT = "exec_plan,placement,iter_time\nga,1,0.2\nzero-dp,2,0.15\nga,2,0.12\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "throughput").mkdir()
    (tmp_path / "throughput" / "vit.csv").write_text(THROUGHPUT)
    workloads = tmp_path / "workloads"
    workloads.mkdir()
    (workloads / "base.csv").write_text("\n".join([COLUMNS, *JOBS]))
    return workloads


def test_as_many_jobs_as_asked_are_guaranteed_what_they_were_submitted_with(folder: Path) -> None:
    trace = read_trace(folder / "base.csv")
    requests = [
        arrival.spec.guarantee for arrival in promises.guaranteed(trace, 2, seed=1).arrivals
    ]
    assert sum(request is not None for request in requests) == 2
    (all_of_a, *_) = promises.guaranteed(trace, 3, seed=1).arrivals
    assert all_of_a.spec.guarantee is not None
    assert (all_of_a.spec.guaranteed_gpus, all_of_a.spec.guarantee.step) == (2, 0.15)


def test_who_has_no_choice_runs_as_it_was_submitted_and_with_the_best_plan_in_bp(
    folder: Path,
) -> None:
    (first, *_) = read_trace(folder / "base.csv").arrivals
    assert promises.as_submitted(first).spec.speeds == ((2, 0.15),)
    assert promises.as_submitted(promises.with_best_plan(first)).spec.speeds == ((2, 0.12),)


@pytest.mark.parametrize("is_here", [True, False])
def test_the_share_of_promises_is_that_of_the_run_and_says_whose_trace_it_is(
    folder: Path, monkeypatch: pytest.MonkeyPatch, *, is_here: bool
) -> None:
    monkeypatch.setattr(promises, "GUARANTEED", 2)
    if is_here:
        (folder / "mt.csv").write_text("\n".join([COLUMNS, JOBS[0], JOBS[1][:-1] + "1", JOBS[2]]))
    shown = SideBySide()
    rows = promises.promise_figures(folder, cluster_of(1, 10.0), lambda trace: [trace], shown)
    by_figure = {row["figure"]: row for row in rows}
    (share,) = [
        row
        for name, row in by_figure.items()
        if name.endswith("share of promises kept") and row["bar"]
    ]
    assert (share["value"], share["holds"]) == (1.0, True)
    assert share["figure"].startswith(
        "mt: " if is_here else "mt, of base.csv with 2 guaranteed jobs as mt.csv is not"
    )
    (lost,) = [
        row for name, row in by_figure.items() if name.endswith("jobs not finished and not refused")
    ]
    assert lost["holds"]
    as_submitted = [
        row["value"] for name, row in by_figure.items() if "as submitted, ours: mean" in name
    ]
    assert as_submitted[0] > as_submitted[1], "base's plans are slower than bp's"
