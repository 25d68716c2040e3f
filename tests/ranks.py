"""Gangs of ranks, forked from a server that has imported what all import: by itself, each would take seconds for it."""

from __future__ import annotations

import gc
import multiprocessing
import os
import runpy
import signal
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from multiprocessing import forkserver, reduction
from multiprocessing.process import BaseProcess
from pathlib import Path

IMPORTED = (
    "deepspeed.ops.op_builder.all_ops",
    # for every engine; it imports torch's compiler: 3 s
    "deepspeed.runtime.zero.muon.muon_optimizer",
    "torch.distributed.checkpoint",
    "torch.utils.cpp_extension",
    "orchestrator.training.loop",
    "orchestrator.training.engines.deepspeed_engine",
    "orchestrator.training.engines.pipeline",
    "orchestrator.training.models.hf_adapters",
    "transformers.models.llama.modeling_llama",  # imports torchao where it is installed: 2 s
)
OF_ALL = {
    "OMP_NUM_THREADS": "1",
    "DS_ACCELERATOR": "cpu",
    # torchao asks for CUDA at its import, which would start it before the fork
    "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
    "MASTER_ADDR": "127.0.0.1",
    # as launchers have it: another ninja than the one that compiled an extension would compile it
    # again
    "PATH": os.pathsep.join([str(Path(sys.executable).parent), os.environ.get("PATH", os.defpath)]),
}


class Rank:
    """The process of a rank, with the interface of a Popen."""

    def __init__(self, process: BaseProcess) -> None:
        self._process = process

    def poll(self) -> int | None:
        """Return the exit code, or minus the signal that ended the process; None while it runs."""
        return self._process.exitcode

    def wait(self, timeout_s: float | None = None) -> int:
        """Wait for the exit code and return it; raise TimeoutExpired."""
        self._process.join(timeout_s)
        code = self.poll()
        if code is None:
            raise subprocess.TimeoutExpired(self._process.name, timeout_s or 0.0)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        assert self._process.pid is not None
        if self.poll() is None:
            os.kill(self._process.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def start_ranks(module: str, arguments: Sequence[str], world_size: int) -> list[Rank]:
    """`python -m module words...` on every rank of a new group; they write where this process writes now."""
    context = _server()
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    shared = {**os.environ, **OF_ALL, "MASTER_PORT": str(port), "WORLD_SIZE": str(world_size)}
    processes = [
        context.Process(
            target=_be,
            args=(
                module,
                arguments,
                {**shared, "RANK": str(rank), "LOCAL_RANK": str(rank)},
                _Outputs(),
            ),
            name=f"rank {rank} of {module}",
            daemon=True,
        )
        for rank in range(world_size)
    ]
    for process in processes:
        process.start()
    return [Rank(process) for process in processes]


class _Outputs:
    """The standard output and error of the process that pickles this, for the process that unpickles it."""

    def __init__(self, *descriptors: reduction._SupportsDetach) -> None:
        self._descriptors = descriptors

    def __reduce__(self) -> tuple[object, ...]:
        return _Outputs, tuple(reduction.DupFd(number) for number in (1, 2))

    def take(self) -> None:
        for number, descriptor in enumerate(self._descriptors, start=1):
            os.dup2(descriptor.detach(), number)


def _server() -> multiprocessing.context.ForkServerContext:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(IMPORTED))
    before = dict(os.environ)
    os.environ.update(OF_ALL)  # threads are counted, and accelerators chosen, at the import
    try:
        forkserver.ensure_running()
    finally:
        os.environ.clear()
        os.environ.update(before)
    return context


def _be(
    module: str, arguments: Sequence[str], environment: Mapping[str, str], outputs: _Outputs
) -> None:
    outputs.take()
    os.environ.clear()
    os.environ.update(environment)
    sys.argv = [module, *arguments]
    gc.freeze()  # what the server has imported is looked through in no collection
    runpy.run_module(module, run_name="__main__", alter_sys=True)
