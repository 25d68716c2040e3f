"""Laws of access: each route needs its role, tokens end when they should, and changes are audited."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from pathlib import Path

import pytest
from fastapi.routing import APIRoute

from orchestrator.backends.journal.accounts import PREFIX, Accounts
from orchestrator.service.server.access import gate
from orchestrator.service.server.routes.api import ROLES
from orchestrator.specs.access import Role
from orchestrator.specs.cluster import UserSpec
from orchestrator.specs.policy import PolicySpec
from tests.service.worlds import World, job_spec

OPEN = {"/healthz", "/readyz"}
TEAMS = PolicySpec(
    teams=[{"name": "vision", "users": ["ada", "bob"]}, {"name": "speech", "users": ["cyd"]}]
)


@pytest.fixture
def world(tmp_path: Path) -> Iterator[World]:
    world = World(tmp_path, TEAMS)
    yield world
    world.journal.close()


def routes(world: World) -> list[tuple[str, str]]:
    """Every method and path of the application but the open ones."""
    of_app = (route for route in world.app.routes if isinstance(route, APIRoute))
    return [("GET", "/openapi.json")] + [
        (method, route.path)
        for route in of_app
        for method in route.methods
        if route.path not in OPEN
    ]


def test_every_role_is_admitted_where_it_is_named_or_above_and_nowhere_else(world: World) -> None:
    """A route without a role needs an admin."""
    clients = {role: world.by(role, role.value) for role in Role}
    for role, (method, path) in product(Role, routes(world)):
        url = (
            path.replace("{job_id}", "lm-1")
            .replace("{number}", "1")
            .replace("{node}", "n")
            .replace("{name}", "eve")
        )
        answer = clients[role].request(method, url)
        needed = ROLES.get((method, path), Role.ADMIN)
        assert (answer.status_code == 403) == (not role.includes(needed)), (
            role,
            method,
            path,
            answer.text,
        )
    assert set(ROLES) <= set(routes(world)), "a role is named for a route that does not exist"


def test_probes_need_no_token_and_no_host_name(world: World) -> None:
    for path in OPEN:
        answer = world.stranger.get(path, headers={"Host": "10.1.2.3:80"})
        assert answer.status_code == 200
        assert set(answer.json()) <= {"status", "problems"}


def test_a_service_takes_jobs_before_it_has_seen_a_node_and_says_so(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(world.controller, "_state", type(world.controller.state)())
    answer = world.stranger.get("/readyz")
    assert (answer.status_code, answer.json()["problems"]) == (200, ["no node is there"])


@pytest.mark.parametrize("ends", ["expiry", "revocation", "removal of the user"])
def test_a_token_admits_until_it_ends_and_never_after(world: World, ends: str) -> None:
    client = world.by(Role.VIEWER)
    assert client.get("/jobs").status_code == 200
    if ends == "expiry":
        world.now_s += 3600.0
    elif ends == "revocation":
        world.accounts.revoke_token(world.accounts.list_tokens()[-1].id)
    else:
        world.accounts.remove_user("ada")
    assert client.get("/jobs").status_code == 401


def test_another_role_counts_at_once(world: World) -> None:
    client = world.by(Role.OPERATOR)
    assert client.post("/jobs", json={"spec": job_spec()}).status_code == 200
    world.accounts.set_user("ada", Role.VIEWER)
    assert client.post("/jobs", json={"spec": job_spec()}).status_code == 403


def test_a_token_is_kept_nowhere(world: World, tmp_path: Path) -> None:
    secret, record = world.accounts.create_token(_user(world.accounts), None)
    assert secret.startswith(PREFIX)
    assert secret.startswith(record.shown)
    assert len(record.shown) < len(secret) / 3
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert files
    assert not any(secret.encode() in path.read_bytes() for path in files)


def test_the_user_of_a_job_is_who_sent_it(world: World) -> None:
    ada = world.by(Role.MEMBER)
    sent = ada.post("/jobs", json={"spec": job_spec()}).json()["id"]
    assert world.controller.state.jobs[sent].user == "ada"
    refused = ada.post("/jobs", json={"spec": {**job_spec(), "user": "bob"}})
    assert refused.status_code == 422
    assert "belongs to the user of the token" in refused.json()["error"]
    assert len(world.controller.state.jobs) == 1


def test_a_member_cancels_and_retries_jobs_of_its_own_team_only(world: World) -> None:
    clients = {name: world.by(Role.MEMBER, name) for name in ("ada", "bob", "cyd", "dan", "eli")}
    ids = {
        name: client.post("/jobs", json={"spec": job_spec()}).json()["id"]
        for name, client in clients.items()
    }

    def cancels(name: str, owner: str) -> int:
        return int(clients[name].post("/jobs/cancel", json={"jobs": [ids[owner]]}).status_code)

    retried = clients["cyd"].post(f"/jobs/{ids['ada']}/retry", json={"allow": "numeric"})
    assert retried.status_code == 403
    assert [cancels("cyd", "ada"), cancels("ada", "cyd"), cancels("bob", "ada")] == [403, 403, 200]
    assert (
        world.by(Role.OPERATOR, "ops").post("/jobs/cancel", json={"jobs": [ids["cyd"]]}).status_code
        == 200
    )


def test_a_job_of_a_user_without_a_user_id_is_refused_where_it_is_submitted(tmp_path: Path) -> None:
    world = World(tmp_path, users={"ada": UserSpec(uid=1001)})
    answers = [
        world.by(Role.MEMBER, name).post("/jobs", json={"spec": job_spec()})
        for name in ("ada", "eve")
    ]
    answers += [
        world.client.post("/jobs", json={"spec": job_spec() | {"user": name}})
        for name in ("ada", "eve")
    ]
    assert [answer.status_code for answer in answers] == [200, 422, 200, 422]
    assert "the user has no user id here" in answers[1].json()["error"]
    world.journal.close()


def test_every_change_and_every_refused_change_is_audited(world: World) -> None:
    viewer = world.by(Role.VIEWER, "eve")
    viewer.get("/jobs")
    viewer.post("/jobs", json={"spec": job_spec()}, headers={"X-Request-Id": "night-7"})
    admin = world.by(Role.ADMIN, "root")
    admin.post("/nodes/no%20such/drain", json={})
    admin.post("/tokens", json={"user": "eve", "lifetime_s": 60.0})
    job_id = admin.post("/jobs", json={"spec": job_spec()}).json()["id"]
    admin.post("/jobs/hold", json={"jobs": [job_id, "no such"]})
    rows = admin.get("/audit").json()["rows"]
    assert [(row["user"], row["action"], row["status"]) for row in rows] == [
        ("root", f"POST /jobs/hold {job_id} no%20such", 404),
        ("root", f"POST /jobs {job_id}", 200),
        ("root", "POST /tokens eve", 200),
        ("root", "POST /nodes/no%20such/drain", 404),
        ("eve", "POST /jobs", 403),
    ]
    assert rows[-1]["request_id"] == "night-7"
    assert admin.get(f"/audit?before={rows[0]['number']}").json()["rows"] == rows[1:]


def test_a_request_id_is_echoed_or_made_and_never_breaks_a_log_line(world: World) -> None:
    assert (
        world.client.get("/jobs", headers={"X-Request-Id": "a-1"}).headers["x-request-id"] == "a-1"
    )
    for bad in ("", "a b", "x" * 65, "é"):
        made = world.client.get("/jobs", headers={"X-Request-Id": bad.encode()}).headers[
            "x-request-id"
        ]
        assert gate.REQUEST_ID.fullmatch(made)
        assert made != bad


def test_wrong_tokens_are_refused_faster_than_they_can_be_guessed_and_hinder_nobody(
    world: World,
) -> None:
    wrong = {"Authorization": f"Bearer {PREFIX}wrong"}
    statuses = [
        world.stranger.get("/jobs", headers=wrong).status_code
        for _ in range(gate.WRONG_TOKENS.amount + 5)
    ]
    assert statuses == [401] * gate.WRONG_TOKENS.amount + [429] * 5
    assert world.client.get("/jobs").status_code == 200


def test_a_user_who_changes_too_much_is_refused_and_hinders_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "CHANGES", type(gate.CHANGES)(3))
    ada, bob = world.by(Role.MEMBER), world.by(Role.MEMBER, "bob")
    statuses = [ada.post("/jobs", json={"spec": job_spec()}).status_code for _ in range(5)]
    assert statuses == [200] * 3 + [429] * 2
    assert len(world.controller.state.jobs) == 3
    assert ada.get("/jobs").status_code == 200
    assert bob.post("/jobs", json={"spec": job_spec()}).status_code == 200
    owner = [world.client.post("/jobs", json={"spec": job_spec()}).status_code for _ in range(5)]
    assert owner == [200] * 5


def test_a_user_who_looks_too_often_is_refused_and_hinders_nobody(
    world: World, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gate, "LOOKS", type(gate.LOOKS)(3))
    ada, bob = world.by(Role.VIEWER), world.by(Role.VIEWER, "bob")
    looks = ("/report?since_s=0", "/ui", "/report?since_s=1", "/ui/jobs/lm-1", "/report?since_s=0")
    statuses = [ada.get(path, follow_redirects=False).status_code for path in looks]
    assert [status == 429 for status in statuses] == [False] * 3 + [True] * 2
    assert ada.get("/jobs").status_code == 200
    assert bob.get("/report?since_s=0").status_code == 200
    assert [world.client.get("/report?since_s=0").status_code for _ in range(5)] == [200] * 5


def _user(accounts: Accounts) -> str:
    accounts.set_user("ada", Role.MEMBER)
    return "ada"
