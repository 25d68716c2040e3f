"""The service's side of the agent (a process that talks to Ray): starts, calls and restarts it."""

from __future__ import annotations

import itertools
import logging
import os
import socket
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import datetime
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launcher import (
    BEFORE_TIMEOUT_S,
    LauncherStatus,
    RankStart,
    make_die_with_parent_hook,
)
from orchestrator.backends.attempts.ports import ClusterAway, LiveNode
from orchestrator.backends.devices.nvml import NvmlReading
from orchestrator.backends.environment import select_inherited, select_matching
from orchestrator.backends.ray.embedded import accepts_connection
from orchestrator.backends.threads import start_loop
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.command_line import Env
from orchestrator.specs.errors import OrchestratorError, ServiceError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import AttemptFolder, JobFolder

ACCEPT_S = 5.0
# `ray.init` blocks where the local node has not joined; 2 s idle, 10 s on a busy machine
CONNECT_TIMEOUT_S = 60.0
NODES_TIMEOUT_S = 10.0  # a call of milliseconds: an agent that does not answer by then is ended
CALL_TIMEOUT_S = 180.0  # more than every timeout inside a call
RETRY_S = (0.5, 5.0)  # the first and the longest pause between two agents
CLOSE_TIMEOUT_S = 5.0
RAYS = ("RAY_*", "RAY_AUTH_TOKEN", "RAY_AUTH_TOKEN_PATH")  # of a Ray that is not ours
SOUGHT = "it is being looked for"  # before the first answer to that

log = logging.getLogger(__name__)


class CallFailed(OrchestratorError):
    """Ray refused a call, or the launcher that was called raised an exception."""


@dataclass(frozen=True, slots=True, eq=False)
class _Agent:
    process: subprocess.Popen[bytes]
    channel: Connection


