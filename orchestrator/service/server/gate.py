"""What every request passes before a route sees it: host, token, role, size, rate; and the audit log behind it."""

from __future__ import annotations

import hmac
import logging
import re
import secrets
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass
from urllib.parse import quote, urlsplit

from fastapi import FastAPI, Request, Response
from fastapi.responses import JSONResponse
from limits import RateLimitItemPerMinute
from limits.storage import MemoryStorage
from limits.strategies import MovingWindowRateLimiter
from starlette.concurrency import run_in_threadpool
from starlette.routing import Match

from orchestrator.backends.journal.accounts import Accounts
from orchestrator.service.server.join_token import PREFIX as JOIN_PREFIX
from orchestrator.service.server.logs import REQUEST
from orchestrator.service.server.sessions import Sessions, is_same_origin
from orchestrator.specs.access import Principal, Role
from orchestrator.specs.errors import ServiceError

SIGN_IN_BYTES_MAX = 4096
BODY_BYTES_MAX = 16 * 2**20  # some 10,000 jobs
PAGES = "/ui"
SIGN_IN, STATIC = f"{PAGES}/login", f"{PAGES}/static/"
SIGNING_IN = ("/", SIGN_IN)  # with the files below STATIC: no session, nothing about jobs
OPEN = ("/healthz", "/readyz")  # for probes: any Host, no token, nothing about jobs
WRONG_TOKENS = RateLimitItemPerMinute(20)  # of one address
CHANGES = RateLimitItemPerMinute(6000)  # of one user: a batch of jobs is one
REQUEST_ID = re.compile(r"[A-Za-z0-9._-]{1,64}")

