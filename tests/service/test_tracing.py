"""Laws of traces: one trace of each job, under the client's span, at a real receiver of OTLP over HTTP."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.otel import spans_of
from orchestrator.service.server.tracing import Tracing
from orchestrator.specs.span import Span, parent_of
from tests.service.test_reach import Machine
from tests.service.worlds import World, job_spec

ROOT = Path(__file__).parents[2]
CLIENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"
UNSAMPLED = CLIENT[:-2] + "00"
PATIENCE_S = 120.0
JOB = """\
name: traced
model:
  decoder: {vocab_size: 256, hidden_size: 32, intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [corpus.txt], sequence_length: 32}
global_batch_size: 8
training: {max_steps: 4, checkpoint_every_steps: 100}
"""


class Sent(list[Span]):
    def send(self, span: Span) -> None:
        self.append(span)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path)
    yield world
    world.journal.close()


@pytest.fixture
def receiver(tmp_path: Path) -> Iterator[tuple[str, Path]]:
    file = tmp_path / "spans.jsonl"
    command = [sys.executable, "-m", "tests.service.trace_receiver", str(file)]
    with subprocess.Popen(command, cwd=ROOT, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        yield f"http://127.0.0.1:{int(process.stdout.readline())}", file
        process.terminate()


def received(file: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in file.read_text().splitlines()] if file.exists() else []


@pytest.mark.long
@pytest.mark.timeout(600)
def test_a_job_is_one_trace_from_submit_to_first_step_under_the_clients_span(
    tmp_path: Path, receiver: tuple[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    url, file = receiver
    machine = Machine(folder=tmp_path)
    (tmp_path / "corpus.txt").write_text("the quick brown fox jumps over the lazy dog. " * 200)
    (tmp_path / "job.yaml").write_text(JOB)
    for name, text in {
        "OTEL_EXPORTER_OTLP_ENDPOINT": url,
        "OTEL_EXPORTER_OTLP_HEADERS": "x-key=the-key-of-the-receiver",
        "OTEL_BSP_SCHEDULE_DELAY": "100",
        "OTEL_SERVICE_NAME": "lab",
        "TRACEPARENT": CLIENT,
    }.items():
        monkeypatch.setenv(name, text)
    machine.orc("up")
    try:
        job_id = machine.orc("run", str(tmp_path / "job.yaml"))["id"]
        until_s = time.monotonic() + PATIENCE_S
        while "job" not in {span["name"] for span in received(file)}:
            assert time.monotonic() < until_s, received(file)
            time.sleep(0.1)
        environment = next((tmp_path / "home" / "jobs" / job_id / "attempts" / "1").glob("*guard.json"), None)
        assert environment is None or "the-key-of-the-receiver" not in environment.read_text()
    finally:
        machine.orc("down", "--force")
    spans = {span["name"]: span for span in received(file)}
    assert set(spans) == {"submit", "plan", "launch", "first step", "attempt", "job"}
    assert {(span["trace"], span["job"], span["is_error"]) for span in spans.values()} == {
        (CLIENT.split("-")[1], job_id, False)
    }
    assert {(span["path"], span["service"], span["key"]) for span in spans.values()} == {
        ("/v1/traces", "lab", "the-key-of-the-receiver")
    }
    ids = {name: span["span"] for name, span in spans.items()}
    assert {name: span["parent"] for name, span in spans.items()} == {
        "job": CLIENT.split("-")[2],
        "submit": ids["job"],
        "plan": ids["job"],
        "attempt": ids["job"],
        "launch": ids["attempt"],
        "first step": ids["attempt"],
    }
    order = [spans[name]["ends_s"] for name in ("plan", "launch", "first step", "attempt")]
    assert order == sorted(order)
    assert spans["launch"]["begins_s"] == pytest.approx(spans["plan"]["ends_s"])
    assert spans["first step"]["ends_s"] - spans["first step"]["begins_s"] > 0


def test_each_span_is_sent_once_and_a_later_service_goes_on_in_the_same_trace(world: World) -> None:
    job_id = world.submit()
    sent = Sent()
    tracing = Tracing(sent, world.controller, world.home, world.controller._clock)
    tracing.add_jobs([job_id], 0.0, CLIENT)
    world.turn_until("running")
    for _ in range(3):
        tracing.look()
    later = Tracing(sent, world.controller, world.home, world.controller._clock)
    world.turn_until("succeeded")
    for _ in range(3):
        later.look()
    names = [span.name for span in sent]
    assert sorted(set(names)) == sorted({"submit", "plan", "launch", "attempt", "job"})
    assert names.count("job") == names.count("attempt") == names.count("submit") == 1
    assert {span.trace_id for span in sent} == {int(CLIENT.split("-")[1], 16)}
    assert len({(span.name, span.span_id) for span in sent}) == len(set(names)), "the same span has the same id"


def test_a_client_that_samples_nothing_has_no_spans_and_without_a_client_each_job_has_a_trace(world: World) -> None:
    unsampled, first, second = (world.submit() for _ in range(3))
    sent = Sent()
    tracing = Tracing(sent, world.controller, world.home, world.controller._clock)
    tracing.add_jobs([unsampled], 0.0, UNSAMPLED)
    tracing.add_jobs([first, second], 0.0, "")
    world.turn_until("succeeded", 3)
    tracing.look()
    assert {span.attributes["orc.job_id"] for span in sent} == {first, second}
    assert len({span.trace_id for span in sent}) == 2
    assert {span.name for span in sent if span.parent_id is None} == {"job"}


WRONG = ("", "00", CLIENT.upper(), CLIENT[:-1], f"{CLIENT}-x", CLIENT.replace("00-", "ff-", 1), CLIENT + "\n")


def test_only_a_traceparent_of_w3c_counts() -> None:
    assert parent_of(CLIENT) is not None
    assert not any(
        parent_of(text) for text in (*WRONG, f"00-{'0' * 32}-b7ad6b7169203331-01", f"00-{'1' * 32}-{'0' * 16}-01")
    )


def test_what_names_no_receiver_imports_and_sends_nothing() -> None:
    assert spans_of({}) is None
    assert spans_of({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}) is None
    program = (
        "import sys, orchestrator.service.server.daemon; from orchestrator.backends.otel import spans_of; "
        "assert spans_of({}) is None; assert 'opentelemetry.exporter.otlp.proto.http' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, timeout=PATIENCE_S)


def test_a_receiver_that_is_away_holds_up_nobody_and_its_key_leaves_the_environment(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:1")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "x-key=secret")
    spans = spans_of(os.environ)
    assert spans is not None
    assert "OTEL_EXPORTER_OTLP_HEADERS" not in os.environ
    span = Span(name="job", trace_id=1, span_id=2, parent_id=None, begins_s=1.0, ends_s=2.0)
    began_s = time.monotonic()
    for _ in range(10_000):
        spans.send(span)
    assert time.monotonic() - began_s < 30.0
    threading.Thread(target=spans.close, daemon=True).start()


def test_a_traceparent_that_is_none_hinders_no_submission(world: World) -> None:
    for text in WRONG[:-1]:
        answer = world.client.post("/jobs", json={"spec": job_spec()}, headers={"traceparent": text})
        assert answer.status_code == 200, answer.text


def test_no_span_of_a_job_is_sent_before_its_client_is_known(world: World) -> None:
    sent = Sent()
    tracing = Tracing(sent, world.controller, world.home, world.controller._clock)
    job_id = world.submit()
    world.turn_until("running")
    tracing.look()  # the thread is faster than the answer of the request
    assert not sent
    tracing.add_jobs([job_id], 0.0, CLIENT)
    tracing.look()
    assert {span.trace_id for span in sent} == {int(CLIENT.split("-")[1], 16)}
