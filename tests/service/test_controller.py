"""The controller with the simulated world and the real journal: order, durability, threads, a failing backend."""

from __future__ import annotations

import cProfile
import logging
import statistics
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.server import controller as controller_module
from orchestrator.service.server import submissions
from orchestrator.service.server.controller import Controller
from orchestrator.specs.actions import Action, Launch, Stop
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind
from orchestrator.specs.errors import ServiceError, SpecError, UncertainError
from orchestrator.specs.events import Event, NodesSeen, RequestKey, Submitted
from orchestrator.specs.job_record import Job, JobStatus
from tests.scheduling.world import (
    CALM,
    CLUSTERS,
    MemoryJournal,
    MortalBackend,
    script,
    settled,
    too_large,
)


@pytest.fixture
def journal(tmp_path: Path) -> Iterator[Journal]:
    opened = Journal(f"sqlite:///{tmp_path}/journal.db")
    yield opened
    opened.close()


class Spy(MortalBackend):
    """The simulated backend; it records its calls with their threads, and can be made to fail."""

    def __init__(self) -> None:
        super().__init__(CLUSTERS[1], seed=1, hazards=CALM, repeat_chance=0.0)
        self.asked: list[str] = []
        self.threads: set[int] = set()
        self.refusals = 0

    def launch(self, action: Launch) -> None:
        self._ask(f"launch {action.attempt.name}")
        super().launch(action)

    def stop(self, action: Stop) -> None:
        self._ask(f"stop {action.name}")
        super().stop(action)

    def adopt(self, job: Job, attempt: Attempt) -> None:
        self.asked.append(f"adopt {attempt.name} {attempt.status}")
        super().adopt(job, attempt)

    def await_events(self, timeout_s: float) -> Sequence[Event]:
        self._ask("events")
        return super().await_events(timeout_s)

    def _ask(self, what: str) -> None:
        self.threads.add(threading.get_ident())
        if what != "events":
            self.asked.append(what)
        if self.refusals:
            self.refusals -= 1
            raise OSError("the cluster does not answer")


def turn_until(controller: Controller, done: Callable[[], bool], turns: int = 500) -> None:
    for _ in range(turns):
        if done():
            return
        controller.run_once(60.0)
    raise AssertionError(f"not after {turns} turns: {controller.state.jobs}")


def test_a_submission_is_in_the_journal_before_it_is_answered(journal: Journal) -> None:
    controller = Controller(journal, Spy(), lambda: 5.0)
    assert controller.submit(script("lm")) == "lm-1"
    assert controller.submit(script("lm")) == "lm-2"
    assert [
        (event.job_id, event.at_s)
        for event in journal.iterate_events()
        if isinstance(event, Submitted)
    ] == [
        ("lm-1", 5.0),
        ("lm-2", 5.0),
    ]


@pytest.mark.parametrize("again", ["at once", "after it ended", "after a restart"])
def test_a_submission_that_is_sent_again_under_its_key_is_the_same_jobs(
    again: str, tmp_path: Path
) -> None:
    url, key, backend = (
        f"sqlite:///{tmp_path}/journal.db",
        RequestKey(name="ada/k1", digest="d1"),
        Spy(),
    )
    jobs = [(script("lm"), None), (script("other"), None)]
    with closing(Journal(url)) as journal:
        controller = Controller(journal, backend, backend.current_time_s)
        assert controller.submit_all(jobs, key) == ["lm-1", "other-2"]
        if again == "after it ended":
            turn_until(controller, lambda: settled(controller.state))
        if again != "after a restart":
            assert controller.submit_all(jobs, key) == ["lm-1", "other-2"]
    with closing(Journal(url)) as journal:
        controller = Controller(journal, backend, backend.current_time_s)
        assert controller.submit_all(jobs, key) == ["lm-1", "other-2"]
        with pytest.raises(SpecError, match="another submission came under this key"):
            controller.submit(script("lm"), None, replace(key, digest="d2"))
        assert controller.submit_all(jobs[:1], replace(key, name="bob/k1")) == ["lm-3"]
        assert controller.submit_all(jobs[:1]) == ["lm-4"]


