"""A service that was stopped between a decision and its launch, for longer than its lease, starts nothing."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import closing
from pathlib import Path

import pytest

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.journal import ownership
from orchestrator.backends.journal.journal import Journal
from tests.backends.holder import LAUNCH
from tests.backends.postgres import Server
from tests.backends.ray_jobs import CLUSTER, Reader, folder_of
from tests.local_cluster import LocalLaunchers, LocalNodes

LEASE_S = 2.0


@pytest.mark.parametrize(
    ("border", "came_of_it"),
    [
        ("place", "refused"),  # it asks whether it is the owner before it starts what it has placed
        (
            "start",
            "not started",
        ),  # it has asked, and its call arrives late: the launcher sees a newer fence
    ],
)
def test_a_holder_that_was_stopped_before_a_launch_starts_nothing_that_the_next_one_started(
    border: str, came_of_it: str, postgres: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    url, home = postgres.new_database(), tmp_path / "home"
    home.mkdir()
    command = [sys.executable, "-m", "tests.backends.holder", url, str(home), str(LEASE_S), border]
    pipes = {"stdin": subprocess.PIPE, "stdout": subprocess.PIPE}
    with subprocess.Popen(
        command, cwd=Path(__file__).parents[2], text=True, bufsize=1, **pipes
    ) as old:
        try:
            assert old.stdout.readline() == f"{border}\n"
            os.kill(old.pid, signal.SIGSTOP)
            monkeypatch.setattr(ownership, "LEASE_S", LEASE_S)
            with closing(Journal(url)) as journal:  # once the lease of the old one has ended
                backend = ProcessBackend(
                    home, CLUSTER, LocalNodes(CLUSTER), LocalLaunchers(), journal
                )
                with closing(backend):
                    backend.adopt(LAUNCH.job, LAUNCH.attempt)
                    assert [
                        end.exit_code for end in Reader(backend).await_end(LAUNCH).evidence.ranks
                    ] == [0]
                    old.stdin.write("go on\n")
                    os.kill(old.pid, signal.SIGCONT)
                    assert old.stdout.readline() == f"{came_of_it}\n"
        finally:
            old.kill()
    assert len(folder_of(home, LAUNCH).log(0).read_text().splitlines()) == 1, "its ranks ran twice"


def test_a_fence_is_never_replaced_by_an_older_one(tmp_path: Path) -> None:
    old, new = (Fence(folder=str(tmp_path / "fence"), number=number) for number in (9, 10))
    old.store_number()
    assert not old.is_superseded
    new.store_number()
    old.store_number()  # it was stopped before it came to that
    assert (old.is_superseded, new.is_superseded) == (True, False)
