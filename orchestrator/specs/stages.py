"""How many layers each pipeline stage has, for training and for planning."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise, starmap


@lru_cache(maxsize=4096)
def stage_layers(layers: int, stages: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; 0 or less in a stage where there are too few layers.

    `first` and `last` set the layers of the end stages; 0 leaves them open. The others divide the rest as evenly as
    possible. Later stages get the remainder, since fewer micro-batches are in flight there.
    """
    ends = {stage: count for stage, count in ((0, first), (stages - 1, last)) if count}
    others = stages - len(ends)
    share, more = divmod(layers - sum(ends.values()), others) if others else (0, 0)
    sizes = []
    position = 0
    for stage in range(stages):
        if stage in ends:
            sizes.append(ends[stage])
            continue
        sizes.append(share + (position >= others - more))
        position += 1
    return tuple(sizes)


def layer_ranges(layers: int, stages: int, first: int = 0, last: int = 0) -> tuple[range, ...]:
    """Return the layer indices of each pipeline stage. Raises ValueError for an empty stage or a leftover layer."""
    sizes = stage_layers(layers, stages, first, last)
    if min(sizes) < 1 or sum(sizes) != layers:
        raise ValueError(
            f"{stages} stages of {', '.join(map(str, sizes))} layers are no cut of {layers}"
        )
    return tuple(starmap(range, pairwise(accumulate(sizes, initial=0))))
