"""Laws of loops that people write themselves: what of the model's outputs lives on, and who cuts what under FSDP."""

from __future__ import annotations

from dataclasses import replace

import pytest

from orchestrator.memory.foreign.activations import head_bytes
from orchestrator.memory.foreign.published import described_row
from orchestrator.memory.foreign.training import Framework, Loss, Training

ROW = {
    "id": "x1",
    "model": "Llama-2 7B",
    "framework": "lightning-thunder benchmark_litgpt",
    "n_gpus": "8",
    "micro_batch": "1",
    "seq_len": "4096",
    "precision": "bf16-true",
    "act_ckpt": "False",
    "optimizer": "AdamW fused",
}


def read(**columns: str) -> Training:
    return described_row(ROW | columns).training


@pytest.mark.parametrize(
    ("sharding", "framework", "stage"),
    [
        ("FSDP FULL_SHARD (zero3)", Framework.FSDP1, 3),
        ("FSDP1 SHARD_GRAD_OP (zero2)", Framework.FSDP1, 2),
        ("FSDP2 zero2", Framework.FSDP2, 2),
        ("ZeRO-2", Framework.DEEPSPEED, 2),
        ("zero3", Framework.DEEPSPEED, 3),
    ],
)
def test_what_fsdp_calls_zero_is_not_deepspeed(sharding: str, framework: Framework, stage: int) -> None:
    training = read(sharding=sharding)
    assert (training.framework, training.zero_stage) == (framework, stage)


@pytest.mark.parametrize(
    ("loss", "bytes_of_a_logit", "held_bytes"), [(Loss.LABELS, 12, 14), (Loss.PLAIN, 12, 16), (Loss.LOW, 6, 8)]
)
def test_logits_that_a_loop_holds_are_beside_their_gradients(
    loss: Loss, bytes_of_a_logit: int, held_bytes: int
) -> None:
    training = replace(read(framework="HF Trainer"), loss=loss)
    logits = training.tokens * training.shape.vocab
    held = replace(training, holds_outputs=True)
    beside = head_bytes(training) - bytes_of_a_logit * logits
    assert head_bytes(held) - held_bytes * logits == beside
    assert 0 < beside < logits


def test_thunder_trains_the_models_of_litgpt_in_a_loop_of_its_own() -> None:
    thunder, litgpt = read(), read(framework="LitGPT pretrain")
    assert thunder.joint_projection
    assert litgpt.joint_projection
    assert (thunder.loss, litgpt.loss) == (Loss.LOW, Loss.LISTED)
    assert thunder.holds_outputs
    assert not litgpt.holds_outputs
