"""DeepSpeed's offload to files (ZeRO-Infinity, arXiv:2104.07857): requirements, folders and masters.

Masters and moments of a sub-group are in files between optimizer steps; so are parameters if the plan offloads them.
Tensors below 1 MiB stay in host memory (deepspeed/runtime/swap_tensor/utils.py, MIN_AIO_BYTES). `python -m
orchestrator.training.engines.deepspeed_nvme` compiles the extension into TORCH_EXTENSIONS_DIR: minutes, once per home.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import shlex
import shutil
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.utils import cpp_extension

from orchestrator.specs.choices import Offload
from orchestrator.specs.errors import SpecError
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.plan import Plan
from orchestrator.specs.run import TrainingRun

MASTER = "master"
OPERATIONS = ("pin_memory", "async_io")
BUFFERS = 4  # of a sub-group's size: master, gradient, two moments
MODULE = "orchestrator.training.engines.deepspeed_nvme"

Swapped = dict[
    int, dict[str, Tensor]
]  # by id of a flat master: its values and those of its moments, by name


def find_nvme_obstacle(extensions_folder: Path) -> str | None:
    """Return why DeepSpeed cannot offload to files, with the remedy; None if it can.

    `extensions_folder` is TORCH_EXTENSIONS_DIR of the training process: <home>/torch_extensions
    under the service.
    """
    from deepspeed.git_version_info import installed_ops

    if installed_ops.get("async_io", False):  # compiled with deepspeed itself
        return None
    problem = _name_missing_tools()
    if problem:
        return problem
    for operation in OPERATIONS:
        folder = extensions_folder / operation
        if not (folder / f"{operation}.so").is_file():
            lock = folder / "lock"
            first = f"remove {lock}, which a killed compiler left, and " if lock.exists() else ""
            variable = f"TORCH_EXTENSIONS_DIR={shlex.quote(str(extensions_folder))}"
            command = f"{variable} {shlex.quote(sys.executable)} -m {MODULE}"
            return (
                f"DeepSpeed's {operation} is not compiled: {first}run `{command}` (minutes, once)"
            )
    return None


def find_extensions_folder() -> Path:
    """Return the folder of this process's compiled extensions."""
    return Path(cpp_extension._get_build_directory(OPERATIONS[0], verbose=False)).parent  # private


def prepare_swap_folder(run: TrainingRun) -> Path:
    """Return the attempt's swap folder, and remove what the job's older attempts left.

    Raises SpecError if the node has no such folder or DeepSpeed cannot offload to files.
    """
    folder = run.swap_folder
    if folder is None:
        raise SpecError(
            "offload to NVMe needs a folder",
            path="nvme_folder",
            hint="set it on the cluster's devices",
        )
    if not os.access(
        folder.parents[1], os.W_OK | os.X_OK
    ):  # creating it could fill the disk under the mount point
        raise SpecError(
            "offload to NVMe needs a writable folder", path="nvme_folder", got=str(run.nvme_folder)
        )
    problem = find_nvme_obstacle(find_extensions_folder())
    if problem:
        raise SpecError(problem, path="plan.offload_target", got="nvme")
    remove_older_swap_folders(folder)
    return folder


def remove_older_swap_folders(folder: Path) -> None:
    """Remove the swap folders of the job's older attempts beside this one."""
    for old in folder.parent.iterdir() if folder.parent.is_dir() else ():
        if old.name.isdigit() and int(old.name) < int(folder.name):
            shutil.rmtree(old, ignore_errors=True)


def make_offload_settings(
    plan: Plan, folder: Path, largest_part_elements: int, *, pin_memory: bool
) -> JsonObject:
    """Return the plan's entries of `zero_optimization` for offload to files.

    `largest_part_elements` is the largest number of elements of a parameter on a rank.
    """
    files = {"device": "nvme", "nvme_path": str(folder), "pin_memory": pin_memory}
    settings: JsonObject = {"offload_optimizer": {**files, "buffer_count": BUFFERS}}
    if plan.offload is Offload.PARAMETERS:
        settings["offload_param"] = {**files, "buffer_size": largest_part_elements, "max_in_cpu": 0}
    return settings


