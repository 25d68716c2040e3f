"""Launchers in Ray: a placement group per attempt, with a detached actor per node."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import ray
from ray.exceptions import ActorUnavailableError, RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import (
    NodeAffinitySchedulingStrategy,
    PlacementGroupSchedulingStrategy,
)

from orchestrator.backends.attempts.durable import Fence
from orchestrator.backends.attempts.launcher import (
    BEFORE_TIMEOUT_S,
    Launcher,
    LauncherStatus,
    RankStart,
)
from orchestrator.backends.attempts.leftovers import clean_up, mark_of
from orchestrator.backends.attempts.ports import ClusterAway, LiveNode
from orchestrator.backends.attempts.system_metrics import Watched
from orchestrator.backends.ray.nodes import RayNode
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.run import AttemptFolder, JobFolder

# devices were free when it was decided: 3-13 ms, 0.3 s where they were just freed
PLACE_TIMEOUT_S = 15.0
READY_TIMEOUT_S = 60.0  # 0.5 s idle, 3-10 s on a busy machine
CALL_TIMEOUT_S = 60.0
CALLS_AT_ONCE = 8  # long polls, log readers and a stop, at the same time
LONG_POLL_S = 2.0
UNAVAILABLE_MAX = 60  # unanswered calls in a row before a launcher counts as lost
UNAVAILABLE_WAIT_S = 0.5  # after each


class ActorGroup:
    """The launchers of one attempt as Ray actors, inside the agent; see `LauncherGroup`."""

    def __init__(self, actors: Mapping[str, Any]) -> None:
        """`actors` are the handles by node."""
        self._actors = dict(actors)
        self._pending: dict[Any, str] = {}  # reference of a long poll -> node
        self._versions: dict[str, int] = {}
        self._unanswered: dict[str, int] = {}

    @property
    def nodes(self) -> tuple[str, ...]:
        return tuple(self._actors)

    def is_idle(self) -> bool:
        """Return whether some launcher's ranks were never started. A lost launcher counts as started."""
        return any(self._is_idle(actor) for actor in self._actors.values())

    def free_port(self, node: str) -> int:
        """Return a TCP port that is free on `node`."""
        return int(ray.get(self._actors[node].free_port.remote(), timeout=CALL_TIMEOUT_S))

    def run_before(self, node: str, argv: Sequence[str], env: dict[str, str], workdir: str) -> int:
        """Run a command on `node` to its end, and return its exit code."""
        answer = self._actors[node].run_before.remote(argv, env, workdir)
        return int(ray.get(answer, timeout=BEFORE_TIMEOUT_S + CALL_TIMEOUT_S))

    def start(
        self,
        ranks: Mapping[str, Sequence[RankStart]],
        counts: Mapping[str, int],
        workdir: str,
        fence: Fence | None,
    ) -> list[LauncherStatus]:
        """Start the processes of each node at once, unless already started. `counts` are ranks per process, by node."""
        answers = [
            self._actors[node].start.remote(list(ranks[node]), workdir, counts[node], fence)
            for node in ranks
        ]
        statuses: list[LauncherStatus] = ray.get(answers, timeout=CALL_TIMEOUT_S)
        return statuses

    def poll(self, nodes: Iterable[str], timeout_s: float) -> dict[str, LauncherStatus | None]:
        """Return new statuses by node, None for a launcher that is gone. Waits at most `timeout_s` for the first."""
        wanted, polled = list(nodes), set(self._pending.values())
        news: dict[str, LauncherStatus | None] = {
            node: None for node in wanted if node not in self._actors
        }
        for node in wanted:
            if node not in polled and node in self._actors:
                self._pending[
                    self._actors[node].wait.remote(self._versions.get(node, 0), LONG_POLL_S)
                ] = node
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
                news[node], self._versions[node], self._unanswered[node] = (
                    status,
                    status["version"],
                    0,
                )
        return news

    def stop(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGTERM to the ranks of these nodes, and SIGKILL after `grace_s`. Does not wait."""
        for node in nodes:
            if node in self._actors:
                self._actors[node].stop.remote(grace_s)

    def abort(self, nodes: Iterable[str], grace_s: float) -> None:
        """Send SIGKILL to the ranks of these nodes after `grace_s`. Does not wait."""
        for node in nodes:
            if node in self._actors:
                self._actors[node].abort.remote(grace_s)

    def _is_idle(self, actor: Any) -> bool:
        try:
            return bool(ray.get(actor.status.remote(), timeout=CALL_TIMEOUT_S)["state"] == "idle")
        except RayError:
            return False


class RayLaunchers:
    """Launchers of all attempts as Ray actors, inside the agent; see `Launchers`. Its nodes are `RayNode`s."""

    def find(self, attempt: Attempt) -> ActorGroup:
        """Return the existing launchers of `attempt`."""
        return ActorGroup(_actors(attempt))

    def place(
        self, attempt: Attempt, folders: JobFolder, live: Mapping[str, LiveNode]
    ) -> ActorGroup | str:
        """Create launchers on every node of the placement, and reserve its devices. A returned text says why not."""
        bundles = [_bundle(part.devices, live[part.node]) for part in attempt.placement]
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
            self.end(attempt)
            return f"its devices were not free within {PLACE_TIMEOUT_S:.0f} s"
        actor: Any = ray.remote(Launcher)
        folder = folders.attempt(attempt.number)
        actors = {
            part.node: actor.options(
                name=launcher_name(attempt, part.node),
                lifetime="detached",
                num_cpus=0,
                max_concurrency=CALLS_AT_ONCE,
                resources={name: count for name, count in bundle.items() if name != "GPU"},
                num_gpus=bundle.get("GPU", 0),
                scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
            ).remote(
                str(folder.path),
                str(folders.epoch),
                attempt.number,
                mark_of(folder, part.node),
                Watched(
                    node=part.node,
                    devices=part.devices,
                    is_alone=len(bundles) == 1,
                    driver=live[part.node].launch.device.kind.traits.driver,
                    device_ids=live[part.node].launch.device_ids,
                ),
            )
            for index, (part, bundle) in enumerate(zip(attempt.placement, bundles, strict=True))
        }
        try:
            ray.get(
                [launcher.status.remote() for launcher in actors.values()], timeout=READY_TIMEOUT_S
            )
        except RayError as error:
            self.end(attempt)
            return f"its launchers did not come up: {type(error).__name__}: {error}"
        return ActorGroup(actors)

    def end(self, attempt: Attempt) -> None:
        """End the launchers of `attempt` and its placement group; none is no error. Raises ClusterAway."""
        try:
            for actor in _actors(attempt).values():
                ray.kill(actor)
            with contextlib.suppress(ValueError):  # no group has that name
                remove_placement_group(ray.util.get_placement_group(attempt.name))
        except RayError as error:
            raise ClusterAway(f"Ray does not answer: {error}") from error

    def end_orphans(self, folder: AttemptFolder, node: LiveNode, pids: Sequence[int]) -> None:
        """SIGKILL processes that a lost launcher left on a live node, and remove their swap files."""
        strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
        remote: Any = ray.remote(clean_up)
        task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
        with contextlib.suppress(RayError):  # the node went too, and its processes with it
            orphans = task.remote(mark_of(folder, node.launch.name), str(folder.path), list(pids))
            ray.get(orphans, timeout=READY_TIMEOUT_S)


def _actors(attempt: Attempt) -> dict[str, Any]:
    """Handles of the launchers that exist, by node."""
    actors = {}
    for part in attempt.placement:
        # No actor has that name; or it has just died, and Ray has dropped its class before its name
        # (an assertion of
        # `_load_actor_class_from_gcs` in ray/_private/function_manager.py, ray 2.60.0, seen on a
        # busy machine).
        with contextlib.suppress(ValueError, AssertionError):
            actors[part.node] = ray.get_actor(launcher_name(attempt, part.node))
    return actors


def launcher_name(attempt: Attempt, node: str) -> str:
    """Return the actor's name in the home's Ray namespace."""
    return f"{attempt.name}/{node}"


def _bundle(devices: tuple[int, ...], node: LiveNode) -> dict[str, float]:
    assert isinstance(node, RayNode), node
    bundle: dict[str, float] = {f"gpu{index}": 1 for index in devices}
    if node.ray_gpus:
        bundle["GPU"] = len(devices)
    return bundle
