"""Heartbeats (progress reports) of this rank: phase, optimizer steps, step time and peak memory."""

from __future__ import annotations

import contextlib
import functools
import importlib
import json
import os
import platform
import statistics
import sys
import time
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from orchestrator.specs.attempt import PROBE_STEPS, Heartbeat
from orchestrator.specs.run import STALE_EXIT_CODE, AttemptFolder, GuardSettings, write_json
from orchestrator.training import progress
from orchestrator.training.guard.faults import raise_fault
from orchestrator.training.guard.pass_progress import PassProgress
from orchestrator.training.guard.sample_mixing import list_mixing_operations

if TYPE_CHECKING:
    from orchestrator.training.guard.virtual_device import VirtualDevice

# Libraries by which ranks can meet without a process group of torch.distributed.
OTHER_GROUPS = (
    *(
        "bagua",
        "byteps",
        "cupy",
        "grpc",
        "hivemind",
        "horovod",
        "jax",
        "mpi4py",
        "ray",
        "tensorflow",
        "torch_xla",
    ),
    *("torchft", "zmq"),
)
DRIVER_VERSION = Path(
    "/sys/module/nvidia/version"
)  # as the kernel shows MODULE_VERSION of a loaded module
RECENT_STEPS = 50  # the step time is the median of this many intervals


