"""Plans, commands and explanations for foreign scripts."""

from __future__ import annotations

import io
from dataclasses import replace
from itertools import pairwise
from typing import Any

import pytest
from rich.console import Console

from orchestrator.memory.calibration.calibrate import UNMEASURED, Calibration
from orchestrator.memory.calibration.correction import (
    correct_allocated_bytes,
    correct_device_bytes,
    correct_estimate,
)
from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.explain import (
    explain_unfit_job,
    find_lightest_untried,
    list_bytes_by_cause,
)
from orchestrator.planning.frontier import Candidate, list_fitting
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.render import (
    render_accelerate_config,
    render_deepspeed_config,
    render_script_command,
)
from orchestrator.planning.request import read_plan_request, read_script_request
from orchestrator.planning.search import Hardware, find_frontier, list_plans
from orchestrator.planning.ways_out import UnfitJob
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.fit import iterate_fit_rows
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.terminal.fit_table import make_fit_panel
from orchestrator.service.terminal.plan_tables import make_plan_panel
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    OffloadTarget,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec, make_idle_nodes
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import Source
from orchestrator.specs.settings import list_changed_settings

PROFILE = {"parameters": 10_000_000, "layers": 10, "activations_per_sample": "4MiB"}
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
    fields = {
        "name": "job",
        "gpus": 2,
        "global_batch_size": 32,
        "command": "python train.py --batch 64",
        "knobs": KNOBS,
    }
    return JobSpec.model_validate(fields | changed)


def decoder_job(hidden_size: int = 256, **changed: object) -> JobSpec:
    decoder = DecoderSpec(
        vocab_size=512,
        hidden_size=hidden_size,
        intermediate_size=3 * hidden_size,
        num_hidden_layers=6,
        num_attention_heads=8,
    )
    data = DataSpec(text=("text",), sequence_length=128)
    fields = {
        "name": "job",
        "gpus": 2,
        "global_batch_size": 16,
        "model": ModelSpec(decoder=decoder),
        "data": data,
    }
    return JobSpec.model_validate(fields | changed)


def fast_first(spec: JobSpec, hardware: Hardware) -> list[Candidate]:
    return list(
        list_fitting(
            find_frontier(read_plan_request(spec), hardware), hardware.device.memory, UNMEASURED
        )
    )


def test_an_unknown_script_starts_as_it_would_alone_and_gets_lighter_after_each_failure() -> None:
    first, *rest = fast_first(script(), machine())
    assert (first.plan.engine, first.plan.micro_batch_size) == (Engine.SCRIPT, 16)
    assert first.plan.gradient_accumulation_steps == 1
    assert [candidate.plan.micro_batch_size for candidate in rest][-1] == 1
    peaks = [candidate.estimate.device_bytes for candidate in (first, *rest)]
    assert peaks == sorted(peaks, reverse=True)
    assert (
        find_rank_profile(read_model_request(script()), RankShare(precision=Precision.FP32)) is None
    )


def test_an_unknown_script_starts_as_it_would_alone_on_cuda_too() -> None:
    first = fast_first(script(), machine(DeviceKind.CUDA, "24GiB"))[0]
    assert (first.plan.micro_batch_size, first.plan.gradient_accumulation_steps) == (16, 1)


def test_only_declared_knobs_are_turned() -> None:
    bare = script(knobs={"micro_batch_size": {"flag": "--batch"}}, global_batch_size=32)
    legal_plans = {
        candidate.plan for candidate in find_frontier(read_plan_request(bare), machine()).candidates
    }
    assert {(plan.micro_batch_size, plan.gradient_accumulation_steps) for plan in legal_plans} == {
        (16, 1)
    }
    assert {plan.activation_checkpointing for plan in legal_plans} == {ActivationCheckpointing.NONE}
    assert {plan.zero_stage for plan in legal_plans} == {ZeroStage.NONE}


