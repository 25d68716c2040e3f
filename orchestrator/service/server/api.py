"""The HTTP API of the service. Every route but /healthz and /readyz needs a token, and a role that `ROLES` names."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from fastapi import Depends, FastAPI, Header, Query, Request, Response
from fastapi import Path as PathField
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect

from orchestrator.backends.attempts.metrics import metric_lines
from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.mlflow.content import comparison_key
from orchestrator.backends.mlflow.tracker import comparison_url
from orchestrator.scheduling.base.held_devices import holders
from orchestrator.scheduling.reports.comparison import compared_ids, comparison, curve_of
from orchestrator.scheduling.reports.deadlines import late
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.service.server.answers import (
    REFUSALS,
    AuditAnswer,
    BatchAnswer,
    CancelledAnswer,
    ClusterAnswer,
    EmptyAnswer,
    ErrorAnswer,
    JobAnswer,
    JobsAnswer,
    JoinAnswer,
    KeptAnswer,
    MissingAnswer,
    NewTokenAnswer,
    PlainRoute,
    ReadyAnswer,
    ShutdownAnswer,
    StatusAnswer,
    SubmittedAnswer,
    SweepsAnswer,
    TeamsAnswer,
    TokensAnswer,
    TriedAnswer,
    UsersAnswer,
    WhoAnswer,
    answers,
    answers_bytes,
)
from orchestrator.service.server.attempt_files import beats, followed, read_from, view_of
from orchestrator.service.server.client import user_name
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.ended import report_of
from orchestrator.service.server.endpoint import LOOPBACK
from orchestrator.service.server.gate import Gate, Gated, limiter, refusal
from orchestrator.service.server.intake import check_files
from orchestrator.service.server.join_token import secret_of
from orchestrator.service.server.links import Links
from orchestrator.service.server.members import Members, machine
from orchestrator.service.server.metrics import MEDIA_TYPE, Metrics
from orchestrator.service.server.notifier import Notifier
from orchestrator.service.server.ownership import may_change
from orchestrator.service.server.requests import (
    BatchRequest,
    CancelRequest,
    DigestsRequest,
    DrainRequest,
    NodeRequest,
    ObserveRequest,
    ShutdownRequest,
    SubmitRequest,
    TokenRequest,
    TryRequest,
    UserRequest,
)
from orchestrator.service.server.sessions import Sessions
from orchestrator.service.server.sweeper import Sweeper
from orchestrator.service.server.tracing import Tracing
from orchestrator.service.server.waits import Waits
from orchestrator.service.transfer.outputs import output_of
from orchestrator.service.transfer.store import BODY_BYTES_MAX as UPLOAD_BYTES_MAX
from orchestrator.service.transfer.store import Uploads
from orchestrator.service.views.comparison import ComparisonView, comparison_view
from orchestrator.service.views.morning import ReportView
from orchestrator.service.views.records import (
    ExplanationView,
    explanation_view,
    in_order,
    node_view,
    observations_from_view,
    observations_view,
    promise_view,
)
from orchestrator.service.views.sweeps import SweepView, sweep_view
from orchestrator.service.views.teams import teams_view
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.attempt import AttemptStatus
from orchestrator.specs.errors import OrchestratorError, ServiceError, SpecError, StorageError
from orchestrator.specs.fault import Fault
from orchestrator.specs.job.paths import paths_of, with_paths
from orchestrator.specs.job.spec import JobSpec, UserName
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import job_from_data, node_from_data
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.run import JobFolder, uploaded

if TYPE_CHECKING:
    from orchestrator.backends.oidc.provider import Provider

ENDED_SHOWN, ENDED_MAX = 100, 1000  # ended jobs in a response
WAIT_S_MAX = 10.0  # of a long poll
RECEIVE_S = 900.0  # for an upload to arrive
NUMBER_MAX = 2**63 - 1  # of a row in SQL, and of an offset in a file
NEVER_SEEN = -1  # a version that no state has

FOLLOW_S = 20.0  # of a log that is followed: a token that has ended reads no longer than that

Traceparent = Annotated[str, Header(max_length=256)]  # W3C Trace Context
Rank = Annotated[int, Query(ge=0)]
Offset = Annotated[int, Query(ge=0, le=NUMBER_MAX)]

ROLES = {  # needed by each route; one that is missing here needs an admin
    ("GET", "/openapi.json"): Role.VIEWER,
    ("GET", "/whoami"): Role.VIEWER,
    ("GET", "/jobs"): Role.VIEWER,
    ("GET", "/jobs/{job_id}"): Role.VIEWER,
    ("GET", "/jobs/{job_id}/explanation"): Role.VIEWER,
    ("GET", "/jobs/{job_id}/comparison"): Role.VIEWER,
    ("GET", "/jobs/{job_id}/attempts/{number}/logs"): Role.VIEWER,
    ("GET", "/jobs/{job_id}/attempts/{number}/logs/follow"): Role.VIEWER,
    ("GET", "/jobs/{job_id}/output"): Role.MEMBER,  # of its own team
    ("GET", "/sweeps"): Role.VIEWER,
    ("GET", "/sweeps/{sweep_id}"): Role.VIEWER,
    ("GET", "/cluster"): Role.VIEWER,
    ("GET", "/teams"): Role.VIEWER,
    ("GET", "/report"): Role.VIEWER,
    ("GET", "/metrics"): Role.VIEWER,
    ("POST", "/jobs"): Role.MEMBER,
    ("POST", "/jobs/batch"): Role.MEMBER,
    ("POST", "/jobs/cancel"): Role.MEMBER,  # of its own team
    ("POST", "/uploads/missing"): Role.MEMBER,
    ("PUT", "/uploads/{digest}"): Role.MEMBER,
    ("POST", "/nodes/{node}/drain"): Role.OPERATOR,
    ("POST", "/observations"): Role.OPERATOR,
    ("POST", "/notify/test"): Role.OPERATOR,
    ("GET", "/join"): Role.OPERATOR,
    ("POST", "/nodes"): Role.OPERATOR,
    ("DELETE", "/nodes/{node}"): Role.OPERATOR,
}
JOINING = frozenset(  # for which the token of joining machines is enough
    {
        ("GET", "/join"),
        ("GET", "/cluster"),
        ("POST", "/nodes"),
        ("POST", "/nodes/{node}/drain"),
        ("DELETE", "/nodes/{node}"),
    }
)


BYTES_SENT = {
    "requestBody": {"content": {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}}
}
EXPOSITION: dict[str, Any] = {
    "response_model": None,
    "response_class": Response,
    "responses": {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
}
READY: dict[str, Any] = {
    "response_model": None,
    "responses": {200: {"model": ReadyAnswer}, 503: {"model": ErrorAnswer, "description": "It may not decide yet."}},
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Pages:
    """What people look at beside the API: `add` adds the routes, `roles` has the role that each needs."""

    roles: Mapping[tuple[str, str], Role]
    headers: Mapping[str, str]  # of each page
    refused: Callable[[Request, int, str], Response]  # the page of a refusal
    add: Callable[[FastAPI, Controller, Path, Gate, Provider | None], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class Service:
    """What the routes use: the controller, the accounts, the home folder with its token, and the shutdown."""

    controller: Controller
    accounts: Accounts
    home: Path
    token: str  # of the home folder: its holder is an admin
    cluster: str  # name of the cluster
    trackers: Mapping[str, str]  # name -> address
    shut_down: Callable[[], None]
    sweeper: Sweeper
    hosts: frozenset[str] = LOOPBACK  # that a Host header may name
    members: Members | None = None  # machines that join; None: the Ray is not the service's own
    pages: Pages | None = None  # that people look at; None: the API alone
    notifier: Notifier | None = None  # None: the cluster file names no target
    tracing: Tracing | None = None  # None: nobody receives traces
    provider: Provider | None = None  # that signs people in at the pages; None: tokens alone


def create_app(service: Service) -> FastAPI:
    """The application; wrong token 401, wrong Host or role 403, unknown object 404, bad input 422, refusal 409."""
    app = FastAPI(title="orc", version=version("orchestrator"), docs_url=None, redoc_url=None, responses=REFUSALS)
    gate = Gate(
        owner_token=service.token,
        owner=user_name(),
        accounts=service.accounts,
        hosts=service.hosts,
        roles=ROLES if service.pages is None else {**ROLES, **service.pages.roles},
        body_bytes_max={("PUT", "/uploads/{digest}"): UPLOAD_BYTES_MAX},
        rates=limiter(),
        joining=JOINING,
        join_secret=lambda: secret_of(service.home),
        sessions=Sessions(owner_token=service.token, owner=user_name(), accounts=service.accounts),
        pages=service.pages,
    )
    app.add_middleware(Gated, gate=gate)
    app.router.route_class = PlainRoute
    app.exception_handler(OrchestratorError)(_refused)
    app.exception_handler(RequestValidationError)(_malformed)
    app.exception_handler(HTTPException)(_unrouted)
    uploads = Uploads(service.home, lambda: _used_uploads(service))
    waits = Waits(service.controller.wait_for_change)
    _add_job_routes(app, service, uploads, waits)
    _add_log_routes(app, service, waits)
    _add_file_routes(app, service, uploads)
    _add_service_routes(app, service)
    _add_member_routes(app, service)
    _add_account_routes(app, service.accounts)
    if service.pages is not None:
        service.pages.add(app, service.controller, service.home, gate, service.provider)
    return app


# ------------------------------------------------------------------------------------------------------------- routes


def _add_job_routes(app: FastAPI, service: Service, uploads: Uploads, waits: Waits) -> None:
    controller, links = service.controller, Links(comparison_url)

    @app.post("/jobs", **answers(SubmittedAnswer))
    def submit(request: SubmitRequest, sender: Sender, traceparent: Traceparent = "") -> dict[str, Any]:
        began_s = time.time()
        job_id = controller.submit(*_asked(request, "the submitted job", sender, uploads, service.sweeper))
        if service.tracing is not None:
            service.tracing.submitted([job_id], began_s, traceparent)
        return {"id": job_id, "late": late(controller.state, [job_id])}

    @app.post("/jobs/batch", **answers(BatchAnswer))
    def submit_batch(request: BatchRequest, sender: Sender, traceparent: Traceparent = "") -> dict[str, Any]:
        """Submit all jobs or none, in one transaction."""
        began_s = time.time()
        asked = [
            _asked(one, f"submitted job {number}", sender, uploads, service.sweeper)
            for number, one in enumerate(request.jobs, 1)
        ]
        ids = controller.submit_all(asked)
        if service.tracing is not None:
            service.tracing.submitted(ids, began_s, traceparent)
        promises = {job_id: promise for job_id in ids if (promise := promise_view(job_of(service.controller, job_id)))}
        return {"ids": ids, "late": late(controller.state, ids), "promises": promises}

    @app.get("/jobs", **answers(JobsAnswer))
    def jobs(
        ended: Annotated[int, Query(ge=0, le=ENDED_MAX)] = ENDED_SHOWN, before: str | None = None
    ) -> dict[str, Any]:
        known = dict(controller.state.jobs) if before is None else {}
        known |= {job.id: job for job in controller.ended(ended, before)}  # read second, so that no job is missed
        policy, problems = controller.state.policy, controller.health.problems()
        return {"jobs": [view_of(service.home, job, policy, problems) for job in in_order(known.values())]}

    @app.get("/jobs/{job_id}", **answers(JobAnswer))
    async def job(
        job_id: str, seen: int | None = None, wait_s: Annotated[float, Query(ge=0, le=WAIT_S_MAX)] = 0
    ) -> Response:
        await run_in_threadpool(job_of, controller, job_id)
        if seen is not None:
            await waits.until(lambda: controller.version != seen, wait_s)
        return await run_in_threadpool(now, job_id)

    def now(job_id: str) -> Response:
        version, found = controller.version, job_of(controller, job_id)  # in this order: nothing is missed
        view = view_of(service.home, found, controller.state.policy, controller.health.problems())
        return JSONResponse({"job": view, "version": version})

    @app.get("/jobs/{job_id}/explanation", **answers(ExplanationView))
    def explanation(job_id: str) -> dict[str, Any]:
        return dict(explanation_view(controller.state, job_of(service.controller, job_id)))

    @app.get("/jobs/{job_id}/comparison", **answers(ComparisonView))
    def compared(job_id: str) -> dict[str, Any]:
        """The strategies of `orc compare`, by the id of one of their jobs."""
        jobs = _compared(service, job_of(service.controller, job_id))
        curves = {one.id: curve_of(metric_lines(service.home, one)) for one in jobs}
        found = comparison(controller.state, jobs, curves)
        address, ran = service.trackers.get("mlflow"), sum(bool(one.attempts) for one in jobs)
        link = links.of(address, comparison_key(jobs[0]), ran) if address and ran else None
        return dict(comparison_view(found, link))

    @app.post("/jobs/cancel", **answers(CancelledAnswer))
    def cancel(request: CancelRequest, sender: Sender) -> dict[str, Any]:
        """Cancel jobs, and sweeps by their ids."""
        sweeps = [job_id for job_id in request.jobs if service.sweeper.knows(job_id)]
        jobs = [job_id for job_id in request.jobs if job_id not in sweeps]
        of_sweeps = [one.job for sweep_id in sweeps for one in _sweep(service, sweep_id).trials]
        for job_id in (*jobs, *of_sweeps):
            _refuse_other_teams(job_of(service.controller, job_id), sender, controller.state.policy, "cancel")
        if request.whole_arrays:
            found = {sweep_id: job_id for job_id in jobs if (sweep_id := service.sweeper.sweep_of(job_id))}
            sweeps += found
            jobs = [job_id for job_id in jobs if service.sweeper.sweep_of(job_id) is None]
        cancelled = controller.cancel(jobs, whole_arrays=request.whole_arrays) if jobs else []
        return {"cancelled": cancelled + [job_id for sweep_id in sweeps for job_id in service.sweeper.cancel(sweep_id)]}

    @app.get("/sweeps", **answers(SweepsAnswer))
    def sweeps() -> dict[str, Any]:
        return {"sweeps": [sweep_view(one) for one in service.sweeper.reports()]}

    @app.get("/sweeps/{sweep_id}", **answers(SweepView))
    def sweep(sweep_id: str) -> dict[str, Any]:
        return dict(sweep_view(_sweep(service, sweep_id)))


def _add_log_routes(app: FastAPI, service: Service, waits: Waits) -> None:
    controller = service.controller

    def file_of(job_id: str, number: int, rank: int) -> Path:
        attempts = job_of(controller, job_id).attempts
        if not 1 <= number <= len(attempts):
            raise _Unknown(f"job {job_id} has {len(attempts)} attempts; there is no attempt {number}")
        ranks = attempts[number - 1].plan.world_size
        if rank >= ranks:
            raise _Unknown(f"attempt {number} of {job_id} has ranks 0 to {ranks - 1}; there is no rank {rank}")
        return JobFolder(service.home, job_id).attempt(number).log(rank)

    @app.get("/jobs/{job_id}/attempts/{number}/logs", **answers_bytes("X-Next-Offset"))
    def log(job_id: str, number: int, rank: Rank = 0, offset: Offset = 0) -> Response:
        text = read_from(file_of(job_id, number, rank), offset)
        headers = {"X-Next-Offset": str(offset + len(text))}
        return Response(content=text, media_type="application/octet-stream", headers=headers)

    @app.get("/jobs/{job_id}/attempts/{number}/logs/follow", **answers_bytes())
    async def follow(
        job_id: str,
        number: int,
        rank: Rank = 0,
        offset: Offset = 0,
        wait_s: Annotated[float, Query(ge=0, le=FOLLOW_S)] = FOLLOW_S,
    ) -> Response:
        """The log from an offset, as it grows: until the attempt has ended, or for `wait_s`."""
        file = await run_in_threadpool(file_of, job_id, number, rank)

        def is_over() -> bool:
            job = controller.state.jobs.get(job_id)
            return job is None or job.attempts[number - 1].status is AttemptStatus.ENDED

        stream = followed(file, offset, is_over, waits, wait_s)
        return StreamingResponse(stream, media_type="application/octet-stream")


def _add_file_routes(app: FastAPI, service: Service, uploads: Uploads) -> None:
    @app.post("/uploads/missing", **answers(MissingAnswer))
    def missing(request: DigestsRequest) -> dict[str, Any]:
        return {"missing": uploads.missing(request.digests)}

    @app.put("/uploads/{digest}", **answers(EmptyAnswer), openapi_extra=BYTES_SENT)
    async def upload(digest: str, request: Request) -> dict[str, Any]:
        with uploads.receiving() as file:
            try:
                async with asyncio.timeout(RECEIVE_S):
                    await _received(request, file)
            except TimeoutError:
                raise ServiceError(f"the upload took longer than {RECEIVE_S:.0f} s: submit again") from None
            except ClientDisconnect:
                raise ServiceError("the upload was cut off") from None
            except OSError as error:
                raise ServiceError(f"the upload cannot be stored: {error.strerror}") from None
            await run_in_threadpool(uploads.store, digest, file)
        return {}

    @app.get("/jobs/{job_id}/output", **answers_bytes("X-Output-Bytes", "X-Output-Left-Out"))
    def output(job_id: str, sender: Sender) -> Response:
        """The job's output folder as an archive; what came by upload and was not changed is left out."""
        job = job_of(service.controller, job_id)
        _refuse_other_teams(job, sender, service.controller.state.policy, "fetch the output of")
        listing = output_of(service.home, job)
        headers = {
            "Content-Length": str(
                len(listing.manifest()) + listing.total_bytes
            ),  # so that a client sees what is cut off
            "X-Output-Bytes": str(listing.total_bytes),
            "X-Output-Left-Out": str(len(listing.left_out)),
        }
        return StreamingResponse(listing.stream(), media_type="application/octet-stream", headers=headers)


