"""Laws of the tracker: MLflow has every record once, in the end, and nobody waited for it."""

from __future__ import annotations

import dataclasses
import importlib.metadata
import json
import os
import signal
import socket
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from pathlib import Path
from urllib.parse import parse_qs, unquote, urlsplit

import pytest

from orchestrator.backends import outbox_relay
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow import contact as mlflow_contact
from orchestrator.backends.mlflow import server as mlflow_server
from orchestrator.backends.mlflow.contact import EXPERIMENT
from orchestrator.backends.mlflow.content import (
    make_comparison_url,
    make_job_run_content,
    parse_curves_and_elapsed_ms,
    run_key,
)
from orchestrator.backends.mlflow.outcomes import read_outcomes
from orchestrator.backends.mlflow.server import ADDRESS, MlflowServer
from orchestrator.backends.mlflow.tracker import MlflowTracker, find_comparison_url, find_job_url
from orchestrator.backends.outbox_relay import OutboxRelay
from orchestrator.backends.ports import Lookups
from orchestrator.backends.redaction import make_hider
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.actions import Record
from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    ErrorReport,
    Evidence,
    Failure,
    FailureKind,
    Heartbeat,
    NodeDevices,
    RankEnd,
)
from orchestrator.specs.choices import Engine
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import NodesSeen, TimerFired
from orchestrator.specs.job.code_source import CodeSource
from orchestrator.specs.job.sections import Member
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes
from orchestrator.specs.run import JobFolder
from orchestrator.specs.settings import list_changed_settings
from orchestrator.specs.state import State
from tests.backends.relays import wait_delivered
from tests.scheduling.factories import decoder_spec, node
from tests.scheduling.test_step import finished, oom, released, run, submitted

SECRET, VARIABLE = 'hunter2-"the"-secret', "variable-value-4711"
SPEC = JobSpec(
    name="gpt",
    global_batch_size=8,
    command="python train.py",
    env={"API_URL": VARIABLE, "SMALL": "1"},
    secrets=("TRACKER_TEST_TOKEN",),
    knobs={
        "micro_batch_size": {"flag": "--batch"},
        "gradient_accumulation_steps": {"flag": "--accumulate"},
    },
)
DECODER = {
    "vocab_size": 64,
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
}
BIG = Plan(engine=Engine.SCRIPT, micro_batch_size=8)
SMALL = Plan(engine=Engine.SCRIPT, micro_batch_size=2, gradient_accumulation_steps=4)
START_S = 1_700_000_000.0


def attempt(job_id: str, number: int, plan: Plan = BIG, before: Plan | None = None) -> Attempt:
    return Attempt(
        job_id=job_id,
        number=number,
        plan=plan,
        placement=(NodeDevices(node="n0", devices=(0,)),),
        device="tiny",
        estimate=MemoryEstimate(
            moment="forward head",
            by_cause=(("parameters", 300), ("activations", 700)),
            allocated_bytes=1000,
            reserved_bytes=1100,
            device_bytes=1200,
            moments=(MomentBytes(name="forward head", counted_bytes=300, activation_bytes=700),),
        ),
        correction=1.25,
        step_s=0.5,
        change=list_changed_settings(before, plan) if before else (),
        change_reason="out of memory in forward" if before else "",
        launched_at_s=START_S + 100 * number,
    )


def end_attempt(running: Attempt, kind: FailureKind | None = None) -> Attempt:
    text = f"Traceback ... token={SECRET} url={VARIABLE}"
    beat = Heartbeat(
        rank=0, step=3, steps_done=3, step_s=0.25, peak_bytes=1600, phase="forward", at_s=START_S
    )
    beat = dataclasses.replace(
        beat, reserved_bytes=1800, torch_version="2.11.0", cuda_version="12.8"
    )
    return dataclasses.replace(
        running,
        status=AttemptStatus.ENDED,
        ended_at_s=running.launched_at_s + 50,
        failure=Failure(kind=kind, reason=f"ended by {text}", excerpt=text) if kind else None,
        evidence=Evidence(
            ranks=(RankEnd(rank=0, exit_code=77 if kind else 0, log_tail=text),),
            errors=(ErrorReport(rank=0, step=3, phase="forward", type="E", traceback=text),)
            if kind
            else (),
            heartbeats=(beat,),
        ),
    )


