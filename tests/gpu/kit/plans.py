"""Trainings by our engines, each a process of its own under the guard, its prediction beside what was measured.

python -m tests.gpu.kit.plans deepspeed|pairs|compiled|unmeasured full|tiny
"""

from __future__ import annotations

import functools
import subprocess
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from orchestrator.memory.calibration.calibrate import UNMEASURED, estimate_needed_bytes
from orchestrator.planning.cost import Hardware, predict_step_s
from orchestrator.service.intake.detection import detect_machine, read_host_bytes
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    Optimizer,
    Precision,
    ZeroStage,
)
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.job.model import ModelSpec
from orchestrator.specs.plan import Plan
from tests.gpu.configurations import H100, H200, LORA, MODELS, TINY, Measurement, on_cuda
from tests.gpu.kit.install import FOLDER
from tests.gpu.kit.runner import PATIENCE, recording
from tests.gpu.measure import device_facts, measure_training, name_of
from tests.gpu.runs import BILLION

TRAINING_S = 35 * PATIENCE  # of one training; what it had done by then is in its line
COMPILATION_S = 40.0
MEASURED = FOLDER / "measured.txt"  # names of what another call has done


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """The size of the trainings: those of a rehearsal are as small as they can be."""

    config: Mapping[str, object]  # of a transformers model
    tokens: int  # of a sample
    steps: int


