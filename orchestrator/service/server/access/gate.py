"""Checks on every request before its route: host, token, role, size, rate. Also writes the audit log."""

from __future__ import annotations

import hmac
import json
import logging
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from typing import Protocol
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.concurrency import run_in_threadpool
from starlette.datastructures import MutableHeaders
from starlette.routing import Match
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.backends.mlflow.server import ADDRESS as MLFLOW
from orchestrator.service.client.join_token import PREFIX as JOIN_PREFIX
from orchestrator.service.server.access.sessions import Sessions, is_same_origin
from orchestrator.service.server.access.sign_in_links import SignInLinks
from orchestrator.service.server.logs import REQUEST
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.frozen import frozen

SIGN_IN_BYTES_MAX = 4096
BODY_BYTES_MAX = 16 * 2**20  # some 10,000 jobs
# of a route that takes no list of jobs: a job has at most 262,144 characters
JSON_BYTES_MAX = 2**20
PAGES = "/ui"
REPORT = "/report"
SIGN_IN = f"{PAGES}/login"
STATIC = f"{PAGES}/static/"
OIDC = f"{SIGN_IN}/oidc"
LINK = f"{SIGN_IN}/link/"
OIDC_BACK = f"{OIDC}/callback"
SIGNING_IN = (
    "/",
    SIGN_IN,
    OIDC,
    OIDC_BACK,
)  # with what is below STATIC and LINK: no session, nothing about jobs
OPEN = ("/healthz", "/readyz")  # for probes: any Host, no token, nothing about jobs
WRONG_TOKENS = RateLimitItemPerMinute(20)  # of one address
CHANGES = RateLimitItemPerMinute(6000)  # of one user: a batch of jobs is one
LOOKS = RateLimitItemPerMinute(300)  # of one user at pages and reports
MLFLOW_LOOKS = RateLimitItemPerMinute(
    3000
)  # of one user at MLflow: one of its pages makes up to 50
OBJECTS_MAX, OBJECT_CHARS_MAX = 10, 200  # that a row of the audit log names
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

log = logging.getLogger(__name__)


Route = tuple[str, str]  # method and path


def parse_route(method_and_path: str) -> Route:
    """Return (method, path) of a route's name such as `GET /jobs`."""
    method, path = method_and_path.split(" ")
    return method, path


def make_role_by_route(routes_by_role: Mapping[Role, Iterable[str]]) -> dict[Route, Role]:
    """Return {(method, path): role that it needs} from the routes' names by role."""
    roles = dict[Route, Role]()
    for role, names in routes_by_role.items():
        roles |= dict.fromkeys(map(parse_route, names), role)
    return roles


class PageAnswers(Protocol):
    """What answers to browsers (for paths below PAGES) have: headers, and pages in place of plain
    refusals.
    """

    @property
    def headers(self) -> Mapping[str, str]:
        """The headers that each page has."""

    @property
    def refused(self) -> Callable[[Request, int, str], Response]:
        """The function that returns a refusal as a page, from the request, its status and the
        reason.
        """


