"""The card that is not there does what scripts rely on, and says no where a card would."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.fake_card import environment

pytestmark = pytest.mark.long  # 20 s to compile the card
ROOT = Path(__file__).parents[2]
HELD = "every assertion held"  # the last words of a script

ALONE = """
import torch
from torch import nn
assert torch.cuda.device_count() == 2 and not torch.cuda.is_initialized()
MIB = 2**20

def raises(kind, function):
    try:
        function()
    except kind as error:
        return str(error)
    raise AssertionError(f"no {kind}")

# memory: what is held counts, what is freed does not, the cap holds and tells its numbers
free, total = torch.cuda.mem_get_info()
assert (free, total) == (1296 * MIB - 752 * MIB - 100 * MIB, 1296 * MIB)
held = torch.empty(100 * MIB, dtype=torch.uint8, device="cuda")
assert (held.device, torch.cuda.memory_allocated()) == (torch.device("cuda", 0), 100 * MIB)
view = held[: 50 * MIB]
del held
assert torch.cuda.memory_allocated() == 100 * MIB, "a view keeps the storage"
del view
assert (torch.cuda.memory_allocated(), torch.cuda.max_memory_allocated()) == (0, 100 * MIB)
assert torch.cuda.memory_reserved() == 100 * MIB
torch.cuda.empty_cache()
torch.cuda.reset_peak_memory_stats()
assert torch.cuda.memory_reserved() == torch.cuda.max_memory_allocated() == 0
said = raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(445 * MIB, dtype=torch.uint8, device="cuda"))
assert said.startswith("CUDA out of memory. Tried to allocate 445.00 MiB. GPU 0 has a total capacity of 1.27 GiB of")
torch.cuda.set_per_process_memory_fraction(256 / 1296)
said = raises(torch.cuda.OutOfMemoryError, lambda: torch.empty(300 * MIB, dtype=torch.uint8, device="cuda"))
assert "256.00 MiB allowed; " in said
assert torch.cuda.memory_stats()["num_ooms"] == 2
small = torch.empty(200 * MIB, dtype=torch.uint8, device="cuda:1")  # the other card has its own memory
assert torch.cuda.memory_allocated(1) == 200 * MIB and torch.cuda.memory_allocated() == 0
small.untyped_storage().resize_(0)
assert torch.cuda.memory_allocated(1) == 0
torch.cuda.set_per_process_memory_fraction(1.0)

# what a script forgot to move is an error, as on a card
x = torch.ones(4, device="cuda")
raises(RuntimeError, lambda: x + torch.ones(4))
raises(RuntimeError, lambda: x + torch.ones(4, device="cuda:1"))
raises(TypeError, x.numpy)

# training in fp16 with a GradScaler gives the CPU's values under torch.autocast("cpu") as near as fp16 is
torch.manual_seed(0)
net = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.BatchNorm2d(8), nn.GELU(), nn.Flatten(), nn.Linear(512, 10))
alike = __import__("copy").deepcopy(net).cuda()
inputs, labels = torch.randn(4, 3, 8, 8), torch.randint(0, 10, (4,))
losses = []
for model, device in ((net, "cpu"), (alike, "cuda")):
    optimizer, scaler = torch.optim.AdamW(model.parameters(), lr=1e-3), torch.amp.GradScaler(device, init_scale=64.0)
    for _ in range(4):
        with torch.autocast(device, torch.float16, enabled=device == "cuda"):
            loss = nn.functional.cross_entropy(model(inputs.to(device)), labels.to(device))
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    losses.append(loss.item())
assert abs(losses[0] - losses[1]) < 0.05 * losses[0], losses

# softmax takes 16 bits and gives 32 in one step, as autocast asks of a card; products of 16 bits are the host's
half = torch.randn(4, 8, device="cuda", dtype=torch.float16, requires_grad=True)
weights = torch.softmax(half, -1, dtype=torch.float32)
(weights * torch.arange(8.0, device="cuda")).sum().backward()
wide = half.detach().float().cpu().requires_grad_()
(torch.softmax(wide, -1) * torch.arange(8.0)).sum().backward()
assert (weights.dtype, half.grad.dtype) == (torch.float32, torch.float16)
torch.testing.assert_close(half.grad.float().cpu(), wide.grad, atol=1e-3, rtol=1e-2)
product = half.detach() @ half.detach().t()
torch.testing.assert_close(product.cpu(), (wide @ wide.t()).half())

# streams, events, pinned memory and random states
stream, event = torch.cuda.Stream(), torch.cuda.Event()
with torch.cuda.stream(stream):
    assert torch.cuda.current_stream() == stream
    event.record()
