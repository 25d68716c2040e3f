"""Laws of a pipeline's stages under Megatron-LM, and under DeepSpeed's pipeline engine."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.foreign.activations import KEPT, WORKING
from orchestrator.memory.foreign.engines import estimate_foreign
from orchestrator.memory.foreign.frameworks import Framework
from orchestrator.memory.foreign.megatron import _layers_of, megatron_moments
from orchestrator.memory.foreign.platforms import platform_of
from orchestrator.memory.foreign.reserved import POOL_RATIO_KEPT, POOL_RATIO_LABELS
from orchestrator.memory.foreign.row import Row
from orchestrator.memory.foreign.training import Training
from orchestrator.training.allocator import Block
from tests.memory.foreign.parts import but
from tests.memory.foreign.test_engines import MEGATRON, read
from tests.memory.foreign.test_reserved import Allocator

MIB = 2**20
# experiments/gpt2-meg and gpt2-meg-ds-3d of bigscience-workshop/bigscience, 2021-06, on V100s of 32 GB
ROW = {"id": "x4", "framework": "Megatron-LM", "gpu": "V100 32GB", "tp": "4", "dp_or_fsdp": "1", "seq_len": "1024",
       "precision": "fp16", "act_ckpt": "full, every layer", "peft": ""}  # fmt: skip
PIPELINED = ROW | {"arch": "L64 h8192 a32 ffn32768 V50257(padded)", "n_gpus": "64", "pp": "16", "micro_batch": "4",
                   "grad_accum": "256", "framework": "Megatron-LM DeepSpeed pipeline engine on"}  # fmt: skip


def stage_of(row: dict[str, str], stage: int) -> Training:
    return read(**row, model=f"GPT2-Megatron, stage {stage}")


def backward_of(training: Training, stage: int) -> dict[str, int]:
    return dict(next(causes for name, causes, _ in megatron_moments(training, stage) if name == "backward"))


DEEPSPEED = replace(MEGATRON, framework=Framework.MEGATRON_DEEPSPEED, pp=4, dp=8, zero_stage=1)


def test_deepspeed_fills_one_stage_after_the_other() -> None:
    shape = replace(MEGATRON.shape, layers=78)
    uneven = replace(MEGATRON, framework=Framework.MEGATRON_DEEPSPEED, shape=shape, pp=12)
    # train/tr11-176B-ml/chronicles-prequel.md of bigscience-workshop/bigscience, "Re-do"
    assert [_layers_of(uneven, stage) for stage in range(12)] == 11 * [7] + [1]
    balanced = replace(uneven, shape=replace(shape, layers=70))
    assert [_layers_of(balanced, stage) for stage in range(12)] == [5, *10 * [6], 5]


def test_deepspeed_cuts_what_goes_to_the_next_stage_over_tensor_parallel_ranks() -> None:
    """Its logs of stages 1 to 8 fall by 272 MiB each: four layers of 64 MiB, and a quarter of their last output."""
    kept = [backward_of(stage_of(PIPELINED, stage), stage)[KEPT] for stage in (1, 2)]
    assert kept[0] - kept[1] == 272 * MIB


def test_the_first_stage_keeps_what_dropout_left_out_of_the_embedding() -> None:
    first, second = (backward_of(stage_of(PIPELINED, stage), stage)[KEPT] for stage in (0, 1))
    assert first - second == 272 * MIB + 16 * 32 * MIB


@pytest.mark.parametrize(
    ("arch", "pp", "stage", "measured_mib"),
    [
        ("L40 h6144 a32 ffn24576 V50257(padded)", 4, 0, 26204.6),
        ("L40 h6144 a32 ffn24576 V50257(padded)", 4, 3, 25791.8),
        ("L64 h9216 a32 ffn36864 V50257(padded)", 16, 0, 24762.8),
        ("L64 h16384 a32 ffn65536 V50257", 64, 0, 22769.7),
    ],
)
def test_the_gradient_of_the_table_comes_before_or_after_layers_work(
    arch: str, pp: int, stage: int, measured_mib: float
) -> None:
    row = ROW | {"arch": arch, "n_gpus": str(4 * pp), "pp": str(pp), "micro_batch": "1", "grad_accum": "4"}
    assert estimate_foreign(stage_of(row, stage)).allocated_bytes == pytest.approx(measured_mib * MIB, rel=1.5e-3)


def test_bf16_optimizer_reduces_a_copy_of_all_gradients_at_once() -> None:
    _, (_, reduction, _), _ = megatron_moments(but(replace(DEEPSPEED, pp=1), "megatron", fp32_gradients=True), 0)
    causes = dict(reduction)
    assert causes["flat gradients"] * 3 == causes["gradients"]  # 2 bytes beside 2 and 4


def test_what_deepspeed_puts_together_lies_beside_what_activations_had() -> None:
    training = DEEPSPEED
    (_, backward, pooled), (_, reduction, _), (_, step, _) = megatron_moments(training, 1)
    assert pooled == dict(reduction)["flat gradients"] + dict(step)["optimizer temporaries"]
    activations = dict(backward)[KEPT] + dict(backward)[WORKING]
    held = sum(count for _, count in backward) + pooled
    assert estimate_foreign(but(training, "megatron", stage=1)).reserved_bytes >= held + activations // 100


def test_deepspeed_copied_gradients_of_apex_one_by_one_until_2021_and_all_in_one_since() -> None:
    old, new = (platform_of(Row(PIPELINED | {"gpu": gpu}), Framework.MEGATRON_DEEPSPEED) for gpu in ("V100", "A100"))
    assert (old.apex_unfused, new.apex_unfused) == (True, False)
    steps = []
    for platform in (old, replace(old, apex_unfused=False)):
        *_, (_, causes, _) = megatron_moments(replace(stage_of(PIPELINED, 12), platform=platform), 12)
        steps.append(sum(count for _, count in causes))
    assert steps[0] == pytest.approx(15446.8 * MIB, rel=0.01)  # its log, after the first step
    assert steps[1] - steps[0] == pytest.approx(steps[0] / 5, rel=0.01)  # 24 bytes a parameter instead of 20


def test_zero_1_lets_go_of_the_gradients_of_others_before_it_steps() -> None:
    *_, (_, step, _) = megatron_moments(DEEPSPEED, 1)
    assert dict(step)["gradients"] == 0


def test_transformer_engine_has_a_workspace_of_its_own() -> None:
    row = {
        "framework": "Megatron-LM",
        "arch": "L12 h512 a8 ffn4x V50304",
        "n_gpus": "8",
        "precision": "bf16",
        "peft": "",
    }
    for gpu, size in (("H100 80GB", 32 * MIB), ("A100 80GB", 4 * MIB)):
        theirs, own = (read(**row, gpu=gpu, compile_or_other=other).platform for other in ("", "local"))
        assert theirs.workspace_bytes - own.workspace_bytes == size


def test_megatrons_own_attention_keeps_the_place_of_its_scores() -> None:
    row = {
        "framework": "Megatron-LM",
        "arch": "L12 h512 a8 ffn4x V50304",
        "n_gpus": "8",
        "precision": "bf16",
        "peft": "",
    }
    local = read(**row, micro_batch="4", seq_len="1024", compile_or_other="local")
    assert backward_of(local, 0)["buffers"] == 64 * MIB
    assert "buffers" not in {cause for cause, count in backward_of(read(**row), 0).items() if count}


def stage_ratio(hidden: int, ffn: int, layers: int, tp: int, pp: int) -> float:
    """Reserved over live bytes of a first stage that is checkpointed, after three steps of four times pp samples."""
    allocator, tokens = Allocator(), 2048
    take, give = allocator.take, allocator.give
    inside = [2 * tokens * width for width in (hidden, 3 * hidden // tp, hidden // tp, hidden, hidden // 2, hidden,
                                               hidden, ffn // tp, ffn // tp, hidden, hidden // 2)]  # fmt: skip

    def layer(*, backward: bool) -> None:
        blocks, waiting = [take(size) for size in inside], []
        for block in reversed(blocks):
            if backward:
                waiting.append(take(block.size))
            give(block)
            if len(waiting) > 2:
                give(waiting.pop(0))
        for block in waiting:
            give(block)

    for _ in range(3):
        in_flight: list[list[Block]] = []
        for turn in range(5 * pp - 1):
            if turn < 4 * pp:
                in_flight.append([])
                for _ in range(layers):
                    in_flight[-1].append(take(2 * tokens * hidden))
                    layer(backward=False)
            if turn >= pp - 1:
                for block in in_flight.pop(0):
                    layer(backward=True)
                    give(block)
    return allocator.reserved_bytes / allocator.peak_bytes


def test_what_waits_in_a_pipeline_wastes_next_to_nothing() -> None:
    shapes = ((14336, 57344, 6, 8, 12), (8192, 32768, 4, 4, 16), (4096, 16384, 8, 1, 4))
    assert max(stage_ratio(*shape) for shape in shapes) < 1.06
    training = replace(MEGATRON, pp=4, micro_batch_size=32)
    (_, backward, _), *_ = megatron_moments(training, 0)
    causes = dict(backward)
    found = estimate_foreign(but(training, "megatron", stage=0))
    wasted = (POOL_RATIO_KEPT - 1) * causes[KEPT] + (POOL_RATIO_LABELS - 1) * causes[WORKING]
    assert found.reserved_bytes - found.allocated_bytes == pytest.approx(wasted, rel=0.1)
