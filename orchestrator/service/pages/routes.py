"""Routes of the web pages. They show the data of the JSON API; changes are sent to that API."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict
from functools import partial
from importlib.resources import files
from typing import Any
from urllib.parse import parse_qs, quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse, StreamingResponse
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import QueryParams
from starlette.routing import Route

from orchestrator.backends.mlflow.server import ADDRESS as MLFLOW
from orchestrator.backends.mlflow.tracker import find_job_url
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.service.commands.live_queue import advance_to_now
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.commands.what_if import WhatIf, compare_queues
from orchestrator.service.intake.cluster_file import load_cluster
from orchestrator.service.intake.intake import read_jobs
from orchestrator.service.pages.archive import ArchivedJobs
from orchestrator.service.pages.cluster import make_device_use_data
from orchestrator.service.pages.compare import make_comparison_data, make_comparison_rows
from orchestrator.service.pages.form import (
    SOURCE,
    Form,
    list_form_sections,
    propose_job_file_for_form,
    read_field_values,
    write_job_file,
)
from orchestrator.service.pages.frame import (
    HEADERS,
    check_web_address,
    compile_templates,
    render_page,
    render_refusal,
)
from orchestrator.service.pages.job import (
    add_failure_memory,
    draw_charts,
    draw_job_frontier,
    draw_memory_waterfall,
    list_artifact_names_and_bytes,
    list_job_facts,
    load_curves,
    make_differing_settings_rows,
    make_memory_rows,
)
from orchestrator.service.pages.live import stream_changes
from orchestrator.service.pages.log import (
    TEXT_MAX,
    WINDOW_BYTES,
    find_line_offsets_and_texts,
    get_log_size_bytes,
    read_text_from,
)
from orchestrator.service.pages.night import make_night_data
from orchestrator.service.pages.oidc import OidcSignIn
from orchestrator.service.pages.overview import make_overview_data
from orchestrator.service.pages.queue import Filter, make_queue_data
from orchestrator.service.server.access.gate import (
    LINK,
    OIDC,
    OIDC_BACK,
    PAGES,
    SIGN_IN,
    STATIC,
    Gate,
    make_role_by_route,
    parse_route,
)
from orchestrator.service.server.access.ownership import may_change_jobs_of
from orchestrator.service.server.access.sessions import delete_cookie, set_cookie
from orchestrator.service.server.routes.answers import PlainRoute
from orchestrator.service.server.routes.attempt_files import view_job
from orchestrator.service.server.routes.dependencies import (
    NEVER_SEEN,
    Forbidden,
    Pages,
    Service,
    find_job,
    make_address_for_sender,
)
from orchestrator.service.server.routes.links import MlflowLinks
from orchestrator.service.server.routes.waits import Waits
from orchestrator.service.views.records import JobView, parse_node_view
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import OrchestratorError, SpecError
from orchestrator.specs.job.paths import list_paths
from orchestrator.specs.job_record import Job
from orchestrator.specs.order import Order
from orchestrator.specs.parse import parse_cluster, parse_jobs
from orchestrator.specs.yaml_text import read_document

START = f"{PAGES}/overview"
FILES = {"htmx.min.js": "text/javascript", "pages.js": "text/javascript", "pages.css": "text/css"}
AUDIT_ROWS = 100
EMPTY_FORM = {"order": "", "more": "0", "cluster": "", "job": ""}  # of what-if
EXAMPLE = """\
name: my-job
gpus: {min: 1, max: 2}
global_batch_size: 64
command: python train.py
workdir: /path/on/the/service
"""


class _Pages:
    def __init__(self, app: FastAPI, service: Service, gate: Gate) -> None:
        self.oidc = None if service.provider is None else OidcSignIn(service.provider, gate)
        self._api = {
            (method, route.path): route.answers
            for route in app.routes
            if isinstance(route, PlainRoute)
            for method in route.methods or ()
        }
        self._controller = controller = service.controller
        self._sweeper = service.sweeper
        self._home = service.home
        self._gate = gate
        self._forecasts = service.forecasts
        self._reasons = service.reasons
        self._playing = threading.Lock()
        self._archive = ArchivedJobs(controller.list_ended_jobs)
        self._waits = Waits(controller.wait_for_change)
        self._mlflow = service.trackers.get("mlflow")
        self._links = MlflowLinks(partial(find_job_url, service.home))

    def _get_from_api(self, path: str, **parameters: Any) -> Any:
        """Return the answer of the API's GET route at this path."""
        return self._api["GET", path](**parameters)

    def _view_job(self, job_id: str) -> JobView:
        return self._make_view(find_job(self._controller, job_id))

    def _make_view(self, job: Job) -> JobView:
        return view_job(
            self._home,
            self._reasons.add_wait_reason(job),
            self._controller.state.policy,
            self._controller.health.list_delays(),
        )

    def _render(self, request: Request, template: str, **data: Any) -> Response:
        principal: Principal = request.state.principal

        def may(method: str, path: str) -> bool:
            """Return whether the sender's role allows this API action."""
            return principal.role.includes(self._gate.roles.get((method, path), Role.ADMIN))

        def may_change_job(job: JobView) -> bool:
            is_own = may_change_jobs_of(job["user"], principal, self._controller.state.policy)
            return may("POST", "/jobs/cancel") and is_own

        shared = {"problems": self._controller.health.list_problems()}
        return render_page(
            request,
            template,
            version=self._controller.version,
            now_s=time.time(),
            may=may,
            may_change_job=may_change_job,
            **shared | data,
        )

    # ------------------------------------------------------------------------------------------------------- sessions

    def sign_in(self, request: Request) -> Response:
        if request.state.principal is not None:
            return RedirectResponse(_check_path(request.query_params.get("next", "")), 303)
        # SameSite=Strict: a link on another site leads here without the session
        is_from_elsewhere = request.headers.get("sec-fetch-site") == "cross-site"
        came_from = _check_path(request.query_params.get("next", ""))
        return self._sign_in_page(request, came_from, is_from_elsewhere=is_from_elsewhere)

    def _sign_in_page(
        self,
        request: Request,
        came_from: str,
        message: str = "",
        status: int = 200,
        *,
        is_from_elsewhere: bool = False,
    ) -> Response:
        oidc = None if self.oidc is None else f"{OIDC}?next={quote(came_from, safe='')}"
        data = {
            "message": message,
            "came_from": came_from,
            "is_from_elsewhere": is_from_elsewhere,
            "oidc": oidc,
        }
        return render_page(request, "login", status=status, **data)

    def redirect_to_provider(self, request: Request) -> Response:
        assert self.oidc is not None, "a route that was not added"
        return self.oidc.begin_sign_in(request, _check_path(request.query_params.get("next", "")))

    def sign_out(self, request: Request) -> Response:
        self._gate.sessions.close_session(request)
        answer = RedirectResponse(SIGN_IN, 303)
        delete_cookie(request, answer)
        return answer

    async def sign_in_by_token(self, request: Request) -> Response:
        form = await _read_form(request)
        came_from = _check_path(form.get("next", ""))
        cookie = await run_in_threadpool(
            self._gate.sessions.make_session_cookie, form.get("token", "").strip()
        )
        if cookie is not None:
            answer: Response = RedirectResponse(came_from, 303)
            set_cookie(request, answer, cookie)
            return answer
        has_sent_too_many_wrong_tokens = self._gate.has_sent_too_many_wrong_tokens(request)
        message = (
            "Too many wrong tokens: wait a minute."
            if has_sent_too_many_wrong_tokens
            else "This token admits nobody."
        )
        status = 429 if has_sent_too_many_wrong_tokens else 401
        return self._sign_in_page(request, came_from, message, status)

    def sign_in_by_link(self, request: Request) -> Response:
        """Sign the browser in by a link of `orc open`, and return a redirect to the page that the
        link names.
        """
        came_from = _check_path(request.query_params.get("next", ""))
        cookie = None
        if not self._gate.has_sent_too_many_wrong_tokens(request, adds_wrong_token=False):
            cookie = self._gate.links.claim_session_cookie(request.path_params["code"])
        if cookie is None:
            self._gate.has_sent_too_many_wrong_tokens(request)
            message = "This link was used before, or is older than five minutes: `orc open` makes another."
            return self._sign_in_page(request, came_from, message, 403)
        # a page, and no redirect: browsers send a SameSite=Strict cookie only where a page of ours
        # leads on
        answer = render_page(request, "signed_in", came_from=came_from)
        set_cookie(request, answer, cookie)
        return answer

    async def events(self, request: Request) -> Response:
        """Return a stream of server-sent events, one per version of the state that the page has not
        seen.
        """
        version_seen = request.headers.get("last-event-id") or request.query_params.get("seen", "")
        stream = stream_changes(
            int(version_seen) if version_seen.isdecimal() else NEVER_SEEN,
            lambda: self._controller.version,
            self._waits,
            lambda: self._gate.find_principal(request) is not None,
        )
        return StreamingResponse(
            stream, media_type="text/event-stream", headers={"Cache-Control": "no-store"}
        )

    # ---------------------------------------------------------------------------------------------------------- pages

    def overview(self, request: Request) -> Response:
        state = self._controller.state
        expected = self._forecasts.find_newest_forecast()
        return self._render(
            request,
            "overview",
            **make_overview_data(
                state, self._archive.list_newest(), self._make_view, expected, time.time()
            ),
        )

    def queue(self, request: Request) -> Response:
        query = request.query_params
        criteria = Filter(
            **{
                name: query.get(name, "")
                for name in ("status", "user", "team", "why", "name", "array")
            }
        )
        data = make_queue_data(
            self._controller.state,
            self._archive.list_newest(),
            self._make_view,
            self._forecasts.find_newest_forecast(),
            criteria,
            _parse_query_number(query, "page", 1),
        )
        return self._render(request, "queue", **data)

    def job(self, request: Request) -> Response:
        job = self._view_job(request.path_params["job_id"])
        last = self._controller.find_job(job["id"])
        curves = add_failure_memory(load_curves(self._home, job), job)
        return self._render(
            request,
            "job",
            tab="overview",
            job=job,
            rows=make_differing_settings_rows(job),
            charts=draw_charts(
                curves,
                self._list_capacity_by_device().get(
                    job["attempts"][-1]["device"] if job["attempts"] else ""
                ),
            ),
            curves=curves,
            facts=list_job_facts(last) if last else {},
            memory=make_memory_rows(job, self._list_capacity_by_device()),
            expected=self._forecasts.find_newest_forecast().get(job["id"]),
            deadline_s=last.deadline_s if last else None,
            comparison=last.array if last and last.spec.is_compared else None,
            sweep=last.array if last and last.spec.trial else None,
            artifacts=list_artifact_names_and_bytes(self._home, job["id"]),
            mlflow=self._find_mlflow_url(request, last),
        )

    def _find_mlflow_url(self, request: Request, job: Job | None) -> str | None:
        """Return the URL of a job's run in MLflow; None where there is no run, or while it is being
        looked up.
        """
        if self._mlflow is None or job is None or not job.attempts:
            return None
        return check_web_address(
            make_address_for_sender(
                request, self._links.find_cached_url(self._mlflow, job.key, 1) or ""
            )
        )

    def plan(self, request: Request) -> Response:
        explanation = self._get_from_api(
            "/jobs/{job_id}/explanation", job_id=request.path_params["job_id"]
        )
        capacities = self._list_capacity_by_device()
        attempts = explanation["job"]["attempts"]
        number = _parse_query_number(request.query_params, "attempt", 0)
        number = number if 1 <= number <= len(attempts) else len(attempts)
        chosen = attempts[number - 1] if attempts else None
        return self._render(
            request,
            "plan",
            tab="plan",
            job=explanation["job"],
            explanation=explanation,
            frontier=draw_job_frontier(explanation),
            chosen=chosen,
            waterfall=draw_memory_waterfall(chosen, capacities.get(chosen["device"]))
            if chosen
            else "",
        )

    def log(self, request: Request) -> Response:
        job = self._view_job(request.path_params["job_id"])
        query = request.query_params
        attempts = job["attempts"]
        number = _parse_query_number(query, "attempt", len(attempts))
        rank = _parse_query_number(query, "rank", 0)
        text = query.get("find", "")[:TEXT_MAX]
        data = {"text": "", "ranks": 0, "size": 0, "start": 0, "matches": [], "refusal": ""}
        if attempts:
            path = "/jobs/{job_id}/attempts/{number}/logs"
            of_log = {
                "job_id": job["id"],
                "number": number,
                "sender": request.state.principal,
                "rank": rank,
            }

            def read(offset: int) -> bytes:
                return bytes(self._get_from_api(path, **of_log, offset=offset).body)

            size = get_log_size_bytes(self._home, job["id"], number, rank)
            start = min(size, _parse_query_number(query, "from", max(0, size - WINDOW_BYTES)))
            try:
                data |= {"text": read_text_from(read, start), "size": size, "start": start}
                data |= {"ranks": int(attempts[number - 1]["settings"]["gpus"])}
                data |= {"matches": find_line_offsets_and_texts(read, size, text) if text else []}
            except Forbidden as error:
                data |= {"refusal": str(error)}
        is_still = bool(text or "from" in query)
        data |= {"find": text, "is_still": is_still, "window": WINDOW_BYTES}
        return self._render(request, "log", tab="log", job=job, number=number, rank=rank, **data)

    def cluster(self, request: Request) -> Response:
        state = self._controller.state
        now_s = time.time()
        jobs = {
            job.id: job for job in (*self._archive.list_newest(), *state.jobs.values())
        }.values()
        data = self._get_from_api("/cluster", request=request) | {
            "uses": make_device_use_data(jobs, self._home, now_s)
        }
        return self._render(request, "cluster", **data, holders=map_held_device_to_job_id(state))

    def night(self, request: Request) -> Response:
        looked_back = min(
            float(_parse_query_number(request.query_params, "hours", 0) or 12), 24.0 * 366
        )
        now_s = time.time()
        data = make_night_data(
            self._controller.state,
            self._archive.list_newest(),
            self._forecasts.find_newest_forecast(),
            self._sweeper.make_reports(),
            looked_back,
            self._controller.limit_report_start_s(now_s - looked_back * 3600),
            now_s,
        )
        return self._render(request, "night", **data)

    def comparisons(self, request: Request) -> Response:
        jobs = (*self._controller.state.jobs.values(), *self._archive.list_newest())
        return self._render(request, "comparisons", comparisons=make_comparison_rows(jobs))

    def comparison(self, request: Request) -> Response:
        answer = self._get_from_api(
            "/jobs/{job_id}/comparison", job_id=request.path_params["job_id"], request=request
        )
        return self._render(request, "comparison", **make_comparison_data(answer, self._home))

    def sweeps(self, request: Request) -> Response:
        reports = map(asdict, self._get_from_api("/sweeps")["sweeps"])
        return self._render(request, "sweeps", sweeps=[*reports])

    def sweep(self, request: Request) -> Response:
        report = self._get_from_api("/sweeps/{sweep_id}", sweep_id=request.path_params["sweep_id"])
        return self._render(request, "sweep", sweep=asdict(report))

    def teams(self, request: Request) -> Response:
        return self._render(request, "teams", **self._get_from_api("/teams"))

    def submit(self, request: Request) -> Response:
        return self._submit_page(request, EXAMPLE, read_field_values(EXAMPLE))

    def _submit_page(
        self, request: Request, text: str, field_values: Form, **results: Any
    ) -> Response:
        nothing = {"error": "", "specs": [], "forecasts": [], "trials": 0}
        return self._render(
            request,
            "submit",
            text=text,
            fields=field_values,
            sections=list_form_sections(),
            **nothing | results,
        )

    async def dry_run(self, request: Request) -> Response:
        return await run_in_threadpool(self._plan_form, request, await _read_form(request))

    def _plan_form(self, request: Request, form: Form) -> Response:
        """Return a page with the plans that the jobs of a form would get; nothing is submitted."""
        cluster = self._get_from_api("/cluster", request=request)
        try:
            text = (
                propose_job_file_for_form(form["command"], form.get("folder", ""))
                if "command" in form
                else write_job_file(form)
            )
        except OrchestratorError as refused:  # what was typed stays in its field
            return self._submit_page(request, form.get("text", EXAMPLE), form, error=str(refused))
        try:
            specs = _parse_jobs(text)
            nodes = [parse_node_view(node) for node in cluster["nodes"]]
            state = self._controller.state
            forecasts = [plan_job(spec, nodes, state.observations) for spec in specs[:1]]
        except OrchestratorError as refused:
            return self._submit_page(request, text, read_field_values(text), error=str(refused))
        trials = specs[0].trial.sweep.trials if specs[0].trial is not None else 0
        dumped = [{"spec": spec.model_dump(mode="json")} for spec in specs]
        return self._submit_page(
            request, text, read_field_values(text), specs=dumped, forecasts=forecasts, trials=trials
        )

    def what_if(self, request: Request) -> Response:
        return self._render(
            request, "what_if", form=EMPTY_FORM, error="", result=None, orders=list(Order)
        )

    async def simulate_form(self, request: Request) -> Response:
        form = await _read_form(request)
        return await run_in_threadpool(self._simulate_form, request, {**EMPTY_FORM, **form})

    def _simulate_form(self, request: Request, form: Form) -> Response:
        """Return a page with the live queue simulated as it is, and with the form's changes. Only
        one runs at a time.
        """
        error = ""
        result = None
        if not self._playing.acquire(blocking=False):
            error = "Another queue is being played: try again in some seconds."
        else:
            try:
                result = self._compare_queues(form)
            except OrchestratorError as refused:
                error = str(refused)
            finally:
                self._playing.release()
        return self._render(
            request, "what_if", form=form, error=error, result=result, orders=list(Order)
        )

    def _compare_queues(self, form: Form) -> WhatIf:
        state = self._controller.state
        present = load_cluster(self._home).model_copy(update={"policy": state.policy})
        other = present
        if form["cluster"].strip():
            other = parse_cluster(form["cluster"], "the cluster file")
        elif form["more"] in ("1", "2"):
            changes = {"name": "more", "count": 1, "devices": int(form["more"]), "device_ids": ()}
            more = present.nodes[0].model_copy(update=changes)
            other = present.model_copy(update={"nodes": (*present.nodes, more)})
        if form["order"] in list(Order):
            other = other.replace_order(Order(form["order"]))
        jobs = _parse_jobs(form["job"]) if form["job"].strip() else []
        return compare_queues(
            advance_to_now(state),
            present,
            other,
            jobs,
            self._sweeper.list_coming_trials(),
            self._home,
        )

    def audit(self, request: Request) -> Response:
        number = _parse_query_number(request.query_params, "before", 0) or None
        rows = self._get_from_api("/audit", limit=AUDIT_ROWS, before=number)["rows"]
        return self._render(request, "audit", rows=[*map(asdict, rows)], limit=AUDIT_ROWS)

    def _list_capacity_by_device(self) -> dict[str, int]:
        """Return {kind of device: its memory in bytes}."""
        state = self._controller.state
        return {node.device.name: node.device.memory for node in (*state.declared, *state.nodes)}


