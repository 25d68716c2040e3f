import os
import sys
import threading
import time
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, Dataset

from orchestrator.training.guard import oom_report
from orchestrator.training.guard.virtual_device import VirtualDevice, use_host_memory
from tests.ranks import start_ranks
from tests.training import gang

KIB, MIB = 2**10, 2**20
WIDTH, DEPTH = 128, 4
SETTLE_S = 0.5  # without a change
PARAMETER_BYTES = DEPTH * WIDTH * WIDTH * 4


def test_storages_count_once_and_are_freed_with_their_last_view() -> None:
    with VirtualDevice(MIB) as device:
        whole = torch.zeros(64, KIB // 4)
        view = whole[1:3].t()
        view.add_(1)
        assert device.live_bytes == 64 * KIB
        other = whole + 1
        assert device.live_bytes == 128 * KIB
        del whole
        assert device.live_bytes == 128 * KIB
        del view
        assert device.live_bytes == 64 * KIB
        del other
    assert (device.live_bytes, device.peak_bytes) == (0, 128 * KIB)


def test_host_memory_is_never_counted_and_device_memory_always() -> None:
    with VirtualDevice(64 * KIB) as device:
        on_device = torch.ones(KIB)
        with use_host_memory():
            host = torch.empty(MIB)
            host[:KIB].copy_(on_device)
            with use_host_memory():
                on_device.add_(1)
            host.mul_(2)
        host[KIB:].zero_()
        view = host.view(KIB, KIB)[:1]
        assert device.live_bytes == 4 * KIB
        more = view + 1  # an operation's output is on the device, even if its inputs were not
        assert device.live_bytes == 8 * KIB
        host.untyped_storage().resize_(2 * MIB)
        del host, view
        assert device.live_bytes == 8 * KIB
        del on_device, more
        assert device.live_bytes == 0
        with pytest.raises(torch.OutOfMemoryError):
            torch.empty(MIB)


def test_every_output_of_an_operation_counts() -> None:
    with VirtualDevice(MIB) as device:
        values, indices = torch.zeros(2, 512).max(dim=0)
        assert device.live_bytes == 512 * (4 + 8)
        doubled = torch._foreach_mul([values, values], 2.0)
        assert device.live_bytes == 512 * (4 + 8 + 2 * 4)
        parts = values.split(128)
        assert device.live_bytes == 512 * (4 + 8 + 2 * 4)
    assert len(parts) == 4
    assert len(doubled) == 2
    assert indices.numel() == 512


def test_storages_count_at_the_size_to_which_they_are_resized() -> None:
    with VirtualDevice(MIB) as device:
        tensor = torch.zeros(KIB)
        tensor.untyped_storage().resize_(0)
        assert device.live_bytes == 0
        tensor.untyped_storage().resize_(16 * KIB)
        assert device.live_bytes == 16 * KIB
        tensor.resize_(8 * KIB)
        assert device.live_bytes == 32 * KIB
        with pytest.raises(torch.OutOfMemoryError):
            tensor.untyped_storage().resize_(2 * MIB)


def test_sparse_tensors_count_their_indices_and_values() -> None:
    with VirtualDevice(MIB) as device, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        embedding = nn.Embedding(16, 4, sparse=True)
        embedding(torch.tensor([1, 2])).sum().backward()
        gradient = embedding.weight.grad
        assert gradient is not None
        assert gradient.is_sparse
        assert device.live_bytes == 16 * 4 * 4 + 2 * 8 + 2 * 4 * 4


def test_storages_from_elsewhere_count_as_parameters_and_as_views() -> None:
    weight, batch = torch.zeros(32, 32), torch.zeros(KIB)
    with VirtualDevice(MIB) as device:
        module = nn.Module()
        module.weight = nn.Parameter(weight)
        assert device.live_bytes == 4 * KIB
        half = batch[:16]
        assert device.live_bytes == 8 * KIB
    assert half.numel() == 16


def test_exceeding_the_capacity_raises_the_error_of_torch_and_leaves_nothing_behind() -> None:
    with VirtualDevice(MIB) as device:
        tensor = torch.zeros(128 * KIB)
        with pytest.raises(torch.OutOfMemoryError) as caught:
            torch.zeros(256 * KIB)
        assert device.live_bytes == tensor.nbytes  # while the traceback is alive
        message = str(caught.value)
        assert oom_report.parse_requested_bytes(message) == MIB
        assert oom_report.parse_capacity_bytes(message) == MIB
        assert oom_report.find_oom_exception(caught.value) is caught.value
        rest = torch.zeros(128 * KIB)  # and going on works, up to the last byte
        assert device.live_bytes == device.peak_bytes == tensor.nbytes + rest.nbytes == MIB


@pytest.mark.parametrize("capacity_bytes", [96 * KIB, MIB], ids=["full", "roomy"])
def test_tensors_that_gloo_is_about_to_release_do_not_count(capacity_bytes: int) -> None:
    """Like gloo's thread, which holds a finished collective's buffers until it next gets the interpreter lock."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    interval_s = sys.getswitchinterval()
    sys.setswitchinterval(60)  # who wants the interpreter waits until it is given away
    try:
        assert min(_peak_beside_a_thread(capacity_bytes) for _ in range(10)) == 64 * KIB
    finally:
        sys.setswitchinterval(interval_s)
        dist.destroy_process_group()


def _peak_beside_a_thread(capacity_bytes: int) -> int:
    finished = threading.Lock()
    finished.acquire()
    with VirtualDevice(capacity_bytes) as device:
        tensors = [torch.zeros(16 * KIB)]
        thread = threading.Thread(target=lambda: finished.acquire() and tensors.clear())
        thread.start()
        finished.release()
        torch.zeros(16 * KIB)
        peak_bytes = device.peak_bytes
        thread.join()
    return peak_bytes


def test_recent_peak_starts_again_from_what_is_live() -> None:
    with VirtualDevice(MIB) as device:
        tensor = torch.zeros(KIB)
        torch.zeros(4 * KIB)
        assert device.recent_peak_bytes == 20 * KIB
        device.reset_recent_peak()
        assert device.recent_peak_bytes == tensor.nbytes
        torch.zeros(KIB)
    assert (device.recent_peak_bytes, device.peak_bytes) == (8 * KIB, 20 * KIB)


def test_a_training_step_counts_the_bytes_computed_by_hand() -> None:
    batch = 8
    with VirtualDevice(64 * MIB) as device:
        model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
        assert device.live_bytes == PARAMETER_BYTES
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, foreach=False)
        x = torch.zeros(batch, WIDTH)
        out = model(x)
        activation = batch * WIDTH * 4
        assert device.live_bytes == PARAMETER_BYTES + (1 + DEPTH) * activation
        out.sum().backward()
        del out
        assert device.live_bytes == 2 * PARAMETER_BYTES + activation
        optimizer.step()
        assert device.live_bytes == 3 * PARAMETER_BYTES + activation
        optimizer.zero_grad()
        assert device.live_bytes == 2 * PARAMETER_BYTES + activation


class Pages(Dataset[torch.Tensor]):
    """Each sample needs more than the device has; a worker is a host process."""

    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> torch.Tensor:
        return torch.full((64 * KIB,), index)[:1].clone()


def test_data_loader_workers_are_not_capped() -> None:
    with VirtualDevice(64 * KIB) as device:
        assert [int(batch[0]) for batch in DataLoader(Pages(), num_workers=1)] == [0, 1, 2, 3]
    assert device.peak_bytes < 64 * KIB


def _rank(folder: str) -> None:
    dist.init_process_group("gloo")
    live = []
    for wrap in (_replicated, _sharded):
        with VirtualDevice(64 * MIB) as device:
            model = wrap(
                nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(DEPTH)))
            )
            optimizer = torch.optim.AdamW(model.parameters())
            for _ in range(3):
                model(torch.zeros(8, WIDTH)).sum().backward()
                optimizer.step()
                optimizer.zero_grad(
                    set_to_none=wrap is _sharded
                )  # DDP's gradients are views of its buckets
            steps_bytes = sum(state["step"].nbytes for state in optimizer.state.values())
            live += [_settled(device) - steps_bytes, device.peak_bytes]
            del model, optimizer
    Path(folder, str(dist.get_rank())).write_text(" ".join(map(str, live)))
    os._exit(0)  # gloo may abort on its way out


def _settled(device: VirtualDevice) -> int:
    """Live bytes once they are stable: gloo's thread may briefly hold the last collective's buffer."""
    live_bytes, deadline_s = device.live_bytes, time.monotonic() + SETTLE_S
    while time.monotonic() < deadline_s:
        time.sleep(0.02)
        if device.live_bytes < live_bytes:
            live_bytes, deadline_s = device.live_bytes, time.monotonic() + SETTLE_S
    return live_bytes


def _replicated(model: nn.Module) -> nn.Module:
    return DistributedDataParallel(model, gradient_as_bucket_view=True)


def _sharded(model: nn.Sequential) -> nn.Module:
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def test_two_ranks_hold_four_copies_replicated_and_three_halves_sharded(tmp_path: Path) -> None:
    assert gang.finish(start_ranks("tests.training.test_virtual_device", [str(tmp_path)], 2)) == [
        0,
        0,
    ]
    for rank in (0, 1):
        ddp, ddp_peak, fsdp, fsdp_peak = map(int, Path(tmp_path, str(rank)).read_text().split())
        # parameters, two moments, and buckets that hold the gradients, within the bookkeeping of
        # DDP
        assert ddp == pytest.approx(4 * PARAMETER_BYTES, abs=4 * KIB)
        assert fsdp == pytest.approx(3 * PARAMETER_BYTES / 2, abs=4 * KIB)
        assert ddp < ddp_peak < 5.5 * PARAMETER_BYTES
        # above three halves: the halves of the gradients, a gathered layer and its whole gradient
        assert 2.5 * PARAMETER_BYTES < fsdp_peak < ddp_peak


if __name__ == "__main__":
    _rank(sys.argv[1])
