"""A process that owns a journal and launches one attempt, and waits at a border of its choice for a line on its input.

    python -m tests.backends.holder URL HOME LEASE_S place|start

Prints the border where it waits; then what came of it: "refused", "started" or "not started".
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Mapping, Sequence
from pathlib import Path

from orchestrator.backends.attempts.backend import ProcessBackend
from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launcher import LauncherStatus, RankStart
from orchestrator.backends.attempts.ports import LiveNode
from orchestrator.backends.journal import ownership
from orchestrator.backends.journal.journal import Journal
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.run import JobFolder
from tests.backends.ray_jobs import CLUSTER, launch_of, script
from tests.local_cluster import LocalGroup, LocalLaunchers, LocalNodes

LAUNCH = launch_of("once", script("exit:0"))


def say(what: str) -> None:
    print(what, flush=True)


def wait_at(border: str) -> None:
    if border == sys.argv[4]:
        say(border)
        sys.stdin.readline()


class WaitingGroup(LocalGroup):
    def start(
        self,
        ranks: Mapping[str, Sequence[RankStart]],
        counts: Mapping[str, int],
        workdir: str,
        fence: Fence | None,
    ) -> list[LauncherStatus]:
        wait_at("start")
        statuses = super().start(ranks, counts, workdir, fence)
        say("not started" if all(status["state"] == "idle" for status in statuses) else "started")
        return statuses


class WaitingLaunchers(LocalLaunchers):
    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> LocalGroup | str:
        wait_at("place")
        return super().create_launchers(attempt, folders, live)

    def find_launchers(self, attempt: Attempt) -> LocalGroup:
        return WaitingGroup(self._groups.get(attempt.name, {}))


class Telling(Journal):
    """Tells of the first time that it was not sure."""

    has_reported = False

    def confirm_ownership(self, *, may_wait: bool = True) -> None:
        try:
            super().confirm_ownership(may_wait=may_wait)
        except ServiceError:
            if not self.has_reported:
                say("refused")
            self.has_reported = True
            raise


def main() -> None:
    ownership.LEASE_S = float(sys.argv[3])
    backend = ProcessBackend(
        Path(sys.argv[2]), CLUSTER, LocalNodes(CLUSTER), WaitingLaunchers(), Telling(sys.argv[1])
    )
    backend.launch(LAUNCH)
    threading.Event().wait()


if __name__ == "__main__":
    main()
