"""How many layers each pipeline stage has, for training and for planning."""

from __future__ import annotations

from functools import lru_cache
from itertools import accumulate, pairwise, starmap


@lru_cache(maxsize=4096)
def count_stage_layers(
    layer_count: int, stage_count: int, first_layers: int = 0, last_layers: int = 0
) -> tuple[int, ...]:
    """Return the number of layers of each pipeline stage; 0 or less in a stage where there are too
    few layers.

    `first_layers` and `last_layers` set the layers of the end stages; 0 leaves them open. The
    others divide the rest as evenly as possible. Later stages get the remainder, since fewer
    micro-batches are in flight there.
    """
    ends = {
        stage: count
        for stage, count in ((0, first_layers), (stage_count - 1, last_layers))
        if count
    }
    others = stage_count - len(ends)
    share, more = divmod(layer_count - sum(ends.values()), others) if others else (0, 0)
    sizes = []
    position = 0
    for stage in range(stage_count):
        if stage in ends:
            sizes.append(ends[stage])
            continue
        sizes.append(share + (position >= others - more))
        position += 1
    return tuple(sizes)


def list_stage_layer_ranges(
    layer_count: int, stage_count: int, first_layers: int, last_layers: int
) -> tuple[range, ...]:
    """Return the layer indices of each pipeline stage. Raises ValueError for an empty stage or a leftover layer."""
    sizes = count_stage_layers(layer_count, stage_count, first_layers, last_layers)
    if min(sizes) < 1 or sum(sizes) != layer_count:
        raise ValueError(
            f"{stage_count} stages of {', '.join(map(str, sizes))} layers are no cut of {layer_count}"
        )
    return tuple(starmap(range, pairwise(accumulate(sizes, initial=0))))
