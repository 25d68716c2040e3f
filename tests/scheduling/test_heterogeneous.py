"""A cluster of unlike devices: every kind has plans of its own, on the memory that is free there."""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.memory.calibration import calibrate as calibration
from orchestrator.memory.calibration.calibrate import UNMEASURED
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.frontier import (
    EVEN,
    estimate_needed_device_bytes,
    estimate_node_host_bytes,
)
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.scheduling.base.node_groups import NodeGroup, group_equal_nodes
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.step import step
from orchestrator.service.commands.plan import plan_job
from orchestrator.specs.actions import Launch, Record
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.cluster import Node, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.pending import Pending
from orchestrator.specs.state import State
from tests.examples import examples
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
    return make_idle_nodes(parse_cluster(text, "mixed"))


def decoder(hidden: int, gpus: object, precision: str = "bf16") -> JobSpec:
    """24 layers: 1.3 billion parameters at a hidden size of 2,048."""
    sizes = {"hidden_size": hidden, "intermediate_size": 3 * hidden, "num_hidden_layers": 24}
    fields = {
        "name": "lm",
        "gpus": gpus,
        "global_batch_size": 16,
        "precision": precision,
        "model": {"decoder": {"vocab_size": 32000, "num_attention_heads": 16, **sizes}},
        "data": {"text": ["text"], "sequence_length": 2048},
    }
    return JobSpec.model_validate(fields)


def started(spec: JobSpec, nodes: tuple[Node, ...]) -> Attempt:
    """The attempt that an idle cluster makes of the job."""
    _, actions = step(State(nodes=nodes), Submitted(job_id="lm-1", order=1, spec=spec, at_s=0.0))
    (launch,) = (action for action in actions if isinstance(action, Launch))
    return launch.attempt


def with_free(nodes: tuple[Node, ...], name: str, free_gib: tuple[int, ...]) -> tuple[Node, ...]:
    free_bytes = tuple(gib * GIB for gib in free_gib)
    return tuple(
        replace(node, free_bytes=free_bytes) if node.name == name else node for node in nodes
    )


def test_every_kind_of_device_has_a_frontier_of_its_own() -> None:
    spec = decoder(2048, {"min": 1, "max": 8})
    large, small = group_equal_nodes(mixed())
    assert [(group.devices, group.hardware.device.name) for group in (large, small)] == [
        (8, "a100-80gb"),
        (2, "rtx4090-24gb"),
    ]
    for group, most in ((large, 8), (small, 2)):
        candidates = find_frontier(read_plan_request(spec), group.hardware).candidates
        assert max(candidate.plan.world_size for candidate in candidates) == most
        assert any(
            estimate_needed_device_bytes(candidate, UNMEASURED) <= group.hardware.device.memory
            for candidate in candidates
        )


def test_a_job_takes_the_kind_that_is_free_with_a_plan_made_for_it() -> None:
    spec = decoder(2048, {"min": 1, "max": 8})
    assert started(spec, mixed()).device == "a100-80gb"
    busy = with_free(mixed(), "large", (1,) * 8)
    launched = started(spec, busy)
    assert (launched.device, launched.plan.world_size) == ("rtx4090-24gb", 2)
    assert launched.needed_bytes is not None
    assert launched.needed_bytes <= 24 * GIB


def test_what_the_small_kind_can_never_hold_goes_to_the_large_one_or_nowhere() -> None:
    seven = decoder(5120, {"min": 2, "max": 8})
    assert started(seven, mixed()).device == "a100-80gb"
    small_alone = State(nodes=tuple(node for node in mixed() if node.name == "small"))
    _, actions = step(
        small_alone, Submitted(job_id="lm-1", order=1, spec=decoder(16384, 2), at_s=0.0)
    )
    assert [action.job.status for action in actions if isinstance(action, Record)] == [
        JobStatus.REFUSED
    ]


