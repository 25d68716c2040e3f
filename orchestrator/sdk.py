"""Python client in the style of submitit: a Client submits jobs, and a Job can be waited for.

    with Client() as client:
        job = client.submit("job.yaml", priority="high")
        print(job.result()["attempts"][-1]["peak_bytes"])

AsyncClient and AsyncJob are the same with `await`. `plan`, `estimate`, `fit` and `export` need no service:

    from orchestrator import sdk
    answer = sdk.plan("job.yaml", gpu="2xrtx3090")
    print(answer["frontier"][answer["chosen"] or 0]["plan"])
"""

from __future__ import annotations

import asyncio
import json
import os
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Mapping, Sequence
from contextlib import asynccontextmanager, contextmanager
from functools import partial, wraps
from pathlib import Path
from typing import TYPE_CHECKING, Any, Concatenate, ParamSpec, TypeVar

from orchestrator.service.client.client import LONG_POLL_S
from orchestrator.service.client.client import Client as Connection
from orchestrator.service.client.logins import Login, find_login
from orchestrator.service.client.sending import read_and_upload_jobs
from orchestrator.service.intake.intake import JobSource, add_time_zones
from orchestrator.service.terminal.follow import ENDS, iterate_attempt_numbers_and_log
from orchestrator.service.views.records import JobView, get_failure_excerpt
from orchestrator.specs.cluster import Node
from orchestrator.specs.errors import OrchestratorError, ServiceError, SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.observation import Observation
from orchestrator.specs.parse import Override
from orchestrator.specs.run import DEFAULT_HOME

if TYPE_CHECKING:  # planning is loaded where it is asked for
    from orchestrator.scheduling.reports.morning import MorningReport
    from orchestrator.service.commands.fit import FitRow
    from orchestrator.service.commands.plan import CandidateView, JobPlans

__all__ = [
    "AsyncClient",
    "AsyncJob",
    "Client",
    "Job",
    "JobFailed",
    "estimate",
    "export",
    "fit",
    "plan",
]

Arguments = ParamSpec("Arguments")
Answer = TypeVar("Answer")
JobInput = str | Path | Mapping[str, Any]  # a job file's path, or its content


def plan(
    job: JobInput, *, gpu: str | None = None, cluster: str | Path | None = None, **overrides: Any
) -> JobPlans:
    """Return the plan that a job would get, its frontier, and what would fit: the JSON of `orc
    plan`.

    `gpu` names cards of the catalogue, such as `2xa100-80gb`; `cluster` a cluster file. Without
    both, the hardware is the live cluster, or this machine. Raises SpecError for bad input and for
    too few devices.
    """
    from orchestrator.service.commands.plan import plan_job

    spec, nodes, observations = _read_job_nodes_and_observations(job, gpu, cluster, overrides)
    return plan_job(spec, nodes, observations)


def export(
    job: JobInput,
    folder: str | Path,
    *,
    gpu: str | None = None,
    cluster: str | Path | None = None,
    **overrides: Any,
) -> Path:
    """Write the plan that a script's job would get as files that run without this service; return
    the path of their `run.sh`.

    The hardware is selected as in `plan`. Raises SpecError where no plan fits, and for a folder
    that has files.
    """
    from orchestrator.service.commands.plan import export_job

    spec, nodes, observations = _read_job_nodes_and_observations(job, gpu, cluster, overrides)
    return export_job(spec, nodes, observations, Path(folder))


def estimate(
    job: JobInput,
    settings: Mapping[str, Any],
    *,
    gpu: str | None = None,
    cluster: str | Path | None = None,
) -> CandidateView:
    """Return the bytes and seconds of one plan, such as `{"zero_stage": 3, "dp": 8}`: the JSON of
    `orc estimate`.

    The hardware is selected as in `plan`. Raises SpecError for a plan that the job cannot have.
    """
    from orchestrator.service.commands.plan import estimate_plan

    spec, nodes, observations = _read_job_nodes_and_observations(job, gpu, cluster, {})
    return estimate_plan(spec, _format_overrides(settings), nodes, observations)


def fit(job: JobInput, **overrides: Any) -> list[FitRow]:
    """Return the rows of `orc fit`: on which cards of the catalogue a job has a plan, and on how
    few cards.

    `hf:NAME` is a transformers model. Raises SpecError for bad input.
    """
    from orchestrator.service.commands.fit import read_job_and_fit_rows

    source = job if isinstance(job, str) and job.startswith("hf:") else _job_source(job)
    return read_job_and_fit_rows(source, _format_overrides(overrides))[1]