def test_a_script_that_derives_accumulation_gets_only_its_micro_batch() -> None:
    """The script is like litgpt, which divides its global batch by ranks and micro-batch."""
    knobs = {
        "micro_batch_size": {"flag": "--train.micro_batch_size", "default": 16},
        "global_batch_size": {"flag": "--train.global_batch_size"},
        "gradient_accumulation_steps": "derived",
    }
    spec = script(knobs=knobs)
    cut = {
        (plan.micro_batch_size, plan.gradient_accumulation_steps)
        for plan in list_plans(read_plan_request(spec), machine())
    }
    assert cut == {(micro_batch, 16 // micro_batch) for micro_batch in (1, 2, 4, 8, 16)}
    four = next(
        plan
        for plan in list_plans(read_plan_request(spec), machine())
        if plan.micro_batch_size == 4 and plan.world_size == 2
    )
    command = render_script_command(
        read_script_request(spec),
        four,
        output_dir="/out",
        resume_from=None,
        deepspeed_config_path=None,
    )
    assert command.arguments[4:] == (
        "--train.micro_batch_size",
        "4",
        "--train.global_batch_size",
        "32",
    )
    assert command.env == {}


def test_accumulation_is_derived_from_a_micro_batch_that_the_script_can_take() -> None:
    with pytest.raises(ValueError, match="cannot be told"):
        script(knobs={"gradient_accumulation_steps": "derived"})


@pytest.mark.parametrize(
    "left_out", [["gradient_accumulation_steps"], ["micro_batch_size"], [*KNOBS]]
)
def test_a_refusal_names_the_batch_knobs_that_are_missing_and_what_to_write(
    left_out: list[str],
) -> None:
    profile = {"parameters": 1_000_000, "layers": 4, "activations_per_sample": "16MiB"}
    knobs = {name: knob for name, knob in KNOBS.items() if name not in left_out}
    spec = script(knobs=knobs, profile=profile, gpus=1)
    why = explain_unfit_job(UnfitJob(spec, machine(), machine().device.memory, UNMEASURED))
    for name in ("micro_batch_size", "gradient_accumulation_steps"):
        assert (f"knobs.{name}: {{flag: --FLAG" in why) == (name in left_out), why
    assert "not given, so no plan may cut the micro-batch of 32" in why
    whole = script(profile=profile | {"activations_per_sample": "1GiB"}, gpus=1)
    assert "knobs." not in explain_unfit_job(
        UnfitJob(whole, machine(), machine().device.memory, UNMEASURED)
    )


def test_a_deepspeed_knob_opens_the_zero_stages_of_a_declared_script() -> None:
    profile = {"parameters": 10_000_000, "layers": 4, "activations_per_sample": "4MiB"}
    sharded = script(knobs=KNOBS | {"deepspeed_config": {"flag": "--deepspeed"}}, profile=profile)
    assert {plan.zero_stage for plan in list_plans(read_plan_request(sharded), machine())} == set(
        ZeroStage
    )
    closest = find_lightest_untried(
        find_frontier(read_plan_request(sharded), machine()), UNMEASURED
    )
    assert closest is not None
    assert closest.plan.zero_stage is not ZeroStage.NONE, "what a stage saves is on the frontier"


def test_accumulation_that_cannot_divide_a_ranks_share_is_refused() -> None:
    with pytest.raises(SpecError) as refused:
        find_frontier(
            read_plan_request(
                script(knobs={"gradient_accumulation_steps": {"flag": "-a", "default": 3}})
            ),
            machine(),
        )
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
    arguments, env, _ = render_script_command(
        read_script_request(script()),
        plan,
        output_dir="/out",
        resume_from=None,
        deepspeed_config_path=None,
    )
    assert arguments == (
        *("python", "train.py", "--batch", "64"),
        *("--batch", "4", "--checkpoint", "--dtype", "bfloat16", "--out", "/out"),
    )
    assert env == {"ACCUMULATION": "4"}


def test_a_switch_is_absent_where_nothing_is_recomputed() -> None:
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=2), micro_batch_size=16)
    arguments, *_ = render_script_command(
        read_script_request(script()),
        plan,
        output_dir="o",
        resume_from="c",
        deepspeed_config_path=None,
    )
    assert "--checkpoint" not in arguments
    assert arguments[-4:] == ("--resume", "c", "--out", "o")


@pytest.mark.parametrize("precision", Precision)
def test_a_switch_selects_every_precision_but_fp32(precision: Precision) -> None:
    spec = script(knobs=KNOBS | {"precision": {"switch": "--mixed"}}, precision=precision)
    for plan in list_plans(read_plan_request(spec), machine()):
        arguments, *_ = render_script_command(
            read_script_request(spec),
            plan,
            output_dir="o",
            resume_from=None,
            deepspeed_config_path=None,
        )
        assert plan.precision is precision
        assert ("--mixed" in arguments) is (precision is not Precision.FP32)


