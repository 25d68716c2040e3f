"""Laws of sweeps: trials really run, the best is told, hopeless ones are stopped, a restart loses nothing."""

from __future__ import annotations

import contextlib
import html
import json
import os
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import pytest

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.journal.journal import Journal
from orchestrator.cli import main
from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.intake.intake import read_jobs
from orchestrator.service.pages.routes import PAGES_OF_SERVICE
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.notifier import DAY_S, Notifier
from orchestrator.service.server.routes.api import create_app
from orchestrator.service.server.sweeps import study as study_module
from orchestrator.service.server.sweeps.study import Study
from orchestrator.service.server.sweeps.sweeper import FAILURES_MAX, Sweeper
from orchestrator.specs.errors import ServiceError, SpecError
from orchestrator.specs.job.sweep import Sweep
from orchestrator.specs.notify import NotifySpec
from orchestrator.specs.run import JobFolder
from tests.local_cluster import LocalLaunchers, LocalNodes
from tests.service.services import TOKEN, service_of
from tests.service.test_compare import CLUSTER

PATIENCE_S = 200.0
SCRIPT = f"""\
name: tune
command: {sys.executable} train.py {{lr}}
global_batch_size: 1
probe: never
steps: 20
progress: 'step (\\d+)'
max_concurrent: 2
sweep:
  method: grid
  metric: {{name: loss, log: 'loss=(\\S+)'}}
  parameters: {{lr: {{values: [4, 2, 3, 1]}}}}
"""
# It writes no file and needs no torch: a trial takes a second. Where `slow` is there, a step takes
# a tenth; where
# `endless` is there, a trial lasts longer than a test waits.
TRAIN = """\
import sys, time
from pathlib import Path
rate = float(sys.argv[1])
if Path("broken").exists():
    raise ValueError("a bug")
for step in range(1, 21):
    print(f"step {step} loss={rate + 1 / step}", flush=True)
    if Path("slow").exists():
        time.sleep(0.1)
    if Path("endless").exists():
        time.sleep(60)
"""


