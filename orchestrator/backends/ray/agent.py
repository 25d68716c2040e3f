"""The agent: a process that talks to Ray for a service, since Ray kills or blocks a process that lost its head node.

python -m orchestrator.backends.ray.agent DESCRIPTOR HOME ADDRESS

It reports whether it is connected, then answers calls `(number, name, arguments)`, each in its own thread. It ends with
the service.
"""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.attempts.ports import ClusterAway, LiveNode
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.backends.devices.readers import read_devices
from orchestrator.backends.ray import connection
from orchestrator.backends.ray.launchers import ActorGroup, RayLaunchers
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.device_kind import DeviceId
from orchestrator.specs.errors import OrchestratorError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import AttemptFolder, JobFolder

CALLS_AT_ONCE = 4096  # one for each running attempt, and some
PROBE_TIMEOUT_S = 20.0


class AgentCalls:
    """The calls that the service may make to the agent, which makes them to Ray. Every method is
    thread-safe.
    """

    def __init__(self) -> None:
        self._launchers = RayLaunchers()
        self._groups: dict[str, ActorGroup] = {}  # by the attempt's name

    def list_nodes(self) -> list[JsonObject]:
        """Return every node that Ray has listed since its start, in Ray's format. Raises
        ClusterAway.
        """
        try:
            return list(ray.nodes())  # type: ignore[no-untyped-call]
        except RayError as error:
            raise ClusterAway(f"Ray does not answer: {error}") from error

    def read_devices(
        self,
        node_id: str,
        node_name: str,
        driver: str = "nvml",
        device_ids: tuple[DeviceId, ...] = (),
    ) -> NvmlReading:
        """Return the driver's reading of a node's devices. A node without an answer in 20 s gives a
        reading with an error.
        """
        task: Any = ray.remote(num_cpus=0, max_retries=0)(read_devices)
        reference = task.options(
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False)
        ).remote(driver, device_ids)
        try:
            return ray.get(reference, timeout=PROBE_TIMEOUT_S)
        except GetTimeoutError:
            ray.cancel(
                reference, force=True
            )  # else each probe of a driver that hangs leaves one more process
            return NvmlReading(error=f"no answer within {PROBE_TIMEOUT_S:.0f} s")
        except RayError as error:
            return NvmlReading(error=f"node {node_name} does not answer: {type(error).__name__}")

    def find_launcher_nodes(self, attempt: Attempt) -> tuple[str, ...]:
        """Return the names of the nodes on which the attempt has launchers."""
        self._groups[attempt.name] = group = self._launchers.find_launchers(attempt)
        return group.nodes

    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> tuple[str, ...] | str:
        """Create the attempt's launchers, and return the names of their nodes; or text on why they
        cannot be created.
        """
        placed = self._launchers.create_launchers(attempt, folders, live)
        if isinstance(placed, str):
            return placed
        self._groups[attempt.name] = placed
        return placed.nodes

    def end_launchers(self, attempt: Attempt) -> None:
        self._launchers.end_launchers(attempt)
        self._groups.pop(attempt.name, None)

    def end_orphan_processes(
        self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]
    ) -> None:
        self._launchers.end_orphan_processes(folder, node, pids)

    def find_method(self, name: str) -> Callable[..., Any]:
        """Return the method with this name: one of this class, or one of the launchers of its first
        argument, an attempt.
        """
        if hasattr(self, name):
            return getattr(self, name)
        return lambda attempt, *arguments: getattr(self._find_group(attempt), name)(*arguments)

    def _find_group(self, attempt: Attempt) -> ActorGroup:
        """Return the attempt's launchers as this agent found them before; else look for them."""
        if attempt.name not in self._groups:
            self.find_launcher_nodes(attempt)
        return self._groups[attempt.name]


def serve_calls() -> None:
    """Connect to Ray, and answer the service's calls until the service closes the connection."""
    service = Connection(int(sys.argv[1]))
    try:
        connection.connect_to_ray(sys.argv[3], Path(sys.argv[2]))
    except OrchestratorError as error:
        service.send(str(error))
        return
    service.send(None)
    calls = AgentCalls()
    answering = threading.Lock()
    with ThreadPoolExecutor(CALLS_AT_ONCE) as pool:
        while True:
            try:
                number, name, arguments = service.recv()
            except EOFError:
                os._exit(0)  # what is asked of Ray is of no use any more
            pool.submit(
                _answer_call, service, answering, number, calls.find_method(name), arguments
            )


def _answer_call(
    connection: Connection,
    send_lock: threading.Lock,
    call_number: int,
    call: Callable[..., Any],
    arguments: Sequence[Any],
) -> None:
    """Make a call, and send (call number, result, error text or None, whether the cluster is
    away).
    """
    value = None
    problem = None
    is_away = False
    try:
        value = call(*arguments)
    except ClusterAway as error:
        problem = str(error)
        is_away = True
    except Exception as error:  # the border of a process: Ray's own exceptions are no values
        problem = f"{type(error).__name__}: {error}"
    with send_lock:
        connection.send((call_number, value, problem, is_away))


if __name__ == "__main__":
    serve_calls()
