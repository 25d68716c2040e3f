"""A list of job files gives the jobs, hours and deadlines that a submission would."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from benchmarks.scheduler import cluster_of
from orchestrator.service.commands.job_list import read_job_list
from orchestrator.service.commands.simulate import shift_maintenance, simulate_trace
from orchestrator.specs.cluster import Maintenance
from orchestrator.specs.errors import SpecError

HOUR_S = 3600.0
JOB = "name: {name}\ncommand: python x.py\nworkdir: .\ngpus: 1\nglobal_batch_size: 4\nsteps: 360\nspeeds: {{1: 10s}}\n"


@pytest.fixture
def night(tmp_path: Path) -> Path:
    (tmp_path / "x.py").write_text("")
    sweep = (
        JOB.replace("x.py", "x.py --seed {{seed}}")
        + "array: {{seed: [0, 1]}}\ndepends_on: [prepare]\n"
    )
    late, due = (
        JOB + "start_window: 22:00-06:00 Europe/Berlin\n",
        JOB + "deadline: 21:30 Europe/Berlin\n",
    )
    for name, text in {"prepare": JOB, "sweep": sweep, "late": late, "due": due}.items():
        (tmp_path / f"{name}.yaml").write_text(text.format(name=name))
    return tmp_path


def write(folder: Path, text: str) -> Path:
    (folder / "night.yaml").write_text(text)
    return folder / "night.yaml"


def test_arrays_dependencies_hours_and_deadlines_of_a_list_are_played(night: Path) -> None:
    """The list begins at 18:00 in Berlin, the first job comes at 19:00; each job has an hour of work."""
    text = (
        "begins: 2026-07-01T18:00 Europe/Berlin\n"
        "jobs: [{at: 1h, file: prepare.yaml}, {at: 1h, file: sweep.yaml}, {at: 1h, file: late.yaml},"
        " {at: 2h, file: due.yaml}]\n"
    )
    run = simulate_trace(read_job_list(write(night, text), night), cluster_of(1, 0.0, 4))
    starts_h = [(outcome.name, (outcome.started_at_s or 0.0) / HOUR_S) for outcome in run.outcomes]
    assert starts_h == [
        ("prepare", 0.0),
        ("sweep", 1.0),
        ("sweep", 1.0),
        ("late", 3.0),
        ("due", 1.0),
    ]
    assert (run.report["deadlines"], run.report["deadlines_met"]) == (1, 1)
    assert run.report["mean_lateness_s"] == 0.0


def test_a_maintenance_counts_from_the_begin_of_a_list_and_is_refused_where_jobs_have_no_date(
    night: Path,
) -> None:
    """The list begins at 18:00. The nodes are away from 18:30 to 20:00, before the hour of work would end."""
    away = Maintenance.model_validate(
        {"start": "2026-07-01T18:30:00+02:00", "end": "2026-07-01T20:00:00+02:00"}
    )
    cluster = cluster_of(1, 0.0, 4).model_copy(update={"maintenance": (away,)})
    dated = read_job_list(
        write(night, "begins: 2026-07-01T18:00 Europe/Berlin\njobs: [{file: prepare.yaml}]\n"),
        night,
    )
    (outcome,) = simulate_trace(dated, shift_maintenance(cluster, dated.begins_s)).outcomes
    assert outcome.started_at_s == 2 * HOUR_S
    undated = read_job_list(write(night, "jobs: [{file: prepare.yaml}]\n"), night)
    with pytest.raises(SpecError, match="maintenance: the jobs have no date"):
        shift_maintenance(cluster, undated.begins_s)


@pytest.mark.parametrize("at_once", [1, 2, 4])
def test_a_sweep_of_a_list_is_played_with_all_its_trials_so_many_at_once(
    night: Path, at_once: int
) -> None:
    """Each trial has an hour of work; what waits behind the sweep on the same device goes between its trials."""
    text = (
        JOB.replace("x.py", "x.py --lr {{lr}}")
        + "sweep: {{method: grid, metric: {{name: loss, log: 'loss=(.)'}}, "
    )
    text += "parameters: {{lr: {{values: [1, 2, 3, 4, 5]}}}}, max_trials: 4}}\nmax_concurrent: {at_once}\n"
    (night / "tune.yaml").write_text(text.format(name="tune", at_once=at_once))
    run = simulate_trace(
        read_job_list(write(night, "jobs: [{file: tune.yaml}]\n"), night), cluster_of(1, 0.0, 4)
    )
    assert [outcome.trial for outcome in run.outcomes] == [
        ("tune#0", number) for number in range(4)
    ]
    starts_h = [(outcome.started_at_s or 0.0) / HOUR_S for outcome in run.outcomes]
    assert starts_h == [number // at_once for number in range(4)]
    assert (run.report["jobs"], run.report["finished"]) == (4, 4)


def test_trials_of_a_sweep_that_is_stuck_count_as_not_finished(night: Path) -> None:
    sweep = "sweep: {{method: grid, metric: {{name: loss, log: 'loss=(.)'}}, parameters: {{lr: {{values: [1, 2]}}}}}}\n"
    text = (
        JOB.replace("x.py", "x.py --lr {{lr}}")
        .replace("gpus: 1", "gpus: 8")
        .replace("{{1: 10s}}", "{{8: 10s}}")
    )
    (night / "tune.yaml").write_text((text + sweep + "max_concurrent: 1\n").format(name="tune"))
    text = "jobs: [{file: tune.yaml}, {file: prepare.yaml}]\n"
    report = simulate_trace(read_job_list(write(night, text), night), cluster_of(1, 0.0, 4)).report
    assert (report["jobs"], report["finished"]) == (3, 1)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("jobs: []\n", "jobs: the list has no jobs"),
        ("when: 1\njobs: [{file: prepare.yaml}]\n", "night.yaml:1: when: unknown key"),
        ("jobs: [{at: 3, file: prepare.yaml}]\n", "expected a duration"),
        ("jobs: [{att: 3s, file: prepare.yaml}]\n", "did you mean 'at'"),
        ("jobs: [{at: 3s}]\n", "night.yaml:1: jobs[0].file: this key is required, and missing"),
        ("jobs: [{file: late.yaml}]\n", "the list does not say when it begins"),
        ("begins: 18:00\njobs: [{file: late.yaml}]\n", "not a day and a time"),
        ("begins: tonight\njobs: [{file: late.yaml}]\n", "not a day and a time"),
        ("jobs: [{file: nobody.yaml}]\n", "nobody.yaml: the file does not exist"),
    ],
)
def test_a_bad_list_is_one_clear_error(night: Path, text: str, message: str) -> None:
    with pytest.raises(SpecError, match=re.escape(message)):
        read_job_list(write(night, text), night)
