"""Access to DeepSpeed's fp32 master weights, and to this rank's part of each. Uses private attributes."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.specs.choices import ZeroStage
from orchestrator.specs.frozen import frozen


@frozen
class MasterPiece:
    """A rank's part of a parameter's master weight: `count` elements from `start`, at `offset` of a
    flat tensor.
    """

    name: str
    flat: Tensor
    offset: int
    start: int
    count: int

    def view_in(self, flat: Tensor) -> Tensor:
        """Return a view of this piece in a flat master weight or in one of its moments."""
        return flat.detach().narrow(0, self.offset, self.count)


def list_masters(zero_optimizer: Any, stage: ZeroStage, group_count: int) -> list[list[Tensor]]:
    """Return this rank's flat master weights per parameter group, under the ZeRO optimizer of stage
    1, 2 or 3.
    """
    if stage is not ZeroStage.PARAMETERS:
        return [[flat] for flat in zero_optimizer.single_partition_of_fp32_groups]
    by_group: list[list[Tensor]] = [[] for _ in range(group_count)]
    for index, flat in enumerate(zero_optimizer.fp32_partitioned_groups_flat):
        by_group[zero_optimizer.sub_group_to_group_id[index]].append(flat)
    return by_group


def list_pieces(
    zero_optimizer: Any, stage: ZeroStage, trained: Mapping[str, nn.Parameter]
) -> Iterator[MasterPiece]:
    """Yield the rank's pieces of the trained parameters' master weights, under stage 1, 2 or 3."""
    locate = _find_partitioned_piece if stage is ZeroStage.PARAMETERS else _find_flat_piece
    for name, parameter in trained.items():
        piece = locate(zero_optimizer, name, parameter)
        if piece:
            yield piece


def compute_own_start_and_length(parameter_elements: int) -> tuple[int, int]:
    """Return (start, length) of this rank's consecutive elements of a parameter, which stage 3
    splits equally.
    """
    run = -(-parameter_elements // dist.get_world_size())
    start = min(dist.get_rank() * run, parameter_elements)
    return start, min(run, parameter_elements - start)


def _find_flat_piece(zero_optimizer: Any, name: str, parameter: nn.Parameter) -> MasterPiece | None:
    """Return the rank's piece under stages 1 and 2, which cut a group's concatenated parameters;
    None if the rank has none.
    """
    mapping = parameter._hp_mapping  # type: ignore[attr-defined]
    if mapping is None:  # another rank has all of it
        return None
    flat = zero_optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
    master = mapping.hp_fragment_address
    whole = mapping.lp_fragment_address
    return MasterPiece(
        name=name, flat=flat, offset=master.start, start=whole.start, count=whole.numel
    )


def _find_partitioned_piece(
    zero_optimizer: Any, name: str, parameter: nn.Parameter
) -> MasterPiece | None:
    """Return the rank's piece under stage 3, which cuts every parameter equally and pads it; None
    if the rank has none.
    """
    group, offset, _ = zero_optimizer.grad_position[zero_optimizer.get_param_id(parameter)]
    start, count = compute_own_start_and_length(parameter.ds_numel)  # type: ignore[attr-defined]
    flat = zero_optimizer.fp32_partitioned_groups_flat[group]
    return (
        MasterPiece(name=name, flat=flat, offset=offset, start=start, count=count)
        if count
        else None
    )