# Who may see each page, by its method and its path below PAGES; and its handler.
_HANDLERS: Mapping[Role, Mapping[str, Callable[[_Pages, Request], Any]]] = {
    Role.VIEWER: {
        "GET ": lambda *_: RedirectResponse(START),
        "POST /logout": _Pages.sign_out,
        "GET /events": _Pages.events,
        "GET /overview": _Pages.overview,
        "GET /queue": _Pages.queue,
        "GET /jobs/{job_id}": _Pages.job,
        "GET /jobs/{job_id}/plan": _Pages.plan,
        "GET /jobs/{job_id}/log": _Pages.log,
        "GET /cluster": _Pages.cluster,
        "GET /night": _Pages.night,
        "GET /compare": _Pages.comparisons,
        "GET /compare/{job_id}": _Pages.comparison,
        "GET /sweeps": _Pages.sweeps,
        "GET /sweeps/{sweep_id}": _Pages.sweep,
        "GET /teams": _Pages.teams,
    },
    Role.MEMBER: {
        "GET /what-if": _Pages.what_if,
        "POST /what-if": _Pages.simulate_form,
        "GET /submit": _Pages.submit,
        "POST /submit": _Pages.dry_run,
    },
    Role.ADMIN: {"GET /audit": _Pages.audit},
}
PAGE_ROLES = {
    (method, PAGES + path): role for (method, path), role in make_role_by_route(_HANDLERS).items()
}


