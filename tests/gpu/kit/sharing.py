"""Two trainings on one device: alone, by time-slicing, under MPS. Four adapters over one base: in one process, in four.

python -m tests.gpu.kit.sharing full|tiny
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from orchestrator.specs.device_kind import DeviceKind
from tests.gpu.kit.plans import PLAIN, SIZES, Size, measure_beside, measurement
from tests.gpu.kit.runner import PATIENCE, recording
from tests.gpu.measure import device_facts

ADAPTERS, RANK = 4, 16
WARM_UP = 2  # steps
ADAPTERS_TIMEOUT_S = 30 * PATIENCE


class Adapted(nn.Module):
    """A frozen linear layer with several adapters. Each has its own equal part of the rows of a batch."""

    def __init__(self, base: nn.Linear, adapters: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(
            torch.randn(adapters, base.in_features, RANK, device=base.weight.device) * 0.01
        )
        self.up = nn.Parameter(
            torch.zeros(adapters, RANK, base.out_features, device=base.weight.device)
        )

    def forward(self, x_BTI: Tensor) -> Tensor:
        y_BTO = self.base(x_BTI)
        rows_ANI = x_BTI.reshape(len(self.down), -1, x_BTI.shape[-1])
        return y_BTO + (rows_ANI @ self.down.to(x_BTI.dtype) @ self.up.to(x_BTI.dtype)).reshape(
            y_BTO.shape
        )


def train_adapters(adapters: int, size: Size) -> dict[str, float]:
    """Tokens of all adapters per second, and the peak of this process."""
    from transformers import AutoConfig, AutoModelForCausalLM

    fields: dict[str, Any] = dict(size.config)
    config = AutoConfig.for_model(fields.pop("model_type"), **fields)
    with torch.device("cuda"):
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.requires_grad_(False)
    for layer in model.model.layers:
        for block in (layer.self_attn, layer.mlp):
            for name, linear in list(block.named_children()):
                if isinstance(linear, nn.Linear):
                    setattr(block, name, Adapted(linear, adapters))
    trained = [parameter for parameter in model.parameters() if parameter.requires_grad]
    optimizer = torch.optim.AdamW(trained, lr=1e-3)
    tokens = (
        torch.arange(adapters * size.tokens, device="cuda").reshape(adapters, size.tokens)
        % config.vocab_size
    )
    began_s = 0.0
    for step in range(WARM_UP + size.steps):
        if step == WARM_UP:
            torch.cuda.synchronize()
            began_s = time.perf_counter()
        model(input_ids=tokens, labels=tokens).loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    torch.cuda.synchronize()
    wall_s = time.perf_counter() - began_s
    return {
        "tokens_per_s": size.steps * tokens.numel() / wall_s,
        "peak_bytes": torch.cuda.max_memory_allocated(),
    }


def adapters_in(processes: int, size_name: str) -> list[dict[str, float]]:
    """ADAPTERS adapters, in so many processes at a time; what each of them prints."""
    command = [sys.executable, "-m", "tests.gpu.kit.sharing", size_name, str(ADAPTERS // processes)]
    running = [
        subprocess.Popen(command, stdout=subprocess.PIPE, text=True) for _ in range(processes)
    ]
    printed = [process.communicate(timeout=ADAPTERS_TIMEOUT_S)[0] for process in running]
    return [json.loads(text.splitlines()[-1]) for text in printed]


@contextlib.contextmanager
def mps() -> Iterator[None]:
    """NVIDIA's daemon that lets kernels of several processes overlap; programs within the block use it."""
    with tempfile.TemporaryDirectory() as folder:
        os.environ |= {"CUDA_MPS_PIPE_DIRECTORY": folder, "CUDA_MPS_LOG_DIRECTORY": folder}
        try:
            subprocess.run(["nvidia-cuda-mps-control", "-d"], check=True, timeout=10)
            yield
            subprocess.run(
                ["nvidia-cuda-mps-control"], input="quit\n", text=True, check=False, timeout=20
            )
        finally:
            del os.environ["CUDA_MPS_PIPE_DIRECTORY"], os.environ["CUDA_MPS_LOG_DIRECTORY"]


def main(size_name: str) -> None:
    """Record all of it."""
    size, device = SIZES[size_name], device_facts(DeviceKind.CUDA)
    assert device is not None, "nvidia-smi names no device"
    alone = replace(PLAIN, micro_batch_size=1)
    case = measurement("micro-batch 1", alone, size, device["total_bytes"])

    def record_together(name: str, count: int) -> None:
        with recording(f"sharing: {name}") as line, ThreadPoolExecutor(count) as threads:
            line["jobs"] = list(threads.map(lambda _: measure_beside(case, device), range(count)))
            line["step_s"] = [job["measured"]["step_s"] for job in line["jobs"]]

    def record_adapters(name: str, processes: int) -> None:
        with recording(f"sharing: {ADAPTERS} adapters in {name}") as line:
            line["processes"] = adapters_in(processes, size_name)
            line["tokens_per_s"] = sum(process["tokens_per_s"] for process in line["processes"])

    record_adapters("one process", 1)
    record_adapters("four processes", ADAPTERS)
    record_together("one job alone", 1)
    with recording("sharing: MPS"), mps():
        record_together("two jobs under MPS", 2)
    record_together("two jobs by time-slicing", 2)


if __name__ == "__main__":
    if len(sys.argv) == 3:
        print(json.dumps(train_adapters(int(sys.argv[2]), SIZES[sys.argv[1]])))
    else:
        main(sys.argv[1])
