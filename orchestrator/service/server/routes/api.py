"""The service's HTTP API. Every route but /healthz and /readyz needs a token, and a role from `ROLES`."""

from __future__ import annotations

import time
from collections.abc import Mapping
from dataclasses import asdict
from importlib.metadata import version
from typing import Annotated

from fastapi import FastAPI, Query, Request, Response
from fastapi import Path as PathField
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from orchestrator.backends.mlflow.server import ADDRESS as MLFLOW
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.scheduling.reports.morning import MorningReport
from orchestrator.service.client.client import get_user_name
from orchestrator.service.client.join_token import read_join_secret
from orchestrator.service.server.access.gate import (
    BODY_BYTES_MAX,
    JSON_BYTES_MAX,
    LINK,
    Gate,
    Gated,
    make_rate_limiter,
    make_refusal,
    make_role_by_route,
    parse_route,
)
from orchestrator.service.server.access.sessions import Sessions
from orchestrator.service.server.access.sign_in_links import SignInLinks
from orchestrator.service.server.ended import Reports, make_report
from orchestrator.service.server.members import Members, read_machine_properties
from orchestrator.service.server.metrics import MEDIA_TYPE, Metrics
from orchestrator.service.server.purger import view_purge
from orchestrator.service.server.routes import mlflow_routes
from orchestrator.service.server.routes.answers import (
    REFUSALS,
    AuditAnswer,
    ClusterAnswer,
    EmptyAnswer,
    ForecastAnswer,
    JoinAnswer,
    KeptAnswer,
    LinkAnswer,
    NewTokenAnswer,
    NotReadyAnswer,
    PlainRoute,
    PurgeAnswer,
    ReadyAnswer,
    ShutdownAnswer,
    StatusAnswer,
    TeamsAnswer,
    TokensAnswer,
    TriedAnswer,
    UnreadableAnswer,
    UsersAnswer,
    WhoAnswer,
    document_answer,
)
from orchestrator.service.server.routes.attempt_files import read_newest_heartbeats
from orchestrator.service.server.routes.dependencies import (
    NUMBER_MAX,
    Forbidden,
    NameObjects,
    Sender,
    Service,
    make_address_for_sender,
)
from orchestrator.service.server.routes.job_routes import (
    add_file_routes,
    add_job_routes,
    add_log_routes,
)
from orchestrator.service.server.routes.requests import (
    DrainRequest,
    NodeRequest,
    ObserveRequest,
    PurgeRequest,
    ShutdownRequest,
    TokenRequest,
    TryRequest,
    UserRequest,
)
from orchestrator.service.server.routes.verb_routes import add_verb_routes
from orchestrator.service.server.routes.waits import Waits
from orchestrator.service.transfer.store import BODY_BYTES_MAX as UPLOAD_BYTES_MAX
from orchestrator.service.transfer.store import Uploads
from orchestrator.service.views.records import (
    make_node_view,
    make_observations_view,
    parse_observations_view,
)
from orchestrator.service.views.teams import make_teams_view
from orchestrator.specs.access import Role
from orchestrator.specs.errors import (
    OrchestratorError,
    ReadOnlyError,
    ServiceError,
    SpecError,
    StorageError,
    UncertainError,
    UnknownError,
)
from orchestrator.specs.fields import UserName
from orchestrator.specs.job.paths import list_paths
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.parse import parse_node_data
from orchestrator.specs.run import find_upload

ASK_AGAIN_S = 5  # after a commit whose outcome is not known: a service is started again by then
ROLES = make_role_by_route(  # needed by each route; one that is missing here needs an admin
    {
        Role.VIEWER: (
            "GET /openapi.json",
            "GET /whoami",
            "POST /sign-in-links",
            "GET /jobs",
            "GET /jobs/{job_id}",
            "GET /jobs/{job_id}/explanation",
            "GET /jobs/{job_id}/comparison",
            "GET /jobs/{job_id}/attempts/{number}/logs",
            "GET /jobs/{job_id}/attempts/{number}/logs/follow",
            "GET /sweeps",
            "GET /sweeps/{sweep_id}",
            "GET /cluster",
            "GET /teams",
            "GET /report",
            "GET /forecast",
            "GET /metrics",
        ),
        Role.MEMBER: (  # those of one job: of its own team
            "GET /jobs/{job_id}/output",
            "POST /jobs",
            "POST /jobs/batch",
            "POST /jobs/cancel",
            "POST /jobs/hold",
            "POST /jobs/release",
            "POST /jobs/suspend",
            "POST /jobs/resume",
            "POST /jobs/{job_id}/update",
            "POST /jobs/{job_id}/retry",
            "POST /uploads/missing",
            "PUT /uploads/{digest}",
        ),
        Role.OPERATOR: (
            "POST /nodes/{node}/drain",
            "POST /observations",
            "POST /notify/test",
            "POST /purge",
            "GET /join",
            "POST /nodes",
            "DELETE /nodes/{node}",
        ),
    }
)
JOINING = frozenset(  # for which the token of joining machines is enough
    map(
        parse_route,
        (
            "GET /join",
            "GET /cluster",
            "POST /nodes",
            "POST /nodes/{node}/drain",
            "DELETE /nodes/{node}",
        ),
    )
)
EXPOSITION: JsonObject = {
    "response_model": None,
    "response_class": Response,
    "responses": {200: {"content": {MEDIA_TYPE: {"schema": {"type": "string"}}}}},
}
READY: JsonObject = {
    "response_model": None,
    "responses": {
        200: {"model": ReadyAnswer},
        503: {"model": NotReadyAnswer, "description": "It takes no jobs now."},
    },
}


