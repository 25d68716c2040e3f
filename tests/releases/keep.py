"""Build a version's wheel, and keep its journal among the tests: `python -m tests.releases.keep`, once per version.

The journal is of a simulated day: jobs that ended in every way, that run, wait and come again, with users, records and
notices. `journal.sql` is its text, `expected.json` what the version itself reads of it.
"""

from __future__ import annotations

import json
import sqlite3
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import closing
from importlib.metadata import version
from pathlib import Path
from typing import Any

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.journal.journal import Journal
from orchestrator.service.server.controller import Controller
from orchestrator.specs.access import Role
from orchestrator.specs.events import RequestKey
from orchestrator.specs.job.spec import JobSpec
from tests.scheduling.faulty_world import FaultyBackend
from tests.scheduling.world import CLUSTERS, STORM, decoder, script, too_large

ROOT = Path(__file__).parents[2]
CLUSTER = CLUSTERS[2]
TURNS, TURN_S = 400, 30.0
RECORDS_LEFT = 3
LIVE_MIN = 3  # jobs that wait or run in what is kept


def main() -> None:
    """Write the wheel to build/, and the journal to tests/releases/VERSION/."""
    folder = Path(__file__).with_name(version("orchestrator"))
    if folder.exists():
        sys.exit(f"{folder.name} is kept already: a later version adds its own")
    command = [
        sys.executable,
        "-m",
        "pip",
        "wheel",
        "--no-deps",
        "--no-build-isolation",
        "--wheel-dir",
        "build",
        ".",
    ]
    subprocess.run(command, cwd=ROOT, check=True)
    folder.mkdir()
    with tempfile.TemporaryDirectory() as temporary:
        path = Path(temporary) / "journal.sqlite"
        expected = write_journal(path)
        with closing(sqlite3.connect(path)) as journal:
            (folder / "journal.sql").write_text("\n".join(journal.iterdump()) + "\n")
    (folder / "expected.json").write_text(json.dumps(expected, indent=1, sort_keys=True) + "\n")


def jobs() -> Iterator[JobSpec]:
    """Yield jobs of every kind, as a day brings them."""
    for number in range(4):
        yield script(f"script{number}", gpus=1 + number % 2)
    yield decoder("decoder")
    yield too_large("giant")
    yield script("later", start_window="22:00-06:00 UTC", env={"A": "b"}, user="ada", priority=10)
    yield script("due", deadline="08:00 UTC", steps=100, speeds={"1": "2s", "2": "1.5s"})


def write_journal(path: Path) -> dict[str, Any]:
    """Play a day into a new journal; return what can be read of it."""
    with closing(Journal(f"sqlite:///{path}")) as journal:
        journal.outbox.register_receivers(["mlflow", "jsonl"])
        journal.notices.register_receivers(["mail"])
        backend = FaultyBackend(CLUSTER, seed=3, hazards=STORM, repeat_chance=0.3)
        controller = Controller(journal, backend, backend.current_time_s)
        accounts = Accounts(journal.database.transaction, backend.current_time_s)
        accounts.set_user("ada", Role.MEMBER)
        accounts.create_token("ada", None)
        controller.run_once(0.0)
        for number, spec in enumerate(jobs()):
            controller.submit(
                spec, idempotency_key=RequestKey(name=f"ada/{number}", digest="0" * 64)
            )
            for _ in range(3):
                controller.run_once(TURN_S)
        for _ in range(TURNS):
            if len(controller.state.jobs) <= LIVE_MIN:
                break
            controller.run_once(TURN_S)
        for receiver in ("mlflow", "jsonl"):
            numbers = [number for number, _ in journal.outbox.list_pending(receiver, 10_000)]
            journal.outbox.mark_delivered(receiver, numbers[:-RECORDS_LEFT])
        journal.store_snapshot(controller.state)
        controller.submit(script("newest", gpus=4))  # an event that no snapshot has
    return read_journal(path)


def read_journal(path: Path) -> dict[str, Any]:
    """Return what a service of this version makes of a journal, and what it cannot read."""
    with closing(Journal(f"sqlite:///{path}")) as journal:
        journal.set_aside_unreadable()
        backend = FaultyBackend(CLUSTER, seed=3, hazards={}, repeat_chance=0.0)
        controller = Controller(journal, backend, backend.current_time_s)
        live = {
            job.id: [job.status.value, len(job.attempts)] for job in controller.state.jobs.values()
        }
        ended = {
            job.id: [job.status.value, len(job.attempts)]
            for job in controller.list_ended_jobs(1000)
        }
        users = [
            [user.name, user.role.value]
            for user in Accounts(journal.database.transaction, backend.current_time_s).list_users()
        ]
        return {
            "live": live,
            "ended": ended,
            "submitted": controller.state.submitted,
            "observations": len(controller.state.observations),
            "users": users,
            "records": len(journal.outbox.list_pending("jsonl", 10_000)),
            "unreadable": [
                [row.table, row.row, row.reason] for row in journal.set_aside.list_rows()
            ],
        }


if __name__ == "__main__":
    main()
