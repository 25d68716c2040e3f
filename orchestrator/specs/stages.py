"""Which layers has each stage of a pipeline? One answer for the ranks that train them and for all that plans count."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise


@lru_cache(maxsize=4096)
def stage_layers(layers: int, stages: int, first: int = 0, last: int = 0) -> tuple[int, ...]:
    """How many layers each of so many stages has; 0 or less where there are too few.

    The first and the last stage have as many as is said, where that is no 0. The others share the rest as evenly as
    possible, the later ones one more: fewer micro-batches are in flight there.
    """
    ends = {at: said for at, said in ((0, first), (stages - 1, last)) if said}
    others = stages - len(ends)
    share, more = divmod(layers - sum(ends.values()), others) if others else (0, 0)
    sizes, at = [], 0
    for stage in range(stages):
        if stage in ends:
            sizes.append(ends[stage])
            continue
        sizes.append(share + (at >= others - more))
        at += 1
    return tuple(sizes)


def layer_ranges(layers: int, stages: int, first: int = 0, last: int = 0) -> tuple[range, ...]:
    """The layers of each stage. Raises ValueError where some stage has none, or some layer no stage."""
    sizes = stage_layers(layers, stages, first, last)
    if min(sizes) < 1 or sum(sizes) != layers:
        raise ValueError(f"{stages} stages of {', '.join(map(str, sizes))} layers are no cut of {layers}")
    return tuple(range(*ends) for ends in pairwise(accumulate(sizes, initial=0)))
