"""Trainings whose peak is to be measured on a device, from 0.1 to 8 billion parameters and up to the edge of memory."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from orchestrator.memory.calibration.calibrate import UNMEASURED, estimate_needed_bytes
from orchestrator.memory.engines.overhead import estimate_overhead_bytes
from orchestrator.memory.estimate import estimate
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile, uses_autocast
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    Optimizer,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.model import DataSpec, LoraSpec, ModelSpec, TrainingSpec
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, ModelProfile
from tests.gpu.runs import BILLION

GIB = 2**30
H100 = json.loads((Path(__file__).parent / "measured/h100-80gb.json").read_text())
H200 = json.loads((Path(__file__).parent / "measured/h200-141gb.json").read_text())
CHOICES = {
    "precision": Precision,
    "zero_stage": ZeroStage,
    "activation_checkpointing": ActivationCheckpointing,
}
# in the second, optimizer states and activations are there together; the third finds the caches
# full
STEPS = 3
MICRO_BATCH_MAX = 1024
CARD_80GB, CARD_141GB = (
    78 * GIB,
    138 * GIB,
)  # a little below what is free on them: 79.2 GiB on an H100 (2026-11-26)
BEYOND = 1.05  # a prediction so far above the capacity that the training ought to run out of memory

FP32 = Plan(engine=Engine.TORCH, micro_batch_size=1)
BF16 = replace(FP32, precision=Precision.BF16)
FP16 = replace(FP32, precision=Precision.FP16)
SELECTIVE = replace(BF16, activation_checkpointing=ActivationCheckpointing.SELECTIVE)
FULL = replace(BF16, activation_checkpointing=ActivationCheckpointing.FULL)
SHARDED = replace(BF16, zero_stage=ZeroStage.PARAMETERS)  # over one rank: what FSDP2 itself keeps
SHARDED_FULL = replace(FULL, zero_stage=ZeroStage.PARAMETERS)
OFFLOADED = replace(SHARDED_FULL, offload=Offload.PARAMETERS)
SGD = replace(BF16, optimizer=Optimizer.SGD)
ADAFACTOR = replace(BF16, optimizer=Optimizer.ADAFACTOR)
EIGHT_BIT = replace(BF16, optimizer=Optimizer.ADAMW_8BIT)
EIGHT_BIT_FULL = replace(FULL, optimizer=Optimizer.ADAMW_8BIT)


@dataclass(frozen=True, slots=True, kw_only=True)
class Measurement:
    """A training: `steps` steps of a model at a length under a plan, on a device with so many bytes."""

    name: str
    model: ModelSpec
    sequence_length: int
    plan: Plan
    capacity_bytes: int
    steps: int = STEPS

    @property
    def training(self) -> TrainingSpec:
        return TrainingSpec(max_steps=self.steps, optimizer=self.plan.optimizer)

    def profile(self, kind: DeviceKind) -> ModelProfile:
        """Return the planner's profile, before it has learned anything."""
        job = JobSpec(
            name="measured",
            global_batch_size=self.plan.global_batch_size,
            precision=self.plan.precision,
            model=self.model,
            data=DataSpec(text=("x",), sequence_length=self.sequence_length),
            training=self.training,
        )
        profile = find_rank_profile(
            read_model_request(job),
            RankShare(
                precision=self.plan.precision,
                sequence_length=self.sequence_length,
                autocast=uses_autocast(self.plan),
                cuda=kind is DeviceKind.CUDA,
            ),
        )
        assert profile is not None, "these models have a closed form"
        return profile

    def predict(self, kind: DeviceKind) -> MemoryEstimate:
        """Return the planner's estimate of the memory, before it has learned anything."""
        return estimate(self.profile(kind), self.plan, device_of(kind))

    def allocator_bytes(self, kind: DeviceKind) -> int:
        """Return the bytes that PyTorch's allocator may hold, as if the device had `capacity_bytes`."""
        return self.capacity_bytes - (
            estimate_overhead_bytes(self.plan) if kind is DeviceKind.CUDA else 0
        )

    def fits(self, kind: DeviceKind) -> bool:
        """Return whether the planner expects the training to fit."""
        return (
            estimate_needed_bytes(self.plan, self.predict(kind), UNMEASURED) <= self.capacity_bytes
        )


def measured_at(peak: dict[str, Any]) -> Measurement:
    """The training of a line of `measured/*.json` whose peak was taken apart."""
    model = (
        ModelSpec(decoder=BILLION)
        if peak["model"].startswith("decoder")
        else ModelSpec(hf=MODELS[peak["model"]])
    )
    settings = {name: CHOICES.get(name, int)(value) for name, value in peak["plan"].items()}
    return Measurement(
        name=peak["model"],
        model=model,
        sequence_length=peak["tokens"],
        plan=Plan(engine=Engine.TORCH, **settings),
        capacity_bytes=H100["device"]["total_bytes"],
    )


