"""Laws of MLflow behind the service's sign-in: who reads, who writes, what is passed on, and its pages in a browser."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote, urlsplit

import httpx
import pytest

from orchestrator.backends.mlflow.server import ADDRESS, MlflowServer
from orchestrator.service.server.access.gate import BODY_BYTES_MAX, PAGES, SIGN_IN
from orchestrator.service.server.daemon import serve_http
from orchestrator.service.server.routes import mlflow_routes
from orchestrator.specs.access import Role
from tests.backends.test_mlflow_tracker import eventually
from tests.service.services import TOKEN
from tests.service.test_pages import CHROMIUM
from tests.service.worlds import World

API = f"{ADDRESS}/api/2.0/mlflow"
NAME = "a b/ü %2F.txt"  # of an artifact: each of it is decoded once, not twice
HOSTILE = "<script>parent.document.title = 'attacked'; fetch('/jobs')</script><p>harmless</p>"
SHOWN_MS = 60_000.0
LARGE_BYTES = 64 * 2**20
READS = """
import sys
from mlflow import MlflowClient

client = MlflowClient()
(run,) = client.search_runs([client.get_experiment_by_name("night").experiment_id], "params.p = '1'")
print(client.get_run(run.info.run_id).data.metrics["loss"], len(client.get_metric_history(run.info.run_id, "loss")))
print(open(client.download_artifacts(run.info.run_id, sys.argv[1], sys.argv[2])).read())
"""


@dataclass(frozen=True, slots=True, kw_only=True)
class Site:
    """A served world with an MLflow of its home, which has two runs of one experiment."""

    world: World
    server: MlflowServer
    url: str
    experiment: str
    runs: tuple[str, ...]

    def token(self, role: Role) -> str:
        self.world.accounts.set_user(role.value, role)
        return self.world.accounts.create_token(role.value, 3600.0)[0]

    def request(self, method: str, path: str, token: str = TOKEN, **options: Any) -> httpx.Response:
        signed = {"Authorization": f"Bearer {token}"} if token else {}
        with httpx.Client(base_url=self.url, trust_env=False, timeout=60.0) as client:
            return client.request(
                method, path, headers={**signed, **options.pop("headers", {})}, **options
            )

    def records(self) -> list[object]:
        """Return everything of the first run that a writer could have changed."""
        from mlflow import MlflowClient

        client = MlflowClient(self.server.tracking_uri)
        run = client.get_run(self.runs[0])
        names = [artifact.path for artifact in client.list_artifacts(self.runs[0])]
        return [
            run.data.to_dictionary(),
            run.info.lifecycle_stage,
            names,
            len(client.search_experiments()),
        ]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    from mlflow import MlflowClient

    with ExitStack() as stack:
        world = World(tmp_path_factory.mktemp("home"), mlflow=ADDRESS)
        stack.callback(world.journal.close)
        server = MlflowServer(world.home)
        stack.callback(server.stop)
        eventually(server.ensure_running, 120)
        client = MlflowClient(server.tracking_uri)
        experiment = client.create_experiment("night")
        runs = [
            client.create_run(experiment, run_name=f"run-{number}").info.run_id
            for number in range(2)
        ]
        for number, run_id in enumerate(runs):
            client.log_param(run_id, "p", number)
            for step in range(3):
                client.log_metric(run_id, "loss", step + number, step=step)
            client.log_text(run_id, "words", NAME)
            client.log_text(run_id, HOSTILE, "page.html")
        url = f"http://127.0.0.1:{stack.enter_context(serve_http(world.app))}"
        yield Site(world=world, server=server, url=url, experiment=experiment, runs=tuple(runs))


CHANGES = [
    ("POST", f"{API}/runs/log-metric"),
    ("POST", f"{API}/runs/set-tag"),
    ("POST", f"{API}/runs/delete"),
    ("POST", f"{API}/experiments/delete"),
    ("PATCH", f"{API}/registered-models/update"),
    ("DELETE", f"{API}/logged-models/m-1"),
    ("PUT", f"{ADDRESS}/api/2.0/mlflow-artifacts/artifacts/1/x/artifacts/new.txt"),
    ("DELETE", f"{ADDRESS}/ajax-api/2.0/mlflow-artifacts/artifacts/1/x/artifacts/new.txt"),
]
NEVER = [
    ("POST", f"{API}/experiments/create"),  # its location may be any folder of the machine
    ("POST", f"{API}/experiments/create/"),
    ("POST", f"{API}/model-versions/create"),
    ("POST", f"{API}/webhooks"),
    ("GET", f"{API}/webhooks"),
    ("POST", f"{ADDRESS}/ajax-api/2.0/mlflow/gateway-proxy"),
    ("POST", f"{ADDRESS}/ajax-api/3.0/mlflow/assistant/message"),
    ("GET", f"{ADDRESS}/ajax-api/3.0/mlflow/assistant/config"),
    ("POST", f"{ADDRESS}/ajax-api/3.0/jobs/"),
    ("POST", f"{ADDRESS}/ajax-api/2.0/mlflow/runs/create-promptlab-run"),
    ("POST", f"{ADDRESS}/gateway/x/mlflow/invocations"),
    ("GET", f"{ADDRESS}/api/3.0/mlflow/gateway/secrets/list"),
    ("POST", f"{ADDRESS}/v1/traces"),
    ("GET", f"{ADDRESS}/of/a/later/version"),
    ("OPTIONS", f"{API}/runs/get"),
]


def test_a_stranger_reads_nothing(site: Site) -> None:
    for method, path in (
        ("GET", f"{API}/experiments/get?experiment_id=0"),
        ("POST", f"{API}/runs/search"),
        *CHANGES,
    ):
        answer = site.request(method, path, token="")
        assert answer.status_code == 401, (method, path, answer.text)
    page = site.request("GET", f"{ADDRESS}/", token="")
    assert (page.status_code, page.headers["location"]) == (303, f"{SIGN_IN}?next=%2Fmlflow%2F")


def test_a_viewer_reads_and_changes_nothing(site: Site) -> None:
    viewer, before = site.token(Role.VIEWER), site.records()
    read = site.request("GET", f"{API}/runs/get?run_id={site.runs[0]}", viewer)
    assert read.json()["run"]["info"]["run_name"] == "run-0"
    for role in (Role.VIEWER, Role.MEMBER, Role.OPERATOR):
        token = site.token(role)
        for method, path in CHANGES:
            body = {
                "run_id": site.runs[0],
                "key": "loss",
                "value": 9.0,
                "timestamp": 1,
                "experiment_id": site.experiment,
            }
            answer = site.request(method, path, token, json=body)
            assert (answer.status_code, "needs the role admin" in answer.text) == (403, True), (
                method,
                path,
            )
    assert site.records() == before


def test_what_no_list_has_is_passed_on_for_nobody(site: Site) -> None:
    before = site.records()
    for method, path in NEVER:
        answer = site.request(
            method,
            path,
            json={"name": "x", "artifact_location": "file:///etc"} if method == "POST" else None,
        )
        assert answer.status_code == 403, (method, path, answer.text)
        assert "is not passed on to MLflow" in answer.text
    assert site.records() == before


def test_an_admin_tags_and_deletes_a_run_and_that_is_audited(site: Site) -> None:
    for action, more in (
        ("set-tag", {"key": "seen", "value": "yes"}),
        ("delete", {}),
        ("restore", {}),
    ):
        answer = site.request("POST", f"{API}/runs/{action}", json={"run_id": site.runs[1], **more})
        assert answer.status_code == 200, answer.text
    rows = site.request("GET", "/audit").json()["rows"]
    assert [row["action"] for row in rows[:3]] == [
        f"POST {API}/runs/{name}" for name in ("restore", "delete", "set-tag")
    ]
    site.request("POST", f"{API}/runs/search", json={"experiment_ids": [site.experiment]})
    assert site.request("GET", "/audit").json()["rows"] == rows, "a search changes nothing"


def test_a_page_of_another_site_changes_nothing_by_a_cookie(site: Site) -> None:
    with httpx.Client(base_url=site.url, trust_env=False) as browser:
        browser.post(SIGN_IN, data={"token": TOKEN, "next": ""}, headers={"Origin": site.url})
        body = {"run_id": site.runs[0], "key": "k", "value": "v"}
        for headers, status in (
            ({"Origin": "https://evil.example"}, 403),
            ({"Origin": site.url}, 200),
        ):
            assert (
                browser.post(f"{API}/runs/set-tag", json=body, headers=headers).status_code
                == status
            )


def test_mlflows_own_client_reads_with_a_token_of_ours(site: Site, tmp_path: Path) -> None:
    variables = {
        "MLFLOW_TRACKING_URI": site.url + ADDRESS,
        "MLFLOW_TRACKING_TOKEN": site.token(Role.VIEWER),
    }
    ended = subprocess.run(
        [sys.executable, "-c", READS, NAME, str(tmp_path)],
        env={**os.environ, **variables},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert ended.stdout.splitlines() == ["3.0 3", "words"], ended.stderr


def test_neither_token_nor_cookie_reaches_mlflow(
    site: Site, monkeypatch: pytest.MonkeyPatch
) -> None:
    passed = list[httpx.Headers]()
    real = mlflow_routes._make_mlflow_request

    def record_request(request: Any) -> httpx.Request:
        passed.append((made := real(request)).headers)
        return made

    monkeypatch.setattr(mlflow_routes, "_make_mlflow_request", record_request)
    headers = {
        "Cookie": "a=b",
        "Referer": site.url,
        "Connection": "close, X-One",
        "X-Forwarded-For": "127.0.0.1",
    }
    assert site.request("GET", f"{ADDRESS}/version", headers=headers).text.startswith("3.")
    (sent,) = passed
    assert sent["host"] == "localhost"
    assert not {"authorization", "cookie", "referer", "connection", "x-forwarded-for"} & set(sent)


def test_a_large_artifact_passes_in_pieces_and_a_large_body_is_refused(site: Site) -> None:
    path = (
        f"{ADDRESS}/api/2.0/mlflow-artifacts/artifacts/{site.experiment}/{site.runs[0]}/artifacts"
    )
    place = (
        site.server.folder / "artifacts" / site.experiment / site.runs[0] / "artifacts" / "large"
    )
    with place.open("wb") as file:
        file.truncate(LARGE_BYTES)
    with httpx.stream(
        "GET",
        f"{site.url}{path}/large",
        headers={"Authorization": f"Bearer {TOKEN}"},
        trust_env=False,
    ) as answer:
        sizes = [len(piece) for piece in answer.iter_raw()]
    assert (answer.status_code, sum(sizes)) == (200, LARGE_BYTES)
    place.unlink()
    refused = site.request("PUT", f"{path}/larger", content=b"x" * (BODY_BYTES_MAX + 1))
    assert refused.status_code == 413


def test_a_client_that_goes_away_and_too_many_at_once_leave_room_for_others(site: Site) -> None:
    assert mlflow_routes.OPEN_MAX <= 64
    (forwarder,) = {
        route.endpoint for route in site.world.app.routes if route.path == mlflow_routes.READ
    }  # type: ignore[attr-defined]
    free = forwarder._free
    for _ in range(mlflow_routes.OPEN_MAX):
        assert free.acquire(blocking=False)
    answer = site.request("GET", f"{ADDRESS}/version")
    assert (answer.status_code, "requests to MLflow are open" in answer.text) == (503, True)
    for _ in range(mlflow_routes.OPEN_MAX):
        free.release()
    place = (
        site.server.folder / "artifacts" / site.experiment / site.runs[0] / "artifacts" / "endless"
    )
    with place.open("wb") as file:
        file.truncate(2**40)
    path = f"{ADDRESS}/get-artifact?run_uuid={site.runs[0]}&path=endless"
    with httpx.stream(
        "GET", site.url + path, headers={"Authorization": f"Bearer {TOKEN}"}, trust_env=False
    ) as answer:
        next(answer.iter_raw())
        assert free._value == mlflow_routes.OPEN_MAX - 1
    eventually(lambda: free._value == mlflow_routes.OPEN_MAX)
    place.unlink()


def test_a_server_that_is_away_is_told_as_such(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(mlflow_routes, "START_S", 0.5)
    world = World(tmp_path, mlflow=ADDRESS)
    answer = world.client.get(f"{ADDRESS}/version")
    assert (answer.status_code, "the service starts it within a minute" in answer.text) == (
        503,
        True,
    )
    world.journal.close()


def test_a_server_that_was_named_elsewhere_has_no_route_here(tmp_path: Path) -> None:
    world = World(tmp_path)
    assert world.client.get(f"{ADDRESS}/version").status_code == 404
    assert world.client.get("/cluster").json()["trackers"] == {"mlflow": "http://127.0.0.1:1"}
    world.journal.close()


def test_the_address_is_the_one_by_which_the_asker_reached_the_service(site: Site) -> None:
    assert site.request("GET", "/cluster").json()["trackers"] == {"mlflow": f"{site.url}{ADDRESS}"}


def test_an_artifact_that_is_opened_is_of_no_origin(site: Site) -> None:
    answer = site.request("GET", f"{ADDRESS}/get-artifact?run_uuid={site.runs[0]}&path=page.html")
    assert answer.headers["content-security-policy"] == mlflow_routes.DATA_POLICY
    assert answer.headers["x-content-type-options"] == "nosniff"
    page = site.request("GET", f"{ADDRESS}/").headers["content-security-policy"]
    assert f"connect-src {site.url}{ADDRESS}/;" in page
    assert "unsafe-inline" not in page.partition("script-src")[2].partition(";")[0]


@pytest.mark.long
def test_mlflows_pages_load_behind_the_sign_in_and_ask_nothing_else(site: Site) -> None:
    """A link that `orc compare` printed leads through sign in to its page; an artifact runs no script."""
    if CHROMIUM is None:
        pytest.skip("chromium is missing (Debian: chromium)")
    from playwright.sync_api import sync_playwright

    runs, experiments = quote(json.dumps(list(site.runs))), quote(json.dumps([site.experiment]))
    link = f"{site.url}{ADDRESS}/#/compare-runs?runs={runs}&experiments={experiments}"
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(
            executable_path=CHROMIUM, args=["--no-sandbox", "--disable-dev-shm-usage"]
        )
        tab = browser.new_page(viewport={"width": 1400, "height": 1000})
        tab.set_default_timeout(SHOWN_MS)
        tab.goto(link)
        tab.fill("#token", site.token(Role.VIEWER))
        requests, broken = list[str](), list[str]()
        tab.on("request", lambda request: requests.append(request.url))
        tab.on(
            "response", lambda answer: broken.append(answer.url) if answer.status >= 400 else None
        )
        tab.on("pageerror", lambda error: broken.append(str(error)))
        tab.press("#token", "Enter")
        tab.get_by_text("Comparing 2 Runs").first.wait_for()
        tab.goto(f"{site.url}{ADDRESS}/#/experiments/{site.experiment}/runs")
        tab.get_by_text("run-1").first.wait_for()
        tab.goto(
            f"{site.url}{ADDRESS}/#/experiments/{site.experiment}/runs/{site.runs[0]}/artifacts/page.html"
        )
        tab.frame_locator("iframe").get_by_text("harmless").wait_for()
        title = tab.title()
        tab.goto(f"{site.url}{PAGES}/compare")
        tab.get_by_text("Live.").wait_for()
        browser.close()
    parts = [urlsplit(url) for url in requests if not url.startswith(("data:", "blob:"))]
    assert {part.netloc for part in parts} == {urlsplit(site.url).netloc}
    assert {part.path.split("/")[1] for part in parts} == {"mlflow", "ui"}
    assert {part.path for part in parts if part.path.startswith("/ui")} >= {f"{PAGES}/compare"}
    assert title != "attacked"
    unknown = [
        url for url in broken if not url.endswith("users/current") and "/assistant/" not in url
    ]
    assert unknown == [], "a page lacks what the list should have"
