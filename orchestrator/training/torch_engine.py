"""The torch engine: one device mesh; plain, DDP (zero_stage 0) or FSDP2 (2: weights stay gathered; 3), HSDP.

What decides memory, in bytes, for the model of it (P parameters, dp ranks):
- Start: plain and DDP hold 4P of weights; FSDP2 makes and shards a layer at a time: 4P/dp and one layer (or the rest).
  The optimizer's states are allocated before the first step, so the first step has the later steps' peak.
- Gradients: plain: per parameter during backward, freed after the step. DDP: buckets of 4P in all, which are the
  gradients, for ever (25 MiB each, the first 1 MiB; rebuilt once, at the second step, in order of use).
  FSDP2: 4P/dp, freed after the step; every micro-batch is reduce-scattered, so accumulation holds nothing unsharded.
- FSDP2 at stage 3 frees a layer after its forward pass and gathers it again; the rest (embedding, norm, head) stays
  gathered. At stage 2 every layer stays gathered until its backward pass. HSDP shards over dp / dp_replicate ranks.
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
from orchestrator.specs.plan import Offload, Plan, Precision, ZeroStage
from orchestrator.training import checkpoint, loss_scale
from orchestrator.training.freezing import freeze_for
from orchestrator.training.loss_scale import LossScale
from orchestrator.training.optimizers import Updates, clip_factor, gradient_norm, scale_gradients
from orchestrator.training.randomness import Randomness
from orchestrator.training.recipe import Batch, Recipe, materialise
from orchestrator.training.results import StepResult

LOW_PRECISION = {Precision.BF16: torch.bfloat16, Precision.FP16: torch.float16}


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
        self._mesh = device_mesh(plan, device)
        self._randomness = Randomness(recipe, training.seed)
        self._loss_scale = LossScale() if plan.precision is Precision.FP16 else None
        step = resume_from.cursor.step if resume_from else 0
        self._changing = freeze_for(recipe.module, training.freeze, step)
        self._model = _model(recipe, plan, self._mesh, device)
        self._updates = Updates(self._module.named_parameters(), training, _state_device(plan, device), step)
        self._updates.allocate()
        if resume_from:
            checkpoint.load(resume_from.path, self._state(known_at=step))
            self._updates.set_steps()

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        plan = self._plan
        factor = self._loss_scale.factor if self._loss_scale else 1.0
        scale = factor * plan.layout.dp / tokens  # DDP and FSDP2 average gradients over dp; a lone rank has dp = 1
        first = self._mesh["dp"].get_local_rank() * plan.gradient_accumulation_steps
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        for turn, batch in enumerate(micro_batches, start=1):
            self._randomness.begin(step, first + turn - 1)
            with self._sync_on_last(is_last=turn == plan.gradient_accumulation_steps):
                loss += self._forward_backward(batch, scale)
        norm = self._update(step, factor)
        return StepResult(loss=loss.item() / tokens, grad_norm=norm)

    def state(self) -> checkpoint.State:
        return self._state()

    def _state(self, known_at: int | None = None) -> checkpoint.State:
        scale = {loss_scale.STATE: self._loss_scale.state} if self._loss_scale else {}
        model = checkpoint.model_state(self._module, self._changing)
        state = model | self._updates.state(known_at=known_at) | scale
        return checkpoint.of_recipe(self._recipe.name, state)

    def _forward_backward(self, batch: Batch, scale: float) -> Tensor:
        batch = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
        with self._autocast():
            loss_sum = self._recipe.loss_sum(self._model, batch)
        (loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach().double()

    def _update(self, step: int, factor: float) -> float:
        """Clip and update; the norm of the gradients, which carry `factor`. Leaves out a fp16 step that overflowed."""
        trained = self._updates.parameters.values()
        norm = gradient_norm(trained).item() / factor
        if self._loss_scale is None or self._loss_scale.update(norm):
            self._updates.prepare(step)
            scale_gradients(trained, clip_factor(norm, self._clip_norm) / factor)
            self._updates.optimizer.step()
            self._updates.count()
        self._updates.optimizer.zero_grad(set_to_none=True)
        return norm

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Low precision where weights stay fp32; FSDP2 casts what it gathers instead."""
        if self._plan.precision in LOW_PRECISION and not self._plan.zero_stage:
            return torch.autocast(self._device.type, dtype=LOW_PRECISION[self._plan.precision])
        return contextlib.nullcontext()

    def _sync_on_last(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        if isinstance(self._model, DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        return contextlib.nullcontext()


def device_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """The mesh of a plan, axes pp, dp, tp from the slowest to the fastest rank. Raises IllegalPlan."""
    layout = plan.layout
    if layout.tp > 1 or layout.pp > 1:
        raise IllegalPlan(f"engine=torch does not run tensor or pipeline parallel yet (tp={layout.tp}, pp={layout.pp})")
    return init_device_mesh(device.type, (layout.pp, layout.dp, layout.tp), mesh_dim_names=("pp", "dp", "tp"))


def _state_device(plan: Plan, device: torch.device) -> torch.device:
    return device if plan.offload is Offload.NONE else torch.device("cpu")


def _model(recipe: Recipe, plan: Plan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    return _sharded(recipe, plan, mesh, device) if plan.zero_stage else _replicated(recipe, mesh, device)


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
        broadcast_buffers=False,  # equal at first; what changes them keeps them so (see batch_norm)
        gradient_as_bucket_view=True,
        init_sync=recipe.initialise is None,  # else equal on every rank already: no flat copy for a broadcast
    )


def _sharded(recipe: Recipe, plan: Plan, mesh: DeviceMesh, device: torch.device) -> nn.Module:
    low = LOW_PRECISION.get(plan.precision)
    mixed = MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32) if low else MixedPrecisionPolicy()
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*recipe.layers, recipe.module):
        materialise(recipe.module, part, recipe, device)
        fully_shard(
            part,
            mesh=mesh["dp"],
            reshard_after_forward=plan.zero_stage is ZeroStage.PARAMETERS and part is not recipe.module,
            mp_policy=mixed,
            offload_policy=offload if plan.offload is Offload.PARAMETERS else OffloadPolicy(),
        )
    return recipe.module