def test_a_submission_that_is_sent_twice_at_once_is_one_job() -> None:
    class Gate(MemoryJournal):
        gate, reached = threading.Event(), threading.Event()

        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            self.reached.set()
            assert self.gate.wait(60)
            super().append(decided)

    journal, key, answers = Gate(), RequestKey(name="ada/k1", digest="d1"), list[str]()
    controller = Controller(journal, Spy(), lambda: 1.0)
    first = threading.Thread(target=lambda: controller.submit(script("first")))
    first.start()
    assert journal.reached.wait(60)
    both = [
        threading.Thread(target=lambda: answers.append(controller.submit(script("lm"), None, key)))
        for _ in range(2)
    ]
    for thread in both:
        thread.start()
    while len(controller._submissions) < len(both):
        time.sleep(0.001)
    journal.gate.set()
    for thread in (first, *both):
        thread.join(60)
    assert answers == ["lm-2", "lm-2"]
    assert controller.state.submitted == 2


def test_a_service_that_does_not_know_whether_its_commit_was_kept_decides_no_more(
    tmp_path: Path,
) -> None:
    """A commit that came true without an answer: decisions without it would give its id a second time."""

    class Silent(Journal):
        is_silent = False

        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            super().append(decided)
            if self.is_silent:
                raise UncertainError("the server closed the connection")

    url, key, backend = (
        f"sqlite:///{tmp_path}/journal.db",
        RequestKey(name="ada/k1", digest="d1"),
        Spy(),
    )
    with closing(Silent(url)) as journal:
        controller = Controller(journal, backend, backend.current_time_s)
        controller.run_once(1.0)
        journal.is_silent = True
        with pytest.raises(UncertainError):
            controller.submit(script("lm"), None, key)
        journal.is_silent = False
        with pytest.raises(UncertainError):
            controller.submit(script("other"))
        with pytest.raises(UncertainError):
            controller.run(threading.Event())
        assert backend.asked == []
    with closing(Journal(url)) as journal:
        controller = Controller(journal, backend, backend.current_time_s)
        assert controller.submit(script("lm"), None, key) == "lm-1"
        turn_until(controller, lambda: settled(controller.state))
        assert [job.id for job in controller.list_ended_jobs(9)] == ["lm-1"]


def test_no_action_is_performed_that_is_not_in_the_journal() -> None:
    class FullDisk(MemoryJournal):
        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            if any(isinstance(event, Submitted) for event, _ in decided):
                raise ServiceError("no space left")

    backend = Spy()
    controller = Controller(FullDisk(), backend, backend.current_time_s)
    controller.run_once(1.0)
    before = controller.state
    with pytest.raises(ServiceError, match="no space left"):
        controller.submit(script("lm"))
    controller.run_once(1.0)
    assert controller.state is before
    assert backend.asked == []


