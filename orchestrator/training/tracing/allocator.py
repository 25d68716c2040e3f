"""Fragmentation: the memory that PyTorch's caching allocator needs beyond a training's live bytes, by simulation.

Free blocks of other sizes than a request serve it only in part, or not at all. The allocator is a model of the native
one (c10/cuda/CUDACachingAllocator.cpp of torch 2.11) on one stream. It was not compared with a device.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Sequence

from orchestrator.specs.profile import SEGMENTS_BYTES

MIB = 2**20
LEAST_BYTES = 512  # kMinBlockSize
SMALL_BYTES = MIB  # kSmallSize: requests up to this size use the small pool
SMALL_SEGMENT_BYTES = 2 * MIB  # kSmallBuffer
LARGE_SEGMENT_BYTES = 20 * MIB  # kLargeBuffer, for requests below kMinLargeAlloc
LEAST_OWN_SEGMENT_BYTES = 10 * MIB  # kMinLargeAlloc
SEGMENT_ROUNDING_BYTES = 2 * MIB  # kRoundLarge
STEPS = 2  # the second step starts from the first one's free blocks
MICRO_BATCHES = (2, 8, 32)  # beside the recorded ones
STEPS_UP = 200  # capacities tried, from once to twice the live bytes
STEPS_UP_MAX = 100


Pool = list[tuple[int, int, "Block"]]  # blocks by size, then address


class Exhausted(Exception):
    """No block fits the request, even after all free segments were returned to the device."""


class Block:
    """A contiguous piece of an allocator segment, free or in use."""

    __slots__ = ("address", "after", "before", "is_free", "pool", "size")

    def __init__(self, address: int, size: int, pool: Pool) -> None:
        self.address = address
        self.size = size
        self.pool = pool
        self.is_free = False
        self.before: Block | None = None
        self.after: Block | None = None


class CachingAllocator:
    """Simulation of PyTorch's caching allocator: best fit, blocks that split, and merge within a
    segment only.
    """

    def __init__(self, capacity_bytes: float = float("inf")) -> None:
        self.reserved_bytes = 0
        self._capacity_bytes = capacity_bytes
        self._next_address = 0
        self._small: Pool = []  # free blocks: size, address
        self._large: Pool = []

    def allocate(self, size: int) -> Block:
        """Return a block of at least `size` bytes. Raises Exhausted where none can be had."""
        size = max(1, -(-size // LEAST_BYTES)) * LEAST_BYTES
        is_small = size <= SMALL_BYTES
        pool = self._small if is_small else self._large
        index = bisect_left(pool, (size,))
        block = pool.pop(index)[2] if index < len(pool) else self._make_segment(size, pool)
        rest = block.size - size
        if rest >= LEAST_BYTES if is_small else rest > SMALL_BYTES:
            left = Block(block.address + size, rest, pool)
            left.before = block
            left.after = block.after
            block.after = left
            block.size = size
            if left.after is not None:
                left.after.before = left
            self._add_to_pool(left)
        block.is_free = False
        return block

    def free(self, block: Block) -> None:
        """Free the block and merge it with its free neighbours."""
        before = block.before
        after = block.after
        if before is not None and before.is_free:
            self._remove_from_pool(before)
            before.size += block.size
            before.after = after
            if after is not None:
                after.before = before
            block = before
        if after is not None and after.is_free:
            self._remove_from_pool(after)
            block.size += after.size
            block.after = after.after
            if after.after is not None:
                after.after.before = block
        self._add_to_pool(block)

    def _make_segment(self, size_bytes: int, pool: Pool) -> Block:
        if size_bytes <= SMALL_BYTES:
            whole = SMALL_SEGMENT_BYTES
        elif size_bytes < LEAST_OWN_SEGMENT_BYTES:
            whole = LARGE_SEGMENT_BYTES
        else:
            whole = -(-size_bytes // SEGMENT_ROUNDING_BYTES) * SEGMENT_ROUNDING_BYTES
        if self.reserved_bytes + whole > self._capacity_bytes:
            self._release_whole_segments()
            if self.reserved_bytes + whole > self._capacity_bytes:
                raise Exhausted
        block = Block(self._next_address, whole, pool)
        self._next_address += whole
        self.reserved_bytes += whole
        return block

    def _release_whole_segments(self) -> None:
        """Release segments without a block in use, as `release_cached_blocks` does."""
        for pool in (self._small, self._large):
            partial = [
                entry for entry in pool if entry[2].before is not None or entry[2].after is not None
            ]
            self.reserved_bytes -= sum(size for size, _, _ in pool) - sum(
                size for size, _, _ in partial
            )
            pool[:] = partial

    def _add_to_pool(self, block: Block) -> None:
        block.is_free = True
        insort(block.pool, (block.size, block.address, block))

    def _remove_from_pool(self, block: Block) -> None:
        del block.pool[bisect_left(block.pool, (block.size, block.address))]


class AllocationLedger:
    """The recorded allocations and frees of a training step, in order."""

    def __init__(self) -> None:
        self.sizes: list[int] = []  # of every storage, by its number
        self.resident = 0  # the first ones exist before the step: parameters and buffers
        self.requests: list[int] = []  # n: storage n is allocated; -n - 1: it is freed

    def record_allocation(self, size_bytes: int) -> int:
        """Record an allocation of `size_bytes` bytes, and return the number of the new storage."""
        self.sizes.append(size_bytes)
        self.requests.append(len(self.sizes) - 1)
        return len(self.sizes) - 1

    def record_free(self, storage_number: int) -> None:
        self.requests.append(-storage_number - 1)

    def begin_step(self) -> None:
        """Mark all storages so far as resident (they exist before every step), and forget the
        requests so far.
        """
        self.resident = len(self.sizes)
        self.requests = []

    @property
    def peak_bytes(self) -> int:
        """Peak of live bytes over the step, resident storages included."""
        live = peak = sum(self.sizes[: self.resident])
        for request in self.requests:
            live += self.sizes[request] if request >= 0 else -self.sizes[-request - 1]
            peak = max(peak, live)
        return peak


def extrapolate_ledgers(
    smaller: AllocationLedger, larger: AllocationLedger, micro_batch_sizes: tuple[int, int]
) -> dict[int, AllocationLedger]:
    """Return {micro-batch size: ledger of a step}: the two recorded ledgers, and those for
    MICRO_BATCHES, extrapolated linearly.

    If the numbers of storages differ, only the recorded ones are returned: a loop, such as a loss
    over chunks of tokens, depends on the micro-batch.
    """
    steps = dict(zip(micro_batch_sizes, (smaller, larger), strict=True))
    if len(smaller.sizes) != len(larger.sizes):
        return steps
    for wanted in MICRO_BATCHES:
        if wanted not in steps:
            ledger = steps[wanted] = AllocationLedger()
            ledger.resident = larger.resident
            ledger.requests = larger.requests
            beyond = wanted - micro_batch_sizes[1]
            apart = micro_batch_sizes[1] - micro_batch_sizes[0]
            pairs = zip(smaller.sizes, larger.sizes, strict=True)
            ledger.sizes = [
                max(0, second + (second - first) * beyond // apart) for first, second in pairs
            ]
    return steps


def simulate_fragmentation(steps: Iterable[AllocationLedger], state_bytes: Sequence[int]) -> float:
    """Return the factor on peak live bytes that a device's memory must have to run each of the
    recorded steps.

    SEGMENTS_BYTES come on top. Resolution half a percent, at most 1.5. `state_bytes` has the bytes
    of each of the optimizer's tensors, which exist before the first step.
    """
    steps_up = 0
    for step in steps:
        peak = step.peak_bytes + sum(state_bytes)
        while steps_up < STEPS_UP_MAX and not _fits_capacity(
            step, state_bytes, peak * _compute_factor(steps_up) + SEGMENTS_BYTES
        ):
            steps_up += 1
    return _compute_factor(steps_up)


def _compute_factor(steps_up: int) -> float:
    return 1 + steps_up / STEPS_UP


def _fits_capacity(
    step: AllocationLedger, state_bytes: Sequence[int], capacity_bytes: float
) -> bool:
    allocator = CachingAllocator(capacity_bytes)
    sizes = step.sizes
    try:
        for size in (*sizes[: step.resident], *state_bytes):
            allocator.allocate(size)
        for _ in range(STEPS):
            blocks: dict[int, Block] = {}
            for request in step.requests:
                if request >= 0:
                    blocks[request] = allocator.allocate(sizes[request])
                else:
                    allocator.free(blocks.pop(-request - 1))
            for block in blocks.values():  # the next step allocates them again
                allocator.free(block)
    except Exhausted:
        return False
    return True
