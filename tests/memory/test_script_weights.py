"""Laws of scripts: their trainer and the type of their weights change the estimates of their plans."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from orchestrator.memory.profiles import make_decoder_profile
from orchestrator.service.commands.plan import CandidateView, estimate_plan, parse_plan
from orchestrator.service.intake.intake import read_job
from orchestrator.service.intake.profiling import TraceScope
from orchestrator.specs.choices import Optimizer, Precision
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.model import DecoderSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.profile import TracedProfile

LLAMA = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 1024,
    "intermediate_size": 2816,
    "num_hidden_layers": 8,
    "num_attention_heads": 8,
    "num_key_value_heads": 8,
}
PROFILE = {
    "parameters": 540_000_000,
    "layers": 24,
    "activations_per_sample": "8GiB",
    "checkpointed_per_sample": "2GiB",
}
ONE_LAYER = {key: value for key, value in PROFILE.items() if key != "layers"}
FULL = {"dp": "1", "micro_batch_size": "1", "activation_checkpointing": "full"}
FSDP = {"dp": "2", "micro_batch_size": "1", "activation_checkpointing": "full", "zero_stage": "3"}


def answer(plan: dict[str, str], command: str = "python train.py", **more: Any) -> CandidateView:
    job = {
        "name": "script",
        "command": command,
        "trainer": "hf",
        "gpus": int(plan["dp"]),
        "global_batch_size": int(plan["dp"]),
        "precision": "bf16",
        "trains": {"hf": LLAMA},
        "data": {"sequence_length": 2048},
        **more,
    }
    node = {"name": "node", "devices": 2, "device": "a100-80gb", "host_memory": "1TiB"}
    cluster = ClusterSpec.model_validate({"name": "two", "nodes": [node]})
    return estimate_plan(parse_job_data(job, "test"), list(plan.items()), make_idle_nodes(cluster))


TRACED = {
    "model_type": "stablelm",
    "vocab_size": 20_000,
    "hidden_size": 64,
    "intermediate_size": 192,
    "num_hidden_layers": 6,
    "num_attention_heads": 4,
    "num_key_value_heads": 4,
}


def answer_of_folder(
    folder: Path, plan: dict[str, str], command: str = "python train.py", **trains: Any
) -> CandidateView:
    """Return the estimate of a script that trains a family without a closed form, whose sizes lie in a folder."""
    (folder / "model").mkdir(exist_ok=True)
    (folder / "model" / "config.json").write_text(json.dumps(TRACED))
    (folder / "train.py").touch()
    job = {
        "name": "script",
        "command": command,
        "trainer": "hf",
        "global_batch_size": 4,
        "precision": "bf16",
        "trains": {"hf": str(folder / "model"), **trains},
        "data": {"sequence_length": 512},
    }
    file = folder / "job.yaml"
    file.write_text(json.dumps(job))

    def scope(spec: JobSpec) -> TraceScope:
        return TraceScope(cuda=(True,), plan=parse_plan(spec, list(plan.items())))

    spec = read_job(file, cache_home=folder, to_run=False, trace_scope=scope)
    node = {"name": "node", "devices": 1, "device": "a100-80gb", "host_memory": "1TiB"}
    cluster = ClusterSpec.model_validate({"name": "one", "nodes": [node]})
    return estimate_plan(spec, list(plan.items()), make_idle_nodes(cluster))


@pytest.mark.long
def test_a_traced_family_of_a_script_is_held_as_the_script_holds_it(tmp_path: Path) -> None:
    plan = {"dp": "1", "micro_batch_size": "4"}
    wide = answer_of_folder(tmp_path, plan)["estimate"]["by_cause"]
    narrow = answer_of_folder(tmp_path, plan, weights="bf16")["estimate"]["by_cause"]
    for cause in ("parameters", "optimizer states"):
        assert narrow[cause] == pytest.approx(wide[cause] / 2, rel=1e-3)
    # a script's own loss holds the logits of all tokens in fp32, and their gradient
    fused = answer_of_folder(tmp_path, plan, "python train.py --use_liger_kernel true")
    logits = 4 * 512 * TRACED["vocab_size"]
    assert wide["activations"] - fused["estimate"]["by_cause"]["activations"] > 6 * logits


def test_a_script_completes_the_configuration_of_its_published_model(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(LLAMA))
    (tmp_path / "train.py").touch()
    config = {"vocab_size": 7, "attention_bias": True}
    job = {
        "name": "script",
        "command": "python train.py",
        "global_batch_size": 1,
        "trains": {"hf": str(tmp_path), "config": config},
        "data": {"sequence_length": 8},
    }
    (tmp_path / "job.yaml").write_text(json.dumps(job))
    trains = read_job(tmp_path / "job.yaml", cache_home=tmp_path, to_run=False).trains
    assert trains is not None
    assert trains.config == LLAMA | config


def test_weights_in_bf16_count_for_a_traced_profile_too() -> None:
    decoder = {name: size for name, size in LLAMA.items() if name != "model_type"}
    profile = make_decoder_profile(DecoderSpec(**decoder), "script", Precision.BF16, 2048, 1, False)
    traced = [
        TracedProfile(sequence_length=2048, autocast=autocast, cuda=True, profile=profile)
        for autocast in (False, True)
    ]
    wide, narrow = (
        answer(FULL, trains={"factory": "m.py:f", "weights": word}, traced=traced)["estimate"]
        for word in ("fp32", "bf16")
    )
    for cause in ("parameters", "optimizer states"):
        assert narrow["by_cause"][cause] == wide["by_cause"][cause] / 2


def test_a_script_that_nobody_measured_fits_by_the_error_that_others_saw() -> None:
    replies = [
        answer(FULL | {"micro_batch_size": str(micro)}, global_batch_size=8) for micro in (1, 8)
    ]
    light, heavy = (reply["reported_fit_probability"] for reply in replies)
    assert light is not None
    assert heavy is not None
    assert 0.9 < heavy < light < 1


@pytest.mark.parametrize("plan", [FULL, FSDP])
def test_weights_in_bf16_halve_parameters_and_states(plan: dict[str, str]) -> None:
    wide = answer(plan)["estimate"]["by_cause"]
    narrow = answer(plan, trains={"hf": LLAMA, "weights": "bf16"})["estimate"]["by_cause"]
    for cause in ("parameters", "optimizer states"):
        assert narrow[cause] == pytest.approx(wide[cause] / 2, rel=1e-6)


def test_deepspeed_keeps_fp32_masters_of_weights_in_bf16() -> None:
    knobs = {"deepspeed_config": {"flag": "--deepspeed"}, "zero_stage": None}
    answers = [
        answer(FSDP, knobs=knobs, trains={"hf": LLAMA, "weights": word})
        for word in ("fp32", "bf16")
    ]
    wide, narrow = (reply["estimate"]["by_cause"]["optimizer states"] for reply in answers)
    assert wide == narrow


@pytest.mark.parametrize("knob", ["deepspeed_config", "zero_stage"])
def test_moments_in_8_bits_are_sharded_like_others(knob: str) -> None:
    knobs = {"zero_stage": None, knob: {"flag": "--shard"}}
    causes = {
        (rule, ranks): answer(
            {**FSDP, "dp": str(ranks)}, training={"optimizer": rule}, knobs=knobs
        )["estimate"]["by_cause"]["optimizer states"]
        for rule in ("adamw", "adamw_8bit")
        for ranks in (1, 2)
    }
    assert causes["adamw_8bit", 2] == pytest.approx(causes["adamw_8bit", 1] / 2, rel=0.01)
    # those of embedding and head stay in fp32
    assert causes["adamw_8bit", 2] < 0.6 * causes["adamw", 2]


def test_zero_3_updates_a_shard_of_billions_in_groups() -> None:
    wide = {**LLAMA, "hidden_size": 8192, "intermediate_size": 24576, "num_attention_heads": 64}
    knobs = {"deepspeed_config": {"flag": "--deepspeed"}, "zero_stage": None}
    trains = {"hf": wide | {"num_key_value_heads": 64, "num_hidden_layers": 12}}
    estimate = answer(FSDP, knobs=knobs, trains=trains)["estimate"]
    (step,) = [moment for moment in estimate["by_moment"] if moment["name"] == "optimizer step"]
    shard = estimate["by_cause"]["optimizer states"] // 8
    assert shard > 4e9
    # weights and gradients in bf16, masters and moments in fp32; of a group its gradients, joined and in fp32
    least = (2 + 2 + 4 + 8) * shard + (2 + 4) * 10**9
    assert least < step["counted_bytes"] < 1.02 * least


def test_a_fused_loss_is_the_trainers_own() -> None:
    command = "python train.py --use_liger_kernel true"
    adapted = {"hf": LLAMA, "lora": {"rank": 8}}
    plain, fused = (
        answer(FULL, line, trains=adapted)["estimate"] for line in ("python train.py", command)
    )
    assert plain["allocated_bytes"] - fused["allocated_bytes"] > 4 * 2048 * 32000
    knobs = {
        "micro_batch_size": {"flag": "--batch"},
        "activation_checkpointing": {"switch": "--checkpointing"},
    }
    loops = [
        answer(FULL, line, trains=adapted, trainer=None, knobs=knobs)
        for line in ("python train.py", command)
    ]
    assert loops[0]["estimate"] == loops[1]["estimate"]


def test_transformers_trainer_holds_the_inputs_of_frozen_fsdp_units() -> None:
    deep = {**LLAMA, "vocab_size": 1000, "num_hidden_layers": 32}
    trains = {"hf": deep, "lora": {"rank": 8}}
    knobs = {
        "micro_batch_size": {"flag": "--batch"},
        "activation_checkpointing": {"switch": "--checkpointing"},
        "zero_stage": {"flag": "--shard"},
    }
    trainer_bytes = answer(FSDP, trains=trains)["estimate"]["by_cause"]["activations"]
    loop_bytes = answer(FSDP, trains=trains, trainer=None, knobs=knobs, launch="torchrun")[
        "estimate"
    ]["by_cause"]
    boundary_bytes = 2 * 2048 * 1024
    assert trainer_bytes - loop_bytes["activations"] > 20 * boundary_bytes


@pytest.mark.parametrize(
    "source",
    [
        {"trains": {"hf": LLAMA}},
        {"trains": None, "profile": PROFILE},
        {"trains": None, "profile": ONE_LAYER},
    ],
)
def test_every_optimizer_has_its_own_states_in_each_profile_of_a_script(
    source: dict[str, Any],
) -> None:
    of_rule = {
        rule.value: answer(FULL, training={"optimizer": rule.value}, **source)["estimate"][
            "by_cause"
        ]
        for rule in Optimizer
    }
    states = {rule: causes["optimizer states"] for rule, causes in of_rule.items()}
    assert states["adafactor"] < min(states["adamw_8bit"], states["sgd"])
    assert max(states["adamw_8bit"], states["sgd"]) < states["adamw"]
    if "profile" in source:
        assert states["adamw_8bit"] == pytest.approx(2 * PROFILE["parameters"], rel=0.05)


@pytest.mark.parametrize(
    ("setting", "value"), [("activation_checkpointing", "none"), ("micro_batch_size", "2")]
)
def test_settings_of_a_declared_script_change_its_bytes(setting: str, value: str) -> None:
    source = {"trains": None, "profile": PROFILE, "global_batch_size": 2}
    usual, changed = answer(FULL, **source), answer({**FULL, setting: value}, **source)
    assert changed["estimate"]["allocated_bytes"] > usual["estimate"]["allocated_bytes"]


@pytest.mark.parametrize("weights", ["fp16", "int8"])
def test_weights_are_fp32_or_as_the_job_computes(weights: str) -> None:
    with pytest.raises(SpecError, match="weights"):
        answer(FULL, trains={"hf": LLAMA, "weights": weights})


def test_our_own_models_keep_fp32_masters() -> None:
    with pytest.raises(SpecError, match="weights"):
        parse_job_data(
            {
                "name": "ours",
                "global_batch_size": 1,
                "precision": "bf16",
                "model": {"hf": LLAMA, "weights": "bf16"},
                "data": {"text": ["a"]},
            },
            "test",
        )