def new_job(
    job_id: str, *attempts: Attempt, status: JobStatus = JobStatus.RUNNING, reason: str = ""
) -> Job:
    return Job(
        id=job_id,
        spec=SPEC,
        order=0,
        submitted_at_s=START_S,
        status=status,
        reason=reason,
        attempts=attempts,
    )


def write_curves(home: Path, running: Attempt, first: int, last: int) -> None:
    path = JobFolder(home, running.job_id).attempt(running.number).metrics
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("a") as file:
        for step in range(first, last + 1):
            file.write(
                json.dumps({"step": step, "loss": 1 / step, "step_s": 0.25, "grad_norm": 1.0})
                + "\n"
            )


def eventually(law: Callable[[], object], timeout_s: float = 60.0) -> None:
    deadline_s = time.monotonic() + timeout_s
    while not law():
        assert time.monotonic() < deadline_s, "it did not come true in time"
        time.sleep(0.1)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MlflowServer]:
    running = MlflowServer(
        tmp_path_factory.mktemp("home") / ("long" * 30)
    )  # the address of a socket has 107 bytes
    began_s = time.monotonic()
    assert not running.ensure_running()
    assert time.monotonic() - began_s < 3, "starting waited for the server"
    try:
        eventually(running.ensure_running, 120)
        yield running
    finally:
        running.stop()
        assert not running.list_processes()


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    with closing(Journal(f"sqlite:///{tmp_path}/journal.db")) as opened:
        yield opened


@pytest.fixture(autouse=True)
def _environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRACKER_TEST_TOKEN", SECRET)
    names = (
        "HTTP_REQUEST_MAX_RETRIES",
        "HTTP_REQUEST_TIMEOUT",
        "DISABLE_TELEMETRY",
        "SUPPRESS_PRINTING_URL_TO_STDOUT",
    )
    for name in (f"MLFLOW_{name}" for name in names):
        monkeypatch.setenv(name, "1")  # the tracker sets them; this has them taken back
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:9")  # nobody is there
    monkeypatch.setenv("no_proxy", "elsewhere.example")
    monkeypatch.setattr(outbox_relay, "RETRY_MAX_S", 1.0)
    monkeypatch.setattr(outbox_relay, "REFRESH_S", 0.2)


@contextmanager
def tracking(
    journal: Journal,
    server: MlflowServer,
    state: Callable[[], State] = State,
    job: Callable[[str], Job | None] = lambda _: None,
    sweep: Callable[[str], SweepReport | None] = lambda _: None,
) -> Iterator[OutboxRelay]:
    lookups = Lookups(state=state, job=job, sweep=sweep)
    relay = OutboxRelay(
        "mlflow", MlflowTracker(server.tracking_uri, server.home, lookups, ADDRESS), journal.outbox
    )
    relay.start()
    try:
        yield relay
    finally:
        relay.stop()


def say(journal: Journal, job: Job) -> None:
    journal.append([(TimerFired(at_s=0), [Record(job=job, attempt=job.last)])])


def runs(server: MlflowServer, job_id: str) -> dict[str, object]:
    """Active runs of a job in MLflow by attempt number; fails where two have one number."""
    from mlflow import MlflowClient

    client = MlflowClient(server.tracking_uri)
    experiment = client.get_experiment_by_name(EXPERIMENT)
    matches = (
        client.search_runs([experiment.experiment_id], f"tags.`orc.job_id` = '{job_id}'")
        if experiment
        else []
    )
    numbers = [run.data.tags["orc.attempt"] for run in matches]
    assert len(set(numbers)) == len(numbers), f"a run was duplicated: {numbers}"
    return dict(zip(numbers, matches, strict=True))


def curve(server: MlflowServer, run_id: str, name: str) -> list[tuple[int, float]]:
    from mlflow import MlflowClient

    return [
        (point.step, point.value)
        for point in MlflowClient(server.tracking_uri).get_metric_history(run_id, name)
    ]


def artifact(server: MlflowServer, run_id: str, path: str, folder: Path) -> str:
    return artifact_path(server, run_id, path, folder).read_text()


def artifact_path(server: MlflowServer, run_id: str, path: str, folder: Path) -> Path:
    from mlflow import MlflowClient

    return Path(MlflowClient(server.tracking_uri).download_artifacts(run_id, path, str(folder)))