def test_a_job_runs_to_its_end_and_every_step_of_it_is_recorded(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    job_id = controller.submit(script("lm"))
    turn_until(controller, lambda: settled(controller.state))
    assert controller.find_job(job_id).status is JobStatus.SUCCEEDED
    assert backend.asked == ["launch lm-1-1", "adopt lm-1-1 launching"]
    assert [record.job.status for _, record in journal.outbox.list_pending("mlflow", 100)] == [
        JobStatus.RUNNING,
        JobStatus.RUNNING,
        JobStatus.SUCCEEDED,
    ]


def test_a_job_that_never_started_costs_one_record(journal: Journal) -> None:
    controller = Controller(journal, Spy(), lambda: 5.0)
    controller.cancel_jobs([controller.submit(script("lm"))])
    assert [record.job.status for _, record in journal.outbox.list_pending("mlflow", 10)] == [
        JobStatus.CANCELLED
    ]


@pytest.mark.parametrize("many", [2_000, pytest.param(10_000, marks=pytest.mark.long)])
def test_a_submission_behind_thousands_of_jobs_costs_what_one_behind_a_hundred_costs(
    journal: Journal, many: int
) -> None:
    """Counted in calls. One device is idle, and no waiting job can start on it alone."""
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.run_once(0.0)
    wide = script("wide", gpus={"min": 2, "max": 2})
    controller.submit(script("holder", gpus={"min": 1, "max": 1}))
    controller.run_once(0.0)

    def calls() -> int:
        profile = cProfile.Profile()
        profile.runcall(controller.submit, wide)
        return sum(entry.callcount for entry in profile.getstats())

    def calls_behind(jobs: int) -> float:
        while len(controller.state.jobs) < jobs:
            controller.submit_all([(wide, None)] * 100)
        return statistics.median(calls() for _ in range(9))

    behind_a_hundred = calls_behind(100)
    assert controller.state.jobs["holder-1"].status is JobStatus.RUNNING
    assert calls_behind(many) <= 1.2 * behind_a_hundred


def test_a_job_that_cannot_fit_is_refused_and_never_launched(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.run_once(1.0)
    job_id = controller.submit(too_large("giant"))
    controller.run_once(1.0)
    assert controller.find_job(job_id).status is JobStatus.REFUSED
    assert backend.asked == []


def test_node_reports_without_a_change_are_not_stored() -> None:
    class Chatty(Spy):
        def await_events(self, timeout_s: float) -> Sequence[Event]:
            super().await_events(timeout_s)
            return (NodesSeen(nodes=self._live_nodes(), at_s=self.current_time_s()),)

    journal, backend = MemoryJournal(), Chatty()
    controller = Controller(journal, backend, backend.current_time_s)
    for _ in range(5):
        controller.run_once(1.0)
    assert len(journal.events) == 1


def test_cancelling_names_what_cannot_be_cancelled(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    with pytest.raises(ServiceError, match="no job 'lm-1'"):
        controller.cancel_jobs(["lm-1"])
    job_id = controller.submit(script("lm"))
    controller.cancel_jobs([job_id])
    assert controller.find_job(job_id).status is JobStatus.CANCELLED
    with pytest.raises(ServiceError, match="lm-1 has ended already: cancelled"):
        controller.cancel_jobs([job_id])


def test_a_cancelled_job_is_stopped_and_gives_its_devices_back(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    job_id = controller.submit(script("lm"))
    turn_until(controller, lambda: bool(backend.asked))
    controller.cancel_jobs([job_id])
    turn_until(controller, lambda: settled(controller.state))
    assert backend.asked[-1] == "stop lm-1-1"
    assert controller.find_job(job_id).status is JobStatus.CANCELLED


def test_a_new_service_adopts_every_attempt_that_holds_devices(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    stopped = controller.submit(script("lm", gpus=1, training={"max_steps": 10_000}))
    running = controller.submit(script("lm", gpus=1))
    turn_until(
        controller,
        lambda: (
            [job.attempts and job.attempts[0].status for job in controller.state.jobs.values()]
            == [AttemptStatus.RUNNING] * 2
        ),
    )
    controller.cancel_jobs([stopped])
    before = controller.state
    backend.close()
    backend.asked.clear()
    controller = Controller(journal, backend, backend.current_time_s)
    assert controller.state == before
    assert backend.asked == [
        f"adopt {stopped}-1 stopping",
        f"stop {stopped}-1",
        f"adopt {running}-1 running",
    ]
    turn_until(controller, lambda: settled(controller.state))
    assert [controller.find_job(job_id).status for job_id in (stopped, running)] == [
        JobStatus.CANCELLED,
        JobStatus.SUCCEEDED,
    ]
    assert list(backend.processes) == [f"{stopped}-1", f"{running}-1"]


def test_an_attempt_that_ended_but_still_holds_devices_is_adopted_too(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.submit(script("lm"))
    turn_until(controller, lambda: all(job.status.ended for job in controller.state.jobs.values()))
    assert not settled(controller.state)
    backend.close()
    backend.asked.clear()
    controller = Controller(journal, backend, backend.current_time_s)
    assert backend.asked == ["adopt lm-1-1 ended"]
    turn_until(controller, lambda: settled(controller.state))


def test_a_failed_launch_ends_the_attempt_and_counts_against_the_start_up_budget(
    journal: Journal, caplog: pytest.LogCaptureFixture
) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.run_once(1.0)
    job_id = controller.submit(script("lm"))
    backend.refusals = 1
    turn_until(controller, lambda: settled(controller.state))
    job = controller.find_job(job_id)
    assert job.status is JobStatus.SUCCEEDED
    refused, second = (attempt.failure for attempt in job.attempts)
    assert second is None
    assert refused is not None
    assert refused.kind is FailureKind.STARTUP
    assert "OSError: the cluster does not answer" in refused.reason
    assert "backend failed on attempt=" in caplog.text


def test_an_attempt_that_cannot_be_adopted_is_not_started_twice(journal: Journal) -> None:
    class Amnesiac(Spy):
        def adopt(self, job: Job, attempt: Attempt) -> None:
            self._ask("adopt")
            super().adopt(job, attempt)

    backend = Amnesiac()
    controller = Controller(journal, backend, backend.current_time_s)
    job_id = controller.submit(script("lm", training={"max_steps": 10_000}))
    turn_until(
        controller, lambda: any(process.started_at_s for process in backend.processes.values())
    )
    backend.close()
    backend.refusals = 1
    controller = Controller(journal, backend, backend.current_time_s)
    assert controller.find_job(job_id).status is JobStatus.QUEUED
    turn_until(controller, lambda: settled(controller.state))
    first, second = backend.processes.values()
    assert first.released_at_s is not None
    assert first.released_at_s <= second.launched_at_s
    assert controller.find_job(job_id).status is JobStatus.SUCCEEDED


def test_a_backend_that_fails_to_return_events_is_polled_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(controller_module, "DEAF_S", 0.0)
    backend = Spy()
    backend.refusals = 1
    controller = Controller(MemoryJournal(), backend, backend.current_time_s)
    controller.run_once(1.0)
    assert not controller.state.nodes
    controller.run_once(1.0)
    assert controller.state.nodes


def test_restoring_from_a_snapshot_and_its_tail_gives_the_same_state(
    journal: Journal, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(controller_module, "SNAPSHOT_EVENTS", 4)
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    for _ in range(3):
        controller.submit(script("lm"))
    turn_until(controller, lambda: settled(controller.state))
    snapshot, tail = journal.load_state_and_events()
    assert snapshot is not None
    assert len(tail) < 4
    assert Controller(journal, backend, backend.current_time_s).state == controller.state


def test_submissions_from_many_threads_lose_nothing_while_the_loop_runs(journal: Journal) -> None:
    backend, stop = Spy(), threading.Event()
    controller = Controller(journal, backend, backend.current_time_s)
    loop = threading.Thread(target=controller.run, args=(stop,))
    loop.start()
    try:
        answers: list[str] = []
        clients = [
            threading.Thread(
                target=lambda: answers.extend(
                    controller.submit(script("lm", gpus=1)) for _ in range(5)
                )
            )
            for _ in range(4)
        ]
        for client in clients:
            client.start()
        for client in clients:
            client.join()
        version, deadline = 0, time.monotonic() + 60
        while not settled(controller.state) and time.monotonic() < deadline:
            version = controller.wait_for_change(version, 1.0)
    finally:
        stop.set()
        loop.join(10)
    assert sorted(answers) == sorted(f"lm-{number}" for number in range(1, 21))
    assert [job.status for job in controller.list_ended_jobs(99)] == [JobStatus.SUCCEEDED] * 20
    assert backend.threads == {loop.ident}, "only the loop talks to the backend"


def test_a_submission_to_a_hanging_journal_fails_and_stores_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    class Stuck(MemoryJournal):
        reached, let_go = threading.Event(), threading.Event()

        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            self.reached.set()
            assert self.let_go.wait(60)
            super().append(decided)

    journal, backend, ids = Stuck(), Spy(), list[str]()
    controller = Controller(journal, backend, backend.current_time_s)
    first = threading.Thread(target=lambda: ids.append(controller.submit(script("first"))))
    first.start()
    assert journal.reached.wait(60)
    monkeypatch.setattr(submissions, "ANSWER_S", 0.01)
    with pytest.raises(ServiceError, match="nothing was submitted"):
        controller.submit(script("second"))
    journal.let_go.set()
    first.join(60)
    assert [*ids, controller.submit(script("third"))] == ["first-1", "third-2"]


def test_submissions_during_a_commit_share_the_next_transaction() -> None:
    class Gate(MemoryJournal):
        """Delays the first submission until it is released."""

        gate, reached, sizes = threading.Event(), threading.Event(), list[int]()

        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            self.sizes.append(len(decided))
            self.reached.set()
            assert self.gate.wait(60)
            super().append(decided)

    journal = Gate()
    controller = Controller(journal, Spy(), lambda: 1.0)
    answers: list[str] = []
    clients = [
        threading.Thread(target=lambda: answers.append(controller.submit(script("lm"))))
        for _ in range(9)
    ]
    clients[0].start()
    assert journal.reached.wait(60)
    for client in clients[1:]:
        client.start()
    while len(controller._submissions) < 8:
        time.sleep(0.001)
    assert answers == []
    journal.gate.set()
    for client in clients:
        client.join(60)
    assert journal.sizes == [1, 8]
    assert sorted(answers) == [f"lm-{number}" for number in range(1, 10)]


def test_a_group_that_cannot_be_stored_fails_for_all_its_submitters() -> None:
    class FullDisk(MemoryJournal):
        full = True

        def append(self, decided: Sequence[tuple[Event, Sequence[Action]]]) -> None:
            if self.full:
                raise ServiceError("no space left")
            super().append(decided)

    journal = FullDisk()
    controller = Controller(journal, Spy(), lambda: 1.0)
    with pytest.raises(ServiceError, match="no space left"):
        controller.submit_all([(script("lm"), None)] * 3)
    journal.full = False
    assert controller.submit_all([(script("lm"), None)] * 2) == ["lm-1", "lm-2"]
    assert controller.state.submitted == 2


def test_no_action_is_taken_before_the_commit_of_its_whole_group(journal: Journal) -> None:
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    for _ in range(4):
        controller.submit(script("lm", gpus=1))
    launches: list[tuple[int, int]] = []
    true_launch = backend.launch

    def launch(action: Launch) -> None:
        launches.append((action.job.order, len(list(journal.iterate_events()))))
        true_launch(action)

    backend.launch = launch  # type: ignore[method-assign]
    turn_until(controller, lambda: not controller.state.jobs)
    decisions = [decided or "" for _, decided in journal.iterate_history()]
    for order, count in launches:
        assert any(f"launch lm-{order}-1 " in decision for decision in decisions[:count]), (
            "launched before it was kept"
        )


def test_a_journal_with_decisions_that_this_version_would_not_make_is_refused(
    journal: Journal,
) -> None:
    """Otherwise attempts would run that no state has."""
    backend = Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.run_once(1.0)
    controller.submit(script("lm"))

    class Idle(Scheduler):
        def step(self, event: Event) -> tuple[Action, ...]:
            return tuple(action for action in super().step(event) if not isinstance(action, Launch))

    with pytest.raises(
        ServiceError, match=r"(?s)submitted job=lm-1.*launch lm-1-1 on local:0.*SIGTERM"
    ):
        Controller(journal, backend, backend.current_time_s, Idle)
    stop = threading.Event()
    stop.set()
    controller.run(stop)  # an orderly end
    assert list(Controller(journal, backend, backend.current_time_s, Idle).state.jobs) == ["lm-1"]


def test_followers_wait_exactly_until_the_next_change() -> None:
    backend = Spy()
    controller = Controller(MemoryJournal(), backend, backend.current_time_s)
    assert controller.wait_for_change(0, 0.0) == 0
    controller.submit(script("lm"))
    assert controller.wait_for_change(0, 60.0) == 1
    assert controller.wait_for_change(99, 60.0) == 1, (
        "a version of an earlier service is an old one"
    )


def test_the_log_says_each_event_and_action_once_and_no_secret(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO)
    journal, backend = MemoryJournal(), Spy()
    controller = Controller(journal, backend, backend.current_time_s)
    controller.submit(script("lm", env={"TOKEN": "hush"}))
    turn_until(controller, lambda: settled(controller.state))
    lines = [record.getMessage() for record in caplog.records]
    assert len([line for line in lines if line.startswith("event ")]) == len(journal.events)
    assert "action launch job=lm-1 attempt=1 on=local:0" in lines
    assert "event finished job=lm-1 attempt=1" in lines
    assert not any("hush" in line for line in lines)
