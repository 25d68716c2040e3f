"""Routes of jobs: submit, read, cancel, compare, follow logs, upload and download files."""

from __future__ import annotations

import asyncio
import hashlib
import os
from functools import partial
from pathlib import Path
from typing import Annotated

from fastapi import FastAPI, Header, Query, Request, Response
from fastapi.responses import JSONResponse, StreamingResponse
from pydantic import BaseModel
from starlette.concurrency import run_in_threadpool
from starlette.requests import ClientDisconnect

from orchestrator.backends.attempts.ended_files import describe_removals
from orchestrator.backends.attempts.identity import find_identity
from orchestrator.backends.attempts.metrics import iterate_metric_lines
from orchestrator.backends.mlflow.content import make_comparison_key
from orchestrator.backends.mlflow.tracker import find_comparison_url
from orchestrator.backends.redaction import list_secret_values
from orchestrator.scheduling.reports.comparison import list_compared_job_ids, make_comparison
from orchestrator.scheduling.reports.comparison_rows import parse_loss_curve
from orchestrator.scheduling.reports.deadlines import describe_late_jobs
from orchestrator.scheduling.reports.provenance import describe_provenance
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.intake.intake import check_files, check_packages
from orchestrator.service.server.access.ownership import may_change_jobs_of
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.routes.answers import (
    CancelledAnswer,
    EmptyAnswer,
    JobAnswer,
    JobsAnswer,
    MissingAnswer,
    SubmittedAnswer,
    SweepsAnswer,
    document_answer,
    document_bytes,
)
from orchestrator.service.server.routes.attempt_files import (
    follow_file_with_secrets_masked,
    read_with_secrets_masked,
    view_job,
)
from orchestrator.service.server.routes.dependencies import (
    NUMBER_MAX,
    Forbidden,
    NameObjects,
    Sender,
    Service,
    find_job,
    make_address_for_sender,
)
from orchestrator.service.server.routes.links import MlflowLinks
from orchestrator.service.server.routes.requests import (
    BatchRequest,
    CancelRequest,
    DigestsRequest,
    SubmitRequest,
)
from orchestrator.service.server.routes.waits import Waits
from orchestrator.service.server.sweeps.sweeper import Sweeper
from orchestrator.service.transfer.outputs import list_output_files
from orchestrator.service.transfer.store import Uploads
from orchestrator.service.views.comparison import ComparisonView, make_comparison_view
from orchestrator.service.views.records import (
    BatchAnswer,
    ExplanationView,
    make_display_sort_key,
    make_explanation_view,
    make_promise_view,
    sort_jobs_for_display,
)
from orchestrator.specs.access import Principal
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.errors import ServiceError, SpecError, UnknownError
from orchestrator.specs.events import RequestKey
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.paths import change_paths
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.run import JobFolder

