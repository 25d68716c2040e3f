"""The application of a service that may not decide yet: a standby, or one that is starting."""

from __future__ import annotations

from fastapi import FastAPI, Response

from orchestrator.service.server.access.gate import make_refusal

METHODS = ["GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"]
MESSAGE = "this service may not decide yet: it is a standby of the one that owns the journal, or it is starting"


def make_standby_app() -> FastAPI:
    """Return an application that answers /healthz with 200 and everything else with 503."""
    app = FastAPI(title="orc", docs_url=None, redoc_url=None, openapi_url=None)

    @app.get("/healthz")
    async def healthz() -> dict[str, str]:
        return {"status": "ok"}

    @app.api_route("/{path:path}", methods=METHODS)
    async def other(path: str) -> Response:  # noqa: ARG001
        return make_refusal(503, MESSAGE)

    return app