class World:
    """A service over real processes that can be ended and begun again."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.home.mkdir()
        (self.home / "token").write_text(TOKEN)
        (folder / "job.yaml").write_text(SCRIPT)
        (folder / "train.py").write_text(TRAIN)
        self._stack, self._launchers = (
            contextlib.ExitStack(),
            LocalLaunchers(),
        )  # ranks outlive a service

    def begin(self) -> None:
        self._stack = stack = contextlib.ExitStack()
        database = f"sqlite:///{self.home / 'journal.sqlite'}"
        self.journal = journal = stack.enter_context(contextlib.closing(Journal(database)))
        backend = stack.enter_context(
            contextlib.closing(
                ProcessBackend(self.home, CLUSTER, LocalNodes(CLUSTER), self._launchers, journal)
            )
        )
        self.controller = Controller(journal, backend, time.time)
        self.sweeper = Sweeper(self.controller, journal.sweeps, self.home)
        service = service_of(
            self.controller,
            journal,
            self.home,
            cluster=CLUSTER.name,
            sweeper=self.sweeper,
            pages=PAGES_OF_SERVICE,
        )
        stop = threading.Event()
        threads = [
            threading.Thread(target=run, args=(stop,))
            for run in (self.controller.run, self.sweeper.run)
        ]
        port = stack.enter_context(serve_http(create_app(service)))
        self.url = f"http://127.0.0.1:{port}"
        write_service_file(self.home, port)
        for thread in threads:
            thread.start()
            stack.callback(thread.join)
        stack.callback(stop.set)

    def end(self) -> None:
        self._stack.close()

    def submit(self) -> str:
        specs = read_jobs(self.folder / "job.yaml")
        with contextlib.closing(Client(self.home)) as client:
            ids = client.submit_jobs([spec.model_dump(mode="json") for spec in specs])["ids"]
        return f"sweep-{ids[0]}"

    def sweep(self, sweep_id: str) -> Any:
        with contextlib.closing(Client(self.home)) as client:
            return asdict(client.fetch_sweep(sweep_id))

    def page(self, path: str) -> str:
        answer = httpx.get(f"{self.url}/ui{path}", headers={"Authorization": f"Bearer {TOKEN}"})
        assert answer.status_code == 200, answer.text
        return html.unescape(answer.text)

    def held_s(self, trial: Any) -> float:
        """Seconds of devices that the attempts of a trial held."""
        job = self.controller.find_job(trial["job"])
        assert job is not None
        return sum((attempt.ended_at_s or 0.0) - attempt.launched_at_s for attempt in job.attempts)

    def report_text(self) -> str:
        """The report that a service sends at an hour which is due now."""
        hook = {"name": "hook", "webhook": "ORC_URL", "signed_with": "ORC_SECRET"}
        spec = NotifySpec.model_validate({"targets": [hook], "report_at": "00:00"})
        notices, now_s = self.journal.notices, time.time()
        notices.register_receivers(["hook"])
        for at_s in (now_s - 2 * DAY_S, now_s):  # the first hour counts as told
            Notifier(
                spec,
                {},
                notices,
                self.controller,
                lambda at_s=at_s: at_s,
                self.sweeper.make_reports,
            ).send_due_notices()
        return str([notice.text for _, notice in notices.list_pending("hook", 9)][-1])

    def until(self, sweep_id: str, law: Callable[[Any], object]) -> Any:
        deadline_s = time.monotonic() + PATIENCE_S
        while not law(sweep := self.sweep(sweep_id)):
            assert time.monotonic() < deadline_s, sweep
            time.sleep(0.1)
        return sweep


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    variables = {name: text for name, text in os.environ.items() if name != "ORC_SERVER"}
    variables |= {"ORC_HOME": str(tmp_path / "home"), "COLUMNS": "80"}
    world = World(tmp_path)
    with contextlib.chdir(tmp_path), mock.patch.dict(os.environ, variables):
        world.begin()
        try:
            yield world
        finally:
            world.end()


def run_command(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    with contextlib.suppress(SystemExit):
        main(arguments)
    return capsys.readouterr().out


@pytest.mark.long
@pytest.mark.timeout(300)
def test_every_trial_is_a_job_with_its_values_and_the_best_one_is_shown_everywhere(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    sweep_id = run_command(capsys, "submit", "job.yaml").strip()
    assert sweep_id == "sweep-tune-1"
    over = world.until(sweep_id, lambda sweep: sweep["ended"] and not sweep["live"])
    assert over["ended"] == "finished"
    assert [
        (trial["parameters"]["lr"], trial["status"], trial["value"]) for trial in over["trials"]
    ] == [(rate, "succeeded", pytest.approx(rate + 0.05)) for rate in (4, 2, 3, 1)]
    assert over["best"] == 3
    best = f"loss 1.05 by {over['trials'][3]['job']}: lr 1"
    for command in (("show", sweep_id), ("queue",), ("report",)):
        shown = run_command(capsys, *command)
        assert best in " ".join(shown.split()), command
        assert max(map(len, shown.splitlines())) <= 80 or command == ("report",), command
    for path in ("/sweeps", f"/sweeps/{sweep_id}"):
        assert best in world.page(path), path
    assert f'href="/ui/sweeps/{sweep_id}"' in world.page(f"/jobs/{over['trials'][1]['job']}")
    line = f"4 of 4 trials ended; best {best}; "
    for form in ("text", "markdown", "html"):
        assert line in " ".join(run_command(capsys, "report", "--format", form).split()), form
    assert line in world.page("/night?hours=1")
    assert line in world.report_text()
    assert json.loads(run_command(capsys, "report", "--json"))["sweeps"][0]["id"] == sweep_id
    assert over["device_s"] == pytest.approx(sum(map(world.held_s, over["trials"])))
    log = JobFolder(world.home, over["trials"][0]["job"]).attempt(1).log(0).read_text()
    assert "step 20 loss=4.05" in log
    with (
        pytest.raises(ServiceError, match="has ended already: finished"),
        contextlib.closing(Client(world.home)) as it,
    ):
        it.cancel_jobs([sweep_id], whole_arrays=False)


@pytest.mark.timeout(300)
def test_at_most_so_many_trials_are_live_and_the_cancelled_sweep_has_no_more(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "endless").touch()
    sweep_id = world.submit()
    sweep_view = world.until(sweep_id, lambda sweep: len(sweep["trials"]) == 2)
    assert sweep_view["live"] == 2
    reply = json.loads(run_command(capsys, "cancel", sweep_id, "--json"))
    assert reply["cancelled"] == [trial["job"] for trial in sweep_view["trials"]]
    over = world.until(sweep_id, lambda sweep: not sweep["live"])
    assert (over["ended"], len(over["trials"]), over["best"]) == ("cancelled", 2, None)
    assert {trial["status"] for trial in over["trials"]} == {"cancelled"}


@pytest.mark.timeout(300)
def test_a_sweep_that_runs_is_played_with_the_trials_that_it_has_still_to_submit(
    world: World, capsys: pytest.CaptureFixture[str]
) -> None:
    (world.folder / "endless").touch()
    sweep_id = world.submit()
    world.until(sweep_id, lambda sweep: len(sweep["trials"]) == 2)
    played = json.loads(run_command(capsys, "simulate", "--queue", "now", "--json"))
    assert (played["jobs"], played["finished"]) == (4, 0), "nothing tells how long a trial takes"
    (world.folder / "more.yaml").write_text(SCRIPT.replace("name: tune", "name: more"))
    form = {"job": (world.folder / "more.yaml").read_text() + f"workdir: {world.folder}\n"}
    answer = httpx.post(
        f"{world.url}/ui/what-if", data=form, headers={"Authorization": f"Bearer {TOKEN}"}
    )
    shown = html.unescape(answer.text)
    page = httpx.post(
        f"{world.url}/ui/submit",
        data={"text": form["job"]},
        headers={"Authorization": f"Bearer {TOKEN}"},
    )
    assert "Submit the sweep of 4 trials" in page.text
    assert "0 of 4" in shown, "as it is"
    assert "0 of 8" in shown, "with the other sweep"
    for name in [
        *(f"tune, trial {number}" for number in (2, 3)),
        *(f"more, trial {number}" for number in range(4)),
    ]:
        assert shown.count(f">{name} <") == 1, name
    with contextlib.closing(Client(world.home)) as client:
        client.cancel_jobs([sweep_id], whole_arrays=False)


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trial_that_is_worse_than_the_others_at_the_same_step_is_stopped_with_the_reason(
    world: World,
) -> None:
    early = "  early_terminate: {type: median, min_iter: 3, startup_trials: 1}\n"
    text = (
        SCRIPT.replace("max_concurrent: 2", "max_concurrent: 1").replace(
            "[4, 2, 3, 1]", "[2, 9, 1]"
        )
        + early
    )
    (world.folder / "job.yaml").write_text(text)
    (world.folder / "slow").touch()
    sweep_id = world.submit()
    over = world.until(sweep_id, lambda sweep: sweep["ended"] and not sweep["live"])
    assert [trial["status"] for trial in over["trials"]] == [
        "succeeded",
        "stopped early",
        "succeeded",
    ]
    assert over["trials"][1]["reason"].startswith("stopped early at step ")
    assert over["best"] == 2
    job = world.controller.find_job(over["trials"][1]["job"])
    assert job is not None
    assert job.status == "cancelled"
    assert job.last is not None
    assert job.last.failure is not None
    assert job.last.failure.kind == "cancelled"


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_service_that_begins_again_amid_a_sweep_goes_on_with_the_same_trials(
    world: World,
) -> None:
    sweep_id = world.submit()
    world.until(
        sweep_id, lambda sweep: any(trial["status"] == "succeeded" for trial in sweep["trials"])
    )
    world.end()
    world.begin()
    over = world.until(sweep_id, lambda sweep: sweep["ended"] and not sweep["live"])
    assert [trial["parameters"]["lr"] for trial in over["trials"]] == [4, 2, 3, 1]
    assert [trial["number"] for trial in over["trials"]] == [0, 1, 2, 3]
    assert over["best"] == 3


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_program_with_a_bug_ends_the_sweep_after_its_first_trials(world: World) -> None:
    (world.folder / "broken").touch()
    (world.folder / "job.yaml").write_text(SCRIPT.replace("[4, 2, 3, 1]", str([*range(20)])))
    over = world.until(world.submit(), lambda sweep: sweep["ended"])
    assert over["ended"] in [
        f"its first {count} trials failed" for count in (FAILURES_MAX, FAILURES_MAX + 1)
    ]
    assert len(over["trials"]) <= FAILURES_MAX + 2, "at most two were live meanwhile"


def test_a_client_submits_no_trial_of_a_sweep_that_exists(world: World) -> None:
    (spec,) = read_jobs(world.folder / "job.yaml")
    forged = spec.model_dump(mode="json")
    forged["trial"] |= {"of": "sweep-tune-1", "number": 7}
    with (
        contextlib.closing(Client(world.home)) as client,
        pytest.raises(SpecError, match="by the service alone"),
    ):
        client.submit_jobs([forged])


@pytest.mark.long
@pytest.mark.timeout(300)
def test_a_trial_that_diverges_has_no_value_whatever_it_had_before(world: World) -> None:
    (world.folder / "train.py").write_text(TRAIN + "if rate < 3:\n    print('loss=nan')\n")
    over = world.until(world.submit(), lambda sweep: sweep["ended"] and not sweep["live"])
    assert [trial["value"] is None for trial in over["trials"]] == [False, True, False, True]
    assert over["best"] == 2


def test_a_search_that_fails_ends_its_sweep_and_no_other(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    (world.folder / "endless").touch()
    bad = world.submit()
    world.until(bad, lambda sweep: len(sweep["trials"]) == 2)
    good = world.submit()
    report = world.sweeper._advance_sweep

    def advance(sweep_id: str) -> None:
        if sweep_id == bad:
            raise ZeroDivisionError("a bug")
        report(sweep_id)

    monkeypatch.setattr(world.sweeper, "_advance_sweep", advance)
    over = world.until(bad, lambda sweep: sweep["ended"])
    assert over["ended"] == "its search failed: ZeroDivisionError: a bug"
    assert world.sweep(good)["ended"] == ""
    with contextlib.closing(Client(world.home)) as client:
        client.cancel_jobs([good], whole_arrays=False)


def make_sweep(**fields: Any) -> Sweep:
    parameters = {
        "lr": {"min": 1e-5, "max": 1e-2, "distribution": "log_uniform_values"},
        "width": {"min": 8, "max": 64},
        "act": {"values": ["relu", "gelu"]},
    }
    return Sweep.model_validate(
        {"method": "bayes", "parameters": parameters, "max_trials": 30, **fields}
    )


@pytest.mark.parametrize("method", ["random", "bayes"])
def test_a_study_that_is_made_anew_from_its_trials_asks_for_the_same_ones(method: str) -> None:
    def value(parameters: dict[str, Any]) -> float:
        return abs(float(parameters["lr"]) - 1e-3) + int(parameters["width"])

    whole, proposals = Study("s", make_sweep(method=method), 10), list[dict[str, Any]]()
    for number in range(15):
        proposals.append(whole.propose_or_register_trial())
        whole.record_end(number, value(proposals[-1]))
    for split in (1, 12):
        again = Study("s", make_sweep(method=method), 10)
        for number in range(split):
            again.propose_or_register_trial(proposals[number])
            again.record_end(number, value(proposals[number]))
        for number in range(split, 15):
            assert again.propose_or_register_trial() == proposals[number], (split, number)
            again.record_end(number, value(proposals[number]))
    for proposal in proposals:
        assert 1e-5 <= proposal["lr"] <= 1e-2
        assert type(proposal["width"]) is int
        assert proposal["act"] in ("relu", "gelu")


def test_bayes_comes_closer_than_chance() -> None:
    def best(method: str) -> float:
        study = Study("s", make_sweep(method=method, max_trials=60), None)
        losses = []
        for number in range(60):
            parameters = study.propose_or_register_trial()
            losses.append(
                (float(parameters["lr"]) - 4e-3) ** 2 * 1e4 + (int(parameters["width"]) - 40) ** 2
            )
            study.record_end(number, losses[-1])
        return sum(losses[30:])

    assert best("bayes") < best("random")


def test_no_trial_is_stopped_at_its_last_step() -> None:
    study = Study("s", make_sweep(early_terminate={"type": "median", "startup_trials": 1}), 10)
    stopped = []
    for number in range(3):
        study.propose_or_register_trial()
        stopped += [step for step in (9, 10) if study.report_value(number, step, float(number))]
        study.record_end(number, float(number))
    assert stopped == [9, 9]


def test_hyperband_stops_the_worse_and_never_all() -> None:
    early = {"type": "hyperband", "min_iter": 1, "eta": 3}
    study = Study("s", make_sweep(early_terminate=early), 27)
    whole = []
    for number in range(20):
        study.propose_or_register_trial()
        stopped = any(study.report_value(number, step, float(number % 7)) for step in range(1, 28))
        study.record_end(number, None if stopped else float(number % 7), was_stopped_early=stopped)
        whole += [] if stopped else [number % 7]
    assert 0 < len(whole) < 20
    assert min(whole) == 0


def test_values_that_are_no_numbers_are_failures_and_steps_between_are_not_compared() -> None:
    study = Study("s", make_sweep(early_terminate={"type": "median"}), 1000)
    study.propose_or_register_trial()
    assert not study.report_value(0, 1, 5.0)
    study.record_end(0, float("nan"))
    assert study_module.REPORTS == 100
