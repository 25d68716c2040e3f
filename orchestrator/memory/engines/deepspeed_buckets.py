"""Simulates when DeepSpeed reduces its gradient bucket, from the order in which gradients are made."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from orchestrator.specs.frozen import frozen
from orchestrator.specs.profile import ModelProfile, Segment

Part = tuple[int, int]  # of the model: its segment, and its position there in backward order


class BucketReduction(NamedTuple):
    """A reduction of the full bucket, caused by a gradient that does not fit in it."""

    gradients: int  # gradients that the part has by then
    elements: int
    # elements of a leaf's gradients that have been made and are not in the bucket yet
    waiting: int = 0
    is_first: bool = False  # of the backward pass


@frozen
class BucketReductions:
    """The reductions of DeepSpeed's gradient bucket in one backward pass, in order, by the part of
    the model whose gradients caused them.
    """

    reduced: Mapping[Part, tuple[BucketReduction, ...]]
    rest: int  # what is in the bucket when the backward pass is over

    def list_reductions_until(self, part: Part, gradient_elements: int) -> list[BucketReduction]:
        """Return the reductions in the part's backward pass, until the part has made
        `gradient_elements` elements of gradients.
        """
        return [
            reduction
            for reduction in self.reduced.get(part, ())
            if reduction.gradients <= gradient_elements
        ]

    def has_begun(self, part: Part, gradient_elements: int) -> bool:
        """Return whether any reduction has happened when this part has made `gradient_elements`
        elements of gradients.
        """
        first = next(iter(self.reduced), None)
        if first is None or part == first:
            return first is not None and bool(self.list_reductions_until(part, gradient_elements))
        return (-part[0], part[1]) > (-first[0], first[1])


@lru_cache(maxsize=256)
def simulate_bucket(
    profile: ModelProfile, bucket_elements: int, *, waits_for_leaves: bool = False
) -> BucketReductions:
    """Return the reductions that a bucket of `bucket_elements` goes through in one backward pass.

    It is reduced before a tensor that does not fit
    (`reduce_independent_p_g_buckets_and_remove_grads` in deepspeed/runtime/zero/stage3.py and
    stage_1_and_2.py). `waits_for_leaves`: gradients of a leaf module wait until all have been made
    (`reduce_leaf_module_grads` in stage3.py).
    """
    reduced: dict[Part, tuple[BucketReduction, ...]] = {}
    in_bucket = 0
    gradients = 0
    last = None
    for part, size in _list_gradients_in_backward_order(profile, waits_for_leaves=waits_for_leaves):
        if part != last:
            gradients = 0
        if in_bucket and in_bucket + size > bucket_elements:
            segment = profile.segments[part[0]]
            until = segment.leaf_until if waits_for_leaves else 0
            waiting = until - gradients if until - sum(segment.leaf) <= gradients < until else 0
            reduction = BucketReduction(
                until - 1 if waiting else gradients, in_bucket, waiting, is_first=not reduced
            )
            reduced[part] = (*reduced.get(part, ()), reduction)
            in_bucket = 0
        in_bucket += size
        gradients += size
        last = part
    return BucketReductions(reduced=reduced, rest=in_bucket)


@lru_cache(maxsize=4096)
def compute_largest_shard_elements(profile: ModelProfile, shard_count: int) -> int:
    """Return the elements of all tensors that overlap one of `shard_count` equal shards of the
    trained parameters; the maximum over shards.
    """
    ends = list(accumulate(_list_registered_sizes(profile))) or [0]
    starts = [0, *ends[:-1]]
    share = -(-ends[-1] // shard_count)
    largest = 0
    for begin in range(0, ends[-1], max(1, share)):
        end = min(begin + share, ends[-1])
        largest = max(
            largest, ends[bisect_left(ends, end)] - starts[bisect_right(starts, begin) - 1]
        )
    return largest


def _list_registered_sizes(profile: ModelProfile) -> Iterator[int]:
    for segment in profile.segments:
        for _ in range(segment.count):
            yield from segment.registered or reversed(segment.gradients)


def _list_gradients_in_backward_order(
    profile: ModelProfile, *, waits_for_leaves: bool
) -> Iterator[tuple[Part, int]]:
    for place in range(len(profile.segments) - 1, -1, -1):
        segment = profile.segments[place]
        sizes = (
            _order_gradients_leaf_last(segment)
            if waits_for_leaves and segment.leaf_until
            else segment.gradients
        )
        for position in range(segment.count):
            for size in sizes:
                yield (place, position), size


def _order_gradients_leaf_last(segment: Segment) -> tuple[int, ...]:
    """Return the elements of each gradient of a part, in the order of their reduction; those of its
    leaf module come last.
    """
    made = list(accumulate(segment.gradients))
    count = bisect_left(made, segment.leaf_until) + 1
    before = list(segment.gradients[:count])
    for size in segment.leaf:
        before.remove(size)
    return (*before, *segment.leaf, *segment.gradients[count:])
