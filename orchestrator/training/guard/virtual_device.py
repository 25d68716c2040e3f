"""A virtual device: CPU tensors represent device memory, counted exactly, under an enforced capacity."""

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

# After a collective, gloo's thread keeps its tensors until it next gets the interpreter lock. A
# busy main thread yields
# that lock only every 5 ms (sys.getswitchinterval), and gloo's thread needs a free core, too.
# Without waiting, 12 of
# 120 peaks were up to 11 % too high on a busy machine, always by the same amounts (2026-11).
LET_GO_S = 0.0002  # per new peak: some hundred in the first step of a training, none later
LET_GO_TRIES = 25  # at most; before an out-of-memory error each sleep is ten times as long
# torch/csrc/distributed/c10d/ProcessGroupGloo.cpp, runLoop; as in proc(5), stat
GLOO_THREAD = "(pt_gloo_runloop"
BY_ROWS = "crow_indices", "col_indices", "values"
BY_COLUMNS = "ccol_indices", "row_indices", "values"
PARTS = {  # methods that return the tensors of a sparse one, by its layout
    torch.sparse_coo: ("_indices", "_values"),
    torch.sparse_csr: BY_ROWS,
    torch.sparse_bsr: BY_ROWS,
    torch.sparse_csc: BY_COLUMNS,
    torch.sparse_bsc: BY_COLUMNS,
}