def write_zero_moments(zero_optimizer: Any, moment_names: Sequence[str]) -> None:
    """Write zeros to the files for these moments of every master weight that is in files."""
    for flat in _iterate_swapped_in(zero_optimizer, writes_back=True):
        zero_optimizer.optimizer.state[flat] |= {
            name: torch.zeros_like(flat, requires_grad=False) for name in moment_names
        }


def copy_swapped(zero_optimizer: Any, moment_names: Sequence[str]) -> Swapped:
    """Return host copies of the master weights and moments in files, read one sub-group after the other."""
    copies: Swapped = {}
    for flat in _iterate_swapped_in(zero_optimizer, writes_back=False):
        copies[id(flat)] = {
            name: tensor.clone()
            for name, tensor in _read_master_tensors(zero_optimizer, flat, moment_names).items()
        }
    return copies


def write_back(zero_optimizer: Any, moment_names: Sequence[str], host_copies: Swapped) -> None:
    """Write the host copies that `copy_swapped` returned back to the files."""
    for flat in _iterate_swapped_in(zero_optimizer, writes_back=True):
        for name, tensor in _read_master_tensors(zero_optimizer, flat, moment_names).items():
            tensor.copy_(host_copies[id(flat)][name])


def _read_master_tensors(
    zero_optimizer: Any, master: Tensor, moment_names: Sequence[str]
) -> Mapping[str, Tensor]:
    return {MASTER: master.detach()} | {
        name: zero_optimizer.optimizer.state[master][name] for name in moment_names
    }


def _iterate_swapped_in(zero_optimizer: Any, *, writes_back: bool) -> Iterator[Tensor]:
    """Yield each master that is in files, loaded into memory with its moments; each is written back
    if `writes_back`.

    These are private calls of DeepSpeed's stage 3.
    """
    for index, flat in enumerate(zero_optimizer.fp32_partitioned_groups_flat):
        if zero_optimizer._swappable_optimizer_subgroup(index):
            zero_optimizer._optimizer_states_and_gradient_swap_in(index)
            yield flat
            if writes_back:
                zero_optimizer._optimizer_states_and_gradient_swap_out(index)
            else:
                zero_optimizer._release_swap_buffers(index)


def compute_largest_part_elements(shapes: Sequence[torch.Size], rank_count: int) -> int:
    """Return the elements of the largest part of any of these parameters on one of `rank_count`
    ranks.
    """
    return max(math.ceil(shape.numel() / rank_count) for shape in shapes)


def _name_missing_tools() -> str | None:
    """Return what this machine lacks to compile and load DeepSpeed's async_io; None if nothing."""
    from deepspeed.ops.op_builder import AsyncIOBuilder

    if (
        shutil.which("ninja", path=_make_path_with_environment()) is None
        or shutil.which("c++") is None
    ):
        return "DeepSpeed's async_io cannot be compiled: install ninja and a C++ compiler (ninja-build, g++)"
    if (
        torch.version.cuda and cpp_extension.CUDA_HOME is None
    ):  # deepspeed/ops/op_builder/async_io.py
        return "DeepSpeed's async_io is compiled with headers of CUDA: install its toolkit, or set CUDA_HOME"
    if not AsyncIOBuilder().is_compatible(verbose=False):
        return "DeepSpeed's async_io needs libaio: install libaio-dev (Debian, Ubuntu) or libaio-devel (Fedora, RHEL)"
    return None


def _make_path_with_environment() -> str:
    """Return PATH with this environment's `bin`, which has ninja even if the environment is not
    activated.
    """
    return os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)])


def _compile_async_io() -> int:
    from deepspeed.ops.op_builder import AsyncIOBuilder

    os.environ["PATH"] = _make_path_with_environment()
    problem = _name_missing_tools()
    if problem:
        print(problem, file=sys.stderr)
        return 1
    AsyncIOBuilder().load()
    print(f"async_io of deepspeed {importlib.metadata.version('deepspeed')} is ready")
    return 0


if __name__ == "__main__":
    sys.exit(_compile_async_io())