@pytest.mark.parametrize(
    ("knob", "modes"),
    [
        ({"switch": "--checkpoint"}, {"none", "full"}),
        ({"flag": "--recompute"}, {"none", "full"}),
        ({"flag": "--recompute", "values": {"selective": "some"}}, {"none", "selective", "full"}),
    ],
)
def test_a_script_recomputes_selectively_only_if_its_knob_has_a_value_for_it(
    knob: dict[str, object], modes: set[str]
) -> None:
    spec = script(knobs=KNOBS | {"activation_checkpointing": knob})
    assert {
        plan.activation_checkpointing.value
        for plan in list_plans(read_plan_request(spec), machine())
    } == modes


@pytest.mark.parametrize(
    "knobs",
    [
        {"activation_checkpointing": {"switch": "-c", "values": {"selective": "s"}}},
        {"micro_batch_size": {"switch": "-b"}},
    ],
)
def test_a_switch_with_more_than_two_values_is_refused(knobs: dict[str, object]) -> None:
    with pytest.raises(ValueError, match="switch"):
        script(knobs=knobs)


# facebookresearch/audiocraft: a global batch, shards of its own, autocast only without them
MUSICGEN = {
    "micro_batch_size": {"override": "dataset.batch_size", "per": "global"},
    "zero_stage": {
        "override": "fsdp.use",
        "values": {0: False, 2: True, 3: True},
        "also": [
            {
                "override": "fsdp.sharding_strategy",
                "values": {0: None, 2: "shard_grad_op", 3: "full_shard"},
            },
            {"override": "autocast", "values": {0: True, 2: False, 3: False}},
        ],
    },
}


def plan_arguments(spec: JobSpec, plan: Plan, **changes: Any) -> tuple[str, ...]:
    """Return the arguments that follow the user's own command."""
    settings = {"output_dir": "o", "resume_from": None, "deepspeed_config_path": None} | changes
    assert spec.command is not None
    return render_script_command(read_script_request(spec), plan, **settings).arguments[
        len(spec.command) :
    ]


def test_a_switch_goes_together_with_another_and_a_global_batch_counts_all_ranks() -> None:
    spec = script(knobs=MUSICGEN, command="dora run solver=x", launch="dora")
    commands = {
        plan.zero_stage: plan_arguments(spec, plan)
        for plan in list_plans(read_plan_request(spec), machine())
        if plan.layout.dp == 2
    }
    assert commands == {
        ZeroStage.NONE: ("dataset.batch_size=32", "fsdp.use=false", "autocast=true"),
        ZeroStage.GRADIENTS: (
            *("dataset.batch_size=32", "fsdp.use=true"),
            *("fsdp.sharding_strategy=shard_grad_op", "autocast=false"),
        ),
        ZeroStage.PARAMETERS: (
            *("dataset.batch_size=32", "fsdp.use=true"),
            *("fsdp.sharding_strategy=full_shard", "autocast=false"),
        ),
    }
    assert {
        plan.sharding for plan in list_plans(read_plan_request(spec), machine()) if plan.zero_stage
    } == {Sharding.FSDP}


def test_one_setting_drives_several_knobs_and_a_phase_has_a_batch_of_its_own() -> None:
    knob = {
        "flag": "--train-batch",
        "also": [
            {"flag": "--collate-batch"},
            {"flag": "--codec-batch", "phase": "encoding", "default": 8},
            {"flag": "--eval-batch", "phase": "evaluation", "default": 16},
        ],
    }
    spec = script(
        knobs={"micro_batch_size": knob}, phases={"encoding": "Encode", "evaluation": "Eval"}
    )
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=2), micro_batch_size=4)
    train = ("--train-batch", "4", "--collate-batch", "4")
    assert plan_arguments(spec, plan) == (*train, "--codec-batch", "8", "--eval-batch", "16")
    lowered = replace(plan, phase_batch_sizes=(("encoding", 2),))
    assert plan_arguments(spec, lowered) == (*train, "--codec-batch", "2", "--eval-batch", "16")
    assert [str(change) for change in list_changed_settings(plan, lowered)] == [
        "encoding_batch_size - -> 2"
    ]


