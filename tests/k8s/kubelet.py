"""A stand-in for the kubelet: runs a bound Pod's own commands as processes of this machine, and reports their status.

Each pod has a network namespace with an address of its own. It has its own host name, /tmp and /dev/shm, the files that
its volumes mount, and the environment that its containers name. Its containers run as the user and the group that the
manifest says, without capabilities, and cannot write to their root. It needs root, iproute2 and util-linux. It does not
isolate processes, limit memory or enforce a network policy; DNS is a file of host names.
"""

from __future__ import annotations

import base64
import http.client
import os
import shlex
import shutil
import signal
import ssl
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from tests.k8s.control_plane import NAMESPACE, SEEN_S, ControlPlane
from tests.k8s.manifests import ROOT, Manifest

PROGRAMS = ("ip", "unshare", "mount", "nsenter", "setpriv")
BRIDGE, NET = "orctest0", "10.213.77"
PROBE_S = 5.0
GRACE_S = 15.0
UPPER = "/dev/shm/upper"
COVERED = (
    "etc",
    "srv",
    "var/lib",
    "root",
)  # changed for one process alone: this machine stays as it is
RESOLVER = "nameserver 127.0.0.1"  # nothing listens: a name that the file lacks is refused at once


def _run(*command: str) -> None:
    subprocess.run(command, check=True, capture_output=True, timeout=SEEN_S)


@dataclass(slots=True, kw_only=True)
class RunningPod:
    """A pod's processes."""

    name: str
    namespace: str
    address: str
    folder: Path
    manifest: Manifest
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    restarts: Counter[str] = field(default_factory=Counter)  # by container

    def log(self, container: str) -> Path:
        return self.folder / f"{container}.log"


