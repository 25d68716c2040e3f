"""A journal's decisions are replayed, and differences to this version reported."""

from __future__ import annotations

import contextlib
import io
import json
import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.simulated.traces import Trace
from orchestrator.cli import main
from orchestrator.service.commands.replay import iterate_events, replay_history
from orchestrator.service.commands.simulate import Simulated, make_report
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.forecasts import list_expected_jobs
from orchestrator.service.server.verbs import make_suspension_change
from orchestrator.service.terminal import gantt
from orchestrator.service.terminal.comparison_tables import _make_table as strategies_table
from orchestrator.service.terminal.expected import make_expected_table
from orchestrator.service.terminal.simulation_tables import (
    make_replay_table,
    make_simulated_table,
)
from orchestrator.service.terminal.tables import (
    make_attempts_table,
    make_nodes_table,
    make_queue_table,
)
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import CancelRequested, TimerFired
from orchestrator.specs.job.spec import JobSpec
from tests.scheduling.factories import node
from tests.scheduling.faulty_world import FaultyBackend
from tests.scheduling.test_drain import maintained
from tests.scheduling.test_queue import script, seen, submitted
from tests.scheduling.world import CLUSTERS, STORM, backend_of, random_scenario, settled


@pytest.fixture
def night(tmp_path: Path) -> tuple[Path, Journal]:
    """A run with many failures on the real journal, which its service still has open."""
    scenario = replace(
        random_scenario(random.Random(2), jobs=5),
        cluster=CLUSTERS[2],
        hazards=STORM,
        cancels=(),
        drains=(),
    )
    path = tmp_path / "journal.sqlite"
    journal, backend = Journal(f"sqlite:///{path}"), backend_of(scenario)
    controller = Controller(journal, backend, backend.current_time_s)
    for _, spec, fault in scenario.jobs:
        controller.submit(spec, fault)
    for _ in range(1000):
        if settled(controller.state):
            return path, journal
        controller.run_once(3600.0)
    raise AssertionError("the night did not end")


def test_every_decision_is_replayed_while_the_service_is_up(night: tuple[Path, Journal]) -> None:
    path, journal = night
    decided = list(replay_history(iterate_events(str(path))))
    launches = [
        line
        for decision in decided
        for line in decision["now"].splitlines()
        if line.startswith("launch ")
    ]
    attempts = sum(len(job.attempts) for job in journal.list_ended_jobs(100))
    assert len(launches) == attempts > 5
    assert all(decision["same"] for decision in decided)
    assert all(decision["why"] for decision in decided)
    journal.close()


def test_a_decision_that_this_version_makes_otherwise_is_reported(
    night: tuple[Path, Journal], capsys: pytest.CaptureFixture[str]
) -> None:
    path, journal = night
    history = [
        (event, decided.replace(" on ", " elsewhere ") if decided else decided)
        for event, decided in journal.iterate_history()
    ]
    journal.close()
    others = [decision for decision in replay_history(history) if not decision["same"]]
    assert others
    assert all(
        "elsewhere" in (decision["then"] or "") and "elsewhere" not in decision["now"]
        for decision in others
    )
    assert exit_code(lambda: main(["replay", str(path), "--json"])) == 0
    assert all(decision["same"] for decision in json.loads(capsys.readouterr().out)["decisions"])
    assert exit_code(lambda: main(["replay", "--home", str(path.parent)])) == 0
    assert "decides 0 otherwise" in capsys.readouterr().out


def test_a_stopped_job_gets_the_reason() -> None:
    events = (
        seen(maintained("a", (1000.0, 2000.0))),
        submitted(1, script({1: 500.0})),
        TimerFired(at_s=900.0),
    )
    *_, decision = replay_history((event, None) for event in events)
    assert decision["now"].startswith("stop job-1"), decision
    assert decision["why"] == "job-1: stopped for the maintenance of a"
    events = (
        seen(node("a")),
        submitted(1, script({1: 500.0})),
        CancelRequested(job_id="job-1", at_s=2.0),
    )
    *_, decision = replay_history((event, None) for event in events)
    assert decision["why"] == "job-1: is being cancelled"


