"""Laws of what a running rank writes: no file of one job changes an answer about another, and no answer is a 500."""

from __future__ import annotations

import json
import random
import sqlite3
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from orchestrator.backends.journal.journal import Journal
from orchestrator.backends.threads import ThreadFaults
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.routes import attempt_files
from orchestrator.service.views.records import JobView, make_job_view
from orchestrator.specs.job_record import Job
from orchestrator.specs.run import JobFolder
from tests.backends.test_ends_despite_faults import GOOD, POISONS
from tests.scheduling.faulty_world import FaultyBackend
from tests.scheduling.world import CLUSTERS
from tests.service.worlds import World

POISONED_HOME = Path(__file__).parent / "data" / "home_poisoned_by_1334597.sql"
OF_ALL = (
    "/jobs",
    "/metrics",
    "/readyz",
    "/cluster",
    "/forecast",
    *(f"/ui/{page}" for page in ("overview", "queue", "cluster", "night")),
)
OF_ONE = ("/jobs/{}", "/jobs/{}/explanation", "/ui/jobs/{}", "/ui/jobs/{}/plan", "/ui/jobs/{}/log")
METRIC_LINES = (
    b'{"step": 1, "loss": 1e999}',
    b"[" * 70_000,
    b'{"step": 1e400}',
    b'{"step": 2, "loss": 0.5}',
    b"\xff\n",
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    yield (world := World(tmp_path))
    world.journal.close()


def two_running(world: World) -> tuple[str, str]:
    ids = world.submit(), world.submit()
    world.turn_until("running", 2)
    for job_id in ids:
        JobFolder(world.home, job_id).attempt(1).path.mkdir(parents=True)
    return ids


def failures(world: World, job_id: str) -> list[tuple[str, int]]:
    """The answers of the service about a job and about all that are no 200."""
    paths = (*OF_ALL, *(path.format(job_id) for path in OF_ONE))
    codes = [(path, world.client.get(path).status_code) for path in paths]
    return [answer for answer in codes if answer[1] != 200]


def other_view(world: World, job_id: str) -> dict[str, Any]:
    jobs = world.client.get("/jobs").json()["jobs"]
    (view,) = (job for job in jobs if job["id"] == job_id)
    return dict(view)


def test_a_poisoned_heartbeat_costs_no_answer_and_no_other_job(world: World) -> None:
    poisoned, other = two_running(world)
    folder = JobFolder(world.home, poisoned).attempt(1)
    before = other_view(world, other)
    assert failures(world, poisoned) == []
    texts = [json.dumps({**GOOD, **poison}) for poison in POISONS]
    for text in (*texts, "[" * 200_000, '{"a":' * 200_000, "9" * 5000, "\x00", "{"):
        folder.heartbeat(0).write_bytes(text.encode(errors="surrogatepass"))
        assert failures(world, poisoned) == [], text[:80]
        assert other_view(world, other) == before, text[:80]


def test_what_a_rank_wrote_and_nobody_can_read_stands_in_its_row(world: World) -> None:
    poisoned, _ = two_running(world)
    JobFolder(world.home, poisoned).attempt(1).heartbeat(0).write_text(
        json.dumps({**GOOD, "step_s": "x"})
    )
    view = other_view(world, poisoned)
    assert "step_s has a wrong type" in view["reason"]
    assert view["progress"]["step"] == GOOD["step"], "what is right is shown"


def test_poisoned_curves_and_samples_cost_no_page(world: World) -> None:
    poisoned, _ = two_running(world)
    folder = JobFolder(world.home, poisoned).attempt(1)
    assert failures(world, poisoned) == []
    draw = random.Random(53)
    for _ in range(10):
        text = b"\n".join(draw.choices(METRIC_LINES, k=5))
        folder.metrics.write_bytes(text)
        (folder.path / "system.node.jsonl").write_bytes(text.replace(b"step", b"at_s"))
        assert failures(world, poisoned) == []


def test_a_row_that_cannot_be_made_costs_one_row(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken, other = two_running(world)

    def fail_for_one(job: Job, *arguments: Any, **named: Any) -> JobView:
        if job.id == broken and job.attempts:
            raise LookupError("planted")
        return make_job_view(job, *arguments, **named)

    monkeypatch.setattr(attempt_files, "make_job_view", fail_for_one)
    assert other_view(world, other)["status"] == "running"
    assert "cannot be shown: LookupError: planted" in other_view(world, broken)["reason"]


def test_a_home_that_an_earlier_version_let_ranks_poison_is_shown_again(tmp_path: Path) -> None:
    path = tmp_path / "journal.sqlite"
    with closing(sqlite3.connect(path)) as database:
        database.executescript(POISONED_HOME.read_text())
    with closing(Journal(f"sqlite:///{path}")) as journal:
        backend = FaultyBackend(CLUSTERS[2], seed=3, hazards={}, repeat_chance=0.0)
        controller = Controller(journal, backend, backend.current_time_s)
        jobs = [*controller.state.jobs.values(), *controller.list_ended_jobs(100)]
        assert len(jobs) == 10
        for job in jobs:
            json.dumps(make_job_view(job), allow_nan=False)
            beats = [
                beat
                for attempt in job.attempts
                if attempt.evidence
                for beat in attempt.evidence.heartbeats
            ]
            assert all(abs(beat.at_s) < 1e12 and abs(beat.step) < 2**53 for beat in beats), job.id


def test_a_thread_that_ends_unexpectedly_is_named(world: World) -> None:
    faults = ThreadFaults()
    world.controller.health.register_source(faults.describe_faults)
    assert world.client.get("/readyz").json()["problems"] == []
    faults.record_fault("sweeps", LookupError("planted"))
    assert world.client.get("/readyz").json()["problems"] == [
        "the thread sweeps of the service ended unexpectedly: LookupError: planted; "
        "`orc down` and `orc up` start it again, and jobs that run go on"
    ]