class Monitor:
    """Hooks PyTorch's optimizers and backward passes in this process and writes `rank<r>.heartbeat.json`.

    A step is a cycle of optimizer steps. It completes when the cycle's first optimizer has stepped, so two optimizers
    that alternate count once. An optimizer for each parameter, which steps within the backward pass, is part of that
    pass. Steps that a loop reports itself (`training.progress`) take precedence.
    """

    def __init__(self, settings: GuardSettings, rank: int | None) -> None:
        self._rank = rank
        self.is_rank = rank is not None
        self.phase = "startup"
        self.device: VirtualDevice | None = None
        self._passes = PassProgress(self._count_allocations)
        self._capacity_bytes = settings.virtual_capacity_bytes
        self.step = 0
        self.steps_done = 0
        self._restored_steps: int | None = None
        self._backwards = 0
        self._forward_bytes = 0
        self.injected = False
        self._signal = 0
        self._is_mixing_known = False
        self._mixing = tuple[str, ...]()
        self.beat_after_next_step = False  # memory ran out since the last step
        self._folder = AttemptFolder(settings.attempt_folder)
        self._interval_s = settings.heartbeat_interval_s
        self._declared_last_step = settings.last_step
        self._fault = settings.fault_kind
        self._fault_rank = settings.fault_rank
        self._fault_step = settings.fault_step
        self._loop_reports = False  # the training loop reports its own steps
        self._loss: float | None = None
        self._cycle: set[int] = set()  # ids of the optimizers that stepped in this cycle
        self._depth = 0  # nested optimizer steps in progress
        self._durations: deque[float] = deque(maxlen=RECENT_STEPS)
        self._last_step_s: float | None = None
        self._next_beat_s = 0.0
        self._step_at_s = 0.0
        self._torch_version = self._cuda_version = self._model = self._uuid = ""
        self._group_size = 0
        self._allocator_room_bytes: int | None = None
        # on CUDA, before the peaks of its allocator were reset
        self._peak_bytes = self._compute_reserved_bytes = 0

    def set_rank(self, rank: int) -> None:
        """Set the rank under which heartbeats are written from now on."""
        self._rank = rank
        self.is_rank = True

    @property
    def rank(self) -> int:
        """The rank: explicitly set, else the process group's, else `RANK` of the environment, else 0."""
        if self._rank is not None:
            return self._rank
        distributed = sys.modules.get("torch.distributed")
        if distributed is not None and distributed.is_available() and distributed.is_initialized():
            self._rank = int(distributed.get_rank())
            return self._rank
        return int(os.environ.get("RANK", "0"))

    def attach(self, torch: Any) -> None:
        """Install the hooks in the module `torch`, and create the virtual device if the settings
        ask for one.
        """
        self._torch_version = str(torch.__version__)
        self._cuda_version = str(torch.version.cuda or "")
        os.register_at_fork(after_in_child=self._after_fork)
        if self._capacity_bytes is not None:
            self.device = importlib.import_module(
                "orchestrator.training.guard.virtual_device"
            ).VirtualDevice(self._capacity_bytes)
        optimizers = importlib.import_module(
            "torch.optim.optimizer"
        )  # torch.optim does not keep the name
        optimizers.register_optimizer_step_pre_hook(self._before_optimizer)
        optimizers.register_optimizer_step_post_hook(self._after_optimizer)
        progress.listen(self._on_reported_step)
        progress.measure(self._read_peak_since_last_call)
        torch.autograd.backward = self._count_backward_calls(torch.autograd.backward)
        torch.autograd.grad = self._count_backward_calls(torch.autograd.grad)
        self._end_startup_at_forward(torch)

    def _end_startup_at_forward(self, torch: Any) -> None:
        """Install a hook that ends the startup phase at the first forward pass in training mode,
        and then removes itself.
        """

        def begun(module: Any, _: Any) -> None:
            if module.training and torch.is_grad_enabled():
                handle.remove()
                if self.phase == "startup":
                    self._passes.begin_forward()
                    self._enter_phase("forward")

        handle = importlib.import_module(
            "torch.nn.modules.module"
        ).register_module_forward_pre_hook(begun)

    @property
    def pass_done(self) -> float | None:
        """Done fraction (0 to 1) of the running forward or backward pass; None if unknown."""
        return self._passes.compute_fraction_done(self.phase)

    def _count_allocations(self) -> int:
        """Return the number of allocations so far on this rank's device."""
        if self.device is not None:
            return self.device.allocations
        cuda = self._find_initialised_cuda()
        return 0 if cuda is None else int(cuda.memory_stats().get("allocation.all.allocated", 0))

    def _count_backward_calls(self, backward: Callable[..., Any]) -> Callable[..., Any]:
        @functools.wraps(backward)
        def watched(*args: Any, **kwargs: Any) -> Any:
            self._record_mixing_operations(*args)
            if self.steps_done < PROBE_STEPS:
                self._forward_bytes = max(self._forward_bytes, self.read_live_bytes())
            self._passes.begin_backward()
            self._enter_phase("backward")
            result = backward(*args, **kwargs)
            self._backwards += 1
            self._passes.end_backward()
            self._enter_phase("forward")
            return result

        return watched

    def _record_mixing_operations(self, *args: Any) -> None:
        """Record which operations of the first backward graph mix the samples of a micro-batch, as
        batch norm does.
        """
        if self._is_mixing_known:
            return
        self._is_mixing_known = True
        losses = args[0] if args else ()
        # the edge: whatever the graph of somebody's loss looks like, the training goes on
        with contextlib.suppress(Exception):
            for loss in losses if isinstance(losses, list | tuple) else (losses,):
                self._mixing += list_mixing_operations(loss)

    def write_heartbeat(self) -> None:
        """Write the heartbeat file now; exit if a newer attempt of the job exists.

        Several processes may have the same rank: the file belongs to the one with the most steps.
        """
        self.is_rank = True
        beat = Heartbeat(
            rank=self.rank,
            step=self.step,
            steps_done=self.steps_done,
            step_s=statistics.median(self._durations) if self._durations else None,
            peak_bytes=self.read_peak_bytes(),
            phase=self.phase,
            at_s=time.time(),
            loss=self._loss,
            torch_version=self._torch_version,
            python_version=platform.python_version(),
            cuda_version=self._cuda_version,
            driver_version=_read_driver_version(),
            device_model=self._read_device_model(),
            device_uuid=self._uuid,
            reserved_bytes=self.read_reserved_bytes(),
            allocator_room_bytes=self.read_allocator_room_bytes(),
            pid=os.getpid(),
            backwards=self._backwards,
            live_bytes=self.read_live_bytes(),
            forward_bytes=self._forward_bytes,
            group_size=self._find_largest_group_size(),
            signal=self._signal,
            mixing=self._mixing,
            step_at_s=self._step_at_s,
            restored_steps=self._restored_steps,
        )
        self._end_if_stale()
        path = self._folder.heartbeat(beat.rank)
        if not _other_process_leads(path, beat):
            with contextlib.suppress(OSError):  # a full disk must not end the training
                write_json(path, beat)
        self._next_beat_s = time.monotonic() + self._interval_s

    def note_signal(self, signal_number: int) -> None:
        """Record a signal for which the program has a handler, whatever the handler then does: the
        process was told to end.
        """
        self._signal = signal_number
        if self.is_rank:
            self.write_heartbeat()

    def _find_largest_group_size(self) -> int | None:
        """Return the size of the largest process group that this process has joined.

        0 where it can have exchanged data with no other rank; None where a library other than
        torch.distributed may connect ranks.
        """
        distributed = sys.modules.get("torch.distributed")
        if distributed is None or not distributed.is_available():
            return None
        if distributed.is_initialized():
            self._group_size = max(self._group_size, int(distributed.get_world_size()))
        if self._group_size:
            return self._group_size
        rpc = sys.modules.get("torch.distributed.rpc.api")
        # init_rpc makes no process group
        has_agent = rpc is not None and rpc._is_current_rpc_agent_set()
        return None if has_agent or any(name in sys.modules for name in OTHER_GROUPS) else 0

    def read_peak_bytes(self) -> int:
        """Return the peak bytes of live tensors so far on this rank's device; 0 before first use.

        On CUDA these are requested bytes. `max_memory_allocated` counts whole blocks: up to 1 MiB
        more for each tensor, 3 % of a Llama of 0.4 billion parameters (H100, 2026-11-26).
        `read_reserved_bytes` includes these.
        """
        if self.device is not None:
            return self.device.peak_bytes
        cuda = self._find_initialised_cuda()
        return (
            self._peak_bytes
            if cuda is None
            else max(self._peak_bytes, _read_requested_peak_bytes(cuda))
        )

    def _read_peak_since_last_call(self) -> int:
        """Return the peak bytes of live tensors since the last call, and reset PyTorch's own peak."""
        if self.device is not None:
            peak_bytes = self.device.recent_peak_bytes
            self.device.reset_recent_peak()
            return peak_bytes
        cuda = self._find_initialised_cuda()
        if cuda is None:
            return 0
        peak_bytes = _read_requested_peak_bytes(cuda)
        self._peak_bytes, self._compute_reserved_bytes = (
            max(self._peak_bytes, peak_bytes),
            self.read_reserved_bytes(),
        )
        cuda.reset_peak_memory_stats()
        return peak_bytes

    def read_live_bytes(self) -> int:
        """Return the bytes allocated now on this rank's device; 0 before first use."""
        if self.device is not None:
            return self.device.live_bytes
        cuda = self._find_initialised_cuda()
        return 0 if cuda is None else int(cuda.memory_allocated())

    def read_reserved_bytes(self) -> int:
        """Return the peak bytes reserved by PyTorch's CUDA allocator so far; 0 without CUDA."""
        cuda = self._find_initialised_cuda()
        return (
            0
            if cuda is None
            else max(self._compute_reserved_bytes, int(cuda.max_memory_reserved()))
        )

    def read_allocator_room_bytes(self) -> int | None:
        """Return the minimum so far of free plus reserved bytes on this rank's device; None without
        CUDA.

        The context, communicators, libraries with their own allocations and other processes hold
        the rest.
        """
        cuda = self._find_initialised_cuda()
        if cuda is not None and not cuda.is_current_stream_capturing():
            # After a CUDA error the queries raise. Free memory is read first: what the allocator
            # reserves in between
            # then counts as available.
            with contextlib.suppress(RuntimeError):
                room_bytes = int(cuda.mem_get_info()[0]) + int(cuda.memory_reserved())
                self._allocator_room_bytes = min(
                    room_bytes, self._allocator_room_bytes or room_bytes
                )
        return self._allocator_room_bytes

    def _read_device_model(self) -> str:
        """Return the driver's name for this rank's device; "" before its first use."""
        cuda = self._find_initialised_cuda()
        if cuda is not None and not self._model:
            # After a CUDA error, and where a build of PyTorch lacks either: the rank goes on.
            with contextlib.suppress(Exception):
                self._model = str(cuda.get_device_name())
                self._uuid = str(getattr(cuda.get_device_properties(), "uuid", ""))
        return self._model

    def _find_initialised_cuda(self) -> Any:
        """Return the module torch.cuda once this rank has initialised a real device, else None."""
        torch = sys.modules.get("torch")
        return torch.cuda if self.device is None and torch and torch.cuda.is_initialized() else None

    def _after_fork(self) -> None:
        """Reset the counters: a forked child is a rank once it trains, and counts from there."""
        self._rank = None
        self.is_rank = False
        self._next_beat_s = 0.0
        self._signal = 0
        self.step = 0
        self.steps_done = 0
        self._restored_steps = None
        self._backwards = 0
        self._last_step_s = None
        self._group_size = 0
        self._durations.clear()

    def _enter_phase(self, phase: str) -> None:
        self.phase = phase
        if self.device is not None:
            self.device.rejoin()
            self.device.enter_thread()
        if time.monotonic() >= self._next_beat_s:
            self.write_heartbeat()

    def _before_optimizer(self, *_: Any) -> None:
        if (
            self._depth == 0
            and self._fault
            and self.rank == self._fault_rank
            and self.step + 1 >= self._fault_step
        ):
            kind = self._fault
            self._fault = None
            self.phase = "optimizer"
            self.injected = kind == "oom"
            self.write_heartbeat()
            raise_fault(kind, self.device.capacity_bytes if self.device else None)
        self._depth += 1
        if self.phase != "backward":
            self._enter_phase("optimizer")

    def _after_optimizer(self, optimizer: Any, *_: Any) -> None:
        self._depth = max(self._depth - 1, 0)
        if self._depth:
            return
        if not self._loop_reports:
            if not self._cycle or id(optimizer) in self._cycle:
                self._cycle.clear()
                if self.steps_done == 0:
                    cuda = self._find_initialised_cuda()
                    self._restored_steps = count_restored_steps(optimizer, cuda)
                self._complete_step(self.step + 1)
            self._cycle.add(id(optimizer))
        if self.phase != "backward":
            self._passes.begin_forward()
            self._enter_phase("forward")

    def _on_reported_step(self, step: int, loss: float | None) -> None:
        if not self._loop_reports:
            self._loop_reports = True
            self.steps_done = 0
            self._last_step_s = None
            self._durations.clear()
        self._loss = loss
        self._complete_step(step)

    def _complete_step(self, step: int) -> None:
        now_s = time.monotonic()
        if self._last_step_s is not None:
            self._durations.append(now_s - self._last_step_s)
        self._last_step_s = now_s
        self._step_at_s = time.time()
        self.step = step
        self.steps_done += 1
        self._passes.complete_step()
        self._find_largest_group_size()
        # a program may stand still after its last step, which no later step would tell
        is_due = self.steps_done == 1 or step == self._declared_last_step
        if is_due or self.beat_after_next_step or now_s >= self._next_beat_s:
            self.beat_after_next_step = False
            self.write_heartbeat()

    def _end_if_stale(self) -> None:
        folder = self._folder.path
        try:
            newest = int((folder.parent.parent / "epoch").read_text())
        except (OSError, ValueError):
            return
        if folder.name.isdigit() and newest > int(folder.name):
            print(
                f"guard: attempt {newest} of this job exists; attempt {folder.name} ends",
                file=sys.stderr,
            )
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(STALE_EXIT_CODE)


