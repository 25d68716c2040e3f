"""A stand-in for KubeRay's operator: the Service and the Pods of a RayCluster, by the rules of kuberay at feeaf72."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any

from tests.k8s.manifests import Manifest, generated_ray_start

GCS_PORT = 6379
AGENT_PORT, HEALTH_PATH = (
    52365,
    "/api/healthz",
)  # of Ray 2.53 and later; the agent is part of ray[default]


def objects_of(cluster: Manifest) -> list[Manifest]:
    """Return the operator's objects for a RayCluster: the head's Service, the head, and each group's workers."""
    spec, name = cluster["spec"], cluster["metadata"]["name"]
    head = _pod(cluster, "head", spec["headGroupSpec"], "headgroup", 0)
    workers = [
        _pod(cluster, "worker", group, group["groupName"], number)
        for group in spec["workerGroupSpecs"]
        for number in range(group["replicas"])
    ]
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {**_metadata(cluster, f"{name}-head-svc"), "labels": {"ray.io/cluster": name}},
        "spec": {
            "clusterIP": "None",
            "selector": {"ray.io/cluster": name, "ray.io/node-type": "head"},
            "ports": [{"name": "gcs-server", "protocol": "TCP", "port": GCS_PORT}],
        },
    }
    return [service, head, *workers]


def head_address(cluster: Manifest) -> str:
    """Full name of the head's Service."""
    name, namespace = cluster["metadata"]["name"], cluster["metadata"]["namespace"]
    return f"{name}-head-svc.{namespace}.svc.cluster.local"


def _metadata(cluster: Manifest, name: str) -> Manifest:
    owner = {
        "apiVersion": cluster["apiVersion"],
        "kind": cluster["kind"],
        "name": cluster["metadata"]["name"],
        "uid": cluster["metadata"]["uid"],
        "controller": True,
        "blockOwnerDeletion": True,
    }
    return {"name": name, "namespace": cluster["metadata"]["namespace"], "ownerReferences": [owner]}


def _pod(
    cluster: Manifest, kind: str, group: Mapping[str, Any], group_name: str, number: int
) -> Manifest:
    name = cluster["metadata"]["name"]
    template = copy.deepcopy(group["template"])
    spec, container = template["spec"], template["spec"]["containers"][0]
    metadata = template.get("metadata", {})
    labels = {
        **metadata.get("labels", {}),
        "ray.io/is-ray-node": "yes",
        "ray.io/cluster": name,
        "ray.io/node-type": kind,
        "ray.io/group": group_name,
    }
    address = head_address(cluster)
    if kind == "worker":
        spec.setdefault("initContainers", []).append(_wait_for_head(container, address))
    _set_env(cluster, container, kind, group, address)
    token = _token(cluster)
    for member in (container, *spec.get("initContainers", ())):
        member.setdefault("env", []).extend(copy.deepcopy(token))
    _set_probes(container)
    suffix = "head" if kind == "head" else f"{group_name}-worker-{number}"
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {
            **_metadata(cluster, f"{name}-{suffix}"),
            "labels": labels,
            "annotations": {
                **metadata.get("annotations", {}),
                "ray.io/overwrite-container-cmd": "true",
            },
        },
        "spec": spec,
    }


def _set_env(
    cluster: Manifest, container: Manifest, kind: str, group: Mapping[str, Any], address: str
) -> None:
    flags = {**group["rayStartParams"]}
    limits = container["resources"].get("limits", {})
    resources = group.get("resources", {})
    if "memory" in limits and "memory" not in flags:
        flags["memory"] = str(quantity_bytes(limits["memory"]))
    if kind == "worker":
        flags["address"] = f"{address}:{GCS_PORT}"
    host = "127.0.0.1" if kind == "head" else address
    container["env"] += [
        {"name": "KUBERAY_GEN_RAY_START_CMD", "value": generated_ray_start(kind, flags, resources)},
        {"name": "RAY_PORT", "value": str(GCS_PORT)},
        {"name": "RAY_ADDRESS", "value": f"{host}:{GCS_PORT}"},
        {
            "name": "RAY_CLUSTER_NAME",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.labels['ray.io/cluster']"}},
        },
        {
            "name": "RAY_CLOUD_INSTANCE_ID",
            "valueFrom": {"fieldRef": {"fieldPath": "metadata.name"}},
        },
    ]
    if kind == "worker":
        container["env"].append({"name": "FQ_RAY_IP", "value": address})
    assert cluster["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"


def _token(cluster: Manifest) -> list[Manifest]:
    options = cluster["spec"]["authOptions"]
    assert options["mode"] == "token", options
    reference = {"name": options["secretName"], "key": "auth_token"}
    return [
        {"name": "RAY_AUTH_MODE", "value": "token"},
        {"name": "RAY_AUTH_TOKEN", "valueFrom": {"secretKeyRef": reference}},
    ]


def _wait_for_head(container: Manifest, address: str) -> Manifest:
    until = (
        f"until ray health-check --address {address}:{GCS_PORT} > /dev/null 2>&1; do sleep 1; done"
    )
    small = {"cpu": "200m", "memory": "256Mi"}
    return {
        "name": "wait-gcs-ready",
        "image": container["image"],
        "command": ["/bin/bash", "-c"],
        "args": [until],
        "securityContext": copy.deepcopy(container["securityContext"]),
        "env": copy.deepcopy(container["env"]),
        "volumeMounts": copy.deepcopy(container["volumeMounts"]),
        "resources": {"limits": dict(small), "requests": dict(small)},
    }


def _set_probes(container: Manifest) -> None:
    probe = {
        "httpGet": {"path": HEALTH_PATH, "port": AGENT_PORT},
        "periodSeconds": 5,
        "failureThreshold": 120,
    }
    container.setdefault("livenessProbe", {**probe, "initialDelaySeconds": 30})
    container.setdefault("readinessProbe", {**probe, "initialDelaySeconds": 10})


def quantity_bytes(text: str) -> int:
    """Bytes of a Kubernetes quantity of memory."""
    for unit, power in (("Ki", 10), ("Mi", 20), ("Gi", 30), ("Ti", 40)):
        if text.endswith(unit):
            return int(text.removesuffix(unit)) << power
    return int(text)
