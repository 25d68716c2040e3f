"""Laws of the HTTP API: access, refusals, and what is stored."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path
from typing import Any

import pytest
import sqlalchemy
from rich.console import Console

from orchestrator.service.server.access.gate import BODY_BYTES_MAX, PAGES
from orchestrator.service.server.routes import job_routes
from orchestrator.service.terminal.expected import make_expected_table
from orchestrator.service.terminal.plan_tables import make_explanation_panel
from orchestrator.service.terminal.tables import (
    describe_guarantee,
    make_attempts_table,
    make_job_panel,
    make_queue_table,
    make_teams_table,
)
from orchestrator.service.views.records import (
    make_observations_view,
    parse_node_view,
    parse_observations_view,
    sort_jobs_for_display,
)
from orchestrator.specs.parse import parse_job
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.run import JobFolder
from tests.scheduling.factories import observation
from tests.service.services import TOKEN
from tests.service.worlds import JOB, World, job_spec

ROUTES = [
    ("GET", "/jobs"),
    ("POST", "/jobs"),
    ("POST", "/jobs/batch"),
    ("GET", "/jobs/lm-1"),
    ("GET", "/jobs/lm-1/explanation"),
    ("GET", "/jobs/lm-1/comparison"),
    ("POST", "/jobs/cancel"),
    ("POST", "/jobs/lm-1/retry"),
    ("GET", "/jobs/lm-1/attempts/1/logs"),
    ("GET", "/jobs/lm-1/attempts/1/logs/follow"),
    ("GET", "/jobs/lm-1/output"),
    ("POST", "/uploads/missing"),
    ("PUT", "/uploads/0"),
    ("GET", "/sweeps"),
    ("GET", "/sweeps/sweep-lm-1"),
    ("GET", "/cluster"),
    ("GET", "/teams"),
    ("GET", "/report"),
    ("GET", "/forecast"),
    ("GET", "/metrics"),
    ("POST", "/observations"),
    ("POST", "/nodes/n/drain"),
    ("POST", "/notify/test"),
    ("POST", "/purge"),
    ("POST", "/shutdown"),
    ("GET", "/whoami"),
    ("GET", "/users"),
    ("PUT", "/users/ada"),
    ("DELETE", "/users/ada"),
    ("POST", "/jobs/hold"),
    ("POST", "/sign-in-links"),
    ("POST", "/jobs/release"),
    ("POST", "/jobs/suspend"),
    ("POST", "/jobs/resume"),
    ("POST", "/jobs/lm-1/update"),
    ("GET", "/tokens"),
    ("POST", "/tokens"),
    ("DELETE", "/tokens/1"),
    ("GET", "/audit"),
    ("POST", "/sign-in-links"),
    ("GET", "/journal/unreadable"),
    ("DELETE", "/journal/unreadable/jobs/1"),
    ("GET", "/join"),
    ("POST", "/nodes"),
    ("DELETE", "/nodes/n"),
    ("GET", "/openapi.json"),
    ("GET", "/nothing"),
]


WRONG = (None, "", "Bearer", "Bearer wrong", TOKEN, f"Bearer {TOKEN}x", "Bearer \u00e9")


def test_requests_without_the_token_are_refused(world: World) -> None:
    answers = {
        (method, path, header): world.stranger.request(
            method, path, headers={} if header is None else {"Authorization": header.encode()}
        ).status_code
        for method, path in ROUTES
        for header in WRONG
    }
    assert {
        request: status for request, status in answers.items() if status not in (401, 429)
    } == {}
    assert 401 in answers.values()
    assert not world.ended


def test_every_route_asks_for_the_token(world: World) -> None:
    paths = {route.path for route in world.client.app.routes}  # type: ignore[attr-defined]
    checked = {
        path for path in paths if path != "/" and not path.startswith(PAGES)
    }  # pages: test_pages.py
    names = {
        "job_id": "lm-1",
        "sweep_id": "sweep-lm-1",
        "number": 1,
        "node": "n",
        "name": "ada",
        "digest": 0,
        "table": "jobs",
        "row": 1,
    }
    filled = {path.format(**names) for path in checked} - {"/healthz", "/readyz"}
    assert filled == {path for _, path in ROUTES if path != "/nothing"}


def test_a_foreign_host_name_is_refused(world: World) -> None:
    hosts = (
        "evil.example",
        "evil.example:8000",
        "127.0.0.1.evil.example",
        "",
        "[::2]:8000",
        "[::1",
    )
    assert {world.client.get("/jobs", headers={"Host": host}).status_code for host in hosts} == {
        403
    }


def test_health_needs_no_token(world: World) -> None:
    assert world.stranger.get("/healthz").json() == {"status": "ok"}


def test_a_submitted_job_is_in_the_journal_when_the_answer_comes(world: World) -> None:
    job_id = world.submit()
    assert [
        event.job_id for event in world.journal.iterate_events() if event.type == "submitted"
    ] == [job_id]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"spec": {"name": "a"}}, "global_batch_size"),
        (
            {"spec": {"name": "a", "global_batch_size": 1, "command": "x", "gpu": 1}},
            "did you mean 'gpus'",
        ),
        ({"spec": [1]}, "malformed"),
        ({"nothing": 1}, "malformed"),
        ({"spec": {}, "fault": {"kind": "flood", "rank": 0, "step": 1}}, "malformed"),
    ],
)
def test_nothing_is_stored_of_a_refused_job(
    world: World, body: dict[str, Any], message: str
) -> None:
    before = list(world.journal.iterate_events())
    answer = world.client.post("/jobs", json=body)
    assert answer.status_code == 422
    assert message in answer.json()["error"]
    assert list(world.journal.iterate_events()) == before
    assert world.client.get("/jobs").json() == {"jobs": [], "next": None}


def test_ended_jobs_are_listed_newest_first_in_pages(world: World) -> None:
    ids = [world.submit() for _ in range(5)]
    world.turn_until("succeeded", 5)
    for _ in range(2000):
        if not world.controller.state.jobs:
            break
        world.controller.run_once(10.0)
    waiting = world.submit()

    def list_ids(query: str) -> list[str]:
        return [job["id"] for job in world.client.get(f"/jobs?{query}").json()["jobs"]]

    assert list_ids("ended=9") == [*ids, waiting]
    newest = [job.id for job in world.controller.list_ended_jobs(9)]
    assert sorted(newest) == ids
    assert list_ids("ended=2") == [*sorted(newest[:2]), waiting]
    assert list_ids(f"ended=2&before={newest[1]}") == sorted(newest[2:4])
    assert world.client.get(f"/jobs/{ids[0]}").json()["job"]["status"] == "succeeded"
    assert world.client.get("/jobs?ended=1001").status_code == 422
    assert world.submit() == "lm-7", "an id was given twice"


def test_each_live_job_is_on_one_page_in_the_queues_order_and_ended_ones_are_on_the_first(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_routes, "LIVE_MAX", 3)
    world.submit()
    while world.controller.state.jobs:  # to the end, and the release of its devices
        world.controller.run_once(10.0)
    priorities = [0, 9, -9, 9, 0, -9, 9]
    for priority in priorities:
        world.client.post("/jobs", json={"spec": job_spec() | {"priority": priority}})
    pages, after = [], ""
    while after is not None:
        answer = world.client.get(f"/jobs{after and f'?after={after}'}").json()
        pages.append([job["id"] for job in answer["jobs"]])
        after = answer["next"]
    live = [job.id for job in sort_jobs_for_display(world.controller.state.jobs.values())]
    assert len(live) == len(priorities)
    assert pages == [["lm-1", *live[:3]], live[3:6], live[6:]]
    for other in ("", "1,2", "3,0,1", "0,0,x", "1,0,1'"):
        assert world.client.get("/jobs", params={"after": other}).status_code == 422, other


def test_a_batch_is_stored_in_one_transaction_or_not_at_all(world: World) -> None:
    good, bad = {"spec": job_spec()}, {"spec": {"name": "a"}}
    refused = world.client.post("/jobs/batch", json={"jobs": [good, good, bad]})
    assert refused.status_code == 422
    assert "submitted job 3" in refused.json()["error"]
    assert world.client.get("/jobs").json() == {"jobs": [], "next": None}
    assert world.client.post("/jobs/batch", json={"jobs": []}).status_code == 422
    commits = []
    sqlalchemy.event.listen(world.journal.database.engine, "commit", lambda _: commits.append(1))
    ids = world.client.post("/jobs/batch", json={"jobs": [good] * 30}).json()["ids"]
    assert ids == [f"lm-{number}" for number in range(1, 31)]
    assert len(commits) == 2, "all jobs in one, and the row of the audit log"
    assert list(world.controller.state.jobs) == ids


def test_a_body_has_a_length_and_a_bound(world: World) -> None:
    assert world.client.post("/jobs", content=b"x" * (BODY_BYTES_MAX + 1)).status_code == 413
    assert world.client.post("/jobs", content=iter([b"{}"])).status_code == 411


def test_what_does_not_exist_is_not_found(world: World) -> None:
    world.submit()
    world.turn_until("running")
    paths = (
        "/jobs/nobody",
        "/jobs/nobody/attempts/1/logs",
        "/jobs/lm-1/attempts/9/logs",
        "/jobs/lm-1/attempts/1/logs?rank=7",
        "/jobs/..%2f..%2fetc/attempts/1/logs",
    )
    assert {world.client.get(path).status_code for path in paths} == {404}


def test_a_log_is_read_from_any_offset(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    log = JobFolder(world.home, job_id).attempt(1).log(0)
    log.parent.mkdir(parents=True)
    log.write_bytes("ein Wört".encode())
    path = f"/jobs/{job_id}/attempts/1/logs?rank=0"
    whole = world.client.get(f"{path}&offset=0")
    assert (whole.content, whole.headers["x-next-offset"]) == ("ein Wört".encode(), "9")
    assert world.client.get(f"{path}&offset=7").content == b"rt"
    assert world.client.get(f"{path}&offset=9").content == b""


def test_a_live_job_with_an_unwatched_process_is_marked(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    assert "unwatched" not in world.client.get(f"/jobs/{job_id}").json()["job"]["reason"]
    folder = JobFolder(world.home, job_id).attempt(1)
    folder.path.mkdir(parents=True)
    folder.unwatched.write_text("'python -I a.py' has no guard\n'python -I b.py' has no guard\n")
    shown = (
        world.client.get(f"/jobs/{job_id}").json()["job"],
        world.client.get("/jobs").json()["jobs"][0],
    )
    assert all(
        row["reason"].endswith("; unwatched: 'python -I a.py' has no guard") for row in shown
    )


def test_a_job_is_shown_with_prediction_and_measurement_side_by_side(world: World) -> None:
    job_id = world.submit()
    world.turn_until("succeeded")
    attempt = world.client.get(f"/jobs/{job_id}").json()["job"]["attempts"][-1]
    assert attempt["outcome"] == "succeeded"
    assert attempt["estimate"]["allocated_bytes"] == sum(attempt["estimate"]["by_cause"].values())
    assert attempt["estimate"]["allocated_bytes"] == attempt["predicted_bytes"]
    assert attempt["peak_bytes"] > 0
    assert attempt["step_s"] > 0
    assert attempt["predicted_step_s"] > 0


def test_a_job_is_explained_with_its_moments_its_lessons_and_its_frontier(world: World) -> None:
    job_id = world.submit()
    world.turn_until("succeeded")
    explanation = world.client.get(f"/jobs/{job_id}/explanation").json()
    estimate = explanation["job"]["attempts"][-1]["estimate"]
    totals = [
        moment["counted_bytes"] + moment["activation_bytes"] for moment in estimate["by_moment"]
    ]
    assert max(totals) == estimate["allocated_bytes"]
    (lesson,) = explanation["lessons"]
    assert lesson[0].startswith("predicted: ")
    assert lesson[1].startswith("measured: ")
    marks = [point["mark"] for point in explanation["picture"]["points"]]
    assert marks.count("chosen") == 1
    assert explanation["picture"]["capacity_bytes"] == 256 * 2**20
    shown = io.StringIO()
    Console(file=shown, width=80).print(make_explanation_panel(explanation))
    lines = shown.getvalue().splitlines()
    assert max(map(len, lines)) <= 80
    for label in (
        "Attempt 1: ",
        "succeeded",
        "█ counted  ▒ activations",
        "  predicted  ",
        "● chosen",
        "memory ends: 256",
    ):
        assert any(label in line for line in lines), shown.getvalue()


def test_a_waiting_job_is_explained_and_forecast_by_the_state_of_the_moment(world: World) -> None:
    """Two jobs of one device run on two; the third waits for the end of either."""
    ids = [world.submit() for _ in range(3)]
    world.turn_until("running", 2)
    jobs = {job["id"]: job for job in world.client.get("/jobs").json()["jobs"]}
    (waiting,) = (job for job in jobs.values() if job["status"] == "queued")
    assert waiting["reason"].startswith("waits for 1 free ")
    explanation = world.client.get(f"/jobs/{waiting['id']}/explanation").json()
    assert explanation["job"]["reason"] == waiting["reason"]
    assert any("after the end of" in line for line in explanation["sooner"])
    assert explanation["sooner"][0].split()[0] in drawn(make_explanation_panel(explanation))
    rows = world.client.get("/forecast").json()["jobs"]
    assert {row["id"] for row in rows} == {*ids}
    assert rows[-1]["id"] == waiting["id"]
    assert rows[-1]["why"] == waiting["reason"]
    world.client.post("/jobs/cancel", json={"jobs": [waiting["id"]], "whole_arrays": False})
    assert len(world.client.get("/forecast").json()["jobs"]) == 2, "of the newest state"


def test_a_shared_cluster_shows_its_teams_and_the_user_of_each_job(tmp_path: Path) -> None:
    policy = PolicySpec(teams=[{"name": "vision", "shares": 3, "quota": 1, "users": ["ada"]}])
    world = World(tmp_path, policy)
    for user in ("ada", "bob", "bob"):
        answer = world.client.post("/jobs", json={"spec": job_spec() | {"user": user}})
        assert answer.status_code == 200, answer.text
    world.controller.run_once(1.0)
    jobs = world.client.get("/jobs").json()["jobs"]
    assert [(job["user"], job["team"]) for job in jobs] == [
        ("ada", "vision"),
        ("bob", "others"),
        ("bob", "others"),
    ]
    teams = {team["name"]: team for team in world.client.get("/teams").json()["teams"]}
    vision, others = teams["vision"], teams["others"]
    assert (vision["share"], vision["held_devices"], vision["borrowed"], vision["waiting"]) == (
        0.75,
        1,
        0,
        0,
    )
    assert (others["share"], others["held_devices"], others["borrowed"], others["waiting"]) == (
        0.25,
        1,
        1,
        1,
    )
    assert "others/bob" in drawn(make_queue_table(jobs))
    assert "vision" in drawn(make_teams_table([vision, others]))
    world.journal.close()


def test_a_submission_returns_its_promise_or_the_reason_of_the_refusal(tmp_path: Path) -> None:
    policy = PolicySpec(teams=[{"name": "vision", "quota": 1, "users": ["ada"]}])
    world = World(tmp_path, policy)
    guaranteed = job_spec() | {"guarantee": "requested"}
    specs = [guaranteed | {"user": "ada"}, guaranteed | {"user": "bob"}, job_spec()]
    answer = world.client.post(
        "/jobs/batch", json={"jobs": [{"spec": spec} for spec in specs]}
    ).json()
    promised, refused = answer["promises"].values()
    assert [*answer["promises"]] == ["lm-1", "lm-2"]
    assert describe_guarantee(promised).startswith("is promised at least the speed of 1 gpu, from ")
    assert describe_guarantee(refused).startswith(
        "is refused: cannot be promised the speed of 1 device: 0 of the 0 devices"
    )
    job = world.client.get("/jobs/lm-1").json()["job"]
    assert "guarantee" in drawn(make_job_panel(job))
    assert "It is promised at least" in drawn(
        make_explanation_panel(world.client.get("/jobs/lm-1/explanation").json())
    )
    assert "starts by" in drawn(make_queue_table([job | {"status": "queued"}]))
    assert world.client.get("/jobs/lm-3").json()["job"]["promise"] is None
    world.journal.close()


def test_a_model_whose_packages_are_missing_is_refused_where_it_is_submitted(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = JOB.replace("decoder: {vocab", "hf: {model_type: llama, vocab")
    spec = parse_job(text, "job.yaml").model_dump(mode="json")
    assert world.client.post("/jobs", json={"spec": spec}).status_code == 200
    monkeypatch.setitem(sys.modules, "peft", None)
    answer = world.client.post("/jobs", json={"spec": spec})
    assert answer.status_code == 422
    assert "not installed here: peft" in answer.json()["error"]
    assert world.client.post("/jobs", json={"spec": job_spec()}).status_code == 200


def test_a_cluster_that_is_not_shared_has_no_teams(world: World) -> None:
    world.submit()
    assert world.client.get("/teams").json() == {"teams": []}
    jobs = world.client.get("/jobs").json()["jobs"]
    assert [job["team"] for job in jobs] == [None]
    assert "USER" not in drawn(make_queue_table(jobs))


def test_the_queue_has_one_line_for_each_job_on_a_narrow_terminal(world: World) -> None:
    names = ("lm", "paper-author-compare", "a" * 40, "rvc")
    for name in names:
        assert (
            world.client.post("/jobs", json={"spec": job_spec() | {"name": name}}).status_code
            == 200
        )
    world.controller.run_once(1.0)
    jobs = world.client.get("/jobs").json()["jobs"]
    ids = [job["id"] for job in jobs]
    for width in (60, 80, 99):
        lines = drawn(make_queue_table(jobs, width), width).splitlines()
        assert [line.split()[0][:20] for line in lines] == ["JOB", *(job_id[:20] for job_id in ids)]
        assert [line.split()[1] for line in lines[1:]] == [job["status"] for job in jobs]
        assert max(map(len, lines)) <= width
    attempts = drawn(
        make_attempts_table([world.client.get(f"/jobs/{ids[0]}").json()["job"]], 80), 80
    ).splitlines()
    assert [line.split()[0] for line in attempts] == ["ATTEMPT", f"{ids[0]}-1"]
    forecast = drawn(
        make_expected_table(world.client.get("/forecast").json()["jobs"]), 80
    ).splitlines()
    assert [line.split()[0][:20] for line in forecast if line[:1].strip()][1:5] == [
        job_id[:20] for job_id in ids
    ]


def drawn(table: Any, width: int = 160) -> str:
    page = Console(file=io.StringIO(), width=width)
    page.print(table)
    return page.file.getvalue()


def test_observations_of_another_home_are_stored_once(world: World) -> None:
    body = {"observations": make_observations_view([observation(), observation(number=2)])}
    assert world.client.post("/observations", json=body).json() == {"count": 2}
    assert world.client.post("/observations", json=body).json() == {"count": 0}
    observations = parse_observations_view(world.client.get("/cluster").json()["observations"])
    assert observations == world.controller.state.observations
    bad = world.client.post("/observations", json={"observations": [{"job": 1}]})
    assert bad.status_code == 422
    assert "outcomes: 0.job" in bad.json()["error"]


def test_a_long_poll_returns_at_once_on_a_change(world: World) -> None:
    job_id = world.submit()
    version = world.client.get(f"/jobs/{job_id}").json()["version"]
    world.turn_until("succeeded")
    answer = world.client.get(f"/jobs/{job_id}?seen={version}&wait_s=10").json()
    assert answer["version"] != version
    assert answer["job"]["status"] == "succeeded"


def test_the_service_does_not_end_over_running_jobs_unless_forced(world: World) -> None:
    job_id = world.submit()
    world.turn_until("running")
    refused = world.client.post("/shutdown", json={"force": False})
    assert (refused.status_code, world.ended) == (409, False)
    assert job_id in refused.json()["error"]
    assert world.client.post("/shutdown", json={"force": True}).status_code == 200
    assert world.ended


def test_an_ended_job_cannot_be_cancelled(world: World) -> None:
    job_id = world.submit()
    world.turn_until("succeeded")
    assert world.client.post("/jobs/cancel", json={"jobs": [job_id]}).status_code == 409


@pytest.mark.parametrize(
    ("body", "status"),
    [
        ({"allow": "numeric"}, 409),
        ({}, 409),
        ({"allow": "anything"}, 422),
        ({"settings": {"name": 1}}, 422),
    ],
    ids=[
        "a job that asks nothing",
        "a job that runs",
        "no such class",
        "a setting that is no text",
    ],
)
def test_a_retry_that_cannot_be_is_one_error_and_changes_nothing(
    body: dict[str, object], status: int, world: World
) -> None:
    job_id = world.submit()
    before = world.controller.state
    answer = world.client.post(f"/jobs/{job_id}/retry", json=body)
    assert (answer.status_code, world.controller.state) == (status, before)
    assert answer.json()["error"]


def test_busy_devices_count_as_free_for_planning_because_a_job_may_wait_for_them(
    world: World,
) -> None:
    world.submit()
    world.turn_until("running")
    node = world.client.get("/cluster").json()["nodes"][0]
    assert len(node["busy"]) == 1
    node["free_bytes"] = [
        0 if index in node["busy"] else free for index, free in enumerate(node["free_bytes"])
    ]
    assert set(parse_node_view(node).free_bytes) == {parse_node_view(node).device.memory}


def test_a_drained_node_shows_its_remaining_jobs_and_a_restart_keeps_it_drained(
    world: World,
) -> None:
    job_id = world.submit()
    world.turn_until("running")
    (node,) = world.client.get("/cluster").json()["nodes"]
    assert (node["drained"], node["jobs"]) == (False, [job_id])
    assert world.client.post(f"/nodes/{node['name']}/drain", json={}).status_code == 200
    (node,) = world.client.get("/cluster").json()["nodes"]
    assert (node["drained"], node["jobs"]) == (True, [job_id])
    events = len(list(world.journal.iterate_events()))
    assert world.client.post(f"/nodes/{node['name']}/drain", json={}).status_code == 200
    assert len(list(world.journal.iterate_events())) == events, "nothing new was asked"
    world.journal.store_snapshot(world.controller.state)
    state, tail = world.journal.load_state_and_events()
    assert (state is not None and state.drained, tail) == ((node["name"],), ())
    assert world.client.post(f"/nodes/{node['name']}/drain", json={"undo": True}).status_code == 200
    assert world.controller.state.drained == ()


def test_an_unknown_node_cannot_be_drained(world: World) -> None:
    (node,) = world.client.get("/cluster").json()["nodes"]
    refused = world.client.post(f"/nodes/{node['name']}x/drain", json={})
    assert refused.status_code == 404
    assert f"did you mean {node['name']!r}?" in refused.json()["error"]
    assert world.controller.state.drained == ()


BODIES = {"update": {"settings": {"priority": "1"}}}
# a new user and a new upload are no unknown ones; the Ray of this world is not the service's own
UNTOLD = {
    *(("put", "/users/{name}"), ("put", "/uploads/{digest}"), ("delete", "/nodes/{node}")),
}


def test_whatever_is_asked_about_an_unknown_thing_is_404(world: World) -> None:
    """Each route with a name in its path, so that a new one is covered."""
    for path, operations in world.app.openapi()["paths"].items():
        for method in operations:
            address = re.sub(r"\{\w+\}", "nosuch", re.sub(r"\{(number|rank)\}", "99", path))
            body = (
                BODIES.get(path.rpartition("/")[2], {})
                if method in ("post", "put", "patch")
                else None
            )
            if "{" in path and (method, path) not in UNTOLD:
                answer = world.client.request(method.upper(), address, json=body)
                assert (answer.status_code, "error" in answer.json()) == (404, True), (
                    method,
                    path,
                    answer.text,
                )