async def _received(request: Request, file: Path) -> None:
    """Write the body to a file."""
    with file.open("wb") as opened:
        async for chunk in request.stream():
            await run_in_threadpool(opened.write, chunk)


def _used_uploads(service: Service) -> set[str]:
    """Digests of the uploads that live jobs name."""
    live = (job.spec for job in service.controller.state.jobs.values() if not job.status.ended)
    found = (uploaded(service.home, path) for spec in live for _, path in paths_of(spec))
    return {upload.parent.name for upload, _ in filter(None, found)}


def _add_service_routes(app: FastAPI, service: Service) -> None:
    controller = service.controller

    @app.get("/healthz", **answers(StatusAnswer))
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.get("/readyz", **READY)
    def readyz() -> Response:
        """200 while the service takes jobs, since it owns its journal; also without nodes, where jobs wait."""
        try:
            controller.confirm()
        except ServiceError as error:
            return refusal(503, str(error))
        problems = controller.health.problems()
        if not controller.state.nodes and not problems:
            problems = ["no node is there"]
        return JSONResponse({"status": "ready", "problems": problems})

    metrics = Metrics(controller.figures, controller.confirm, lambda job: beats(service.home, job))

    @app.get("/metrics", **EXPOSITION)
    def scrape() -> Response:
        return Response(content=metrics.text(), media_type=MEDIA_TYPE)

    @app.get("/whoami", **answers(WhoAnswer))
    def whoami(sender: Sender) -> dict[str, str]:
        return {"user": sender.name, "role": sender.role}

    @app.get("/cluster", **answers(ClusterAnswer))
    def cluster() -> dict[str, Any]:
        state = controller.state
        held = holders(state)
        return {
            "name": service.cluster,
            "trackers": service.trackers,
            "problems": controller.health.problems(),
            "nodes": [node_view(node, held, state.drained) for node in state.nodes],
            "drained": state.drained,
            "observations": observations_view(state.observations),
        }

    @app.post("/nodes/{node}/drain", **answers(EmptyAnswer))
    def drain(node: str, request: DrainRequest) -> dict[str, Any]:
        controller.drain(node, undo=request.undo)
        return {}

    @app.get("/teams", **answers(TeamsAnswer))
    def teams() -> dict[str, Any]:
        return {"teams": teams_view(controller.state, time.time())}

    @app.get("/report", **answers(ReportView))
    def report(
        since_s: Annotated[float, Query(ge=0, le=NUMBER_MAX, allow_inf_nan=False)],
        until_s: Annotated[float | None, Query(ge=0, le=NUMBER_MAX, allow_inf_nan=False)] = None,
    ) -> dict[str, Any]:
        """What happened since a moment, in seconds since 1970."""
        until_s = time.time() if until_s is None else until_s
        return dict(report_of(controller, since_s, until_s, service.sweeper.reports()))

    @app.post("/notify/test", **answers(TriedAnswer))
    def notify_test(request: TryRequest) -> dict[str, Any]:
        """Send a notice to targets, or to all."""
        return {"problems": {} if service.notifier is None else service.notifier.test(request.targets)}

    @app.post("/observations", **answers(KeptAnswer))
    def observe(request: ObserveRequest) -> dict[str, Any]:
        return {"kept": controller.observe(observations_from_view(request.observations))}

    @app.post("/shutdown", **answers(ShutdownAnswer))
    def shutdown(request: ShutdownRequest) -> dict[str, Any]:
        running = [job.id for job in controller.state.jobs.values() if job.status is JobStatus.RUNNING]
        if running and not request.force:
            raise ServiceError(
                f"jobs run: {', '.join(running)}. Wait, `orc cancel` them, or use `orc down --force`: it stops "
                "them, and they restart from their newest checkpoint at the next `orc up`"
            )
        service.shut_down()
        return {"running": running}