def test_a_script_that_multiplies_its_batch_by_its_ranks_gets_the_share() -> None:
    knobs = {
        "micro_batch_size": {"flag": "-bs", "multiplied_by_ranks": True},
        "devices": {"flag": "-g", "separator": "-"},
    }
    spec = script(knobs=knobs, launch="self", global_batch_size=8)
    (plan,) = list_plans(read_plan_request(spec), machine())
    assert (plan.micro_batch_size, plan.layout.dp) == (4, 2)
    assert plan_arguments(spec, plan, node_devices=(1, 3)) == ("-bs", "2", "-g", "1-3")
    with pytest.raises(SpecError):
        find_frontier(
            read_plan_request(script(knobs=knobs, launch="self", global_batch_size=6)), machine()
        )


def test_a_script_that_spawns_its_ranks_stays_on_one_node() -> None:
    two_nodes = replace(machine(), nodes=2)
    for launch, most in (("self", 2), ("torchrun", 4)):
        spec = script(launch=launch, gpus={"min": 1, "max": 4})
        assert (
            max(plan.world_size for plan in list_plans(read_plan_request(spec), two_nodes)) == most
        )


def test_a_batch_per_node_counts_the_nodes_ranks() -> None:
    spec = script(
        knobs={
            "micro_batch_size": {"flag": "-b", "per": "node"},
            "ranks": {"flag": "-n", "per": "node"},
        }
    )
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=4), micro_batch_size=3)
    assert plan_arguments(spec, plan, node_devices=(0, 1)) == ("-b", "6", "-n", "2")


def test_keys_of_a_config_file_are_distinguished_from_words_of_the_command() -> None:
    knobs = {"micro_batch_size": {"key": "data.batch_size"}, "output_dir": {"key": "data.out"}}
    spec = script(knobs=knobs, config={"file": "unet.yaml", "flag": "--config"})
    plan = Plan(engine=Engine.SCRIPT, layout=ParallelLayout(dp=2), micro_batch_size=16)
    command = render_script_command(
        read_script_request(spec),
        plan,
        output_dir="/out",
        resume_from=None,
        deepspeed_config_path=None,
        config_path="/attempt/unet.yaml",
    )
    assert command.keys == {"data.batch_size": "16", "data.out": "/out"}
    assert command.arguments[-2:] == ("--config", "/attempt/unet.yaml")


@pytest.mark.parametrize(
    ("way", "stage", "kind", "expected"),
    [
        ("fsdp", ZeroStage.NONE, "MULTI_GPU", "bf16"),
        ("fsdp", ZeroStage.PARAMETERS, "FSDP", "FULL_SHARD"),
        ("fsdp", ZeroStage.GRADIENTS, "FSDP", "SHARD_GRAD_OP"),
        ("deepspeed", ZeroStage.OPTIMIZER, "DEEPSPEED", "/attempt/deepspeed.json"),
    ],
)
def test_accelerates_file_has_the_plans_sharding(
    way: str, stage: ZeroStage, kind: str, expected: str
) -> None:
    knobs = {"micro_batch_size": {"flag": "-b"}, "zero_stage": {"accelerate": way}}
    spec = script(knobs=knobs, launch="accelerate", precision="bf16")
    plan = next(
        plan for plan in list_plans(read_plan_request(spec), machine()) if plan.zero_stage is stage
    )
    assert plan_arguments(spec, plan) == ("-b", "16"), "nothing of it stands on the command line"
    config = render_accelerate_config(
        spec.knobs, plan, deepspeed_config_path="/attempt/deepspeed.json"
    )
    assert config["distributed_type"] == kind
    assert expected in str(config)


@pytest.mark.parametrize(
    ("more", "is_timed"),
    [
        ({}, False),
        ({"speeds": {"1": "2s"}}, True),
        ({"profile": PROFILE | {"forward_flops_per_sample": 1e12}}, True),
    ],
)
def test_a_declared_script_has_step_times_only_where_its_flops_or_speeds_are_told(
    more: dict[str, Any], is_timed: bool
) -> None:
    spec = script(**{"gpus": 1, "profile": PROFILE} | more)
    (row, *_) = (
        row for row in iterate_fit_rows([("as a script", spec)]) if row["device"] == "rtx4090-24gb"
    )
    assert (row["step_s"] is not None) == is_timed
    nodes = make_idle_nodes(parse_cards("rtx4090"))
    output = io.StringIO()
    Console(file=output, width=120).print(make_plan_panel(plan_job(spec, nodes)))
    assert ("time not known until the first attempt" in output.getvalue()) != is_timed


