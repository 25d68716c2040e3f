"""DeepSpeed's offload to files (ZeRO-Infinity, arXiv:2104.07857): what it needs, where it writes, and its masters.

Masters and moments of a sub-group lie in files between optimizer steps; parameters as well where the plan says so.
What is below 1 MiB stays in host memory (deepspeed/runtime/swap_tensor/utils.py, MIN_AIO_BYTES). `python -m
orchestrator.training.deepspeed_nvme` compiles what it needs: minutes, once on every node.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
import math
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Offload, Plan

MASTER = "master"
OPERATIONS = ("pin_memory", "async_io")
BUFFERS = 4  # of a sub-group's size: master, gradient, two moments
COMPILE = "python -m orchestrator.training.deepspeed_nvme"

Held = dict[int, dict[str, Tensor]]  # by id of a flat master: its values and those of its moments, by name


def nvme_problem() -> str | None:
    """Why DeepSpeed cannot offload to files on this machine, and what to do; None where it can."""
    from deepspeed.git_version_info import installed_ops
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if installed_ops.get("async_io", False):  # compiled when deepspeed itself was
        return None
    if shutil.which("ninja") is None or shutil.which("c++") is None:
        return "DeepSpeed's async_io cannot be compiled: install ninja and a C++ compiler (ninja-build, g++)"
    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "DeepSpeed's async_io needs libaio: install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL)"
    for operation in OPERATIONS:
        folder = Path(cpp_extension._get_build_directory(operation, verbose=False))  # private
        if not (folder / f"{operation}.so").is_file():
            lock = folder / "lock"
            first = f"remove {lock}, which a killed compiler left, and " if lock.exists() else ""
            return f"DeepSpeed's {operation} is not compiled: {first}run `{COMPILE}` once on this node"
    return None


def required_folder(nvme_folder: str | None) -> Path:
    """The node's folder. Raises SpecError where it names none or DeepSpeed cannot offload to files."""
    if nvme_folder is None:
        raise SpecError("offload to NVMe needs a folder", path="nvme_folder", hint="name it on the cluster's devices")
    problem = nvme_problem()
    if problem:
        raise SpecError(problem, path="plan.offload_target", got="nvme")
    return Path(nvme_folder)


def swap_folder(nvme_folder: Path, job_folder: str, epoch: int, recipe: str) -> Path:
    """Where this attempt swaps to; files of older attempts of the job are removed."""
    job = nvme_folder / Path(job_folder).name
    for old in job.iterdir() if job.is_dir() else ():
        if old.name.isdigit() and int(old.name) < epoch:
            shutil.rmtree(old, ignore_errors=True)
    return job / str(epoch) / (recipe or "model")


def offload(plan: Plan, folder: Path, largest_run: int, *, pin_memory: bool) -> dict[str, Any]:
    """What the plan adds to `zero_optimization`; no rank's part of a parameter is larger than `largest_run`."""
    files = {"device": "nvme", "nvme_path": str(folder), "pin_memory": pin_memory}
    settings: dict[str, Any] = {"offload_optimizer": {**files, "buffer_count": BUFFERS}}
    if plan.offload is Offload.PARAMETERS:
        settings["offload_param"] = {**files, "buffer_size": largest_run, "max_in_cpu": 0}
    return settings


def allocate(zero: Any, names: Sequence[str]) -> None:
    """Give masters that lie in files their moments `names`, of zeros, in files too."""
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(index):
            with _swapped_in(zero, index, write=True):
                zero.optimizer.state[flat] |= {name: torch.zeros_like(flat, requires_grad=False) for name in names}


def held(zero: Any, names: Sequence[str]) -> Held:
    """Copies in host memory of masters and moments that lie in files, read one sub-group after the other."""
    found: Held = {}
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(index):
            with _swapped_in(zero, index, write=False):
                found[id(flat)] = {name: tensor.clone() for name, tensor in _tensors(zero, flat, names).items()}
    return found


def put_back(zero: Any, names: Sequence[str], values: Held) -> None:
    """Write what `held` gave, and was changed since, to the files."""
    for index, flat in enumerate(zero.fp32_partitioned_groups_flat):
        if zero._swappable_optimizer_subgroup(index):
            with _swapped_in(zero, index, write=True):
                for name, tensor in _tensors(zero, flat, names).items():
                    tensor.copy_(values[id(flat)][name])


def _tensors(zero: Any, flat: Tensor, names: Sequence[str]) -> Mapping[str, Tensor]:
    return {MASTER: flat.detach()} | {name: zero.optimizer.state[flat][name] for name in names}


@contextlib.contextmanager
def _swapped_in(zero: Any, index: int, *, write: bool) -> Iterator[None]:
    """A sub-group's master and moments in memory; private calls of DeepSpeed's third stage."""
    zero._optimizer_states_and_gradient_swap_in(index)
    yield
    if write:
        zero._optimizer_states_and_gradient_swap_out(index)
    else:
        zero._release_swap_buffers(index)


def largest_run(shapes: Sequence[torch.Size], ranks: int) -> int:
    """The elements of the largest part that one rank has of a parameter."""
    return max(math.ceil(shape.numel() / ranks) for shape in shapes)


def _compile() -> int:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    AsyncIOBuilder().load()
    print(f"async_io of deepspeed {importlib.metadata.version('deepspeed')} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(_compile())