def _add_member_routes(app: FastAPI, service: Service) -> None:
    """Machines that join the service's own Ray, and leave it."""

    @app.get("/join", **answers(JoinAnswer))
    def join() -> dict[str, Any]:
        return {"ray_address": _members(service).ray_address(), "machine": asdict(machine(service.home))}

    @app.post("/nodes", **answers(EmptyAnswer))
    def add_node(request: NodeRequest) -> dict[str, Any]:
        _members(service).add(node_from_data(request.node, "the machine that joins"), request.address)
        return {}

    @app.delete("/nodes/{node}", **answers(EmptyAnswer))
    def remove_node(node: str) -> dict[str, Any]:
        """Forget a machine that has left; a node of its name is not drained any more."""
        _members(service).remove(node)
        if node in service.controller.state.drained:
            service.controller.drain(node, undo=True)
        return {}


def _members(service: Service) -> Members:
    if service.members is None:
        raise ServiceError("the service's Ray is not its own: start Ray on that machine by hand, with `ray start`")
    return service.members


def _add_account_routes(app: FastAPI, accounts: Accounts) -> None:
    """Users, tokens, audit log: for admins alone, since `ROLES` does not name them."""

    @app.get("/users", **answers(UsersAnswer))
    def users() -> dict[str, Any]:
        return {"users": [asdict(user) for user in accounts.users()]}

    @app.put("/users/{name}", **answers(EmptyAnswer))
    def set_user(name: UserName, request: UserRequest) -> dict[str, Any]:
        accounts.set_user(name, request.role)
        return {}

    @app.delete("/users/{name}", **answers(EmptyAnswer))
    def remove_user(name: str) -> dict[str, Any]:
        accounts.remove_user(name)
        return {}

    @app.get("/tokens", **answers(TokensAnswer))
    def tokens() -> dict[str, Any]:
        return {"tokens": [asdict(token) for token in accounts.tokens()]}

    @app.post("/tokens", **answers(NewTokenAnswer))
    def create_token(request: TokenRequest) -> dict[str, Any]:
        """The one answer that has the token itself."""
        secret, token = accounts.create_token(request.user, request.lifetime_s)
        return {"secret": secret, "token": asdict(token)}

    @app.delete("/tokens/{number}", **answers(EmptyAnswer))
    def revoke_token(number: Annotated[int, PathField(ge=0, le=NUMBER_MAX)]) -> dict[str, Any]:
        accounts.revoke_token(number)
        return {}

    @app.get("/audit", **answers(AuditAnswer))
    def audit(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[int | None, Query(ge=0, le=NUMBER_MAX)] = None,
    ) -> dict[str, Any]:
        return {"rows": [{"number": number, **asdict(row)} for number, row in accounts.audit(limit, before)]}


