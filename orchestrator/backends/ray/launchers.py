"""Launchers in Ray: a placement group per attempt, and a detached actor per node that hosts its launcher.

Starting an actor takes half a second of processor time, most of it the import of Ray. So a host whose attempt has ended
takes another of the same agent. It never has two: where it ends, one attempt is lost.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
import uuid
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.experimental import internal_kv
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launcher import (
    BEFORE_TIMEOUT_S,
    Launcher,
    LauncherStatus,
    RankStart,
)
from orchestrator.backends.attempts.leftovers import end_leftover_processes, make_process_mark
from orchestrator.backends.attempts.ports import ClusterAway, LiveNode
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.ray.nodes import RayNode
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.command_line import Env
from orchestrator.specs.run import AttemptFolder, JobFolder

# devices were free when it was decided: 3-13 ms, 0.3 s where they were just freed
PLACE_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 60.0  # 0.5 s idle, 3-10 s on a busy machine
CALL_TIMEOUT_S = 60.0
CALLS_AT_ONCE = 8  # long polls, log readers and a stop, at the same time
LONG_POLL_S = 2.0
UNAVAILABLE_MAX = 60  # unanswered calls in a row before a launcher counts as lost
UNAVAILABLE_WAIT_S = 0.5  # after each
HOST_TIMEOUT_S = 5.0  # an idle host answers within some ms
HOST_IDLE_S = 120.0  # then it ends
HOST_PREFIX = "host/"  # of an actor's name
# of the launcher of release 0.1.0, by method: its parameters' names, whatever they are called here
PARAMETERS_OF_0_1_0 = {
    "free_port": (),
    "start": ("ranks", "workdir", "each", "fence"),
    "run_before": ("argv", "env", "workdir"),
    "status": (),
    "wait": ("version", "timeout_s"),
    "stop": ("grace_s",),
    "abort": ("grace_s",),
}
HOST_LOOK_S = 5.0


class LauncherHost:
    """A Ray actor that hosts the launcher of one attempt; after that attempt has ended, it may host
    another.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._attempt = ""
        self._launcher: Launcher | None = None
        self._idle_since_s = time.monotonic()
        threading.Thread(target=self._end_when_idle, daemon=True).start()

    def host(self, attempt_name: str, *launcher_arguments: Any) -> bool:
        """Create the attempt's launcher from these arguments. Return False where another attempt is
        hosted already.
        """
        with self._lock:
            if self._launcher is None:
                self._attempt, self._launcher = attempt_name, Launcher(*launcher_arguments)
            return self._attempt == attempt_name

    def release(self, attempt_name: str) -> bool:
        """Give up the attempt, and return True; False where one of its processes may still live."""
        with self._lock:
            if self._launcher is None or self._attempt != attempt_name:
                return False
            if self._launcher.status()["state"] != "ended":
                return False
            self._attempt = ""
            self._launcher = None
            self._idle_since_s = time.monotonic()
            return True

    def call(self, attempt_name: str, method: str, *arguments: Any) -> Any:
        """Return the result of this method of the attempt's launcher. Raises LookupError for an
        attempt that is not hosted.
        """
        with self._lock:
            launcher = self._launcher
            if launcher is None or self._attempt != attempt_name:
                raise LookupError(f"the launcher of {attempt_name} is not hosted here")
        return getattr(launcher, method)(*arguments)

    def _end_when_idle(self) -> None:
        while True:
            time.sleep(HOST_LOOK_S)
            with self._lock:
                idle_s = time.monotonic() - self._idle_since_s
                if self._launcher is None and idle_s > HOST_IDLE_S:
                    os._exit(0)


class Hosted(NamedTuple):
    """A launcher in its host (a Ray actor), for calls from the agent."""

    attempt: str
    host: str  # the actor's name
    actor: Any

    def call(self, method: str, *arguments: Any) -> Any:
        """Call this method of the launcher, and return Ray's reference to the result.

        Release 0.1.0 had no hosts: its actor is the launcher, and has the launcher's name. Ray
        cannot load its class here, and then takes arguments only by name.
        """
        if self.host.startswith(HOST_PREFIX):
            return self.actor.call.remote(self.attempt, method, *arguments)
        names = PARAMETERS_OF_0_1_0[method]
        return getattr(self.actor, method).remote(**dict(zip(names, arguments, strict=True)))


