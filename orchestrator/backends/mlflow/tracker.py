"""The MLflow tracker: a parent run for each job, a child run for each attempt, with its curves."""

from __future__ import annotations

import hashlib
import json
import os
import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import starmap
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.mlflow.contact import Contact, limit_mlflow_requests
from orchestrator.backends.mlflow.content import (
    MetricPoint,
    RunContent,
    make_attempt_run_content,
    make_comparison_url,
    make_job_run_content,
    parse_curves_and_elapsed_ms,
    parse_samples_and_next_number,
    run_key,
    run_url,
)
from orchestrator.backends.mlflow.frontier_png import draw_figure
from orchestrator.backends.mlflow.groups import (
    ParentRuns,
    list_compared_runs,
    list_trial_parameters,
    make_attempt_run_name,
)
from orchestrator.backends.mlflow.models import OutputQueue
from orchestrator.backends.mlflow.server import (
    ADDRESS,
    MlflowServer,
    register_socket_uri,
    want_server,
)
from orchestrator.backends.ports import Lookups, OutboxRow, Tracker
from orchestrator.backends.redaction import Hide, make_hider
from orchestrator.scheduling.base.node_groups import find_device_spec
from orchestrator.scheduling.reports.explain import (
    explain_attempt,
    find_observation,
    make_plan_chart,
)
from orchestrator.specs.attempt import Attempt, AttemptStatus
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.run import AttemptFolder, JobFolder

if TYPE_CHECKING:
    from mlflow.entities import DatasetInput, Run

ADDRESS_FILE = "mlflow_url"  # in the home: of an MLflow server that is not the home's own
INPUTS_MAX = 100  # data files of one run
REFUSED = "INVALID_PARAMETER_VALUE"
THREADS = 4  # jobs sent at once: the server's one process answers them in turn
# per request; 1,000 took 0.4 s idle and eight times as much under load (reference measurement)
POINTS = 500
CHUNK_BYTES = 262_144  # of a curve file, read at a time


@dataclass(slots=True, kw_only=True)
class _CurveProgress:
    """How far the files of an attempt's curves have been sent to MLflow."""

    folder: AttemptFolder
    start_ms: int
    elapsed_ms: float = 0.0
    offsets: dict[Path, int] = field(default_factory=dict)
    samples: dict[Path, int] = field(default_factory=dict)  # of each node

    def read_points(self, path: Path, text: str) -> list[MetricPoint]:
        """Return the points of the next lines of a file, with times since 1970, and count them as
        sent.
        """
        if path != self.folder.metrics:
            points, self.samples[path] = parse_samples_and_next_number(
                text, self.samples.get(path, 0)
            )
            return points
        points, self.elapsed_ms = parse_curves_and_elapsed_ms(text, self.elapsed_ms)
        return [point._replace(at_ms=self.start_ms + point.at_ms) for point in points]


