"""A service that may not decide lives, is not ready, and refuses everything else."""

from __future__ import annotations

import httpx
import pytest

from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.routes.waiting import make_standby_app


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/healthz", 200),
        ("GET", "/readyz", 503),
        ("GET", "/jobs", 503),
        ("POST", "/jobs/batch", 503),
    ],
)
def test_a_waiting_service_is_alive_and_not_ready(method: str, path: str, status: int) -> None:
    with serve_http(make_standby_app()) as port:
        answer = httpx.request(method, f"http://127.0.0.1:{port}{path}", trust_env=False)
    assert answer.status_code == status
    assert status == 200 or "standby" in answer.json()["error"]