def test_a_job_becomes_a_run_with_one_comparable_child_per_attempt(
    server: MlflowServer, journal: Journal, tmp_path: Path
) -> None:
    first = attempt("gpt-1", 1)
    second = attempt("gpt-1", 2, SMALL, BIG)
    with tracking(journal, server) as tracker:
        say(journal, new_job("gpt-1"))
        write_curves(server.home, first, 1, 3)
        say(journal, new_job("gpt-1", dataclasses.replace(first, status=AttemptStatus.RUNNING)))
        assert wait_delivered(tracker, 60)
        live = runs(server, "gpt-1")["1"]
        assert live.info.status == "RUNNING"
    with tracking(journal, server) as tracker:  # another process, say, with nothing in its outbox
        write_curves(server.home, first, 4, 6)
        eventually(
            lambda: len(curve(server, live.info.run_id, "loss")) == 6
        )  # nobody said a word to the tracker

        failed = end_attempt(first, FailureKind.DEVICE_OOM)
        write_curves(server.home, second, 4, 9)
        say(journal, new_job("gpt-1", failed, second))
        reason = f"finished; {SECRET}"
        say(
            journal,
            new_job(
                "gpt-1", failed, end_attempt(second), status=JobStatus.SUCCEEDED, reason=reason
            ),
        )
        assert wait_delivered(tracker, 60)

    by_number = runs(server, "gpt-1")
    assert set(by_number) == {"0", "1", "2"}
    parent, oom, rerun = by_number["0"], by_number["1"], by_number["2"]
    assert [run.info.status for run in (parent, oom, rerun)] == ["FINISHED", "FAILED", "FINISHED"]
    assert {run.data.tags["mlflow.parentRunId"] for run in (oom, rerun)} == {parent.info.run_id}
    assert (find_job_url(server.home, ADDRESS, new_job("gpt-1").key, 1) or "").endswith(
        f"/runs/{parent.info.run_id}?workflowType=machine_learning"
    )
    assert find_job_url(server.home, ADDRESS, "gpt-1@none", 1) is None
    assert parent.data.metrics == {"attempts": 2.0, "total_s": 250.0}
    assert parent.data.params["global_batch_size"] == "8"
    assert parent.data.tags["status"] == "succeeded"
    assert "API_URL" in parent.data.tags["job_spec"]
    assert "micro_batch_size 8 -> 2" in parent.data.tags["mlflow.note.content"]
    assert rerun.data.params["micro_batch_size"] == "2"
    assert rerun.data.params["placement"] == "n0: 0"
    assert oom.data.tags["outcome"] == "device_oom"
    assert (
        "gradient_accumulation_steps 1 -> 4 (out of memory in forward)" in rerun.data.tags["change"]
    )
    assert rerun.data.metrics["predicted_peak_bytes"] == 300 + 1.25 * 700
    assert rerun.data.metrics["measured_peak_bytes"] == 1600
    assert rerun.data.metrics["predicted_over_measured"] == 1175 / 1600
    assert (
        rerun.data.metrics["predicted_reserved_bytes"],
        rerun.data.metrics["measured_reserved_bytes"],
    ) == (
        1293,
        1800,
    )
    assert (rerun.data.metrics["predicted_step_s"], rerun.data.metrics["measured_step_s"]) == (
        0.5,
        0.25,
    )
    assert curve(server, rerun.info.run_id, "loss") == [(step, 1 / step) for step in range(4, 10)]
    assert len(curve(server, oom.info.run_id, "grad_norm")) == 6

    estimate = json.loads(artifact(server, oom.info.run_id, "memory_estimate.json", tmp_path))
    assert estimate["bytes_by_cause"] == {"parameters": 300, "activations": 1.25 * 700}
    assert "token=[TRACKER_TEST_TOKEN] url=[API_URL]" in artifact(
        server, oom.info.run_id, "logs/rank0.txt", tmp_path
    )
    assert "Traceback" in artifact(server, oom.info.run_id, "tracebacks/rank0.txt", tmp_path)
    address = (
        parent.data.tags["mlflow.note.content"]
        .partition("[Compare the attempts](")[2]
        .partition(")")[0]
    )
    assert json.loads(
        parse_qs(urlsplit(unquote(address)).fragment.partition("?")[2])["runs"][0]
    ) == [
        oom.info.run_id,
        rerun.info.run_id,
    ]
    _assert_nowhere(server.home / "mlflow", SECRET, VARIABLE, json.dumps(SECRET)[1:-1])


