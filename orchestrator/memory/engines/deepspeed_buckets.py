"""What DeepSpeed's gradients fill in the order in which they come: its reduce bucket, and every rank's share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate
from typing import NamedTuple

from orchestrator.specs.profile import ModelProfile, Segment

Part = tuple[int, int]  # of the model: its segment, and its position there in backward order


class Reduction(NamedTuple):
    """What is reduced at a time: because the gradient that comes then does not fit beside it."""

    own: int  # gradients that the part has by then
    elements: int
    waiting: int = 0  # elements of a leaf's gradients that have been made and are not in the bucket yet
    is_first: bool = False  # of the backward pass


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """What is reduced at a time in a backward pass."""

    reduced: Mapping[Part, tuple[Reduction, ...]]
    rest: int  # what is in the bucket when the backward pass is over

    def at(self, part: Part, own: int) -> list[Reduction]:
        """What is reduced at a time while that part goes backward, up to so many gradients of its own."""
        return [one for one in self.reduced.get(part, ()) if one.own <= own]

    def has_begun(self, part: Part, own: int) -> bool:
        """Whether anything was reduced by then."""
        first = next(iter(self.reduced), None)
        if first is None or part == first:
            return first is not None and bool(self.at(part, own))
        return (-part[0], part[1]) > (-first[0], first[1])


@lru_cache(maxsize=256)
def filling(profile: ModelProfile, bucket: int, *, leaves: bool = False) -> Filling:
    """A bucket of so many elements in a backward pass: it is reduced before a tensor that it cannot hold beside others.

    (`reduce_independent_p_g_buckets_and_remove_grads` in deepspeed/runtime/zero/stage3.py and stage_1_and_2.py.)
    `leaves`: gradients of a leaf wait until all have been made (`reduce_leaf_module_grads` in stage3.py).
    """
    reduced: dict[Part, tuple[Reduction, ...]] = {}
    held, own, last = 0, 0, None
    for part, size in _in_backward_order(profile, leaves=leaves):
        own = own if part == last else 0
        if held and held + size > bucket:
            segment = profile.segments[part[0]]
            until = segment.leaf_until if leaves else 0
            waiting = until - own if until - sum(segment.leaf) <= own < until else 0
            one = Reduction(until - 1 if waiting else own, held, waiting, is_first=not reduced)
            reduced[part] = (*reduced.get(part, ()), one)
            held = 0
        held, own, last = held + size, own + size, part
    return Filling(reduced=reduced, rest=held)


@lru_cache(maxsize=4096)
def largest_share(profile: ModelProfile, shares: int) -> int:
    """Elements of all tensors that lie in one of so many equal shares of what is trained, even if in part."""
    ends = list(accumulate(_registered(profile))) or [0]
    starts, each = [0, *ends[:-1]], -(-ends[-1] // shares)
    largest = 0
    for begin in range(0, ends[-1], max(1, each)):
        end = min(begin + each, ends[-1])
        largest = max(largest, ends[bisect_left(ends, end)] - starts[bisect_right(starts, begin) - 1])
    return largest


def _registered(profile: ModelProfile) -> Iterator[int]:
    for segment in profile.segments:
        for _ in range(segment.count):
            yield from segment.registered or reversed(segment.gradients)


def _in_backward_order(profile: ModelProfile, *, leaves: bool = False) -> Iterator[tuple[Part, int]]:
    for place in range(len(profile.segments) - 1, -1, -1):
        segment = profile.segments[place]
        sizes = _leaf_last(segment) if leaves and segment.leaf_until else segment.gradients
        for position in range(segment.count):
            for size in sizes:
                yield (place, position), size


def _leaf_last(segment: Segment) -> tuple[int, ...]:
    """Gradients of a part in the order in which they are reduced: those of its leaf when all have been made."""
    made = list(accumulate(segment.gradients))
    count = bisect_left(made, segment.leaf_until) + 1
    before = list(segment.gradients[:count])
    for size in segment.leaf:
        before.remove(size)
    return (*before, *segment.leaf, *segment.gradients[count:])
