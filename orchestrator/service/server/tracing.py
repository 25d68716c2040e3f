"""The trace of each job: submit, plan, launch and first step, as OpenTelemetry spans.

A span is sent once it is over. Spans follow from a job's record and its ranks' heartbeats, so that deciding and keeping
know nothing of traces.
"""

from __future__ import annotations

import hashlib
import logging
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Protocol

from orchestrator.service.server.attempt_files import beats
from orchestrator.service.server.controller import Controller
from orchestrator.specs.attempt import Attempt, AttemptStatus, Heartbeat
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.run import JobFolder
from orchestrator.specs.settings import in_short
from orchestrator.specs.span import Parent, Span, parent_of

LOOK_S = 0.5  # at most so late is a first step noticed
REASON_MAX = 200  # characters

log = logging.getLogger(__name__)


class Receiver(Protocol):
    """Where spans go."""

    def send(self, span: Span) -> None:
        """Queue a span."""


@dataclass(slots=True)
class _Progress:
    """Progress of a traced job: spans sent, and the moments of its attempts."""

    parent: Parent | None
    sent: set[tuple[str, int]] = field(default_factory=set)  # names with the numbers of attempts
    running_s: dict[int, float] = field(default_factory=dict)  # when each attempt was first seen running
    first_step_s: dict[int, float] = field(default_factory=dict)


class Tracing:
    """Sends the spans of jobs as they end; its thread is `run`, other methods may be called from any thread."""

    def __init__(self, receiver: Receiver, controller: Controller, home: Path, clock: Callable[[], float]) -> None:
        self._receiver, self._controller, self._home, self._clock = receiver, controller, home, clock
        self._progress = {job_id: _Progress(parent=self._parent(job_id)) for job_id in controller.state.jobs}
        self._since_s = clock()  # what was over before was sent by the service before

    def add_jobs(self, job_ids: Sequence[str], began_s: float, traceparent: str) -> None:
        """Take up jobs that are in the journal; the client's span is kept in the job's folder for a restart."""
        parent = parent_of(traceparent)
        for job_id in job_ids:
            if parent is not None:
                path = JobFolder(self._home, job_id).traceparent
                path.parent.mkdir(parents=True, exist_ok=True)
                path.write_text(traceparent)
            self._progress[job_id] = _Progress(parent=parent)  # not before: what the thread takes up has its parent
            trace = _Trace(job_id, parent)
            if trace.is_sampled:
                self._receiver.send(trace.span(("submit", 0), began_s, self._clock(), ("job", 0)))

    def run(self, stop: threading.Event) -> None:
        """Look at every change, and at the heartbeats of attempts before their first step, until `stop`."""
        version = -1
        while not stop.is_set():
            try:
                self.look()
            except Exception:  # traces are no reason to end a service
                log.exception("a trace cannot be written")
            version = self._controller.wait_for_change(version, LOOK_S)

    def look(self) -> None:
        """Send the spans that have ended since the last look."""
        live = self._controller.state.jobs
        for job_id in [*self._progress]:
            if job_id not in live and (ended := self._controller.job(job_id)) is not None:
                self._look_at(ended)
                del self._progress[job_id]
        for job in live.values():
            if job.id in self._progress:
                self._look_at(job)

    def _look_at(self, job: Job) -> None:
        progress = self._progress[job.id]
        trace = _Trace(job.id, progress.parent)
        if not trace.is_sampled:
            return
        if job.last is not None:
            self._look_at_attempt(job, job.last, progress)
        for key, span in _spans(trace, job, progress):
            if key not in progress.sent:
                progress.sent.add(key)
                if span.ends_s >= self._since_s:
                    self._receiver.send(span)

    def _look_at_attempt(self, job: Job, attempt: Attempt, progress: _Progress) -> None:
        number = attempt.number
        if attempt.status is AttemptStatus.LAUNCHING or number in progress.first_step_s:
            return
        progress.running_s.setdefault(number, self._clock() if attempt.ended_at_s is None else attempt.ended_at_s)
        heartbeats: Sequence[Heartbeat] = beats(self._home, job)
        step_moments_s = [beat.at_s for beat in heartbeats if beat.steps_done > 0]
        if step_moments_s:
            progress.running_s[number] = min(progress.running_s[number], *step_moments_s)
            progress.first_step_s[number] = max(step_moments_s)

    def _parent(self, job_id: str) -> Parent | None:
        try:
            return parent_of(JobFolder(self._home, job_id).traceparent.read_text())
        except OSError:
            return None


class _Trace:
    """The trace of a job, whose ids follow from the job's, or stand below a client's span."""

    def __init__(self, job_id: str, parent: Parent | None) -> None:
        self._job_id, self._parent = job_id, parent
        self.is_sampled = parent is None or parent.is_sampled

    def span(
        self,
        key: tuple[str, int],
        begins_s: float,
        ends_s: float,
        parent: tuple[str, int] | None,
        attributes: Mapping[str, str | float | None] = MappingProxyType({}),
        error: str = "",
    ) -> Span:
        """Return a span of this job. `key` is its name and attempt number; `parent` is the key of the span above it."""
        client = self._parent.span_id if self._parent else None
        values = {"job_id": self._job_id, "attempt": key[1] or None, **attributes}
        return Span(
            name=key[0],
            trace_id=self._parent.trace_id if self._parent else self._id(("trace", 0), 16),
            span_id=self._id(key, 8),
            parent_id=client if parent is None else self._id(parent, 8),
            begins_s=begins_s,
            ends_s=ends_s,
            attributes={f"orc.{name}": value for name, value in values.items() if value is not None},
            error=error,
        )

    def _id(self, key: tuple[str, int], size: int) -> int:
        seed = f"{self._job_id} {key[0]} {key[1]}".encode()
        return int.from_bytes(hashlib.sha256(seed).digest()[:size], "big")


def _spans(trace: _Trace, job: Job, progress: _Progress) -> Iterator[tuple[tuple[str, int], Span]]:
    """Yield every span of the job that is over, by its key."""
    whole: tuple[str, int] = ("job", 0)
    waits_since_s = job.submitted_at_s
    for attempt in job.attempts:
        number, launched_s = attempt.number, attempt.launched_at_s
        inside, plan, launch, first = (
            ("attempt", number),
            ("plan", number),
            ("launch", number),
            ("first step", number),
        )
        about: dict[str, str | float | None] = {"plan": in_short(attempt.plan), "gpus": attempt.plan.world_size}
        yield plan, trace.span(plan, waits_since_s, launched_s, whole, about)
        running_s, first_s = progress.running_s.get(number), progress.first_step_s.get(number)
        if running_s is not None:
            yield launch, trace.span(launch, launched_s, running_s, inside)
        if running_s is not None and first_s is not None:
            yield first, trace.span(first, running_s, first_s, inside)
        if attempt.ended_at_s is not None:
            failure = attempt.failure
            about["outcome"] = failure.kind.value if failure else "succeeded"
            about |= {"needed_bytes": attempt.needed_bytes, "peak_bytes": attempt.peak_bytes}
            error = failure.reason[:REASON_MAX] if failure else ""
            yield inside, trace.span(inside, launched_s, attempt.ended_at_s, whole, about, error)
            waits_since_s = attempt.ended_at_s
    if job.status.ended:
        error = job.reason[:REASON_MAX] if job.status in (JobStatus.FAILED, JobStatus.REFUSED) else ""
        attributes = {"name": job.spec.name, "user": job.user, "status": job.status.value}
        yield whole, trace.span(whole, job.submitted_at_s, waits_since_s, None, attributes, error)