class AgentLink:
    """Calls to Ray through the agent, each with a timeout: a call returns, or raises ClusterAway or
    CallFailed.
    """

    def __init__(self, home: Path, find_address: Callable[[], str]) -> None:
        """Start the thread that keeps an agent. `find_address` returns Ray's address, or raises
        ServiceError.

        It may start the service's own Ray for that.
        """
        self._home = home
        self._locate = find_address
        self._lock = threading.Lock()
        self._sending = threading.Lock()
        self._numbers = itertools.count()
        self._waiting: dict[int, Future[Any]] = {}
        self._agent: _Agent | None = None  # one that is connected
        self._away_since_s = time.time()
        self._why = SOUGHT
        self._closing = threading.Event()
        self._thread = start_loop("ray-link", self._keep_agent, self._closing)

    @property
    def problem(self) -> str | None:
        """Sentence on why Ray cannot be reached, and since when; None while it can be reached."""
        with self._lock:
            if self._agent is not None:
                return None
            since = datetime.fromtimestamp(self._away_since_s).astimezone()
            return f"Ray cannot be reached since {since:%Y-%m-%d %H:%M:%S %Z}, and jobs wait: {self._why}"

    def call(self, method: str, *arguments: Any, timeout_s: float = CALL_TIMEOUT_S) -> Any:
        """Call this method in the agent, and return its result. Raises ClusterAway or
        CallFailed.
        """
        answer: Future[Any] = Future()
        number = next(self._numbers)
        with self._lock:
            agent = self._agent
            if agent is not None:
                self._waiting[number] = answer
        if agent is None:
            raise ClusterAway(self.problem or "the agent of Ray has ended")
        try:
            with self._sending:
                agent.channel.send((number, method, arguments))
            return answer.result(timeout_s)
        except TimeoutError:
            raise ClusterAway(f"Ray does not answer {method!r} within {timeout_s:g} s") from None
        except ClusterAway:
            raise
        except OSError as error:  # it has ended, or takes nothing: half a message may be sent
            self._end_agent(agent, f"its agent takes no calls: {error.strerror}")
            raise ClusterAway(str(error)) from None
        finally:
            with self._lock:
                self._waiting.pop(number, None)

    def list_nodes(self) -> list[JsonObject]:
        """Return every node that Ray has listed, in Ray's format. Raises ClusterAway, and ends an
        agent that does not answer.
        """
        with self._lock:
            agent = self._agent
        try:
            nodes: list[JsonObject] = self.call("list_nodes", timeout_s=NODES_TIMEOUT_S)
        except ClusterAway as error:
            self._end_agent(agent, str(error))
            raise
        return nodes

    def close(self) -> None:
        """End the agent."""
        self._closing.set()
        with self._lock:
            agent = self._agent
        self._end_agent(agent, "the service is ending")
        self._thread.join(CLOSE_TIMEOUT_S)

    def _keep_agent(self) -> None:
        """Start an agent again and again until the link closes. The kernel ends the agent with this
        thread.
        """
        pause_s = RETRY_S[0]
        while not self._closing.is_set():
            began_s = time.monotonic()
            try:
                address = self._locate()
                if not accepts_connection(address, ACCEPT_S):
                    raise ServiceError(f"nothing answers at {address}")
                self._run_agent(address)
            except OrchestratorError as error:
                self._record_reason(str(error))
            except Exception as error:  # the thread's edge: without it Ray would be away for ever
                self._record_reason(f"{type(error).__name__}: {error}")
            pause_s = (
                RETRY_S[0]
                if time.monotonic() - began_s > RETRY_S[1]
                else min(2 * pause_s, RETRY_S[1])
            )
            self._closing.wait(pause_s)

    def _run_agent(self, address: str) -> None:
        """Start an agent and pass on its answers until it ends. Raises ServiceError where it does
        not connect to Ray.
        """
        near, far = socket.socketpair()
        near.setsockopt(
            socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("ll", round(ACCEPT_S), 0)
        )
        command = [
            sys.executable,
            "-m",
            "orchestrator.backends.ray.agent",
            str(far.fileno()),
            str(self._home),
            address,
        ]
        with Connection(near.detach()) as channel:
            with far:
                process = subprocess.Popen(
                    command,
                    env={**select_inherited(os.environ), **select_matching(os.environ, RAYS)},
                    pass_fds=[far.fileno()],
                    stdin=subprocess.DEVNULL,
                    preexec_fn=make_die_with_parent_hook(),
                )
            agent = _Agent(process, channel)
            try:
                if not self._is_connected(channel):
                    raise ServiceError(
                        f"Ray at {address} did not let us in within {CONNECT_TIMEOUT_S:g} s"
                    )
                with self._lock:
                    self._agent = agent
                log.info("Ray is reached at %s", address)
                while True:
                    self._pass_answer(*channel.recv())
            except (EOFError, ConnectionResetError):
                return
            finally:
                self._end_agent(agent, "its agent has ended")
                process.wait()

    def _is_connected(self, channel: Connection) -> bool:
        """Return whether the agent has connected to Ray in time. Raises ServiceError with the
        reason where it cannot connect.
        """
        deadline_s = time.monotonic() + CONNECT_TIMEOUT_S
        while time.monotonic() < deadline_s and not self._closing.is_set():
            if channel.poll(0.1):
                problem = channel.recv()
                if problem is not None:
                    raise ServiceError(problem)
                return True
        return False

    def _pass_answer(
        self, call_number: int, value: Any, problem: str | None, is_away: bool
    ) -> None:
        with self._lock:
            answer = self._waiting.pop(call_number, None)
        if answer is None:  # nobody waits any more
            return
        if problem is None:
            answer.set_result(value)
        else:
            answer.set_exception(ClusterAway(problem) if is_away else CallFailed(problem))

    def _end_agent(self, agent: _Agent | None, reason: str) -> None:
        """Kill an agent. If it was the current one, every waiting call raises ClusterAway with this
        reason.
        """
        if agent is None:
            return
        agent.process.kill()
        with self._lock:
            if self._agent is not agent:
                return
            self._agent, self._away_since_s, self._why = None, time.time(), reason
            waiting = self._waiting
            self._waiting = {}
        if not self._closing.is_set():
            log.warning("Ray cannot be reached: %s", reason)
        for answer in waiting.values():
            answer.set_exception(ClusterAway(f"Ray cannot be reached: {reason}"))

    def _record_reason(self, reason: str) -> None:
        """Store why no agent connects: the first line for `problem`, the whole text in the log."""
        first = reason.partition("\n")[0]
        with self._lock:
            previous = self._why
            self._why = first
        if first != previous and not self._closing.is_set():
            log.warning("Ray cannot be reached: %s", reason)