def test_samples_of_the_nodes_are_curves_under_mlflows_names_and_sent_again_they_are_the_same(
    server: MlflowServer, journal: Journal
) -> None:
    sampled = attempt("sampled", 1)
    folder = JobFolder(server.home, "sampled").attempt(1)
    folder.path.mkdir(parents=True)
    for name, used in (("n0", 10.0), ("n1", 20.0)):
        lines = [
            {"at_s": START_S + 10 * n, f"system/{name}/gpu_0_memory_usage_megabytes": used + n}
            for n in range(3)
        ]
        folder.system(name).write_text(
            "".join(json.dumps(line) + "\n" for line in lines) + '{"at_s": 1, "sys'
        )
    for _ in range(2):  # a new process each time, which knows no offset
        with tracking(journal, server) as tracker:
            say(
                journal,
                new_job("sampled", dataclasses.replace(sampled, status=AttemptStatus.RUNNING)),
            )
            assert wait_delivered(tracker, 60)
    run_id = runs(server, "sampled")["1"].info.run_id  # type: ignore[attr-defined]
    curves = {
        name: curve(server, run_id, f"system/{name}/gpu_0_memory_usage_megabytes")
        for name in ("n0", "n1")
    }
    assert curves == {
        "n0": [(0, 10.0), (1, 11.0), (2, 12.0)],
        "n1": [(0, 20.0), (1, 21.0), (2, 22.0)],
    }


def test_the_data_that_a_job_names_are_inputs_of_its_runs_and_lead_to_the_files(
    server: MlflowServer, journal: Journal, tmp_path: Path
) -> None:
    from mlflow.data import get_source

    corpus = tmp_path / "corpus.txt"
    corpus.write_text("some words")
    data, missing = {"text": [str(corpus), "/nowhere/else.txt"]}, "/nowhere/else.txt"
    spec = JobSpec.model_validate(
        {"name": "lm", "global_batch_size": 8, "model": {"decoder": DECODER}, "data": data}
    )
    job = dataclasses.replace(new_job("lm-data", attempt("lm-data", 1)), spec=spec)

    def inputs() -> dict[str, list[tuple[str, str, str]]]:
        return {
            number: sorted(
                (
                    str(get_source(entry.dataset).to_dict()["uri"]),
                    entry.tags[0].value,
                    entry.dataset.digest,
                )
                for entry in run.inputs.dataset_inputs  # type: ignore[attr-defined]
            )
            for number, run in runs(server, "lm-data").items()
        }

    say(journal, job)
    with tracking(journal, server) as relay:
        assert wait_delivered(relay, 60), relay.problem
    first = inputs()
    for number in ("0", "1"):
        assert [(uri, context) for uri, context, _ in first[number]] == sorted(
            [(missing, "training"), (str(corpus), "training")]
        )
    say(journal, job)
    with tracking(journal, server) as relay:  # a new service, which knows no run yet
        assert wait_delivered(relay, 60), relay.problem
    assert inputs() == first, "sent again, they were doubled"


def test_an_outcome_and_the_picture_of_its_frontier_can_be_had_from_mlflow(
    server: MlflowServer, journal: Journal, tmp_path: Path
) -> None:
    spec = decoder_spec(retries={"oom": 0})
    state, _ = run(
        NodesSeen(nodes=(node(),), at_s=0.0), submitted(spec), finished(oom()), released()
    )
    with tracking(journal, server, lambda: state) as tracker:
        say(journal, state.jobs["lm-1"])
        assert wait_delivered(tracker, 60)
    by_number = runs(server, "lm-1")
    picture = artifact_path(
        server, by_number["0"].info.run_id, "frontier.png", tmp_path
    ).read_bytes()
    assert picture.startswith(b"\x89PNG")
    assert "learned: activations of lm" in artifact(
        server, by_number["1"].info.run_id, "explanation.txt", tmp_path
    )
    assert state.observations
    assert read_outcomes(server.tracking_uri) == state.observations
    (tmp_path / "unused.db").touch()
    with pytest.raises(SpecError, match="no home has recorded there"):
        read_outcomes(f"sqlite:///{tmp_path}/unused.db")


