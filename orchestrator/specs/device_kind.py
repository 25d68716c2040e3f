"""The traits of each kind of device. Code asks for a trait, and never compares the name of a kind.

A kind cannot be defined without every trait, since no trait has a default. Standard library only.
"""

from __future__ import annotations

from orchestrator.specs.frozen import frozen
from orchestrator.specs.str_enum import StrEnum

DeviceId = int | str  # of a device, as its driver counts, or its UUID


@frozen
class DeviceTraits:
    """The traits of a kind of device, on which memory, cost, placement and launch depend."""

    # The reader of its memory and use (backends/devices/readers.py). "": nobody reads it; the guard
    # caps what a rank allocates, and that memory is the host's.
    driver: str
    # The variable that lists the devices of a process by index; "": a rank needs none.
    visible_variable: str
    # Further variables of each rank on such devices.
    variables: tuple[tuple[str, str], ...]
    # Variables that the job's own `env` overrides.
    default_variables: tuple[tuple[str, str], ...]
    # Whether Ray counts it among its GPUs.
    is_gpu_of_ray: bool
    # Start of a collective, in seconds.
    collective_start_s: float
    # Whether work runs beside the host's: kernels take time to start, and collectives overlap.
    runs_beside_host: bool
    # Whether models are traced as on CUDA: its autocast, its attention kernels.
    traces_as_cuda: bool
    # Whether PyTorch's allocator keeps freed memory and fragments it.
    has_caching_allocator: bool
    # Whether a process holds memory beside the allocator's: a context and communicators.
    has_context: bool
    # What libraries hold for a process within the allocator's memory, in bytes.
    library_bytes: int
    # Whether a frozen base in 4 bits can be trained.
    trains_quantised: bool
    # Whether moments in 8 bits have kernels of their own.
    has_8bit_kernels: bool
    # Whether weights or optimizer states can be offloaded to the host.
    offloads: bool

    @property
    def is_virtual(self) -> bool:
        """Whether its memory is host memory with a limit that the guard enforces, since no driver
        reads it.
        """
        return not self.driver


class DeviceKind(StrEnum):
    """The kind of a device, with its traits."""

    _value_: str
    traits: DeviceTraits

    def __new__(cls, word: str, traits: DeviceTraits) -> DeviceKind:
        kind = str.__new__(cls, word)
        kind._value_ = word
        kind.traits = traits
        return kind

    # An NVIDIA device, counted in PCI bus order as NVML counts. NCCL starts a collective in tens of
    # us for small messages (NVIDIA/nccl-tests, doc/PERFORMANCE.md). cuBLAS on Hopper has 32 MiB per
    # handle and stream (aten/src/ATen/cuda/CublasHandlePool.cpp), of PyTorch's allocator. The
    # threads of forward and backward pass have a handle each: two were live at each of four peaks
    # on an H100 (tests/gpu/measured/, 2026-11-26).
    CUDA = (
        "cuda",
        DeviceTraits(
            driver="nvml",
            visible_variable="CUDA_VISIBLE_DEVICES",
            variables=(("CUDA_DEVICE_ORDER", "PCI_BUS_ID"),),
            default_variables=(("PYTORCH_CUDA_ALLOC_CONF", "expandable_segments:True"),),
            is_gpu_of_ray=True,
            collective_start_s=3e-5,
            runs_beside_host=True,
            traces_as_cuda=True,
            has_caching_allocator=True,
            has_context=True,
            library_bytes=64 * 2**20,
            trains_quantised=True,
            has_8bit_kernels=True,
            offloads=True,
        ),
    )
    # A CPU rank with an enforced memory cap. gloo between two busy ranks starts in 2 to 4 ms (FSDP2
    # and ZeRO-3 against DDP over a 4-layer decoder, 2026-11).
    VIRTUAL = (
        "virtual",
        DeviceTraits(
            driver="",
            visible_variable="",
            variables=(
                ("CUDA_VISIBLE_DEVICES", ""),
                ("DS_ACCELERATOR", "cpu"),
                ("ACCELERATE_USE_CPU", "true"),
            ),
            default_variables=(),
            is_gpu_of_ray=False,
            collective_start_s=2e-3,
            runs_beside_host=False,
            traces_as_cuda=False,
            has_caching_allocator=False,
            has_context=False,
            library_bytes=0,
            trains_quantised=False,
            has_8bit_kernels=False,
            offloads=False,
        ),
    )