@pytest.mark.parametrize(("most", "is_noted"), [(2, True), (8, False)])
def test_the_fit_table_says_where_it_names_more_cards_than_the_job_allows(
    most: int, *, is_noted: bool
) -> None:
    knobs = KNOBS | {"zero_stage": {"flag": "--shard"}}
    profile = {"parameters": 4_000_000_000, "layers": 20, "activations_per_sample": "4MiB"}
    spec = script(gpus={"min": 1, "max": most}, profile=profile, knobs=knobs)
    rows = [
        row for row in iterate_fit_rows([("as a script", spec)]) if row["device"] == "rtx3090-24gb"
    ]
    assert (rows[0]["devices"] or 0) > 2
    output = io.StringIO()
    Console(file=output, width=200).print(make_fit_panel(spec, rows, is_memory_assumed=False))
    assert ("The job allows 2" in output.getvalue()) == is_noted


@pytest.mark.parametrize(
    ("way", "offloads"), [({"accelerate": "fsdp"}, True), ({"flag": "-z"}, False)]
)
def test_fsdp_of_accelerate_is_told_to_keep_all_on_the_host(
    way: dict[str, str], offloads: bool
) -> None:
    profile = {"parameters": 1_000_000_000, "layers": 10, "activations_per_sample": "4MiB"}
    knobs = {"micro_batch_size": {"flag": "-b"}, "zero_stage": way}
    spec = script(knobs=knobs, profile=profile, launch="accelerate", precision="bf16")
    cuda = machine(DeviceKind.CUDA, memory="24GiB")
    fsdp = [
        plan for plan in list_plans(read_plan_request(spec), cuda) if plan.sharding is Sharding.FSDP
    ]
    on_host = [plan for plan in fsdp if plan.offload is not Offload.NONE]
    assert bool(on_host) == offloads
    assert {(plan.offload, plan.zero_stage) for plan in on_host} <= {
        (Offload.PARAMETERS, ZeroStage.PARAMETERS)
    }
    assert {plan.gradient_accumulation_steps for plan in on_host} <= {1}
    for plan in fsdp if offloads else ():
        config = render_accelerate_config(spec.knobs, plan, deepspeed_config_path=None)
        assert config["fsdp_config"]["fsdp_offload_params"] == (plan.offload is Offload.PARAMETERS)
    assert not any(
        plan.offload is not Offload.NONE
        for plan in list_plans(read_plan_request(spec), machine(memory="24GiB"))
    )


def test_what_fsdp_keeps_on_the_host_is_counted_there() -> None:
    profile = {"parameters": 1_000_000_000, "layers": 10, "activations_per_sample": "4MiB"}
    knobs = {"micro_batch_size": {"flag": "-b"}, "zero_stage": {"accelerate": "fsdp"}}
    spec = script(
        knobs=knobs, profile=profile, launch="accelerate", precision="bf16", plan={"zero_stage": 3}
    )
    cuda = machine(DeviceKind.CUDA, memory="24GiB")
    of_pin = {
        offload: find_frontier(
            read_plan_request(spec.model_copy(update={"plan": (*spec.plan, ("offload", offload))})),
            cuda,
        ).candidates
        for offload in (Offload.NONE, Offload.PARAMETERS)
    }
    here, there = (
        min(candidate.estimate.device_bytes for candidate in of_pin[offload]) for offload in of_pin
    )
    assert there < here - 4_000_000_000, "16 bytes of a parameter over at most four devices"
    assert (
        min(candidate.estimate.host_bytes for candidate in of_pin[Offload.PARAMETERS])
        > 4_000_000_000
    )


def test_what_is_sharded_by_fsdp_is_counted_as_fsdp() -> None:
    profile = {"parameters": 100_000_000, "layers": 10, "activations_per_sample": "4MiB"}
    knobs = {"micro_batch_size": {"flag": "-b"}, "zero_stage": {"flag": "-z"}}
    spec = script(knobs=knobs, profile=profile, precision="bf16")
    sharded = [
        candidate
        for candidate in find_frontier(read_plan_request(spec), machine(memory="24GiB")).candidates
        if candidate.plan.zero_stage
    ]
    assert {candidate.plan.sharding for candidate in sharded} == {Sharding.FSDP}
    causes = {cause for candidate in sharded for cause, _ in candidate.estimate.by_cause}
    assert "master weights" not in causes, "FSDP's parameters are its fp32 masters"


