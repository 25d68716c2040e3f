"""Protocols between the controller and external systems: backend, nodes, launchers, event log, trackers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol, TypeVar

from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.actions import Action, Launch, Record, Stop
from orchestrator.specs.attempt import Attempt, placement_text
from orchestrator.specs.events import Event
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.jobs import Jobs
from orchestrator.specs.settings import in_short
from orchestrator.specs.state import State

Body = TypeVar("Body")  # what a row of an outbox holds
Sent = TypeVar("Sent", contravariant=True)
OutboxRow = tuple[int, Record]  # its number, which is never given again, and what it holds
Decided = tuple[Event, Sequence[Action]]  # what happened, and what was decided to do about it


@frozen
class Totals:
    """Row counts of a journal (event log)."""

    ended: Mapping[str, int]  # archived jobs by status
    undelivered: Mapping[str, int]  # records that each tracker has yet to get
    notices: Mapping[str, int]  # that each target of notifications has yet to get
    oldest_notices_s: Mapping[
        str, float
    ]  # when the oldest of them was made, for each target that lacks one


@frozen
class Submission:
    """The jobs that were submitted under an idempotency key."""

    digest: str  # SHA-256 of what was asked
    ids: tuple[str, ...]  # of its jobs


@frozen
class Lookups:
    """Callbacks by which a tracker queries the service, from any thread."""

    state: Callable[[], State]  # the newest
    job: Callable[[str], Job | None]  # live or ended, by id
    sweep: Callable[[str], SweepReport | None]  # by id


class Backend(Protocol):
    """Runs attempts (one launch of a job each). Every call returns at once; results arrive as events."""

    def launch(self, action: Launch) -> None:
        """Start an attempt, or resume watching it where it already runs (after a restart of the service)."""

    def stop(self, action: Stop) -> None:
        """End an attempt. Unknown and ended attempts are no error."""

    def adopt(self, job: Job, attempt: Attempt) -> None:
        """Resume an attempt that the journal lists as live: watch it, report its end, or start it if it never began."""

    def events(self, timeout_s: float) -> Sequence[Event]:
        """Return the events since the last call; wait at most `timeout_s` for the first."""

    def wake(self) -> None:
        """Let `events` return at once, in another thread."""

    def close(self) -> None:
        """Stop watching; running attempts continue."""


class EventLog(Protocol):
    """Durable log of events. Every method may be called from any thread."""

    def load(self) -> tuple[State | None, Sequence[tuple[Event, str | None]]]:
        """Return (newest snapshot of the state, events after it, oldest first). The snapshot is None without one.

        Each event comes with its decisions as text (`decisions`); None where they were not stored.
        """

    def as_kept(self, event: Event) -> Event:
        """Return an event as the log will read it back. Raises SpecError where it cannot."""

    def unreadable(self) -> str | None:
        """Return a sentence on which rows cannot be read; None where all can."""

    def live(self) -> Jobs:
        """Return the live jobs at the newest snapshot."""

    def append(self, decided: Sequence[Decided]) -> None:
        """Append events, decisions, ended jobs and tracker records in one transaction.

        Raises UncertainError where its success is unknown. Any other exception says nothing about it.
        """

    def confirm(self, *, asks: bool = True) -> None:
        """Return normally while this process owns the journal and may act. Raises ServiceError otherwise.

        With `asks` false the call never waits, and raises in doubt.
        """

    def submitted(self, keys: Sequence[str]) -> Mapping[str, Submission]:
        """Return {key: submission} for the known idempotency keys among these."""

    def snapshot(self, state: State) -> None:
        """Store the state after all appended events; `load` then replays only later ones."""

    def job(self, job_id: str) -> Job | None:
        """Return an ended job that has left the state; None where there is none."""

    def ended(self, limit: int, before: str | None = None) -> list[Job]:
        """Return at most `limit` ended jobs, latest end first; with `before`, only those that ended before that job."""

    def totals(self) -> Totals:
        """Return counts of ended jobs and of records that wait for trackers."""

    def began_at_s(self) -> float | None:
        """Return the time of the first event, in seconds since 1970; None before it."""


class Receiver(Protocol[Sent]):
    """Receives rows of an outbox. Its relay calls it, and retries after an error.

    Subclass it: override `refresh` and `shut_down` only where needed.
    """

    address: str  # for people: a URL, a path or a word
    threads: int = 1  # that may call `send` at once, each with rows of another group

    def group(self, body: Sent) -> str:
        """Return the group of a row; only rows of one group are sent together."""

    def send(self, rows: Sequence[tuple[int, Sent]]) -> None:
        """Store rows of one group, oldest first. On return they are stored.

        The same row may come again, with the same id. Raises OSError while the receiver is unavailable: the rows come
        again for as long as it takes. Rows that raise another exception five times are dropped.
        """

    def refresh(self) -> None:
        """Do periodic work, every few seconds: send curves of running attempts, supervise a server."""
        return

    def shut_down(self) -> None:
        """End the processes that the receiver started, as `orc down` asks."""
        return


class Tracker(Receiver[Record], Protocol):
    """Experiment tracker that stores the records of jobs and attempts. Its rows are grouped by job.

    Each row has the whole job with all attempts so far, so the last row includes the earlier ones.
    """

    def group(self, body: Record) -> str:
        """Return the id of the job."""
        return body.job.id


def decisions(actions: Sequence[Action]) -> str:
    """Return decisions as text: one line for each attempt to start or to end."""
    return "\n".join(_decision(action) for action in actions if isinstance(action, Launch | Stop))


def _decision(action: Launch | Stop) -> str:
    if isinstance(action, Stop):
        return f"stop {action.name}"
    attempt = action.attempt
    return (
        f"launch {attempt.name} on {placement_text(attempt.placement)} as {in_short(attempt.plan)}"
    )