def test_outcomes_are_sought_where_an_mlflow_is_and_nothing_is_made_where_none_is(
    tmp_path: Path,
) -> None:
    for nowhere in (
        "",
        "nonsense",
        f"file://{tmp_path}",
        f"sqlite:///{tmp_path}/none/mlflow.db",
        "postgresql://a:b@c/d",
    ):
        with pytest.raises(SpecError, match="no MLflow is there"):
            read_outcomes(nowhere)
    assert list(tmp_path.iterdir()) == []


def _assert_nowhere(folder: Path, *secrets: str) -> None:
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len(files) > 3
    for path in files:
        data = path.read_bytes()
        assert not [word for word in secrets if word.encode() in data], f"a secret is in {path}"


def test_kill_9_of_the_server_and_a_new_tracker_lose_and_repeat_nothing(
    server: MlflowServer, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [f"night-{number}" for number in range(6)]
    running = {
        job_id: dataclasses.replace(attempt(job_id, 1), status=AttemptStatus.RUNNING)
        for job_id in jobs
    }
    for job_id in jobs:
        write_curves(server.home, running[job_id], 1, 20)
    with tracking(journal, server) as tracker:
        for job_id in jobs[:3]:
            say(journal, new_job(job_id, running[job_id]))
        eventually(
            lambda: all(number > 1 for number, _ in journal.outbox.list_pending("mlflow", 1))
        )
        before = server.list_processes()
        for process in before:
            os.kill(process, signal.SIGKILL)  # in the middle of the third job, or wherever it is
        for job_id in jobs:
            said_at_s = time.monotonic()
            say(journal, new_job(job_id, running[job_id]))
            say(
                journal,
                new_job(
                    job_id,
                    end_attempt(running[job_id]),
                    status=JobStatus.SUCCEEDED,
                    reason="finished",
                ),
            )
            assert time.monotonic() - said_at_s < 1, "a dead server delayed the journal"
        eventually(lambda: tracker.problem is not None)
    waiting = journal.outbox.list_pending("mlflow", 1000)
    assert len(waiting) >= 2 * len(jobs), "rows were forgotten that no server took"

    eventually(server.ensure_running, 120)
    assert not set(before) & set(server.list_processes())
    with monkeypatch.context() as patch, tracking(journal, server):
        patch.setattr(
            journal.outbox, "mark_delivered", lambda *_: None
        )  # a tracker that dies before it forgets its rows
        eventually(lambda: all("1" in runs(server, job_id) for job_id in jobs))
    with tracking(journal, server) as tracker:
        assert wait_delivered(tracker, 60)
    for job_id in jobs:
        by_number = runs(server, job_id)
        assert [by_number[number].info.status for number in ("0", "1")] == ["FINISHED", "FINISHED"]
        assert curve(server, by_number["1"].info.run_id, "loss") == [
            (step, 1 / step) for step in range(1, 21)
        ]


def test_a_creation_that_came_true_after_its_timeout_leaves_no_second_run(
    server: MlflowServer, journal: Journal
) -> None:
    from mlflow import MlflowClient

    started = attempt("twice", 1)
    with tracking(journal, server) as tracker:
        say(journal, new_job("twice", started))
        assert wait_delivered(tracker, 60)
        client = MlflowClient(server.tracking_uri)
        experiment = client.get_experiment_by_name(EXPERIMENT).experiment_id
        tags = {"orc.run": run_key(new_job("twice"), 1), "orc.job_id": "twice", "orc.attempt": "1"}
        client.create_run(experiment, tags=tags)
        say(journal, new_job("twice", end_attempt(started), status=JobStatus.SUCCEEDED))
        assert wait_delivered(tracker, 60)
    assert runs(server, "twice")["1"].info.status == "FINISHED"


@pytest.mark.parametrize("its_job_ends", [True, False])
def test_a_service_that_was_frozen_amid_a_creation_leaves_no_second_run(
    its_job_ends: bool, server: MlflowServer
) -> None:
    """Another one took over, and recorded the same attempt, between its look at MLflow and its creation."""
    from mlflow.exceptions import MlflowException

    lookups = Lookups(state=State, job=lambda _: None, sweep=lambda _: None)
    old, new = (MlflowTracker(server.tracking_uri, server.home, lookups) for _ in range(2))
    name = f"frozen-{its_job_ends}".lower()
    started = attempt(name, 1)
    first = new_job(name)
    later = (
        new_job(name, end_attempt(started), status=JobStatus.SUCCEEDED)
        if its_job_ends
        else new_job(name, started)
    )
    old.send([(1, Record(job=first))])
    create = old._contact.client.create_run

    def creates_late(*arguments: object, **named: object) -> object:
        new.send([(2, Record(job=later, attempt=later.last))])
        return create(*arguments, **named)

    old._contact.client.create_run = creates_late
    old.send([(2, Record(job=new_job(name, started), attempt=started))])
    by_number = runs(server, name)
    assert set(by_number) == {"0", "1"}
    assert (by_number["1"].info.end_time is not None) == its_job_ends, (
        "a record that was whole was given up"
    )
    for tracker in (old, new):  # the one whose run was replaced finds the other
        for _ in range(2):
            with suppress(OSError, MlflowException):  # the relay sends again
                tracker.send(
                    [
                        (
                            3,
                            Record(
                                job=new_job(name, end_attempt(started), status=JobStatus.SUCCEEDED)
                            ),
                        )
                    ]
                )
    assert runs(server, name)["1"].info.run_id == by_number["1"].info.run_id
    assert runs(server, name)["1"].info.status == "FINISHED"


def test_a_record_that_mlflow_refuses_holds_nobody_up(
    server: MlflowServer, journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(outbox_relay, "RETRY_FIRST_S", 0.05)
    with tracking(journal, server) as tracker:
        say(journal, new_job("refused", attempt("refused", 1)))
        assert wait_delivered(tracker, 60)
        say(
            journal, new_job("refused", attempt("refused", 1, SMALL))
        )  # another plan under the same number
        say(journal, new_job("after"))
        assert wait_delivered(tracker, 60)
        assert set(runs(server, "after")) == {"0"}


def test_a_new_service_finds_the_server_of_the_old_one(server: MlflowServer) -> None:
    again = MlflowServer(server.home)
    assert again.tracking_uri == server.tracking_uri
    before = server.list_processes()
    assert again.ensure_running()
    assert again.list_processes() == before


def test_a_server_that_hangs_is_given_time_and_then_replaced(
    server: MlflowServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = set(server.list_processes())
    for process in before:
        os.kill(process, signal.SIGSTOP)
    assert not server.ensure_running()
    assert set(server.list_processes()) == before
    with monkeypatch.context() as patch:
        patch.setattr(mlflow_server, "HUNG_S", 0.0)
        assert not server.ensure_running()
    eventually(server.ensure_running, 120)
    assert not before & set(server.list_processes())


@pytest.mark.parametrize("kind", ["refuses", "never answers"])
def test_a_dead_server_blocks_neither_start_nor_append_nor_stop(
    journal: Journal, tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_contact, "REQUEST_TIMEOUT_S", 1)
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        if kind == "never answers":
            listener.listen()
        lookups = Lookups(state=State, job=lambda _: None, sweep=lambda _: None)
        nobody = MlflowTracker(f"http://127.0.0.1:{listener.getsockname()[1]}", tmp_path, lookups)
        tracker = OutboxRelay("mlflow", nobody, journal.outbox)
        began_s = time.monotonic()
        tracker.start()
        say(journal, new_job("waits"))
        tracker.wake()
        assert time.monotonic() - began_s < 0.5
        eventually(lambda: tracker.problem is not None)
        assert not wait_delivered(tracker, 0.1)
        stopped_s = time.monotonic()
        tracker.stop()
        assert time.monotonic() - stopped_s < 3
    assert [record.job.id for _, record in journal.outbox.list_pending("mlflow", 9)] == ["waits"]


def test_curves_read_in_pieces_are_the_curves_read_at_once() -> None:
    lines = [
        json.dumps({"step": n, "loss": float("nan") if n == 2 else n, "step_s": 0.5}) + "\n"
        for n in range(1, 5)
    ]
    whole, total_ms = parse_curves_and_elapsed_ms("".join(lines), 0.0)
    head, middle_ms = parse_curves_and_elapsed_ms("".join(lines[:2]), 0.0)
    tail, end_ms = parse_curves_and_elapsed_ms("".join(lines[2:]), middle_ms)
    assert repr(head + tail) == repr(whole)
    assert end_ms == total_ms == 2000
    assert [(ms, step) for name, _, ms, step in whole if name == "loss"] == [
        (500, 1),
        (1000, 2),
        (1500, 3),
        (2000, 4),
    ]


@pytest.mark.parametrize(
    "bad",
    [
        '{"step": 1, "lo',
        "[1]",
        '{"loss": 1}',
        '{"step": true, "loss": 1}',
        '{"step": 1, "a\\nb": 1}',
        '{"step": 1, "x": "y"}',
    ],
)
def test_lines_that_say_no_number_of_a_step_are_passed_over(bad: str) -> None:
    points, elapsed_ms = parse_curves_and_elapsed_ms(
        f'{bad}\n{{"step": 7, "loss": 2, "step_s": Infinity}}\n', 0.0
    )
    assert points[0] == ("loss", 2.0, 0, 7)
    assert elapsed_ms == 0


def test_texts_hide_secrets_and_variables_and_keep_their_names() -> None:
    hide = make_hider(SPEC, {"TRACKER_TEST_TOKEN": SECRET})
    assert hide(f"a {SECRET} b {VARIABLE} c 1") == "a [TRACKER_TEST_TOKEN] b [API_URL] c 1"
    leaky = dataclasses.replace(
        new_job("leaky", reason=SECRET), spec=SPEC.model_copy(update={"command": ("x", SECRET)})
    )
    tags = make_job_run_content(leaky, hide, "").tags
    assert not [value for value in tags.values() if "hunter2" in value]
    assert "API_URL" in tags["job_spec"]


def test_runs_say_whose_code_ran_by_the_tags_of_mlflows_own_context_providers() -> None:
    from mlflow.utils import mlflow_tags

    hide = make_hider(SPEC, {})
    source = CodeSource(
        commit="a" * 40, branch="main", repo_url="https://example.org/project", dirty=True
    )
    spec = SPEC.model_copy(update={"source": source, "user": "ada"})
    tags = make_job_run_content(dataclasses.replace(new_job("sourced"), spec=spec), hide, "").tags
    assert {
        name: tags[name] for name in tags if name.startswith(("mlflow.source", "mlflow.user"))
    } == {
        mlflow_tags.MLFLOW_SOURCE_TYPE: "LOCAL",
        mlflow_tags.MLFLOW_SOURCE_NAME: "train.py",
        mlflow_tags.MLFLOW_USER: "ada",
        mlflow_tags.MLFLOW_GIT_COMMIT: "a" * 40,
        mlflow_tags.MLFLOW_GIT_DIRTY: "true",
        mlflow_tags.MLFLOW_GIT_BRANCH: "main",
        mlflow_tags.MLFLOW_GIT_REPO_URL: "https://example.org/project",
    }
    unknown = make_job_run_content(new_job("unknown"), hide, "").tags
    assert not [name for name in unknown if "git" in name or name == "mlflow.user"]


def test_the_compare_link_is_what_the_page_reads() -> None:
    url = make_comparison_url("http://127.0.0.1:5000/", ("a", "b"), "3")
    assert url.startswith("http://127.0.0.1:5000/#/compare-runs?runs=%5B%22a%22")
    assert unquote(url).endswith('?runs=["a", "b"]&experiments=["3"]&workflowType=machine_learning')


def test_the_strategies_of_a_comparison_are_children_of_one_run_that_ends_with_the_verdict(
    server: MlflowServer, journal: Journal, tmp_path: Path
) -> None:
    from mlflow import MlflowClient

    def strategy(number: int, *attempts: Attempt, **changes: object) -> Job:
        member = Member(number=number, of=3, max_concurrent=1, compared=True, repeats=3)
        spec = SPEC.model_copy(update={"name": "three", "member": member})
        trial = new_job(f"three-{number + 1}", *attempts)
        newest[trial.id] = dataclasses.replace(
            trial, spec=spec, array="three-1", order=number + 1, **changes
        )
        return newest[trial.id]

    newest: dict[str, Job] = {}

    first, two = attempt("three-1", 1), attempt("three-2", 1, SMALL)
    write_curves(server.home, first, 1, 3)
    with tracking(journal, server, job=newest.get) as tracker:
        say(journal, strategy(0, dataclasses.replace(first, status=AttemptStatus.RUNNING)))
        say(journal, strategy(0, end_attempt(first), status=JobStatus.SUCCEEDED))
        say(
            journal,
            strategy(
                1, end_attempt(two, FailureKind.DEVICE_OOM), status=JobStatus.FAILED, reason=SECRET
            ),
        )
        assert wait_delivered(tracker, 60)
        client = MlflowClient(server.tracking_uri)
        experiment = client.get_experiment_by_name(EXPERIMENT)
        assert experiment is not None
        trials = client.search_runs([experiment.experiment_id], "tags.`orc.comparison` != ''")
        (parent_id,) = {run.data.tags["mlflow.parentRunId"] for run in trials}
        assert client.get_run(parent_id).info.status == "RUNNING"
        key = trials[0].data.tags["orc.comparison"]
        assert find_comparison_url(server.home, ADDRESS, key, 3) is None, "a strategy is missing"
    with tracking(
        journal, server, job=newest.get
    ) as tracker:  # a new service, which was told of none of them
        say(journal, strategy(2, status=JobStatus.REFUSED, reason=f"no plan fits {SECRET}"))
        assert wait_delivered(tracker, 60)
    trials = client.search_runs([experiment.experiment_id], f"tags.`orc.comparison` = '{key}'")
    assert sorted((str(run.info.run_name), run.info.status) for run in trials) == [
        ("plain on 1, repeat 1", "FINISHED"),
        ("plain on 1, repeat 2", "FAILED"),
        ("three-3", "FAILED"),
    ]
    (tags,) = (run.data.tags for run in trials if run.info.status == "FINISHED")
    assert [tags.get(name) for name in ("torch_version", "cuda_version", "driver_version")] == [
        "2.11.0",
        "12.8",
        None,
    ]
    assert tags["orc_version"] == importlib.metadata.version("orchestrator")
    assert {json.loads(run.data.tags["job_spec"])["member"]["of"] for run in trials} == {3}
    assert {run.data.params["family"] for run in trials} == {"three"}
    parent = client.get_run(parent_id)
    assert (parent.info.status, parent.info.run_name) == ("FINISHED", "three-1")
    assert "mlflow.parentRunId" not in parent.data.tags
    note = parent.data.tags["mlflow.note.content"]
    assert note.startswith(
        "**Only plain on 1 (micro 8x1) finished. plain on 1 (micro 2x4) ran out of memory"
    )
    assert str(find_comparison_url(server.home, ADDRESS, key, 3)) in note
    rows = json.loads(artifact(server, parent_id, "comparison.json", tmp_path))
    assert [row["outcome"] for row in rows] == ["finished", "out of memory", "no such plan"]
    assert [row["loss"] is None for row in rows] == [False, True, True]
    _assert_nowhere(server.home / "mlflow", SECRET, VARIABLE, json.dumps(SECRET)[1:-1])


NEVER_RAN, RUNNING = 5000, 50


@pytest.mark.long
@pytest.mark.timeout(900)
def test_records_of_running_jobs_are_in_time_beside_thousands_of_jobs_that_never_ran(
    server: MlflowServer, journal: Journal
) -> None:
    """A running job's record is at most 5 s late, and the backlog is gone within 5 minutes."""
    late_s = []
    waiting = [
        new_job(f"cancelled-{number}", status=JobStatus.CANCELLED) for number in range(NEVER_RAN)
    ]
    state = State(nodes=(node("n0", 2),))
    with tracking(journal, server, lambda: state) as relay:
        say(journal, new_job("first", attempt("first", 1)))
        assert wait_delivered(relay, 120), "connected: what is imported for it is no record's delay"
        journal.append([(TimerFired(at_s=0), [Record(job=job) for job in waiting])])
        began_s = time.monotonic()
        for number in range(RUNNING):
            name = f"running-{number}"
            submitted_s = time.monotonic()
            say(journal, new_job(name, attempt(name, 1)))
            relay.wake()
            eventually(lambda name=name: "1" in runs(server, name))  # type: ignore[misc]
            late_s.append(time.monotonic() - submitted_s)
        assert wait_delivered(relay, 600)
        took_s = time.monotonic() - began_s
    print(
        f"late: {sorted(late_s)[RUNNING // 2]:.2f} s median, {max(late_s):.2f} s at most; all after {took_s:.0f} s"
    )
    assert max(late_s) <= 5.0
    assert took_s <= 300.0
