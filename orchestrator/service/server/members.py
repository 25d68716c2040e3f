"""Machines that joined the service's own Ray, and the properties that they must share with it."""

from __future__ import annotations

import hashlib
import importlib.metadata
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path

from orchestrator.service.intake.cluster_file import (
    add_joined_nodes,
    load_joined_nodes,
    store_joined_nodes,
)
from orchestrator.specs.cluster import ClusterSpec, NodeSpec
from orchestrator.specs.errors import ServiceError, SpecError, UnknownError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.parse import join_problems

NAMED_MAX = 20  # machines that an error names
LOOPBACK_PREFIX = "127."


@frozen
class Machine:
    """Properties that all machines of a cluster must share."""

    home: str
    home_mark: str  # of what is in that folder; empty where there is no home
    python: str  # minor version
    interpreter: str  # its path: ranks are started by it on every machine
    ray: str
    orchestrator: str


def machine(home: Path) -> Machine:
    """Return this machine's properties."""
    return Machine(
        home=str(home.resolve()),
        home_mark=_home_mark(home),
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        interpreter=sys.executable,
        ray=importlib.metadata.version("ray"),
        orchestrator=importlib.metadata.version("orchestrator"),
    )


def check_alike(service: Machine, here: Machine) -> None:
    """Raise one SpecError that lists every difference that prevents a job from running on both machines."""
    install = "install the same version here: `pip install {}=={}`"
    differences = {
        "python": f"run `orc join` by the service's interpreter, {service.interpreter}",
        "interpreter": "ranks start by that path on every machine: install the environment there",
        "ray": install.format("ray", service.ray),
        "orchestrator": install.format("orchestrator", service.orchestrator),
        "home": "mount the service's home here at the same path, and name it: `--home`, ORC_HOME",
    }
    problems = [
        SpecError(
            "this machine differs from the service's",
            path=name,
            got=actual,
            allowed=expected,
            hint=hint,
        )
        for name, hint in differences.items()
        if (actual := getattr(here, name)) != (expected := getattr(service, name))
    ]
    if here.home == service.home and here.home_mark != service.home_mark:
        what = (
            "this folder is not the service's home"
            if here.home_mark
            else "the service's home is not here"
        )
        hint = "mount the storage that the service's machine has there"
        problems.append(
            SpecError(what, path="home", got=here.home, allowed="one shared folder", hint=hint)
        )
    if problems:
        raise join_problems(problems, "orc join")


class Members:
    """The joined machines, stored in the home. Every method is thread-safe."""

    def __init__(
        self,
        home: Path,
        cluster: ClusterSpec,
        ray_address: Callable[[], str],
        addresses: Callable[[], Mapping[str, str]],
        tell: Callable[[ClusterSpec], None],
    ) -> None:
        """`cluster` is the file's; `addresses` returns those of live nodes; `tell` gets the cluster with members."""
        self._home = home
        self._cluster = cluster
        self._ray_address = ray_address
        self._addresses = addresses
        self._tell = tell
        self._lock = threading.Lock()

    def ray_address(self) -> str:
        """Return the address of Ray for joining. Raises ServiceError where none can join."""
        address = self._ray_address()
        if address.startswith(LOOPBACK_PREFIX):
            raise ServiceError(
                "the service's Ray is on the loopback, where no other machine reaches it: `orc down`, then "
                "`orc up --listen ADDRESS:PORT` with an address of its machine"
            )
        return address

    def add(self, node: NodeSpec, address: str) -> None:
        """Add a machine, or add it again. Raises ServiceError where its name is another's, or its devices changed."""
        self.ray_address()
        with self._lock:
            joined = {member.name: member for member in load_joined_nodes(self._home)}
            live = self._addresses()
            if live.get(node.name, address) != address:
                raise ServiceError(
                    f"node {node.name} is in the cluster already, at {live[node.name]}: "
                    "`orc join --name NAME` gives this machine another name"
                )
            node = self._as_declared(node)
            if joined.get(node.name) == node:
                return
            if node.name in live:
                raise ServiceError(
                    f"the devices of node {node.name} have changed: `orc leave` there, then join again"
                )
            self._store({**joined, node.name: node})

    def remove(self, name: str) -> None:
        """Remove a machine. Raises UnknownError for one that has not joined, ServiceError where its Ray still runs."""
        with self._lock:
            joined = {member.name: member for member in load_joined_nodes(self._home)}
            if name not in joined:
                names = ", ".join(sorted(joined)[:NAMED_MAX]) or "none"
                raise UnknownError(f"no machine {name!r} has joined; those that have: {names}")
            if name in self._addresses():
                raise ServiceError(f"node {name} still runs: `orc leave` on that machine stops it")
            self._store({member: node for member, node in joined.items() if member != name})

    def _as_declared(self, node: NodeSpec) -> NodeSpec:
        """Return the node as the cluster file declares it, if it does. Raises ServiceError if the machine has less."""
        declared = next(
            (declaration for declaration in self._cluster.nodes if node.name in declaration.names),
            None,
        )
        if declared is None:
            return node
        if declared.device.kind is not node.device.kind or declared.devices > node.devices:
            raise ServiceError(
                f"the cluster file says that {node.name} has {declared.devices} x {declared.device.name}; "
                f"the machine has {node.devices} x {node.device.name}: correct the file, or join by another name"
            )
        return declared.model_copy(update={"name": node.name, "count": 1})

    def _store(self, joined: Mapping[str, NodeSpec]) -> None:
        nodes = tuple(joined.values())
        store_joined_nodes(self._home, nodes)
        self._tell(add_joined_nodes(self._cluster, nodes))


def _home_mark(home: Path) -> str:
    """Return a digest of what only this home has; empty where there is no home."""
    try:
        return hashlib.sha256(b"orc home " + (home / "token").read_bytes()).hexdigest()
    except OSError:
        return ""
