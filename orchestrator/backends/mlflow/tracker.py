"""The tracker: one thread that brings the journal's outbox to MLflow, however long MLflow is away."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.mlflow.content import (
    RunContent,
    attempt_content,
    compare_url,
    hider,
    job_content,
    parse_curves,
    run_key,
)
from orchestrator.backends.mlflow.frontier_png import figure
from orchestrator.scheduling.reports.explain import explain_attempt, observation_of, picture_of
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder
from orchestrator.specs.state import State

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

EXPERIMENT = "orchestrator"
REQUEST_TIMEOUT_S = 5
POLL_S = 0.5  # how long a row can wait where nobody said `notify`
CURVES_S = 3.0  # between increments of a running attempt's curves
RETRY_FIRST_S, RETRY_MAX_S = 0.5, 30.0
REFUSALS_MAX = 5  # MLflow said no this often: it will not say yes
REFUSED = "INVALID_PARAMETER_VALUE"
ROWS = 50  # outbox rows in memory
POINTS = 500  # per request; 1,000 took 0.4 s idle and eight times as much under load (reference measurement)
CHUNK_BYTES = 262_144  # of a curve file, read at a time

log = logging.getLogger(__name__)


@dataclass(slots=True, kw_only=True)
class _Curves:
    """How much of an attempt's curve file MLflow has."""

    path: Path
    start_ms: int
    offset: int = 0
    elapsed_ms: float = 0.0


