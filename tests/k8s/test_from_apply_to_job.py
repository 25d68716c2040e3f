"""The way from `kubectl apply` to an external job that runs out of memory, recovers and stands in MLflow.

A real control plane, a stand-in for KubeRay's operator and one for the kubelet, which runs each pod's own commands.
"""

from __future__ import annotations

import json
import subprocess
import urllib.request
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from orchestrator.service.demo.run import write_demo_files
from tests.k8s.control_plane import NAMESPACE, ControlPlane, control_plane, eventually, install
from tests.k8s.kubelet import Kubelet, RunningPod, kubelet
from tests.k8s.manifests import Manifest

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]

READY_S, JOB_S, RECORDED_S, COMMAND_S = 420.0, 600.0, 120.0, 120.0
SERVER = "https://orc.orc.svc:8443"
CAPACITY = {"cpu": "16", "memory": "64Gi", "pods": "110"}
NAMES = {
    "mlflow": ("mlflow.orc.svc",),
    "ray-head": ("orc-ray-head-svc", "orc-ray-head-svc.orc.svc.cluster.local"),
    "ray-worker": (),
    "orc": ("orc.orc", "orc.orc.svc", "orc.orc.svc.cluster.local"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Running:
    """overlays/dev-virtual-devices, with every pod ready."""

    plane: ControlPlane
    kubelet: Kubelet
    pods: dict[str, RunningPod]
    folder: Path
    authority: Path

    def orc(self, *arguments: str, token: str = "") -> str:
        """`orc` on another machine; it must end well."""
        env = {"HOME": str(self.folder), "XDG_CONFIG_HOME": str(self.folder / "config")}
        if token:
            env["ORC_TOKEN"] = token
        ended = self.kubelet.client(["orc", *arguments], env, COMMAND_S)
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()


def logs(kubelet: Kubelet) -> str:
    """The end of every container's log."""
    return "\n".join(
        f"--- {pod.name}/{path.stem}\n{path.read_text(errors='replace')[-1500:]}"
        for pod in kubelet.pods.values()
        for path in sorted(pod.folder.glob("*.log"))
    )


def make_secrets(plane: ControlPlane, folder: Path) -> Path:
    """Make the secrets as the guide does; return the certificate."""
    key, certificate = folder / "key.pem", folder / "orc.pem"
    command = [
        "openssl",
        "req",
        "-x509",
        "-newkey",
        "ec",
        "-pkeyopt",
        "ec_paramgen_curve:P-256",
        "-nodes",
        "-days",
        "2",
    ]
    command += ["-subj", "/CN=orc", "-addext", "subjectAltName=DNS:orc.orc.svc"]
    subprocess.run(
        [*command, "-keyout", str(key), "-out", str(certificate)], check=True, capture_output=True
    )
    secret = ("create", "secret", "-n", NAMESPACE)
    plane.run(
        *secret[:2],
        "generic",
        "orc-ray-token",
        "--from-literal=auth_token=" + 32 * "ab",
        *secret[2:],
    )
    plane.run(*secret[:2], "tls", "orc-tls", f"--cert={certificate}", f"--key={key}", *secret[2:])
    return certificate


@pytest.fixture(scope="module")
def running(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    pytest.importorskip(
        "aiohttp_cors", reason="KubeRay's probes ask Ray's agent: pip install 'ray[default]'"
    )
    folder = tmp_path_factory.mktemp("pods")
    with control_plane(folder / "plane") as plane, kubelet(plane, folder / "kubelet") as node:
        (folder / "kubelet").mkdir()
        plane.run("create", "namespace", NAMESPACE)
        authority = make_secrets(plane, folder)
        install(plane, "dev-virtual-devices", folder)
        plane.make_ray_pods()
        plane.add_node("machine", CAPACITY)
        pods = eventually("four pods are bound", lambda: bound_pods(plane))
        for name, others in NAMES.items():
            node.reserve(name, *others)
        started: dict[str, RunningPod] = {}

        def all_ready() -> bool:
            for pod in started.values():
                node.restart_ended(pod)
            ready = [
                node.report(pod) for pod in started.values()
            ]  # each reports, whatever the others say
            return all(ready)

        try:
            started |= {name: node.run(pods[name]) for name in NAMES}
            eventually("every pod is ready", all_ready, READY_S)
            yield Running(
                plane=plane, kubelet=node, pods=started, folder=folder, authority=authority
            )
        finally:
            print(logs(node))  # shown where a test fails


def bound_pods(plane: ControlPlane) -> dict[str, Manifest] | None:
    pods = {
        pod["metadata"]["labels"]["app.kubernetes.io/name"]: pod
        for pod in plane.all("pods")
        if "nodeName" in pod["spec"]
    }
    return pods if len(pods) == len(NAMES) else None


def test_a_job_from_outside_runs_out_of_memory_recovers_and_stands_in_mlflow(
    running: Running,
) -> None:
    service = running.pods["orc"]
    (container,) = [
        container
        for container in service.manifest["spec"]["containers"]
        if container["name"] == "orc"
    ]
    running.kubelet.execute(service, container, "orc", "user", "set", "ada", "--role", "member")
    token = running.kubelet.execute(service, container, "orc", "token", "create", "ada")
    demo = running.folder / "demo"  # no pod sees it: the client uploads what the job needs
    write_demo_files(demo)

    running.orc("login", SERVER, "--ca", str(running.authority), token=token)
    job_id = running.orc("--server", SERVER, "submit", str(demo / "foreign.yaml"))

    def ended() -> dict[str, Any] | None:
        job = dict(json.loads(running.orc("--server", SERVER, "show", job_id, "--json")))
        return job if job["status"] in ("succeeded", "failed", "refused", "cancelled") else None

    job = eventually("the job ends", ended, JOB_S)
    assert job["status"] == "succeeded", job
    assert [attempt["outcome"] for attempt in job["attempts"]] == ["device_oom", "succeeded"]
    assert job["user"] == "ada"
    assert running.kubelet.fails_liveness() == []
    eventually(
        "MLflow has both attempts",
        lambda: recorded(running, job_id) == ["FAILED", "FINISHED"],
        RECORDED_S,
    )


def recorded(running: Running, job_id: str) -> list[str]:
    """Return the statuses of the job's attempts in MLflow."""
    address = f"http://{running.pods['mlflow'].address}:5000/api/2.0/mlflow"
    experiment = _ask(f"{address}/experiments/get-by-name?experiment_name=orchestrator")
    where = f"tags.`orc.job_id` = '{job_id}' and tags.`orc.attempt` != '0'"
    query = {
        "experiment_ids": [experiment["experiment"]["experiment_id"]],
        "filter": where,
        "order_by": ["start_time ASC"],
    }
    runs = _ask(f"{address}/runs/search", query).get("runs", [])
    return [run["info"]["status"] for run in runs]


def _ask(url: str, body: Any = None) -> dict[str, Any]:
    data = None if body is None else json.dumps(body).encode()
    headers = {"Host": "mlflow:5000", "Content-Type": "application/json"}
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(urllib.request.Request(url, data, headers), timeout=30) as answer:
        return dict(json.loads(answer.read()))