class MlflowTracker(Tracker):
    """Records jobs and attempts as MLflow runs. Sending is idempotent."""

    threads = THREADS

    def __init__(self, tracking_uri: str, home: Path, lookups: Lookups, page_url: str = "") -> None:
        """Make the tracker; nothing is sent yet. Explanations and pictures of ended jobs come from
        `lookups`.

        `page_url` is the URL at which people find MLflow's pages, by default the tracking URI.
        """
        self.address = page_url or tracking_uri
        self._uri = tracking_uri
        self._home = home
        self._lookups = lookups
        self._contact: Contact | None = None
        self._connecting = threading.Lock()
        self._curves: dict[str, _CurveProgress] = {}
        # keys of runs that were created without a search before, and are not complete
        self._unsure: set[str] = set()
        self._outputs = OutputQueue(tracking_uri, home, lookups)
        self._groups = ParentRuns(self.address, home, lookups)
        limit_mlflow_requests()

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Update the runs of the rows' job and of its attempts, with their curves."""
        with self._connection() as contact:
            self._send_job(contact, rows[-1][1].job)

    def refresh(self) -> None:
        """Send the new points of running attempts' curves."""
        with self._connection() as contact:
            for key in self._curves:
                if key in contact.run_ids:  # else somebody deleted the run
                    self._send_curves(contact, key)
            self._groups.end_sweeps(contact)
            self._outputs.start_next(contact.client)

    def shut_down(self) -> None:
        """Do nothing, since this tracker did not start the server."""

    def _connect(self) -> Contact:
        return Contact(self._uri)

    @contextmanager
    def _connection(self) -> Iterator[Contact]:
        """Yield the connection, which is replaced after any error."""
        from mlflow.exceptions import MlflowException

        try:
            with self._connecting:
                if (contact := self._contact) is None:
                    contact = self._connect()
                    self._resume_earlier_work(contact)
                    self._contact = contact
            yield contact
        except MlflowException as error:
            self._contact = None
            if error.error_code == REFUSED:
                raise
            raise ConnectionError(str(error)) from error  # not reached, or not served
        except Exception:  # a connection is not used again after any fault
            self._contact = None
            raise

    def _resume_earlier_work(self, contact: Contact) -> None:
        """Continue the curves, copies and sweeps that an earlier process of the service began."""
        self._outputs.resume_copies(contact.client, contact.experiment_id)
        running = contact.client.search_runs(
            [contact.experiment_id], "attributes.status = 'RUNNING'", max_results=1000
        )
        for run in running:
            tags = run.data.tags
            key = tags.get("orc.run", "")
            number = tags.get("orc.attempt", "0")
            self._groups.resume_sweep(run)
            if number.isdigit() and number != "0" and "orc.job_id" in tags:
                contact.run_ids.setdefault(key, run.info.run_id)
                folder = JobFolder(self._home, tags["orc.job_id"]).attempt(int(number))
                self._curves.setdefault(
                    key, _CurveProgress(folder=folder, start_ms=run.info.start_time)
                )

    def _send_job(self, contact: Contact, job: Job) -> None:
        hide = make_hider(job.spec, os.environ)
        state = self._lookups.state()
        job_run = make_job_run_content(job, hide, "")
        compared = self._groups.make_parent_tags(contact, job)
        is_recorded = not compared or (
            job.status.ended and not job.attempts
        )  # else its attempts stand for it
        # all of its run comes with its creation
        is_unstarted = job.status is JobStatus.CANCELLED and not job.attempts
        parent = ""
        if is_recorded:
            parent = self._find_or_create_run(
                contact, job, 0, job_run, {**job_run.tags, **compared} if is_unstarted else compared
            )
        ids = []
        for attempt in job.attempts:
            explanation = (
                explain_attempt(state, job, attempt)
                if attempt.status is AttemptStatus.ENDED
                else ()
            )
            observation = find_observation(state, job, attempt)
            device = find_device_spec(state, attempt.device)
            content = make_attempt_run_content(job, attempt, hide, explanation, observation, device)
            if compared:
                content = replace(
                    content,
                    name=make_attempt_run_name(job, attempt),
                    params={**list_trial_parameters(job), **job_run.params, **content.params},
                    tags={**content.tags, "job_spec": job_run.tags["job_spec"]},
                )
            ids.append(
                self._send_attempt(
                    contact, job, attempt, content, compared or {"mlflow.parentRunId": parent}
                )
            )
        if job.spec.trial is not None and job.status is JobStatus.SUCCEEDED:
            self._outputs.enqueue(contact.client, contact.client.get_run(ids[-1]), job.id)
        if not is_recorded:
            self._groups.end_comparison(contact, job, compared, hide)
            return
        compare = (
            make_comparison_url(self.address, tuple(ids), contact.experiment_id)
            if len(ids) > 1
            else ""
        )
        picture = make_plan_chart(state, job) if job.status.ended and job.attempts else None
        content = make_job_run_content(job, hide, compare, picture)
        if is_unstarted:
            self._end_run(contact, run_key(job, 0), content)
        else:
            self._send_content(
                contact,
                run_key(job, 0),
                replace(content, params={**list_trial_parameters(job), **content.params}),
            )
        if compared:
            self._groups.end_comparison(contact, job, compared, hide)
        elif job.status is JobStatus.SUCCEEDED:
            self._outputs.enqueue(contact.client, contact.client.get_run(parent), job.id)

    def _send_attempt(
        self,
        contact: Contact,
        job: Job,
        attempt: Attempt,
        content: RunContent,
        tags: Mapping[str, str],
    ) -> str:
        """Update the run of an attempt, with its curves, and return the run's id."""
        key = run_key(job, attempt.number)
        run_id = self._find_or_create_run(contact, job, attempt.number, content, tags)
        if key not in contact.closed:
            folder = JobFolder(self._home, job.id).attempt(attempt.number)
            self._curves.setdefault(key, _CurveProgress(folder=folder, start_ms=content.start_ms))
            self._send_curves(contact, key)
            self._send_content(contact, key, content)
            if attempt.status is AttemptStatus.ENDED:
                del self._curves[key]
        return run_id

    def _find_or_create_run(
        self,
        contact: Contact,
        job: Job,
        attempt_number: int,
        content: RunContent,
        tags: Mapping[str, str],
    ) -> str:
        """Return the id of an attempt's run; attempt number 0 means the job's own run. Create it if
        it is missing.
        """
        key = run_key(job, attempt_number)
        if key not in contact.run_ids:
            tags = {
                "orc.run": key,
                "orc.job_id": job.id,
                "orc.attempt": str(attempt_number),
                **tags,
            }
            if (
                job.status.ended and not job.attempts and key not in self._unsure
            ):  # its only record: there is no run
                self._unsure.add(
                    key
                )  # if there is one after all, `_send_content` finds it, and the next try takes it
                run = contact.create_run(content.start_ms, tags, content.name)
            else:
                run = contact.find_or_create_run(key, content.start_ms, tags, content.name)
            contact.run_ids[key] = run.info.run_id
            if attempt_number and run.info.end_time is not None:
                contact.closed.add(key)
            elif inputs := list_data_inputs(job, make_hider(job.spec, os.environ)):
                contact.client.log_inputs(
                    run.info.run_id, inputs
                )  # the same ones again change nothing
        return contact.run_ids[key]

    def _send_content(self, contact: Contact, run_key: str, content: RunContent) -> None:
        from mlflow.entities import Metric, Param, RunTag

        run_id = contact.run_ids[run_key]
        at_ms = content.start_ms if content.end_ms is None else content.end_ms
        contact.client.log_batch(
            run_id,
            metrics=[Metric(name, value, at_ms, 0) for name, value in content.metrics.items()],
            params=list(starmap(Param, content.params.items())),
            tags=list(starmap(RunTag, content.tags.items())),
        )
        if content.end_ms is not None:
            self._end_run(contact, run_key, content)

    def _end_run(self, contact: Contact, run_key: str, content: RunContent) -> None:
        run_id = contact.run_ids[run_key]
        client = contact.client
        for path, text in content.texts.items():
            client.log_text(run_id, text, path)
        if content.picture is not None:
            client.log_figure(
                run_id, draw_figure(f"Plans of {content.name}", content.picture), "frontier.png"
            )
        survivor = contact.find_run(
            run_key
        )  # a creation that timed out here may have come true there
        if survivor is None or survivor.info.run_id != run_id:
            raise ConnectionError(f"run {run_id} was replaced by another one of {run_key}")
        client.set_terminated(run_id, content.status, content.end_ms)
        contact.closed.add(run_key)
        self._unsure.discard(run_key)

    def _send_curves(self, contact: Contact, run_key: str) -> None:
        """Send the whole lines that were added to the files of the attempt's curves since the last
        call.
        """
        curves = self._curves[run_key]
        for path in (curves.folder.metrics, *curves.folder.systems()):
            while whole := _read_next_lines(path, curves.offsets.get(path, 0)):
                next_curves = replace(curves, samples=dict(curves.samples))
                points = next_curves.read_points(path, whole.decode(errors="replace"))
                self._send_points(contact, contact.run_ids[run_key], points)
                curves.elapsed_ms = next_curves.elapsed_ms
                curves.samples = next_curves.samples
                curves.offsets[path] = curves.offsets.get(path, 0) + len(whole)

    def _send_points(self, contact: Contact, run_id: str, points: Sequence[MetricPoint]) -> None:
        from mlflow.entities import Metric

        for first in range(0, len(points), POINTS):
            metrics = [
                Metric(point.name, point.value, point.at_ms, point.step)
                for point in points[first : first + POINTS]
            ]
            contact.client.log_batch(run_id, metrics=metrics)