def create_app(service: Service) -> FastAPI:
    """Return the FastAPI application of the service's API.

    It answers a wrong token by 401, a wrong Host or role by 403, an unknown object by 404, bad
    input by 422, and a refusal by 409.
    """
    app = FastAPI(
        title="orc",
        version=version("orchestrator"),
        docs_url=None,
        redoc_url=None,
        responses=REFUSALS,
    )
    gate = Gate(
        owner_token=service.token,
        owner=get_user_name(),
        accounts=service.accounts,
        hosts=service.hosts,
        roles={
            **ROLES,
            **mlflow_routes.ROLES,
            **({} if service.pages is None else service.pages.roles),
        },
        reading=mlflow_routes.READING,
        body_bytes_max=_list_body_limit_by_route(),
        rates=make_rate_limiter(),
        joining=JOINING,
        join_secret=lambda: read_join_secret(service.home),
        sessions=Sessions(
            owner_token=service.token, owner=get_user_name(), accounts=service.accounts
        ),
        links=SignInLinks(),
        pages=service.pages,
    )
    app.add_middleware(Gated, gate=gate)
    app.router.route_class = PlainRoute
    app.exception_handler(OrchestratorError)(_answer_error)
    app.exception_handler(RequestValidationError)(_answer_malformed)
    app.exception_handler(HTTPException)(_answer_unrouted)
    uploads = Uploads(service.home, lambda: _list_digests_of_used_uploads(service))
    waits = Waits(service.controller.wait_for_change)
    add_job_routes(app, service, uploads, waits)
    add_verb_routes(app, service, uploads)
    add_log_routes(app, service, waits)
    add_file_routes(app, service, uploads)
    _add_probe_routes(app, service)
    _add_cluster_routes(app, service)
    _add_report_routes(app, service)
    _add_operator_routes(app, service)
    _add_member_routes(app, service)
    _add_account_routes(app, service)
    _add_sign_in_route(app, gate)
    _add_journal_routes(app, service)
    if service.pages is not None:
        service.pages.add(app, service, gate)
    if (
        service.trackers.get("mlflow") == MLFLOW
    ):  # else it is a server that somebody named, elsewhere
        mlflow_routes.add_mlflow_routes(app, service.home)
    return app


# ------------------------------------------------------------------------------------------------------------- routes


def _list_digests_of_used_uploads(service: Service) -> set[str]:
    """Return the digests of the uploaded archives that live jobs name."""
    live = service.controller.state.live_jobs
    uploads = (find_upload(service.home, path) for job in live for _, path in list_paths(job.spec))
    return {upload.parent.name for upload, _ in filter(None, uploads)}


def _list_body_limit_by_route() -> dict[tuple[str, str], int]:
    """Return {(method, path): largest number of bytes in a request's body} of the API's routes."""
    limits = dict.fromkeys(ROLES, JSON_BYTES_MAX)
    limits["PUT", "/uploads/{digest}"] = UPLOAD_BYTES_MAX
    for path in ("/jobs/batch", "/observations"):
        limits["POST", path] = BODY_BYTES_MAX
    return limits