ENDED_SHOWN, ENDED_MAX = 100, 1000  # ended jobs in a response
LIVE_MAX = 500  # live jobs in a response
PLACE = r"^[012],-?\d{1,9},\d{1,18}$"  # as `display_key` has it
WAIT_S_MAX = 10.0  # of a long poll
RECEIVE_S = 900.0  # for an upload to arrive
FOLLOW_S = 20.0  # of a log that is followed: a token that has ended reads no longer than that
IdempotencyKey = Annotated[
    str, Header(max_length=64)
]  # names a submission: sent again, it makes no second job
Rank = Annotated[int, Query(ge=0)]
Offset = Annotated[int, Query(ge=0, le=NUMBER_MAX)]
BYTES_SENT = {
    "requestBody": {
        "content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    }
}


def add_job_routes(app: FastAPI, service: Service, uploads: Uploads, waits: Waits) -> None:
    """Add the routes of jobs, comparisons and sweeps to the application."""
    _add_submission_routes(app, service, uploads)
    _add_view_routes(app, service, waits)
    _add_comparison_route(app, service)
    _add_cancel_route(app, service)
    _add_sweep_routes(app, service)


def _add_submission_routes(app: FastAPI, service: Service, uploads: Uploads) -> None:
    controller = service.controller

    @app.post("/jobs")
    def submit(
        request: SubmitRequest,
        sender: Sender,
        name_objects: NameObjects,
        idempotency_key: IdempotencyKey = "",
    ) -> SubmittedAnswer:
        key = make_request_key(idempotency_key, sender, request)
        job_id = controller.submit(
            *prepare_job_and_fault(request, "the submitted job", sender, uploads, service), key
        )
        name_objects([job_id])
        return {"id": job_id, "late": describe_late_jobs(controller.state, [job_id])}

    @app.post("/jobs/batch")
    def submit_batch(
        request: BatchRequest,
        sender: Sender,
        name_objects: NameObjects,
        idempotency_key: IdempotencyKey = "",
    ) -> BatchAnswer:
        """Submit all jobs or none, in one transaction."""
        key = make_request_key(idempotency_key, sender, request)
        jobs = [
            prepare_job_and_fault(job, f"submitted job {number}", sender, uploads, service)
            for number, job in enumerate(request.jobs, 1)
        ]
        ids = controller.submit_all(jobs, key)
        name_objects(ids)
        submitted = [find_job(controller, job_id) for job_id in ids]
        promises = {job.id: promise for job in submitted if (promise := make_promise_view(job))}
        refused = {job.id: job.reason for job in submitted if job.status is JobStatus.REFUSED}
        return {
            "ids": ids,
            "late": describe_late_jobs(controller.state, ids),
            "promises": promises,
            "refused": refused,
        }


def _add_view_routes(app: FastAPI, service: Service, waits: Waits) -> None:
    controller = service.controller

    @app.get("/jobs")
    def jobs(
        ended: Annotated[int, Query(ge=0, le=ENDED_MAX)] = ENDED_SHOWN,
        before: str | None = None,
        after: Annotated[str | None, Query(pattern=PLACE)] = None,
    ) -> JobsAnswer:
        """Return recently ended jobs, then live jobs, by page; `next` of a page is `after` of the following one.

        A job that starts between two pages is on neither.
        """
        live = sort_jobs_for_display(controller.state.jobs.values()) if before is None else []
        if after is not None:
            place = tuple(map(int, after.split(",")))
            live = [job for job in live if make_display_sort_key(job) > place]
        shown = {job.id: job for job in live[:LIVE_MAX]}
        if after is None:
            shown |= {
                job.id: job for job in controller.list_ended_jobs(ended, before)
            }  # read second, so that no job is missed
        policy = controller.state.policy
        problems = controller.health.list_delays()
        jobs = map(service.reasons.add_wait_reason, sort_jobs_for_display(shown.values()))
        views = [view_job(service.home, job, policy, problems) for job in jobs]
        more = len(live) > LIVE_MAX
        return {
            "jobs": views,
            "next": ",".join(map(str, make_display_sort_key(live[LIVE_MAX - 1]))) if more else None,
        }

    @app.get("/jobs/{job_id}", **document_answer(JobAnswer))
    async def job(
        job_id: str,
        seen: int | None = None,
        wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0,
    ) -> Response:
        await run_in_threadpool(find_job, controller, job_id)
        if seen is not None:
            await waits.wait_until(lambda: controller.version != seen, wait_s)
        return await run_in_threadpool(answer_now, job_id)

    def answer_now(job_id: str) -> Response:
        version = controller.version  # first: nothing is missed
        job = service.reasons.add_wait_reason(find_job(controller, job_id))
        view = view_job(service.home, job, controller.state.policy, controller.health.list_delays())
        view["provenance"] = describe_provenance(job.spec)
        return JSONResponse({"job": view, "version": version})

    @app.get("/jobs/{job_id}/explanation")
    def explanation(job_id: str) -> ExplanationView:
        job = service.reasons.add_wait_reason(find_job(controller, job_id))
        return make_explanation_view(
            controller.state, job, service.reasons.describe_start_of_job(job)
        )


def _add_comparison_route(app: FastAPI, service: Service) -> None:
    links = MlflowLinks(partial(find_comparison_url, service.home))

    @app.get("/jobs/{job_id}/comparison")
    def compared(job_id: str, request: Request) -> ComparisonView:
        """Return the strategies of a comparison, by the id of any of its jobs."""
        jobs = _find_compared_jobs(service, find_job(service.controller, job_id))
        curves = {job.id: parse_loss_curve(iterate_metric_lines(service.home, job)) for job in jobs}
        strategies = make_comparison(service.controller.state, jobs, curves)
        address = service.trackers.get("mlflow")
        ran = sum(bool(job.attempts) for job in jobs)
        link = (
            links.find_cached_url(address, make_comparison_key(jobs[0]), ran)
            if address and ran
            else None
        )
        return make_comparison_view(strategies, link and make_address_for_sender(request, link))


def _add_cancel_route(app: FastAPI, service: Service) -> None:
    controller = service.controller
    sweeper = service.sweeper

    @app.post("/jobs/cancel")
    def cancel(
        request: CancelRequest, sender: Sender, name_objects: NameObjects
    ) -> CancelledAnswer:
        """Cancel jobs, and sweeps by their ids."""
        name_objects(request.jobs)
        sweeps = [job_id for job_id in request.jobs if sweeper.has_sweep(job_id)]
        jobs = [job_id for job_id in request.jobs if job_id not in sweeps]
        trials = [
            trial.job
            for sweep_id in sweeps
            for trial in _find_sweep_report(service, sweep_id).trials
        ]
        for job_id in (*jobs, *trials):
            find_changeable_job(controller, job_id, sender, "cancel")
        if request.whole_arrays:
            sweeps += dict.fromkeys(
                sweep_id for job_id in jobs if (sweep_id := sweeper.find_open_sweep_id(job_id))
            )
            jobs = [job_id for job_id in jobs if sweeper.find_open_sweep_id(job_id) is None]
        cancelled = controller.cancel_jobs(jobs, whole_arrays=request.whole_arrays) if jobs else []
        return {
            "cancelled": cancelled
            + [job_id for sweep_id in sweeps for job_id in sweeper.cancel_sweep(sweep_id)]
        }


def _add_sweep_routes(app: FastAPI, service: Service) -> None:
    @app.get("/sweeps")
    def sweeps() -> SweepsAnswer:
        return {"sweeps": service.sweeper.make_reports()}

    @app.get("/sweeps/{sweep_id}")
    def sweep(sweep_id: str) -> SweepReport:
        return _find_sweep_report(service, sweep_id)


def add_log_routes(app: FastAPI, service: Service, waits: Waits) -> None:
    controller = service.controller

    def file_of(
        job_id: str, number: int, rank: int, sender: Principal
    ) -> tuple[Path, tuple[bytes, ...]]:
        """Return (path of the log, secrets to hide in it). Raises Forbidden for a job of another team."""
        job = find_changeable_job(controller, job_id, sender, "read the logs of")
        attempts = job.attempts
        if not 1 <= number <= len(attempts):
            raise UnknownError(
                f"job {job_id} has {len(attempts)} attempts; there is no attempt {number}"
            )
        ranks = attempts[number - 1].plan.world_size
        if rank >= ranks:
            raise UnknownError(
                f"attempt {number} of {job_id} has ranks 0 to {ranks - 1}; there is no rank {rank}"
            )
        if removed := describe_removals(service.home, job_id, "attempts"):
            raise UnknownError(f"{job_id}: {removed[0]}")
        return JobFolder(service.home, job_id).attempt(number).log(rank), list_secret_values(
            job.spec, os.environ
        )

    @app.get("/jobs/{job_id}/attempts/{number}/logs", **document_bytes("X-Next-Offset"))
    def log(
        job_id: str, number: int, sender: Sender, rank: Rank = 0, offset: Offset = 0
    ) -> Response:
        file, hidden = file_of(job_id, number, rank, sender)
        text = read_with_secrets_masked(file, offset, hidden)
        headers = {"X-Next-Offset": str(offset + len(text))}
        return Response(content=text, media_type="application/octet-stream", headers=headers)

    @app.get("/jobs/{job_id}/attempts/{number}/logs/follow", **document_bytes())
    async def follow(
        job_id: str,
        number: int,
        sender: Sender,
        rank: Rank = 0,
        offset: Offset = 0,
        wait_s: Annotated[float, Query(ge=0, le=FOLLOW_S)] = FOLLOW_S,
    ) -> Response:
        """Stream a rank's log from an offset as it grows, until the attempt has ended, or for `wait_s` seconds."""
        file, hidden = await run_in_threadpool(file_of, job_id, number, rank, sender)

        def is_over() -> bool:
            job = controller.state.jobs.get(job_id)
            return job is None or job.attempts[number - 1].status is AttemptStatus.ENDED

        stream = follow_file_with_secrets_masked(file, offset, hidden, is_over, waits, wait_s)
        return StreamingResponse(stream, media_type="application/octet-stream")


def add_file_routes(app: FastAPI, service: Service, uploads: Uploads) -> None:
    @app.post("/uploads/missing")
    def missing(request: DigestsRequest) -> MissingAnswer:
        return {"missing": uploads.list_missing(request.digests)}

    @app.put("/uploads/{digest}", openapi_extra=BYTES_SENT)
    async def upload(digest: str, request: Request) -> EmptyAnswer:
        with uploads.make_temporary_file_path() as file:
            try:
                async with asyncio.timeout(RECEIVE_S):
                    async for chunk in request.stream():
                        await run_in_threadpool(uploads.append_bytes, file, chunk)
            except TimeoutError:
                raise ServiceError(
                    f"the upload took longer than {RECEIVE_S:.0f} s: submit again"
                ) from None
            except ClientDisconnect:
                raise ServiceError("the upload was cut off") from None
            except OSError as error:
                raise ServiceError(f"the upload cannot be stored: {error.strerror}") from None
            await run_in_threadpool(uploads.store_upload, digest, file)
        return {}

    @app.get("/jobs/{job_id}/output", **document_bytes("X-Output-Bytes", "X-Output-Left-Out"))
    def output(job_id: str, sender: Sender) -> Response:
        """Return the job's output folder as an archive, without uploaded files that did not change."""
        job = find_changeable_job(service.controller, job_id, sender, "fetch the output of")
        listing = list_output_files(service.home, job)
        headers = {
            "Content-Length": str(
                len(listing.make_manifest()) + listing.total_bytes
            ),  # a client sees what is cut off
            "X-Output-Bytes": str(listing.total_bytes),
            "X-Output-Left-Out": str(len(listing.left_out)),
        }
        return StreamingResponse(
            listing.iterate_bytes(), media_type="application/octet-stream", headers=headers
        )


def make_request_key(client_key: str, sender: Principal, request: BaseModel) -> RequestKey | None:
    """Return the key under which a repeated submission is the same one; None without a key of the
    client's.

    It is the client's key with the sender's name, and a digest of the request.
    """
    if not client_key:
        return None
    digest = hashlib.sha256(request.model_dump_json().encode(errors="surrogatepass")).hexdigest()
    return RequestKey(name=f"{sender.name}/{client_key}", digest=digest)


def prepare_job_and_fault(
    request: SubmitRequest, source_name: str, sender: Principal, uploads: Uploads, service: Service
) -> tuple[JobSpec, Fault | None]:
    """Return (the sender's job with uploads resolved to local paths, fault to inject or None).

    For a sweep, the job is its first trial. The home folder's own token may name any user. Raises
    SpecError where the job may not run as its user.
    """
    fault = None if request.fault is None else Fault(**request.fault.model_dump())
    spec = parse_job_data(request.spec, source_name)
    check_packages(spec, source_name)
    if sender.is_owner:
        find_identity(spec.user or "", service.users, source_name)
        return _make_first_trial_of_sweep(spec, service.sweeper), fault
    if spec.user not in (None, sender.name):
        hint = "leave `user` out: the job belongs to the user of the token"
        what = "another user's name"
        raise SpecError(
            what, source=source_name, path="user", got=spec.user, allowed=sender.name, hint=hint
        )
    spec = change_paths(spec, uploads.resolve_path)
    check_files(spec, source_name)
    find_identity(sender.name, service.users, source_name)
    return _make_first_trial_of_sweep(
        spec.model_copy(update={"user": sender.name}), service.sweeper
    ), fault


def _make_first_trial_of_sweep(spec: JobSpec, sweeper: Sweeper) -> JobSpec:
    return spec if spec.trial is None else sweeper.make_first_trial(spec)


def find_changeable_job(controller: Controller, job_id: str, sender: Principal, verb: str) -> Job:
    """Return the job with this id if the sender may change it.

    Raises Forbidden, which names the verb, for a job of another team; UnknownError for an unknown
    id.
    """
    job = find_job(controller, job_id)
    if may_change_jobs_of(job.user, sender, controller.state.policy):
        return job
    raise Forbidden(
        f"{job.id} belongs to {job.user or 'nobody'}: {sender.name} may {verb} jobs of its own team only"
    )


def _find_sweep_report(service: Service, sweep_id: str) -> SweepReport:
    report = service.sweeper.make_report(sweep_id)
    if report is None:
        raise UnknownError(f"there is no sweep {sweep_id!r}. `orc queue` lists them")
    return report


def _find_compared_jobs(service: Service, job: Job) -> list[Job]:
    """Return all jobs of the comparison of strategies to which this job belongs. Raises
    ServiceError if it belongs to none.
    """
    if not job.spec.is_compared:
        raise ServiceError(f"{job.id} belongs to no comparison. `orc compare FILE` makes one")
    return [find_job(service.controller, job_id) for job_id in list_compared_job_ids(job)]
