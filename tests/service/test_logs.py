"""Laws of the service's log: one record after the other, each with what is known of it, and none that others wrote."""

from __future__ import annotations

import io
import json
import logging
import os
import re
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.service.server import logs
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.logs import CONTINUED, JsonFormatter, TextFormatter
from tests.service.services import TOKEN
from tests.service.worlds import World, job_spec

FORGED = '\r\n2026-01-01 00:00:00,000 CRITICAL orc: forged\n{"level": "critical", "message": "forged"}\x1b[2J\u2028\x85'
TIME = re.compile(r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d,\d{3} ")
texts = st.text() | st.text(alphabet="a\n\r\t\x00\x0b\x0c\x1b\x1c\x85\u2028\u2029{}\"'\\%")


def record(message: str, **fields: object) -> logging.LogRecord:
    made = logging.LogRecord("orc", logging.INFO, __file__, 1, "%s", (message,), None)
    made.__dict__.update(fields)
    return made


@given(message=texts, job=texts, request=texts)
def test_a_json_record_is_one_line_that_says_what_was_meant(
    message: str, job: str, request: str
) -> None:
    line = JsonFormatter().format(record(message, job=job, attempt=2, request=request))
    assert len(line.splitlines()) == 1
    assert line.isascii()
    entry = json.loads(line)
    assert (entry["message"], entry["job"], entry["attempt"], entry["request"]) == (
        message,
        job,
        2,
        request,
    )
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{3}Z", entry["time"])


@given(message=texts)
def test_a_text_record_begins_with_its_time_and_no_other_line_can(message: str) -> None:
    first, *more = TextFormatter().format(record(message)).splitlines()
    assert TIME.match(first)
    assert all(line.startswith(CONTINUED) for line in more)
    assert len(more) == message.count("\n")


@pytest.fixture
def log_stream(monkeypatch: pytest.MonkeyPatch) -> Iterator[io.StringIO]:
    """Yield the stream to which a service that logs JSON writes, in the place of stderr."""
    root, hooks = logging.getLogger(), (sys.excepthook, logs.threading.excepthook)
    before = root.handlers[:], root.level
    stream = io.StringIO()
    monkeypatch.setattr(sys, "stderr", stream)
    logs.configure_logging("json")
    yield stream
    root.handlers[:], root.level = before
    sys.excepthook, logs.threading.excepthook = hooks
    logging.captureWarnings(False)


def lines(stream: io.StringIO) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def test_a_jobs_life_is_told_with_job_attempt_and_request(
    tmp_path: Path, log_stream: io.StringIO
) -> None:
    world = World(tmp_path)
    job_id = world.client.post(
        "/jobs", json={"spec": job_spec()}, headers={"X-Request-Id": "night-7"}
    ).json()["id"]
    world.turn_until("succeeded")
    world.journal.close()
    records = lines(log_stream)
    by_message = {record["message"]: record for record in records}
    assert by_message[f"submitted jobs=1 first={job_id} last={job_id}"]["request"] == "night-7"
    (launched,) = [record for record in records if record["message"].startswith("action launch")]
    assert (launched["job"], launched["attempt"], "request" in launched) == (job_id, 1, False)
    assert by_message[f"event finished job={job_id} attempt=1"]["attempt"] == 1
    (request,) = [record for record in records if record["message"].startswith("request ")]
    assert request["request"] == "night-7"


def test_nothing_that_a_client_sends_makes_a_record_of_its_own(
    tmp_path: Path, log_stream: io.StringIO
) -> None:
    world = World(tmp_path)
    before = len(lines(log_stream))
    headers = {
        "User-Agent": FORGED.encode(),
        "X-Request-Id": FORGED.encode(),
        "Referer": FORGED.encode(),
    }
    requests = 0
    for method, path, body in (
        ("POST", "/jobs", {"spec": job_spec() | {"name": FORGED}}),
        ("POST", "/jobs", {"spec": job_spec() | {"user": FORGED}}),
        ("POST", "/jobs/cancel", {"jobs": [FORGED]}),
        ("POST", "/nodes/%0d%0aforged/drain", {}),
        ("PUT", "/users/%0aforged", {"role": "member"}),
        ("POST", "/tokens", {"user": FORGED}),
        ("DELETE", "/%0a%1b%5b2Jforged", None),
    ):
        answer = world.client.request(method, path, json=body, headers=headers)
        assert 400 <= answer.status_code < 500, (path, answer.text)
        assert re.fullmatch(r"[0-9a-f]{16}", answer.headers["x-request-id"])
        requests += 1
    records = lines(log_stream)[before:]
    refusals = [
        record
        for record in records
        if record["logger"] == "orchestrator.service.server.access.gate"
    ]
    assert len(refusals) == requests
    assert not [
        record for record in records if record["level"] == "critical" or "\n" in record["message"]
    ]
    world.journal.close()


def test_a_header_cannot_be_split(tmp_path: Path) -> None:
    """The header is sent over a socket, where no client library checks it."""
    world = World(tmp_path)
    with serve_http(world.app) as port:
        for forged in (
            b"a\rSet-Cookie: x=1",
            b"a\x00b",
            b"a%0d%0aSet-Cookie: x=1",
            b"a\n Set-Cookie: x=1",
        ):
            with socket.create_connection(("127.0.0.1", port), timeout=10) as connection:
                connection.sendall(
                    b"GET /whoami HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
                    b"Authorization: Bearer "
                    + TOKEN.encode()
                    + b"\r\nX-Request-Id: "
                    + forged
                    + b"\r\n\r\n"
                )
                answer = b"".join(iter(lambda: connection.recv(65536), b""))
            assert answer.startswith((b"HTTP/1.1 200", b"HTTP/1.1 400")), answer
            assert b"set-cookie" not in answer.lower()
    world.journal.close()


def test_what_nobody_catches_is_one_record_too() -> None:
    program = "from orchestrator.service.server import logs; logs.configure_logging('json'); raise ValueError('a\\nb')"
    ended = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=60
    )
    assert ended.returncode == 1
    (line,) = ended.stderr.splitlines()
    record = json.loads(line)
    assert (record["level"], record["message"]) == ("critical", "uncaught ValueError")
    assert record["exception"].endswith("ValueError: a\nb")


def test_an_unknown_format_is_refused(tmp_path: Path) -> None:
    ended = subprocess.run(
        [sys.executable, "-m", "orchestrator.service.process", "--home", str(tmp_path / "home")],
        env={**os.environ, "ORC_LOG_FORMAT": "xml"},
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert ended.returncode == 1
    assert "ORC_LOG_FORMAT: no format of a log" in ended.stderr
    assert not (tmp_path / "home").exists()