def _read_job_nodes_and_observations(
    job: JobInput, gpu: str | None, cluster: str | Path | None, overrides: Mapping[str, Any]
) -> tuple[JobSpec, Sequence[Node], Sequence[Observation]]:
    """Return (job, nodes to plan for, measurements made on them)."""
    from orchestrator.service.commands.hardware import select_nodes_and_observations
    from orchestrator.service.commands.plan import make_trace_scope
    from orchestrator.service.intake.intake import read_job

    path = None if cluster is None else Path(cluster).expanduser()
    nodes, observations = select_nodes_and_observations(_select_home_or_login(None), path, gpu)
    scope = partial(make_trace_scope, nodes)
    spec = read_job(_job_source(job), _format_overrides(overrides), to_run=False, trace_scope=scope)
    return spec, nodes, observations


def _job_source(job: JobInput) -> JobSource:
    return Path(job).expanduser() if isinstance(job, str) else job


class JobFailed(OrchestratorError):
    """A job that ended without success; the attribute `job` is its record."""

    def __init__(self, job: JobView) -> None:
        self.job = job
        super().__init__(
            f"{job['id']} {job['status']}: {job['reason']}\n{get_failure_excerpt(job)}".rstrip()
        )


class Client:
    """A client of the service at a URL (after `orc login`) or of a home folder; None: that of
    ORC_SERVER or ORC_HOME.

    Several threads may use it, but a batch belongs to one thread. Raises ServiceError where the
    service does not answer.
    """

    def __init__(self, service: str | Path | None = None) -> None:
        self._service = _select_home_or_login(service)
        self._connection = Connection(self._service)
        self._batch: list[tuple[JobSpec, Job]] | None = None

    def submit(self, job: JobInput, **overrides: Any) -> Job:
        """Submit one job, and return it. `job` is a job file's path, or a mapping with its content.

        `overrides` replace keys, nested ones by their dotted path. Raises SpecError for bad input; nothing is then
        submitted. Paths in a mapping are relative to the current folder.
        """
        (spec,) = self._read(job, overrides, only_one=True)
        return self._submit_specs([spec])[0]

    def map_array(self, job: JobInput, **values: Sequence[Any]) -> list[Job]:
        """Submit an array: one job per row of `values`, which replace `{placeholders}`.

        Returns all jobs; see `submit`.
        """
        lengths = {name: len(column) for name, column in values.items()}
        if not values or len(set(lengths.values())) != 1 or 0 in lengths.values():
            raise SpecError(
                "as many values for each name, at least one", source="map_array", got=lengths
            )
        rows = [dict(zip(values, row, strict=True)) for row in zip(*values.values(), strict=True)]
        return self._submit_specs(self._read(job, {"array": rows}, only_one=False))

    @contextmanager
    def batch(self) -> Iterator[None]:
        """Open a block at whose end all jobs submitted in it are submitted together, all or none.

        After an exception none is submitted.
        """
        if self._batch is not None:
            raise ServiceError("a batch is open already: end it first")
        collected: list[tuple[JobSpec, Job]] = []
        self._batch = collected
        try:
            yield
        finally:
            self._batch = None
        if collected:
            for (_, job), job_id in zip(
                collected, self._send([spec for spec, _ in collected]), strict=True
            ):
                job._id = job_id

    def job(self, job_id: str) -> Job:
        """Return a job that was submitted before. Raises ServiceError where there is none."""
        self._connection.fetch_job_and_version(job_id)
        return Job(self._connection, job_id)

    def queue(self, ended: int = 100) -> list[JobView]:
        """Return the records of all live jobs, in the order of `orc queue`, and of at most `ended`
        jobs that ended last.
        """
        return self._connection.list_jobs(ended)

    def report(self, since_s: float) -> MorningReport:
        """Return the morning report since `since_s` (seconds since 1970), the JSON of `orc
        report`.
        """
        return self._connection.fetch_morning_report(since_s)

    def close(self) -> None:
        """Close the connection; submitted jobs continue."""
        self._connection.close()

    def __enter__(self) -> Client:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _read(
        self, job: JobInput, overrides: Mapping[str, Any], *, only_one: bool
    ) -> list[JobSpec]:
        home = self._service if isinstance(self._service, Path) else None
        sources = [_job_source(job)]
        settings = _format_overrides(overrides)
        return read_and_upload_jobs(self._service, sources, settings, home, only_one=only_one)

    def _submit_specs(self, specs: Sequence[JobSpec]) -> list[Job]:
        if self._batch is not None:
            jobs = [Job(self._connection, None) for _ in specs]
            self._batch += zip(specs, jobs, strict=True)
            return jobs
        return [Job(self._connection, job_id) for job_id in self._send(specs)]

    def _send(self, specs: Sequence[JobSpec]) -> list[str]:
        return self._connection.submit_jobs([spec.model_dump(mode="json") for spec in specs])["ids"]


