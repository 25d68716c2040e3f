"""Throughput of a decoder of 1B parameters on this device, printed as lines of JSON to keep as data."""

from __future__ import annotations

import dataclasses
import json
import statistics
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")

from orchestrator.specs.choices import ActivationCheckpointing, Precision, ZeroStage  # noqa: E402
from orchestrator.specs.job.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec  # noqa: E402
from orchestrator.specs.plan import Plan  # noqa: E402
from orchestrator.specs.settings import format_plan  # noqa: E402
from tests.gpu.runs import BILLION, SMALL, plan, run_of, train  # noqa: E402

# Dense bf16 FLOP/s of the data sheets, by a part of the name that CUDA gives.
PEAK_FLOPS = {"H200": 989e12, "H100": 989e12, "A100": 312e12, "L40S": 362e12, "B200": 2250e12}
BF16, FULL, SELECTIVE = (
    Precision.BF16,
    ActivationCheckpointing.FULL,
    ActivationCheckpointing.SELECTIVE,
)
PLANS = {
    "autocast": plan(2, 1, precision=BF16),
    "bf16 weights": plan(2, 1, precision=BF16, zero_stage=ZeroStage.GRADIENTS),
    "bf16 weights, selective": plan(
        4, 1, precision=BF16, zero_stage=ZeroStage.GRADIENTS, activation_checkpointing=SELECTIVE
    ),
    "bf16 weights, full": plan(
        8, 1, precision=BF16, zero_stage=ZeroStage.GRADIENTS, activation_checkpointing=FULL
    ),
}
STEPS = {"cpu": 3, "cuda": 12}
WARM_UP = 2  # steps


@pytest.mark.parametrize("compiled", [False, True], ids=["", "compiled"])
@pytest.mark.parametrize("name", PLANS)
def test_throughput_is_measured(
    tmp_path: Path,
    device: torch.device,
    name: str,
    compiled: bool,
    capsys: pytest.CaptureFixture[str],
) -> None:
    cpu = device.type == "cpu"
    if cpu and compiled:
        pytest.skip("compiles for minutes on a CPU")
    decoder, length = (SMALL, 32) if cpu else (BILLION, 4096)
    chosen = dataclasses.replace(PLANS[name], compiled=compiled)
    text = tmp_path / "long.txt"
    text.write_text("All work and no play makes a dull corpus.\n" * (100 if cpu else 20_000))
    run = run_of(
        tmp_path,
        device,
        chosen,
        model=ModelSpec(decoder=decoder),
        data=DataSpec(text=(str(text),), sequence_length=length),
        training=TrainingSpec(max_steps=STEPS[device.type], learning_rate=1e-4),
    )
    if not cpu:
        torch.cuda.reset_peak_memory_stats(device)
    trained = train(run, device)
    step_s = statistics.median(trained.step_s[WARM_UP:])
    flops = flops_per_step(decoder, length, chosen)
    device_name = "cpu" if cpu else torch.cuda.get_device_name(device)
    peak_flops = next((peak for part, peak in PEAK_FLOPS.items() if part in device_name), None)
    line = {
        "device": device_name,
        "torch": torch.__version__,
        "plan": format_plan(chosen),
        "compiled": compiled,
        "sequence_length": length,
        "parameters": sum(parameter.numel() for parameter in trained.recipe.module.parameters()),
        "step_s": step_s,
        "tokens_per_s": chosen.global_batch_size * length / step_s,
        "mfu": flops / step_s / peak_flops if peak_flops else None,
        "peak_bytes": None if cpu else torch.cuda.max_memory_allocated(device),
    }
    if not cpu:
        with capsys.disabled():
            print(f"\n{json.dumps(line, ensure_ascii=False)}")
    assert line["step_s"] > 0
    assert trained.losses[-1] < trained.losses[0]


def flops_per_step(decoder: DecoderSpec, length: int, chosen: Plan) -> float:
    """Model FLOPs of a step: 6 per parameter and token, and 12 x layers x hidden x length for attention's products.

    As in arXiv:2204.02311, appendix B; recomputation does not count, and causal attention counts in full, as torchtitan
    has it. Parameters are those that multiply: with tied embeddings the table once.
    """
    width = (
        decoder.head_dim * (decoder.num_attention_heads + 2 * decoder.kv_heads)
        + decoder.hidden_size
    )
    layer = decoder.hidden_size * (width + 3 * decoder.intermediate_size)
    parameters = decoder.num_hidden_layers * layer + decoder.vocab_size * decoder.hidden_size
    attention = 12 * decoder.num_hidden_layers * decoder.hidden_size * length
    return chosen.global_batch_size * length * (6.0 * parameters + attention)
