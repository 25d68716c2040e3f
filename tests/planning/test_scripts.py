"""How foreign scripts are planned and driven, and how a plan is explained."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.memory.calibration import UNMEASURED
from orchestrator.memory.profiles import profile_of
from orchestrator.planning.explain import breakdown, nearest, what_would_fit, why_nothing_fits
from orchestrator.planning.frontier import Candidate, fitting, needed_bytes
from orchestrator.planning.render import deepspeed_config, script_command
from orchestrator.planning.search import Hardware, frontier, plans
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job import JobSpec
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.plan import (
    ActivationCheckpointing,
    Engine,
    Offload,
    OffloadTarget,
    ParallelLayout,
    Plan,
    Precision,
    ZeroStage,
)

KNOBS = {
    "micro_batch_size": {"flag": "--batch", "default": 16},
    "gradient_accumulation_steps": {"env": "ACCUMULATION", "default": 1},
    "activation_checkpointing": {"switch": "--checkpoint"},
    "precision": {"flag": "--dtype", "values": {"bf16": "bfloat16", "fp32": "float32"}},
    "output_dir": {"flag": "--out"},
    "resume_from": {"flag": "--resume"},
}


def machine(kind: DeviceKind = DeviceKind.VIRTUAL, memory: str = "256MiB") -> Hardware:
    device = DeviceSpec(
        name="device",
        kind=kind,
        memory=memory,
        bf16_tflops=0.1,
        fp32_tflops=0.1,
        memory_bandwidth="8GB/s",
        link_bandwidth="1GB/s",
    )
    return Hardware(device=device, devices_per_node=2, nodes=1, network_bandwidth=10**9)


def script(**changed: object) -> JobSpec:
    said = {"name": "job", "gpus": 2, "global_batch_size": 32, "command": "python train.py --batch 64", "knobs": KNOBS}
    return JobSpec.model_validate(said | changed)


def decoder_job(hidden_size: int = 256, **changed: object) -> JobSpec:
    decoder = DecoderSpec(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=6,
        num_attention_heads=8,
    )
    data = DataSpec(text=("text",), sequence_length=128)
    said = {"name": "job", "gpus": 2, "global_batch_size": 16, "model": ModelSpec(decoder=decoder), "data": data}
    return JobSpec.model_validate(said | changed)


def fast_first(spec: JobSpec, hardware: Hardware) -> list[Candidate]:
    return list(fitting(frontier(spec, hardware), hardware.device.memory, UNMEASURED))


def test_an_unknown_script_starts_as_it_would_alone_and_gets_lighter_after_each_failure() -> None:
    first, *rest = fast_first(script(), machine())
    assert (first.plan.engine, first.plan.micro_batch_size) == (Engine.SCRIPT, 16)
    assert first.plan.gradient_accumulation_steps == 1
    assert [candidate.plan.micro_batch_size for candidate in rest][-1] == 1
    peaks = [candidate.estimate.device_bytes for candidate in (first, *rest)]
    assert peaks == sorted(peaks, reverse=True)
    assert profile_of(script(), precision=Precision.FP32, sequence_length=None) is None


def test_an_unknown_script_starts_as_it_would_alone_on_cuda_too() -> None:
    first = fast_first(script(), machine(DeviceKind.CUDA, "24GiB"))[0]
    assert (first.plan.micro_batch_size, first.plan.gradient_accumulation_steps) == (16, 1)


def test_only_declared_knobs_are_turned() -> None:
    bare = script(knobs={"micro_batch_size": {"flag": "--batch"}}, global_batch_size=32)
    found = {candidate.plan for candidate in frontier(bare, machine()).candidates}
    assert {(plan.micro_batch_size, plan.gradient_accumulation_steps) for plan in found} == {(16, 1)}
    assert {plan.activation_checkpointing for plan in found} == {ActivationCheckpointing.NONE}
    assert {plan.zero_stage for plan in found} == {ZeroStage.NONE}


def test_a_deepspeed_knob_opens_the_zero_stages_of_a_declared_script() -> None:
    profile = {"parameters": 10_000_000, "layers": 4, "activations_per_sample": "4MiB"}
    sharded = script(knobs=KNOBS | {"deepspeed_config": {"flag": "--deepspeed"}}, profile=profile)
    assert {plan.zero_stage for plan in plans(sharded, machine())} == set(ZeroStage)
    closest = nearest(frontier(sharded, machine()))
    assert closest is not None
    assert closest.plan.zero_stage is not ZeroStage.NONE, "what a stage saves is on the frontier"


def test_accumulation_that_cannot_divide_a_ranks_share_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        frontier(script(knobs={"gradient_accumulation_steps": {"flag": "-a", "default": 3}}), machine())
    assert refused.value.path == "knobs.gradient_accumulation_steps.default"


def test_knobs_come_after_the_users_own_arguments_in_the_scripts_words() -> None:
    plan = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=2),
        micro_batch_size=4,
        gradient_accumulation_steps=4,
        activation_checkpointing=ActivationCheckpointing.FULL,
        precision=Precision.BF16,
    )
    arguments, env = script_command(script(), plan, output_dir="/out", resume_from=None, deepspeed_config_path=None)
    assert arguments == (
        *("python", "train.py", "--batch", "64"),
        *("--batch", "4", "--checkpoint", "--dtype", "bfloat16", "--out", "/out"),
    )
    assert env == {"ACCUMULATION": "4"}


def test_a_switch_is_absent_where_nothing_is_recomputed() -> None:
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=2), micro_batch_size=16)
    arguments, _ = script_command(script(), plan, output_dir="o", resume_from="c", deepspeed_config_path=None)
    assert "--checkpoint" not in arguments
    assert arguments[-4:] == ("--resume", "c", "--out", "o")


@pytest.mark.parametrize("precision", Precision)
def test_a_switch_says_every_precision_but_fp32(precision: Precision) -> None:
    spec = script(knobs=KNOBS | {"precision": {"switch": "--mixed"}}, precision=precision)
    for one in plans(spec, machine()):
        arguments, _ = script_command(spec, one, output_dir="o", resume_from=None, deepspeed_config_path=None)
        assert one.precision is precision
        assert ("--mixed" in arguments) is (precision is not Precision.FP32)


@pytest.mark.parametrize(
    ("knob", "said"),
    [
        ({"switch": "--checkpoint"}, {"none", "full"}),
        ({"flag": "--recompute"}, {"none", "full"}),
        ({"flag": "--recompute", "values": {"selective": "some"}}, {"none", "selective", "full"}),
    ],
)
def test_a_script_recomputes_selectively_only_where_its_knob_has_a_word_for_it(
    knob: dict[str, object], said: set[str]
) -> None:
    spec = script(knobs=KNOBS | {"activation_checkpointing": knob})
    assert {one.activation_checkpointing.value for one in plans(spec, machine())} == said


@pytest.mark.parametrize(
    "knobs",
    [
        {"activation_checkpointing": {"switch": "-c", "values": {"selective": "s"}}},
        {"micro_batch_size": {"switch": "-b"}},
    ],
)
def test_a_switch_that_would_have_to_say_more_than_yes_or_no_is_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="switch"):
        script(knobs=knobs)


@pytest.mark.parametrize("optimizer", ["adafactor", "adamw_8bit"])
def test_no_zero_stage_is_offered_to_a_script_whose_optimizer_needs_whole_tensors(optimizer: str) -> None:
    knobs = KNOBS | {"deepspeed_config": {"flag": "--deepspeed"}}
    found = list(plans(script(knobs=knobs, training={"optimizer": optimizer}), machine(DeviceKind.CUDA)))
    assert {one.zero_stage for one in found} == {ZeroStage.NONE}


@pytest.mark.parametrize(
    "fields",
    [
        {"layout": ParallelLayout(pp=2), "gradient_accumulation_steps": 2},
        {
            "zero_stage": ZeroStage.PARAMETERS,
            "offload": Offload.PARAMETERS,
            "offload_target": OffloadTarget.NVME,
        },
    ],
    ids=["pp", "nvme"],
)
def test_what_no_script_can_be_told_is_no_plan(fields: dict[str, Any]) -> None:
    with pytest.raises(IllegalPlan, match="script"):
        Plan(engine=Engine.SCRIPT, micro_batch_size=1, **fields)


def test_a_deepspeed_file_says_clipping_and_the_three_batch_sizes() -> None:
    plan = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=2),
        zero_stage=ZeroStage.PARAMETERS,
        offload=Offload.PARAMETERS,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
    )
    config = deepspeed_config(plan, clip_norm=0.5)
    assert config["gradient_clipping"] == 0.5
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[size] for size in sizes] == [16, 4, 2]
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


def test_bytes_by_cause_add_up_to_what_the_device_must_hold() -> None:
    for candidate in frontier(decoder_job(), machine(DeviceKind.CUDA, "24GiB")).candidates:
        assert sum(count for _, count in breakdown(candidate.estimate)) == candidate.estimate.device_bytes


def test_the_nearest_plan_needs_the_least() -> None:
    found = frontier(decoder_job(), machine())
    closest = nearest(found)
    assert closest is not None
    assert closest.estimate.device_bytes == min(c.estimate.device_bytes for c in found.candidates)
    assert nearest(found, frozenset(c.plan for c in found.candidates)) is None


def test_every_way_to_fit_that_is_offered_really_fits() -> None:
    spec, hardware = decoder_job(hidden_size=768), machine()
    capacity = min(needed_bytes(c, UNMEASURED) for c in frontier(spec, hardware).candidates) - 2**20
    assert not list(fitting(frontier(spec, hardware), capacity, UNMEASURED))
    ways = what_would_fit(spec, hardware, capacity, UNMEASURED)
    assert ways[0].startswith("4 devices instead of 2")
    four = Hardware(device=hardware.device, devices_per_node=2, nodes=2, network_bandwidth=10**9)
    assert list(fitting(frontier(decoder_job(hidden_size=768, gpus=4), four), capacity, UNMEASURED))
    assert any(way.startswith("devices with at least") for way in ways)
    assert "worst moment" in why_nothing_fits(spec, hardware, capacity, UNMEASURED)


def test_a_declared_profile_wins_over_the_closed_form() -> None:
    spec = decoder_job(profile={"parameters": 1001, "layers": 4, "activations_per_sample": "4MiB"})
    profile = profile_of(spec, precision=Precision.FP32, sequence_length=64)
    assert profile is not None
    assert (profile.source, profile.parameters) == ("declared", 1001)
    assert sum(segment.count * segment.saved_bytes for segment in profile.segments) == 2 * 2**20, "half the tokens"
