"""`orc replay`: repeats past decisions of a journal, and reads a journal's content."""

from __future__ import annotations

import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import TypedDict

from orchestrator.backends.journal.copy import copy_journal
from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.ports import format_decisions
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.server.sweeps.trials import ComingTrials, list_coming_trials
from orchestrator.specs.actions import Action, Launch, Record, Stop
from orchestrator.specs.events import Event
from orchestrator.specs.state import State

SQLITE = "sqlite:///"


class ReplayedDecision(TypedDict):
    """An event with the recorded actions, and with the actions that this version decides on it."""

    at_s: float
    event: str
    # the recorded decision, a line per attempt to start or to end; None: not recorded
    then: str | None
    now: str  # this version's decision
    why: str  # this version's reasons, a line per job
    same: bool


def iterate_events(journal_address: str) -> Iterator[tuple[Event, str | None]]:
    """Yield (event, recorded decision as text or None) of a journal, oldest first.

    `journal_address` is a SQLite file or an address, as `Journal` takes it. Raises SpecError,
    ServiceError.
    """
    with open_journal(journal_address) as opened_journal:
        yield from opened_journal.iterate_history()


def read_state(journal_address: str) -> State:
    """Return the scheduler's state at the end of a journal. Raises SpecError, ServiceError."""
    with open_journal(journal_address) as opened_journal:
        snapshot, tail = opened_journal.load_state_and_events()
    scheduler = Scheduler(snapshot or State())
    for event, _ in tail:
        scheduler.step(event)
    return scheduler.state


def read_state_and_coming_trials(journal_address: str, home: Path) -> tuple[State, ComingTrials]:
    """Return (scheduler's state at the end of a journal, {id of open sweep: trials that it has yet
    to submit}).

    Raises SpecError, ServiceError.
    """
    state = read_state(journal_address)
    with open_journal(journal_address) as opened_journal:
        return state, list_coming_trials(
            opened_journal.sweeps,
            lambda job_id: state.jobs.get(job_id) or opened_journal.find_ended_job(job_id),
            home,
        )


@contextmanager
def open_journal(journal_address: str) -> Iterator[Journal]:
    """Open a journal for reading, even while its service runs. A SQLite file is copied first, as
    opening would change it.
    """
    file = journal_address.removeprefix(SQLITE)
    is_address = "://" in journal_address
    if is_address and file == journal_address:
        with closing(Journal(journal_address, reads_only=True)) as reader:
            yield reader
    else:
        with _open_copy(Path(file)) as reader:
            yield reader


@contextmanager
def _open_copy(path: Path) -> Iterator[Journal]:
    with tempfile.TemporaryDirectory(prefix="orc-journal-") as folder:
        copy = Path(folder) / path.name
        copy_journal(path, copy)
        with closing(Journal(f"{SQLITE}{copy}")) as reader:
            yield reader


def replay_history(
    events_and_decisions: Iterable[tuple[Event, str | None]],
) -> Iterator[ReplayedDecision]:
    """Yield for each recorded event the recorded decision beside the one that this version makes.

    This version decides on the state that its own earlier decisions produced.
    """
    scheduler = Scheduler(State())
    for event, then in events_and_decisions:
        actions = scheduler.step(event)
        now = format_decisions(actions)
        if (
            now
            or then
            or any(isinstance(action, Record) and action.job.status.ended for action in actions)
        ):
            yield ReplayedDecision(
                at_s=event.at_s,
                event=event.type,
                then=then,
                now=now,
                why=_describe_actions(scheduler.state, actions),
                same=then is None or then == now,
            )


def _describe_actions(state: State, actions: Iterable[Action]) -> str:
    """Return text that names each job with an action or an end, and the reason for it."""
    reasons: dict[str, str] = {}
    for action in actions:
        if isinstance(action, Launch | Record):
            reasons[action.job.id] = action.job.reason
        elif isinstance(action, Stop):
            job = state.jobs[action.job_id]
            reasons[job.id] = "is being cancelled" if job.cancelling else job.reason
    return "\n".join(f"{job_id}: {reason}" for job_id, reason in reasons.items())