def test_the_live_queue_is_played_from_now_on_another_cluster(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Three jobs of an hour on one device; the other cluster has three."""
    backend = FaultyBackend(CLUSTERS[0], seed=1, hazards={}, repeat_chance=0.0)
    journal = Journal(f"sqlite:///{tmp_path}/journal.sqlite")
    controller = Controller(journal, backend, backend.current_time_s)
    controller.run_once(0.0)
    spec = JobSpec.model_validate(
        {
            "name": "hour",
            "command": "python x.py",
            "global_batch_size": 1,
            "steps": 3600,
            "speeds": {"1": "1s"},
        }
    )
    for _ in range(3):
        controller.submit(spec)
    controller.run_once(60.0)
    (tmp_path / "other.yaml").write_text(
        "name: three\nnodes: [{name: n, devices: 3, device: a100-80gb, host_memory: 64GiB}]\nlaunch_cost: 10s\n"
    )
    first, second, third = list_expected_jobs(controller.state, 60.0)
    assert (first["status"], second["status"], third["status"]) == ("running", "queued", "queued")
    assert first["end_s"] <= second["start_s"] < second["end_s"] <= third["start_s"], (
        "one device, one after the other"
    )
    Console().print(make_expected_table([first, second, third]))
    output = capsys.readouterr().out
    assert third["id"] in output
    assert "not known" not in output
    argv = [
        "simulate",
        "--queue",
        "now",
        "--home",
        str(tmp_path),
        "--json",
        "--cluster",
        str(tmp_path / "other.yaml"),
    ]
    assert exit_code(lambda: main(argv)) == 0
    report = json.loads(capsys.readouterr().out)
    assert (report["trace"], report["finished"]) == ("queue", 3)
    assert report["makespan_s"] == pytest.approx(3610.0)
    endless = controller.submit(
        spec.model_copy(update={"name": "endless", "steps": None, "speeds": ()})
    )
    Console().print(make_expected_table(list_expected_jobs(controller.state, 60.0)))
    assert "not known" in capsys.readouterr().out
    assert exit_code(lambda: main(["forecast", "--home", str(tmp_path)])) != 0
    assert "no service is up" in capsys.readouterr().err
    assert exit_code(lambda: main(argv)) == 0
    captured = capsys.readouterr()
    assert f"as nothing tells how long they or those before them take: {endless}" in captured.err
    assert json.loads(captured.out)["finished"] == 3
    rows = json.loads(captured.out)["outcomes"]
    assert [row["job"] for row in rows] == [job.id for job in controller.state.jobs.values()]
    assert all(row["started_at_s"] < row["ended_at_s"] for row in rows if row["job"] != endless)
    assert exit_code(lambda: main([*argv, str(tmp_path / "other.yaml")])) == 2, (
        "a trace and the queue"
    )
    journal.close()


QUEUE_FORMS = ("", "--cluster other.yaml")


def test_the_live_queue_is_played_in_each_form_that_people_read(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two jobs wait and one is held, which no play counts; nothing finishes in a queue of held jobs alone."""
    monkeypatch.chdir(tmp_path)
    backend = FaultyBackend(CLUSTERS[0], seed=1, hazards={}, repeat_chance=0.0)
    with contextlib.closing(Journal(f"sqlite:///{tmp_path}/journal.sqlite")) as journal:
        controller = Controller(journal, backend, backend.current_time_s)
        controller.run_once(0.0)
        spec = JobSpec.model_validate(
            {
                "name": "hour",
                "command": "python x.py",
                "global_batch_size": 1,
                "steps": 3600,
                "speeds": {"1": "1s"},
            }
        )
        text = (
            "name: three\nnodes: [{name: n, devices: 3, device: a100-80gb, host_memory: 64GiB}]\n"
        )
        (tmp_path / "other.yaml").write_text(text)
        (tmp_path / "cluster.yaml").write_text(text)
        waiting = controller.submit(spec)
        controller.change_jobs([waiting], make_suspension_change("ann"))
        only_held = [
            "simulate",
            "--queue",
            "now",
            "--home",
            str(tmp_path),
            "--cluster",
            "other.yaml",
        ]
        assert exit_code(lambda: main(only_held)) == 0
        captured = capsys.readouterr()
        assert "0 of 0" in captured.out
        assert f"Not counted, since they are held: {waiting}" in captured.err
        for _ in range(2):
            controller.submit(spec)
        controller.run_once(60.0)
        for form in QUEUE_FORMS:
            argv = ["simulate", "--queue", "now", "--home", str(tmp_path), *form.split()]
            assert exit_code(lambda argv=argv: main(argv)) == 0, form  # type: ignore[misc]
            assert "of 2" in capsys.readouterr().out, form


def test_a_table_of_nothing_is_a_table() -> None:
    """Runs without jobs, decisions, strategies or cards: no statistic of an empty list is taken."""
    spec = CLUSTERS[0]
    nothing = Simulated(
        report=make_report(Trace(name="none", arrivals=()), spec, ()), outcomes=(), decisions_s=()
    )
    console = Console(file=io.StringIO())
    for table in (
        make_simulated_table(nothing),
        make_replay_table(()),
        gantt.draw_gantt((), spec),
        make_queue_table([]),
        make_attempts_table([]),
        make_nodes_table([], []),
        make_expected_table([]),
        strategies_table((), {}),
    ):
        console.print(table)


def test_what_is_no_journal_is_one_clear_error(tmp_path: Path) -> None:
    with pytest.raises(SpecError, match="there is no journal"):
        list(iterate_events(str(tmp_path / "journal.sqlite")))
    (tmp_path / "text.db").write_text(
        "not a database, though it is long enough to be read as the header of one\n" * 9
    )
    with pytest.raises(SpecError, match="not a SQLite journal"):
        list(iterate_events(str(tmp_path / "text.db")))


def exit_code(argv: Callable[[], None]) -> object:
    with pytest.raises(SystemExit) as error:
        argv()
    return error.value.code
