"""Laws of what DeepSpeed's gradients fill."""

from __future__ import annotations

from dataclasses import replace

from hypothesis import given
from hypothesis import strategies as st

from orchestrator.memory.engines.deepspeed_buckets import (
    BucketReduction,
    compute_largest_shard_elements,
    simulate_bucket,
)
from orchestrator.specs.choices import Precision
from orchestrator.specs.profile import ModelProfile, Segment, Source

SIZES = st.lists(st.integers(1, 90), min_size=1, max_size=5)
MODELS = st.lists(st.tuples(st.integers(1, 4), SIZES), min_size=1, max_size=4)


def model(parts: list[tuple[int, list[int]]]) -> ModelProfile:
    """Segments of so many parts with gradients of these sizes."""
    segments = tuple(
        Segment(
            name=str(number),
            count=count,
            parameters=sum(sizes),
            saved_bytes=0,
            checkpointed_bytes=0,
            transient_bytes=0,
            forward_flops=0.0,
            largest_parameter=max(sizes),
            tensors=tuple(sizes),
        )
        for number, (count, sizes) in enumerate(parts)
    )
    return ModelProfile(
        family="drawn", precision=Precision.FP32, source=Source.DECLARED, segments=segments
    )


def in_order(profile: ModelProfile) -> list[int]:
    """Return the sizes of parameters as they were registered, else in the reverse order of gradients."""
    parts = [
        segment.registered or segment.tensors[::-1]
        for segment in profile.segments
        for _ in range(segment.count)
    ]
    return [size for sizes in parts for size in sizes]


@given(MODELS, st.integers(1, 200))
def test_every_gradient_is_reduced_once_and_no_bucket_holds_more_than_it_can(
    parts: list[tuple[int, list[int]]], bucket: int
) -> None:
    profile = model(parts)
    buckets, largest = simulate_bucket(profile, bucket), max(in_order(profile))
    reduced = [
        reduction.elements for reductions in buckets.reduced.values() for reduction in reductions
    ]
    assert sum(reduced) + buckets.rest == profile.trained_parameters
    assert all(0 < elements <= max(bucket, largest) for elements in (*reduced, buckets.rest))
    assert bool(reduced) == (profile.trained_parameters > bucket and len(in_order(profile)) > 1)


@given(MODELS)
def test_at_the_start_of_a_backward_pass_nothing_was_reduced(
    parts: list[tuple[int, list[int]]],
) -> None:
    profile = model(parts)
    buckets, last = simulate_bucket(profile, 50), len(profile.segments) - 1
    assert not buckets.has_begun((last, 0), 0)
    first = next(iter(buckets.reduced), None)
    if first is not None:
        assert buckets.has_begun(first, profile.segments[first[0]].trained_parameters)


@given(MODELS)
def test_only_one_reduction_of_a_backward_pass_is_the_first(
    parts: list[tuple[int, list[int]]],
) -> None:
    reductions = [
        reduction
        for group in simulate_bucket(model(parts), 50).reduced.values()
        for reduction in group
    ]
    assert [reduction.is_first for reduction in reductions] == [
        number == 0 for number in range(len(reductions))
    ]


def test_gradients_of_a_leaf_wait_until_all_are_made_and_are_reduced_as_they_were_registered() -> (
    None
):
    layer = replace(model([(2, [3, 20, 30, 4, 5])]).segments[0], leaf=(4, 30, 20), leaf_until=57)
    profile = replace(model([]), segments=(layer,))
    assert simulate_bucket(profile, 40, waits_for_leaves=True).reduced == {
        (0, 0): (BucketReduction(56, 37, waiting=20, is_first=True),),
        (0, 1): (BucketReduction(56, 32, waiting=50), BucketReduction(56, 30, waiting=20)),
    }
    as_made = simulate_bucket(profile, 40).reduced[0, 0]
    assert [(reduction.gradients, reduction.waiting) for reduction in as_made] == [(23, 0)]


@given(MODELS, st.integers(1, 9), st.booleans())
def test_a_share_holds_all_of_every_tensor_that_reaches_into_it(
    parts: list[tuple[int, list[int]]], shares: int, is_known: bool
) -> None:
    profile = model(parts)
    if is_known:
        segments = tuple(
            replace(segment, registered=tuple(sorted(segment.tensors)))
            for segment in profile.segments
        )
        profile = replace(profile, segments=segments)
    sizes, share = in_order(profile), -(-profile.trained_parameters // shares)
    owners = [rank for tensor, size in enumerate(sizes) for rank in [tensor] * size]
    loads = [
        sum(sizes[tensor] for tensor in set(owners[begin : begin + share]))
        for begin in range(0, len(owners), share)
    ]
    assert compute_largest_shard_elements(profile, shares) == max(loads)