def _sender(request: Request) -> Principal:
    principal: Principal = request.state.principal
    return principal


Sender = Annotated[Principal, Depends(_sender)]


def _asked(
    request: SubmitRequest, source: str, sender: Principal, uploads: Uploads, sweeper: Sweeper
) -> tuple[JobSpec, Fault | None]:
    """The job, whose user is who sent it, and whose files are here; of a sweep the first trial.

    The home folder's own token may name any user.
    """
    asked = request.fault
    fault = Fault(kind=asked.kind, rank=asked.rank, step=asked.step) if asked else None
    spec = job_from_data(request.spec, source)
    if sender.is_owner:
        return _first(spec, sweeper), fault
    if spec.user not in (None, sender.name):
        hint = "leave `user` out: the job belongs to the user of the token"
        what = "another user's name"
        raise SpecError(what, source=source, path="user", got=spec.user, allowed=sender.name, hint=hint)
    spec = with_paths(spec, uploads.resolved)
    check_files(spec, source)
    return _first(spec.model_copy(update={"user": sender.name}), sweeper), fault


def _first(spec: JobSpec, sweeper: Sweeper) -> JobSpec:
    return spec if spec.trial is None else sweeper.first(spec)


def _refuse_other_teams(job: Job, sender: Principal, policy: PolicySpec, act: str) -> None:
    if may_change(job.user, sender, policy):
        return
    raise _Forbidden(f"{job.id} belongs to {job.user or 'nobody'}: {sender.name} may {act} jobs of its own team only")


