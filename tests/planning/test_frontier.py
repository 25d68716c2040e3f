"""Laws of the frontier, over jobs and hardware that hypothesis makes up."""

from __future__ import annotations

from cProfile import Profile
from dataclasses import replace
from pstats import Stats
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from orchestrator.memory.calibration.calibrate import UNMEASURED, Calibration
from orchestrator.memory.calibration.correction import (
    compute_activation_factor_of_peak,
    correct_device_bytes,
)
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.frontier import (
    Candidate,
    estimate_needed_device_bytes,
    find_rejection_reason,
    fits_device,
    list_fitting,
)
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import Hardware, find_frontier, list_plans
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Degradation,
    Engine,
    Offload,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from tests.examples import examples


def device(kind: DeviceKind = DeviceKind.CUDA, memory: str = "80GiB") -> DeviceSpec:
    return DeviceSpec(
        name="device",
        kind=kind,
        memory=memory,
        bf16_tflops=900,
        fp32_tflops=60,
        memory_bandwidth="3TB/s",
        link_bandwidth="450GB/s",
    )


def hardware(
    kind: DeviceKind = DeviceKind.CUDA, per_node: int = 4, nodes: int = 2, memory: str = "80GiB"
) -> Hardware:
    return Hardware(
        device=device(kind, memory),
        devices_per_node=per_node,
        nodes=nodes,
        network_bandwidth=50_000_000_000,
    )


def decoder_job(**changed: object) -> JobSpec:
    decoder = DecoderSpec(
        vocab_size=512,
        hidden_size=256,
        intermediate_size=768,
        num_hidden_layers=4,
        num_attention_heads=4,
    )
    fields = {
        "name": "job",
        "gpus": {"min": 1, "max": 8},
        "global_batch_size": 16,
        "model": ModelSpec(decoder=decoder),
        "data": DataSpec(text=("text",), sequence_length=128),
    }
    return JobSpec.model_validate(fields | changed)


jobs = st.builds(
    lambda batch, low, more, precision, allow: decoder_job(
        global_batch_size=batch,
        gpus={"min": low, "max": low + more},
        precision=precision,
        degrade={"allow": allow, "sequence_lengths": (64, 32) if allow == "semantic" else ()},
    ),
    batch=st.integers(1, 64),
    low=st.integers(1, 3),
    more=st.integers(0, 8),
    precision=st.sampled_from(Precision),
    allow=st.sampled_from(("exact", "numeric", "semantic")),
)
machines = st.builds(
    hardware,
    kind=st.sampled_from(DeviceKind),
    per_node=st.integers(1, 8),
    nodes=st.integers(1, 3),
    memory=st.sampled_from(("64MiB", "1GiB", "80GiB")),
)


def planned(spec: JobSpec, machine: Hardware) -> tuple[Candidate, ...]:
    try:
        return find_frontier(read_plan_request(spec), machine).candidates
    except SpecError:
        return ()


@given(jobs, machines)
@settings(max_examples=examples(60, 6), deadline=None)
def test_every_plan_keeps_the_global_batch_and_the_range_of_devices(
    spec: JobSpec, machine: Hardware
) -> None:
    for candidate in planned(spec, machine):
        plan = candidate.plan
        assert plan.global_batch_size == spec.global_batch_size
        assert spec.gpus.min <= plan.world_size <= spec.gpus.max
        assert (
            plan.world_size <= machine.devices_per_node
            or plan.world_size % machine.devices_per_node == 0
        )
        assert plan.world_size <= machine.devices_per_node * machine.nodes


@given(jobs, machines)
@settings(max_examples=examples(60, 6), deadline=None)
def test_no_plan_changes_more_than_the_job_allows(spec: JobSpec, machine: Hardware) -> None:
    for candidate in planned(spec, machine):
        plan, changed = candidate.plan, candidate.degradation
        assert changed <= spec.degrade.limit
        assert (plan.sequence_length != spec.data.sequence_length) == (
            changed is Degradation.SEMANTIC
        )
        if changed is Degradation.EXACT:
            assert plan.precision is spec.precision
        assert machine.device.kind is DeviceKind.CUDA or plan.offload is Offload.NONE


