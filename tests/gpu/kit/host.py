"""Measure how a micro-batch waits for its host: seconds, kernels and operators of short and full samples.

A sample of few tokens leaves the device almost nothing to do: its step time is what Python and launches take.

python -m tests.gpu.kit.host full|tiny
"""

from __future__ import annotations

import cProfile
import pstats
import statistics
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch._C._autograd import DeviceType
from torch.profiler import ProfilerActivity, profile

from orchestrator.specs.choices import ActivationCheckpointing
from orchestrator.specs.job.model import ModelSpec, TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun
from orchestrator.training.build import build_recipe
from tests.gpu.configurations import TINY, Measurement
from tests.gpu.kit.plans import FULL, PLAIN, SHARDED, SIZES, Size
from tests.gpu.kit.runner import recording
from tests.gpu.measure import data_of
from tests.gpu.runs import BILLION, SMALL, take_step, train

SHORT_TOKENS = 64
STEPS, WARM_UP = 8, 3
ACCUMULATED = 4  # micro-batches of a step, beside one
LAUNCHES = 2000
SHOWN = 30  # functions of Python in the log
ONE = replace(PLAIN, micro_batch_size=1)
HOST_PLANS = {
    "plain": ONE,
    "selective checkpointing": replace(
        ONE, activation_checkpointing=ActivationCheckpointing.SELECTIVE
    ),
    "full checkpointing": replace(ONE, activation_checkpointing=FULL),
    "fsdp2": replace(SHARDED, micro_batch_size=1),
}


def measured_step(
    model: ModelSpec, plan: Plan, tokens: int, *, is_profiled: bool
) -> dict[str, Any]:
    """Return the median seconds of a step in this process; where profiled, also its kernels and operators.

    The weights begin as zeros.
    """
    training = Measurement(
        name="host",
        model=model,
        sequence_length=tokens,
        plan=plan,
        capacity_bytes=2**50,
        steps=STEPS + 2,
    )
    with tempfile.TemporaryDirectory() as name:
        run = TrainingRun(
            model=model,
            data=data_of(training, Path(name)),
            training=TrainingSpec(max_steps=STEPS),
            plan=plan,
            job_folder=name,
            attempt_folder=name,
            epoch=1,
            device="cuda",
        )
        recipe = replace(build_recipe(run), initialise=lambda _, values: values.zero_())
        done = train(run, torch.device("cuda", 0), recipe)
        line: dict[str, Any] = {"step_s": statistics.median(done.step_s[WARM_UP:])}
        if is_profiled:
            functions = cProfile.Profile()
            functions.runcall(take_step, run, recipe, done.engine, STEPS)
            pstats.Stats(functions).sort_stats("tottime").print_stats(SHOWN)
            with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as record:
                take_step(run, recipe, done.engine, STEPS + 1)
            events = record.events() or []
            kernels = [event for event in events if event.device_type == DeviceType.CUDA]
            line["kernels"] = len(kernels)
            line["kernels_s"] = sum(event.time_range.elapsed_us() for event in kernels) / 1e6
            line["operators"] = sum(event.name.startswith("aten::") for event in events)
            line["outer_operators"] = sum(
                event.name.startswith("aten::") and event.cpu_parent is None for event in events
            )
    return line


def launch_s() -> float:
    """Return the seconds that the host takes to launch one small kernel."""
    values = torch.zeros(8, device="cuda")
    torch.cuda.synchronize()
    began_s = time.perf_counter()
    for _ in range(LAUNCHES):
        values.add_(1)
    ended_s = time.perf_counter()
    torch.cuda.synchronize()
    return (ended_s - began_s) / LAUNCHES


def main(size: Size) -> None:
    """Record a line for each model, plan and length."""
    is_tiny = size.config is TINY
    models = {
        "hf": ModelSpec(hf=dict(size.config)),
        "decoder": ModelSpec(decoder=SMALL if is_tiny else BILLION),
    }
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl", store=torch.distributed.HashStore(), rank=0, world_size=1
    )
    with recording("host: launch of one kernel") as line:
        line["launch_s"] = launch_s()
    for model_name, model in models.items():
        for plan_name, plan in HOST_PLANS.items():
            for tokens in (SHORT_TOKENS, size.tokens):
                with recording(f"host: {model_name}, {plan_name}, {tokens} tokens") as line:
                    line |= measured_step(model, plan, tokens, is_profiled=not is_tiny)
                    torch.cuda.empty_cache()
                    more = replace(plan, gradient_accumulation_steps=ACCUMULATED)
                    line["accumulated_step_s"] = measured_step(
                        model, more, tokens, is_profiled=False
                    )["step_s"]
                torch.cuda.empty_cache()


if __name__ == "__main__":
    main(SIZES[sys.argv[1]])
