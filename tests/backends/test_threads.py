"""Laws of the service's threads: a loop that raises is entered again and named; nothing of a user runs too early."""

from __future__ import annotations

import threading
from pathlib import Path

import pytest

from orchestrator.backends import threads
from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.specs.events import Finished
from tests.backends.ray_jobs import CLUSTER, Alone, Reader, launch_of, script
from tests.local_cluster import LocalLaunchers, LocalNodes


def test_a_loop_that_raises_is_entered_again_and_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(threads, "AGAIN_FIRST_S", 0.001)
    monkeypatch.setattr(threads, "FAULTS", faults := threads.ThreadFaults())
    stop, rounds, over = threading.Event(), [], threading.Event()

    def run() -> None:
        rounds.append(1)
        if len(rounds) < 3:
            raise LookupError("planted")
        over.set()
        stop.wait()

    thread = threads.start_loop("sweeps", run, stop)
    assert over.wait(10.0)
    problem = faults.describe_faults()
    assert problem is not None
    assert "the thread sweeps of the service ended unexpectedly: LookupError: planted" in problem
    assert "started again (2 times)" in problem
    stop.set()
    thread.join(10.0)
    assert not thread.is_alive()
    monkeypatch.setattr(threads, "WELL_AFTER_S", 0.0)
    assert faults.describe_faults() is None, "it has run well for long"


def test_no_attempt_is_watched_before_the_service_answers(tmp_path: Path) -> None:
    serving = threading.Event()
    backend = ProcessBackend(
        tmp_path, CLUSTER, LocalNodes(CLUSTER), LocalLaunchers(), Alone(), serving=serving
    )
    reader, launch = Reader(backend), launch_of("early", script("exit:0"))
    try:
        backend.launch(launch)
        reader.poll(0.5)
        assert reader.find(launch, Finished) is None
        serving.set()
        reader.await_end(launch)
    finally:
        backend.close()
