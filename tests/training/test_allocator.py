"""Laws of the model of CUDA's caching allocator, and of a training's fragmentation."""

from __future__ import annotations

import random

import pytest

from orchestrator.specs.choices import ActivationCheckpointing, Precision
from orchestrator.specs.job.model import ModelSpec, TrainingSpec
from orchestrator.specs.profile import SEGMENTS_BYTES
from orchestrator.training.tracing.allocator import (
    MIB,
    AllocationLedger,
    Block,
    CachingAllocator,
    Exhausted,
    extrapolate_ledgers,
    simulate_fragmentation,
)
from orchestrator.training.tracing.model_builder import (
    SAMPLES,
    Arithmetic,
    Request,
    build_recipe_on_meta_device,
)
from orchestrator.training.tracing.step_recorder import StepRecorder
from tests.training.reseeded import EXAMPLES

UNET = {"width": 64, "levels": 3, "samples": 50, "size": 64}


@pytest.mark.parametrize(
    ("requested", "reserved"),
    [(1, 2), (MIB, 2), (MIB + 1, 20), (10 * MIB - 512, 20), (10 * MIB, 10), (11 * MIB + 1, 12)],
)
def test_a_segment_is_as_large_as_pytorch_makes_it(requested: int, reserved: int) -> None:
    allocator = CachingAllocator()
    allocator.allocate(requested)
    assert allocator.reserved_bytes == reserved * MIB


def test_the_rest_of_a_large_block_serves_another_request_from_one_mebibyte_on() -> None:
    allocator = CachingAllocator()
    first = allocator.allocate(12 * MIB)
    allocator.free(first)
    assert allocator.allocate(11 * MIB).size == 12 * MIB, "a mebibyte is not split off"
    allocator.allocate(5 * MIB)
    second = allocator.allocate(15 * MIB - 512)
    assert (second.size, allocator.reserved_bytes) == (15 * MIB, 32 * MIB)


def test_whole_segments_that_are_free_go_back_before_anything_fails() -> None:
    allocator = CachingAllocator(30 * MIB)
    allocator.free(allocator.allocate(20 * MIB))
    assert allocator.allocate(26 * MIB).size == 26 * MIB
    with pytest.raises(Exhausted):
        allocator.allocate(6 * MIB)


@pytest.mark.parametrize("seed", range(20))
def test_no_byte_is_in_two_blocks_and_none_is_lost(seed: int) -> None:
    chance, capacity = random.Random(seed), 400 * MIB
    allocator, live = CachingAllocator(capacity), list[tuple[Block, int]]()
    for _ in range(600):
        if live and chance.random() < 0.5:
            allocator.free(live.pop(chance.randrange(len(live)))[0])
        else:
            size = round(2 ** chance.uniform(0, 25))
            try:
                live.append((allocator.allocate(size), size))
            except Exhausted:
                allocator.free(live.pop()[0])
        assert allocator.reserved_bytes <= capacity
        ends = 0
        for block in sorted(
            (block for block, _ in live), key=lambda live_block: live_block.address
        ):
            assert block.address >= ends
            ends = block.address + block.size
        assert all(block.size >= size for block, size in live)
    for block, _ in live:
        allocator.free(block)
    free = [block for *_, block in allocator._small + allocator._large]
    assert sum(block.size for block in free) == allocator.reserved_bytes
    assert all(block.before is block.after is None for block in free)


def ledger(*requests: int) -> AllocationLedger:
    """Positive: MiB to allocate, numbered from 1 on; negative: the number of the block to free."""
    recorder = AllocationLedger()
    recorder.begin_step()
    for request in requests:
        if request > 0:
            recorder.record_allocation(request * MIB)
        else:
            recorder.record_free(-request - 1)
    return recorder


def test_blocks_of_one_size_are_used_again_without_loss() -> None:
    assert simulate_fragmentation([ledger(64, 64, -1, 64, -2, -3)], [64 * MIB]) == 1.0


def test_free_blocks_that_are_too_small_count_as_fragmentation() -> None:
    """Two blocks are free in partly live segments; the next request is as large as both."""
    apart = ledger(100, 100, 100, 100, 100, 100)
    apart.sizes = [100 * MIB] * 6
    whole = ledger(300, -1, 100, 150, 100, 150, -2, -4, 201, -3, -5, -6)
    factor = simulate_fragmentation([whole], [])
    assert factor > 1.2
    assert simulate_fragmentation([apart], []) == 1.0
    assert simulate_fragmentation([apart, whole], []) == factor, "all of them have to run"


def test_the_fragmentation_factor_suffices_and_half_a_percent_less_does_not() -> None:
    step = ledger(300, -1, 100, 150, 100, 150, -2, -4, 201, -3, -5, -6)
    enough = simulate_fragmentation([step], []) * step.peak_bytes + SEGMENTS_BYTES
    for capacity, runs in ((enough, True), (enough - 0.005 * step.peak_bytes, False)):
        allocator, blocks = CachingAllocator(capacity), dict[int, Block]()
        try:
            for request in 2 * step.requests:
                if request >= 0:
                    blocks[request] = allocator.allocate(step.sizes[request])
                else:
                    allocator.free(blocks[-request - 1])
            ran = True
        except Exhausted:
            ran = False
        assert ran is runs


@pytest.fixture(scope="module")
def unet() -> StepRecorder:
    """Trace a U-Net, whose convolutions widen as pictures shrink, so block sizes vary."""
    request = Request(
        model=ModelSpec(factory=f"{EXAMPLES / 'diffusion_unet.py'}:build", config=UNET),
        training=TrainingSpec(max_steps=1),
        family="unet",
        sequence_length=1,
        arithmetics=(),
    )
    arithmetic = Arithmetic(precision=Precision.FP32, autocast=False)
    return StepRecorder(request, arithmetic, build_recipe_on_meta_device(request, arithmetic, None))


def test_an_extrapolated_step_makes_the_requests_of_a_recorded_one(unet: StepRecorder) -> None:
    (_, few), (_, many), (_, eight) = (
        unet._record_step(samples, [], is_sharded=False) for samples in (*SAMPLES, 8)
    )
    extrapolated = extrapolate_ledgers(few, many, SAMPLES)[8]
    assert extrapolated.sizes == eight.sizes
    assert extrapolated.requests == eight.requests


def test_a_trace_has_the_fragmentation_of_the_models_own_steps(unet: StepRecorder) -> None:
    ratios = dict(unet.make_model_profile(None, 0).fragmentation)
    assert set(ratios) == set(ActivationCheckpointing)
    assert max(ratios.values()) > 1.08, "more than transformers do, of which all layers are alike"
