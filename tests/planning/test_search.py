"""The search against brute force: jobs of every kind, on hardware that hypothesis makes up."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from orchestrator.memory.calibration.calibrate import Calibration
from orchestrator.memory.calibration.correction import correct_device_bytes
from orchestrator.memory.engines.overhead import CONTEXT_BYTES, SUPPOSED_OVERHEAD, MeasuredOverhead
from orchestrator.memory.estimate import DeviceBytes, estimate, make_device_bytes_cache_key
from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.planning.frontier import Candidate, estimate_node_host_bytes
from orchestrator.planning.pareto import TimedPlan, find_pareto_front
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import CORRECTION_STEPS, REACH, find_frontier, list_plans
from orchestrator.planning.trust import rate_trust
from orchestrator.specs.choices import ActivationCheckpointing, Degradation, Engine, ParallelLayout
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate
from tests.examples import examples, phases

Cost = tuple[
    Degradation, float, int, int, float
]  # and step time, device bytes, GPUs, rank of trust

SIZES = {"vocab_size": 512, "hidden_size": 128, "intermediate_size": 384, "num_hidden_layers": 5}
SIZES |= {"num_attention_heads": 4, "num_key_value_heads": 2}
DECLARED = {
    "parameters": 3 * 10**7,
    "layers": 6,
    "activations_per_sample": "24MiB",
    "workspace": "1MiB",
}
CUT = DECLARED | {"selective_per_sample": "10MiB", "tensor_parallel": (2,), "pipeline": True}
LENGTH = 128
NONE, SELECTIVE, FULL = ActivationCheckpointing
FRAGMENTED = ((NONE, 1.25), (SELECTIVE, 1.0), (FULL, 1.12))  # what CUDA's allocator needs
KNOBS = {
    "micro_batch_size": {"flag": "--batch", "default": 4},
    "gradient_accumulation_steps": {"flag": "--accumulate", "default": 1},
    "activation_checkpointing": {"switch": "--checkpoint"},
    "precision": {"flag": "--dtype"},
    "sequence_length": {"flag": "--tokens", "default": LENGTH},
    "deepspeed_config": {"flag": "--deepspeed"},
    "optimizer_in_backward": {"switch": "--update-in-backward"},
}
SCRIPT = {"command": "python train.py", "knobs": KNOBS}
WORK: tuple[dict[str, Any], ...] = (
    {"model": {"decoder": SIZES}},
    {"model": {"decoder": SIZES | {"tie_word_embeddings": True}}},
    {"model": {"hf": {"model_type": "qwen3", **SIZES}}},
    {"model": {"hf": {"model_type": "llama", **SIZES}, "lora": {"rank": 4}}},
    {"model": {"factory": "model.py:make"}, "profile": DECLARED},
    {"model": {"factory": "model.py:make"}, "profile": CUT},
    SCRIPT,
    SCRIPT | {"profile": DECLARED},
    {"model": {"decoder": SIZES}, "data": {"text": ["text"], "sequence_length": 16384}},
    {"model": {"hf": {"model_type": "mixtral", **SIZES, "num_local_experts": 40}}},
)


def job(
    work: dict[str, Any], batch: int, gpus: tuple[int, int], allow: str, **more: Any
) -> JobSpec:
    fields = {
        "name": "job",
        "gpus": {"min": gpus[0], "max": sum(gpus)},
        "global_batch_size": batch,
        "degrade": {"allow": allow, "sequence_lengths": (64,) if allow == "semantic" else ()},
    }
    data = {} if "command" in work else {"data": {"text": ["text"], "sequence_length": LENGTH}}
    return JobSpec.model_validate(fields | data | work | more)


def machine(kind: DeviceKind, per_node: int, nodes: int, memory: str, nvme: bool) -> Hardware:
    fields = {
        "name": "device",
        "kind": kind,
        "memory": memory,
        "bf16_tflops": 900,
        "fp32_tflops": 60,
        "memory_bandwidth": "3TB/s",
        "link_bandwidth": "450GB/s",
        "nvme_folder": "/nvme" if nvme else None,
    }
    device = DeviceSpec.model_validate(fields)
    return Hardware(
        device=device, devices_per_node=per_node, nodes=nodes, network_bandwidth=50_000_000_000
    )


jobs = st.builds(
    job,
    work=st.sampled_from(WORK),
    batch=st.sampled_from((1, 6, 8, 12, 16, 24)),
    gpus=st.tuples(st.integers(1, 2), st.integers(0, 6)),
    allow=st.sampled_from(("exact", "numeric", "semantic")),
    precision=st.sampled_from(("fp32", "bf16", "fp16")),
    training=st.builds(
        lambda rule, clip: {"optimizer": rule, "clip_norm": clip},
        st.sampled_from(("adamw", "sgd", "adafactor")),
        st.sampled_from((1.0, None)),
    ),
)
machines = st.builds(
    machine,
    kind=st.sampled_from(DeviceKind),
    per_node=st.sampled_from((1, 2, 4, 8)),
    nodes=st.integers(1, 4),
    memory=st.sampled_from(("16MiB", "96MiB", "1300MiB", "2GiB", "80GiB")),
    nvme=st.booleans(),
)


SMALL = MeasuredOverhead(((CONTEXT_BYTES, 64 * 2**20),))  # measured
LARGE = MeasuredOverhead(((CONTEXT_BYTES, 600 * 2**20), (CONTEXT_BYTES + 10**9, 100 * 2**20)))


@given(jobs, machines, st.sampled_from((SUPPOSED_OVERHEAD, SMALL, LARGE)))
@example(
    job(WORK[0], 8, (1, 3), "exact"), machine(DeviceKind.VIRTUAL, 2, 2, "16MiB", nvme=False), LARGE
)  # reach cuts
@example(
    job(WORK[5], 8, (1, 3), "exact"), machine(DeviceKind.VIRTUAL, 2, 2, "96MiB", nvme=False), LARGE
)
@example(
    job(WORK[8], 2, (2, 2), "exact"),
    machine(DeviceKind.CUDA, 4, 1, "2GiB", nvme=False),
    SUPPOSED_OVERHEAD,
)
@example(
    job(WORK[9], 8, (1, 3), "exact"),
    machine(DeviceKind.CUDA, 2, 2, "1300MiB", nvme=False),
    SUPPOSED_OVERHEAD,
)
@example(
    job(WORK[0], 8, (1, 3), "exact"), machine(DeviceKind.CUDA, 2, 2, "2GiB", nvme=False), LARGE
)
@example(
    job(WORK[3], 6, (1, 1), "numeric"), machine(DeviceKind.CUDA, 2, 1, "96MiB", nvme=True), SMALL
)
@example(
    job(WORK[6], 12, (1, 2), "semantic"), machine(DeviceKind.CUDA, 8, 1, "80GiB", nvme=False), SMALL
)
@settings(max_examples=examples(30), deadline=None, phases=phases())
def test_the_frontier_is_every_plan_within_reach_that_no_other_legal_plan_beats(
    spec: JobSpec, here: Hardware, overhead: MeasuredOverhead
) -> None:
    try:
        tried = list(list_plans(read_plan_request(spec), here))
        candidates = find_frontier(
            read_plan_request(spec), here, Calibration(overhead=overhead)
        ).candidates
    except SpecError:
        return
    assert len(set(tried)) == len(tried)
    assert [
        replace(plan) for plan in tried
    ] == tried  # made again as the first of their family was: all are legal
    costs = [cost(spec, here, plan, overhead) for plan in tried]
    near_costs = [
        cost_row for cost_row in unbeaten(costs) if cost_row[2] <= REACH * here.device.memory
    ]
    classes = {cost_row[0] for cost_row in near_costs}
    expected = near_costs + [cost_row for cost_row in unbeaten(costs) if cost_row[0] not in classes]
    frontier_costs = [as_cost(candidate) for candidate in candidates]
    assert frontier_costs == sorted(expected)
    assert [
        cost(spec, here, candidate.plan, overhead) for candidate in candidates
    ] == frontier_costs


@given(jobs, machines, st.sampled_from((64 * 2**20, 512 * 2**20, 3 * 2**30)))
@example(
    job(WORK[5], 8, (2, 2), "exact"), machine(DeviceKind.CUDA, 4, 1, "2GiB", nvme=True), 512 * 2**20
)
@example(
    job(WORK[8], 8, (2, 2), "exact"),
    machine(DeviceKind.CUDA, 4, 1, "96MiB", nvme=False),
    64 * 2**20,
)
@settings(max_examples=examples(30, 4), deadline=None)
def test_where_host_memory_is_short_the_frontier_has_every_plan_with_enough_that_no_other_such_plan_beats(
    spec: JobSpec, here: Hardware, host_memory: int
) -> None:
    here = replace(here, host_memory=host_memory)
    try:
        tried = list(list_plans(read_plan_request(spec), here))
        candidates = find_frontier(read_plan_request(spec), here).candidates
    except SpecError:
        return
    with_host = [
        plan
        for plan in tried
        if estimate_node_host_bytes(plan, _estimate(spec, here, plan), here) <= host_memory
    ]
    costs = [cost(spec, here, plan) for plan in with_host]
    near_costs = [
        cost_row for cost_row in unbeaten(costs) if cost_row[2] <= REACH * here.device.memory
    ]
    classes = {cost_row[0] for cost_row in near_costs}
    expected = near_costs + [cost_row for cost_row in unbeaten(costs) if cost_row[0] not in classes]
    frontier_costs = [as_cost(candidate) for candidate in candidates if candidate.fits_host]
    assert frontier_costs == sorted(expected)


def _estimate(spec: JobSpec, here: Hardware, plan: Plan) -> MemoryEstimate:
    return estimate(find_profile(read_plan_request(spec), here, plan), plan, here.device)


@given(jobs, machines, st.floats(1.0, 30.0))
@example(job(WORK[5], 8, (1, 1), "exact"), machine(DeviceKind.CUDA, 2, 2, "2GiB", nvme=False), 9.0)
@settings(max_examples=examples(12, 4), deadline=None)
def test_under_any_correction_no_plan_as_fast_needs_a_step_less_than_the_frontier(
    spec: JobSpec, here: Hardware, correction: float
) -> None:
    try:
        tried = list(list_plans(read_plan_request(spec), here))
        candidates = find_frontier(
            read_plan_request(spec), here, Calibration(correction=correction)
        ).candidates
    except SpecError:
        return
    step = 2 ** (1 / CORRECTION_STEPS)
    bounds = [
        (
            candidate.degradation,
            candidate.plan.world_size,
            candidate.step_s,
            correct_device_bytes(candidate.estimate, correction),
            rate_trust(candidate.plan).rank,
        )
        for candidate in candidates
    ]
    for plan in tried:
        kind, seconds, _, devices, rank = cost(spec, here, plan)
        estimated = estimate(find_profile(read_plan_request(spec), here, plan), plan, here.device)
        if correct_device_bytes(estimated, step * correction) <= REACH * here.device.memory:
            needed = correct_device_bytes(estimated, correction)
            assert any(
                bound[0] == kind
                and bound[1] <= devices
                and bound[2] <= seconds
                and bound[3] <= step * needed + 1
                and bound[4] <= rank
                for bound in bounds
            ), plan


def test_a_job_whose_launches_block_has_a_frontier_of_slower_plans() -> None:
    here = machine(DeviceKind.CUDA, 2, 1, "80GiB", nvme=False)
    plain, blocking = (
        find_frontier(read_plan_request(job(WORK[0], 8, (1, 1), "exact", env=env)), here).candidates
        for env in ({}, {"CUDA_LAUNCH_BLOCKING": "1"})
    )
    assert min(candidate.step_s for candidate in blocking) > min(
        candidate.step_s for candidate in plain
    )


def cost(
    spec: JobSpec, here: Hardware, plan: Plan, overhead: MeasuredOverhead = SUPPOSED_OVERHEAD
) -> Cost:
    """Return the cost of a plan by the formulas, without the search."""
    profile = find_profile(read_plan_request(spec), here, plan)
    sequence_length = spec.data.sequence_length if spec.model is not None else LENGTH
    semantic = plan.sequence_length != sequence_length
    numeric = (plan.precision, plan.optimizer) != (spec.precision, spec.training.optimizer)
    degradation = (
        Degradation.SEMANTIC if semantic else Degradation.NUMERIC if numeric else Degradation.EXACT
    )
    needed = estimate(profile, plan, here.device, overhead).device_bytes
    return (
        degradation,
        predict_step_s(profile, plan, here),
        needed,
        plan.world_size,
        rate_trust(plan).rank,
    )


def as_cost(candidate: Candidate) -> Cost:
    """Return what a frontier compares of a candidate."""
    plan, estimated = candidate.plan, candidate.estimate
    rank = rate_trust(plan).rank
    return (candidate.degradation, candidate.step_s, estimated.device_bytes, plan.world_size, rank)


def unbeaten(costs: Iterable[Cost]) -> list[Cost]:
    """Return the costs that no other beats: the definition of a frontier, with every pair compared."""
    every = set(costs)
    return [cost_row for cost_row in every if not any(beats(other, cost_row) for other in every)]


def beats(mine: Cost, theirs: Cost) -> bool:
    return (
        mine[0] is theirs[0]
        and mine != theirs
        and all(a <= b for a, b in zip(mine[1:], theirs[1:], strict=True))
    )


@given(jobs, machines)
@example(
    job(WORK[9], 8, (1, 3), "exact"), machine(DeviceKind.CUDA, 2, 2, "2GiB", nvme=False)
)  # views of experts
@settings(max_examples=examples(15, 4), deadline=None)
def test_no_estimate_is_below_the_lower_bound_of_the_search(spec: JobSpec, here: Hardware) -> None:
    shared_bytes: dict[object, DeviceBytes] = {}
    try:
        tried = list(list_plans(read_plan_request(spec), here))
    except SpecError:
        return
    for plan in tried:
        profile = replace(
            find_profile(read_plan_request(spec), here, plan), fragmentation=FRAGMENTED
        )
        shared = shared_bytes.setdefault(
            make_device_bytes_cache_key(plan), DeviceBytes(profile, plan, here.device)
        )
        needed = estimate(profile, plan, here.device)
        assert shared.estimate(plan) == needed, plan
        assert (
            shared.compute_lower_bound_without_activations(plan)
            <= shared.compute_lower_bound_bytes(plan)
            <= needed.device_bytes
        ), plan


small = st.tuples(*[st.integers(0, 5)] * 4, st.integers(0, 2))


@given(st.lists(small, max_size=40), st.integers(0, 6))
def test_the_frontier_keeps_exactly_the_undominated_costs(
    drawn: list[tuple[int, int, int, int, int]], most_bytes: int
) -> None:
    needs: dict[Plan, MemoryEstimate] = {}
    timed = []
    for number, (gpus, seconds, needed, slack, rank) in enumerate(drawn, start=1):
        plan = Plan(
            engine=Engine.TORCH, layout=ParallelLayout(dp=gpus + 1), micro_batch_size=number
        )
        needs[plan] = MemoryEstimate(
            moment="",
            by_cause=(("all", needed),),
            allocated_bytes=needed,
            reserved_bytes=needed,
            device_bytes=needed,
        )
        timed.append(TimedPlan(plan, float(seconds), max(0, needed - slack), float(rank)))
    every = [
        (Degradation.EXACT, float(seconds), needed, gpus + 1, float(rank))
        for gpus, seconds, needed, _, rank in drawn
    ]
    front = find_pareto_front(timed, needs.__getitem__, most_bytes)
    costs = [
        (
            Degradation.EXACT,
            candidate.step_s,
            candidate.needed_bytes,
            candidate.plan.world_size,
            candidate.rank,
        )
        for candidate in front
    ]
    assert costs == sorted(cost_row for cost_row in unbeaten(every) if cost_row[2] <= most_bytes)