def device_of(kind: DeviceKind) -> DeviceSpec:
    """A device of which only its kind counts."""
    return DeviceSpec(
        name="one",
        kind=kind,
        memory="1TiB",  # type: ignore[arg-type]
        bf16_tflops=1,
        fp32_tflops=1,
        memory_bandwidth="1TB/s",  # type: ignore[arg-type]
        link_bandwidth="1TB/s",  # type: ignore[arg-type]
    )


def _llama(
    hidden: int, wide: int, layers: int, heads: int, groups: int, vocab_size: int
) -> dict[str, object]:
    return {
        "model_type": "llama",
        "hidden_size": hidden,
        "intermediate_size": wide,
        "num_hidden_layers": layers,
        "num_attention_heads": heads,
        "num_key_value_heads": groups,
        "vocab_size": vocab_size,
    }


TINY = _llama(64, 192, 3, 4, 2, 512)
MODELS = {
    "0.1B": _llama(768, 2048, 12, 12, 12, 32000),
    "0.4B": _llama(1024, 2816, 24, 16, 16, 32000),
    "1.3B": _llama(2048, 5504, 24, 16, 16, 32000),
    "3B": _llama(3072, 8192, 28, 24, 8, 32000),
    "8B": _llama(4096, 14336, 32, 32, 8, 128256),
}
LORA, QLORA = LoraSpec(rank=16), LoraSpec(rank=16, quantise_base=True)
EVERY = (FP32, BF16, FP16, SELECTIVE, FULL, SHARDED, SGD, ADAFACTOR, EIGHT_BIT)
# model, tokens, bytes of the device, adapters, plans, which micro-batches
GRID = (
    ("0.1B", 1024, 24 * GIB, None, EVERY, "half edge"),
    (
        "0.4B",
        2048,
        24 * GIB,
        None,
        (FP32, BF16, SELECTIVE, FULL, SHARDED_FULL, EIGHT_BIT),
        "one edge beyond",
    ),
    (
        "1.3B",
        2048,
        40 * GIB,
        None,
        (BF16, SELECTIVE, FULL, SHARDED_FULL, EIGHT_BIT_FULL),
        "edge beyond",
    ),
    ("3B", 2048, CARD_80GB, None, (BF16, SELECTIVE, FULL, SHARDED_FULL), "one edge"),
    ("3B", 2048, 24 * GIB, None, (OFFLOADED,), "one edge"),
    ("3B", 2048, 24 * GIB, LORA, (BF16, FULL), "one edge beyond"),
    ("8B", 2048, 24 * GIB, LORA, (FULL,), "one edge"),
    ("8B", 2048, 40 * GIB, LORA, (BF16, FULL), "edge"),
    ("8B", 2048, 24 * GIB, QLORA, (BF16, FULL), "edge"),
    ("8B", 2048, CARD_80GB, None, (replace(FULL, optimizer=Optimizer.ADAFACTOR),), "edge"),
    ("8B", 2048, CARD_141GB, None, (FULL,), "one edge"),
)


def on_cuda() -> Iterator[Measurement]:
    """Yield the measurements of a device with 141 GB; a smaller device runs those that are capped below its bytes."""
    for name, tokens, capacity_bytes, lora, plans, batches in GRID:
        for plan in plans:
            adapted = "" if lora is None else " QLoRA" if lora.quantise_base else " LoRA"
            base = Measurement(
                name=f"{name}{adapted}",
                model=ModelSpec(hf=MODELS[name], lora=lora),
                sequence_length=tokens,
                plan=plan,
                capacity_bytes=capacity_bytes,
            )
            yield from _at(base, batches.split(), DeviceKind.CUDA)


def on_cpu() -> Iterator[Measurement]:
    """The same on a virtual device, of a model of 0.2 million parameters: it shows that all of this runs."""
    for plan, batch in ((FULL, "edge"), (SHARDED, "beyond")):
        base = Measurement(
            name="tiny",
            model=ModelSpec(hf=TINY),
            sequence_length=64,
            plan=plan,
            capacity_bytes=8 * 2**20,
        )
        yield from _at(base, [batch], DeviceKind.VIRTUAL)


def _at(base: Measurement, batches: list[str], kind: DeviceKind) -> Iterator[Measurement]:
    """Yield the base with each micro-batch: `half` takes two of them a step, `beyond` ought not to fit."""
    sized = [
        replace(base, plan=replace(base.plan, micro_batch_size=size))
        for size in sorted({*range(1, 33), *range(32, MICRO_BATCH_MAX + 1, 8)})
    ]
    edge = max((case.plan.micro_batch_size for case in sized if case.fits(kind)), default=None)
    beyond = (
        case for case in sized if case.predict(kind).device_bytes > BEYOND * case.capacity_bytes
    )
    for batch in batches:
        if batch == "beyond":
            yield next(beyond)
        elif edge is not None and (batch != "one" or edge > 1):
            size = {"one": 1, "half": -(-edge // 2), "edge": edge}[batch]
            turns = 2 if batch == "half" else 1
            yield replace(
                base,
                plan=replace(base.plan, micro_batch_size=size, gradient_accumulation_steps=turns),
            )