class _Contact:
    """A server that answered, and what is known of its runs; dropped at the first failure and made anew."""

    def __init__(self, tracking_uri: str) -> None:
        from mlflow import MlflowClient  # 2 s of imports that nobody but the sender should wait for

        self.client: MlflowClient = MlflowClient(tracking_uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        self.experiment_id: str = experiment.experiment_id if experiment else self.client.create_experiment(EXPERIMENT)
        self.run_ids: dict[str, str] = {}
        self.closed: set[str] = set()  # keys of runs that are complete


class MlflowTracker:
    """Brings every outbox row to MLflow at least once, and so that a second time changes nothing.

    No method waits for MLflow but `wait_delivered` and, for one request at most, `stop`.
    """

    def __init__(self, journal: Journal, tracking_uri: str, home: str | Path, state: Callable[[], State]) -> None:
        """Nothing is sent before `start`. `state` gives the newest one: what is drawn and told of an end is from it."""
        self.tracking_uri = tracking_uri
        self.problem: str | None = None  # why MLflow could not be told last time, for people
        self._journal, self._home, self._state = journal, Path(home), state
        self._contact: _Contact | None = None
        self._curves: dict[str, _Curves] = {}
        self._known: dict[tuple[str, int], tuple[str, str]] = {}  # run and experiment of each attempt that was sent
        self._refusals: dict[str, int] = {}
        self._curves_due_s = 0.0
        self._stop, self._wake = threading.Event(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="mlflow-tracker", daemon=True)

    def start(self) -> None:
        """Begin to send."""
        os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # ours are longer apart; the default waits 4 minutes
        os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_TIMEOUT_S)
        os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
        direct = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY"), "127.0.0.1", "localhost")
        os.environ["no_proxy"] = ",".join(filter(None, direct))  # a proxy would look for our server at its own place
        self._thread.start()

    def stop(self) -> None:
        """End the thread after the request under way; undelivered rows stay in the journal."""
        self._stop.set()
        self._wake.set()
        self._thread.join(2 * REQUEST_TIMEOUT_S)

    def notify(self) -> None:
        """Say that the outbox has new rows."""
        self._wake.set()

    def wait_delivered(self, timeout_s: float) -> bool:
        """True once the outbox is empty; False where it is not within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while self._journal.outbox.pending(1):
            if time.monotonic() > deadline_s:
                return False
            self.notify()
            time.sleep(0.05)
        return True

    def compare(self, job_ids: tuple[str, ...]) -> str | None:
        """The page that shows all attempts of these jobs side by side; None where none is known to this process."""
        known = list(self._known.items())
        runs = tuple(run_id for (job_id, _), (run_id, _) in known if job_id in job_ids)
        return compare_url(self.tracking_uri, runs, known[-1][1][1]) if runs else None

    def _run(self) -> None:
        failures = 0
        while not self._stop.is_set():
            try:
                more = self._deliver()
            except Exception as error:  # a thread's last line of defence: the outbox waits, training goes on
                self._contact = None
                said = f"{type(error).__name__}: {str(error).splitlines()[0] if str(error) else ''}"[:500]
                if said != self.problem:
                    log.warning("MLflow at %s: %s", self.tracking_uri, said)
                self.problem = said
                self._stop.wait(min(RETRY_FIRST_S * 2 ** min(failures, 10), RETRY_MAX_S))
                failures += 1
            else:
                failures, self.problem = 0, None
                if not more:
                    self._wake.wait(POLL_S)
                self._wake.clear()

    def _deliver(self) -> bool:
        """Send what is due; True where more rows wait."""
        rows = self._journal.outbox.pending(ROWS)
        curves_due = time.monotonic() >= self._curves_due_s
        if not rows and not curves_due:
            return False
        contact = self._contact
        if contact is None:
            contact = _Contact(self.tracking_uri)
            self._take_up(contact)
            self._contact = contact
        newest = {record.job.id: record.job for _, record in rows}  # a record holds all attempts of its job
        for job in newest.values():
            self._send_unless_refused(contact, job)
            self._journal.outbox.delivered([row for row, record in rows if record.job.id == job.id])
        if curves_due:
            for key in self._curves:
                if key in contact.run_ids:  # else somebody deleted the run
                    self._send_curves(contact, key)
            self._curves_due_s = time.monotonic() + CURVES_S
        return len(rows) == ROWS

    def _take_up(self, contact: _Contact) -> None:
        """Go on with the curves of attempts that ran before this process began."""
        running = contact.client.search_runs([contact.experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
        for run in running:
            tags = run.data.tags
            key, number = tags.get("orc.run", ""), tags.get("orc.attempt", "0")
            if number.isdigit() and number != "0" and "orc.job_id" in tags:
                contact.run_ids.setdefault(key, run.info.run_id)
                path = JobFolder(self._home, tags["orc.job_id"]).attempt(int(number)).metrics
                self._curves.setdefault(key, _Curves(path=path, start_ms=run.info.start_time))

    def _send_unless_refused(self, contact: _Contact, job: Job) -> None:
        """Send a job; give it up where it, and not the way to MLflow, has been the trouble too often."""
        from mlflow.exceptions import MlflowException

        try:
            self._send_job(contact, job)
        except Exception as error:
            if isinstance(error, MlflowException | OSError) and getattr(error, "error_code", "") != REFUSED:
                raise  # not reached, or not served
            self._refusals[job.id] = self._refusals.get(job.id, 0) + 1
            if self._refusals[job.id] < REFUSALS_MAX:
                raise
            log.exception("MLflow does not take job %s; its outbox rows are dropped", job.id)
        self._refusals.pop(job.id, None)

    def _send_job(self, contact: _Contact, job: Job) -> None:
        hide, state = hider(job.spec, os.environ), self._state()
        parent = self._open(contact, job, 0, job_content(job, hide, ""), {})
        ids = []
        for attempt in job.attempts:
            key = run_key(job, attempt.number)
            said = explain_attempt(state, job, attempt) if attempt.status is AttemptStatus.ENDED else ()
            content = attempt_content(job, attempt, hide, said, observation_of(state, job, attempt))
            ids.append(self._open(contact, job, attempt.number, content, {"mlflow.parentRunId": parent}))
            self._known[job.id, attempt.number] = ids[-1], contact.experiment_id
            if key in contact.closed:
                continue
            path = JobFolder(self._home, job.id).attempt(attempt.number).metrics
            self._curves.setdefault(key, _Curves(path=path, start_ms=content.start_ms))
            self._send_curves(contact, key)
            self._send_content(contact, key, content)
            if attempt.status is AttemptStatus.ENDED:
                del self._curves[key]
        compare = compare_url(self.tracking_uri, tuple(ids), contact.experiment_id) if len(ids) > 1 else ""
        picture = picture_of(state, job) if job.status.ended else None
        self._send_content(contact, run_key(job, 0), job_content(job, hide, compare, picture))

    def _open(self, contact: _Contact, job: Job, number: int, content: RunContent, tags: Mapping[str, str]) -> str:
        """The id of the run with this key, found or created."""
        key = run_key(job, number)
        if key not in contact.run_ids:
            runs = self._find(contact, key)
            tags = {"orc.run": key, "orc.job_id": job.id, "orc.attempt": str(number), **tags}
            run = (
                runs[0]
                if runs
                else contact.client.create_run(
                    contact.experiment_id, start_time=content.start_ms, tags=tags, run_name=content.name
                )
            )
            contact.run_ids[key] = run.info.run_id
            if number and run.info.end_time is not None:
                contact.closed.add(key)
        return contact.run_ids[key]

    def _find(self, contact: _Contact, key: str) -> list[Run]:
        runs = contact.client.search_runs([contact.experiment_id], f"tags.`orc.run` = '{key}'", max_results=100)
        return sorted(runs, key=lambda run: run.info.run_id)

    def _send_content(self, contact: _Contact, key: str, content: RunContent) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run_id, client = contact.run_ids[key], contact.client
        at_ms = content.start_ms if content.end_ms is None else content.end_ms
        client.log_batch(
            run_id,
            metrics=[Metric(name, value, at_ms, 0) for name, value in content.metrics.items()],
            params=[Param(name, value) for name, value in content.params.items()],
            tags=[RunTag(name, value) for name, value in content.tags.items()],
        )
        if content.end_ms is None:
            return
        for path, text in content.texts.items():
            client.log_text(run_id, text, path)
        if content.picture is not None:
            client.log_figure(run_id, figure(f"Plans of {content.name}", content.picture), "frontier.png")
        for other in self._find(contact, key):  # a creation that timed out here may have come true there
            if other.info.run_id != run_id:
                client.delete_run(other.info.run_id)
        client.set_terminated(run_id, content.status, content.end_ms)
        contact.closed.add(key)

    def _send_curves(self, contact: _Contact, key: str) -> None:
        """Send the whole lines that the curve file has grown by."""
        from mlflow.entities import Metric

        curves = self._curves[key]
        while True:
            try:
                with curves.path.open("rb") as file:
                    file.seek(curves.offset)
                    chunk = file.read(CHUNK_BYTES)
            except OSError:  # not begun yet, or a script that keeps none
                return
            whole = chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK_BYTES else b"")
            if not whole:
                return
            points, elapsed_ms = parse_curves(whole.decode(errors="replace"), curves.elapsed_ms)
            for first in range(0, len(points), POINTS):
                metrics = [
                    Metric(name, value, curves.start_ms + ms, step)
                    for name, value, ms, step in points[first : first + POINTS]
                ]
                contact.client.log_batch(contact.run_ids[key], metrics=metrics)
            curves.offset, curves.elapsed_ms = curves.offset + len(whole), elapsed_ms
