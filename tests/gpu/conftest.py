"""Tests of a CUDA device run on the CPU too, smaller, where they can: so they are known to run before a GPU comes.

A bare machine suffices: Python, torch, numpy and pytest.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch


@pytest.fixture(params=["cpu", "cuda"])
def device(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[torch.device]:
    """A device, and a process group of this process alone."""
    if request.param == "cuda" and not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # models this small wait for more
    device_of_test = torch.device("cuda", 0) if request.param == "cuda" else torch.device("cpu")
    if device_of_test.type == "cuda":
        torch.cuda.set_device(device_of_test)
    torch.distributed.init_process_group(
        "cpu:gloo,cuda:nccl" if device_of_test.type == "cuda" else "gloo",
        store=torch.distributed.FileStore(str(tmp_path / "store"), 1),
        rank=0,
        world_size=1,
        device_id=device_of_test if device_of_test.type == "cuda" else None,
    )
    yield device_of_test
    torch.distributed.destroy_process_group()
    torch.set_num_threads(threads)
    if device_of_test.type == "cuda":
        torch.cuda.empty_cache()


@pytest.fixture
def cuda(device: torch.device) -> torch.device:
    """The device, where it is a CUDA device."""
    if device.type != "cuda":
        pytest.skip("needs a CUDA device")
    return device
