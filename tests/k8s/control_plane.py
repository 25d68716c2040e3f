"""A real Kubernetes control plane on the loopback, for tests: etcd, API server, controllers, scheduler; no kubelet."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.k8s.manifests import LOADER, Manifest, kubectl, manifests_of, shared
from tests.k8s.operator import objects_of

COMMAND_S = 60.0
UP_S = 180.0
SEEN_S = 60.0
POLL_S = 0.2
NEEDED = ("etcd", "openssl", "curl", "xz")
NAMESPACE = "orc"


class Refused(Exception):
    """The server's error in place of an answer."""


@dataclass(frozen=True, slots=True, kw_only=True)
class ControlPlane:
    """Talks to the API server as its administrator."""

    kubeconfig: Path

    @property
    def _command(self) -> list[str]:
        cache = self.kubeconfig.with_name("cache")
        return [kubectl(), "--kubeconfig", str(self.kubeconfig), "--cache-dir", str(cache)]

    def run(self, *arguments: str, stdin: str | None = None) -> str:
        """Return kubectl's output; raise Refused with its errors."""
        ended = subprocess.run(
            [*self._command, *arguments],
            input=stdin,
            capture_output=True,
            text=True,
            timeout=COMMAND_S,
            check=False,
        )
        if ended.returncode != 0:
            raise Refused(f"{ended.stderr}{ended.stdout}")
        return ended.stdout

    def apply(self, manifests: Sequence[Manifest], *arguments: str) -> list[str]:
        """Apply server-side, as the guide does; return a line per accepted object."""
        return self.run(
            "apply", "--server-side", *arguments, "-f", "-", stdin=as_text(manifests)
        ).splitlines()

    def get(self, kind: str, name: str) -> Manifest:
        """Return an object of the namespace."""
        return dict(json.loads(self.run("get", kind, name, "-n", NAMESPACE, "-o", "json")))

    def all(self, kind: str, *arguments: str) -> list[Manifest]:
        """Return the objects of a kind in the namespace."""
        return list(
            json.loads(self.run("get", kind, "-n", NAMESPACE, "-o", "json", *arguments))["items"]
        )

    def may(self, user: str, verb: str, resource: str) -> bool:
        """Return whether RBAC allows `user` the verb in the namespace."""
        kind, _, part = resource.partition("/")
        command = [
            *self._command,
            "auth",
            "can-i",
            verb,
            kind,
            "-n",
            NAMESPACE,
            "--as",
            user,
            f"--subresource={part}",
        ]
        process = subprocess.run(
            command, capture_output=True, text=True, timeout=COMMAND_S, check=False
        )
        assert process.stdout.strip() in ("yes", "no"), process
        return process.stdout.strip() == "yes"

    def knows_ray(self) -> bool:
        """Return whether the server's list of kinds, which kubectl reads, has RayClusters."""
        try:
            kinds = self.run("api-resources", "--api-group=ray.io", "--cached=false", "-o", "name")
        except Refused:  # it has the group, and not yet what is in it
            return False
        return "rayclusters.ray.io" in kinds

    def set_status(self, path: str, status: Manifest) -> None:
        """Write the status of an object, as a kubelet does; `path` is the object's below the API."""
        old = json.loads(self.run("get", "--raw", path))
        del old["metadata"]["resourceVersion"]  # the last writer wins: controllers write beside us
        self.run(
            "replace",
            "--raw",
            f"{path}/status",
            "-f",
            "-",
            stdin=json.dumps({**old, "status": status}),
        )

    def add_node(self, name: str, capacity: Manifest) -> None:
        """A node that takes pods and has no kubelet: it stands for 40 s, then counts as lost."""
        self.apply([{"apiVersion": "v1", "kind": "Node", "metadata": {"name": name}}])
        self.beat(name, capacity)

    def beat(self, name: str, capacity: Manifest) -> None:
        """Say that the node is ready."""
        now = datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "message": "stand-in"}
        conditions = [{**ready, "lastHeartbeatTime": now, "lastTransitionTime": now}]
        self.set_status(
            f"/api/v1/nodes/{name}",
            {"capacity": capacity, "allocatable": capacity, "conditions": conditions},
        )

    def add_volumes(self, folder: Path) -> None:
        """A volume for every claim of the namespace."""
        for claim in self.all("pvc"):
            name = claim["metadata"]["name"]
            self.apply(
                [
                    {
                        "apiVersion": "v1",
                        "kind": "PersistentVolume",
                        "metadata": {"name": f"volume-{name}"},
                        "spec": {
                            "capacity": {
                                "storage": claim["spec"]["resources"]["requests"]["storage"]
                            },
                            "accessModes": claim["spec"]["accessModes"],
                            "claimRef": {"namespace": NAMESPACE, "name": name},
                            "hostPath": {"path": str(folder / name)},
                        },
                    }
                ]
            )

    def make_ray_pods(self) -> None:
        """Create the pods that KubeRay's operator would create."""
        self.apply(objects_of(self.get("raycluster", "orc-ray")))


OPERATED = ("PodMonitor", "ServiceMonitor", "PrometheusRule")  # of Prometheus Operator


def as_text(manifests: Sequence[Manifest]) -> str:
    """YAML of several objects."""
    return yaml.safe_dump_all(manifests)


def for_this_server(manifests: Sequence[Manifest], folder: Path) -> list[Manifest]:
    """The same as Kubernetes 1.20 takes it; kinds whose definitions are not at hand are left out."""
    file = folder / "manifests.yaml"
    file.write_text(
        as_text([manifest for manifest in manifests if manifest["kind"] not in OPERATED])
    )
    return list(yaml.load_all(_older(file), Loader=LOADER))


def _older(*files: Path) -> str:
    command = [sys.executable, str(shared("for_v1_20")), *map(str, files)]
    return subprocess.run(
        command, capture_output=True, text=True, timeout=COMMAND_S, check=True
    ).stdout


@contextmanager
def control_plane(folder: Path) -> Iterator[ControlPlane]:
    """Yield a control plane that knows RayClusters; skip the test where a part is absent."""
    for program in NEEDED:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing (Debian: etcd-server, openssl, curl, xz-utils)")
    script, definitions = shared("control-plane"), shared("crds/ray.io_rayclusters.yaml")
    kubectl()
    try:
        up = subprocess.run(
            [str(script), "up", str(folder)],
            capture_output=True,
            text=True,
            timeout=UP_S,
            check=False,
        )
        assert up.returncode == 0, up.stderr
        plane = ControlPlane(kubeconfig=Path(up.stdout.strip()))
        plane.run("apply", "--server-side", "-f", "-", stdin=_older(definitions))
        eventually("the server knows RayClusters", plane.knows_ray)
        yield plane
    finally:
        subprocess.run([str(script), "down", str(folder)], timeout=UP_S, check=False)


def install(plane: ControlPlane, overlay: str, folder: Path) -> None:
    """Apply an overlay, and give its claims volumes."""
    plane.apply(for_this_server(manifests_of(overlay), folder))
    plane.add_volumes(folder / "volumes")


def eventually(what: str, ask: Callable[[], Any], within_s: float = SEEN_S) -> Any:
    """The first true answer. Fails where none comes in time."""
    deadline_s = time.monotonic() + within_s
    while not (answer := ask()):
        assert time.monotonic() < deadline_s, f"not within {within_s:g} s: {what}"
        time.sleep(POLL_S)
    return answer
