"""What does a journal tell of the past (every decision, and why), and of what is to come (each job's start and end)?"""

from __future__ import annotations

import sqlite3
import tempfile
from collections.abc import Iterable, Iterator
from contextlib import closing, contextmanager
from dataclasses import replace
from math import inf
from pathlib import Path
from typing import TypedDict

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.ports import decisions
from orchestrator.scheduling.options.job_options import steps_left
from orchestrator.scheduling.reports.forecast import Expected, forecast
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.specs.actions import Action, Launch, Record, Stop
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.state import State

SQLITE = "sqlite:///"


class Decision(TypedDict):
    """One event after which something was done, or would be."""

    at_s: float
    event: str
    then: str | None  # what was decided, a line for each attempt to start or to end; None: it was not kept
    now: str  # what this version decides
    why: str  # in the words of this version, a line for each job
    same: bool


class ExpectedJob(TypedDict):
    """When a job runs, as far as can be known now."""

    id: str
    status: str
    devices: int | None
    start_s: float | None  # None: nothing is expected of it yet
    end_s: float | None
    start_range_s: tuple[float, float] | None  # within which it starts with a probability of 80 %; None: not known
    end_range_s: tuple[float, float] | None
    deadline_s: float | None
    says_length: bool  # else a day was taken
    why: str


def kept_events(journal: str) -> Iterator[tuple[Event, str | None]]:
    """Every event of a journal with what was decided then, oldest first.

    `journal` is a SQLite file or an address, as `Journal` takes it. Raises SpecError, ServiceError.
    """
    with opened(journal) as kept:
        yield from kept.history()


def kept_state(journal: str) -> State:
    """The state that a journal leads to. Raises as `kept_events`."""
    with opened(journal) as kept:
        snapshot, tail = kept.load()
    scheduler = Scheduler(snapshot or State())
    for event, _ in tail:
        scheduler.step(event)
    return scheduler.state


def expected_jobs(state: State, now_s: float) -> list[ExpectedJob]:
    """Every job that has not ended, the one that starts first on top; those of which nothing is expected last."""
    found = forecast(replace(state, at_s=max(state.at_s, now_s)))
    jobs = [job for job in state.jobs.values() if not job.status.ended]
    told = [_expected(job, found.get(job.id)) for job in jobs]
    return sorted(told, key=lambda one: inf if one["start_s"] is None else one["start_s"])


def _expected(job: Job, one: Expected | None) -> ExpectedJob:
    return ExpectedJob(
        id=job.id,
        status=job.status.value,
        devices=one.devices if one else None,
        start_s=one.start_s if one else None,
        end_s=one.end_s if one else None,
        start_range_s=one.start_range_s if one else None,
        end_range_s=one.end_range_s if one else None,
        deadline_s=job.deadline_s,
        says_length=steps_left(job) is not None,
        why=job.reason,
    )


@contextmanager
def opened(journal: str) -> Iterator[Journal]:
    """A journal to read, whose service may be up: of a SQLite file a copy, for opening it would lock and change it."""
    file, is_address = journal.removeprefix(SQLITE), "://" in journal
    if is_address and file == journal:
        with closing(Journal(journal, reads_only=True)) as kept:
            yield kept
    else:
        with _copied(Path(file)) as kept:
            yield kept


@contextmanager
def _copied(path: Path) -> Iterator[Journal]:
    if not path.is_file():
        raise SpecError("there is no journal", source=str(path), hint="a service keeps journal.sqlite in its home")
    with tempfile.TemporaryDirectory(prefix="orc-journal-") as folder:
        copy = Path(folder) / path.name
        try:
            with (
                closing(sqlite3.connect(f"{path.resolve().as_uri()}?mode=ro", uri=True)) as source,
                closing(sqlite3.connect(copy)) as target,
            ):
                source.backup(target)
        except sqlite3.Error as error:
            raise SpecError("not a SQLite journal", source=str(path), got=str(error)) from None
        with closing(Journal(f"{SQLITE}{copy}")) as kept:
            yield kept


def replay(history: Iterable[tuple[Event, str | None]]) -> Iterator[Decision]:
    """Each decision of a history, made again by this version on the state that its own decisions have led to."""
    scheduler = Scheduler(State())
    for event, then in history:
        actions = scheduler.step(event)
        now = decisions(actions)
        if now or then or any(isinstance(action, Record) and action.job.status.ended for action in actions):
            yield Decision(
                at_s=event.at_s,
                event=event.type,
                then=then,
                now=now,
                why=_why(scheduler.state, actions),
                same=then is None or then == now,
            )


def _why(state: State, actions: Iterable[Action]) -> str:
    """Each job that something was decided on, or that came to its end, with its reason."""
    reasons: dict[str, str] = {}
    for action in actions:
        if isinstance(action, Launch | Record):
            reasons[action.job.id] = action.job.reason
        elif isinstance(action, Stop):
            job = state.jobs[action.job_id]
            reasons[job.id] = "is being cancelled" if job.cancelling else job.reason
    return "\n".join(f"{job_id}: {reason}" for job_id, reason in reasons.items())