class LinkedGroup:
    """The launchers of one attempt in Ray, called through the agent; see the protocol
    `LauncherGroup`.
    """

    def __init__(self, link: AgentLink, attempt: Attempt, nodes: Sequence[str]) -> None:
        self._link = link
        self._attempt = attempt
        self._nodes = tuple(nodes)

    @property
    def nodes(self) -> tuple[str, ...]:
        return self._nodes

    def is_idle(self) -> bool:
        """Return whether at least one launcher's ranks were never started. A lost launcher counts
        as started.
        """
        return bool(self._link.call("is_idle", self._attempt))

    def free_port(self, node: str) -> int:
        """Return a TCP port that is free on `node`."""
        return int(self._link.call("free_port", self._attempt, node))

    def run_before(self, node: str, argv: Sequence[str], env: Env, workdir: str) -> int:
        """Run a command on `node` to its end, and return its exit code."""
        limit_s = BEFORE_TIMEOUT_S + CALL_TIMEOUT_S
        return int(
            self._link.call(
                "run_before", self._attempt, node, argv, env, workdir, timeout_s=limit_s
            )
        )

    def start(
        self,
        ranks: Mapping[str, Sequence[RankStart]],
        ranks_per_process: Mapping[str, int],
        workdir: str,
        fence: Fence | None,
    ) -> list[LauncherStatus]:
        """Start the processes of every node, unless they were started before, and return the
        launchers' statuses.

        `ranks_per_process` has the number of ranks per process, by node.
        """
        statuses: list[LauncherStatus] = self._link.call(
            "start", self._attempt, ranks, ranks_per_process, workdir, fence
        )
        return statuses

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        """Return the changed statuses by node, None for a launcher that is gone. Waits at most
        `timeout_s` for the first change.
        """
        news: dict[str, LauncherStatus | None] = self._link.call(
            "poll", self._attempt, list(nodes), timeout_s
        )
        return news

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGTERM to the ranks of these nodes, and SIGKILL after `grace_s`. Does not wait."""
        self._link.call("stop", self._attempt, list(nodes), grace_s)

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGKILL to the ranks of these nodes after `grace_s`. Does not wait."""
        self._link.call("abort", self._attempt, list(nodes), grace_s)


class LinkedLaunchers:
    """The launchers of a Ray cluster, called through the agent; see the protocol `Launchers`."""

    def __init__(self, link: AgentLink) -> None:
        self._link = link

    def find_launchers(self, attempt: Attempt) -> LinkedGroup:
        """Return the existing launchers of `attempt`; the group is empty where there are none."""
        return LinkedGroup(self._link, attempt, self._link.call("find_launcher_nodes", attempt))

    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> LinkedGroup | str:
        """Create launchers on every node of the attempt's placement, and reserve its devices.

        Returns the launchers, or as text why they cannot be created.
        """
        used = {part.node: live[part.node] for part in attempt.placement}
        placed = self._link.call("create_launchers", attempt, folders, used)
        return placed if isinstance(placed, str) else LinkedGroup(self._link, attempt, placed)

    def end_launchers(self, attempt: Attempt) -> None:
        """End the launchers of `attempt` and its placement group. An attempt without them is no
        error. Raises ClusterAway.
        """
        self._link.call("end_launchers", attempt)

    def end_orphan_processes(
        self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]
    ) -> None:
        """SIGKILL the processes that a lost launcher left on a live node, and remove their swap
        files.
        """
        self._link.call("end_orphan_processes", folder, node, list(pids))


def read_devices(link: AgentLink, node: LiveNode) -> NvmlReading:
    """Return NVML's reading of the node's devices. A node that does not answer gives a reading with
    an error.
    """
    try:
        reading: NvmlReading = link.call(
            "read_devices",
            node.id,
            node.launch.name,
            node.launch.device.kind.traits.driver,
            node.launch.device_ids,
        )
    except (ClusterAway, CallFailed) as error:
        return NvmlReading(error=f"node {node.launch.name} does not answer: {error}")
    return reading
