"""Laws of the manifests in k8s/: they hold for every overlay as `kubectl kustomize` renders it."""

from __future__ import annotations

import copy
import ipaddress
import json
import os
import re
import subprocess
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from packaging.requirements import Requirement

from orchestrator.backends.ray.embedded import RAY_ENV
from orchestrator.cli import app
from orchestrator.service.client.endpoint import parse_host_and_port
from orchestrator.service.server.access.gate import OPEN
from orchestrator.service.server.routes.api import ROLES
from orchestrator.specs.access import Role
from orchestrator.specs.cluster import ClusterSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.parse import parse_cluster
from tests.k8s.manifests import (
    K8S,
    LOADER,
    OVERLAYS,
    ROOT,
    Manifest,
    Template,
    command_of,
    environment,
    find_manifest,
    generated_ray_start,
    manifests_of,
    of_kind,
    selects,
    shared,
    templates,
    text_of,
)

RELEASE = "1.37"
CUSTOM = (
    "RayCluster",
    "PodMonitor",
    "ServiceMonitor",
    "PrometheusRule",
)  # kinds whose schemas Kubernetes does not have
WIDE = ("orc/ray-member",)  # label of pods that reach each other on every port
OUTSIDE = {
    53: "DNS",
    443: "webhooks and chat",
    587: "mail",
    5432: "a database of the user's",
}  # ports of others
SECRETS = {
    "orc-tls": {"tls.crt", "tls.key"},
    "orc-ray-token": {"auth_token"},
    "orc-database": {"journal", "mlflow"},
}
EXTRAS = ("finetune", "notify", "oidc", "postgres")  # of the image
NAMESPACE = "orc"
HOME = "/srv/orc"

each_overlay = pytest.mark.parametrize("overlay", OVERLAYS)


def test_every_overlay_of_the_guide_is_there() -> None:
    assert set(OVERLAYS) == {
        "dev-virtual-devices",
        "external-postgres",
        "gpu-nodes",
        "ha",
        "kueue",
        "monitoring",
        "single-node",
    }


# ----------------------------------------------------------------------------------------------------------- schemas


@each_overlay
def test_every_object_is_valid_by_kubernetes_own_schema_and_has_no_unknown_key(
    overlay: str,
) -> None:
    checked = pytest.importorskip("kubernetes_validate")
    manifests = [manifest for manifest in manifests_of(overlay) if manifest["kind"] not in CUSTOM]
    assert {"Deployment", "NetworkPolicy", "Namespace", "Service"} <= {
        manifest["kind"] for manifest in manifests
    }
    assert [refused for manifest in manifests if (refused := why_refused(checked, manifest))] == []


def why_refused(checked: Any, manifest: Manifest) -> str | None:
    """Return the error of Kubernetes' own schema for a manifest, or None."""
    try:
        checked.validate(manifest, RELEASE, strict=True)
    except checked.ValidationError as error:
        return f"{manifest['kind']} {manifest['metadata']['name']}: {error.message}"
    return None


def test_a_misspelt_key_of_a_deployment_is_found() -> None:
    checked = pytest.importorskip("kubernetes_validate")
    deployment = copy.deepcopy(find_manifest(manifests_of("single-node"), "Deployment", "orc"))
    deployment["spec"]["template"]["spec"]["containers"][0]["volumeMount"] = []
    assert "volumeMount" in str(why_refused(checked, deployment))


