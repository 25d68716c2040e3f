"""Reverse proxy for MLflow's pages and API, behind the service's gate.

Only listed requests are passed on. A viewer reads records; an admin changes and deletes them, too. All others are
answered with 403, also to an admin. MLflow can call other hosts, and run jobs and assistants. It reads any file of its
machine that an experiment names as its location.
"""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import AsyncIterator, Mapping
from pathlib import Path

import httpx
from fastapi import FastAPI, Request, Response
from fastapi.responses import RedirectResponse
from starlette.convertors import PathConvertor, register_url_convertor
from starlette.requests import ClientDisconnect
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from orchestrator.backends.mlflow.server import (
    ADDRESS,
    START_S,
    connect_socket,
    make_short_socket_path,
    want_server,
)
from orchestrator.service.server.access.gate import make_refusal
from orchestrator.specs.access import Role

OPEN_MAX = 64  # requests that are passed on at once
CONNECT_S, ASK_AGAIN_S = 1.0, 0.3  # to the socket file, while the server starts
TIMEOUTS_S = {"connect": 3.0, "read": 120.0, "write": 120.0, "pool": 3.0}
HOP = {
    "connection",
    "keep-alive",
    "proxy-connection",
    "te",
    "trailer",
    "transfer-encoding",
    "upgrade",
}
NOT_SENT = HOP | {
    "host",
    "authorization",
    "cookie",
    "origin",
    "referer",
    "forwarded",
    "x-forwarded-for",
}
NOT_RETURNED = HOP | {"set-cookie", "server", "date", "content-security-policy", "x-frame-options"}
API = r"(?:ajax-)?api/[23]\.0"
NOUNS = "artifacts|datasets|experiments|logged-models|metrics|model-versions|registered-models|runs|traces"
PATHS: Mapping[str, str] = {  # of mlflow 3.17
    "mlflow_read": (
        r"(?:version|static-files/.+|(?:model-versions/)?get-artifact"
        rf"|{API}/mlflow-artifacts/artifacts(?:/.+)?|{API}/mlflow/(?:{NOUNS})(?:/.+)?"
        rf"|{API}/mlflow/(?:server-info|get-trace-artifact|unified-traces"
        # which pages ask; it calls a host that a variable names, and the server has none
        r"|gateway-proxy))?"
    ),
    "mlflow_search": (
        rf"(?:graphql|{API}/mlflow/(?:(?:datasets|experiments|logged-models|runs|traces)/search"
        r"|experiments/search-datasets|registered-models/get-latest-versions|traces/(?:batchGetInfos|metrics)))"
    ),
    "mlflow_change": (
        rf"(?:{API}/mlflow-artifacts/artifacts/.+|{API}/mlflow/(?:logged-models(?:/.+)?|registered-models/[a-z-]+"
        r"|runs/(?:create|delete|delete-tag|log-[a-z]+|outputs|restore|set-tag|update)"
        r"|experiments/(?:delete|delete-experiment-tag|restore|set-experiment-tag|update)"
        r"|model-versions/(?:delete|delete-tag|set-tag|transition-stage|update)))"
    ),
}
READ, SEARCH, CHANGE = (f"{ADDRESS}/{{path:{name}}}" for name in PATHS)
ANY = f"{ADDRESS}/{{path:path}}"
CHANGES = ("POST", "PUT", "PATCH", "DELETE")
ANY_METHOD = ("GET", "HEAD", "OPTIONS", *CHANGES)
READING = frozenset({("HEAD", READ), ("POST", SEARCH)})  # they change nothing
ROLES = {
    ("GET", ADDRESS): Role.VIEWER,
    ("GET", READ): Role.VIEWER,
    **dict.fromkeys(READING, Role.VIEWER),
    **{(method, CHANGE): Role.ADMIN for method in CHANGES},
    **{(method, ANY): Role.VIEWER for method in ANY_METHOD},  # its route refuses them, and says why
}
# an artifact that is opened is of no origin, and runs nothing
DATA_POLICY = "sandbox; default-src 'none'"
PAGE_POLICY = (  # its scripts reach MLflow and not the service's own API; plots need eval
    "default-src 'none'; script-src {here}/static-files/ 'unsafe-eval'; style-src 'self' 'unsafe-inline'; "
    "img-src 'self' data: blob:; font-src 'self' data:; connect-src {here}/; worker-src blob: {here}/static-files/; "
    "frame-src blob: {here}/static-files/; manifest-src 'self'; base-uri 'none'; form-action 'none'; "
    "frame-ancestors 'self'"
)


