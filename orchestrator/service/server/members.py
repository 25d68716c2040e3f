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
class MachineProperties:
    """Properties of a machine that all machines of a cluster must share, such as versions."""

    home: str
    home_mark: str  # of what is in that folder; empty where there is no home
    python: str  # minor version
    interpreter: str  # its path: ranks are started by it on every machine
    ray: str
    orchestrator: str


def read_machine_properties(home: Path) -> MachineProperties:
    """Return the properties of this machine."""
    return MachineProperties(
        home=str(home.resolve()),
        home_mark=_compute_home_digest(home),
        python=f"{sys.version_info[0]}.{sys.version_info[1]}",
        interpreter=sys.executable,
        ray=importlib.metadata.version("ray"),
        orchestrator=importlib.metadata.version("orchestrator"),
    )


def check_compatible(
    service_machine: MachineProperties, joining_machine: MachineProperties
) -> None:
    """Raise SpecError if the two machines differ so that a job cannot run on both; the error lists
    every such difference.
    """
    install = "install the same version here: `pip install {}=={}`"
    differences = {
        "python": f"run `orc join` by the service's interpreter, {service_machine.interpreter}",
        "interpreter": "ranks start by that path on every machine: install the environment there",
        "ray": install.format("ray", service_machine.ray),
        "orchestrator": install.format("orchestrator", service_machine.orchestrator),
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
        if (actual := getattr(joining_machine, name))
        != (expected := getattr(service_machine, name))
    ]
    if (
        joining_machine.home == service_machine.home
        and joining_machine.home_mark != service_machine.home_mark
    ):
        what = (
            "this folder is not the service's home"
            if joining_machine.home_mark
            else "the service's home is not here"
        )
        hint = "mount the storage that the service's machine has there"
        problems.append(
            SpecError(
                what, path="home", got=joining_machine.home, allowed="one shared folder", hint=hint
            )
        )
    if problems:
        raise join_problems(problems, "orc join")


class Members:
    """The registry of machines that joined the service's Ray, stored in the home. Every method is
    thread-safe.
    """

    def __init__(
        self,
        home: Path,
        cluster: ClusterSpec,
        find_ray_address: Callable[[], str],
        find_node_addresses: Callable[[], Mapping[str, str]],
        set_cluster: Callable[[ClusterSpec], None],
    ) -> None:
        """Load the joined machines.

        `cluster` is that of the cluster file; `find_node_addresses` returns {name: address} of live
        nodes. `set_cluster` is called with each changed cluster, joined machines included.
        """
        self._home = home
        self._cluster = cluster
        self._ray_address = find_ray_address
        self._addresses = find_node_addresses
        self._tell = set_cluster
        self._lock = threading.Lock()

    def get_ray_address_for_joining(self) -> str:
        """Return the address of Ray for machines that join. Raises ServiceError where none can
        join.
        """
        address = self._ray_address()
        if address.startswith(LOOPBACK_PREFIX):
            raise ServiceError(
                "the service's Ray is on the loopback, where no other machine reaches it: `orc down`, then "
                "`orc up --listen ADDRESS:PORT` with an address of its machine"
            )
        return address

    def add_machine(self, node: NodeSpec, machine_address: str) -> None:
        """Register a machine as this node, also if it is registered already.

        Raises ServiceError where another machine has its name, or its devices changed.
        """
        self.get_ray_address_for_joining()
        with self._lock:
            joined = {member.name: member for member in load_joined_nodes(self._home)}
            live = self._addresses()
            if live.get(node.name, machine_address) != machine_address:
                raise ServiceError(
                    f"node {node.name} is in the cluster already, at {live[node.name]}: "
                    "`orc join --name NAME` gives this machine another name"
                )
            node = self._replace_by_declared_node(node)
            if joined.get(node.name) == node:
                return
            if node.name in live:
                raise ServiceError(
                    f"the devices of node {node.name} have changed: `orc leave` there, then join again"
                )
            self._store_nodes({**joined, node.name: node})

    def remove_machine(self, node_name: str) -> None:
        """Remove a machine. Raises UnknownError for one that has not joined, ServiceError where its
        Ray still runs.
        """
        with self._lock:
            joined = {member.name: member for member in load_joined_nodes(self._home)}
            if node_name not in joined:
                names = ", ".join(sorted(joined)[:NAMED_MAX]) or "none"
                raise UnknownError(f"no machine {node_name!r} has joined; those that have: {names}")
            if node_name in self._addresses():
                raise ServiceError(
                    f"node {node_name} still runs: `orc leave` on that machine stops it"
                )
            self._store_nodes(
                {member: node for member, node in joined.items() if member != node_name}
            )

    def _replace_by_declared_node(self, node: NodeSpec) -> NodeSpec:
        """Return the node as the cluster file declares it; unchanged without a declaration.

        Raises ServiceError if the machine has less than the declaration.
        """
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

    def _store_nodes(self, joined_node_by_name: Mapping[str, NodeSpec]) -> None:
        nodes = tuple(joined_node_by_name.values())
        store_joined_nodes(self._home, nodes)
        self._tell(add_joined_nodes(self._cluster, nodes))


def _compute_home_digest(home: Path) -> str:
    """Return a digest of something that only this home has; "" where there is no home."""
    try:
        return hashlib.sha256(b"orc home " + (home / "token").read_bytes()).hexdigest()
    except OSError:
        return ""
