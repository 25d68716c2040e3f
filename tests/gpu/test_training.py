"""A single device trains the same way in every mode: precisions, sharding, offload, compilation, checkpointing."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest

torch = pytest.importorskip("torch")

from orchestrator.specs.choices import (  # noqa: E402
    ActivationCheckpointing,
    MasterWeights,
    Offload,
    Optimizer,
    Precision,
    ZeroStage,
)
from orchestrator.specs.plan import Plan  # noqa: E402
from tests.gpu import runs  # noqa: E402
from tests.gpu.runs import TRAINING, plan, run_of  # noqa: E402

FP32_TOLERANCE = {"cpu": 2e-6, "cuda": 2e-5}  # another order of sums in CUDA's kernels
LOW_TOLERANCE = 2e-3
BF16_WEIGHTS_TOLERANCE = 5e-3
SHARDED = ZeroStage.PARAMETERS
MODES = {
    "accumulation": plan(1, 8),
    "checkpointing": plan(activation_checkpointing=ActivationCheckpointing.FULL),
    "selective checkpointing": plan(activation_checkpointing=ActivationCheckpointing.SELECTIVE),
    "full in one layer": plan(
        activation_checkpointing=ActivationCheckpointing.SELECTIVE, full_checkpointing_layers=1
    ),
    "inputs of layers on host": plan(
        activation_checkpointing=ActivationCheckpointing.FULL, activation_offload=True
    ),
    "fsdp2 once a step": plan(zero_stage=ZeroStage.OPTIMIZER),
    "fsdp2": plan(zero_stage=SHARDED),
    "fsdp2 kept": plan(zero_stage=ZeroStage.GRADIENTS),
    "fsdp2 offload": plan(zero_stage=SHARDED, offload=Offload.PARAMETERS),
}
LOW_MODES = {
    "bf16": plan(precision=Precision.BF16),
    "bf16 fsdp2": plan(precision=Precision.BF16, zero_stage=SHARDED),
    "bf16 fsdp2 offload": plan(
        precision=Precision.BF16, zero_stage=SHARDED, offload=Offload.PARAMETERS
    ),
    "fp16": plan(precision=Precision.FP16),
    "fp16 fsdp2": plan(precision=Precision.FP16, zero_stage=SHARDED),
}


def losses(folder: Path, device: torch.device, chosen: Plan, **training: Any) -> list[float]:
    changed = dataclasses.replace(TRAINING, optimizer=chosen.optimizer, **training)
    return runs.train(run_of(folder, device, chosen, training=changed), device).losses


@pytest.mark.parametrize("mode", MODES)
def test_every_mode_gives_the_plain_losses(tmp_path: Path, device: torch.device, mode: str) -> None:
    plain = losses(tmp_path, device, plan())
    assert plain[-1] < plain[0] - 0.05
    expected = pytest.approx(plain, abs=FP32_TOLERANCE[device.type], rel=0)
    assert losses(tmp_path, device, MODES[mode]) == expected


@pytest.mark.parametrize("mode", LOW_MODES)
def test_low_precision_stays_near_the_plain_losses(
    tmp_path: Path, device: torch.device, mode: str
) -> None:
    expected = pytest.approx(losses(tmp_path, device, plan()), abs=LOW_TOLERANCE, rel=0)
    assert losses(tmp_path, device, LOW_MODES[mode]) == expected


def test_updates_within_the_backward_pass_give_the_plain_losses(
    tmp_path: Path, device: torch.device
) -> None:
    expected = pytest.approx(
        losses(tmp_path, device, plan(8, 1), clip_norm=None), abs=FP32_TOLERANCE[device.type], rel=0
    )
    assert (
        losses(tmp_path, device, plan(8, 1, optimizer_in_backward=True), clip_norm=None) == expected
    )


@pytest.mark.parametrize("sharded", [ZeroStage.NONE, SHARDED], ids=["", "fsdp2"])
def test_weights_held_in_bf16_stay_near_the_plain_losses(
    tmp_path: Path, device: torch.device, sharded: ZeroStage
) -> None:
    pytest.importorskip("torchao")
    narrow = plan(
        precision=Precision.BF16,
        optimizer=Optimizer.ADAMW_8BIT,
        master_weights=MasterWeights.BF16,
        zero_stage=sharded,
    )
    expected = pytest.approx(losses(tmp_path, device, plan()), abs=BF16_WEIGHTS_TOLERANCE, rel=0)
    assert losses(tmp_path, device, narrow) == expected


def test_a_cuda_device_gives_the_losses_of_the_cpu(tmp_path: Path, cuda: torch.device) -> None:
    expected = pytest.approx(
        losses(tmp_path, torch.device("cpu"), plan()), abs=FP32_TOLERANCE["cuda"], rel=0
    )
    assert losses(tmp_path, cuda, plan()) == expected


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.SGD, Optimizer.ADAFACTOR])
def test_every_optimizer_learns_and_is_fused_on_cuda(
    tmp_path: Path, device: torch.device, optimizer: Optimizer
) -> None:
    chosen = plan(optimizer=optimizer)
    training = dataclasses.replace(TRAINING, optimizer=optimizer, learning_rate=1e-2)
    trained = runs.train(run_of(tmp_path, device, chosen, training=training), device)
    assert trained.losses[-1] < trained.losses[0] - 0.05
    fused = trained.engine._updates.optimizer.defaults.get("fused")  # type: ignore[attr-defined]
    assert bool(fused) == (device.type == "cuda" and optimizer is not Optimizer.ADAFACTOR)


def test_compiled_layers_give_the_plain_losses(tmp_path: Path, cuda: torch.device) -> None:
    expected = pytest.approx(losses(tmp_path, cuda, plan()), abs=FP32_TOLERANCE["cuda"], rel=0)
    assert losses(tmp_path, cuda, plan(compiled=True)) == expected
    low = pytest.approx(losses(tmp_path, cuda, plan()), abs=LOW_TOLERANCE, rel=0)
    assert (
        losses(tmp_path, cuda, dataclasses.replace(LOW_MODES["bf16 fsdp2"], compiled=True)) == low
    )
