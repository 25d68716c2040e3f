"""What does a rank hold on a device that is not there? CPU tensors, counted exactly, under an enforced cap."""

from __future__ import annotations

import contextlib
import os
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.modules.module import register_module_parameter_registration_hook
from torch.utils._python_dispatch import (
    TorchDispatchMode,
    _get_current_dispatch_mode,
    _get_current_dispatch_mode_stack,
    is_traceable_wrapper_subclass,
)
from torch.utils._pytree import tree_flatten

MIB = 2**20
UNLIMITED_BYTES = 2**63 - 1

# gloo's thread holds what a collective worked on until it gets the interpreter once more after the collective is done,
# which a busy main thread gives away after 5 ms only (sys.getswitchinterval). It needs a processor for that, too. Not
# waited for, 12 of 120 peaks were up to 11 % too high beside busy processes, and by the same amounts (2026-11).
LET_GO_S = 0.0002  # at each new peak: some hundred in a training's first step, none later
LET_GO_TRIES = 25  # at most, and before an out-of-memory error, each ten times as long
GLOO_THREAD = "(pt_gloo_runloop"  # torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, runLoop; as in proc(5), stat


class VirtualDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which CPU storages are device memory: `live_bytes` of them, never more than `capacity_bytes`.

    The operation that crosses the capacity raises torch.OutOfMemoryError. Counted is what operations of the entering
    threads return (the backward pass on CPU runs in the calling thread); scratch inside a kernel and what other threads
    or forked children make is not, nor what is made within `host_memory()`. Storages made elsewhere count from the
    first operation that returns a view of them. What only gloo's thread holds on to, for a moment after a collective is
    done, is waited for. Enter it once and before the model is built.
    """

    supports_higher_order_operators = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity_bytes = self._whole_bytes = capacity_bytes
        self.has_left = False  # in a forked child
        self._thread = threading.local()  # whether it is known to be on the device
        self.live_bytes = 0
        self.allocations = 0  # storages that were ever made on it
        self.peak_bytes = 0  # highest since construction
        self.recent_peak_bytes = 0  # highest since `reset_recent_peak`
        self.on_out_of_memory: Callable[[torch.cuda.OutOfMemoryError, int], None] | None = None
        self.host = False  # whether what is new now is host memory
        self._sizes: dict[int, int] = {}  # address of the storage -> bytes it has
        self._deaths: dict[int, _Death] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # its wrapper around __torch_dispatch__ costs as much as the counting

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def reset_recent_peak(self) -> None:
        """Let `recent_peak_bytes` start again from what is live now."""
        self.recent_peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            return NotImplemented  # a wrapper (DTensor, ...) unwraps itself; its inner operations come back here
        out = func(*args, **kwargs) if kwargs else func(*args)
        added = 0
        if isinstance(out, torch.Tensor):
            if out.is_cpu:
                try:
                    storage = out.untyped_storage()
                    if self._sizes.get(storage._cdata) == storage.nbytes():
                        return out
                    added = self._count(storage)
                except NotImplementedError:  # sparse and opaque layouts have no storage of their own
                    added = self._count_parts(out)
        elif out is not None:
            added = sum(self._count_tensor(leaf) for leaf in tree_flatten(out)[0] if isinstance(leaf, torch.Tensor))
        if added > 0 and self.live_bytes > self.capacity_bytes and self._is_full():
            out = storage = args = kwargs = None  # type: ignore[assignment]  # the traceback keeps nothing alive
            raise self._out_of_memory(added)
        return out

    def __enter__(self) -> VirtualDevice:
        resize, count = torch.UntypedStorage.resize_, self._count_resized

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            count(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # FSDP2 frees and refills by resizing
        self._registration = register_module_parameter_registration_hook(self._count_parameter)
        os.register_at_fork(after_in_child=self._forked)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._registration.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _forked(self) -> None:
        """A child of a process that uses its device has none, as under CUDA; one of a process that never did, may."""
        if self.peak_bytes:
            self.leave()

    def leave(self) -> None:
        """In a child, which is a host process, as workers of data loaders are, until it rejoins."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
            self.has_left = True
        self.capacity_bytes = UNLIMITED_BYTES  # where another mode lies on top

    def rejoin(self) -> None:
        """In a forked child that has turned out to be a rank: from now on it has a device of its own, as large.

        What it got from its parent stays counted; nothing happens where the device was not left.
        """
        if self.has_left:
            self.has_left, self.capacity_bytes = False, self._whole_bytes
            self.__enter__()

    def enter_thread(self) -> None:
        """In a thread that has turned out to train: from now on what it makes counts, too.

        Parameters count wherever they are made. Other threads read data for the host.
        """
        if not getattr(self._thread, "is_known", False):
            self._thread.is_known = True
            if self not in _get_current_dispatch_mode_stack():
                super().__enter__()  # type: ignore[no-untyped-call]

    def _count(self, storage: torch.UntypedStorage) -> int:
        """Bytes by which the storage has grown since it was last counted; negative where it shrank."""
        key, size = storage._cdata, storage.nbytes()
        known = self._sizes.get(key)
        if known is None:
            if storage.device.type != "cpu":  # a fake tensor claims to be on the CPU, its storage does not
                return 0
            death = self._deaths[key] = _Death(storage, self._forget)
            death.key, death.host = key, self.host
            self.allocations += not self.host
            known = 0
        self._sizes[key] = size
        if self._deaths[key].host:
            return 0
        self.live_bytes = live = self.live_bytes + size - known
        if live > self.recent_peak_bytes and live <= self.capacity_bytes:
            if live > self.peak_bytes and _in_gang():
                _let_go()
            self._note_peak()
        return size - known

    def _note_peak(self) -> None:
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.live_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _is_full(self) -> bool:
        """Whether more is held than the device has, also when everybody has let go of what is done with."""
        for _ in range(LET_GO_TRIES if _in_gang() else 0):
            time.sleep(10 * LET_GO_S)
            if self.live_bytes <= self.capacity_bytes:
                self._note_peak()
                return False
        return True

    def _count_tensor(self, tensor: torch.Tensor) -> int:
        if not tensor.is_cpu:
            return 0
        try:
            return self._count(tensor.untyped_storage())
        except NotImplementedError:
            return self._count_parts(tensor)

    def _count_parts(self, tensor: torch.Tensor) -> int:
        if tensor.layout is torch.sparse_coo:
            return self._count_tensor(tensor._indices()) + self._count_tensor(tensor._values())
        if tensor.layout in (torch.sparse_csr, torch.sparse_bsr):
            return sum(map(self._count_tensor, (tensor.crow_indices(), tensor.col_indices(), tensor.values())))
        if tensor.layout in (torch.sparse_csc, torch.sparse_bsc):
            return sum(map(self._count_tensor, (tensor.ccol_indices(), tensor.row_indices(), tensor.values())))
        return 0

    def _count_resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu":
            added = self._count(storage)
            if added > 0 and self.live_bytes > self.capacity_bytes and self._is_full():
                raise self._out_of_memory(added)

    def _count_parameter(self, _module: torch.nn.Module, _name: str, parameter: torch.Tensor | None) -> None:
        """Parameters read from a file come from outside; those of a wrapper were counted when it was made."""
        if parameter is not None and not is_traceable_wrapper_subclass(parameter):
            added = self._count_tensor(parameter)
            if added > 0 and self.live_bytes > self.capacity_bytes and self._is_full():
                raise self._out_of_memory(added)

    def _forget(self, death: _Death) -> None:
        del self._deaths[death.key]
        size = self._sizes.pop(death.key)
        if not death.host:
            self.live_bytes -= size

    def _out_of_memory(self, requested_bytes: int) -> torch.cuda.OutOfMemoryError:
        """The error, in the words of PyTorch's CUDA allocator so that every reader of such messages understands it."""
        used = self.live_bytes
        error = torch.cuda.OutOfMemoryError(
            f"Virtual device out of memory. Tried to allocate {_amount(requested_bytes)}. "
            f"Virtual device has a total capacity of {_amount(self.capacity_bytes)} "
            f"of which {_amount(max(self.capacity_bytes - used, 0))} is free. "
            f"This process has {_amount(used)} memory in use."
        )
        if self.on_out_of_memory:
            self.on_out_of_memory(error, requested_bytes)
        return error