def _add_probe_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for health probes, for Prometheus, and for clients that ask who they are."""
    controller = service.controller

    @app.get("/healthz")
    async def healthz() -> StatusAnswer:
        return {"status": "ok"}

    @app.get("/readyz", **READY)
    async def readyz() -> Response:
        """Answer 200 while the service accepts jobs: it owns its journal, can write it, and decides.

        It waits for nothing, and for no thread: those of other routes may all stand behind a decision. Without live
        nodes jobs are accepted, and wait.
        """
        try:
            controller.confirm_ownership()
        except ServiceError as error:
            return make_refusal(503, str(error))
        problems = controller.health.list_problems()
        failures = controller.health.list_failures()
        if failures:
            return JSONResponse(
                {"error": "; ".join(failures), "problems": problems}, status_code=503
            )
        if not controller.state.nodes and not problems:
            problems = ["no node is there"]
        return JSONResponse({"status": "ready", "problems": problems})

    metrics = Metrics(
        controller.read_figures,
        controller.confirm_ownership,
        lambda job: read_newest_heartbeats(service.home, job).reports,
    )

    @app.get("/metrics", **EXPOSITION)
    def scrape() -> Response:
        return Response(content=metrics.make_scrape_answer(), media_type=MEDIA_TYPE)

    @app.get("/whoami")
    def whoami(sender: Sender) -> WhoAnswer:
        return {"user": sender.name, "role": sender.role}


def _add_cluster_routes(app: FastAPI, service: Service) -> None:
    controller = service.controller

    @app.get("/cluster")
    def cluster(request: Request) -> ClusterAnswer:
        state = controller.state
        job_ids = map_held_device_to_job_id(state)
        return {
            "name": service.cluster,
            "trackers": {
                name: make_address_for_sender(request, address)
                for name, address in service.trackers.items()
            },
            "problems": controller.health.list_problems(),
            "nodes": [make_node_view(node, job_ids, state) for node in state.nodes],
            "drained": state.drained,
            "observations": make_observations_view(state.observations),
        }

    @app.post("/nodes/{node}/drain")
    def drain(node: str, request: DrainRequest, name_objects: NameObjects) -> EmptyAnswer:
        name_objects(["undo"] if request.undo else [])
        controller.drain_node(node, undo=request.undo)
        return {}

    @app.get("/teams")
    def teams() -> TeamsAnswer:
        return {"teams": make_teams_view(controller.state, time.time())}


def _add_report_routes(app: FastAPI, service: Service) -> None:
    controller = service.controller

    @app.get("/forecast")
    def forecast() -> ForecastAnswer:
        """Return expected start and end of each live job, earliest start first, assuming no more submissions."""
        return {"jobs": [*service.forecasts.wait_for_newest_forecast().values()]}

    newest = Reports(
        lambda since_s: asdict(
            make_report(controller, since_s, time.time(), service.sweeper.make_reports())
        )
    )

    @app.get("/report", **document_answer(MorningReport))
    def report(
        since_s: Annotated[float, Query(ge=0, le=NUMBER_MAX, allow_inf_nan=False)],
        until_s: Annotated[float | None, Query(ge=0, le=NUMBER_MAX, allow_inf_nan=False)] = None,
    ) -> JsonObject:
        """Return the morning report since a time in seconds since 1970; by default, until some seconds ago."""
        if until_s is not None:
            return asdict(make_report(controller, since_s, until_s, service.sweeper.make_reports()))
        return newest.find_or_make_report(controller.version, since_s)


def _add_operator_routes(app: FastAPI, service: Service) -> None:
    """Add routes for operators and admins: test notices, observations, purge and shutdown."""
    controller = service.controller

    @app.post("/notify/test")
    def notify_test(request: TryRequest) -> TriedAnswer:
        """Send a test notice to these notification targets, or to all."""
        return {
            "problems": {}
            if service.notifier is None
            else service.notifier.send_test_notices(request.targets)
        }

    @app.post("/observations")
    def observe(request: ObserveRequest) -> KeptAnswer:
        return {
            "count": controller.store_and_count_new_observations(
                parse_observations_view(request.observations)
            )
        }

    @app.post("/purge", **document_answer(PurgeAnswer))
    def purge(request: PurgeRequest, http_request: Request, sender: Sender) -> Mapping[str, object]:
        """Remove files of ended jobs by the cluster file's `keep`, or only list them."""
        result = service.purger.purge(sender, http_request.state.id, is_dry=request.dry_run)
        return view_purge(result, is_dry=request.dry_run)

    @app.post("/shutdown")
    def shutdown(request: ShutdownRequest) -> ShutdownAnswer:
        running = [
            job.id for job in controller.state.jobs.values() if job.status is JobStatus.RUNNING
        ]
        if running and not request.force:
            raise ServiceError(
                f"jobs run: {', '.join(running)}. Wait, `orc cancel` them, or use `orc down --force`: it stops "
                "them, and they restart from their newest checkpoint at the next `orc up`"
            )
        service.shut_down()
        return {"running": running}


def _add_member_routes(app: FastAPI, service: Service) -> None:
    """Add routes for machines that join and leave the service's own Ray."""

    @app.get("/join")
    def join() -> JoinAnswer:
        return {
            "ray_address": _require_members(service).get_ray_address_for_joining(),
            "machine": read_machine_properties(service.home),
        }

    @app.post("/nodes")
    def add_node(request: NodeRequest, name_objects: NameObjects) -> EmptyAnswer:
        node = parse_node_data(request.node, "the machine that joins")
        name_objects([node.name, request.address])
        _require_members(service).add_machine(node, request.address)
        return {}

    @app.delete("/nodes/{node}")
    def remove_node(node: str) -> EmptyAnswer:
        """Remove a machine that has left. A new node of its name starts without a drain."""
        _require_members(service).remove_machine(node)
        if node in service.controller.state.drained:
            service.controller.drain_node(node, undo=True)
        return {}