class ActorGroup:
    """The launchers of one attempt, each in its host (a Ray actor), inside the agent; see
    `LauncherGroup`.
    """

    def __init__(self, launcher_by_node: Mapping[str, Hosted]) -> None:
        """`launcher_by_node` are the launchers by node."""
        self._actors = dict(launcher_by_node)
        self._pending: dict[Any, str] = {}  # reference of a long poll -> node
        self._versions: dict[str, int] = {}
        self._unanswered: dict[str, int] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._actors)

    def is_idle(self) -> bool:
        """Return whether at least one launcher's ranks were never started. A lost launcher counts
        as started.
        """
        return any(self._is_idle(actor) for actor in self._actors.values())

    def free_port(self, node: str) -> int:
        """Return a TCP port that is free on `node`."""
        return int(ray.get(self._actors[node].call("free_port"), timeout=CALL_TIMEOUT_S))

    def run_before(self, node: str, argv: Sequence[str], env: Env, workdir: str) -> int:
        """Run a command on `node` to its end, and return its exit code."""
        answer = self._actors[node].call("run_before", argv, env, workdir)
        return int(ray.get(answer, timeout=BEFORE_TIMEOUT_S + CALL_TIMEOUT_S))

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
        answers = [
            self._actors[node].call(
                "start", list(ranks[node]), workdir, ranks_per_process[node], fence
            )
            for node in ranks
        ]
        statuses: list[LauncherStatus] = ray.get(answers, timeout=CALL_TIMEOUT_S)
        return statuses

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        """Return the changed statuses by node, None for a launcher that is gone. Waits at most
        `timeout_s` for the first change.
        """
        polled = set(self._pending.values())
        news: dict[str, LauncherStatus | None] = {}
        for node in nodes:
            actor = self._actors.get(node)
            if actor is None:
                news[node] = None
            elif node not in polled:
                answer = actor.call("wait", self._versions.get(node, 0), LONG_POLL_S)
                self._pending[answer] = node
        if news or not self._pending:
            return news
        ready, _ = ray.wait(list(self._pending), num_returns=1, timeout=timeout_s)
        for reference in ready:
            node = self._pending.pop(reference)
            try:
                status: LauncherStatus = ray.get(reference, timeout=CALL_TIMEOUT_S)
            except ActorUnavailableError:
                self._unanswered[node] = self._unanswered.get(node, 0) + 1
                if self._unanswered[node] > UNAVAILABLE_MAX:
                    news[node] = None
                time.sleep(UNAVAILABLE_WAIT_S)
            except RayError:
                news[node] = None
            else:
                news[node] = status
                self._versions[node] = status["version"]
                self._unanswered[node] = 0
        return news

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGTERM to the ranks of these nodes, and SIGKILL after `grace_s`. Does not wait."""
        for node in nodes:
            if node in self._actors:
                self._actors[node].call("stop", grace_s)

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGKILL to the ranks of these nodes after `grace_s`. Does not wait."""
        for node in nodes:
            if node in self._actors:
                self._actors[node].call("abort", grace_s)

    def _is_idle(self, actor: Hosted) -> bool:
        try:
            return bool(ray.get(actor.call("status"), timeout=CALL_TIMEOUT_S)["state"] == "idle")
        except RayError:
            return False


