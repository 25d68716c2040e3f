"""Laws of a journal that another process locks: readers notice nothing, and a change is refused soon."""

from __future__ import annotations

import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import pytest

from orchestrator.service.server.daemon import serve_http
from orchestrator.specs.access import Role
from tests.service.services import TOKEN
from tests.service.worlds import World, job_spec

# a read that waits for the lock takes 5 s and more; beside other tests an answer takes longer
READ_S_MAX, CHANGE_S_MAX = 2.5, 5.0
PATHS = (
    "/jobs",
    "/forecast",
    "/cluster",
    "/audit",
    "/users",
    "/tokens",
    "/sweeps",
    "/metrics",
    "/teams",
)
LOCK = """\
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1], isolation_level=None)
connection.execute("BEGIN EXCLUSIVE")
print("locked", flush=True)
sys.stdin.read()
"""


@contextmanager
def locked(journal: Path) -> Iterator[None]:
    """Hold the lock of a journal in another process."""
    command = [sys.executable, "-c", LOCK, str(journal)]
    with subprocess.Popen(
        command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "locked\n"
        try:
            yield
        finally:
            process.communicate("", timeout=10)


def timed(ask: Callable[[], httpx.Response]) -> tuple[int, float]:
    begun_s = time.monotonic()
    return ask().status_code, time.monotonic() - begun_s


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


@pytest.fixture
def stack() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


def test_a_lock_of_another_process_costs_no_reader_and_refuses_changes_soon(
    world: World, stack: ExitStack
) -> None:
    """Eight clients change something at once, and the controller's own loop runs."""
    world.by(Role.MEMBER)
    member = world.accounts.create_token("ada", None)[0]
    stop = threading.Event()
    loop = threading.Thread(target=world.controller.run, args=(stop,), daemon=True)
    loop.start()
    stack.callback(loop.join, 30)
    stack.callback(stop.set)

    def submit() -> httpx.Response:
        return client.post("/jobs", json={"spec": job_spec()})

    with (
        serve_http(world.app) as port,
        httpx.Client(
            base_url=f"http://127.0.0.1:{port}",
            headers={"Authorization": f"Bearer {TOKEN}"},
            timeout=30.0,
            limits=httpx.Limits(max_connections=None),
        ) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        assert submit().status_code == 200
        before = client.get("/jobs").json()["jobs"]
        with locked(world.home / "journal.sqlite"):
            changes = [pool.submit(timed, submit) for _ in range(24)]
            for path in PATHS * 3:
                status, took_s = timed(lambda path=path: client.get(path))  # type: ignore[misc]
                assert (status, took_s < READ_S_MAX) == (200, True), (path, status, took_s)
            # the last use of its token cannot be written
            reader = {"Authorization": f"Bearer {member}"}
            status, took_s = timed(lambda: client.get("/jobs", headers=reader))
            assert (status, took_s < READ_S_MAX) == (200, True), (status, took_s)
            for change in changes:
                status, took_s = change.result()
                assert (status, took_s < CHANGE_S_MAX) == (503, True), (status, took_s)
        assert len(client.get("/jobs").json()["jobs"]) == len(before)
        assert submit().status_code == 200
