"""What DeepSpeed's gradients fill in the order in which they come: its reduce bucket, and every rank's share."""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import lru_cache
from itertools import accumulate

from orchestrator.specs.profile import ModelProfile

Part = tuple[int, int]  # of the model: its segment, and its position there in backward order


@dataclass(frozen=True, slots=True, kw_only=True)
class Filling:
    """Elements that are reduced at a time in a backward pass."""

    reduced: Mapping[Part, tuple[tuple[int, int], ...]]  # (gradients that the part has by then, elements)
    rest: int  # what is in the bucket when the backward pass is over

    def at(self, part: Part, own: int) -> int:
        """The most elements that are reduced while that part goes backward, up to so many gradients of its own."""
        return max((elements for offset, elements in self.reduced.get(part, ()) if offset <= own), default=0)

    def has_begun(self, part: Part, own: int) -> bool:
        """Whether anything was reduced by then."""
        first = next(iter(self.reduced), None)
        if first is None or part == first:
            return first is not None and self.at(part, own) > 0
        return (-part[0], part[1]) > (-first[0], first[1])


@lru_cache(maxsize=256)
def filling(profile: ModelProfile, bucket: int) -> Filling:
    """A bucket of so many elements in a backward pass: it is reduced before a tensor that it cannot hold beside others.

    (`reduce_independent_p_g_buckets_and_remove_grads` in deepspeed/runtime/zero/stage3.py and stage_1_and_2.py.)
    """
    reduced: dict[Part, tuple[tuple[int, int], ...]] = {}
    held, own, last = 0, 0, None
    for part, size in _in_backward_order(profile):
        own = own if part == last else 0
        if held and held + size > bucket:
            reduced[part] = (*reduced.get(part, ()), (own, held))
            held = 0
        held, own, last = held + size, own + size, part
    return Filling(reduced=reduced, rest=held)


@lru_cache(maxsize=4096)
def largest_share(profile: ModelProfile, shares: int) -> int:
    """Elements of all tensors that lie in one of so many equal shares of what is trained, even if in part."""
    ends = list(accumulate(reversed([size for _, size in _in_backward_order(profile)]))) or [0]
    starts, each = [0, *ends[:-1]], -(-ends[-1] // shares)
    largest = 0
    for begin in range(0, ends[-1], max(1, each)):
        end = min(begin + each, ends[-1])
        largest = max(largest, ends[bisect_left(ends, end)] - starts[bisect_right(starts, begin) - 1])
    return largest


def _in_backward_order(profile: ModelProfile) -> Iterator[tuple[Part, int]]:
    for place in range(len(profile.segments) - 1, -1, -1):
        segment = profile.segments[place]
        for position in range(segment.count):
            for size in segment.gradients:
                yield (place, position), size
