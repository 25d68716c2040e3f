"""The placement group and the launchers of one attempt in Ray: place, find, end."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from typing import Any

import ray
from ray.exceptions import RayError
from ray.util.placement_group import placement_group, remove_placement_group
from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy, PlacementGroupSchedulingStrategy

from orchestrator.backends.attempts.launcher import Launcher, clear
from orchestrator.backends.ray.nodes import LiveNode
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.run import AttemptFolder, JobFolder

PLACE_TIMEOUT_S = 15.0  # devices were free when it was decided: 3-13 ms, 0.3 s where they were just freed
READY_TIMEOUT_S = 60.0  # 0.5 s idle, 3-10 s on a busy machine
CALLS_AT_ONCE = 8  # long polls, log readers and a stop, at the same time

Launchers = dict[str, Any]  # node -> actor handle


def find(attempt: Attempt) -> Launchers:
    """The launchers of `attempt` that exist, by node."""
    found = {}
    for part in attempt.placement:
        # No actor has that name; or it has just died, and Ray has dropped its class before its name (an assertion of
        # `_load_actor_class_from_gcs` in ray/_private/function_manager.py, ray 2.60.0, seen on a busy machine).
        with contextlib.suppress(ValueError, AssertionError):
            found[part.node] = ray.get_actor(launcher_name(attempt, part.node))
    return found


def place(attempt: Attempt, jobs: JobFolder, live: Mapping[str, LiveNode]) -> Launchers | str:
    """Launchers on every node of the placement, holding its devices; or why there are none (then nothing is left)."""
    bundles = [_bundle(part.devices, live[part.node]) for part in attempt.placement]
    group = placement_group(
        bundles,
        strategy="PACK",
        name=attempt.name,
        lifetime="detached",
        bundle_label_selector=[{"ray.io/node-id": live[part.node].id} for part in attempt.placement],
    )
    if not group.wait(timeout_seconds=PLACE_TIMEOUT_S):  # it would wait for ever, and take the devices one day
        remove(attempt)
        return f"its devices were not free within {PLACE_TIMEOUT_S:.0f} s"
    actor: Any = ray.remote(Launcher)
    folder = jobs.attempt(attempt.number)
    launchers = {
        part.node: actor.options(
            name=launcher_name(attempt, part.node),
            lifetime="detached",
            num_cpus=0,
            max_concurrency=CALLS_AT_ONCE,
            resources={name: count for name, count in bundle.items() if name != "GPU"},
            num_gpus=bundle.get("GPU", 0),
            scheduling_strategy=PlacementGroupSchedulingStrategy(group, index),
        ).remote(str(folder.path), str(jobs.epoch), attempt.number, mark(folder, part.node))
        for index, (part, bundle) in enumerate(zip(attempt.placement, bundles, strict=True))
    }
    try:
        ray.get([launcher.status.remote() for launcher in launchers.values()], timeout=READY_TIMEOUT_S)
    except RayError as error:
        remove(attempt)
        return f"its launchers did not come up: {type(error).__name__}: {error}"
    return launchers


def remove(attempt: Attempt) -> None:
    """End the launchers of `attempt` and give its placement group back; none is no error."""
    for launcher in find(attempt).values():
        ray.kill(launcher)
    with contextlib.suppress(ValueError):  # no group has that name
        remove_placement_group(ray.util.get_placement_group(attempt.name))


def end_orphans(folder: AttemptFolder, node: LiveNode, pids: list[int]) -> None:
    """SIGKILL what the dead launcher of an attempt left on a node that lives, and remove the files it swapped to."""
    strategy = NodeAffinitySchedulingStrategy(node.id, soft=False)
    remote: Any = ray.remote(clear)
    task = remote.options(num_cpus=0, max_retries=0, scheduling_strategy=strategy)
    with contextlib.suppress(RayError):  # the node went too, and its processes with it
        ray.get(task.remote(mark(folder, node.launch.name), str(folder.path), pids), timeout=READY_TIMEOUT_S)


def launcher_name(attempt: Attempt, node: str) -> str:
    """The actor's name in our home's namespace."""
    return f"{attempt.name}/{node}"


def mark(folder: AttemptFolder, node: str) -> str:
    """What every process of the attempt on this node carries; no other home's attempt of the same name does."""
    return f"{folder.path}@{node}"


def _bundle(devices: tuple[int, ...], node: LiveNode) -> dict[str, float]:
    bundle: dict[str, float] = {f"gpu{index}": 1 for index in devices}
    if node.ray_gpus:
        bundle["GPU"] = len(devices)
    return bundle
