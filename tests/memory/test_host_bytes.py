"""Laws of host memory: what a rank copies of a checkpoint, and what is offloaded besides."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile
from orchestrator.specs.choices import Engine, Offload, Optimizer, Precision
from orchestrator.specs.job.model import ModelSpec
from tests.memory.matrix import ADAPTED, DEEP, DEVICE, SEQUENCE_LENGTH, job, plan

SHARE = RankShare(precision=Precision.FP32, sequence_length=SEQUENCE_LENGTH)


def host_bytes(model: ModelSpec, engine: Engine, stage: int, dp: int, **fields: Any) -> int:
    profile = find_rank_profile(
        read_model_request(job(model)),
        SHARE,
    )
    assert profile is not None
    return estimate(profile, plan(engine, stage, 1, layout={"dp": dp}, **fields), DEVICE).host_bytes


@pytest.mark.parametrize(
    ("engine", "stage"), [(Engine.TORCH, 0), (Engine.TORCH, 3), (Engine.DEEPSPEED, 1)]
)
@pytest.mark.parametrize(("optimizer", "width"), [(Optimizer.ADAMW, 12), (Optimizer.SGD, 8)])
@pytest.mark.parametrize("model", [ModelSpec(decoder=DEEP), ADAPTED], ids=["whole", "adapters"])
def test_the_ranks_together_copy_what_is_trained_and_its_states_once(
    engine: Engine, stage: int, optimizer: Optimizer, width: int, model: ModelSpec
) -> None:
    profile = find_rank_profile(
        read_model_request(job(model)),
        SHARE,
    )
    assert profile is not None
    for dp in (2, 4):
        copied = dp * host_bytes(model, engine, stage, dp, optimizer=optimizer)
        assert 0 <= copied - width * profile.trained_parameters < dp


def test_offloading_comes_on_top_of_the_copy_and_a_script_copies_nothing() -> None:
    model = ModelSpec(decoder=DEEP)
    copied = host_bytes(model, Engine.DEEPSPEED, 3, 2)
    assert host_bytes(model, Engine.DEEPSPEED, 3, 2, offload=Offload.OPTIMIZER) > 2 * copied
    assert host_bytes(model, Engine.SCRIPT, 0, 2) == 0