class Job:
    """A submitted job. Raises ServiceError where the service does not answer."""

    def __init__(self, connection: Connection, job_id: str | None) -> None:
        self._connection = connection
        self._id = job_id

    @property
    def id(self) -> str:
        """The job's id, as `orc queue` shows it. Raises ServiceError within its batch."""
        if self._id is None:
            raise ServiceError("the job has no id before its batch ends")
        return self._id

    def info(self) -> JobView:
        """Return the job's record: its status, its reason, and its attempts with plan, prediction
        and measurement.
        """
        return self._connection.fetch_job_and_version(self.id)[0]

    def status(self) -> str:
        """Return the job's status: `queued`, `running`, `succeeded`, `failed`, `refused` or
        `cancelled`.
        """
        return self.info()["status"]

    def done(self) -> bool:
        """Return whether the job has ended, with or without success."""
        return self.status() in ENDS

    def wait(self, timeout: float | None = None) -> JobView:
        """Wait until the job ends, and return its record. Raises TimeoutError after `timeout` seconds."""
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        job, version = self._connection.fetch_job_and_version(self.id)
        while job["status"] not in ENDS:
            left_s = until_s - time.monotonic()
            if left_s <= 0:
                raise TimeoutError(f"{self.id} is {job['status']} after {timeout} s")
            job, version = self._connection.fetch_job_and_version(
                self.id, version, min(LONG_POLL_S, left_s)
            )
        return job

    def result(self, timeout: float | None = None) -> JobView:
        """Wait until the job succeeds, and return its record.

        Raises JobFailed for another end, TimeoutError as `wait`.
        """
        return _check_success(self.wait(timeout))

    def cancel(self) -> None:
        """Request the job's cancellation. Raises ServiceError where it has ended."""
        self._connection.cancel_jobs([self.id], whole_arrays=False)

    def hold(self) -> None:
        """Keep the waiting job from starting until `release`. Raises ServiceError where it runs or
        has ended.
        """
        self._connection.change_jobs("hold", [self.id])

    def release(self) -> None:
        """Let the held job start. Raises ServiceError where it has ended."""
        self._connection.change_jobs("release", [self.id])

    def suspend(self) -> None:
        """Make the job save a checkpoint, free its devices, and wait for `resume`. Raises
        ServiceError where it has ended.
        """
        self._connection.change_jobs("suspend", [self.id])

    def resume(self) -> None:
        """Let the suspended job continue. Raises ServiceError where it has ended."""
        self._connection.change_jobs("resume", [self.id])

    def update(self, **settings: Any) -> None:
        """Change the job's `priority`, `deadline` or `time_limit`. Raises SpecError for other keys,
        ServiceError after its end.
        """
        self._connection.update_job(self.id, add_time_zones(_format_overrides(settings)))

    def retry(self, **overrides: Any) -> Job:
        """Submit the ended job again, with overrides as in `Client.submit`; return the new job.
        Raises ServiceError before its end.

        It continues from its newest checkpoint unless the overrides change the training; `info()`
        says whether it does.
        """
        answer = self._connection.retry_job(self.id, add_time_zones(_format_overrides(overrides)))
        return Job(self._connection, answer["id"])

    def logs(self, attempt: int | None = None, rank: int = 0) -> str:
        """Return the log of a rank so far: of the attempt with this number, counted from 1, or of
        the last attempt.
        """
        return "".join(
            text
            for _, text in iterate_attempt_numbers_and_log(
                self._connection, self.id, attempt, rank, until_end=False
            )
        )

    def follow(self, rank: int = 0) -> Iterator[str]:
        """Yield the log of a rank piece by piece as it grows, over all attempts, until the job
        ends.
        """
        for _, text in iterate_attempt_numbers_and_log(
            self._connection, self.id, None, rank, until_end=True
        ):
            yield text

    def fetch(self, to: str | Path) -> Path:
        """Download the job's output to the new folder `to`, all or nothing; return that folder."""
        folder = Path(to).expanduser()
        self._connection.download_output_and_count(self.id, folder)
        return folder


def _make_thread_coroutine(
    method: Callable[Concatenate[Any, Arguments], Answer], attribute_of_object: str
) -> Callable[Concatenate[Any, Arguments], Coroutine[Any, Any, Answer]]:
    """Return a coroutine function that runs this method, of the object in `self.<attribute>`, in a
    thread.
    """

    @wraps(method)
    async def call(own: Any, /, *args: Arguments.args, **keywords: Arguments.kwargs) -> Answer:
        return await asyncio.to_thread(method, getattr(own, attribute_of_object), *args, **keywords)

    return call