def _read_next_lines(path: Path, offset: int) -> bytes:
    """Return the next whole lines of a file from this offset, about CHUNK_BYTES; empty at its
    end.
    """
    try:
        with path.open("rb") as file:
            file.seek(offset)
            chunk = file.read(CHUNK_BYTES)
    except OSError:  # not begun yet, or a script that keeps none
        return b""
    return chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK_BYTES else b"")


class HomeMlflow(MlflowTracker):
    """MLflow tracker with a local server in the home, which it starts and supervises."""

    def __init__(self, home: Path, lookups: Lookups) -> None:
        """Find the home's running server. If the home has records, the curves of an earlier service
        are continued.
        """
        self._server = MlflowServer(home)
        super().__init__(self._server.tracking_uri, home, lookups, ADDRESS)
        self._is_started = False
        if (self._server.folder / "mlflow.db").exists():
            want_server(home)
            self._ensure_running()

    def refresh(self) -> None:
        """Start the server if it is needed, and send curves; end the server if nobody has needed it
        for KEPT_S.
        """
        if self._curves or self._outputs.has_work:
            want_server(self._server.home)
        if self._server.is_wanted():
            self._ensure_running()
            super().refresh()
        elif self._is_started:
            self._contact = None
            self._is_started = False
            self._server.stop()

    def _ensure_running(self) -> None:
        self._is_started = True
        self._server.ensure_running()

    def _connect(self) -> Contact:
        want_server(self._server.home)
        self._server.check_serves_records()
        return super()._connect()

    def shut_down(self) -> None:
        """End the server; records stay in the home."""
        self._server.stop()