@given(jobs, machines)
@settings(max_examples=examples(60, 6), deadline=None)
def test_the_frontier_goes_from_mild_to_harsh_and_from_fast_to_slow(
    spec: JobSpec, machine: Hardware
) -> None:
    order = [(candidate.degradation, candidate.step_s) for candidate in planned(spec, machine)]
    assert order == sorted(order)


def _candidate(spec: JobSpec, machine: Hardware, plan) -> Candidate:  # type: ignore[no-untyped-def]
    profile = find_profile(read_plan_request(spec), machine, plan)
    semantic = plan.sequence_length != spec.data.sequence_length
    numeric = (plan.precision, plan.optimizer) != (spec.precision, spec.training.optimizer)
    return Candidate(
        plan=plan,
        estimate=estimate(profile, plan, machine.device),
        step_s=predict_step_s(profile, plan, machine),
        degradation=Degradation.SEMANTIC
        if semantic
        else Degradation.NUMERIC
        if numeric
        else Degradation.EXACT,
    )


@given(jobs, machines)
@settings(max_examples=examples(40, 6), deadline=None)
def test_estimates_are_positive_and_grow_with_the_micro_batch(
    spec: JobSpec, machine: Hardware
) -> None:
    families: dict[object, list[Candidate]] = {}
    try:
        tried = list(list_plans(read_plan_request(spec), machine))
    except SpecError:
        return
    for plan in tried:
        if (
            plan.pipeline_stages_per_rank > 1
        ):  # between its stages fewer messages wait when micro-batches are larger
            continue
        key = (
            *(
                plan.engine,
                plan.layout,
                plan.zero_stage,
                plan.offload,
                plan.offload_target,
                plan.dp_replicate,
            ),
            *(
                plan.activation_checkpointing,
                plan.full_checkpointing_layers,
                plan.precision,
                plan.optimizer,
                plan.master_weights,
                plan.sequence_length,
                plan.gradient_accumulation_steps > plan.layout.pp,
            ),
        )
        families.setdefault(key, []).append(_candidate(spec, machine, plan))
    for family in families.values():
        peaks = [
            candidate.estimate.allocated_bytes
            for candidate in sorted(family, key=lambda candidate: candidate.plan.micro_batch_size)
        ]
        assert peaks[0] > 0
        assert peaks == sorted(peaks)


def test_a_correction_leaves_what_was_counted_alone() -> None:
    """Sharding the states saves little where the activations are the trouble, and the correction sees that."""
    spec, here = decoder_job(global_batch_size=4), hardware(DeviceKind.VIRTUAL)
    two = ParallelLayout(dp=2)
    plan = Plan(engine=Engine.TORCH, layout=two, micro_batch_size=2, sequence_length=128)
    whole, sharded = (
        estimate(
            find_profile(read_plan_request(spec), here, plan),
            replace(plan, zero_stage=stage),
            here.device,
        )
        for stage in (ZeroStage.NONE, ZeroStage.PARAMETERS)
    )
    measured = 10 * whole.allocated_bytes
    factor = compute_activation_factor_of_peak(whole.moments, measured)
    assert correct_device_bytes(whole, factor) == pytest.approx(measured, abs=1)
    assert correct_device_bytes(sharded, factor) > 0.9 * measured


