"""Laws of alerts and dashboard: promtool reads them, and a real Prometheus answers them from a real service."""

from __future__ import annotations

import json
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
import yaml

from orchestrator.service.server.daemon import serve_http
from orchestrator.specs.access import Role
from orchestrator.specs.attempt import Heartbeat
from orchestrator.specs.run import JobFolder, write_json
from tests.service.test_metrics import samples
from tests.service.test_reach import free_port
from tests.service.worlds import World, job_spec

MONITORING = Path(__file__).parents[2] / "k8s" / "monitoring"
WINDOWS = {"$__rate_interval": "1m"}  # what Grafana fills in
PATIENCE_S = 90.0
PROMTOOL, PROMETHEUS = (shutil.which(name) for name in ("promtool", "prometheus"))
tools = pytest.mark.skipif(
    PROMTOOL is None or PROMETHEUS is None,
    reason="needs Debian's package prometheus, which has promtool",
)


def rules() -> dict[str, Any]:
    return dict(yaml.safe_load((MONITORING / "rules.yaml").read_text()))


def expressions() -> list[str]:
    """Every expression of the dashboard, as Grafana sends it."""
    panels = json.loads((MONITORING / "dashboard.json").read_text())["panels"]
    queries = [target["expr"] for panel in panels for target in panel["targets"]]
    for name, window in WINDOWS.items():
        queries = [query.replace(name, window) for query in queries]
    assert len(queries) > 20
    return queries


def promtool(*arguments: str | Path) -> tuple[int, str]:
    assert PROMTOOL is not None
    ended = subprocess.run([PROMTOOL, *arguments], capture_output=True, text=True, timeout=60)
    return ended.returncode, ended.stdout + ended.stderr


@tools
def test_promtool_finds_no_fault_in_rules_and_configuration() -> None:
    code, output = promtool("check", "rules", MONITORING / "rules.yaml")
    assert code == 0, output
    code, output = promtool("check", "config", "--syntax-only", MONITORING / "prometheus.yaml")
    assert code == 0, output


@tools
@pytest.mark.parametrize("planted", [None, ("|hung|", "|"), ("for: 10m", "for: 20m")])
def test_alerts_fire_when_they_should_and_never_before(
    tmp_path: Path, planted: tuple[str, str] | None
) -> None:
    """A planted change of an expression or of a duration is found."""
    for name in ("rules.yaml", "rules_test.yaml"):
        text = (MONITORING / name).read_text()
        if planted and name == "rules.yaml":
            assert planted[0] in text
            text = text.replace(*planted)
        (tmp_path / name).write_text(text)
    code, output = promtool("test", "rules", tmp_path / "rules_test.yaml")
    assert (code == 0) == (planted is None), output


def test_the_operators_rules_are_those_of_the_file() -> None:
    of_the_operator = yaml.safe_load((MONITORING / "prometheusrule.yaml").read_text())
    assert of_the_operator["spec"] == rules()


@tools
def test_every_expression_of_the_dashboard_is_one_that_prometheus_parses(tmp_path: Path) -> None:
    def check_rules(queries: list[str]) -> tuple[int, str]:
        recorded = [
            {"record": f"r:{number}", "expr": query} for number, query in enumerate(queries)
        ]
        (tmp_path / "rules.yaml").write_text(
            yaml.safe_dump({"groups": [{"name": "g", "rules": recorded}]})
        )
        return promtool("check", "rules", tmp_path / "rules.yaml")

    code, output = check_rules(expressions())
    assert code == 0, output
    assert check_rules([*expressions(), "sum by (node (orc_devices)"])[0] != 0, (
        "a planted fault is not found"
    )


@pytest.fixture
def busy(tmp_path: Path) -> Iterator[World]:
    """A service with ended, running and queued jobs, whose running job reports and has a deadline."""
    world = World(tmp_path)
    for _ in range(2):
        world.submit()
    world.turn_until("succeeded", 2)
    ids = []
    for _ in range(4):
        answer = world.client.post(
            "/jobs", json={"spec": job_spec() | {"deadline": "2126-01-01T08:00+00:00"}}
        )
        assert answer.status_code == 200, answer.text
        ids.append(answer.json()["id"])
    world.turn_until("running", 2)
    for job_id in ids[:2]:
        folder = JobFolder(world.home, job_id).attempt(1)
        folder.path.mkdir(parents=True)
        beat = Heartbeat(
            rank=0, step=1, steps_done=1, step_s=0.2, peak_bytes=2**20, phase="training", at_s=1.0
        )
        write_json(folder.heartbeat(0), beat)
    world.journal.outbox.register_receivers(["mlflow"])
    yield world
    world.journal.close()


@pytest.fixture
def prometheus(tmp_path: Path, busy: World) -> Iterator[httpx.Client]:
    """A Prometheus that scrapes the service once a second with a viewer's token; `rules.yaml` is loaded."""
    busy.accounts.set_user("prometheus", Role.VIEWER)
    secret, _ = busy.accounts.create_token("prometheus", 3600.0)
    assert PROMETHEUS is not None
    folder, port = tmp_path / "prometheus", free_port()
    folder.mkdir()
    (folder / "token").write_text(secret)
    config = yaml.safe_load((MONITORING / "prometheus.yaml").read_text())
    (job,) = config["scrape_configs"]
    with serve_http(busy.app) as serves:
        job |= {
            "scheme": "http",
            "scrape_interval": "1s",
            "static_configs": [{"targets": [f"127.0.0.1:{serves}"]}],
        }
        del job["tls_config"]
        config["global"] = {"scrape_interval": "1s", "evaluation_interval": "1s"}
        config["rule_files"] = [str(MONITORING / "rules.yaml")]
        (folder / "prometheus.yaml").write_text(yaml.safe_dump(config))
        with (folder / "log").open("w") as log:
            process = subprocess.Popen(
                [
                    PROMETHEUS,
                    f"--config.file={folder}/prometheus.yaml",
                    f"--storage.tsdb.path={folder}/data",
                    f"--web.listen-address=127.0.0.1:{port}",
                ],
                stdout=log,
                stderr=log,
            )
        try:
            yield httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=10.0)
        finally:
            process.terminate()
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait(20)


@tools
def test_a_prometheus_answers_every_query_of_the_dashboard_from_a_real_service(
    busy: World, prometheus: httpx.Client
) -> None:
    left = {
        query for query in expressions() if "orc_notify_" not in query
    }  # there are no targets here: test_metrics.py has
    deadline_s = time.monotonic() + PATIENCE_S
    while left and time.monotonic() < deadline_s:
        left -= {query for query in left if query_prometheus(prometheus, query)}
        time.sleep(0.5)
    assert not left, (left, busy.client.get("/metrics").text)
    loaded = prometheus.get("/api/v1/rules").json()["data"]["groups"]
    assert {rule["health"] for group in loaded for rule in group["rules"]} <= {"ok", "unknown"}
    shown = query_prometheus(prometheus, "count by (__name__) ({__name__=~'orc_.*'})")
    exposed = {
        name for name, _ in samples(busy.client.get("/metrics").text) if name.startswith("orc_")
    }
    assert {series["metric"]["__name__"] for series in shown} == exposed


def query_prometheus(prometheus: httpx.Client, expression: str) -> list[dict[str, Any]]:
    try:
        answer = prometheus.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:  # it starts
        return []
    if answer.status_code == 503:
        return []
    assert answer.status_code == 200, (expression, answer.text)
    return list(answer.json()["data"]["result"])
