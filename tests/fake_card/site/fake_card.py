"""Add to `torch._C` of PyTorch's CPU build what CUDA needs, answered by card.cpp: `torch.cuda` is the real one.

`install()` only waits for the imports of torch: the first of them costs what it costs without a card.
"""

import ctypes
import importlib
import importlib.abc
import importlib.util
import os
import sys
import time
import types

CAPABILITY = (9, 0)  # of an H100
NAME = "Fake H200"
STATS = (
    "allocated",
    "allocated_peak",
    "reserved",
    "reserved_peak",
    "allocations",
    "frees",
    "ooms",
    "retries",
    "free",
    "total",
)


def install():
    """Wait for torch."""
    sys.meta_path.insert(0, _Around())


class _Around(importlib.abc.MetaPathFinder):
    """Runs a function of ours before and after the ordinary import of a module."""

    def __init__(self):
        self._waiting = {
            "torch.cuda": (_before_cuda, _after_cuda),
            "torch.storage": (None, _after_storage),
            "torch.distributed.constants": (_before_nccl, None),
        }

    def find_spec(self, name, *_):
        if (
            name == "torch._C" and _Runtime.library is None
        ):  # before PyTorch asks for the first time what there is
            _Runtime.library = _library()
        if name not in self._waiting:
            return None
        before, after = self._waiting.pop(name)
        spec = importlib.util.find_spec(name)
        run = spec.loader.exec_module

        def exec_module(module):
            if before:
                before()
            run(module)
            if after:
                after(module)

        spec.loader.exec_module = exec_module
        return spec


def _library():
    library = ctypes.CDLL(os.environ["NVIDIA_FAKE_CARD"])
    library.card_stream.restype = library.card_new_stream.restype = ctypes.c_int64
    library.card_set_stream.argtypes = (ctypes.c_int, ctypes.c_int64)
    library.card_fraction.argtypes = (ctypes.c_int, ctypes.c_double)
    library.card_pin.argtypes, library.card_pin.restype = (ctypes.c_void_p, ctypes.c_int64), None
    library.card_unpin.argtypes = (ctypes.c_void_p,)
    return library


def _plain(function):
    """A Python function: torch.compile looks functions up by their hash, and those of ctypes have none."""
    return lambda *args, **kwargs: function(*args, **kwargs)


def _stats(index):
    numbers = (ctypes.c_int64 * len(STATS))()
    _Runtime.library.card_stats(index, numbers)
    return dict(zip(STATS, numbers, strict=True))


class _Runtime:
    library = None
    pid = None  # of the process that has initialised CUDA
    fractions = {}  # noqa: RUF012


def _before_cuda():
    """Give torch._C what torch.cuda looks for when it is imported, and later."""
    import torch

    library = _Runtime.library
    functions = {**_devices(torch, library), **_memory(library), **_streams(torch, library)}
    marks = (
        "rangePushA",
        "rangePop",
        "rangeStartA",
        "rangeEnd",
        "markA",
    )  # of NVTX: DeepSpeed makes them
    torch._C._nvtx = types.SimpleNamespace(**dict.fromkeys(marks, lambda *_: 0))
    for name, value in functions.items():
        setattr(torch._C, name, value if isinstance(value, type | bool) else _plain(value))


def _nothing(*_args, **_kwargs):
    return None


def _devices(torch, library):
    """Return the functions that count the cards, choose the current card and describe them."""

    def set_device(index):
        if index >= library.card_count():
            raise torch.AcceleratorError("CUDA error: invalid device ordinal")
        library.card_select(index)

    def exchange(index):
        old = library.card_current()
        if index >= 0:
            set_device(index)
        return old

    def init():
        if library.card_count() == 0:
            raise RuntimeError("No CUDA GPUs are available")
        library.card_init()
        _Runtime.pid = os.getpid()
        cuda = torch.cuda
        cuda.default_generators = (torch.default_generator,) * library.card_count()
        cuda._get_device_properties = properties

    def properties(index):
        return torch._C._CudaDeviceProperties(_stats(index)["total"])

    return {
        "_has_cuda": True,
        "_CudaDeviceProperties": _Properties,
        "_cuda_getDeviceCount": library.card_count,
        "_cuda_init": init,
        "_cuda_isInBadFork": lambda: _Runtime.pid not in (None, os.getpid()),
        "_cuda_getDevice": library.card_current,
        "_cuda_setDevice": set_device,
        "_cuda_exchangeDevice": exchange,
        "_cuda_maybeExchangeDevice": exchange,
        "_cuda_canDeviceAccessPeer": lambda device, other: device != other,
        "_cuda_getArchFlags": lambda: "sm_90",
        "_nccl_version": lambda: 2 << 32 | 27 << 16 | 5,
        "_nccl_version_suffix": lambda: b"",
    }