def closed(schema: Any) -> Any:
    """Return the structural schema with unknown keys refused: a server drops them in silence."""
    if isinstance(schema, list):
        return [closed(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    if schema.get("x-kubernetes-int-or-string"):
        return {"type": ["integer", "string"]}
    inner = {
        key: closed(value) for key, value in schema.items() if not key.startswith("x-kubernetes")
    }
    open_ended = (
        schema.get("x-kubernetes-preserve-unknown-fields") or "additionalProperties" in schema
    )
    if isinstance(schema.get("properties"), dict) and not open_ended:
        inner["additionalProperties"] = False
    return inner


def ray_schema() -> Any:
    definition = yaml.load(shared("crds/ray.io_rayclusters.yaml").read_text(), Loader=LOADER)
    (schema,) = [
        version["schema"]["openAPIV3Schema"]
        for version in definition["spec"]["versions"]
        if version["name"] == "v1"
    ]
    schema = closed(schema)
    schema["properties"]["metadata"] = {"type": "object"}
    return schema


@each_overlay
def test_the_ray_cluster_is_valid_by_kuberays_definition_and_has_no_unknown_key(
    overlay: str,
) -> None:
    jsonschema = pytest.importorskip("jsonschema")
    clusters = of_kind(manifests_of(overlay), "RayCluster")
    assert len(clusters) == 1
    assert [
        error.message
        for cluster in clusters
        for error in jsonschema.Draft202012Validator(ray_schema()).iter_errors(cluster)
    ] == []


def test_a_misspelt_key_of_a_ray_cluster_is_found() -> None:
    jsonschema = pytest.importorskip("jsonschema")
    cluster = find_manifest(manifests_of("gpu-nodes"), "RayCluster", "orc-ray")
    cluster["spec"]["workerGroupSpecs"][0]["template"]["spec"]["containers"][0]["volumeMount"] = []
    with pytest.raises(jsonschema.ValidationError):
        jsonschema.validate(cluster, ray_schema())


@each_overlay
def test_what_kuberays_operator_refuses_beyond_its_schema_is_not_said(overlay: str) -> None:
    spec = find_manifest(manifests_of(overlay), "RayCluster", "orc-ray")["spec"]
    for group in (spec["headGroupSpec"], *spec["workerGroupSpecs"]):
        parameters = set(group["rayStartParams"])
        assert "labels" not in parameters
        assert not (
            "resources" in group and parameters & {"num-cpus", "num-gpus", "memory", "resources"}
        )
    assert all(
        {"replicas", "minReplicas", "maxReplicas"} <= set(group)
        for group in spec["workerGroupSpecs"]
    )


# ---------------------------------------------------------------------------------------------------------- security


def unrestricted(template: Template) -> Iterator[str]:
    """Yield breaches of the pod security standard `restricted` and of our stricter read-only root."""
    spec = template.spec
    pod = spec.get("securityContext", {})
    if not pod.get("runAsNonRoot") or not pod.get("runAsUser"):
        yield "may run as root"
    if pod.get("seccompProfile") != {"type": "RuntimeDefault"}:
        yield "no seccomp profile"
    if any(spec.get(name) for name in ("hostNetwork", "hostPID", "hostIPC")):
        yield "a namespace of the host"
    if spec.get("automountServiceAccountToken") is not False:
        yield "a token of the Kubernetes API"
    allowed = {
        "configMap",
        "emptyDir",
        "persistentVolumeClaim",
        "secret",
        "projected",
        "downwardAPI",
    }
    for volume in spec.get("volumes", ()):
        if not set(volume) - {"name"} <= allowed:
            yield f"volume {volume['name']}"
    for container in template.containers:
        context = container.get("securityContext", {})
        if context.get("allowPrivilegeEscalation") is not False or context.get("privileged"):
            yield "escalation"
        if context.get("capabilities") != {"drop": ["ALL"]}:
            yield "capabilities"
        if context.get("readOnlyRootFilesystem") is not True:
            yield "a root file system that is written to"
        if context.get("runAsUser") == 0 or context.get("runAsNonRoot") is False:
            yield "a container as root"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield "a port of the host"


@each_overlay
def test_every_pod_is_restricted_and_so_is_the_namespace(overlay: str) -> None:
    manifests = manifests_of(overlay)
    for template in templates(manifests):
        assert list(unrestricted(template)) == [], template.owner
    labels = find_manifest(manifests, "Namespace", NAMESPACE)["metadata"]["labels"]
    assert labels["pod-security.kubernetes.io/enforce"] == "restricted"


LOOSENED: dict[str, Callable[[Manifest], Any]] = {
    "may run as root": lambda spec: spec["securityContext"].pop("runAsNonRoot"),
    "no seccomp profile": lambda spec: spec["securityContext"].pop("seccompProfile"),
    "a namespace of the host": lambda spec: spec.update(hostNetwork=True),
    "a token of the Kubernetes API": lambda spec: spec.pop("automountServiceAccountToken"),
    "volume tmp": lambda spec: spec["volumes"].append({"name": "tmp", "hostPath": {"path": "/"}}),
    "escalation": lambda spec: spec["containers"][0]["securityContext"].pop(
        "allowPrivilegeEscalation"
    ),
    "capabilities": lambda spec: spec["containers"][0]["securityContext"]["capabilities"].update(
        add=["SYS_PTRACE"]
    ),
    "a root file system that is written to": lambda spec: spec["containers"][0][
        "securityContext"
    ].update(readOnlyRootFilesystem=False),
    "a container as root": lambda spec: spec["containers"][0]["securityContext"].update(
        runAsUser=0
    ),
    "a port of the host": lambda spec: spec["containers"][0]["ports"][0].update(hostPort=80),
}


@pytest.mark.parametrize("loosening", LOOSENED)
def test_each_loosening_of_a_pod_is_found(loosening: str) -> None:
    (template, *_) = templates(manifests_of("dev-virtual-devices"))
    body = copy.deepcopy(template.body)
    LOOSENED[loosening](body["spec"])
    assert list(unrestricted(Template(owner=template.owner, body=body))) == [loosening]


@each_overlay
def test_no_manifest_has_a_secret_in_it(overlay: str) -> None:
    manifests = manifests_of(overlay)
    assert of_kind(manifests, "Secret") == []
    assert not re.search(r"://[^/\s:@]+:[^/\s@]+@", text_of(overlay))
    for template in templates(manifests):
        for container in template.containers:
            for name, variable in environment(container).items():
                if re.search("TOKEN|PASSWORD|SECRET|KEY", name):
                    assert "value" not in variable, name


@each_overlay
def test_nothing_of_ours_may_ask_the_kubernetes_api(overlay: str) -> None:
    manifests = manifests_of(overlay)
    assert of_kind(manifests, "ClusterRole", "ClusterRoleBinding", "RoleBinding") == []
    assert (
        find_manifest(manifests, "ServiceAccount", "orc")["automountServiceAccountToken"] is False
    )


# ---------------------------------------------------------------------------------------------------------- commands


def parse(container: Manifest) -> dict[str, Any]:
    """A container's command line, by the parser of the program itself; what it understood."""
    program, subcommand, *rest = command_of(container)
    if program == "orc":
        command: Any = typer.main.get_command(app)
        outer = command.make_context("orc", [subcommand, *rest])
        _, inner, arguments = command.resolve_command(outer, [subcommand, *rest])
    elif program == "ray":
        from ray.scripts.scripts import cli

        inner, outer, arguments = cli.commands[subcommand], None, rest
    else:
        assert program == "mlflow"
        from mlflow.cli import cli as mlflow

        inner, outer, arguments = mlflow.commands[subcommand], None, rest
    return dict(inner.make_context(subcommand, list(arguments), parent=outer).params)


def shell(container: Manifest) -> bool:
    return command_of(container)[:2] == ["/bin/bash", "-c"]


@each_overlay
def test_every_command_is_one_that_its_program_takes(overlay: str) -> None:
    for template in templates(manifests_of(overlay)):
        for container in template.containers:
            if not shell(container):
                assert parse(container), template.owner


def test_a_flag_that_orc_does_not_have_is_found() -> None:
    (container,) = [
        container
        for container in service("dev-virtual-devices").containers
        if container["name"] == "orc"
    ]
    container["args"] = [*container["args"], "--replicas=2"]
    with pytest.raises(Exception, match="No such option"):
        parse(container)


def service(overlay: str) -> Template:
    (template,) = [
        template for template in templates(manifests_of(overlay)) if template.owner == "orc"
    ]
    return template


@pytest.mark.parametrize("kind", ["head", "worker"])
@each_overlay
def test_rays_containers_run_what_the_operator_generated_with_its_quotes(
    overlay: str, kind: str, tmp_path: Path
) -> None:
    spec = find_manifest(manifests_of(overlay), "RayCluster", "orc-ray")
    assert spec["metadata"]["annotations"]["ray.io/overwrite-container-cmd"] == "true"
    group = spec["spec"]["headGroupSpec"] if kind == "head" else spec["spec"]["workerGroupSpecs"][0]
    container = group["template"]["spec"]["containers"][0]
    command = generated_ray_start(kind, group["rayStartParams"], group.get("resources", {}))
    (tmp_path / "ray").write_text('#!/bin/bash\nprintf "%s\\n" "$@"\n')
    (tmp_path / "ray").chmod(0o755)
    env = {
        "PATH": f"{tmp_path}:{os.defpath}",
        "KUBERAY_GEN_RAY_START_CMD": command,
        "NODE_NAME": "node-7",
    }
    ran = subprocess.run(
        command_of(container), env=env, capture_output=True, text=True, timeout=20, check=True
    )
    from ray.scripts.scripts import start

    understood = start.make_context("start", ran.stdout.split("\n")[1:-1]).params
    assert understood["block"]
    if kind == "head":
        assert understood["head"]
        assert understood["num_cpus"] == 0
    else:
        devices = json.loads(understood["resources"])
        assert devices == {f"gpu{index}": 1 for index in range(len(devices))}
        assert understood["labels"] == "orc-node=node-7"


@each_overlay
def test_every_part_of_ray_runs_by_the_rules_of_the_embedded_one(overlay: str) -> None:
    for template in templates(manifests_of(overlay)):
        for container in template.containers:
            if shell(container) or container["command"][0] == "ray":
                values = {
                    name: variable.get("value") for name, variable in environment(container).items()
                }
                assert values.items() >= RAY_ENV.items(), container["name"]


# ---------------------------------------------------------------------------------------- what the service is told


def cluster_of(overlay: str) -> tuple[Manifest, ClusterSpec]:
    (config,) = [
        manifest
        for manifest in of_kind(manifests_of(overlay), "ConfigMap")
        if "cluster.yaml" in manifest["data"]
    ]
    return config, parse_cluster(config["data"]["cluster.yaml"], overlay)


@each_overlay
def test_the_cluster_file_describes_the_workers_that_the_ray_cluster_starts(overlay: str) -> None:
    _, cluster = cluster_of(overlay)
    (group,) = find_manifest(manifests_of(overlay), "RayCluster", "orc-ray")["spec"][
        "workerGroupSpecs"
    ]
    assert len([name for node in cluster.nodes for name in node.names]) == group["replicas"]
    assert group["minReplicas"] == group["maxReplicas"] == group["replicas"]
    devices = [name for name in group["resources"] if name.startswith("gpu")]
    (limits,) = [
        container["resources"]["limits"] for container in group["template"]["spec"]["containers"]
    ]
    for node in cluster.nodes:
        assert sorted(devices) == sorted(f"gpu{index}" for index in range(node.devices))
        on_gpus = node.device.kind is DeviceKind.CUDA
        assert (
            limits.get("nvidia.com/gpu")
            == group["resources"].get("GPU")
            == (str(node.devices) if on_gpus else None)
        )


@each_overlay
def test_a_changed_cluster_file_changes_the_pod(overlay: str) -> None:
    config, _ = cluster_of(overlay)
    assert re.fullmatch(r"orc-cluster-[a-z0-9]{10}", config["metadata"]["name"])
    used = [
        volume["configMap"]["name"]
        for volume in service(overlay).spec["volumes"]
        if "configMap" in volume
    ]
    assert used == [config["metadata"]["name"]]


@each_overlay
def test_a_worker_is_named_for_its_kubernetes_node_unless_there_is_one_alone(overlay: str) -> None:
    _, cluster = cluster_of(overlay)
    for template in templates(manifests_of(overlay)):
        if template.owner == "ray-worker":
            (container,) = template.containers
            name = environment(container)["NODE_NAME"]
            if "valueFrom" in name:
                assert name["valueFrom"] == {"fieldRef": {"fieldPath": "spec.nodeName"}}
            else:
                assert (name["value"],) == cluster.nodes[0].names


@each_overlay
def test_the_service_is_told_names_and_ports_that_are_there(overlay: str) -> None:
    manifests = manifests_of(overlay)
    (container,) = [
        container for container in service(overlay).containers if container["name"] == "orc"
    ]
    options, env = parse(container), environment(container)
    ray = find_manifest(manifests, "RayCluster", "orc-ray")["metadata"]["name"]
    assert options["ray"] == f"{ray}-head-svc:6379"
    (raylet,) = [
        container for container in service(overlay).containers if container["name"] == "raylet"
    ]
    assert f"--address={options['ray']}" in raylet["args"]
    mlflow = find_manifest(manifests, "Service", "mlflow")
    assert env["ORC_MLFLOW"]["value"] == f"http://mlflow:{mlflow['spec']['ports'][0]['port']}"
    names = {
        "orc",
        f"orc.{NAMESPACE}",
        f"orc.{NAMESPACE}.svc",
        f"orc.{NAMESPACE}.svc.cluster.local",
    }
    assert set(options["allowed_hosts"]) == names
    assert parse_host_and_port(options["listen"])[1] == container["ports"][0]["containerPort"]
    assert options["foreground"]
    mounts = {mount["mountPath"] for mount in container["volumeMounts"]}
    assert {str(options["tls_cert"]), str(options["tls_key"])} <= mounts
    assert str(options["cluster"].parent) in mounts


@each_overlay
def test_probes_ask_what_the_service_answers_anyone(overlay: str) -> None:
    (container,) = [
        container for container in service(overlay).containers if container["name"] == "orc"
    ]
    for name in ("startupProbe", "livenessProbe", "readinessProbe"):
        probe = container[name]["httpGet"]
        assert probe["path"] in OPEN
        assert probe["scheme"] == "HTTPS"


@each_overlay
def test_the_home_folder_has_one_path_and_one_user_and_one_image_serves_all(overlay: str) -> None:
    manifests = manifests_of(overlay)
    homes, users, images = set(), set(), set()
    for template in templates(manifests):
        users.add(
            (
                template.spec["securityContext"]["runAsUser"],
                template.spec["securityContext"]["fsGroup"],
            )
        )
        for container in template.containers:
            images.add(container["image"])
            homes |= {
                mount["mountPath"] for mount in container["volumeMounts"] if mount["name"] == "home"
            }
    assert homes == {HOME}
    assert len(images) == 1
    ((user, group),) = users
    assert f"--uid {user} " in (K8S / "image/Dockerfile").read_text()
    assert f"USER {user}:{group}" in (K8S / "image/Dockerfile").read_text()
    (container,) = [
        container for container in service(overlay).containers if container["name"] == "orc"
    ]
    assert environment(container)["ORC_HOME"]["value"].startswith(
        f"{HOME}/"
    )  # made, and so owned, by the service


@each_overlay
def test_a_single_writer_is_never_two_and_has_time_to_end(overlay: str) -> None:
    deployments = of_kind(manifests_of(overlay), "Deployment")
    assert all(deployment["spec"]["strategy"] == {"type": "Recreate"} for deployment in deployments)
    on_files = "sqlite" in text_of(overlay)
    for deployment in deployments:
        assert deployment["spec"]["replicas"] == (
            2 if overlay == "ha" and deployment["metadata"]["name"] == "orc" else 1
        )
    assert on_files != (overlay in ("ha", "external-postgres"))
    assert service(overlay).spec["terminationGracePeriodSeconds"] >= 120


# ----------------------------------------------------------------------------------------------- names and selectors


@each_overlay
def test_every_name_that_a_pod_mentions_is_there(overlay: str) -> None:
    manifests = manifests_of(overlay)
    names = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in manifests}
    for template in templates(manifests):
        spec = template.spec
        assert ("ServiceAccount", spec["serviceAccountName"]) in names
        assert ("PriorityClass", spec["priorityClassName"]) in names
        volumes = {volume["name"]: volume for volume in spec["volumes"]}
        for volume in volumes.values():
            if "persistentVolumeClaim" in volume:
                assert (
                    "PersistentVolumeClaim",
                    volume["persistentVolumeClaim"]["claimName"],
                ) in names
            if "configMap" in volume:
                assert ("ConfigMap", volume["configMap"]["name"]) in names
            if "secret" in volume:
                assert volume["secret"]["secretName"] in SECRETS
        mounted = {
            mount["name"]
            for container in template.containers
            for mount in container["volumeMounts"]
        }
        assert mounted == set(volumes), f"{template.owner} mounts each volume, and no other"
        for container in template.containers:
            for variable in environment(container).values():
                wanted = variable.get("valueFrom", {}).get("secretKeyRef")
                assert wanted is None or wanted["key"] in SECRETS[wanted["name"]]


@each_overlay
def test_every_claim_is_used(overlay: str) -> None:
    manifests = manifests_of(overlay)
    used = {
        volume["persistentVolumeClaim"]["claimName"]
        for template in templates(manifests)
        for volume in template.spec["volumes"]
        if "persistentVolumeClaim" in volume
    }
    assert used == {
        claim["metadata"]["name"] for claim in of_kind(manifests, "PersistentVolumeClaim")
    }


@each_overlay
def test_every_object_is_of_the_namespace_or_of_the_cluster(overlay: str) -> None:
    for manifest in manifests_of(overlay):
        of_the_cluster = manifest["kind"] in ("Namespace", "PriorityClass")
        assert manifest["metadata"].get("namespace") == (None if of_the_cluster else NAMESPACE), (
            manifest["metadata"]
        )


@each_overlay
def test_every_selector_selects_a_pod(overlay: str) -> None:
    manifests = manifests_of(overlay)
    pods = [template.labels for template in templates(manifests)]
    for manifest in manifests:
        selector = {
            "Service": lambda spec: {"matchLabels": spec["selector"]},
            "PodDisruptionBudget": lambda spec: spec["selector"],
            "NetworkPolicy": lambda spec: spec["podSelector"],
            "PodMonitor": lambda spec: spec["selector"],
            "Deployment": lambda spec: spec["selector"],
        }.get(manifest["kind"])
        if selector is not None:
            assert any(selects(selector(manifest["spec"]), labels) for labels in pods), manifest[
                "metadata"
            ]["name"]


def listened(template: Template) -> set[int]:
    return {
        port["containerPort"]
        for container in template.containers
        for port in container.get("ports", ())
    }


def test_prometheus_is_led_to_the_services_port_for_metrics() -> None:
    manifests = manifests_of("monitoring")
    monitor = find_manifest(manifests, "ServiceMonitor", "orc")["spec"]
    chosen = [
        service
        for service in of_kind(manifests, "Service")
        if selects(monitor["selector"], service["metadata"]["labels"])
    ]
    (endpoint,) = monitor["endpoints"]
    named = [
        service["metadata"]["name"]
        for service in chosen
        for port in service["spec"]["ports"]
        if port["name"] == endpoint["port"]
    ]
    assert named == ["orc"]
    assert Role.VIEWER is ROLES["GET", endpoint["path"]]


@each_overlay
def test_every_port_of_a_service_is_one_that_its_pods_name(overlay: str) -> None:
    manifests = manifests_of(overlay)
    for service in of_kind(manifests, "Service"):
        chosen = [
            pod
            for pod in templates(manifests)
            if selects({"matchLabels": service["spec"]["selector"]}, pod.labels)
        ]
        names = {
            port["name"]
            for pod in chosen
            for container in pod.containers
            for port in container.get("ports", ())
        }
        assert {port["targetPort"] for port in service["spec"]["ports"]} <= names


@each_overlay
def test_every_port_that_a_network_policy_opens_is_one_that_somebody_listens_on(
    overlay: str,
) -> None:
    manifests = manifests_of(overlay)
    pods = templates(manifests)
    for policy in of_kind(manifests, "NetworkPolicy"):
        spec = policy["spec"]
        chosen = [pod for pod in pods if selects(spec["podSelector"], pod.labels)]
        for rule in spec.get("ingress", ()):
            for port in rule.get("ports", ()):
                assert all(port["port"] in listened(pod) for pod in chosen), policy["metadata"][
                    "name"
                ]
            if not rule.get("ports"):
                assert all(
                    set(peer["podSelector"]["matchLabels"]) <= set(WIDE) for peer in rule["from"]
                )
        for rule in spec.get("egress", ()):
            for port in rule.get("ports", ()):
                peers = [
                    peer["podSelector"]
                    for peer in rule.get("to", ())
                    if set(peer) == {"podSelector"}
                ]
                targets = [pod for pod in pods if any(selects(peer, pod.labels) for peer in peers)]
                if targets:
                    assert all(port["port"] in listened(pod) for pod in targets), policy[
                        "metadata"
                    ]["name"]
                else:
                    assert port["port"] in OUTSIDE


def reaches(manifests: list[Manifest], source: Template, target: Template, port: int) -> bool:
    """Return whether both sides' policies let `source` reach `target`: a pod is denied what no policy allows."""

    def allowed(pod: Template, side: str, key: str, other: Template) -> bool:
        for policy in of_kind(manifests, "NetworkPolicy"):
            if not selects(policy["spec"]["podSelector"], pod.labels):
                continue
            for rule in policy["spec"].get(side, ()):
                ports = [port["port"] for port in rule.get("ports", ())]
                peers = rule.get(key)
                is_peer = peers is None or any(
                    set(peer) == {"podSelector"} and selects(peer["podSelector"], other.labels)
                    for peer in peers
                )
                if is_peer and (not ports or port in ports):
                    return True
        return False

    return allowed(source, "egress", "to", target) and allowed(target, "ingress", "from", source)


@each_overlay
def test_parts_reach_what_they_need_and_nothing_else(overlay: str) -> None:
    manifests = manifests_of(overlay)
    pods = {template.owner: template for template in templates(manifests)}
    deny = find_manifest(manifests, "NetworkPolicy", "default-deny")["spec"]
    assert deny == {"podSelector": {}, "policyTypes": ["Ingress", "Egress"]}
    needed = {("orc", "mlflow", 5000)} | {
        (source, target, port)
        for source in ("orc", "ray-head", "ray-worker")
        for target in ("orc", "ray-head", "ray-worker")
        for port in (6379, 29500)
    }
    for source in pods:
        for target in pods:
            for port in (5000, 6379, 29500):
                expected = (source, target, port) in needed or (
                    port == 5000 and "mlflow" not in (source, target)  # within Ray, every port
                )
                assert reaches(manifests, pods[source], pods[target], port) == expected, (
                    source,
                    target,
                    port,
                )


@each_overlay
def test_the_service_alone_gets_the_variables_that_a_cluster_file_names(overlay: str) -> None:
    sources = {
        (template.owner, container["name"]): container["envFrom"]
        for template in templates(manifests_of(overlay))
        for container in template.containers
        if "envFrom" in container
    }
    assert sources == {
        ("orc", "orc"): [{"secretRef": {"name": "orc-environment", "optional": True}}]
    }


def test_notices_leave_for_public_addresses_and_by_the_service_alone() -> None:
    policy = find_manifest(manifests_of("monitoring"), "NetworkPolicy", "notify")["spec"]
    assert policy["podSelector"] == {"matchLabels": {"app.kubernetes.io/name": "orc"}}
    ((block,),) = ([peer["ipBlock"] for peer in rule["to"]] for rule in policy["egress"])
    denied = [ipaddress.ip_network(network) for network in block["except"]]
    for address in (
        "10.0.0.1",
        "172.20.0.1",
        "192.168.1.1",
        "169.254.169.254",
        "127.0.0.1",
        "100.64.0.1",
    ):
        assert any(ipaddress.ip_address(address) in network for network in denied), address
    assert "notify" not in {
        policy["metadata"]["name"] for policy in of_kind(manifests_of("gpu-nodes"), "NetworkPolicy")
    }


# ------------------------------------------------------------------------------------------------------------- image


def test_the_image_pins_what_the_project_allows() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    extras = project["optional-dependencies"]
    wanted = [
        Requirement(text)
        for text in (
            *project["dependencies"],
            *(requirement for name in EXTRAS for requirement in extras[name]),
        )
    ]
    lines = (K8S / "image/constraints.txt").read_text().splitlines()
    pinned = dict(line.split("==") for line in lines if not line.startswith("#"))
    assert {requirement.name.lower() for requirement in wanted} == {name.lower() for name in pinned}
    for requirement in wanted:
        (version,) = [pinned[name] for name in pinned if name.lower() == requirement.name.lower()]
        assert requirement.specifier.contains(version), requirement
    ray = find_manifest(manifests_of("gpu-nodes"), "RayCluster", "orc-ray")["spec"]["rayVersion"]
    assert pinned["ray"] == ray


def test_the_image_copies_what_is_there() -> None:
    lines = [
        line.split()
        for line in (K8S / "image/Dockerfile").read_text().splitlines()
        if line.startswith("COPY")
    ]
    for _, *sources, _ in lines:
        assert all((ROOT / source).exists() for source in sources)


# ------------------------------------------------------------------------------------------------------------- guide


def test_the_guide_names_every_overlay_and_makes_every_secret_with_its_keys() -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    assert set(re.findall(r"^\| `([a-z-]+)` \| ", guide, re.M)) >= set(OVERLAYS)
    for name, keys in SECRETS.items():
        (made,) = re.findall(rf"create secret (\S+) {name} ((?:.*\\\n)*.*)", guide)
        kind, options = made
        secret_keys = (
            {"tls.crt", "tls.key"}
            if kind == "tls"
            else set(re.findall(r"--from-literal=(\w+)=", options))
        )
        assert secret_keys == keys


def test_every_command_of_orc_in_the_guide_is_one_that_orc_takes() -> None:
    guide = (ROOT / "docs/guides/kubernetes.md").read_text()
    lines = re.findall(r"^(?:kubectl .* -- )?(orc .*?)(?:  +#.*)?$", guide, re.M)
    assert len(lines) >= 6
    for line in lines:
        assert is_understood(line.split()), line


def is_understood(arguments: list[str]) -> bool:
    """Return whether `orc` parses a command line, down to the command in its group."""
    command: Any = typer.main.get_command(app)
    context, name, rest = None, arguments[0], arguments[1:]
    while hasattr(command, "commands"):
        context = command.make_context(name, list(rest), parent=context)
        name, command, rest = command.resolve_command(
            context, [*context._protected_args, *context.args]
        )
    command.make_context(name, list(rest), parent=context)
    return True