Handler = Callable[[Request], Awaitable[Response]]

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True, kw_only=True)
class Gate:
    """Admits requests to an application.

    `roles` names the role that each route needs, by method and path; a route that is missing there needs an admin.
    """

    owner_token: str
    owner: str  # name of the user who holds it
    accounts: Accounts
    hosts: frozenset[str]
    roles: Mapping[tuple[str, str], Role]
    joining: frozenset[tuple[str, str]]  # routes for which the token of joining machines is enough
    join_secret: Callable[[], str]  # of that token; empty: there is none
    body_bytes_max: Mapping[tuple[str, str], int]  # of routes that take more than BODY_BYTES_MAX
    rates: MovingWindowRateLimiter
    sessions: Sessions
    as_page: Callable[[Request, Response], Awaitable[Response]] | None  # an answer below PAGES, as browsers take it

    async def __call__(self, request: Request, handler: Handler) -> Response:
        """The answer of the route, or why the request is refused: 401, 403, 411, 413, 429."""
        given_id = request.headers.get("x-request-id", "")
        request.state.id = given_id if REQUEST_ID.fullmatch(given_id) else secrets.token_hex(8)
        REQUEST.set(request.state.id)
        request.state.principal = None
        answer = await self._answered(request, handler)
        if self.as_page is not None and request.url.path.startswith(PAGES):
            answer = await self.as_page(request, answer)
        answer.headers["X-Request-Id"] = request.state.id
        return answer

    async def _answered(self, request: Request, handler: Handler) -> Response:
        if request.url.path in OPEN and request.method == "GET":
            return await handler(request)
        host = _host_of(request)
        if host not in self.hosts:  # a page of another site, whose name was made to lead here
            return refusal(403, f"the Host {host!r} is not allowed: `orc up --allowed-host {host or 'NAME'}` allows it")
        by_browser = "authorization" not in request.headers
        if by_browser and request.method != "GET" and "cookie" in request.headers and not is_same_origin(request):
            return refusal(403, "a page of another site sent this")
        principal = await run_in_threadpool(self.principal, request)
        request.state.principal = principal
        if request.url.path in SIGNING_IN or request.url.path.startswith(STATIC):
            return await self._signing_in(request, handler)
        if principal is None:
            if by_browser and request.url.path.startswith(PAGES):
                return refusal(401, "sign in")
            if self.is_guessing(request):
                return refusal(429, "too many wrong tokens from this address: wait a minute")
            return refusal(401, "wrong token: `orc login` keeps one, and a home folder has its own")
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdecimal():
            return refusal(411, "a body needs its length")
        asked = self._asked(request)
        limit = BODY_BYTES_MAX if asked is None else self.body_bytes_max.get(asked, BODY_BYTES_MAX)
        if int(length) > limit:
            return refusal(413, f"the body is longer than {limit} bytes")
        is_change = request.method != "GET"
        if is_change and not principal.is_owner and not self.rates.hit(CHANGES, "changes", principal.name):
            return refusal(429, f"{CHANGES.amount} changes a minute are allowed: wait, or submit jobs in a batch")
        needed = Role.VIEWER if asked is None else self.roles.get(asked, Role.ADMIN)  # no such route: 404 or 405
        if principal.is_joining and asked not in self.joining:
            answer: Response = refusal(403, "this token lets machines join, and nothing else")
        elif not principal.role.may(needed):
            answer = refusal(403, f"{principal.name} is {principal.role}: this needs the role {needed}")
        else:
            answer = await handler(request)
        if is_change:
            await run_in_threadpool(self._record, request, principal, answer.status_code)
        return answer

    async def _signing_in(self, request: Request, handler: Handler) -> Response:
        """The form that a token is typed into takes no body but that."""
        length = request.headers.get("content-length", "0")
        if "transfer-encoding" in request.headers or not length.isdecimal() or int(length) > SIGN_IN_BYTES_MAX:
            return refusal(413, f"the body is longer than {SIGN_IN_BYTES_MAX} bytes")
        if request.method != "GET" and not is_same_origin(request):
            return refusal(403, "a page of another site sent this")
        return await handler(request)

    def is_guessing(self, request: Request) -> bool:
        """Count a wrong token; whether its address has sent too many."""
        return not self.rates.hit(WRONG_TOKENS, "wrong", request.client.host if request.client else "")

    def principal(self, request: Request) -> Principal | None:
        """Who sent the request, by its token, else by the session of its browser; None where neither admits anybody."""
        given = request.headers.get("authorization")
        if given is None:
            return self.sessions.principal(request)
        if hmac.compare_digest(given.encode(), f"Bearer {self.owner_token}".encode()):
            return Principal(name=self.owner, role=Role.ADMIN, is_owner=True)
        if given.startswith(f"Bearer {JOIN_PREFIX}"):
            secret = self.join_secret()
            fits = bool(secret) and hmac.compare_digest(given.encode(), f"Bearer {secret}".encode())
            return Principal(name="join", role=Role.OPERATOR, is_joining=True) if fits else None
        return self.accounts.principal(given.removeprefix("Bearer ")) if given.startswith("Bearer ") else None

    def _asked(self, request: Request) -> tuple[str, str] | None:
        """Method and path of the route; None where there is none."""
        application: FastAPI = request.app
        for route in application.routes:
            matched, _ = route.matches(request.scope)
            if matched is Match.FULL:
                return request.method, getattr(route, "path", "")
        return None

    def _record(self, request: Request, principal: Principal, status: int) -> None:
        action = f"{request.method} {quote(request.url.path)}"  # quoted: no line of its own in a log
        log.info("request id=%s user=%s action=%s status=%d", request.state.id, principal.name, action, status)
        try:
            self.accounts.record(principal, request.state.id, action, status)
        except ServiceError:  # the journal is away: what was asked was refused, too
            log.exception("the audit log cannot be written")


def limiter() -> MovingWindowRateLimiter:
    """Counts wrong tokens by address and changes by user, in memory."""
    return MovingWindowRateLimiter(MemoryStorage())


def refusal(status: int, message: str) -> JSONResponse:
    """An error as every route answers it."""
    return JSONResponse({"error": message.encode(errors="replace").decode()}, status_code=status)


def _host_of(request: Request) -> str:
    try:
        return (urlsplit(f"//{request.headers.get('host', '')}").hostname or "").lower()
    except ValueError:
        return ""