def test_a_plan_fits_unless_it_has_a_reason_against_it() -> None:
    front = find_frontier(
        read_plan_request(decoder_job()), hardware(DeviceKind.VIRTUAL, memory="256MiB")
    )
    learned = Calibration(correction=1.2)
    capacity = estimate_needed_device_bytes(front.candidates[len(front.candidates) // 2], learned)
    refuted = frozenset({front.candidates[-1].plan})
    accepted = [c for c in front.candidates if find_rejection_reason(c, capacity, learned) is None]
    assert accepted == list(list_fitting(front, capacity, learned))
    assert 0 < len(accepted) < len(front.candidates)
    untried = [candidate for candidate in accepted if candidate.plan not in refuted]
    assert untried == list(list_fitting(front, capacity, learned, refuted))


def test_torch_is_preferred_where_both_engines_would_do() -> None:
    spec = decoder_job(gpus=2)
    first = next(
        list_fitting(
            find_frontier(read_plan_request(spec), hardware(DeviceKind.VIRTUAL, memory="8GiB")),
            8 * 2**30,
            UNMEASURED,
        )
    )
    assert first.plan.engine is Engine.TORCH


def test_a_batch_that_no_allowed_number_of_devices_divides_is_refused_with_a_way_out() -> None:
    with pytest.raises(SpecError) as refused:
        find_frontier(read_plan_request(decoder_job(global_batch_size=7, gpus=11)), hardware())
    assert refused.value.path == "global_batch_size"
    assert "global_batch_size: 12" in refused.value.hint


def test_the_frontier_of_a_deep_model_steps_from_selective_to_full_checkpointing_layer_by_layer() -> (
    None
):
    """A plan that ran out of memory has a lighter neighbour, whose layers more often keep only their input."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    spec = decoder_job(
        model=ModelSpec(
            decoder=DecoderSpec(**dict(zip((*names, *heads), SIZES["70b"], strict=True)))
        ),
        data=DataSpec(text=("text",), sequence_length=8192),
        gpus=512,
        global_batch_size=512,
        precision="bf16",
    )
    fabric = replace(hardware(per_node=8, nodes=64), network_bandwidth=400_000_000_000)
    candidates = find_frontier(read_plan_request(spec), fabric).candidates
    alike = Plan(
        engine=Engine.TORCH,
        layout=ParallelLayout(dp=512),
        zero_stage=ZeroStage.PARAMETERS,
        micro_batch_size=1,
        precision=Precision.BF16,
        sequence_length=8192,
    )
    steps = [
        candidate
        for candidate in candidates
        if replace(candidate.plan, **WITHOUT_CHECKPOINTING) == alike
    ]
    steps = [candidate for candidate in steps if not candidate.plan.activation_offload]
    chain = [
        (candidate.plan.activation_checkpointing, candidate.plan.full_checkpointing_layers)
        for candidate in steps
    ]
    selective = ActivationCheckpointing.SELECTIVE
    assert chain[-8:] == [
        *((selective, layers) for layers in range(10, 80, 10)),
        (ActivationCheckpointing.FULL, 0),
    ]
    assert [candidate.estimate.device_bytes for candidate in steps] == sorted(
        (candidate.estimate.device_bytes for candidate in steps), reverse=True
    )


WITHOUT_CHECKPOINTING: dict[str, Any] = {
    "activation_checkpointing": ActivationCheckpointing.NONE,
    "full_checkpointing_layers": 0,
    "activation_offload": False,
}
SIZES = {  # vocabulary, hidden, feed-forward, layers, heads, key-value heads
    "7b": (32000, 4096, 11008, 32, 32, 32),
    "70b": (128256, 8192, 28672, 80, 64, 8),
    "405b": (128256, 16384, 53248, 126, 128, 8),
}


@pytest.mark.long
def test_a_search_over_512_times_the_devices_calls_at_most_15_times_as_many_functions() -> None:
    """A ratio of calls, and no seconds, which differ between machines: `make bench` measures them.

    It was 12.9 on 2026-11-20 and on 2026-11-28, while new kinds of plans had added a seventh to both numbers.
    """
    small, large = (count_calls(*search) for search in (("7b", 8, 64), ("405b", 4096, 4096)))
    assert large < 15 * small


def count_calls(model: str, gpus: int, batch: int) -> int:
    """Return how many functions a search calls that finds a plan that fits."""
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    heads = ("num_attention_heads", "num_key_value_heads")
    spec = decoder_job(
        model=ModelSpec(
            decoder=DecoderSpec(**dict(zip((*names, *heads), SIZES[model], strict=True)))
        ),
        data=DataSpec(text=("text",), sequence_length=4096),
        gpus={"min": 1, "max": gpus},
        global_batch_size=batch,
        precision="bf16",
    )
    machine = hardware(per_node=8, nodes=gpus // 8)
    with Profile() as recorded:
        front = find_frontier(read_plan_request(spec), machine)
    assert any(
        fits_device(candidate, machine.device.memory, UNMEASURED) for candidate in front.candidates
    )
    return int(Stats(recorded).total_calls)