@frozen
class Gate:
    """Admits requests to an application, or refuses them.

    `roles` names the role that each route needs, by method and path; a route that is missing there
    needs an admin.
    """

    owner_token: str
    owner: str  # name of the user who holds it
    accounts: Accounts
    hosts: frozenset[str]
    roles: Mapping[Route, Role]
    reading: frozenset[Route]  # routes that change nothing, beside those of GET
    joining: frozenset[Route]  # routes for which the token of joining machines is enough
    join_secret: Callable[[], str]  # of that token; empty: there is none
    body_bytes_max: Mapping[Route, int]  # of routes that take less or more than BODY_BYTES_MAX
    rates: MovingWindowRateLimiter
    sessions: Sessions
    links: SignInLinks
    pages: PageAnswers | None  # None: the API alone

    async def find_refusal_and_whether_audited(
        self, request: Request
    ) -> tuple[Response | None, bool]:
        """Return (refusal of the request or None, whether the request is written to the audit log).

        A refusal has status 401, 403, 411, 413, 422 or 429; None admits the request.
        """
        foreign = self._refuse_other_sites(request)
        if foreign is not None:
            return foreign, False
        principal = await run_in_threadpool(self.find_principal, request)
        request.state.principal = principal
        if request.url.path in SIGNING_IN or request.url.path.startswith((STATIC, LINK)):
            return _refuse_long_sign_in(request), False
        if principal is None:
            return self._make_refusal_of_stranger(request), False
        route = self._find_route(request)
        is_change = request.method != "GET" and route not in self.reading
        excess = self._refuse_size(request, route) or self._refuse_rate(
            request, principal, is_change=is_change
        )
        if excess is not None:
            return excess, False
        if "\0" in request.url.path or "%00" in request.url.query:  # PostgreSQL takes no such text
            return make_refusal(422, "the address has a NUL character"), is_change
        # no such route: 404 or 405
        needed = Role.VIEWER if route is None else self.roles.get(route, Role.ADMIN)
        if principal.is_joining and route not in self.joining:
            return make_refusal(403, "this token lets machines join, and nothing else"), is_change
        if not principal.role.includes(needed):
            return make_refusal(
                403, f"{principal.name} is {principal.role}: this needs the role {needed}"
            ), is_change
        return None, is_change

    def _refuse_other_sites(self, request: Request) -> Response | None:
        """Return the refusal of a request with a wrong Host header, or of a change sent by another
        site's page; else None.
        """
        host = _get_host_name(request)
        if host not in self.hosts:  # a page of another site, whose name was made to lead here
            allow = f"the Host {host!r} is not allowed: `orc up --allowed-host {host or 'NAME'}` allows it"
            return make_refusal(403, allow)
        by_browser = "authorization" not in request.headers
        if (
            by_browser
            and request.method != "GET"
            and "cookie" in request.headers
            and not is_same_origin(request)
        ):
            return make_refusal(403, "a page of another site sent this")
        return None

    def _make_refusal_of_stranger(self, request: Request) -> Response:
        """Return the refusal for a request without a valid token or browser session."""
        if "authorization" not in request.headers and is_page(request.url.path):
            return make_refusal(401, "sign in")
        if self.has_sent_too_many_wrong_tokens(request):
            return make_refusal(429, "too many wrong tokens from this address: wait a minute")
        return make_refusal(
            401, "wrong token: `orc login` keeps one, and a home folder has its own"
        )

    def _refuse_size(self, request: Request, route: Route | None) -> Response | None:
        """Return the refusal of a request whose body has no length or is longer than the route's
        limit; else None.
        """
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdecimal():
            return make_refusal(411, "a body needs its length")
        limit = BODY_BYTES_MAX if route is None else self.body_bytes_max.get(route, BODY_BYTES_MAX)
        return (
            make_refusal(413, f"the body is longer than {limit} bytes")
            if int(length) > limit
            else None
        )

    def _refuse_rate(
        self, request: Request, principal: Principal, *, is_change: bool
    ) -> Response | None:
        """Return the refusal of a request that exceeds its user's number per minute; else None. The
        home's owner has no limit.
        """
        if principal.is_owner:
            return None
        if is_change:
            if self.rates.hit(CHANGES, "changes", principal.name):
                return None
            return make_refusal(
                429,
                f"{CHANGES.amount} changes a minute are allowed: wait, or submit jobs in a batch",
            )
        looks = _find_page_load_limit(request.url.path)
        if looks is None or self.rates.hit(looks, "looks", principal.name):
            return None
        return make_refusal(429, f"{looks.amount} pages and reports a minute are allowed: wait")

    def has_sent_too_many_wrong_tokens(
        self, request: Request, *, adds_wrong_token: bool = True
    ) -> bool:
        """Return whether the sender's address has sent too many wrong tokens; `adds_wrong_token`
        first counts this request as one.
        """
        ask = self.rates.hit if adds_wrong_token else self.rates.test
        return not ask(WRONG_TOKENS, "wrong", request.client.host if request.client else "")

    def find_principal(self, request: Request) -> Principal | None:
        """Return the user who sent the request, found by its token or its browser session; None
        without a valid one.
        """
        authorization = request.headers.get("authorization")
        if authorization is None:
            return self.sessions.find_principal(request)
        if hmac.compare_digest(authorization.encode(), f"Bearer {self.owner_token}".encode()):
            return Principal(name=self.owner, role=Role.ADMIN, is_owner=True)
        if authorization.startswith(f"Bearer {JOIN_PREFIX}"):
            secret = self.join_secret()
            fits = bool(secret) and hmac.compare_digest(
                authorization.encode(), f"Bearer {secret}".encode()
            )
            return Principal(name="join", role=Role.OPERATOR, is_joining=True) if fits else None
        return (
            self.accounts.find_principal_by_token(authorization.removeprefix("Bearer "))
            if authorization.startswith("Bearer ")
            else None
        )

    def _find_route(self, request: Request) -> Route | None:
        """Return (method, path) of the request's route; None where there is no such route."""
        application: FastAPI = request.app
        for route in application.routes:
            match, _ = route.matches(request.scope)
            if match is Match.FULL:
                return request.method, getattr(route, "path", "")
        return None

    def add_audit_row(self, request: Request, status: int) -> None:
        """Add a row for the request, with the status of its answer, to the audit log."""
        principal: Principal = request.state.principal
        objects = request.state.objects  # quoted, as the path is: no line of its own in a log
        names = [quote(name[:OBJECT_CHARS_MAX], safe="/=:,") for name in objects[:OBJECTS_MAX]]
        if len(objects) > OBJECTS_MAX:
            names.append(f"and {len(objects) - OBJECTS_MAX} more")
        action = " ".join([request.method, quote(request.url.path), *names])
        log.info(
            "request id=%s user=%s action=%s status=%d",
            request.state.id,
            principal.name,
            action,
            status,
        )
        try:
            self.accounts.add_audit_row(principal, request.state.id, action, status)
        except ServiceError as error:  # the journal is away: what was asked was refused, too
            log.error("request id=%s has no row in the audit log: %s", request.state.id, error)