SIZES = {
    "full": Size(config=MODELS["1.3B"], tokens=2048, steps=20),
    "tiny": Size(config=TINY, tokens=32, steps=3),
}
BATCH = 4  # samples of a step
PLAIN = Plan(engine=Engine.TORCH, micro_batch_size=BATCH, precision=Precision.BF16)
FULL = ActivationCheckpointing.FULL
SHARDED = replace(PLAIN, zero_stage=ZeroStage.PARAMETERS)
DEEPSPEED = replace(
    PLAIN, engine=Engine.DEEPSPEED, zero_stage=ZeroStage.OPTIMIZER
)  # in bf16 it has no stage 0
ZERO = {
    "zero 2": replace(DEEPSPEED, zero_stage=ZeroStage.GRADIENTS),
    "zero 3": replace(DEEPSPEED, zero_stage=ZeroStage.PARAMETERS),
    "zero 2, optimizer on host": replace(
        DEEPSPEED, zero_stage=ZeroStage.GRADIENTS, offload=Offload.OPTIMIZER
    ),
}
PAIRS = {
    "plain": PLAIN,
    "full checkpointing": replace(PLAIN, activation_checkpointing=FULL),
    "selective checkpointing": replace(
        PLAIN, activation_checkpointing=ActivationCheckpointing.SELECTIVE
    ),
    "fsdp2": SHARDED,
    "deepspeed zero 1": DEEPSPEED,
    "micro-batch 1": replace(PLAIN, micro_batch_size=1, gradient_accumulation_steps=BATCH),
    "micro-batch 2": replace(PLAIN, micro_batch_size=2, gradient_accumulation_steps=BATCH // 2),
    "8-bit moments": replace(PLAIN, optimizer=Optimizer.ADAMW_8BIT),
    "fsdp2, full checkpointing": replace(SHARDED, activation_checkpointing=FULL),
    "fsdp2, all on host": replace(SHARDED, offload=Offload.PARAMETERS),
}
GROUPS = {"deepspeed": ZERO, "pairs": PAIRS}
# Each beside itself without the compiler, in one run.
COMPILED = {
    "hf, plain": (ModelSpec(hf=MODELS["1.3B"]), PLAIN),
    "decoder, plain": (ModelSpec(decoder=BILLION), PLAIN),
    "hf, full checkpointing": (
        ModelSpec(hf=MODELS["1.3B"]),
        replace(PLAIN, activation_checkpointing=FULL),
    ),
    "hf, micro-batch 1": (ModelSpec(hf=MODELS["1.3B"]), replace(PLAIN, micro_batch_size=1)),
    "hf, fsdp2": (ModelSpec(hf=MODELS["1.3B"]), SHARDED),
    "hf, LoRA": (ModelSpec(hf=MODELS["3B"], lora=LORA), PLAIN),
}


def measurement(name: str, plan: Plan, size: Size, total_bytes: int) -> Measurement:
    """The training of a plan; the whole device is its own."""
    return Measurement(
        name=name,
        model=ModelSpec(hf=dict(size.config)),
        sequence_length=size.tokens,
        plan=plan,
        capacity_bytes=total_bytes,
        steps=size.steps,
    )


@functools.cache
def hardware() -> Hardware:
    """Return the hardware here, detected once: each detection starts and stops NVML, and threads would disturb it."""
    kind = detect_machine("here").node.device
    return Hardware(
        device=kind, devices_per_node=1, nodes=1, network_bandwidth=1, host_memory=read_host_bytes()
    )


def measure_beside(case: Measurement, device: dict[str, Any]) -> dict[str, Any]:
    """Return the line of a measured training, with the memory and step time that the planner predicts here."""
    limit_s = 2 * TRAINING_S if case.plan.compiled else TRAINING_S
    line = measure_training(case, DeviceKind.CUDA, device, limit_s)
    line["predicted"]["step_s"] = predict_step_s(
        case.profile(DeviceKind.CUDA), case.plan, hardware()
    )
    line["predicted"]["needed_bytes"] = estimate_needed_bytes(
        case.plan, case.predict(DeviceKind.CUDA), UNMEASURED
    )
    return line


def main(group: str, size_name: str) -> None:
    """Record every training of a group."""
    size, device = SIZES[size_name], device_facts(DeviceKind.CUDA)
    assert device is not None, "nvidia-smi names no device"
    total_bytes = device["total_bytes"]
    if group == "unmeasured":
        cases = list_unmeasured(total_bytes, size)
    elif group == "compiled":
        cases = list_compiled(total_bytes, size)
    else:
        cases = (measurement(name, plan, size, total_bytes) for name, plan in GROUPS[group].items())
    shown = {line["name"] for line in H200["trainings"] if line["measured"]["step_s"]}
    if size.config is TINY:
        shown = set()
    todo = [case for case in cases if f"{group}: {case.name}" not in shown]
    done = MEASURED.read_text().splitlines() if MEASURED.exists() else []
    for case in todo:
        if name_of(case) not in done:
            with recording(f"{group}: {case.name}") as line:
                line |= measure_beside(case, device)
            with MEASURED.open("a") as file:
                file.write(f"{name_of(case)}\n")
    if (
        group == "deepspeed"
    ):  # what scripts of other people need for an optimizer on host; our engine keeps torch's
        script = "from deepspeed.ops.op_builder import CPUAdamBuilder; CPUAdamBuilder().load()"
        with recording("deepspeed: compile cpu_adam") as line:
            line["code"] = subprocess.run(
                [sys.executable, "-c", script], timeout=COMPILATION_S, check=False
            ).returncode


def list_unmeasured(total_bytes: int, size: Size) -> Iterator[Measurement]:
    """Yield the measurements of `make bench-gpu` that no GPU has run yet."""
    measured_ids = {line["id"] for line in H100["trainings"]}
    if size.config is TINY:
        yield measurement("tiny", PLAIN, size, total_bytes)
    else:
        yield from (
            case
            for case in on_cuda()
            if case.capacity_bytes <= total_bytes and name_of(case) not in measured_ids
        )


def list_compiled(total_bytes: int, size: Size) -> Iterator[Measurement]:
    """Yield each training of COMPILED without the compiler, then with it."""
    for name, (model, plan) in COMPILED.items():
        if size.config is TINY:
            model = ModelSpec(hf=TINY)
        for is_compiled in (False, True):
            yield Measurement(
                name=f"{name}, {'compiled' if is_compiled else 'as written'}",
                model=model,
                sequence_length=size.tokens,
                plan=replace(plan, compiled=is_compiled),
                capacity_bytes=total_bytes,
                steps=size.steps,
            )


if __name__ == "__main__":
    main(*sys.argv[1:])
