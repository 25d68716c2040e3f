"""A cluster of unlike devices: every kind has plans of its own, on the memory that is free there."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory import calibration
from orchestrator.memory.calibration import UNMEASURED
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import step_s
from orchestrator.planning.frontier import needed_bytes
from orchestrator.planning.search import frontier, plans, profile_for
from orchestrator.scheduling.groups import Group, groups_of
from orchestrator.scheduling.step import step
from orchestrator.service.forecast import forecast
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import Node, idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job import JobSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.plan import Plan
from orchestrator.specs.state import JobStatus, Launch, Record, State, Submitted
from tests.scheduling import world
from tests.scheduling.test_queue import played, seen, submitted

GIB = 2**30
MIXED = """
name: mixed
nodes:
  - {name: small, devices: 2, device: rtx4090-24gb, host_memory: 64GiB}
  - {name: large, devices: 8, device: a100-80gb, host_memory: 1TiB}
"""


def mixed(text: str = MIXED) -> tuple[Node, ...]:
    return idle_nodes(parse_cluster(text, "mixed"))


def decoder(hidden: int, gpus: object, precision: str = "bf16") -> JobSpec:
    """24 layers: 1.3 billion parameters at a hidden size of 2,048."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 24}
    said = {
        "name": "lm",
        "gpus": gpus,
        "global_batch_size": 16,
        "precision": precision,
        "model": {"decoder": {"vocab_size": 32000, "num_attention_heads": 16, **sizes}},
        "data": {"text": ["text"], "sequence_length": 2048},
    }
    return JobSpec.model_validate(said)


def started(spec: JobSpec, nodes: tuple[Node, ...]) -> Attempt:
    """The attempt that an idle cluster makes of the job."""
    _, actions = step(State(nodes=nodes), Submitted(job_id="lm-1", order=1, spec=spec, at_s=0.0))
    (launch,) = (action for action in actions if isinstance(action, Launch))
    return launch.attempt


def with_free(nodes: tuple[Node, ...], name: str, free_gib: tuple[int, ...]) -> tuple[Node, ...]:
    free_bytes = tuple(gib * GIB for gib in free_gib)
    return tuple(replace(node, free_bytes=free_bytes) if node.name == name else node for node in nodes)


def test_every_kind_of_device_has_a_frontier_of_its_own() -> None:
    spec = decoder(2048, {"min": 1, "max": 8})
    large, small = groups_of(mixed())
    assert [(group.devices, group.hardware.device.name) for group in (large, small)] == [
        (8, "a100-80gb"),
        (2, "rtx4090-24gb"),
    ]
    for group, most in ((large, 8), (small, 2)):
        found = frontier(spec, group.hardware).candidates
        assert max(one.plan.world_size for one in found) == most
        assert any(needed_bytes(one, UNMEASURED) <= group.hardware.device.memory for one in found)


def test_a_job_takes_the_kind_that_is_free_with_a_plan_made_for_it() -> None:
    spec = decoder(2048, {"min": 1, "max": 8})
    assert started(spec, mixed()).device == "a100-80gb"
    busy = with_free(mixed(), "large", (1,) * 8)
    found = started(spec, busy)
    assert (found.device, found.plan.world_size) == ("rtx4090-24gb", 2)
    assert found.needed_bytes is not None
    assert found.needed_bytes <= 24 * GIB


def test_what_the_small_kind_can_never_hold_goes_to_the_large_one_or_nowhere() -> None:
    seven = decoder(5120, {"min": 2, "max": 8})
    assert started(seven, mixed()).device == "a100-80gb"
    small_alone = State(nodes=tuple(node for node in mixed() if node.name == "small"))
    _, actions = step(small_alone, Submitted(job_id="lm-1", order=1, spec=decoder(16384, 2), at_s=0.0))
    assert [action.job.status for action in actions if isinstance(action, Record)] == [
        JobStatus.QUEUED,
        JobStatus.REFUSED,
    ]


@pytest.mark.parametrize("gpus", [1, {"min": 1, "max": 8}])
def test_a_device_with_little_free_memory_is_not_counted_as_whole(gpus: object) -> None:
    """Six of the eight are nearly full: what is placed fits what is free on each of its devices."""
    nodes = with_free(mixed(), "large", (1, 1, 1, 60, 1, 1, 30, 1))
    nodes = tuple(node for node in nodes if node.name == "large")
    found = started(decoder(2048, gpus), nodes)
    needed = found.needed_bytes
    assert needed is not None
    (part,) = found.placement
    assert set(part.devices) <= {3, 6}
    assert all(nodes[0].free_bytes[index] >= needed for index in part.devices)