@dataclass(slots=True, kw_only=True)
class Kubelet:
    """Runs pods; `names` gives host names that pods know, with their addresses."""

    plane: ControlPlane
    folder: Path
    pods: dict[str, RunningPod] = field(default_factory=dict)
    names: dict[str, str] = field(default_factory=dict)

    @property
    def hosts(self) -> Path:
        return self.folder / "hosts"

    def write_hosts(self) -> None:
        """DNS: one file of every pod."""
        lines = [
            "127.0.0.1 localhost",
            *(f"{address} {name}" for name, address in self.names.items()),
        ]
        self.hosts.write_text("\n".join(lines) + "\n")

    def reserve(self, name: str, *names: str) -> str:
        """Return the future address of the pod of this name, which resolves under `names` too."""
        address = f"{NET}.{10 + len(self.names)}"
        for alias in (name, *names):
            self.names[alias] = address
        self.write_hosts()
        return address

    def run(self, pod: Manifest) -> RunningPod:
        """Start the pod: its init containers to their end, then its containers."""
        name = pod["metadata"]["name"]
        address = self.names[_alias(pod)]
        folder = self.folder / name
        folder.mkdir(parents=True)
        namespace = f"orct{len(self.pods)}"
        veth = f"orctv{len(self.pods)}"
        running = RunningPod(
            name=name, namespace=namespace, address=address, folder=folder, manifest=pod
        )
        self.pods[name] = running
        _run("ip", "netns", "add", namespace)
        _run("ip", "link", "add", veth, "type", "veth", "peer", "name", "eth0", "netns", namespace)
        _run("ip", "link", "set", veth, "master", BRIDGE, "up")
        _run("ip", "-n", namespace, "link", "set", "lo", "up")
        _run("ip", "-n", namespace, "addr", "add", f"{address}/24", "dev", "eth0")
        _run("ip", "-n", namespace, "link", "set", "eth0", "up")
        _run("ip", "-n", namespace, "route", "add", "default", "via", f"{NET}.1")
        for container in pod["spec"].get("initContainers", ()):
            self._start(running, container).wait(SEEN_S * 3)
        for container in pod["spec"]["containers"]:
            running.processes[container["name"]] = self._start(running, container)
        return running

    def _start(self, pod: RunningPod, container: Manifest) -> subprocess.Popen[bytes]:
        command = [*container["command"], *container.get("args", ())]
        script = "\n".join(self._mounts(pod, container))
        inside = (
            f"set -e\n{script}\nhostname {pod.name}\ncd {container.get('workingDir', '/')}\n"
            f"exec {shlex.join(_confined(pod, container))} {shlex.join(command)}"
        )
        with pod.log(container["name"]).open("ab") as log:
            return subprocess.Popen(
                [
                    "ip",
                    "netns",
                    "exec",
                    pod.namespace,
                    "unshare",
                    "--mount",
                    "--uts",
                    "bash",
                    "-c",
                    inside,
                ],
                env=self._environment(pod, container),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _mounts(self, pod: RunningPod, container: Manifest) -> Iterator[str]:
        volumes = {volume["name"]: volume for volume in pod.manifest["spec"]["volumes"]}
        yield from _covered(self.hosts)
        yield f"echo {pod.address} {pod.name} >> /etc/hosts"
        last = ("/dev/shm", "/tmp")  # what is mounted elsewhere comes from below them
        order = {path: number for number, path in enumerate(last, 1)}
        mounts = sorted(
            container.get("volumeMounts", ()), key=lambda mount: order.get(mount["mountPath"], 0)
        )
        for mount in mounts:
            source = self._source(pod, volumes[mount["name"]])
            if "subPath" in mount:
                source /= mount["subPath"]
            target = mount["mountPath"]
            make = (
                f"mkdir -p {Path(target).parent} && touch {target}"
                if source.is_file()
                else f"mkdir -p {target}"
            )
            yield f"{make} && mount --bind {source} {target}"
            if mount.get("readOnly"):
                yield f"mount -o remount,bind,ro {target}"
        assert container["securityContext"]["readOnlyRootFilesystem"], container["name"]
        yield "\n".join(f"mount -o remount,bind,ro /{place}" for place in (*COVERED, ""))

    def _source(self, pod: RunningPod, volume: Manifest) -> Path:
        """Return the folder behind a volume, with the files of its Secret or ConfigMap."""
        folder = pod.folder / "volumes" / volume["name"]
        if "persistentVolumeClaim" in volume:
            folder = self.folder / "claims" / volume["persistentVolumeClaim"]["claimName"]
        folder.mkdir(parents=True, exist_ok=True)
        group = pod.manifest["spec"]["securityContext"]["fsGroup"]
        os.chown(folder, 0, group)
        folder.chmod(0o2777 if "emptyDir" in volume else 0o2775)
        kind = "secret" if "secret" in volume else "configMap"
        if kind in volume:
            wanted = volume[kind]
            data = self.plane.get(kind.lower(), wanted.get("secretName") or wanted["name"])["data"]
            for name, text in data.items():
                file = folder / name
                file.write_bytes(base64.b64decode(text) if kind == "secret" else text.encode())
                os.chown(file, 0, group)
                file.chmod(wanted.get("defaultMode", 0o644))
        return folder

    def _environment(self, pod: RunningPod, container: Manifest) -> dict[str, str]:
        """Return the environment of image and manifest, without that of the test."""
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        env = {"PATH": path, "LANG": "C.UTF-8", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
        env["GRPC_DNS_RESOLVER"] = (
            "native"  # gRPC's own asks a DNS server for what the file of host names lacks
        )
        for variable in container.get("env", ()):
            env[variable["name"]] = self._value(pod, variable)
        return env

    def _value(self, pod: RunningPod, variable: Manifest) -> str:
        source = variable.get("valueFrom")
        if source is None:
            return str(variable.get("value", ""))
        if "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            data = self.plane.get("secret", wanted["name"])["data"]
            return base64.b64decode(data[wanted["key"]]).decode()
        field_path = source["fieldRef"]["fieldPath"]
        metadata, spec = pod.manifest["metadata"], pod.manifest["spec"]
        fields = {
            "metadata.name": metadata["name"],
            "metadata.namespace": metadata["namespace"],
            "spec.nodeName": spec["nodeName"],
        }
        labels = {f"metadata.labels['{name}']": text for name, text in metadata["labels"].items()}
        return str({**fields, **labels}[field_path])

    # ------------------------------------------------------------------------------------------------------- probes

    def passes(self, pod: RunningPod, container: Manifest, kind: str) -> bool:
        """Return whether a probe of the container succeeds. Host is the address; a kubelet checks no certificate."""
        probe = container[kind]["httpGet"]
        ports = {port["name"]: port["containerPort"] for port in container.get("ports", ())}
        port = ports.get(probe["port"], probe["port"])
        try:
            if probe.get("scheme") == "HTTPS":
                context = ssl._create_unverified_context()
                connection: Any = http.client.HTTPSConnection(
                    pod.address, port, timeout=PROBE_S, context=context
                )
            else:
                connection = http.client.HTTPConnection(pod.address, port, timeout=PROBE_S)
            connection.request("GET", probe["path"])
            return 200 <= int(connection.getresponse().status) < 400
        except OSError:
            return False

    def fails_liveness(self) -> list[str]:
        """Return the containers that a kubelet would end now."""
        return [
            f"{pod.name}/{container['name']}"
            for pod in self.pods.values()
            for container in pod.manifest["spec"]["containers"]
            if "livenessProbe" in container and not self.passes(pod, container, "livenessProbe")
        ]

    def report(self, pod: RunningPod) -> bool:
        """Write the pod's status by its probes; return whether it is ready."""
        statuses = []
        for container in pod.manifest["spec"]["containers"]:
            alive = pod.processes[container["name"]].poll() is None
            probes = [kind for kind in ("startupProbe", "readinessProbe") if kind in container]
            ready = alive and all(self.passes(pod, container, kind) for kind in probes)
            state = (
                {"running": {}}
                if alive
                else {"terminated": {"exitCode": pod.processes[container["name"]].poll()}}
            )
            statuses.append(
                {
                    "name": container["name"],
                    "image": container["image"],
                    "imageID": "",
                    "restartCount": pod.restarts[container["name"]],
                    "ready": ready,
                    "state": state,
                }
            )
        ready = all(status["ready"] for status in statuses)
        conditions = [{"type": "Ready", "status": str(ready)}]
        status = {
            "phase": "Running",
            "podIP": pod.address,
            "conditions": conditions,
            "containerStatuses": statuses,
        }
        self.plane.set_status(f"/api/v1/namespaces/{NAMESPACE}/pods/{pod.name}", status)
        return ready

    def restart_ended(self, pod: RunningPod) -> None:
        """Restart containers that ended, as restartPolicy Always requires."""
        for container in pod.manifest["spec"]["containers"]:
            if pod.processes[container["name"]].poll() is not None:
                pod.restarts[container["name"]] += 1
                pod.processes[container["name"]] = self._start(pod, container)

    def execute(self, pod: RunningPod, container: Manifest, *command: str) -> str:
        """Run a command as `kubectl exec` would; return its output and fail on a non-zero exit."""
        pid = str(pod.processes[container["name"]].pid)
        ended = subprocess.run(
            [
                "nsenter",
                "--target",
                pid,
                "--mount",
                "--uts",
                "--net",
                *_confined(pod, container),
                *command,
            ],
            env=self._environment(pod, container),
            capture_output=True,
            text=True,
            timeout=SEEN_S,
            check=False,
        )
        assert ended.returncode == 0, ended.stderr
        return ended.stdout.strip()

    def client(
        self, command: list[str], env: dict[str, str], within_s: float
    ) -> subprocess.CompletedProcess[str]:
        """Run a command outside every pod: it knows the pods' names and has none of their files."""
        inside = "\n".join(("set -e", *_covered(self.hosts), f"exec {shlex.join(command)}"))
        path = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
        return subprocess.run(
            ["unshare", "--mount", "bash", "-c", inside],
            env={"PATH": path, "LANG": "C.UTF-8", "COLUMNS": "200", "PYTHONPATH": str(ROOT), **env},
            capture_output=True,
            text=True,
            timeout=within_s,
            check=False,
        )

    def stop(self) -> None:
        """End every process of every pod, and remove its namespace and link."""
        for number, pod in enumerate(self.pods.values()):
            inside = subprocess.run(
                ["ip", "netns", "pids", pod.namespace], capture_output=True, text=True, check=False
            )
            for pid in inside.stdout.split():
                with suppress(ProcessLookupError):
                    os.kill(int(pid), signal.SIGKILL)
            for process in pod.processes.values():
                with suppress(subprocess.TimeoutExpired):
                    process.wait(GRACE_S)
            subprocess.run(["ip", "netns", "del", pod.namespace], capture_output=True, check=False)
            subprocess.run(
                ["ip", "link", "del", f"orctv{number}"], capture_output=True, check=False
            )


def _covered(hosts: Path) -> Iterator[str]:
    """Yield commands that give a process its own copy of some folders, and the host names."""
    yield f"mkdir -p {UPPER} && mount -t tmpfs none {UPPER}"
    for number, place in enumerate(COVERED):
        folder = f"{UPPER}/{number}"
        yield f"mkdir -p {folder}/u {folder}/w"
        yield f"mount -t overlay o -o lowerdir=/{place},upperdir={folder}/u,workdir={folder}/w /{place}"
    yield f"cat {hosts} > /etc/hosts && rm -f /etc/resolv.conf && echo {RESOLVER} > /etc/resolv.conf"
    yield "chmod a+x /root"  # the Python of this machine may be there


def _confined(pod: RunningPod, container: Manifest) -> list[str]:
    """Return the command that runs a program under the manifest's securityContext."""
    who, rights = pod.manifest["spec"]["securityContext"], container["securityContext"]
    assert rights["capabilities"] == {"drop": ["ALL"]}, rights
    assert rights["allowPrivilegeEscalation"] is False, rights
    command = [
        "setpriv",
        f"--reuid={who['runAsUser']}",
        f"--regid={who['runAsGroup']}",
        f"--groups={who['fsGroup']}",
    ]
    return [*command, "--bounding-set=-all", "--inh-caps=-all", "--no-new-privs"]


def _alias(pod: Manifest) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/name"])


@contextmanager
def kubelet(plane: ControlPlane, folder: Path) -> Iterator[Kubelet]:
    """Yield a kubelet with a bridge between its pods; skip the test where the machine does not permit it."""
    for program in PROGRAMS:
        if shutil.which(program) is None:
            pytest.skip(f"{program} is missing (Debian: iproute2, util-linux, mount)")
    if os.geteuid() != 0:
        pytest.skip("network namespaces need root")
    made = subprocess.run(
        ["ip", "link", "add", BRIDGE, "type", "bridge"], capture_output=True, text=True, check=False
    )
    if made.returncode != 0:
        pytest.skip(f"no bridge can be made here: {made.stderr.strip()}")
    node = Kubelet(plane=plane, folder=folder)
    try:
        _run("ip", "addr", "add", f"{NET}.1/24", "dev", BRIDGE)
        _run("ip", "link", "set", BRIDGE, "up")
        yield node
    finally:
        node.stop()
        subprocess.run(["ip", "link", "del", BRIDGE], capture_output=True, check=False)