def list_data_inputs(job: Job, hide_secrets: Hide) -> list[DatasetInput]:
    """Return the job's data files as dataset inputs of its MLflow runs, at most INPUTS_MAX; none
    for a script.

    The digest of a file is made of its path, size and time of change, so that terabytes are not
    read.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    files = job.spec.data.files if job.spec.data is not None else ()
    inputs = []
    for path in files[:INPUTS_MAX]:
        try:
            stat = Path(path).stat()
            state = f"{stat.st_size} {stat.st_mtime_ns}"
        except OSError:  # the service's machine may not have it
            state = ""
        digest = hashlib.sha256(f"{path}\0{state}".encode()).hexdigest()[:16]
        shown = hide_secrets(path)
        dataset = Dataset(Path(shown).name, digest, "local", json.dumps({"uri": shown}))
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", "training")]))
    return inputs


def find_comparison_url(
    home: Path, address: str, comparison_key: str, job_count: int
) -> str | None:
    """Return the URL of MLflow's page with a comparison's runs side by side; None until each of its
    `job_count` jobs has a run.

    For the home's own server the URL is a path on the service.
    """
    experiment_id, runs = _find_runs(
        home,
        address,
        lambda contact: list_compared_runs(contact.client, contact.experiment_id, comparison_key),
    )
    if not runs or len({run.data.tags.get("orc.job_id") for run in runs}) < job_count:
        return None
    return make_comparison_url(
        address, tuple(run.info.run_id for run in reversed(runs)), experiment_id
    )


def find_job_url(home: Path, address: str, job_key: str, _jobs: int) -> str | None:
    """Return the URL of MLflow's page of a job's run, or of its newest attempt's; None where there
    is no run.

    `job_key` is `Job.key`. The last parameter is unused: the signature is that of
    `find_comparison_url`.
    """
    experiment_id, runs = _find_runs(
        home,
        address,
        lambda contact: contact.client.search_runs(
            [contact.experiment_id],
            f"tags.`orc.run` LIKE '{job_key}/%'",
            order_by=["attributes.start_time DESC"],
        ),
    )
    job_runs = [run for run in runs if run.data.tags["orc.run"] == f"{job_key}/0"]
    return run_url(address, experiment_id, (job_runs or runs)[0].info.run_id) if runs else None


def _find_runs(
    home: Path, address: str, query_runs: Callable[[Contact], Sequence[Run]]
) -> tuple[str, Sequence[Run]]:
    """Return (experiment id, runs that `query_runs` returns); no runs where the server cannot be
    reached.
    """
    from mlflow.exceptions import MlflowException

    limit_mlflow_requests()
    if address == ADDRESS:
        want_server(home)
    try:
        contact = Contact(register_socket_uri(home) if address == ADDRESS else address)
        return contact.experiment_id, query_runs(contact)
    except MlflowException:
        return "", ()


def make_tracker(home: Path, lookups: Lookups) -> MlflowTracker:
    """Return the tracker for the MLflow server in ORC_MLFLOW at the service's start, else for the
    home's own server.
    """
    file = home / ADDRESS_FILE
    return (
        MlflowTracker(file.read_text().strip(), home, lookups)
        if file.exists()
        else HomeMlflow(home, lookups)
    )
