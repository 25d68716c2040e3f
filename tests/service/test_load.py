"""Laws of a service that many use at once: who waits holds up nobody, and a log is followed by one request."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx
import pytest

from orchestrator.service.client.client import Client
from orchestrator.service.client.lifecycle import write_service_file
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.routes import waits
from orchestrator.service.terminal.follow import iterate_attempt_numbers_and_log
from orchestrator.specs.run import JobFolder
from tests.service.services import TOKEN
from tests.service.worlds import World, job_spec

HEADERS = {"Authorization": f"Bearer {TOKEN}"}
WAITING = 60  # more than the server has threads
ACK_S = 0.04  # that Linux delays an acknowledgement
BOUND_S = 60.0


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    (tmp_path / "token").write_text(TOKEN)
    world = World(tmp_path)
    yield world
    world.journal.close()


def test_no_answer_waits_for_the_acknowledgement_of_its_headers(world: World) -> None:
    took_s = []
    with (
        serve_http(world.app) as port,
        httpx.Client(base_url=f"http://127.0.0.1:{port}", headers=HEADERS) as client,
    ):
        for _ in range(40):
            began_s = time.perf_counter()
            client.get("/whoami")
            took_s.append(time.perf_counter() - began_s)
    assert sorted(took_s)[len(took_s) // 4] < ACK_S, "TCP_NODELAY is not set"


def test_clients_that_wait_for_a_job_or_a_log_hold_up_nobody(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    version = world.controller.version
    paths = [
        f"/jobs/{job_id}?seen={version}&wait_s=10",
        f"/jobs/{job_id}/attempts/1/logs/follow?wait_s=10",
    ]
    begun = threading.Semaphore(0)

    def wait(number: int) -> float:
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=BOUND_S
        ) as client:
            client.get("/whoami")
            begun.release()
            began_s = time.monotonic()
            assert client.get(paths[number % 2]).status_code == 200
            return time.monotonic() - began_s

    with serve_http(world.app) as port, ThreadPoolExecutor(WAITING) as pool:
        waited = [pool.submit(wait, number) for number in range(WAITING)]
        for _ in range(WAITING):
            assert begun.acquire(timeout=BOUND_S)
        with httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=BOUND_S
        ) as client:
            for _ in range(WAITING):
                client.get("/whoami")
        assert not [future for future in waited if future.done()], "somebody was waited for"
        world.turn_until("succeeded")
        took_s = [future.result(BOUND_S) for future in waited]
    assert max(took_s) < 10.0, "the end of the job woke nobody"


def test_a_followed_log_is_whole_and_in_order_and_ends_with_its_attempt(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    file = JobFolder(world.home, job_id).attempt(1).log(0)
    file.parent.mkdir(parents=True)
    read: list[str] = []
    with serve_http(world.app) as port:
        write_service_file(world.home, port)
        with closing(Client(world.home)) as client, file.open("w", buffering=1) as log:
            pieces = iterate_attempt_numbers_and_log(client, job_id, None, 0, until_end=True)
            for number in range(5):
                log.write(f"line {number}\n")
                read.append(next(pieces)[1])
            log.write("the last\n")
            world.turn_until("succeeded")
            read += [text for _, text in pieces]
    assert "".join(read) == "".join(f"line {number}\n" for number in range(5)) + "the last\n"


def test_a_change_of_the_state_wakes_who_waits_at_once(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(waits, "LOOK_S", 3600.0)  # it looks by itself once an hour
    job_id = world.submit()
    with serve_http(world.app) as port, ThreadPoolExecutor(1) as pool:
        url, version = f"http://127.0.0.1:{port}/jobs/{job_id}", world.controller.version
        waiting = pool.submit(
            httpx.get, f"{url}?seen={version}&wait_s=10", headers=HEADERS, timeout=BOUND_S
        )
        with pytest.raises(TimeoutError):
            waiting.result(0.5)
        world.submit()
        assert waiting.result(BOUND_S).json()["version"] == version + 1


@pytest.mark.long
@pytest.mark.timeout(900)
def test_twenty_thousand_jobs_are_taken_read_forecast_and_cancelled(world: World) -> None:
    count, batch = 20_000, 250
    spec = job_spec()
    ids: list[str] = []
    reads_s = []
    with (
        serve_http(world.app) as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}", headers=HEADERS, timeout=BOUND_S
        ) as client,
    ):
        while len(ids) < count:
            answer = client.post("/jobs/batch", json={"jobs": [{"spec": spec}] * batch})
            assert answer.status_code == 200, answer.text
            ids += answer.json()["ids"]
            began_s = time.perf_counter()
            assert client.get(f"/jobs/{ids[-1]}").json()["job"]["id"] == ids[-1]
            reads_s.append(time.perf_counter() - began_s)
        assert len(set(ids)) == count
        for path in ("/jobs", "/metrics", "/forecast"):
            assert client.get(path).status_code == 200, path
        cancelled: list[str] = []
        for first in range(0, count, 1000):
            request = {"jobs": ids[first : first + 1000], "whole_arrays": False}
            cancelled += client.post("/jobs/cancel", json=request).json()["cancelled"]
    assert sorted(cancelled) == sorted(ids)
    # The last reads are as fast as the first: no request walks the queue.
    early_s, late_s = sorted(reads_s[:40])[20], sorted(reads_s[-40:])[20]
    assert late_s <= 4 * early_s + 0.05