class VirtualDevice(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """A context in which CPU storages count as device memory, `live_bytes` up to `capacity_bytes`.

    The operation that exceeds the capacity raises torch.OutOfMemoryError. Enter it once, before the model is built.

    - Counted: what operations of the entering threads return. On CPU the backward pass runs in the calling thread.
    - Not counted: scratch inside a kernel, storages of other threads and forked children, and
      `use_host_memory()`.
    - Storages from elsewhere count from the first operation that returns a view of them.
    - Tensors that only gloo's thread still holds after a collective are waited for.
    """

    supports_higher_order_operators = True

    def __init__(self, capacity_bytes: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.capacity_bytes = self._whole_bytes = capacity_bytes
        self.has_left = False  # in a forked child
        self._thread = threading.local()  # whether this thread has entered the device
        self.live_bytes = 0
        self.allocations = 0  # storages ever created on it
        self.peak_bytes = 0  # highest since construction
        self.recent_peak_bytes = 0  # highest since `reset_recent_peak`
        self.on_out_of_memory: Callable[[torch.cuda.OutOfMemoryError, int], None] | None = None
        self.host = False  # whether new storages count as host memory
        self._sizes: dict[int, int] = {}  # address of the storage -> its bytes
        self._deaths: dict[int, _StorageRef] = {}

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        return False  # torch's wrapper around __torch_dispatch__ costs as much as the counting

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def reset_recent_peak(self) -> None:
        """Reset `recent_peak_bytes` to `live_bytes`."""
        self.recent_peak_bytes = self.live_bytes

    def __torch_dispatch__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        if types and any(hasattr(kind, "__tensor_flatten__") for kind in types):
            # wrapper tensors (DTensor, ...) unwrap themselves; inner operations arrive here
            return NotImplemented
        out = func(*args, **kwargs) if kwargs else func(*args)
        added = 0
        if isinstance(out, torch.Tensor):
            if out.is_cpu:
                try:
                    storage = out.untyped_storage()
                    if self._sizes.get(storage._cdata) == storage.nbytes():
                        return out
                    added = self._compute_grown_bytes(storage)
                except NotImplementedError:  # sparse and opaque layouts have no storage
                    added = self._count_inner_tensors(out)
        elif out is not None:
            added = sum(
                self._count_tensor(leaf)
                for leaf in tree_flatten(out)[0]
                if isinstance(leaf, torch.Tensor)
            )
        if added > 0 and self.live_bytes > self.capacity_bytes and self._is_full():
            out = storage = args = kwargs = None  # type: ignore[assignment]  # the traceback keeps nothing alive
            raise self._make_out_of_memory_error(added)
        return out

    def __enter__(self) -> VirtualDevice:
        resize = torch.UntypedStorage.resize_
        count = self._count_resized

        def resize_(storage: torch.UntypedStorage, size: int) -> Any:
            result = resize(storage, size)
            count(storage)
            return result

        self._resize = resize
        torch.UntypedStorage.resize_ = resize_  # type: ignore[method-assign,assignment]  # FSDP2 frees and refills by resize
        self._registration = register_module_parameter_registration_hook(self._count_parameter)
        os.register_at_fork(after_in_child=self._leave_if_used)
        super().__enter__()  # type: ignore[no-untyped-call]
        return self

    def __exit__(self, *exception: Any) -> None:
        torch.UntypedStorage.resize_ = self._resize  # type: ignore[method-assign]
        self._registration.remove()
        super().__exit__(*exception)  # type: ignore[no-untyped-call]

    def _leave_if_used(self) -> None:
        """Leave the device in a forked child if the parent has used the device, as CUDA does not
        survive a fork either.
        """
        if self.peak_bytes:
            self.leave()

    def leave(self) -> None:
        """Stop counting in a child process, such as a data loader worker, until `rejoin`."""
        if _get_current_dispatch_mode() is self:
            self.__exit__(None, None, None)
            self.has_left = True
        self.capacity_bytes = UNLIMITED_BYTES  # in case another mode lies on top

    def rejoin(self) -> None:
        """Give a forked child that turned out to be a rank a device of the same capacity.

        Storages inherited from the parent stay counted. Does nothing if the device was not left.
        """
        if self.has_left:
            self.has_left = False
            self.capacity_bytes = self._whole_bytes
            self.__enter__()

    def enter_thread(self) -> None:
        """Count storages of the calling thread, too, because it trains.

        Parameters count in every thread. Threads that only read data are not counted.
        """
        if not getattr(self._thread, "is_known", False):
            self._thread.is_known = True
            if self not in _get_current_dispatch_mode_stack():
                super().__enter__()  # type: ignore[no-untyped-call]

    def _compute_grown_bytes(self, storage: torch.UntypedStorage) -> int:
        """Return the bytes by which the storage grew since it was last counted; negative if it
        shrank.
        """
        key = storage._cdata
        size = storage.nbytes()
        counted = self._sizes.get(key)
        if counted is None:
            if storage.device.type != "cpu":  # a fake tensor reports the CPU, its storage does not
                return 0
            death = self._deaths[key] = _StorageRef(storage, self._forget)
            death.key = key
            death.host = self.host
            self.allocations += not self.host
            counted = 0
        self._sizes[key] = size
        if self._deaths[key].host:
            return 0
        self.live_bytes = live = self.live_bytes + size - counted
        if live > self.recent_peak_bytes and live <= self.capacity_bytes:
            if live > self.peak_bytes and _is_in_process_group():
                _wait_for_gloo()
            self._note_peak()
        return size - counted

    def _note_peak(self) -> None:
        self.recent_peak_bytes = max(self.recent_peak_bytes, self.live_bytes)
        self.peak_bytes = max(self.peak_bytes, self.live_bytes)

    def _is_full(self) -> bool:
        """Return whether the capacity is still exceeded after gloo's threads have released finished
        tensors.
        """
        for _ in range(LET_GO_TRIES if _is_in_process_group() else 0):
            time.sleep(10 * LET_GO_S)
            if self.live_bytes <= self.capacity_bytes:
                self._note_peak()
                return False
        return True

    def _count_tensor(self, tensor: torch.Tensor) -> int:
        if not tensor.is_cpu:
            return 0
        try:
            return self._compute_grown_bytes(tensor.untyped_storage())
        except NotImplementedError:
            return self._count_inner_tensors(tensor)

    def _count_inner_tensors(self, tensor: torch.Tensor) -> int:
        names = PARTS.get(tensor.layout, ())
        return sum(self._count_tensor(getattr(tensor, name)()) for name in names)

    def _count_resized(self, storage: torch.UntypedStorage) -> None:
        if storage.device.type == "cpu":
            self._check_room(self._compute_grown_bytes(storage))

    def _count_parameter(
        self, _module: torch.nn.Module, _name: str, parameter: torch.Tensor | None
    ) -> None:
        """Count a registered parameter: it may come from a file. Wrapper tensors were counted at construction."""
        if parameter is not None and not is_traceable_wrapper_subclass(parameter):
            self._check_room(self._count_tensor(parameter))

    def _check_room(self, added_bytes: int) -> None:
        """Raise the out-of-memory error if the capacity is exceeded, after `added_bytes` were added
        to the live bytes.
        """
        if added_bytes > 0 and self.live_bytes > self.capacity_bytes and self._is_full():
            raise self._make_out_of_memory_error(added_bytes)

    def _forget(self, storage_reference: _StorageRef) -> None:
        del self._deaths[storage_reference.key]
        size = self._sizes.pop(storage_reference.key)
        if not storage_reference.host:
            self.live_bytes -= size

    def _make_out_of_memory_error(self, requested_bytes: int) -> torch.cuda.OutOfMemoryError:
        """Return the out-of-memory error in the wording of PyTorch's CUDA allocator, so that
        existing parsers read it.
        """
        used = self.live_bytes
        error = torch.cuda.OutOfMemoryError(
            f"Virtual device out of memory. Tried to allocate {_format_bytes(requested_bytes)}. "
            f"Virtual device has a total capacity of {_format_bytes(self.capacity_bytes)} "
            f"of which {_format_bytes(max(self.capacity_bytes - used, 0))} is free. "
            f"This process has {_format_bytes(used)} memory in use."
        )
        if self.on_out_of_memory:
            self.on_out_of_memory(error, requested_bytes)
        return error


@contextlib.contextmanager
def use_host_memory() -> Iterator[None]:
    """Open a context whose new CPU storages are host memory: the virtual device never counts them.

    Storages that are counted already stay counted. Without a virtual device it does nothing.
    """
    device = next(
        (mode for mode in _get_current_dispatch_mode_stack() if isinstance(mode, VirtualDevice)),
        None,
    )
    if device is None or device.host:
        yield
        return
    device.host = True
    try:
        yield
    finally:
        device.host = False


def _wait_for_gloo() -> None:
    """Sleep until gloo's threads are idle, at most LET_GO_TRIES * LET_GO_S seconds."""
    for _ in range(LET_GO_TRIES):
        time.sleep(LET_GO_S)
        if not any(map(_is_gloo_at_work, _list_threads())):
            return


def _list_threads() -> list[str]:
    try:
        return os.listdir("/proc/self/task")
    except OSError:  # not Linux: one sleep only
        return []


def _is_gloo_at_work(thread_id: str) -> bool:
    """Return whether the thread is one of gloo's and is running or runnable."""
    try:
        with open(f"/proc/self/task/{thread_id}/stat") as stat:
            name, _, state = stat.read().rpartition(")")
    except OSError:  # the thread has ended
        return False
    return name.endswith(GLOO_THREAD) and state.startswith(" R")


def _is_in_process_group() -> bool:
    return dist.is_available() and dist.is_initialized()


def _format_bytes(count: int) -> str:
    if count >= MIB:
        return f"{count / MIB:.2f} MiB"
    if count >= 1024:
        return f"{count / 1024:.2f} KiB"
    return f"{count} B"


class _StorageRef(weakref.ref[torch.UntypedStorage]):
    """Weak reference that calls back when its storage is freed; 0.4 us instead of
    weakref.finalize's 1.1 us.
    """

    __slots__ = ("host", "key")
    key: int
    host: bool