class RayLaunchers:
    """The launchers of all attempts in Ray, inside the agent; see the protocol `Launchers`. Its
    nodes are `RayNode`s.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        # Hosts of this agent, which has their code: a host's name -> the id of its node.
        self._nodes: dict[str, str] = {}
        self._idle: dict[str, list[Hosted]] = {}  # by the node's id

    def find_launchers(self, attempt: Attempt) -> ActorGroup:
        """Return the existing launchers of `attempt`; the group is empty where there are none."""
        return ActorGroup(_find_hosted(attempt))

    def create_launchers(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> ActorGroup | str:
        """Create launchers on every node of the attempt's placement, and reserve its devices.

        Returns the launchers, or as text why they cannot be created.
        """
        bundles = [
            _make_resource_bundle(part.devices, live[part.node]) for part in attempt.placement
        ]
        group = placement_group(
            bundles,
            strategy="PACK",
            name=attempt.name,
            lifetime="detached",
            bundle_label_selector=[
                {"ray.io/node-id": live[part.node].id} for part in attempt.placement
            ],
        )
        if not group.wait(
            timeout_seconds=PLACE_TIMEOUT_S
        ):  # it would wait for ever, and take the devices one day
            self.end_launchers(attempt)
            return f"its devices were not free within {PLACE_TIMEOUT_S:.0f} s"
        folder = folders.attempt(attempt.number)
        hosted = dict[str, Hosted]()
        created = list[Any]()
        try:
            for part in attempt.placement:
                node = live[part.node]
                arguments = (
                    str(folder.path),
                    str(folders.epoch),
                    attempt.number,
                    make_process_mark(folder, part.node),
                    Watched(
                        node=part.node,
                        devices=part.devices,
                        is_alone=len(bundles) == 1,
                        driver=node.launch.device.kind.traits.driver,
                        device_ids=node.launch.device_ids,
                    ),
                )
                launcher = self._reuse_host(attempt, part.node, node.id, arguments)
                if launcher is None:
                    launcher = self._create_host(attempt, part.node, node.id)
                    created.append(launcher.actor.host.remote(attempt.name, *arguments))
                hosted[part.node] = launcher
            ray.get(created, timeout=READY_TIMEOUT_S)
        except RayError as error:
            self.end_launchers(attempt)
            # the cause is the last line below Ray's traces
            cause = str(error).strip().rpartition("\n")[2]
            return f"its launchers did not come up: {type(error).__name__}: {cause}"
        return ActorGroup(hosted)

    def _reuse_host(
        self, attempt: Attempt, node: str, node_id: str, arguments: Sequence[Any]
    ) -> Hosted | None:
        """Create the attempt's launcher in an idle host of the node, and return it; None where no
        host is idle.
        """
        while True:
            with self._lock:
                idle = self._idle.get(node_id)
                if not idle:
                    return None
                launcher = idle.pop()._replace(attempt=attempt.name)
            _record_host(attempt, node, launcher.host)
            with contextlib.suppress(RayError):  # it ended meanwhile
                answer = launcher.actor.host.remote(attempt.name, *arguments)
                if ray.get(answer, timeout=HOST_TIMEOUT_S):
                    return launcher
            self._kill_host(launcher)

    def _create_host(self, attempt: Attempt, node: str, node_id: str) -> Hosted:
        name = f"{HOST_PREFIX}{uuid.uuid4().hex}"
        actor: Any = ray.remote(LauncherHost)
        _record_host(attempt, node, name)
        self._nodes[name] = node_id
        handle = actor.options(
            name=name,
            lifetime="detached",
            num_cpus=0,
            max_concurrency=CALLS_AT_ONCE,
            scheduling_strategy=NodeAffinitySchedulingStrategy(node_id, soft=False),
        ).remote()
        return Hosted(attempt.name, name, handle)

    def end_launchers(self, attempt: Attempt) -> None:
        """End the launchers of `attempt` and its placement group. An attempt without them is no
        error. Raises ClusterAway.
        """
        try:
            for node, launcher in _find_hosted(attempt).items():
                is_free = self._release_host(launcher)
                if not is_free:
                    self._kill_host(launcher)
                internal_kv._internal_kv_del(
                    make_launcher_name(attempt, node), namespace=_get_ray_namespace()
                )
                if is_free:  # nobody takes it for this attempt's any more
                    with self._lock:
                        self._idle.setdefault(self._nodes[launcher.host], []).append(launcher)
            with contextlib.suppress(ValueError):  # no group has that name
                remove_placement_group(ray.util.get_placement_group(attempt.name))
        except RayError as error:
            raise ClusterAway(f"Ray does not answer: {error}") from error

    def _kill_host(self, launcher: Hosted) -> None:
        """End a launcher's host, and with it the processes of its attempt."""
        self._nodes.pop(launcher.host, None)
        ray.kill(launcher.actor)

    def _release_host(self, launcher: Hosted) -> bool:
        """Return whether the host has given up its attempt, and so may host another."""
        if launcher.host not in self._nodes:  # of an earlier agent, perhaps with other code
            return False
        with contextlib.suppress(RayError):
            answer = launcher.actor.release.remote(launcher.attempt)
            return bool(ray.get(answer, timeout=HOST_TIMEOUT_S))
        return False

    def end_orphan_processes(
        self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]
    ) -> None:
        """SIGKILL the processes that a lost launcher left on a live node, and remove their swap
        files.
        """
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        remote: Any = ray.remote(end_leftover_processes)
        task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        with contextlib.suppress(RayError):  # the node went too, and its processes with it
            orphans = task.remote(
                make_process_mark(folder, node.launch.name), str(folder.path), list(pids)
            )
            ray.get(orphans, timeout=READY_TIMEOUT_S)


def _find_hosted(attempt: Attempt) -> dict[str, Hosted]:
    """Return the attempt's existing launchers, by node name."""
    hosted = {}
    for part in attempt.placement:
        key = make_launcher_name(attempt, part.node)
        name = internal_kv._internal_kv_get(key, namespace=_get_ray_namespace()) or key.encode()
        # No actor has that name; or it has just died, and Ray has dropped its class before its name
        # (an assertion of `_load_actor_class_from_gcs` in ray/_private/function_manager.py, ray
        # 2.60.0, seen on a busy machine).
        with contextlib.suppress(ValueError, AssertionError):
            actor = ray.get_actor(name.decode())
            hosted[part.node] = Hosted(attempt.name, name.decode(), actor)
    return hosted


def _record_host(attempt: Attempt, node: str, host_name: str) -> None:
    """Store the name of the actor that hosts the launcher, for a later agent."""
    internal_kv._internal_kv_put(
        make_launcher_name(attempt, node), host_name, namespace=_get_ray_namespace()
    )


def _get_ray_namespace() -> str:
    return str(ray.get_runtime_context().namespace)


def make_launcher_name(attempt: Attempt, node: str) -> str:
    """Return the name in Ray of the attempt's launcher on this node."""
    return f"{attempt.name}/{node}"


def _make_resource_bundle(devices: tuple[int, ...], node: LiveNode) -> dict[str, float]:
    assert isinstance(node, RayNode), node
    bundle: dict[str, float] = {f"gpu{index}": 1 for index in devices}
    if node.ray_gpus:
        bundle["GPU"] = len(devices)
    return bundle
