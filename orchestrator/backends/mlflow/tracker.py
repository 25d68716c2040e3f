"""The MLflow tracker: a parent run for each job, a child run for each attempt, with its curves."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.attempts.metrics import metric_lines
from orchestrator.backends.mlflow.content import (
    RunContent,
    attempt_content,
    compare_url,
    comparison_key,
    comparison_note,
    job_content,
    parse_curves,
    parse_samples,
    run_key,
)
from orchestrator.backends.mlflow.frontier_png import figure
from orchestrator.backends.mlflow.models import Outputs
from orchestrator.backends.mlflow.server import MlflowServer
from orchestrator.backends.ports import Known, OutboxRow, Tracker
from orchestrator.backends.redaction import Hide, hider
from orchestrator.scheduling.reports.comparison import compared_ids, comparison, curve_of, strategy_of
from orchestrator.scheduling.reports.explain import explain_attempt, observation_of, picture_of
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.run import AttemptFolder, JobFolder

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import DatasetInput, Run

EXPERIMENT = "orchestrator"
ADDRESS_FILE = "mlflow_url"  # in the home: of an MLflow server that is not the home's own
COMPARISON_TAG = "orc.comparison"  # of the runs of strategies that are compared
RUNS_MAX = 1000  # of one comparison
INPUTS_MAX = 100  # data files of one run
REQUEST_TIMEOUT_S = 5
REFUSED = "INVALID_PARAMETER_VALUE"
POINTS = 500  # per request; 1,000 took 0.4 s idle and eight times as much under load (reference measurement)
CHUNK_BYTES = 262_144  # of a curve file, read at a time


@dataclass(slots=True, kw_only=True)
class _Curves:
    """How much of the files of an attempt's curves MLflow has."""

    folder: AttemptFolder
    start_ms: int
    elapsed_ms: float = 0.0
    offsets: dict[Path, int] = field(default_factory=dict)
    samples: dict[Path, int] = field(default_factory=dict)  # of each node

    def points(self, path: Path, text: str) -> list[tuple[str, float, int, int]]:
        """(name, value, milliseconds since 1970, step) of each number in the next lines of a file."""
        if path != self.folder.metrics:
            points, self.samples[path] = parse_samples(text, self.samples.get(path, 0))
            return points
        points, self.elapsed_ms = parse_curves(text, self.elapsed_ms)
        return [(name, value, self.start_ms + ms, step) for name, value, ms, step in points]


def _bound_requests() -> None:
    """Set how long and how often MLflow's client tries, and that it asks no proxy for a server of this machine."""
    os.environ["MLFLOW_HTTP_REQUEST_MAX_RETRIES"] = "0"  # the relay's are longer apart; the default waits 4 minutes
    os.environ["MLFLOW_HTTP_REQUEST_TIMEOUT"] = str(REQUEST_TIMEOUT_S)
    os.environ["MLFLOW_DISABLE_TELEMETRY"] = "true"
    told = (os.environ.get("no_proxy") or os.environ.get("NO_PROXY") or "").split(",")
    os.environ["no_proxy"] = ",".join(filter(None, dict.fromkeys((*told, "127.0.0.1", "localhost"))))


class _Contact:
    """Connection to a server and the run ids known there; replaced after any error."""

    def __init__(self, tracking_uri: str) -> None:
        from mlflow import MlflowClient  # 2 s of imports, in the relay's thread

        self.client: MlflowClient = MlflowClient(tracking_uri)
        experiment = self.client.get_experiment_by_name(EXPERIMENT)
        self.experiment_id: str = experiment.experiment_id if experiment else self.client.create_experiment(EXPERIMENT)
        self.run_ids: dict[str, str] = {}
        self.closed: set[str] = set()  # keys of runs that are complete