def add_mlflow_routes(app: FastAPI, home: Path) -> None:
    """Add the routes of MLflow's pages and API to the application; `ROLES` has their roles."""
    for name, pattern in PATHS.items():
        register_url_convertor(name, type(name, (PathConvertor,), {"regex": pattern})())
    forwarder = _Forwarder(home.resolve() / "mlflow")
    app.router.routes += [
        Route(ADDRESS, lambda _: RedirectResponse(f"{ADDRESS}/"), include_in_schema=False),
        Route(READ, forwarder, methods=["GET"], include_in_schema=False),
        Route(SEARCH, forwarder, methods=["POST"], include_in_schema=False),
        Route(CHANGE, forwarder, methods=CHANGES, include_in_schema=False),
        Route(ANY, _refuse_unlisted, methods=ANY_METHOD, include_in_schema=False),
    ]


def _refuse_unlisted(request: Request) -> Response:
    reason = (
        "is not passed on to MLflow: only what reads its records is, and some changes by admins"
    )
    return make_refusal(403, f"{request.method} {request.url.path} {reason}")


class _Forwarder:
    """An ASGI application that passes requests to the MLflow server of a folder; bodies pass in
    pieces, in both directions.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._free = threading.BoundedSemaphore(
            OPEN_MAX
        )  # of the threads of all addresses that are served

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if not self._free.acquire(blocking=False):
            await make_refusal(503, f"{OPEN_MAX} requests to MLflow are open: try again")(
                scope, receive, send
            )
            return
        try:
            await self._wait_for_start()
            await self._forward_request(Request(scope, receive), send)
        except ClientDisconnect:  # amid its body
            return
        except (OSError, httpx.TransportError):  # nothing was answered yet
            reason = "MLflow does not answer: the service starts it within a minute. `orc doctor` says what it lacks"
            await make_refusal(503, reason)(scope, receive, send)
        finally:
            self._free.release()

    async def _wait_for_start(self) -> None:
        """Tell the supervisor of MLflow that it is needed, and wait until it listens. Raises
        OSError after START_S seconds.
        """
        want_server(self._folder.parent)
        until_s = time.monotonic() + START_S
        while True:
            try:
                connect_socket(self._folder, CONNECT_S).close()
            except OSError:
                if time.monotonic() > until_s:
                    raise
                await asyncio.sleep(ASK_AGAIN_S)
            else:
                return

    async def _forward_request(self, request: Request, send: Send) -> None:
        """Pass the request to MLflow, and send MLflow's answer. Raises OSError or TransportError
        before the answer begins.

        A later failure cuts the answer off.
        """
        with make_short_socket_path(self._folder) as path:
            async with httpx.AsyncHTTPTransport(uds=path, verify=False) as transport:
                answer = await transport.handle_async_request(_make_mlflow_request(request))
                assert isinstance(answer.stream, httpx.AsyncByteStream), answer
                headers = [(name.lower(), value) for name, value in answer.headers.raw]
                headers = [
                    (name, value) for name, value in headers if name.decode() not in NOT_RETURNED
                ]
                headers.append((b"content-security-policy", _make_content_policy(request).encode()))
                await send(
                    {
                        "type": "http.response.start",
                        "status": answer.status_code,
                        "headers": headers,
                    }
                )
                try:
                    async for piece in answer.stream:
                        await send({"type": "http.response.body", "body": piece, "more_body": True})
                        if await request.is_disconnected():
                            return
                except httpx.TransportError:
                    # the HTTP server closes the connection: the reader sees that the rest is
                    # missing
                    return
                await send({"type": "http.response.body"})


def _make_mlflow_request(request: Request) -> httpx.Request:
    """Return the request for MLflow, with the path exactly as it was written, and without the
    sender's credentials.
    """
    target = request.scope["raw_path"].removeprefix(ADDRESS.encode()) or b"/"
    if request.scope["query_string"]:
        target += b"?" + request.scope["query_string"]
    headers = [
        (name, value) for name, value in request.headers.raw if name.decode() not in NOT_SENT
    ]
    has_body = request.headers.get("content-length", "0") != "0"
    return httpx.Request(
        request.method,
        httpx.URL("http://localhost").copy_with(raw_path=target),
        headers=[(b"host", b"localhost"), *headers],
        content=_iterate_body(request) if has_body else None,
        extensions={"timeout": TIMEOUTS_S},
    )


async def _iterate_body(request: Request) -> AsyncIterator[bytes]:
    async for piece in request.stream():
        yield piece


def _make_content_policy(request: Request) -> str:
    below = request.url.path.removeprefix(ADDRESS)
    if below != "/" and not below.startswith("/static-files/"):
        return DATA_POLICY
    here = str(request.base_url.replace(path=ADDRESS))
    return PAGE_POLICY.format(
        here="'self'" if "[" in here else here
    )  # no policy can name an IPv6 address
