"""Overlays on a real API server, scheduler and controllers. There is no kubelet: nothing runs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.control_plane import (
    NAMESPACE,
    ControlPlane,
    Refused,
    control_plane,
    eventually,
    for_this_server,
    install,
)
from tests.k8s.manifests import K8S, OVERLAYS, find_manifest, manifests_of

pytestmark = pytest.mark.long
NODES = tuple(f"gpu{number}" for number in range(4))
BIG = {"cpu": "96", "memory": "1200Gi", "pods": "110", "nvidia.com/gpu": "8"}
SMALL = {"cpu": "16", "memory": "64Gi", "pods": "110"}
ACCOUNT = f"system:serviceaccount:{NAMESPACE}:orc"
OPERATOR = "ada"
USED = (  # by the guide's commands
    ("get", "deployments.apps"),
    ("get", "services"),
    ("get", "pods"),
    ("list", "pods"),
    ("get", "pods/log"),
    ("create", "pods/exec"),
    ("create", "pods/portforward"),
)
NOT_USED = (
    ("get", "secrets"),
    ("list", "secrets"),
    ("create", "pods"),
    ("delete", "pods"),
    ("patch", "deployments.apps"),
    ("create", "rolebindings.rbac.authorization.k8s.io"),
    ("delete", "rayclusters.ray.io"),
    ("get", "nodes"),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Installed:
    """A control plane with overlays/gpu-nodes, the pods of its Ray, and four nodes of eight GPUs beside a small one."""

    plane: ControlPlane
    folder: Path

    def pods(self) -> list[dict[str, Any]]:
        return [pod for pod in self.plane.all("pods") if "deletionTimestamp" not in pod["metadata"]]

    def placed(self) -> dict[str, str]:
        """Node by pod, of those that have one."""
        return {
            pod["metadata"]["name"]: pod["spec"]["nodeName"]
            for pod in self.pods()
            if "nodeName" in pod["spec"]
        }


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Installed]:
    folder = tmp_path_factory.mktemp("k8s")
    with control_plane(folder / "plane") as plane:
        install(plane, "gpu-nodes", folder)
        plane.make_ray_pods()
        plane.add_node("control", SMALL)
        for name in NODES:
            plane.add_node(name, BIG)
        installation = Installed(plane=plane, folder=folder)
        eventually("seven pods are bound", lambda: len(installation.placed()) == 7)
        yield installation


def test_every_pod_is_admitted_and_each_worker_has_a_whole_node_of_its_own(
    installed: Installed,
) -> None:
    placed = installed.placed()
    workers = {
        name: node for name, node in placed.items() if name.startswith("orc-ray-nodes-worker")
    }
    assert sorted(workers.values()) == sorted(NODES)
    assert {name.rpartition("-")[0].split("-")[0] for name in placed} == {"orc", "mlflow"}


def test_a_fifth_worker_waits_for_a_fifth_node(installed: Installed) -> None:
    pod = installed.plane.get("pod", "orc-ray-nodes-worker-0")
    spec = {name: value for name, value in pod["spec"].items() if name != "nodeName"}
    fifth = {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": "fifth", "namespace": NAMESPACE},
        "spec": spec,
    }
    for name in NODES:
        installed.plane.beat(name, BIG)
    installed.plane.apply([fifth])

    def why() -> str:
        conditions = installed.plane.get("pod", "fifth").get("status", {}).get("conditions", ())
        return next(
            (
                condition["message"]
                for condition in conditions
                if condition["type"] == "PodScheduled"
            ),
            "",
        )

    try:
        assert "Insufficient nvidia.com/gpu" in eventually("the scheduler says why it waits", why)
    finally:
        installed.plane.run(
            "delete", "pod", "fifth", "-n", NAMESPACE, "--grace-period=0", "--force"
        )


def test_the_ray_cluster_is_stored_as_it_was_written(installed: Installed) -> None:
    written = find_manifest(manifests_of("gpu-nodes"), "RayCluster", "orc-ray")
    stored = installed.plane.get("raycluster", "orc-ray")["spec"]
    for group in stored["workerGroupSpecs"]:
        assert (group.pop("numOfHosts"), group.pop("priority")) == (
            1,
            0,
        )  # what the definition adds
    assert stored == written["spec"]


@pytest.mark.parametrize("overlay", OVERLAYS)
def test_every_overlay_is_taken_by_the_server(
    installed: Installed, overlay: str, tmp_path: Path
) -> None:
    manifests = for_this_server(manifests_of(overlay), tmp_path)
    changed = [
        manifest for manifest in manifests if manifest["kind"] != "PersistentVolumeClaim"
    ]  # a claim cannot be changed
    taken = installed.plane.apply(changed, "--dry-run=server", "--force-conflicts")
    assert len(taken) == len(changed) > 10
    assert all(line.endswith("serverside-applied (server dry run)") for line in taken), taken


def test_the_server_refuses_a_wrong_type_in_a_ray_cluster(
    installed: Installed, tmp_path: Path
) -> None:
    wrong = find_manifest(
        for_this_server(manifests_of("gpu-nodes"), tmp_path), "RayCluster", "orc-ray"
    )
    wrong["spec"]["workerGroupSpecs"][0]["replicas"] = "four"
    with pytest.raises(Refused, match="replicas"):
        installed.plane.apply([wrong], "--dry-run=server")


@pytest.mark.parametrize(("verb", "resource"), [*USED, *NOT_USED])
def test_the_services_account_may_do_nothing(
    installed: Installed, verb: str, resource: str
) -> None:
    assert not installed.plane.may(ACCOUNT, verb, resource)


def test_the_services_account_is_answered_403(installed: Installed) -> None:
    with pytest.raises(Refused, match="Forbidden"):
        installed.plane.run("get", "pods", "-n", NAMESPACE, "--as", ACCOUNT)


@pytest.fixture
def bound(installed: Installed) -> Installed:
    command = [
        "create",
        "rolebinding",
        "ada",
        "--role=orc-operator",
        f"--user={OPERATOR}",
        "-n",
        NAMESPACE,
    ]
    if not any(
        binding["metadata"]["name"] == "ada" for binding in installed.plane.all("rolebinding")
    ):
        installed.plane.run(*command)
    eventually("the binding counts", lambda: installed.plane.may(OPERATOR, "get", "pods"))
    return installed


@pytest.mark.parametrize(("verb", "resource"), USED)
def test_an_operator_may_do_what_the_guide_does(bound: Installed, verb: str, resource: str) -> None:
    assert bound.plane.may(OPERATOR, verb, resource)


@pytest.mark.parametrize(("verb", "resource"), NOT_USED)
def test_an_operator_may_do_nothing_else(bound: Installed, verb: str, resource: str) -> None:
    assert not bound.plane.may(OPERATOR, verb, resource)


def test_an_operator_who_asks_for_secrets_is_answered_403(bound: Installed) -> None:
    with pytest.raises(Refused, match="Forbidden"):
        bound.plane.run("get", "secrets", "-n", NAMESPACE, "--as", OPERATOR)


@pytest.mark.parametrize("pod", ["orc-ray-head", "orc-ray-nodes-worker-0"])
def test_the_head_and_the_workers_of_ray_cannot_be_evicted(installed: Installed, pod: str) -> None:
    path = f"/api/v1/namespaces/{NAMESPACE}/pods/{pod}"
    ready = {
        "type": "Ready",
        "status": "True",
    }  # as a kubelet says it; a pending pod may always be evicted
    installed.plane.set_status(path, {"phase": "Running", "conditions": [ready]})
    with pytest.raises(Refused, match="disruption budget"):
        installed.plane.run(
            "create", "--raw", f"{path}/eviction", "-f", "-", stdin=json.dumps(_eviction(pod))
        )
    assert pod in installed.placed()


def _eviction(pod: str) -> dict[str, Any]:
    return {
        "apiVersion": "policy/v1beta1",
        "kind": "Eviction",
        "metadata": {"name": pod, "namespace": NAMESPACE},
    }


def test_a_changed_cluster_file_reaches_the_service_in_a_new_pod(
    installed: Installed, tmp_path: Path
) -> None:
    copied = tmp_path / "k8s"
    shutil.copytree(K8S, copied)
    file = copied / "overlays/gpu-nodes/cluster.yaml"
    file.write_text(file.read_text().replace("launch_cost: 60s", "launch_cost: 90s"))

    def config() -> str:
        volumes = installed.plane.get("deployment", "orc")["spec"]["template"]["spec"]["volumes"]
        return next(str(volume["configMap"]["name"]) for volume in volumes if "configMap" in volume)

    before = config()
    rendered = installed.plane.run("kustomize", str(copied / "overlays/gpu-nodes"))
    manifests = for_this_server(list(yaml.safe_load_all(rendered)), tmp_path)
    installed.plane.apply(manifests)
    after = config()
    assert after != before
    assert "launch_cost: 90s" in installed.plane.get("configmap", after)["data"]["cluster.yaml"]

    def leaving() -> list[str]:
        return [
            pod["metadata"]["name"]
            for pod in installed.plane.all("pods")
            if before in _configs(pod)
        ]

    (old,) = eventually("the old pod is told to end", lambda: [*leaving()])
    assert not any(after in _configs(pod) for pod in installed.pods()), (
        "the old pod is not gone yet"
    )
    installed.plane.run(
        "delete", "pod", old, "-n", NAMESPACE, "--grace-period=0", "--force"
    )  # as its kubelet does
    eventually(
        "a pod with the new file", lambda: any(after in _configs(pod) for pod in installed.pods())
    )
    eventually(
        "none with the old one",
        lambda: not any(before in _configs(pod) for pod in installed.pods()),
    )


def _configs(pod: dict[str, Any]) -> list[str]:
    return [
        volume["configMap"]["name"] for volume in pod["spec"]["volumes"] if "configMap" in volume
    ]