def legal_plans_of(optimizer: str) -> list[Plan]:
    knobs = KNOBS | {"deepspeed_config": {"flag": "--deepspeed"}}
    job = script(knobs=knobs, training={"optimizer": optimizer})
    return list(list_plans(read_plan_request(job), machine(DeviceKind.CUDA)))


def test_no_zero_stage_is_offered_to_a_script_whose_optimizer_needs_whole_tensors() -> None:
    assert {plan.zero_stage for plan in legal_plans_of("adafactor")} == {ZeroStage.NONE}


def test_moments_in_8_bits_are_sharded_and_never_offloaded() -> None:
    legal_plans = legal_plans_of("adamw_8bit")
    assert {plan.zero_stage for plan in legal_plans} == set(ZeroStage)
    assert {plan.offload for plan in legal_plans} == {Offload.NONE}


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
def test_settings_that_no_script_can_take_make_no_plan(fields: dict[str, Any]) -> None:
    with pytest.raises(IllegalPlan, match="script"):
        Plan(engine=Engine.SCRIPT, micro_batch_size=1, **fields)


def test_a_deepspeed_file_has_clipping_and_the_three_batch_sizes() -> None:
    plan = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=2),
        zero_stage=ZeroStage.PARAMETERS,
        offload=Offload.PARAMETERS,
        micro_batch_size=4,
        gradient_accumulation_steps=2,
    )
    config = render_deepspeed_config(plan, clip_norm=0.5)
    assert config["gradient_clipping"] == 0.5
    sizes = ("train_batch_size", "train_micro_batch_size_per_gpu", "gradient_accumulation_steps")
    assert [config[size] for size in sizes] == [16, 4, 2]
    assert config["zero_optimization"]["offload_param"]["device"] == "cpu"


@pytest.mark.parametrize("correction", [1.0, 1.003, 3.0, 1e3])
def test_bytes_by_cause_add_up_to_what_the_device_must_hold_as_corrected(correction: float) -> None:
    for candidate in find_frontier(
        read_plan_request(decoder_job()),
        machine(DeviceKind.CUDA, "24GiB"),
        Calibration(correction=correction),
    ).candidates:
        estimate = correct_estimate(candidate.estimate, correction)
        assert sum(count for _, count in list_bytes_by_cause(estimate)) == estimate.device_bytes
        assert estimate.device_bytes == correct_device_bytes(candidate.estimate, correction)
        assert estimate.allocated_bytes == correct_allocated_bytes(candidate.estimate, correction)
        counted = [count for cause, count in estimate.by_cause if cause != "activations"]
        assert (estimate.moment, sum(counted)) in {
            (
                candidate.estimate.moment,
                sum(c for cause, c in candidate.estimate.by_cause if cause != "activations"),
            ),
            *((moment.name, moment.counted_bytes) for moment in candidate.estimate.moments),
        }


def test_the_nearest_plan_needs_the_least() -> None:
    front = find_frontier(read_plan_request(decoder_job()), machine())
    closest = find_lightest_untried(front, UNMEASURED)
    assert closest is not None
    assert closest.estimate.device_bytes == min(c.estimate.device_bytes for c in front.candidates)
    assert (
        find_lightest_untried(front, UNMEASURED, frozenset(c.plan for c in front.candidates))
        is None
    )


def test_a_script_that_names_the_model_it_trains_is_costed_by_it_with_a_loss_that_holds_all_logits() -> (
    None
):
    decoder_spec = decoder_job()
    named = script(trains=decoder_spec.model, data={"sequence_length": 128})
    decoder_profile = find_rank_profile(
        read_model_request(decoder_spec), RankShare(precision=Precision.FP32)
    )
    theirs = find_rank_profile(read_model_request(named), RankShare(precision=Precision.FP32))
    assert decoder_profile is not None
    assert theirs is not None
    assert theirs.parameters == decoder_profile.parameters
    assert theirs.segments[:-1] == decoder_profile.segments[:-1]
    more = theirs.segments[-1], decoder_profile.segments[-1]
    (unchunked, chunked), logits = (
        [segment.saved_bytes + segment.transient_bytes for segment in more],
        128 * 512,
    )
    assert unchunked - chunked == 12 * logits, "fp32 logits, their log-softmax and their gradient"
    shorter = find_rank_profile(
        read_model_request(named), RankShare(precision=Precision.FP32, sequence_length=64)
    )
    assert shorter is not None
    assert shorter.segments[-1].saved_bytes < theirs.segments[-1].saved_bytes
    candidates = find_frontier(
        read_plan_request(script(trains=decoder_spec.model, data={"sequence_length": 128})),
        machine(),
    ).candidates
    assert {candidate.estimate.source for candidate in candidates} == {Source.CLOSED_FORM}