@pytest.mark.parametrize("gpus", [1, {"min": 1, "max": 8}])
def test_a_device_with_little_free_memory_is_not_counted_as_whole(gpus: object) -> None:
    """Six of eight devices are nearly full: a placed plan fits the free memory of each of its devices."""
    nodes = with_free(mixed(), "large", (1, 1, 1, 60, 1, 1, 30, 1))
    nodes = tuple(node for node in nodes if node.name == "large")
    launched = started(decoder(2048, gpus), nodes)
    needed = launched.needed_bytes
    assert needed is not None
    (part,) = launched.placement
    assert set(part.devices) <= {3, 6}
    assert all(nodes[0].free_bytes[index] >= needed for index in part.devices)


def test_a_forecast_counts_the_free_memory_of_as_many_devices_as_a_plan_takes() -> None:
    nodes = with_free(mixed(), "large", (1, 1, 1, 60, 1, 1, 30, 1))
    decision = plan_job(
        decoder(2048, {"min": 1, "max": 8}), tuple(node for node in nodes if node.name == "large")
    )
    capacities = {
        int(view["settings"]["gpus"]): view["capacity_bytes"] // GIB
        for view in decision["frontier"]
    }
    assert {capacities[1], capacities[2], capacities[8]} == {60, 30, 1}
    assert decision["chosen"] is not None
    assert int(decision["frontier"][decision["chosen"]]["settings"]["gpus"]) <= 2


def test_a_kind_that_cannot_run_a_job_does_not_hide_the_kinds_that_can() -> None:
    nodes = mixed(MIXED.replace("rtx4090-24gb", "v100-32gb"))
    spec = decoder(2048, {"min": 1, "max": 8})
    assert plan_job(spec, nodes)["device"] == "a100-80gb"
    assert started(spec, nodes).device == "a100-80gb"


@st.composite
def unlike_nodes(draw: st.DrawFn) -> tuple[Node, ...]:
    """Up to four nodes of three kinds of device, of which any part may be taken."""
    kinds = draw(
        st.lists(
            st.sampled_from(("a100-80gb", "rtx4090-24gb", "v100-32gb")), min_size=1, max_size=4
        )
    )
    lines = [
        f"  - {{name: n{number}, devices: {draw(st.sampled_from((1, 2, 4)))}, device: {kind}, host_memory: 64GiB}}"
        for number, kind in enumerate(kinds)
    ]
    nodes = mixed("name: mixed\nnodes:\n" + "\n".join(lines))
    share = st.floats(0.05, 1.0)
    return tuple(
        replace(node, free_bytes=tuple(int(draw(share) * free) for free in node.free_bytes))
        for node in nodes
    )


def one_node(device: str, *free_bytes: int) -> tuple[Node, ...]:
    (node,) = mixed(
        f"name: one\nnodes: [{{name: n0, devices: {len(free_bytes)}, device: {device}, host_memory: 64GiB}}]"
    )
    return (replace(node, free_bytes=free_bytes),)


@given(
    unlike_nodes(),
    st.sampled_from((1024, 2048, 4096)),
    st.integers(1, 2),
    st.integers(0, 3),
    st.booleans(),
)
@example(
    one_node("rtx4090-24gb", 25_383_256_719, 2_577_987_010), 2048, 2, 0, True
)  # one may fit, but not with its margin
@settings(max_examples=examples(25, 2))
def test_what_is_taken_of_unlike_nodes_is_what_trying_every_plan_on_every_kind_finds(
    nodes: tuple[Node, ...], hidden: int, least: int, more: int, low: bool
) -> None:
    """The fastest plan that fits with its margin; where none fits an empty device, the plan that most probably runs."""
    spec = decoder(hidden, {"min": least, "max": least + more}, "bf16" if low else "fp32")
    spec = spec.model_copy(update={"objective": "fastest"})
    try:
        decision = plan_job(spec, nodes)
    except SpecError:
        assert all(
            group.devices < least or not tried(spec, group) for group in group_equal_nodes(nodes)
        )
        return
    by_kind = [
        (group.hardware.device.name, tried(spec, group)) for group in group_equal_nodes(nodes)
    ]
    taken = None if decision["chosen"] is None else decision["frontier"][decision["chosen"]]
    fitting = [
        (kind, min(times_s))
        for kind, tries in by_kind
        if (times_s := [candidate.step_s for candidate in tries if candidate.fits])
    ]
    likely = [
        (kind, max(tries, key=lambda candidate: candidate.probability))
        for kind, tries in by_kind
        if tries
    ]
    likely = [
        (kind, candidate)
        for kind, candidate in likely
        if candidate.probability >= EVEN and candidate.holds
    ]
    assert (decision["nothing_fits"] is None) == bool(fitting)
    if fitting:
        assert taken is not None
        assert (decision["device"], taken["step_s"]) == fitting[0]
    elif likely and not any(candidate.fits_empty for _, tries in by_kind for candidate in tries):
        assert taken is not None
        assert (decision["device"], taken["step_s"]) == (likely[0][0], likely[0][1].step_s)
    else:
        assert taken is None


