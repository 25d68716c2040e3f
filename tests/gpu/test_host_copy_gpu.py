"""Copies of a state from a CUDA device to host memory. Needs torch and pytest only."""

from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
if not torch.cuda.is_available():
    pytest.skip("needs a CUDA device", allow_module_level=True)

import torch.distributed as dist  # noqa: E402

from orchestrator.training.checkpoint import checkpoint  # noqa: E402
from orchestrator.training.checkpoint.checkpoint import TrainingProgress  # noqa: E402
from orchestrator.training.checkpoint.host_copy import HostCopy  # noqa: E402

ELEMENTS = 2**24


def test_a_copy_has_the_values_of_its_moment_in_pinned_memory_and_takes_no_device_memory(
    tmp_path: Path,
) -> None:
    dist.init_process_group(
        "gloo", init_method=f"file://{tmp_path / 'store'}", rank=0, world_size=1
    )
    try:
        weight = torch.zeros(ELEMENTS, device="cuda")
        state = {
            "model.w": weight,
            "optim.steps": torch.zeros(3),
            "model.low": weight[:5].bfloat16(),
        }
        copy = HostCopy(state, weight.device, dist.group.WORLD)
        torch.cuda.synchronize()
        torch.cuda.reset_peak_memory_stats()
        before = torch.cuda.memory_allocated()
        for turn in range(3):  # the same memory each time
            weight.fill_(turn)
            copy.copy_state(state)
            weight.fill_(-1.0)  # queued behind the copy
            copy.wait()
            stored = copy.state["model.w"].parts[(0,)]
            assert stored.is_pinned()
            assert stored.eq(turn).all()
        assert torch.cuda.max_memory_allocated() == before
        checkpoint.save_state(tmp_path / "a", copy.state, TrainingProgress(step=3))
        copy.release()
        weight.zero_()
        checkpoint.load_state(tmp_path / "a", {"model.w": weight})
        assert weight.eq(2).all()
    finally:
        dist.destroy_process_group()
