"""Repeated kill -9 of the service under load: nothing is lost or started twice, and the order stays."""

from __future__ import annotations

import itertools
import os
import random
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.service.client.client import Client, read_service_file
from orchestrator.service.client.lifecycle import prepare_home
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import Finished, Submitted
from orchestrator.specs.job_record import JobStatus
from tests.scheduling.world import script
from tests.service.folder_world import runs

CLIENTS = 3
PAUSE_S = 0.02  # between two submissions of a client
PATIENCE_S = 120.0
SPEC = script("lm", gpus=1, env={"TOKEN": "x"}).model_dump(mode="json")


class Mortal:
    """A service that is killed and restarted, and clients that keep submitting."""

    def __init__(self, home: Path, forker: subprocess.Popen[str]) -> None:
        self.home, self._forker = home, forker
        self.answered: list[list[str]] = [[] for _ in range(CLIENTS)]  # ids, by client
        self._full = threading.Event()
        self.unanswered = 0  # submissions that were sent for half a minute without an answer

    def live(self, answers: int, more_s: float) -> None:
        """Serve until so many more submissions were answered and a moment longer, then get killed."""
        wanted, deadline_s = self._answers() + answers, time.monotonic() + PATIENCE_S
        pid = self._begin()
        while self._answers() < wanted:
            assert time.monotonic() < deadline_s, "nobody is answered"
            time.sleep(0.001)
        time.sleep(more_s)  # the moment to kill
        os.kill(pid, signal.SIGKILL)
        assert self._forker.stdout.readline() == "-9\n", "the service had ended by itself"

    def live_to_the_end(self, clients: list[threading.Thread]) -> None:
        """Serve until every client has its last answer, and every job has ended."""
        pid = self._begin()
        self._full.set()
        for waiter in clients:
            waiter.join(60)
            assert not waiter.is_alive(), "a submission is without an answer"
        client, deadline_s = Client(self.home), time.monotonic() + PATIENCE_S
        while any(job["status"] in ("queued", "running") for job in client.list_jobs(ended_max=0)):
            assert time.monotonic() < deadline_s, client.list_jobs(ended_max=0)
            time.sleep(0.1)
        os.kill(pid, signal.SIGKILL)
        self._forker.stdout.readline()

    def _answers(self) -> int:
        return sum(map(len, self.answered))

    def load(self) -> list[threading.Thread]:
        threads = [
            threading.Thread(target=self._submit, args=(ids,), daemon=True) for ids in self.answered
        ]
        for thread in threads:
            thread.start()
        return threads

    def _begin(self) -> int:
        (self.home / "service.json").unlink(missing_ok=True)
        self._forker.stdin.write(f"{self.home}\n")
        pid, deadline_s = int(self._forker.stdout.readline()), time.monotonic() + PATIENCE_S
        while not (self.home / "service.json").exists():
            assert time.monotonic() < deadline_s
            time.sleep(0.005)
        assert read_service_file(self.home)["pid"] == pid
        return pid

    def _submit(self, ids: list[str]) -> None:
        client: Client | None = None
        while not self._full.wait(PAUSE_S):
            try:
                client = client or Client(self.home)
                ids.append(
                    client.submit_job(SPEC)
                )  # sent again where it was killed before it answered
            except ServiceError as error:  # it is dead
                client = None
                self.unanswered += str(error).startswith("no service answered")


@pytest.fixture(scope="module")
def forker() -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "tests.service.mortal"],
        cwd=Path(__file__).parents[2],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        bufsize=1,
    ) as process:
        yield process
        process.stdin.close()


@pytest.mark.parametrize(
    "rounds", [5, pytest.param(200, marks=[pytest.mark.long, pytest.mark.timeout(1800)])]
)
def test_kills_under_load_lose_nothing_start_nothing_twice_and_keep_the_order(
    rounds: int, tmp_path: Path, forker: subprocess.Popen[str]
) -> None:
    home, draw = tmp_path.resolve(), random.Random(rounds)
    prepare_home(home)
    (home / "world").mkdir()
    mortal = Mortal(home, forker)
    clients = mortal.load()
    for _ in range(rounds):
        mortal.live(draw.choice((0, 1, 5, 20)), draw.uniform(0.0, 0.05))
    mortal.live_to_the_end(clients)

    with closing(Journal(f"sqlite:///{home}/journal.sqlite")) as journal:
        events = list(journal.iterate_events())
        ended = {job.id: job for job in journal.list_ended_jobs(1_000_000)}
    submitted = [event for event in events if isinstance(event, Submitted)]
    began = runs(home / "world")
    answered = [job_id for ids in mortal.answered for job_id in ids]

    assert len(answered) >= rounds, "too little was asked of it"
    assert [event.order for event in submitted] == list(range(1, len(submitted) + 1))
    assert set(answered) <= set(ended), "an answered submission was lost"
    assert set(ended) == {event.job_id for event in submitted}
    assert len(set(answered)) == len(answered), "two submissions were answered with one job"
    without_answer = set(ended) - set(answered)
    assert len(without_answer) <= mortal.unanswered, (
        "a submission that was sent again became two jobs"
    )
    assert {job.status for job in ended.values()} == {JobStatus.SUCCEEDED}
    order = {event.job_id: event.order for event in submitted}
    for ids in mortal.answered:
        assert [order[job_id] for job_id in ids] == sorted(order[job_id] for job_id in ids)

    assert len({run.name for run in began}) == len(began) == len(ended), "each job ran once"
    assert {len(job.attempts) for job in ended.values()} == {1}
    finished = [event.job_id for event in events if isinstance(event, Finished)]
    assert len(set(finished)) == len(ended)
    assert [run.order for run in began] == sorted(run.order for run in began), (
        "equal jobs start in their order"
    )
    by_device: dict[tuple[str, int], list[tuple[float, float]]] = {}
    for run in began:
        for device in run.devices:
            by_device.setdefault(device, []).append((run.began_s, run.ends_s))
    for device, spans in by_device.items():
        overlaps = [pair for pair in itertools.pairwise(spans) if pair[1][0] < pair[0][1]]
        assert not overlaps, f"two attempts on {device} at once"