class AsyncClient:
    """The same client as `Client`, with coroutines; each request runs in a thread."""

    queue = _make_thread_coroutine(Client.queue, "_client")
    report = _make_thread_coroutine(Client.report, "_client")
    close = _make_thread_coroutine(Client.close, "_client")

    def __init__(self, service: str | Path | None = None) -> None:
        self._client = Client(service)

    async def submit(self, job: JobInput, **overrides: Any) -> AsyncJob:
        """Submit a job, as `Client.submit` does."""
        return AsyncJob(await asyncio.to_thread(self._client.submit, job, **overrides))

    async def map_array(self, job: JobInput, **values: Sequence[Any]) -> list[AsyncJob]:
        """Submit an array of jobs, as `Client.map_array` does."""
        return [
            AsyncJob(new_job)
            for new_job in await asyncio.to_thread(self._client.map_array, job, **values)
        ]

    @asynccontextmanager
    async def batch(self) -> AsyncIterator[None]:
        """Submit jobs together, as `Client.batch` does."""
        batch = self._client.batch()
        batch.__enter__()
        try:
            yield
        except BaseException as error:  # handed to the batch, which leaves itself
            batch.__exit__(type(error), error, error.__traceback__)
            raise
        await asyncio.to_thread(batch.__exit__, None, None, None)

    async def job(self, job_id: str) -> AsyncJob:
        """Return an earlier job, as `Client.job` does."""
        return AsyncJob(await asyncio.to_thread(self._client.job, job_id))

    async def __aenter__(self) -> AsyncClient:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class AsyncJob:
    """The same job as `Job`, with coroutines."""

    info = _make_thread_coroutine(Job.info, "_job")
    status = _make_thread_coroutine(Job.status, "_job")
    done = _make_thread_coroutine(Job.done, "_job")
    cancel = _make_thread_coroutine(Job.cancel, "_job")
    hold = _make_thread_coroutine(Job.hold, "_job")
    release = _make_thread_coroutine(Job.release, "_job")
    suspend = _make_thread_coroutine(Job.suspend, "_job")
    resume = _make_thread_coroutine(Job.resume, "_job")
    logs = _make_thread_coroutine(Job.logs, "_job")
    fetch = _make_thread_coroutine(Job.fetch, "_job")

    def __init__(self, job: Job) -> None:
        self._job = job

    @property
    def id(self) -> str:
        """The job's id; see `Job.id`."""
        return self._job.id

    async def wait(self, timeout: float | None = None) -> JobView:
        """Wait until the job ends, as `Job.wait` does. Cancelling the task stops the wait; the job
        continues.
        """
        until_s = float("inf") if timeout is None else time.monotonic() + timeout
        while True:  # in pieces, so that no thread outlives a cancelled task for long
            left_s = until_s - time.monotonic()
            try:
                return await asyncio.to_thread(self._job.wait, max(0.0, min(LONG_POLL_S, left_s)))
            except TimeoutError:
                if left_s <= LONG_POLL_S:
                    raise

    async def result(self, timeout: float | None = None) -> JobView:
        """Wait for success, as `Job.result` does."""
        return _check_success(await self.wait(timeout))

    async def update(self, **settings: Any) -> None:
        """Change settings, as `Job.update` does."""
        await asyncio.to_thread(self._job.update, **settings)

    async def retry(self, **overrides: Any) -> AsyncJob:
        """Submit the job again, as `Job.retry` does."""
        return AsyncJob(await asyncio.to_thread(self._job.retry, **overrides))


def _select_home_or_login(service: str | Path | None) -> Path | Login:
    """Return the home folder, or the stored login where a URL is given."""
    target = service or os.environ.get("ORC_SERVER") or os.environ.get("ORC_HOME") or DEFAULT_HOME
    return (
        find_login(target)
        if isinstance(target, str) and "://" in target
        else Path(target).expanduser()
    )


def _format_overrides(overrides: Mapping[str, Any]) -> tuple[Override, ...]:
    """Return overrides in the form of `--set`: (dotted key, value as JSON text). JSON is YAML."""
    try:
        return tuple((key, json.dumps(value)) for key, value in overrides.items())
    except (TypeError, ValueError) as error:
        raise SpecError(f"not what a job file can say: {error}", source="overrides") from None


def _check_success(job: JobView) -> JobView:
    if job["status"] != "succeeded":
        raise JobFailed(job)
    return job