class MlflowTracker(Tracker):
    """Jobs and attempts as MLflow runs; sending a row or a curve again changes nothing."""

    def __init__(self, tracking_uri: str, home: Path, known: Known) -> None:
        """Nothing is sent yet. Explanations and pictures of ended jobs come from what is known."""
        self.address = tracking_uri
        self._home, self._known = home, known
        self._contact: _Contact | None = None
        self._curves: dict[str, _Curves] = {}
        self._outputs = Outputs(tracking_uri, home)
        _bound_requests()

    def send(self, rows: Sequence[OutboxRow]) -> None:
        """Bring the job of the rows up to date, with the curves of its attempts."""
        with self._contacted() as contact:
            self._send_job(contact, rows[-1][1].job)

    def refresh(self) -> None:
        """Send new points of running attempts' curves."""
        with self._contacted() as contact:
            for key in self._curves:
                if key in contact.run_ids:  # else somebody deleted the run
                    self._send_curves(contact, key)
            self._outputs.go_on(contact.client)

    def shut_down(self) -> None:
        """Nothing: the server is not ours."""

    def _connect(self) -> _Contact:
        return _Contact(self.address)

    @contextmanager
    def _contacted(self) -> Iterator[_Contact]:
        """The connection, made anew after any error."""
        from mlflow.exceptions import MlflowException

        try:
            if self._contact is None:
                contact = self._connect()
                self._take_up(contact)
                self._contact = contact
            yield self._contact
        except MlflowException as error:
            self._contact = None
            if error.error_code == REFUSED:
                raise
            raise ConnectionError(str(error)) from error  # not reached, or not served
        except Exception:
            self._contact = None
            raise

    def _take_up(self, contact: _Contact) -> None:
        """Continue the curves and copies of what ran before this process began."""
        self._outputs.take_up(contact.client, contact.experiment_id)
        running = contact.client.search_runs([contact.experiment_id], "attributes.status = 'RUNNING'", max_results=1000)
        for run in running:
            tags = run.data.tags
            key, number = tags.get("orc.run", ""), tags.get("orc.attempt", "0")
            if number.isdigit() and number != "0" and "orc.job_id" in tags:
                contact.run_ids.setdefault(key, run.info.run_id)
                folder = JobFolder(self._home, tags["orc.job_id"]).attempt(int(number))
                self._curves.setdefault(key, _Curves(folder=folder, start_ms=run.info.start_time))

    def _send_job(self, contact: _Contact, job: Job) -> None:
        hide, state = hider(job.spec, os.environ), self._known.state()
        own = job_content(job, hide, "")
        compared = self._comparison_tags(contact, job)
        is_recorded = not compared or (job.status.ended and not job.attempts)  # else its attempts stand for it
        parent = self._open(contact, job, 0, own, compared) if is_recorded else ""
        ids = []
        for attempt in job.attempts:
            key = run_key(job, attempt.number)
            said = explain_attempt(state, job, attempt) if attempt.status is AttemptStatus.ENDED else ()
            content = attempt_content(job, attempt, hide, said, observation_of(state, job, attempt))
            if compared:
                content = replace(content, name=strategy_of(attempt.plan), params={**own.params, **content.params})
            tags = compared or {"mlflow.parentRunId": parent}
            ids.append(self._open(contact, job, attempt.number, content, tags))
            if key in contact.closed:
                continue
            folder = JobFolder(self._home, job.id).attempt(attempt.number)
            self._curves.setdefault(key, _Curves(folder=folder, start_ms=content.start_ms))
            self._send_curves(contact, key)
            self._send_content(contact, key, content)
            if attempt.status is AttemptStatus.ENDED:
                del self._curves[key]
        if not is_recorded:
            self._send_comparison(contact, job, compared, hide)
            return
        compare = compare_url(self.address, tuple(ids), contact.experiment_id) if len(ids) > 1 else ""
        picture = picture_of(state, job) if job.status.ended else None
        self._send_content(contact, run_key(job, 0), job_content(job, hide, compare, picture))
        if compared:
            self._send_comparison(contact, job, compared, hide)
        elif job.status is JobStatus.SUCCEEDED:
            self._outputs.ask(contact.client, contact.client.get_run(parent), job.id)

    def _comparison_tags(self, contact: _Contact, job: Job) -> dict[str, str]:
        """Tags of the runs of a strategy of `orc compare`, whose parent is one run of all; empty for other jobs."""
        if job.array is None or job.spec.member is None or not job.spec.member.compared:
            return {}
        key = f"comparison {comparison_key(job)}"
        if key not in contact.run_ids:
            tags = {"orc.run": key, "orc.comparison_of": job.spec.family_name}
            runs = self._find(contact, key)
            run = (
                runs[0]
                if runs
                else contact.client.create_run(
                    contact.experiment_id, start_time=int(1000 * job.submitted_at_s), tags=tags, run_name=job.array
                )
            )
            contact.run_ids[key] = run.info.run_id
        return {"mlflow.parentRunId": contact.run_ids[key], COMPARISON_TAG: comparison_key(job)}

    def _send_comparison(self, contact: _Contact, job: Job, tags: Mapping[str, str], hide: Hide) -> None:
        """End the run of a comparison whose jobs have all ended, with its table, picture and verdict."""
        assert job.spec.member is not None, job.id
        key, run_id, of = tags[COMPARISON_TAG], tags["mlflow.parentRunId"], job.spec.member.of
        found_jobs = [job if job_id == job.id else self._known.job(job_id) for job_id in compared_ids(job)]
        jobs = [one for one in found_jobs if one is not None]
        if len(jobs) < of or not all(one.status.ended for one in jobs):
            return
        runs = compared_runs(contact.client, contact.experiment_id, key)
        if len({run.data.tags.get("orc.job_id") for run in runs if run.info.end_time is not None}) < of:
            return
        curves = {one.id: curve_of(metric_lines(self._home, one)) for one in jobs}
        found = comparison(self._known.state(), jobs, curves)
        link = compare_url(self.address, tuple(run.info.run_id for run in reversed(runs)), contact.experiment_id)
        contact.client.set_tag(run_id, "mlflow.note.content", hide(comparison_note(found, link)))
        rows = json.dumps([asdict(row) for row in found.rows], indent=2)
        contact.client.log_text(run_id, hide(rows), "comparison.json")
        if found.picture is not None:
            picture = figure(f"Strategies of {found.name}", found.picture, "")
            contact.client.log_figure(run_id, picture, "comparison.png")
        contact.client.set_terminated(run_id, "FINISHED")

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
            elif inputs := data_inputs(job, hider(job.spec, os.environ)):
                contact.client.log_inputs(run.info.run_id, inputs)  # the same ones again change nothing
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
        """Send the whole lines that the files of the attempt's curves have grown by."""
        curves = self._curves[key]
        for path in (curves.folder.metrics, *curves.folder.systems()):
            while whole := _next_lines(path, curves.offsets.get(path, 0)):
                kept = replace(curves, samples=dict(curves.samples))
                points = kept.points(path, whole.decode(errors="replace"))
                self._send_points(contact, contact.run_ids[key], points)
                curves.elapsed_ms, curves.samples = kept.elapsed_ms, kept.samples
                curves.offsets[path] = curves.offsets.get(path, 0) + len(whole)

    def _send_points(self, contact: _Contact, run_id: str, points: Sequence[tuple[str, float, int, int]]) -> None:
        from mlflow.entities import Metric

        for first in range(0, len(points), POINTS):
            metrics = [Metric(name, value, at_ms, step) for name, value, at_ms, step in points[first : first + POINTS]]
            contact.client.log_batch(run_id, metrics=metrics)