def _add_page_routes(app: FastAPI, service: Service, gate: Gate) -> None:
    """Add every page to the application, which already has the routes of the API from which pages
    get their data.
    """
    pages = _Pages(app, service, gate)
    compile_templates()
    routes: dict[tuple[str, str], Callable[..., Any]] = {
        ("GET", "/"): lambda _: RedirectResponse(START),
        ("GET", f"{STATIC}{{name}}"): _static_file,
        ("GET", SIGN_IN): pages.sign_in,
        ("POST", SIGN_IN): pages.sign_in_by_token,
        ("GET", f"{LINK}{{code}}"): pages.sign_in_by_link,
    }
    for handlers in _HANDLERS.values():
        for name, handler in handlers.items():
            method, path = parse_route(name)
            routes[method, PAGES + path] = partial(handler, pages)
    if pages.oidc is not None:
        routes |= {
            ("GET", OIDC): pages.redirect_to_provider,
            ("GET", OIDC_BACK): pages.oidc.finish_sign_in,
        }
    for (method, path), endpoint in routes.items():
        app.router.routes.append(Route(path, endpoint, methods=[method], include_in_schema=False))


PAGES_OF_SERVICE = Pages(
    roles=PAGE_ROLES, headers=HEADERS, refused=render_refusal, add=_add_page_routes
)