def test_a_job_that_an_empty_device_holds_waits_for_its_memory_and_is_told_so() -> None:
    """2.49 GiB are needed of 2.40 GiB, of which the margin is 0.12 GiB: it may fit, but others will go."""
    spec, nodes = decoder(2048, 2), one_node("rtx4090-24gb", 25_383_256_719, 2_577_987_010)
    decision = plan_job(spec, nodes)
    assert decision["chosen"] is None
    assert decision["nothing_fits"] is not None
    assert decision["nothing_fits"].startswith("no plan fits 2.40 GiB")
    state, actions = step(
        State(nodes=nodes), Submitted(job_id="lm-1", order=1, spec=spec, at_s=0.0)
    )
    assert not any(isinstance(action, Launch) for action in actions)
    assert (
        describe_status(state.jobs["lm-1"])
        == "waits for memory that other processes hold on rtx4090-24gb"
    )
    assert get_pending_code(state.jobs["lm-1"], state.at_s) is Pending.FOREIGN_MEMORY


class Tried(NamedTuple):
    """A legal plan on the emptiest devices of a kind."""

    step_s: float
    probability: float  # that it runs on an empty device
    fits: bool  # what is free, with its margin
    fits_empty: bool
    holds: bool  # what is free holds it without its margin


def tried(spec: JobSpec, group: NodeGroup) -> list[Tried]:
    """Return every legal plan of the job on one kind of device."""
    device = group.hardware.device
    free_bytes = sorted((free for node in group.nodes for free in node.free_bytes), reverse=True)
    try:
        legal = (
            list(list_plans(read_plan_request(spec), group.hardware))
            if group.devices >= spec.gpus.min
            else []
        )
    except SpecError:
        return []
    rows = []
    for plan in legal:
        profile, capacity_bytes = (
            find_profile(read_plan_request(spec), group.hardware, plan),
            free_bytes[plan.world_size - 1],
        )
        needs = estimate(profile, plan, device)
        needed = calibration.estimate_needed_bytes(plan, needs, UNMEASURED)
        has_host = (
            estimate_node_host_bytes(plan, needs, group.hardware) <= group.hardware.host_memory
        )
        rows.append(
            Tried(
                step_s=predict_step_s(profile, plan, group.hardware),
                probability=has_host
                * calibration.estimate_fit_probability(plan, needs, UNMEASURED, device.memory),
                fits=has_host and needed <= capacity_bytes,
                fits_empty=has_host and needed <= device.memory,
                holds=has_host and needs.device_bytes <= capacity_bytes,
            )
        )
    return rows


def test_whoever_waits_for_a_faster_device_lets_its_equal_begin_on_a_slower_one() -> None:
    fast = world.device("fast", "2GiB", "cuda")
    slower = {
        "name": "slow",
        "memory_bandwidth": 6_500_000_000,
        "bf16_tflops": 65.0,
        "fp32_tflops": 32.5,
    }
    slow = fast.model_copy(update=slower)
    nodes = make_idle_nodes(world.cluster(("fast", 1, 1, fast), ("slow", 1, 1, slow)))
    first, equal = (
        world.decoder("lm", gpus=1, training={"max_steps": steps}) for steps in (100, 200)
    )
    state, launches = played(
        seen(*nodes), submitted(1, first), *(submitted(number, equal) for number in (2, 3))
    )
    assert {job: attempt.placement[0].node for job, attempt in launches.items()} == {
        "job-1": "fast",
        "job-3": "slow",
    }
    assert [
        (reservation.job_id, reservation.placement[0].node) for reservation in state.reservations
    ] == [("job-2", "fast")]