def _next_lines(path: Path, offset: int) -> bytes:
    """The next whole lines of a file, about CHUNK_BYTES; empty where it has none."""
    try:
        with path.open("rb") as file:
            file.seek(offset)
            chunk = file.read(CHUNK_BYTES)
    except OSError:  # not begun yet, or a script that keeps none
        return b""
    return chunk[: chunk.rfind(b"\n") + 1] or (chunk if len(chunk) == CHUNK_BYTES else b"")


class HomeMlflow(MlflowTracker):
    """MLflow on a local server of the home, which is started and kept running."""

    def __init__(self, home: Path, known: Known) -> None:
        """Start the server, or find the one that runs; nothing waits for it."""
        self._server = MlflowServer(home)
        self._server.ensure_running()
        super().__init__(self._server.uri, home, known)

    def refresh(self) -> None:
        """Keep the server running, and send curves."""
        self._server.ensure_running()
        super().refresh()

    def shut_down(self) -> None:
        """End the server; records stay in the home."""
        self._server.stop()


def data_inputs(job: Job, hide: Hide) -> list[DatasetInput]:
    """The data files that the job names, as inputs of its runs; at most INPUTS_MAX, and none for a script.

    A digest is of the file's path, size and time of change: files of terabytes are not read for it.
    """
    from mlflow.entities import Dataset, DatasetInput, InputTag

    files = job.spec.data.files if job.spec.data is not None else ()
    inputs = []
    for path in files[:INPUTS_MAX]:
        try:
            found = Path(path).stat()
            state = f"{found.st_size} {found.st_mtime_ns}"
        except OSError:  # the service's machine may not have it
            state = ""
        digest = hashlib.sha256(f"{path}\0{state}".encode()).hexdigest()[:16]
        shown = hide(path)
        dataset = Dataset(Path(shown).name, digest, "local", json.dumps({"uri": shown}))
        inputs.append(DatasetInput(dataset, [InputTag("mlflow.data.context", "training")]))
    return inputs


def compared_runs(client: MlflowClient, experiment_id: str, key: str) -> list[Run]:
    """The runs of a comparison's strategies, without their parent."""
    return list(client.search_runs([experiment_id], f"tags.`{COMPARISON_TAG}` = '{key}'", max_results=RUNS_MAX))


def comparison_url(tracking_uri: str, key: str, jobs: int) -> str | None:
    """MLflow's page that shows the strategies of a comparison side by side; None before it has a run of each job."""
    from mlflow.exceptions import MlflowException

    _bound_requests()
    try:
        contact = _Contact(tracking_uri)
        runs = compared_runs(contact.client, contact.experiment_id, key)
    except MlflowException:  # not reached: there is no page either
        return None
    if not runs or len({run.data.tags.get("orc.job_id") for run in runs}) < jobs:
        return None
    return compare_url(tracking_uri, tuple(run.info.run_id for run in reversed(runs)), contact.experiment_id)


def tracker_of(home: Path, known: Known) -> MlflowTracker:
    """The tracker of the server that ORC_MLFLOW named when the service was brought up, else of the home's own."""
    kept = home / ADDRESS_FILE
    return MlflowTracker(kept.read_text().strip(), home, known) if kept.exists() else HomeMlflow(home, known)