@contextlib.contextmanager
def host_memory() -> Iterator[None]:
    """Within, CPU storages that the calling thread makes are the host's: the virtual device never counts them.

    Storages that it counts already stay counted. Without a virtual device there is nothing to tell apart.
    """
    device = next((mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, VirtualDevice)), None)
    if device is None or device.host:
        yield
        return
    device.host = True
    try:
        yield
    finally:
        device.host = False


def _let_go() -> None:
    """Sleep until gloo's threads, too, have nothing more to do."""
    for _ in range(LET_GO_TRIES):
        time.sleep(LET_GO_S)
        if not any(map(_is_gloo_at_work, _threads())):
            return


def _threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:  # not Linux: one sleep has to do
        return []


def _is_gloo_at_work(thread: str) -> bool:
    """Whether it is a thread of gloo's that runs, or would if it had a processor."""
    try:
        with open(f"/proc/self/task/{thread}/stat") as stat:
            name, _, state = stat.read().rpartition(")")
    except OSError:  # it is gone
        return False
    return name.endswith(GLOO_THREAD) and state.startswith(" R")


def _in_gang() -> bool:
    return dist.is_available() and dist.is_initialized()


def _amount(count: int) -> str:
    return f"{count / MIB:.2f} MiB" if count >= MIB else f"{count / 1024:.2f} KiB" if count >= 1024 else f"{count} B"


class _Death(weakref.ref[torch.UntypedStorage]):
    """Calls back when its storage is freed; cheaper than weakref.finalize (0.4 instead of 1.1 microseconds)."""

    __slots__ = ("host", "key")
    key: int
    host: bool