def _require_members(service: Service) -> Members:
    if service.members is None:
        raise ServiceError(
            "the service's Ray is not its own: start Ray on that machine by hand, with `ray start`"
        )
    return service.members


def _add_sign_in_route(app: FastAPI, gate: Gate) -> None:
    @app.post("/sign-in-links")
    def sign_in_link(request: Request) -> LinkAnswer:
        """Return the path of a link that signs one browser in as the sender, within five minutes."""
        token = request.headers.get("authorization", "").removeprefix("Bearer ")
        cookie = gate.sessions.make_session_cookie(token)
        if cookie is None:
            raise ServiceError("a browser's session gives no link: send a token")
        return {"path": f"{LINK}{gate.links.add_session_and_make_code(cookie)}"}


def _add_account_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for users, tokens and the audit log, for admins alone: `ROLES` does not name
    them.
    """
    accounts = service.accounts

    @app.get("/users")
    def users() -> UsersAnswer:
        return {"users": accounts.list_users()}

    @app.put("/users/{name}")
    def set_user(name: UserName, request: UserRequest, name_objects: NameObjects) -> EmptyAnswer:
        name_objects([request.role])
        if request.role.includes(Role.MEMBER):
            service.refuse_user(name)
        accounts.set_user(name, request.role)
        return {}

    @app.delete("/users/{name}")
    def remove_user(name: str) -> EmptyAnswer:
        accounts.remove_user(name)
        return {}

    @app.get("/tokens")
    def tokens() -> TokensAnswer:
        return {"tokens": accounts.list_tokens()}

    @app.post("/tokens")
    def create_token(request: TokenRequest, name_objects: NameObjects) -> NewTokenAnswer:
        """Create a token. Only this response contains the token itself."""
        name_objects([request.user])
        secret, token = accounts.create_token(request.user, request.lifetime_s)
        return {"secret": secret, "token": token}

    @app.delete("/tokens/{number}")
    def revoke_token(number: Annotated[int, PathField(ge=0, le=NUMBER_MAX)]) -> EmptyAnswer:
        accounts.revoke_token(number)
        return {}

    @app.get("/audit")
    def audit(
        limit: Annotated[int, Query(ge=1, le=1000)] = 100,
        before: Annotated[int | None, Query(ge=0, le=NUMBER_MAX)] = None,
    ) -> AuditAnswer:
        return {"rows": accounts.list_audit_rows(limit, before)}


def _add_journal_routes(app: FastAPI, service: Service) -> None:
    """Add the routes for rows of the journal that cannot be read, for admins alone."""

    @app.get("/journal/unreadable")
    def unreadable() -> UnreadableAnswer:
        return {"rows": service.set_aside.list_rows()}

    @app.delete("/journal/unreadable/{table}/{row}")
    def drop_unreadable(table: str, row: str) -> EmptyAnswer:
        """Delete an unreadable row for good. A live job is cancelled first, as it may occupy devices."""
        job = service.controller.state.jobs.get(row) if table == "live" else None
        if job is not None and job.unreadable:
            raise ServiceError(
                f"{row} may hold devices: `orc cancel {row}` ends it, then its row can be dropped"
            )
        if service.set_aside.delete_row(table, row) is None:
            raise UnknownError(
                f"no row {table}/{row} stands aside. `orc doctor --repair` lists them"
            )
        return {}


# ------------------------------------------------------------------------------------------------------------- errors


# Of any other error 409.
STATUSES = {
    UnknownError: 404,
    Forbidden: 403,
    StorageError: 503,
    ReadOnlyError: 503,
    UncertainError: 503,
    SpecError: 422,
}


async def _answer_error(_: Request, error: Exception) -> JSONResponse:
    status = next((code for kind, code in STATUSES.items() if isinstance(error, kind)), 409)
    answer = make_refusal(status, str(error))
    if isinstance(error, UncertainError):
        answer.headers["Retry-After"] = str(ASK_AGAIN_S)
    return answer


async def _answer_unrouted(_: Request, error: Exception) -> JSONResponse:
    """Answer an unknown route or method, or a body that is no text, like every other refusal."""
    assert isinstance(error, HTTPException), error
    answer = make_refusal(error.status_code, error.detail)
    answer.headers.update(error.headers or {})
    return answer


async def _answer_malformed(_: Request, error: Exception) -> JSONResponse:
    assert isinstance(error, RequestValidationError), error
    details = "; ".join(
        f"{'.'.join(map(str, item['loc']))}: {item['msg']}" for item in error.errors()
    )
    return make_refusal(422, f"the request is malformed: {details}")