def test_a_forecast_counts_the_free_memory_of_as_many_devices_as_a_plan_takes() -> None:
    nodes = with_free(mixed(), "large", (1, 1, 1, 60, 1, 1, 30, 1))
    told = forecast(decoder(2048, {"min": 1, "max": 8}), tuple(node for node in nodes if node.name == "large"))
    capacities = {int(view["settings"]["gpus"]): view["capacity_bytes"] // GIB for view in told["frontier"]}
    assert {capacities[1], capacities[2], capacities[8]} == {60, 30, 1}
    assert told["chosen"] is not None
    assert int(told["frontier"][told["chosen"]]["settings"]["gpus"]) <= 2


def test_a_kind_that_cannot_run_a_job_does_not_hide_the_kinds_that_can() -> None:
    nodes = mixed(MIXED.replace("rtx4090-24gb", "v100-32gb"))
    spec = decoder(2048, {"min": 1, "max": 8})
    assert forecast(spec, nodes)["device"] == "a100-80gb"
    assert started(spec, nodes).device == "a100-80gb"


@st.composite
def unlike_nodes(draw: st.DrawFn) -> tuple[Node, ...]:
    """Up to four nodes of three kinds of device, of which any part may be taken."""
    kinds = draw(st.lists(st.sampled_from(("a100-80gb", "rtx4090-24gb", "v100-32gb")), min_size=1, max_size=4))
    lines = [
        f"  - {{name: n{number}, devices: {draw(st.sampled_from((1, 2, 4)))}, device: {kind}, host_memory: 64GiB}}"
        for number, kind in enumerate(kinds)
    ]
    nodes = mixed("name: mixed\nnodes:\n" + "\n".join(lines))
    share = st.floats(0.05, 1.0)
    return tuple(replace(node, free_bytes=tuple(int(draw(share) * one) for one in node.free_bytes)) for node in nodes)


@given(unlike_nodes(), st.sampled_from((1024, 2048, 4096)), st.integers(1, 2), st.integers(0, 3), st.booleans())
@settings(max_examples=25, deadline=None)
def test_what_is_taken_of_unlike_nodes_is_what_trying_every_plan_on_every_kind_finds(
    nodes: tuple[Node, ...], hidden: int, least: int, more: int, low: bool
) -> None:
    spec = decoder(hidden, {"min": least, "max": least + more}, "bf16" if low else "fp32")
    try:
        told = forecast(spec, nodes)
    except SpecError:
        assert all(group.devices < least or not tried(spec, group) for group in groups_of(nodes))
        return
    best = next((found for group in groups_of(nodes) if (found := tried(spec, group))), None)
    if best is None:
        assert told["chosen"] is None
    else:
        assert told["chosen"] is not None
        taken = told["frontier"][told["chosen"]]
        assert (told["device"], taken["step_s"]) == best


def tried(spec: JobSpec, group: Group) -> tuple[str, float] | None:
    """The kind, and the step time of the fastest legal plan whose devices all have that much free."""
    free_bytes = sorted((free for node in group.nodes for free in node.free_bytes), reverse=True)
    try:
        legal = list(plans(spec, group.hardware)) if group.devices >= spec.gpus.min else []
    except SpecError:
        return None
    fitting_s = [
        step_s(profile_for(spec, group.hardware, plan), plan, group.hardware)
        for plan in legal
        if _needed(spec, group, plan) <= free_bytes[plan.world_size - 1]
    ]
    return (group.hardware.device.name, min(fitting_s)) if fitting_s else None


def _needed(spec: JobSpec, group: Group, plan: Plan) -> int:
    found = estimate(profile_for(spec, group.hardware, plan), plan, group.hardware.device)
    return calibration.needed_bytes(plan, found, UNMEASURED)


def test_whoever_waits_for_a_faster_device_lets_its_equal_begin_on_a_slower_one() -> None:
    fast = world.device("fast", "2GiB", "cuda")
    slower = {"name": "slow", "memory_bandwidth": 6_500_000_000, "bf16_tflops": 65.0, "fp32_tflops": 32.5}
    slow = fast.model_copy(update=slower)
    nodes = idle_nodes(world.cluster(("fast", 1, 1, fast), ("slow", 1, 1, slow)))
    first, equal = (world.decoder("lm", gpus=1, training={"max_steps": steps}) for steps in (100, 200))
    state, launches = played(seen(*nodes), submitted(1, first), *(submitted(number, equal) for number in (2, 3)))
    assert {job: attempt.placement[0].node for job, attempt in launches.items()} == {"job-1": "fast", "job-3": "slow"}
    assert [(one.job_id, one.placement[0].node) for one in state.reservations] == [("job-2", "fast")]