class _Forbidden(ServiceError):
    """The role of the sender does not include this."""


class _Unknown(ServiceError):
    """No such job, attempt or rank."""


def job_of(controller: Controller, job_id: str) -> Job:
    """The job of an id. Raises ServiceError, answered with 404, where there is none."""
    job = controller.job(job_id)
    if job is None:
        raise _Unknown(f"there is no job {job_id!r}. `orc queue` lists them")
    return job


def _sweep(service: Service, sweep_id: str) -> SweepReport:
    found = service.sweeper.report(sweep_id)
    if found is None:
        raise _Unknown(f"there is no sweep {sweep_id!r}. `orc queue` lists them")
    return found


def _compared(service: Service, job: Job) -> list[Job]:
    """The jobs of the comparison that the job is of."""
    member = job.spec.member
    if member is None or not member.compared:
        raise ServiceError(f"{job.id} belongs to no comparison. `orc compare FILE` makes one")
    return [job_of(service.controller, job_id) for job_id in compared_ids(job)]


# ------------------------------------------------------------------------------------------------------------- errors


async def _refused(_: Request, error: Exception) -> JSONResponse:
    if isinstance(error, _Unknown):
        return refusal(404, str(error))
    if isinstance(error, _Forbidden):
        return refusal(403, str(error))
    if isinstance(error, StorageError):
        return refusal(503, str(error))
    return refusal(422 if isinstance(error, SpecError) else 409, str(error))


async def _unrouted(_: Request, error: Exception) -> JSONResponse:
    """No such route, no such method, or a body that is no text: answered as every other refusal."""
    assert isinstance(error, HTTPException), error
    answer = refusal(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), error
    details = "; ".join(f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors())
    return refusal(422, f"the request is malformed: {details}")
