"""Laws of the plan: what cannot run together cannot be constructed and says why; every setting survives its file."""

from __future__ import annotations

import dataclasses
import itertools
import json
from typing import Any

import pytest

from orchestrator.specs.choices import (
    Engine,
    MasterWeights,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.from_json import from_json
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_plan, format_settings, list_changed_settings

TORCH, DEEPSPEED = Engine.TORCH, Engine.DEEPSPEED
ON_TWO, TENSOR, PIPELINE = ParallelLayout(dp=2), ParallelLayout(tp=2), ParallelLayout(pp=2)

EXCLUDED: dict[str, tuple[dict[str, Any], str]] = {
    "no micro-batch": ({"micro_batch_size": 0}, "at least 1"),
    "no stage": ({"pipeline_stages_per_rank": 0}, "at least 1"),
    "pipeline and ZeRO-3": (
        {"layout": PIPELINE, "zero_stage": ZeroStage.PARAMETERS, "gradient_accumulation_steps": 2},
        "zero_stage=3 with pp > 1",
    ),
    "too few micro-batches for the pipeline": (
        {"layout": PIPELINE},
        "cannot fill a pipeline of 2 ranks",
    ),
    "micro-batches that interleaved stages cannot share": (
        {"layout": PIPELINE, "pipeline_stages_per_rank": 2, "gradient_accumulation_steps": 5},
        "cannot go in 2 equal rounds",
    ),
    "layers of a last stage without a pipeline": ({"last_stage_layers": 3}, "need pp > 1"),
    "fewer layers than none": ({"layout": PIPELINE, "first_stage_layers": -1}, "at least 0"),
    "interleaved stages without a pipeline": ({"pipeline_stages_per_rank": 2}, "needs pp > 1"),
    "tensor parallel under DDP": (
        {"layout": ParallelLayout(dp=2, tp=2)},
        "DistributedDataParallel",
    ),
    "copies of nothing": ({"layout": ON_TWO, "dp_replicate": 2}, "hybrid sharding"),
    "copies that are all of dp": (
        {"layout": ON_TWO, "dp_replicate": 2, "zero_stage": ZeroStage.PARAMETERS},
        "leaves no equal shards",
    ),
    "torch at stage 1 of one micro-batch": (
        {"layout": ON_TWO, "zero_stage": ZeroStage.OPTIMIZER, "gradient_accumulation_steps": 1},
        "is zero_stage=2 on engine=torch",
    ),
    "torch at stage 1 under a pipeline": (
        {
            "layout": ParallelLayout(dp=2, pp=2),
            "zero_stage": ZeroStage.OPTIMIZER,
            "gradient_accumulation_steps": 2,
        },
        "reduces gradients once a step",
    ),
    "torch offloads the optimizer alone": (
        {"layout": ON_TWO, "zero_stage": ZeroStage.PARAMETERS, "offload": Offload.OPTIMIZER},
        "parameters and optimizer together",
    ),
    "torch to NVMe": (
        {
            "zero_stage": ZeroStage.PARAMETERS,
            "offload": Offload.PARAMETERS,
            "offload_target": OffloadTarget.NVME,
        },
        "host memory only",
    ),
    "NVMe without offload": ({"offload_target": OffloadTarget.NVME}, "needs an offload"),
    "offload without sharding": ({"offload": Offload.OPTIMIZER}, "zero_stage >= 1"),
    "parameters offloaded below stage 3": (
        {"engine": DEEPSPEED, "offload": Offload.PARAMETERS, "zero_stage": ZeroStage.GRADIENTS},
        "zero_stage=3",
    ),
    "DeepSpeed and tensor parallel": (
        {"engine": DEEPSPEED, "layout": TENSOR},
        "data parallel only",
    ),
    "DeepSpeed and pipeline": (
        {"engine": DEEPSPEED, "layout": PIPELINE, "gradient_accumulation_steps": 2},
        "data parallel only",
    ),
    "DeepSpeed, stage 0, bf16": (
        {"engine": DEEPSPEED, "precision": Precision.BF16},
        "bf16 needs zero_stage >= 1",
    ),
    "DeepSpeed, stage 0, fp16": (
        {"engine": DEEPSPEED, "precision": Precision.FP16},
        "fp16 needs zero_stage >= 1",
    ),
    "flat pieces and Adafactor": (
        {"engine": DEEPSPEED, "zero_stage": ZeroStage.OPTIMIZER, "optimizer": Optimizer.ADAFACTOR},
        "whole matrices",
    ),
    "DeepSpeed and 8-bit moments": (
        {"engine": DEEPSPEED, "zero_stage": ZeroStage.OPTIMIZER, "optimizer": Optimizer.ADAMW_8BIT},
        "engine=torch",
    ),
    "offload and 8-bit moments": (
        {
            "layout": ON_TWO,
            "zero_stage": ZeroStage.PARAMETERS,
            "offload": Offload.PARAMETERS,
            "optimizer": Optimizer.ADAMW_8BIT,
        },
        "offload=none",
    ),
    "master weights in bf16 beside fp32": (
        {"master_weights": MasterWeights.BF16, "optimizer": Optimizer.ADAMW_8BIT},
        "needs precision=bf16",
    ),
    "master weights in bf16 without stochastic rounding": (
        {"master_weights": MasterWeights.BF16, "precision": Precision.BF16},
        "needs optimizer=adamw_8bit",
    ),
    "DeepSpeed and master weights in bf16": (
        {
            "engine": DEEPSPEED,
            "zero_stage": ZeroStage.OPTIMIZER,
            "precision": Precision.BF16,
            "master_weights": MasterWeights.BF16,
        },
        "engine=torch",
    ),
}


@pytest.mark.parametrize(("fields", "reason"), EXCLUDED.values(), ids=EXCLUDED.keys())
def test_illegal_combinations_cannot_be_constructed_and_give_the_reason(
    fields: dict[str, Any], reason: str
) -> None:
    with pytest.raises(IllegalPlan, match=reason):
        Plan(**{"engine": TORCH, "micro_batch_size": 1, **fields})


def legal_plans(ranks: int) -> list[Plan]:
    """Every combination of settings on that many ranks that can be constructed."""
    degrees = [n for n in range(1, ranks + 1) if ranks % n == 0]
    legal = []
    for (
        engine,
        dp,
        tp,
        copies,
        stages,
        zero,
        offload,
        target,
        precision,
        optimizer,
    ) in itertools.product(
        (TORCH, DEEPSPEED),
        degrees,
        degrees,
        (1, 2),
        (1, 2),
        ZeroStage,
        Offload,
        OffloadTarget,
        Precision,
        Optimizer,
    ):
        if ranks % (dp * tp):
            continue
        try:
            plan = Plan(
                engine=engine,
                layout=ParallelLayout(dp=dp, tp=tp, pp=ranks // (dp * tp)),
                dp_replicate=copies,
                pipeline_stages_per_rank=stages,
                zero_stage=zero,
                offload=offload,
                offload_target=target,
                micro_batch_size=1,
                gradient_accumulation_steps=16,
                precision=precision,
                optimizer=optimizer,
            )
        except IllegalPlan:
            continue
        legal.append(plan)
    return legal


def test_every_plan_survives_its_file_and_reads_as_itself() -> None:
    plans = legal_plans(8)
    assert len(plans) > 100
    for plan in plans:
        assert from_json(Plan, json.loads(json.dumps(dataclasses.asdict(plan)))) == plan
    assert len({format_plan(plan) for plan in plans if plan.engine is TORCH}) == sum(
        p.engine is TORCH for p in plans
    )
    assert len({tuple(format_settings(plan).items()) for plan in plans}) == len(plans)
    assert all(list_changed_settings(first, other) for first, other in itertools.pairwise(plans))
