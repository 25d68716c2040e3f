"""Laws of /openapi.json: it has every route, and whatever is sent to one, its answer is a documented one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from schemathesis.checks import CHECKS

from orchestrator.specs.access import Role
from orchestrator.specs.run import JobFolder
from tests.service.test_access import TEAMS, routes
from tests.service.worlds import World

CHECKED = (
    "not_a_server_error",
    "status_code_conformance",
    "content_type_conformance",
    "response_headers_conformance",
    "response_schema_conformance",
)
CASES, CASES_LONG = 6, 150  # of each route and role


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    """A service with a running job that has a log and an output, and with an ended job."""
    world = World(tmp_path_factory.mktemp("home"), TEAMS)
    for _ in range(2):
        world.submit()
    world.turn_until("running")
    folder = JobFolder(world.home, "lm-1")
    for path in (folder.output / "model.pt", folder.attempt(1).log(0)):
        path.parent.mkdir(parents=True)
        path.write_text("words")
    yield world
    world.journal.close()


def described_routes(world: World) -> set[tuple[str, str]]:
    return {route for route in routes(world) if route[1] != "/openapi.json"} | {
        ("GET", "/healthz"),
        ("GET", "/readyz"),
    }


def test_every_route_is_described_with_its_answers(world: World) -> None:
    described = world.by(Role.VIEWER, "eve").get("/openapi.json").json()["paths"]
    assert {
        (method.upper(), path) for path, methods in described.items() for method in methods
    } == (described_routes(world))
    for path, methods in described.items():
        for method, route in methods.items():
            content = route["responses"]["200"]["content"]
            assert all(
                media["schema"] not in ({}, {"type": "object"}) for media in content.values()
            ), (method, path)
            assert {"401", "403", "422"} <= set(route["responses"]), (method, path)


def routes_answered(world: World, role: Role, count: int) -> Counter[tuple[str, str]]:
    """Answers by route, each as documented, to `count` cases of each. Raises what schemathesis finds wrong."""
    answered = Counter[tuple[str, str]]()
    client = world.by(role, role.value)
    token = {"Authorization": client.headers["Authorization"]}
    schema = schemathesis.openapi.from_asgi(
        "/openapi.json", world.app, headers={**token, "Host": "127.0.0.1"}
    )
    checks = CHECKS.get_by_names(CHECKED)
    for result in schema.get_all_operations():
        operation = result.ok()

        @settings(
            max_examples=count,
            deadline=None,
            database=None,
            suppress_health_check=list(HealthCheck),
        )
        @given(case=operation.as_strategy(), is_known=st.booleans())
        def send(case: Any, is_known: bool) -> None:
            if is_known and case.path_parameters:
                values = {
                    "job_id": "lm-1",
                    "number": 1,
                    "node": "virtual",
                    "name": "eve",
                    "sweep_id": "sweep-lm-1",
                }
                case.path_parameters.update(
                    {name: values[name] for name in case.path_parameters if name in values}
                )
            if case.query:
                case.query.pop("wait_s", None)  # which would wait
            if case.path.endswith("/follow"):
                case.query = {**(case.query or {}), "wait_s": 0}
            if (case.method, case.path) == ("DELETE", "/users/{name}"):
                case.path_parameters["name"] = "nobody"  # not the sender
            answer = case.call(headers={**token, "Host": "127.0.0.1"})
            case.validate_response(answer, checks=checks)
            answered[case.method, case.path] += 1

        send()
    return answered


@pytest.mark.parametrize(
    "role", [Role.VIEWER, Role.ADMIN]
)  # the least and the most that is allowed
def test_whatever_a_role_sends_is_answered_as_documented(world: World, role: Role) -> None:
    answered = routes_answered(world, role, CASES)
    assert set(answered) == described_routes(world)
    assert min(answered.values()) >= 1


@pytest.mark.long
@pytest.mark.timeout(1800)
@pytest.mark.parametrize("role", Role)
def test_whatever_a_role_sends_is_answered_as_documented_in_many_cases(
    world: World, role: Role
) -> None:
    answered = routes_answered(world, role, CASES_LONG)
    assert set(answered) == described_routes(world)
    assert sum(answered.values()) > len(answered) * CASES


ODD: dict[str, tuple[str, str, bytes]] = {
    "a lone surrogate": ("POST", "/jobs", b'{"spec": {"name": "\\ud800"}}'),
    "a lone surrogate as key": ("POST", "/jobs", b'{"spec": {"\\ud800": 1}}'),
    "a user of surrogates": ("POST", "/tokens", b'{"user": "\\ud800"}'),
    "infinity": ("POST", "/tokens", b'{"user": "root", "lifetime_s": Infinity}'),
    "no number": ("POST", "/tokens", b'{"user": "root", "lifetime_s": NaN}'),
    "a life of ages": ("POST", "/tokens", b'{"user": "root", "lifetime_s": 1e300}'),
    "infinity in a job": (
        "POST",
        "/jobs",
        b'{"spec": {"name": "a", "global_batch_size": Infinity}}',
    ),
    "an empty dependency": (
        "POST",
        "/jobs",
        b'{"spec": {"name": "a", "global_batch_size": 1, "depends_on": {}}}',
    ),
    "a deep body": ("POST", "/jobs", b'{"spec":' + b"[" * 100_000),
    "a deep job": ("POST", "/jobs", b'{"spec":' + b'{"a":' * 900 + b"1" + b"}" * 901),
    "a long number": ("POST", "/jobs", b'{"spec": {"global_batch_size": ' + b"9" * 5000 + b"}}"),
    "no UTF-8": ("POST", "/jobs", b'{"spec": "\xff"}'),
    "a token beyond SQL": ("DELETE", f"/tokens/{2**80}", b""),
    "an offset beyond files": ("GET", f"/jobs/lm-1/attempts/1/logs?offset={2**80}", b""),
    "a page beyond SQL": ("GET", f"/audit?before={2**80}", b""),
    "NUL in a job": ("GET", "/jobs/a%00b", b""),
    "NUL in a user": ("DELETE", "/users/a%00b", b""),
    "NUL before ended jobs": ("GET", "/jobs?before=%00", b""),
    "no method": ("PATCH", "/jobs", b"{}"),
    "no route": ("GET", "/nothing", b""),
    "no method of a job": ("DELETE", "/jobs/lm-1", b""),
}


@pytest.mark.parametrize("name", ODD)
def test_odd_input_is_one_clear_error(world: World, name: str) -> None:
    method, path, body = ODD[name]
    client = world.by(Role.ADMIN, "root")
    client._transport.raise_server_exceptions = False  # type: ignore[attr-defined]
    answer = client.request(
        method, path, content=body, headers={"Content-Type": "application/json"}
    )
    assert 400 <= answer.status_code < 500, answer.text
    assert set(answer.json()) == {"error"}