torch.cuda.current_stream().wait_event(event)
x.record_stream(stream)
assert torch.ones(4).pin_memory().is_pinned() and not torch.ones(4).is_pinned()
state = torch.cuda.get_rng_state()
first = torch.rand(3, device="cuda")
torch.cuda.set_rng_state(state)
assert torch.equal(first, torch.rand(3, device="cuda"))
torch.save({"x": x}, "x.pt")
assert torch.load("x.pt")["x"].is_cuda and torch.load("x.pt", map_location="cpu")["x"].is_cpu
assert "sitecustomize of the user" in __import__("os").environ["HIDDEN"]
print(HELD)
"""

GANG = """
import copy, os
import torch, torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
rank = int(os.environ["LOCAL_RANK"])
torch.cuda.set_device(rank)
dist.init_process_group("nccl", device_id=torch.device("cuda", rank))
torch.manual_seed(0)
start = nn.Sequential(*(nn.Linear(32, 32) for _ in range(3)))

def trained(wrap):
    model = wrap(copy.deepcopy(start).cuda())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(2):
        model(torch.full((4, 32), rank + step + 1.0, device="cuda")).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    return model, model(torch.ones(4, 32, device="cuda")).sum()

def sharded(model):
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)

whole, said = trained(lambda model: nn.parallel.DistributedDataParallel(model, device_ids=[rank]))
for wrap in (sharded, lambda model: FullyShardedDataParallel(model, device_id=rank, use_orig_params=True)):
    model, other = trained(wrap)
    torch.testing.assert_close(said, other)
mean = torch.full((3,), float(rank), device="cuda")
dist.all_reduce(mean, dist.ReduceOp.AVG)
assert mean.eq(0.5).all() and dist.get_backend() == "nccl"
everyone = [None, None]
dist.all_gather_object(everyone, rank)
assert everyone == [0, 1]
try:
    dist.all_reduce(torch.ones(3))
except RuntimeError as error:
    assert "cpu" in str(error)
else:
    raise AssertionError("nccl takes no tensors of the host")
assert torch.cuda.mem_get_info()[0] < (2320 - 752 - 400) * 2**20, "a communicator holds memory that is not PyTorch's"
dist.destroy_process_group()
print(HELD)
"""


def test_a_card_counts_caps_computes_and_refuses_as_cards_do(tmp_path: Path) -> None:
    (tmp_path / "site").mkdir()
    (tmp_path / "site/sitecustomize.py").write_text(
        "import os; os.environ['HIDDEN'] = 'sitecustomize of the user'"
    )
    variables = environment(tmp_path, [1296, 1296], used_mib=100)
    variables["PYTHONPATH"] += os.pathsep + str(tmp_path / "site")
    ended = run(tmp_path, ALONE, variables)
    assert (ended.returncode, ended.stdout.count(HELD)) == (0, 1), (ended.stdout + ended.stderr)[
        -4000:
    ]


def test_two_ranks_train_alike_over_nccl_by_ddp_and_both_kinds_of_fsdp(tmp_path: Path) -> None:
    torchrun = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2")
    ended = run(tmp_path, GANG, environment(tmp_path, [2320, 2320]), *torchrun)
    assert (ended.returncode, ended.stdout.count(HELD)) == (0, 2), (ended.stdout + ended.stderr)[
        -4000:
    ]


def test_the_tests_of_a_gpu_hold_on_the_card(tmp_path: Path) -> None:
    """Tests that time the device, compile for it or need libraries of NVIDIA's are left out."""
    tests = [
        ROOT / "tests/gpu" / name
        for name in ("test_guard_gpu.py", "test_host_copy_gpu.py", "test_training.py")
    ]
    left_out = "hundredth or compiled or held_in_bf16 or [cpu"  # moments in 8 bits are compiled
    variables = {**os.environ, **environment(tmp_path, [81920]), "OMP_NUM_THREADS": "1"}
    ended = subprocess.run(
        [
            sys.executable,
            "-m",
            "pytest",
            "-m",
            "not long",
            "-k",
            f"not ({left_out})",
            *map(str, tests),
        ],
        env=variables,
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=280,
        check=False,
    )
    assert ended.returncode == 0, ended.stdout[-3000:]
    assert "skipped" not in ended.stdout, ended.stdout[-300:]


def run(
    folder: Path, script: str, variables: dict[str, str], *arguments: str
) -> subprocess.CompletedProcess[str]:
    """Return the ended script, with its `assert` statements compiled in whatever PYTHONOPTIMIZE says."""
    (folder / "script.py").write_text(f"HELD = {HELD!r}\n{script}")
    return subprocess.run(
        [sys.executable, *arguments, "script.py"],
        cwd=folder,
        env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONOPTIMIZE": "", **variables},
        capture_output=True,
        text=True,
        timeout=240,
        check=False,
    )