def test_a_declared_profile_wins_over_the_closed_form() -> None:
    spec = decoder_job(profile={"parameters": 1001, "layers": 4, "activations_per_sample": "4MiB"})
    profile = find_rank_profile(
        read_model_request(spec), RankShare(precision=Precision.FP32, sequence_length=64)
    )
    assert profile is not None
    assert (profile.source, profile.parameters) == ("declared", 1001)
    assert sum(segment.count * segment.saved_bytes for segment in profile.segments) == 2 * 2**20, (
        "half the tokens"
    )


NONE = ActivationCheckpointing.NONE
MEGATRON = {
    "trainer": "megatron",
    "command": "python pretrain_gpt.py --bf16",
    "trains": {
        "decoder": {
            "vocab_size": 512,
            "hidden_size": 256,
            "intermediate_size": 768,
            "num_hidden_layers": 8,
            "num_attention_heads": 8,
        }
    },
    "data": {"sequence_length": 512},
}


def test_the_more_first_layers_a_script_recomputes_the_slower_it_is_and_the_less_it_needs() -> None:
    spec = parse_job_data({"name": "job", "gpus": 1, "global_batch_size": 16, **MEGATRON}, "job")
    here = machine(DeviceKind.CUDA, "80GiB")
    whole = [
        plan for plan in list_plans(read_plan_request(spec), here) if plan.micro_batch_size == 16
    ]
    steps = [
        (plan.activation_checkpointing.value, plan.full_checkpointing_layers) for plan in whole
    ]
    assert sorted(steps) == [("full", 0), ("none", 0), ("none", 2), ("none", 4), ("none", 6)]
    partial = sorted(
        (plan for plan in whole if plan.activation_checkpointing is NONE),
        key=lambda plan: plan.full_checkpointing_layers,
    )
    full = next(plan for plan in whole if plan.activation_checkpointing is not NONE)
    profile = find_profile(read_plan_request(spec), here, full)
    times = [predict_step_s(profile, plan, here) for plan in (*partial, full)]
    needs = [estimate(profile, plan, here.device).allocated_bytes for plan in (*partial, full)]
    assert times == sorted(times)
    assert needs == sorted(needs, reverse=True)
    saved = [first - second for first, second in pairwise(needs[:4])]
    assert saved == [saved[0]] * 3
    layer = max(profile.segments, key=lambda segment: segment.count)
    assert saved[0] >= 2 * 16 * (layer.saved_bytes - layer.checkpointed_bytes) > 0


def test_a_script_without_a_knob_recomputes_all_layers_or_none() -> None:
    spec = parse_job_data({"name": "job", "gpus": 1, "global_batch_size": 16, **MEGATRON}, "job")
    knobs = spec.knobs.model_copy(update={"full_checkpointing_layers": None})
    bare = spec.model_copy(update={"knobs": knobs})
    assert {
        plan.full_checkpointing_layers for plan in list_plans(read_plan_request(bare), machine())
    } == {0}
    with pytest.raises(SpecError, match="no knob of the script takes this"):
        parse_job_data(
            {**MEGATRON, "name": "job", "global_batch_size": 16, "trainer": "hf"}
            | {"plan": {"full_checkpointing_layers": 2}},
            "job",
        )


def test_a_script_that_always_shards_has_no_plan_that_holds_all_on_several_ranks() -> None:
    fields = {
        "name": "job",
        "gpus": 2,
        "global_batch_size": 16,
        **MEGATRON,
        "trainer": "torchtitan",
    }
    legal_plans = list(
        list_plans(
            read_plan_request(parse_job_data(fields, "job")), machine(DeviceKind.CUDA, "80GiB")
        )
    )
    assert {plan.zero_stage for plan in legal_plans} == {ZeroStage.GRADIENTS, ZeroStage.PARAMETERS}
