"""Expert parallelism: groups of `ep` adjacent data-parallel ranks split the experts of every layer.

The experts of a rank are a DTensor, sharded over these `ep` ranks. FSDP2 shards them again, over the dp / ep ranks that
have the same ones, and gathers them with the rest of their layer. That is sharded over all dp ranks, which train on
different samples. So each parameter's shard is 1/dp of it, whatever `ep` is. Tokens go to their experts:
contract/dispatch.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Shard

from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Plan
from orchestrator.training.contract.dispatch import Dispatch
from orchestrator.training.contract.recipe import Recipe

if TYPE_CHECKING:
    from torch.distributed.fsdp._fully_shard._fsdp_common import ShardPlacementResult


class ExpertParallel:
    """Expert parallelism of a recipe under a plan; construction makes the modules send tokens to
    experts' ranks.
    """

    def __init__(self, recipe: Recipe, plan: Plan, device: torch.device) -> None:
        """Spread the recipe's experts over ranks. Raises SpecError where that many ranks cannot, or
        this torch cannot.
        """
        degree = plan.expert_parallel
        path = "plan.expert_parallel"
        experts = recipe.experts
        if experts is None:
            raise SpecError(
                "this model has no experts to spread", path=path, got=degree, allowed="1"
            )
        if experts.count % degree:
            raise SpecError(f"no divisor of its {experts.count} experts", path=path, got=degree)
        try:  # torch 2.11 has neither: there FSDP2 cuts all of a layer over the same ranks
            from torch.distributed.fsdp._fully_shard._fsdp_common import (
                FSDPMeshInfo,
                ShardPlacementResult,
            )
        except ImportError:
            raise SpecError(
                f"torch {torch.__version__} cuts all of a layer over the same ranks, experts like the rest",
                path=path,
                got=degree,
                allowed="1, or torch 2.12 or newer",
                hint="plan: {expert_parallel: 1}",
            ) from None
        self._mesh = init_device_mesh(
            device.type, (plan.layout.dp // degree, degree), mesh_dim_names=("expert_shard", "ep")
        )
        self._result = ShardPlacementResult
        self._shared = FSDPMeshInfo(self._mesh["expert_shard"], shard_mesh_dim=0)
        self._names = frozenset(
            f"{name}.{key}"
            for name, module in recipe.module.named_modules()
            if module in experts.modules
            for key, _ in module.named_parameters()
        )
        experts.spread(Dispatch(self._mesh["ep"].get_group(), experts.count))

    def place(self, parameter_name: str, whole_values: Tensor) -> Tensor:
        """Return the rank's part of an expert parameter, copied, as a DTensor; any other parameter unchanged."""
        if parameter_name not in self._names:
            return whole_values
        mesh = self._mesh["ep"]
        local = whole_values.chunk(mesh.size())[mesh.get_local_rank()].clone()
        return DTensor.from_local(local, mesh, (Shard(0),), run_check=False)

    def find_fsdp_placement(self, parameter: nn.Parameter) -> ShardPlacementResult | None:
        """Return the placement for FSDP2 of a layer's parameter, (axis, mesh that shards it); None
        for non-experts.

        Experts are divided among ranks. Where their number does not divide evenly, each expert is
        sharded.
        """
        if not isinstance(parameter, DTensor):
            return None
        ranks = self._mesh["expert_shard"].size()
        local = parameter.to_local()
        return self._result(Shard(0 if len(local) % ranks == 0 else 1), self._shared)

    def select_experts(
        self, parameters_by_name: Mapping[str, nn.Parameter]
    ) -> tuple[nn.Parameter, ...]:
        """Return those of the named parameters that belong to experts."""
        return tuple(
            parameter for name, parameter in parameters_by_name.items() if name in self._names
        )
