"""A process that forks a journal writer for every line on its input, so that a kill meets the journal, not imports.

Answers each line `append FOLDER` or `fill FOLDER` with the writer's pid, and then with how the writer ended.
"""

from __future__ import annotations

import itertools
import os
import resource
import sys
from pathlib import Path

from orchestrator.backends.journal.journal import Journal
from orchestrator.specs.actions import Record
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.events import TimerFired
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State

SPEC = JobSpec(name="script", global_batch_size=8, command="python train.py")


def record(order: int, job_id: str = "j") -> Record:
    return Record(job=Job(id=job_id, spec=SPEC, order=order, submitted_at_s=0))


def append_until_killed(folder: Path) -> None:
    """Append events from the journal's last on, one record each, and write down each one that was answered."""
    answered = os.open(folder / "answered", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    journal = Journal(f"sqlite:///{folder}/journal.db")
    for number in itertools.count(len(list(journal.iterate_events()))):
        journal.append([(TimerFired(at_s=number), [record(number)])])
        os.write(answered, f"{number}\n".encode())
        if number % 7 == 0:
            journal.store_snapshot(State(at_s=number))


def append_until_the_disk_is_full(folder: Path) -> None:
    """Append under a limit of file size, and write down which event was refused and how."""
    journal = Journal(f"sqlite:///{folder}/journal.db")
    _, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(
        resource.RLIMIT_FSIZE, ((folder / "journal.db-wal").stat().st_size + 65536, hard)
    )
    try:
        for number in range(1000):
            journal.append([(TimerFired(at_s=number), [record(number, "x" * 3000)])])
    except ServiceError as error:
        (folder / "refused").write_text(f"{number} {error}")


if __name__ == "__main__":
    writers = {"append": append_until_killed, "fill": append_until_the_disk_is_full}
    for line in sys.stdin:
        name, path = line.split()
        pid = os.fork()
        if pid == 0:
            writers[name](Path(path))
            os._exit(0)
        print(pid, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]), flush=True)
