"""The torch engine: one device mesh; plain, DDP (zero_stage 0) or FSDP2 (zero_stage 3).

What decides memory, in bytes, for the model of it (P parameters, dp ranks):
- Start: plain and DDP hold 4P of weights; FSDP2 makes and shards a layer at a time: 4P/dp and one layer (or the rest).
  Adam's moments (8P, or 8P/dp) are allocated before the first step, so the first step has the later steps' peak.
- Gradients: plain: per parameter during backward, freed after the step. DDP: buckets of 4P in all, which are the
  gradients, for ever (25 MiB each, the first 1 MiB; rebuilt once, at the second step, in order of use).
  FSDP2: 4P/dp, freed after the step; every micro-batch is reduce-scattered, so accumulation holds nothing unsharded.
- FSDP2 frees a layer after its forward pass and gathers it again; the rest (embedding, norm, head) stays gathered.
- Optimizer on CPU: one parameter at a time, two temporaries of its size. On CUDA: fused, none.
- A checkpoint is saved and loaded shard by shard in place: no copy of the model.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.nn.parallel import DistributedDataParallel

from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.model import TrainingSpec
from orchestrator.specs.plan import Offload, ParallelLayout, Plan, Precision, ZeroStage
from orchestrator.training import checkpoint
from orchestrator.training.adam import adamw, allocate_moments, clip
from orchestrator.training.recipe import Batch, Recipe, materialise
from orchestrator.training.results import StepResult


class TorchEngine:
    """A module under plain PyTorch, DDP or FSDP2, with its optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        training: TrainingSpec,
        device: torch.device,
        resume_from: checkpoint.Saved | None,
    ) -> None:
        self._recipe, self._plan, self._device = recipe, plan, device
        self._clip_norm = training.clip_norm
        self._module = recipe.module  # whole-model names
        mesh = device_mesh(plan.layout, device)
        self._model = _sharded(recipe, plan, mesh, device) if _is_sharded(plan) else _replicated(recipe, mesh, device)
        self._optimizer = adamw(self._module.parameters(), training, _state_device(plan, device))
        step = resume_from.cursor.step if resume_from else 0
        allocate_moments(self._optimizer, self._trained(), step)
        if resume_from:
            checkpoint.load(resume_from.path, self.state())

    def step(self, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        scale = self._plan.layout.dp / tokens  # DDP and FSDP2 average gradients over dp; a lone rank has dp = 1
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for turn, batch in enumerate(micro_batches, start=1):
            with self._sync_on_last(is_last=turn == self._plan.gradient_accumulation_steps):
                loss += self._forward_backward(batch, scale)
        norm = clip(self._trained(), self._clip_norm)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return StepResult(loss=loss.item() / tokens, grad_norm=norm)

    def state(self) -> checkpoint.State:
        return checkpoint.model_state(self._module) | checkpoint.adam_state(self._module, self._optimizer)

    def _trained(self) -> list[nn.Parameter]:
        return [parameter for parameter in self._module.parameters() if parameter.requires_grad]

    def _forward_backward(self, batch: Batch, scale: float) -> Tensor:
        batch = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
        with self._autocast():
            loss_sum = self._recipe.loss_sum(self._model, batch)
        (loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach().double()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """bf16 where weights stay fp32; FSDP2 casts what it gathers instead."""
        if self._plan.precision is Precision.BF16 and not _is_sharded(self._plan):
            return torch.autocast(self._device.type, dtype=torch.bfloat16)
        return contextlib.nullcontext()

    def _sync_on_last(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        if isinstance(self._model, DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        return contextlib.nullcontext()


def device_mesh(layout: ParallelLayout, device: torch.device) -> DeviceMesh:
    """The mesh of a layout, axes pp, dp, tp from the slowest to the fastest rank. Raises IllegalPlan."""
    if layout.tp > 1 or layout.pp > 1:
        raise IllegalPlan(f"engine=torch does not run tensor or pipeline parallel yet (tp={layout.tp}, pp={layout.pp})")
    return init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))


def _is_sharded(plan: Plan) -> bool:
    return plan.zero_stage is ZeroStage.PARAMETERS


def _state_device(plan: Plan, device: torch.device) -> torch.device:
    return device if plan.offload is Offload.NONE else torch.device("cpu")


def _replicated(recipe: Recipe, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    module = recipe.module
    materialise(module, module, recipe, device)
    module.to(device)
    if mesh["dp"].size() == 1:
        return module
    return DistributedDataParallel(
        module,
        device_ids=[device] if device.type == "cuda" else None,
        process_group=mesh["dp"].get_group(),
        gradient_as_bucket_view=True,
        init_sync=recipe.initialise is None,  # else equal on every rank already: no flat copy for a broadcast
    )


def _sharded(recipe: Recipe, plan: Plan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    mixed = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*recipe.layers, recipe.module):
        materialise(recipe.module, part, recipe, device)
        fully_shard(
            part,
            mesh=mesh["dp"],
            mp_policy=mixed if plan.precision is Precision.BF16 else MixedPrecisionPolicy(),
            offload_policy=offload if plan.offload is Offload.PARAMETERS else OffloadPolicy(),
        )
    return recipe.module
