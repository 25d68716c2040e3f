"""A script's own keys of its DeepSpeed file: every plan writes them, and memory counts their buffers."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.backends.attempts.workdir import rewrite_config
from orchestrator.planning.render import (
    render_accelerate_config,
    render_deepspeed_config,
    render_script_command,
)
from orchestrator.service.commands.plan import CandidateView, estimate_plan
from orchestrator.specs.choices import Engine, ZeroStage
from orchestrator.specs.cluster import ClusterSpec, make_idle_nodes
from orchestrator.specs.deepspeed_file import KEYS_OF_PLAN
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.plan import ParallelLayout, Plan

WIDTH = 2  # bytes of a bf16 gradient
NODE = {
    "name": "node",
    "count": 1,
    "devices": 2,
    "device": "a100-80gb",
    "host_memory": "1TiB",
}
MODEL = {
    "model_type": "llama",
    "vocab_size": 1024,
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
}
GRADIENTS = 2 * 1024 * 256 + 4 * (4 * 256 * 256 + 3 * 256 * 768) + 9 * 256
STAGES = st.sampled_from([1, 2, 3])
OWN_KEYS = st.fixed_dictionaries(
    {},
    optional={
        "gradient_clipping": st.floats(0.1, 10.0),
        "optimizer": st.fixed_dictionaries(
            {"type": st.sampled_from(["AdamW", "Lamb"]), "params": st.just({"lr": 1e-4})}
        ),
        "aio": st.just({"block_size": 4096}),
        "communication_data_type": st.sampled_from(["fp16", "auto"]),
    },
)


def script(**changed: Any) -> JobSpec:
    fields = {
        "name": "job",
        "command": "python train.py",
        "gpus": 2,
        "global_batch_size": 8,
        "precision": "bf16",
        "knobs": {"deepspeed_config": {"flag": "--deepspeed"}},
        "trains": {"hf": MODEL},
        "data": {"sequence_length": 64},
    }
    return parse_job_data(fields | changed, "test")


def script_plan(stage: int) -> Plan:
    return Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=2),
        zero_stage=ZeroStage(stage),
        micro_batch_size=4,
    )


def answer(stage: int, **changed: Any) -> CandidateView:
    cluster = ClusterSpec.model_validate({"name": "cluster", "nodes": [NODE]})
    settings = [("dp", "2"), ("micro_batch_size", "4"), ("zero_stage", str(stage))]
    return estimate_plan(script(**changed), settings, make_idle_nodes(cluster))


@pytest.mark.parametrize("stage", [1, 2, 3])
@pytest.mark.parametrize("overlap", [None, False, True])
def test_memory_counts_the_buckets_that_a_script_asks_for(stage: int, overlap: bool | None) -> None:
    elements = 400_000_000
    keys: dict[str, Any] = {"reduce_bucket_size": float(elements)}
    if overlap is not None:
        keys["overlap_comm"] = overlap
    sets = 2 if overlap or (overlap is None and stage == 3) else 1
    estimate = answer(stage, deepspeed={"zero_optimization": keys})["estimate"]
    buckets = dict(estimate["by_cause"])["gradient buckets"]
    # Beside the buckets lie copies of what is reduced, which is no more than all gradients.
    assert 0 <= buckets - WIDTH * sets * elements <= WIDTH * GRADIENTS


def test_auto_and_no_keys_give_our_own_buckets() -> None:
    automatic = {"reduce_bucket_size": "auto", "sub_group_size": "auto", "overlap_comm": "auto"}
    for stage in (1, 2, 3):
        assert answer(stage, deepspeed={"zero_optimization": automatic}) == answer(stage)


@given(OWN_KEYS, STAGES)
def test_a_plans_file_has_every_key_of_the_script_and_its_own_settings(
    keys: dict[str, Any], stage: int
) -> None:
    spec = script(deepspeed=keys)
    plan = script_plan(stage)
    config = render_deepspeed_config(plan, clip_norm=None, job_keys_json=spec.deepspeed)
    plain = render_deepspeed_config(plan, clip_norm=None)
    for name, value in keys.items():
        assert config[name] == value
    for name in plain.keys() - keys.keys():
        assert config[name] == plain[name]
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec


@pytest.mark.parametrize("key", KEYS_OF_PLAN)
def test_a_key_that_a_plan_decides_is_refused_by_its_name(key: str) -> None:
    keys: Any = 1
    for name in reversed(key.split(".")):
        keys = {name: keys}
    with pytest.raises(SpecError, match="each plan decides this key") as error:
        script(deepspeed=keys)
    assert key in str(error.value)


@pytest.mark.parametrize("size", [-1, 0.5, True, "5e8", 1e300, [1], None])
def test_a_size_that_is_no_number_of_elements_is_refused(size: object) -> None:
    with pytest.raises(SpecError, match="number of elements"):
        script(deepspeed={"zero_optimization": {"reduce_bucket_size": size}})


def test_keys_without_a_file_to_go_to_are_refused() -> None:
    with pytest.raises(SpecError, match="no DeepSpeed file"):
        script(
            deepspeed={"gradient_clipping": 1.0}, knobs={"micro_batch_size": {"flag": "--batch"}}
        )


@given(STAGES, st.sampled_from(["", "engine."]))
def test_a_script_with_a_file_of_its_own_gets_the_stage_and_the_sizes_in_a_copy(
    stage: int, section: str
) -> None:
    sizes = {"reduce_bucket_size": 2_000_000, "overlap_comm": False}
    spec = script(
        knobs={"zero_stage": {"key": f"{section}zero_optimization.stage"}},
        config={"file": "ds.json", "flag": "--deepspeed"},
        deepspeed={"zero_optimization": sizes},
        plan={"zero_stage": stage},
    )
    rendered = render_script_command(
        spec,
        script_plan(stage),
        output_dir="out",
        resume_from=None,
        deepspeed_config_path=None,
        config_path="copy.json",
    )
    written = json.loads(rewrite_config("{}", rendered.keys, is_json=True))
    if section:
        written = written["engine"]
    assert written == {"zero_optimization": {"stage": stage, **sizes}}
    assert rendered.arguments[-2:] == ("--deepspeed", "copy.json")
    launched = render_accelerate_config(spec.knobs, script_plan(stage), deepspeed_config_path=None)
    assert launched["distributed_type"] == "MULTI_GPU", "the script starts DeepSpeed itself"