def _memory(library):
    """The caching allocator: its numbers, its fraction and its cache."""

    def set_fraction(fraction, index):
        _Runtime.fractions[index] = fraction
        library.card_fraction(index, fraction)

    return {
        "_cuda_emptyCache": lambda: (
            [library.card_empty(index) for index in range(library.card_count())] and None
        ),
        "_cuda_memoryStats": _memory_stats,
        "_cuda_resetPeakMemoryStats": library.card_reset_peaks,
        "_cuda_resetAccumulatedMemoryStats": _nothing,
        "_cuda_memorySnapshot": lambda *_: {"segments": [], "device_traces": []},
        "_cuda_setMemoryFraction": set_fraction,
        "_cuda_getMemoryFraction": lambda index: _Runtime.fractions.get(index, 1.0),
        "_cuda_getAllocatorBackend": lambda: "native",
        "_cuda_cudaCachingAllocator_set_allocator_settings": _nothing,
        "_cuda_ipc_collect": _nothing,
    }


def _memory_stats(index):
    """The nested form that torch.cuda.memory_stats flattens."""
    counters = _stats(index)

    def stat(current, peak, allocated=0, freed=0):
        pool = {"current": current, "peak": peak, "allocated": allocated, "freed": freed}
        return {"all": pool, "small_pool": dict.fromkeys(pool, 0), "large_pool": pool}

    allocated = stat(counters["allocated"], counters["allocated_peak"])
    reserved = stat(counters["reserved"], counters["reserved_peak"])
    blocks = stat(
        counters["allocations"] - counters["frees"], 0, counters["allocations"], counters["frees"]
    )
    return {
        "allocated_bytes": allocated,
        "requested_bytes": allocated,
        "active_bytes": allocated,
        "reserved_bytes": reserved,
        "inactive_split_bytes": stat(0, 0),
        "allocation": blocks,
        "active": blocks,
        "segment": stat(0, 0),
        "inactive_split": stat(0, 0),
        "oversize_allocations": stat(0, 0)["all"],
        "oversize_segments": stat(0, 0)["all"],
        "num_alloc_retries": counters["retries"],
        "num_ooms": counters["ooms"],
        "num_sync_all_streams": 0,
        "num_device_alloc": 0,
        "num_device_free": 0,
        "max_split_size": -1,
    }


def _streams(torch, library):
    """Streams, events and graphs: all work is done when its call returns."""
    return {
        "_cuda_synchronize": _nothing,
        "_cuda_sleep": _nothing,
        "_cuda_setStream": lambda stream_id, device_index, **_: library.card_set_stream(
            device_index, stream_id
        ),
        "_cuda_getCurrentStream": lambda index: (library.card_stream(index), index, 1),
        "_cuda_getDefaultStream": lambda index: (0, index, 1),
        "_cuda_getCurrentRawStream": library.card_stream,
        "_cuda_isCurrentStreamCapturing": lambda: False,
        "_cuda_set_sync_debug_mode": _nothing,
        "_cuda_get_sync_debug_mode": lambda: 0,
        "_CUDAGraph": type("_CUDAGraph", (), {}),
        "_graph_pool_handle": _nothing,
        "_CudaStreamBase": _stream(torch, library),
        "_CudaEventBase": _Event,
    }


def _after_cuda(cuda):
    def mem_get_info(index):
        counters = _stats(index)
        return counters["free"], counters["total"]

    library = _Runtime.library
    cuda._cudart = types.SimpleNamespace(
        cudaError=_CudaError,
        cudaGetErrorString=lambda code: f"error {code}",
        cudaMemGetInfo=mem_get_info,
        cudaHostRegister=lambda data, size, _flags: library.card_pin(data, size) or 0,
        cudaHostUnregister=library.card_unpin,
        cudaProfilerStart=lambda: 0,
        cudaProfilerStop=lambda: 0,
    )


class _CudaError(int):
    success = 0


def _after_storage(module):
    import torch

    new, resize = module.UntypedStorage.__new__, module.UntypedStorage.resize_

    def __new__(cls, *args, device=None, **kwargs):
        if device is not None and torch.device(device).type == "cuda":
            return torch.empty(
                args[0] if args else 0, dtype=torch.uint8, device=device
            ).untyped_storage()
        return (
            new(cls, *args, **kwargs)
            if device is None
            else new(cls, *args, device=device, **kwargs)
        )

    def resize_(storage, size):
        if storage.device.type != "cuda":
            return resize(storage, size)
        torch.ops.fake_card.resize_(storage, size)
        return storage

    module.UntypedStorage.__new__, module.UntypedStorage.resize_ = __new__, resize_