class Gated:
    """An ASGI application behind a gate, which checks each request.

    Streams pass unchanged, without another task or queue.
    """

    def __init__(self, app: ASGIApp, gate: Gate) -> None:
        self._app = app
        self._gate = gate

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the request to its route, or refuse it. Health probes (the paths in OPEN) always
        pass.
        """
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        request = Request(scope, receive)
        header_id = request.headers.get("x-request-id", "")
        request.state.id = header_id if REQUEST_ID.fullmatch(header_id) else secrets.token_hex(8)
        REQUEST.set(request.state.id)
        request.state.principal = None
        request.state.objects = ()
        verdict = None
        is_audited = False
        if request.url.path not in OPEN or request.method != "GET":
            verdict, is_audited = await self._gate.find_refusal_and_whether_audited(request)
        shown = self._gate.pages is not None and is_page(request.url.path)
        answer = _Answer(self._gate, request, send, is_audited=is_audited, is_page=shown)
        try:
            await (self._app if verdict is None else verdict)(scope, receive, answer.send)
        except Exception:  # a fault of ours, which Starlette answers with 500 behind this gate
            if is_audited:
                await run_in_threadpool(self._gate.add_audit_row, request, 500)
            raise


class _Answer:
    """Sends a route's answer: it adds headers, writes the audit log first, and turns refusals for
    browsers into pages.
    """

    def __init__(
        self, gate: Gate, request: Request, send: Send, *, is_audited: bool, is_page: bool
    ) -> None:
        self._gate = gate
        self._request = request
        self._send = send
        self._is_audited = is_audited
        self._is_page = is_page
        self._refusal: tuple[int, bytearray] | None = None  # of a page: kept until it is whole

    async def send(self, message: Message) -> None:
        """Pass on an ASGI message of the answer; a refusal for a browser is held back until it is
        complete.
        """
        if message["type"] == "http.response.start":
            await self._start_answer(message)
        elif self._refusal is None:
            await self._send(message)
        else:
            await self._send_refusal_page(message)

    async def _start_answer(self, message: Message) -> None:
        status = int(message["status"])
        headers = MutableHeaders(scope=message)
        if self._is_audited:
            await run_in_threadpool(self._gate.add_audit_row, self._request, status)
        if self._is_page and headers.get("content-type", "").startswith("application/json"):
            self._refusal = status, bytearray()
            return
        await self._send(self._add_headers(message))

    def _add_headers(self, message: Message) -> Message:
        headers = MutableHeaders(scope=message)
        headers["X-Request-Id"] = self._request.state.id
        if self._is_page and self._gate.pages is not None:
            for name, text in self._gate.pages.headers.items():
                headers.setdefault(name, text)  # MLflow's page has a policy of its own
        return message

    async def _send_refusal_page(self, message: Message) -> None:
        """Collect the refusal's JSON; once it is complete, send a page with its text instead."""
        assert self._refusal is not None, message
        assert self._gate.pages is not None, message
        status, body = self._refusal
        body += message.get("body", b"")
        if message.get("more_body", False):
            return
        page = self._gate.pages.refused(
            self._request, status, str(json.loads(bytes(body)).get("error", ""))
        )
        self._refusal = None

        async def send(part: Message) -> None:
            await self._send(
                self._add_headers(part) if part["type"] == "http.response.start" else part
            )

        await page(self._request.scope, self._request.receive, send)


def is_page(url_path: str) -> bool:
    """Return whether answers to this path are pages for people, with redirects to sign-in and error
    pages.
    """
    return url_path.startswith(PAGES) or url_path in (MLFLOW, f"{MLFLOW}/")


def _find_page_load_limit(path: str) -> RateLimitItemPerMinute | None:
    """Return how often per minute a user may load this page; None where there is no limit."""
    if path.startswith((PAGES, REPORT)):
        return LOOKS
    return MLFLOW_LOOKS if path.startswith(MLFLOW) else None


def make_rate_limiter() -> MovingWindowRateLimiter:
    """Return a rate limiter in memory, which counts wrong tokens by address and changes by user."""
    return MovingWindowRateLimiter(MemoryStorage())


def make_refusal(status: int, message: str) -> JSONResponse:
    """Return an error response with this status and message, in the API's format."""
    return JSONResponse({"error": message.encode(errors="replace").decode()}, status_code=status)


def _refuse_long_sign_in(request: Request) -> Response | None:
    """Return the refusal of a sign-in form whose body is too long or has no length; None where it
    is accepted.
    """
    length = request.headers.get("content-length", "0")
    if (
        "transfer-encoding" in request.headers
        or not length.isdecimal()
        or int(length) > SIGN_IN_BYTES_MAX
    ):
        return make_refusal(413, f"the body is longer than {SIGN_IN_BYTES_MAX} bytes")
    if request.method != "GET" and not is_same_origin(request):
        return make_refusal(403, "a page of another site sent this")
    return None


def _get_host_name(request: Request) -> str:
    try:
        return (urlsplit(f"//{request.headers.get('host', '')}").hostname or "").lower()
    except ValueError:
        return ""