def _parse_query_number(query: QueryParams, name: str, default: int) -> int:
    """Return the whole number in this parameter of the query; the default if it is missing, or is
    no number up to 18 digits.
    """
    text = query.get(name, "")
    return int(text) if text.isdecimal() and len(text) < 19 else default


async def _read_form(request: Request) -> dict[str, str]:
    body = (await request.body()).decode(errors="replace")
    return {name: values[0] for name, values in parse_qs(body).items()}


def _check_path(path: str) -> str:
    """Return the path if it is a page of this service, else the overview's path."""
    parts = urlsplit(path)
    is_own = (
        path.startswith((f"{PAGES}/", f"{MLFLOW}/"))
        and not parts.netloc
        and not parts.scheme
        and "\\" not in path
    )
    return path if is_own and not path.startswith(SIGN_IN) else START


def _static_file(request: Request) -> Response:
    name = request.path_params["name"]
    if name not in FILES:
        return Response(status_code=404)
    content = files("orchestrator.service.pages").joinpath("static", name).read_bytes()
    return Response(
        content, media_type=FILES[name], headers={"Cache-Control": "public, max-age=300"}
    )


def _parse_jobs(text: str) -> list[Any]:
    """Return the jobs in a text. Paths are on the service's machine, so each must be absolute.
    Raises SpecError.
    """
    for spec in parse_jobs(text, SOURCE):
        wrong = next(
            ((key, path) for key, path in list_paths(spec) if not path.startswith("/")), None
        )
        if wrong is not None:
            hint = "a page has no folder to start from: write the path on the service's machine, or use `orc submit`"
            raise SpecError(
                "not an absolute path", source=SOURCE, path=wrong[0], got=wrong[1], hint=hint
            )
        if spec.is_script and spec.workdir is None:
            raise SpecError(
                "the script has no folder", source=SOURCE, path="workdir", hint="name one, absolute"
            )
    return list(read_jobs(read_document(text, SOURCE).data))