class _Properties:
    def __init__(self, total_memory):
        self.name, self.total_memory, (self.major, self.minor) = NAME, total_memory, CAPABILITY
        self.multi_processor_count, self.warp_size, self.max_threads_per_multi_processor = (
            132,
            32,
            2048,
        )
        (
            self.regs_per_multiprocessor,
            self.shared_memory_per_block,
            self.shared_memory_per_block_optin,
        ) = (
            65536,
            49152,
            232448,
        )
        self.is_integrated = self.is_multi_gpu_board = 0
        self.gcnArchName, self.L2_cache_size, self.uuid = (
            NAME,
            50 << 20,
            "00000000-0000-0000-0000-000000000000",
        )


class _Event:
    """Recorded work is done when `record` returns."""

    def __new__(cls, enable_timing=False, **_):
        event = super().__new__(cls)
        event.recorded_s, event.enable_timing, event.cuda_event = None, enable_timing, 0
        return event

    def __init__(self, *_args, **_kwargs):
        pass

    def record(self, _stream=None):
        self.recorded_s = time.perf_counter()

    def wait(self, _stream=None):
        pass

    def query(self):
        return True

    def synchronize(self):
        pass

    def elapsed_time(self, end):
        assert self.enable_timing, "made with enable_timing=True"
        assert end.enable_timing, "made with enable_timing=True"
        return (end.recorded_s - self.recorded_s) * 1000.0

    @property
    def device(self):
        import torch

        return torch.device("cuda", torch.cuda.current_device())


def _stream(torch, library):
    class Stream(torch.Stream):
        def __new__(cls, priority=0, stream_id=0, device_index=0, device_type=0):
            if not device_type:
                device_index = library.card_current()
                stream_id, device_type = library.card_new_stream(device_index), 1
            stream = super().__new__(
                cls, stream_id=stream_id, device_index=device_index, device_type=device_type
            )
            stream.priority = priority
            return stream

        def __init__(self, *_args, **_kwargs):
            pass

        @property
        def cuda_stream(self):
            return self.stream_id

        def query(self):
            return True

        def synchronize(self):
            pass

    return Stream


def _before_nccl():
    """nccl is a backend like gloo, for tensors of cards."""
    import datetime

    import torch

    c10d = torch._C._distributed_c10d

    class Kind(type):
        def __instancecheck__(cls, backend):
            return isinstance(backend, c10d.Backend) and backend.name() == "nccl"

    class Options(c10d.ProcessGroupGloo._Options if hasattr(c10d, "ProcessGroupGloo") else object):
        def __init__(self, is_high_priority_stream=False):
            super().__init__()
            self.is_high_priority_stream = is_high_priority_stream
            self._timeout = datetime.timedelta(minutes=10)

    class ProcessGroupNCCL(metaclass=Kind):
        def __new__(cls, store, rank, size, options=None):
            gloo_options = c10d.ProcessGroupGloo._Options()
            gloo_options._devices = [c10d.ProcessGroupGloo.create_default_device()]
            gloo_options._timeout = options._timeout if options else datetime.timedelta(minutes=10)
            group = c10d.ProcessGroup(store, rank, size)
            gloo = c10d.ProcessGroupGloo(store, rank, size, gloo_options)
            group._register_backend(torch.device("cpu"), c10d.ProcessGroup.BackendType.GLOO, gloo)
            torch.ops.fake_card.answer_nccl(group.boxed())
            return group._get_backend(torch.device("cuda"))

    register = c10d.ProcessGroup._register_backend

    def _register_backend(group, device, kind, backend=None):
        """gloo takes tensors of cards, too, where it was built with CUDA."""
        if device.type == "cuda" and kind == c10d.ProcessGroup.BackendType.GLOO:
            both = c10d.ProcessGroup(backend.rank(), backend.size())
            register(both, torch.device("cpu"), kind, backend)
            torch.ops.fake_card.answer_nccl(both.boxed())
            kind, backend = c10d.ProcessGroup.BackendType.CUSTOM, both._get_backend(device)
        register(group, device, kind, backend)

    c10d.ProcessGroup._register_backend = _register_backend
    ProcessGroupNCCL.Options = Options
    c10d.ProcessGroupNCCL = ProcessGroupNCCL
    c10d._DEFAULT_PG_NCCL_TIMEOUT = datetime.timedelta(minutes=10)
