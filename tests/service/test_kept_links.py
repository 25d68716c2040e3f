"""What people hold on to: the service's port over its starts, and a reason that says only what delays the job."""

from __future__ import annotations

import socket

from fastapi import FastAPI

from orchestrator.scheduling.reports.morning import _classify_use
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.health import Health
from orchestrator.specs.attempt import FailureKind


def test_a_port_stays_over_starts_and_another_is_taken_where_somebody_has_it() -> None:
    with serve_http(FastAPI()) as port:
        pass
    with serve_http(FastAPI(), port=port) as again:
        assert again == port
    with socket.socket() as other:
        other.bind(("127.0.0.1", port))
        other.listen()
        with serve_http(FastAPI(), port=port) as another:
            assert another not in (0, port)


def test_a_problem_that_delays_no_job_is_told_and_stands_in_no_reason() -> None:
    health = Health()
    health.register_source(lambda: "no notice reaches desk", delays_jobs=False)
    health.register_source(lambda: "the disk is full", is_fatal=True)
    assert health.list_problems() == ["no notice reaches desk", "the disk is full"]
    assert health.list_delays() == health.list_failures() == ["the disk is full"]


def test_a_cancelled_attempt_is_no_loss_by_failure() -> None:
    uses = {kind: _classify_use(kind.value) for kind in FailureKind}
    assert uses[FailureKind.CANCELLED] == "cancelled"
    assert uses[FailureKind.DEVICE_OOM] == "lost"
    assert uses[FailureKind.PROBED] == "probing"
