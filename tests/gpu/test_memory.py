"""Is a plan's peak what the planner said? Each measurement is printed as a line of JSON, to be kept as data."""

from __future__ import annotations

import gc
import json
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
pytest.importorskip("pydantic", reason="the planner reads job files with pydantic")

from orchestrator.memory.estimate import estimate  # noqa: E402
from orchestrator.memory.profiles import autocasts, profile_of  # noqa: E402
from orchestrator.specs.cluster import DeviceKind, DeviceSpec  # noqa: E402
from orchestrator.specs.job import JobSpec  # noqa: E402
from orchestrator.specs.model import DataSpec, DecoderSpec, ModelSpec, TrainingSpec  # noqa: E402
from orchestrator.specs.plan import ActivationCheckpointing, Offload, Plan, Precision, ZeroStage, in_short  # noqa: E402
from orchestrator.training.virtual_device import VirtualDevice  # noqa: E402
from tests.gpu.runs import plan, run_of, train  # noqa: E402

TOLERANCE = 0.1  # of the prediction, before any calibration
FULL, BF16, SHARDED = ActivationCheckpointing.FULL, Precision.BF16, ZeroStage.PARAMETERS
PLANS = (
    plan(4, 1),
    plan(4, 1, activation_checkpointing=FULL),
    plan(4, 1, precision=BF16),
    plan(4, 1, precision=BF16, zero_stage=SHARDED, activation_checkpointing=FULL),
    plan(4, 1, zero_stage=SHARDED, offload=Offload.PARAMETERS),
)
SHAPES = {  # hidden, feed-forward, layers, heads, tokens
    "cpu": (64, 192, 2, 4, 64),
    "cuda": (1024, 2816, 12, 16, 1024),
}


@pytest.mark.parametrize("chosen", PLANS, ids=in_short)
def test_the_peak_of_a_plan_is_as_predicted(
    tmp_path: Path, device: torch.device, chosen: Plan, capsys: pytest.CaptureFixture[str]
) -> None:
    if device.type == "cpu" and chosen.offload is not Offload.NONE:
        pytest.skip("a CPU has no host memory besides its own")
    hidden, wide, layers, heads, length = SHAPES[device.type]
    decoder = DecoderSpec(
        vocab_size=256,
        hidden_size=hidden,
        intermediate_size=wide,
        num_hidden_layers=layers,
        num_attention_heads=heads,
    )
    predicted = _predicted_bytes(decoder, length, chosen, device)
    text = tmp_path / "long.txt"
    text.write_text("All work and no play makes a dull corpus.\n" * 400)
    data = DataSpec(text=(str(text),), sequence_length=length)
    training = TrainingSpec(max_steps=3)
    measured = _peak_bytes(
        lambda: train(
            run_of(tmp_path, device, chosen, model=ModelSpec(decoder=decoder), data=data, training=training), device
        ),
        device,
    )
    name = torch.cuda.get_device_name(device) if device.type == "cuda" else "virtual device"
    line = {"device": name, "plan": in_short(chosen), "predicted_bytes": predicted, "measured_bytes": measured}
    if device.type == "cuda":
        with capsys.disabled():
            print(f"\n{json.dumps(line, ensure_ascii=False)}")
    assert measured == pytest.approx(predicted, rel=TOLERANCE)


def _predicted_bytes(decoder: DecoderSpec, length: int, chosen: Plan, device: torch.device) -> int:
    job = JobSpec(
        name="peak",
        global_batch_size=chosen.global_batch_size,
        precision=chosen.precision,
        model=ModelSpec(decoder=decoder),
        data=DataSpec(text=("x",), sequence_length=length),
    )
    profile = profile_of(job, precision=chosen.precision, sequence_length=length, autocast=autocasts(chosen))
    assert profile is not None
    kind = DeviceKind.CUDA if device.type == "cuda" else DeviceKind.VIRTUAL
    spec = DeviceSpec(
        name="one",
        kind=kind,
        memory="1TiB",
        bf16_tflops=1,
        fp32_tflops=1,
        memory_bandwidth="1TB/s",
        link_bandwidth="1TB/s",
    )
    return estimate(profile, chosen, spec).allocated_bytes


def _peak_bytes(work: object, device: torch.device) -> int:
    gc.collect()
    if device.type == "cpu":
        with VirtualDevice(2**50) as virtual:
            work()  # type: ignore[operator]
            return virtual.peak_bytes
    torch.cuda.empty_cache()
    torch.cuda.reset_peak_memory_stats(device)
    before = torch.cuda.memory_allocated(device)
    work()  # type: ignore[operator]
    return torch.cuda.max_memory_allocated(device) - before
