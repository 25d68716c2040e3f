"""Laws of the cut of layers into pipeline stages."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.specs.stages import count_stage_layers, list_stage_layer_ranges


@given(
    layers=st.integers(1, 40),
    stages=st.integers(1, 40),
    first=st.integers(0, 4),
    last=st.integers(0, 4),
)
def test_every_layer_lies_in_one_stage_and_stages_between_the_ends_differ_by_one_at_most(
    layers: int, stages: int, first: int, last: int
) -> None:
    sizes = count_stage_layers(layers, stages, first, last)
    assert len(sizes) == stages
    between = sizes[bool(first) : stages - bool(last)]
    assert list(between) == sorted(between)
    assert not between or between[-1] - between[0] <= 1
    if min(sizes) < 1 or sum(sizes) != layers:
        with pytest.raises(ValueError, match="no cut of"):
            list_stage_layer_ranges(layers, stages, first, last)
        return
    ranges = list_stage_layer_ranges(layers, stages, first, last)
    assert [layer for stage in ranges for layer in stage] == list(range(layers))
    assert tuple(map(len, ranges)) == sizes


def test_the_ends_have_as_many_layers_as_is_said() -> None:
    """The case is Llama 3 405B, as its authors cut it (Grattafiori et al. 2024, arXiv:2407.21783, section 3.3.2)."""
    assert count_stage_layers(126, 16, 7, 7) == (7, *[8] * 14, 7)
    assert count_stage_layers(80, 16, 0, 4) == (*[5] * 14, 6, 4)