@functools.cache
def _read_driver_version() -> str:
    """Return the version of the loaded NVIDIA driver; "" without one."""
    try:
        return DRIVER_VERSION.read_text().strip()
    except OSError:
        return ""


def count_restored_steps(optimizer: Any, cuda: Any) -> int | None:
    """Return how many steps an optimizer had made before its first one in this process.

    Adam and its kin count them in their state, which a checkpoint restores (`_init_group` in
    torch/optim/adam.py). None where the state has no count, or while `cuda` (torch.cuda, or None)
    captures a graph.
    """
    count = 0
    try:
        # a read of a device's number would end the capture
        if cuda is not None and cuda.is_current_stream_capturing():
            return None
        for state in optimizer.state.values():
            if "step" in state:
                count = max(count, int(state["step"]))
    except Exception:  # the edge: somebody's optimizer may keep anything under this name
        return None
    return count - 1 if count > 0 else None


def _read_requested_peak_bytes(cuda: Any) -> int:
    return int(cuda.memory_stats().get("requested_bytes.all.peak") or cuda.max_memory_allocated())


def _other_process_leads(path: Path, beat: Heartbeat) -> bool:
    """Return whether the file at `path` is the heartbeat of another process of this rank with more
    steps.
    """
    try:
        other = json.loads(path.read_text())
        return bool(other["pid"] != beat.pid and other["steps_done"] > beat.steps_done)
    except (OSError, ValueError, KeyError):
        return False


def write_durably(path: Path, report: Any) -> None:
    """Write JSON and fsync the file and its folder."""
    write_json(path, report)
    for name in (path, path.parent):
        descriptor = os.open(name, os.O_RDONLY)
        os.fsync(descriptor)
        os.close(descriptor)
