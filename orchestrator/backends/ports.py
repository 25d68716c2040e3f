"""Protocols between the controller and the world: backend, nodes, launchers, event log, trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, TypeVar

from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.actions import Action, Launch, Record, Stop
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.events import Event
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.settings import in_short
from orchestrator.specs.state import State

Body = TypeVar("Body")  # what a row of an outbox holds
Sent = TypeVar("Sent", contravariant=True)
OutboxRow = tuple[int, Record]  # its number, which is never given again, and what it holds
Decided = tuple[Event, Sequence[Action]]  # what happened, and what was decided to do about it


@dataclass(frozen=True, slots=True, kw_only=True)
class Totals:
    """Counts of a journal."""

    ended: Mapping[str, int]  # archived jobs by status
    undelivered: Mapping[str, int]  # records that each tracker has yet to get
    notices: Mapping[str, int]  # that each target of notifications has yet to get
    oldest_notices_s: Mapping[str, float]  # when the oldest of them was made, for each target that lacks one


@dataclass(frozen=True, slots=True, kw_only=True)
class Submission:
    """What was submitted under a key."""

    digest: str  # SHA-256 of what was asked
    ids: tuple[str, ...]  # of its jobs


@dataclass(frozen=True, slots=True, kw_only=True)
class Lookups:
    """Lookups that a tracker may make in the service, from any thread."""

    state: Callable[[], State]  # the newest
    job: Callable[[str], Job | None]  # live or ended, by id
    sweep: Callable[[str], SweepReport | None]  # by id


class Backend(Protocol):
    """Where attempts run. Every call returns at once; results arrive as events."""

    def launch(self, action: Launch) -> None:
        """Start an attempt, or take it up again where it runs already (after a restart of the service)."""

    def stop(self, action: Stop) -> None:
        """End an attempt. Unknown and ended attempts are no error."""

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Take up an attempt that the journal calls live: watch it, report its end, or start it if it never began."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first."""

    def close(self) -> None:
        """Stop watching; running attempts continue."""


class EventLog(Protocol):
    """Durable log of events. Every method may be called from any thread."""

    def load(self) -> tuple[State | None, Sequence[tuple[Event, str | None]]]:
        """The newest snapshot of the state (None: there is none), and the events after it, oldest first.

        Each event comes with its decisions as text (`decisions`); None where they were not kept.
        """

    def as_kept(self, event: Event) -> Event:
        """Return an event as it will be read from the log. Raises SpecError where it could not be read."""

    def unreadable(self) -> str | None:
        """Return which rows cannot be read, as a sentence; None where all can."""

    def live(self) -> Jobs:
        """Return the live jobs as they stood at the newest snapshot."""

    def append(self, decided: Sequence[Decided]) -> None:
        """Keep events, decisions, ended jobs and records for trackers, all or nothing.

        Raises UncertainError where it is not known which; any other exception says nothing.
        """

    def confirm(self, *, asks: bool = True) -> None:
        """Return while this process owns the journal and may act. Raises ServiceError once it does not.

        Without `asks` nothing is waited for, and doubt is a no.
        """

    def submitted(self, keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return the submissions under these keys; keys without one are left out."""

    def snapshot(self, state: State) -> None:
        """Keep the state after all appended events; `load` folds only later ones."""

    def job(self, job_id: str) -> Job | None:
        """An ended job that has left the state; None where there is none."""

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """Return at most `limit` ended jobs, latest end first; with `before`, only those that ended before that job."""

    def totals(self) -> Totals:
        """Return how many jobs have ended, and how many records wait for trackers."""

    def began_at_s(self) -> float | None:
        """Return the time of the first event, in seconds since 1970; None before it."""


class Receiver(Protocol[Sent]):
    """Receives the rows of an outbox. Its relay calls it, and calls again after an error.

    Subclass it: `refresh` and `shut_down` need a body only where a receiver has something to do there.
    """

    address: str  # for people: a URL, a path or a word
    threads: int = 1  # that may call `send` at once, each with rows of another group

    def group(self, body: Sent) -> str:
        """Return the group of a row; only rows of one group are sent together."""

    def send(self, rows: Sequence[tuple[int, Sent]]) -> None:
        """Keep rows of one group, oldest first; on return they are kept.

        Rows can come again: the same row, the same id. Raises OSError while the receiver is away: the rows come again
        for as long as it takes. Rows that raise another exception five times are dropped.
        """

    def refresh(self) -> None:
        """Called every few seconds, for what no row brings: the curves of running attempts, a server to keep up."""
        return

    def shut_down(self) -> None:
        """End the processes that the receiver started, as `orc down` asks."""
        return


class Tracker(Receiver[Record], Protocol):
    """Where people find the records of jobs and attempts. Its rows are grouped by job.

    A row's job has all attempts up to then, so the last row says what the earlier ones said.
    """

    def group(self, body: Record) -> str:
        """The id of the job."""
        return body.job.id


def decisions(actions: Sequence[Action]) -> str:
    """Return decisions as text: one line for each attempt to start or to end."""
    return "\n".join(_decision(action) for action in actions if isinstance(action, Launch | Stop))


def _decision(action: Launch | Stop) -> str:
    if isinstance(action, Stop):
        return f"stop {action.name}"
    attempt = action.attempt
    devices = " ".join(f"{part.node}:{','.join(map(str, part.devices))}" for part in attempt.placement)
    return f"launch {attempt.name} on {devices} as {in_short(attempt.plan)}"
