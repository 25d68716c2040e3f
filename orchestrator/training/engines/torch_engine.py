"""The torch engine: pipeline, then tensor parallel, then plain, DDP (zero_stage 0), FSDP2 or HSDP on one device mesh.

Facts for its memory model, in bytes (P parameters, dp ranks):
- Start: plain and DDP hold 4P of weights; FSDP2 makes and shards a layer at a time: 4P/dp and one layer (or the rest).
  Optimizer states are allocated before the first step, so the first step has the same peak as later ones.
- Gradients: plain: per parameter during backward, freed after the step. DDP: buckets of 4P in all, never freed; the
  gradients are views of them. (Buckets have 25 MiB, the first 1 MiB; the second step rebuilds them in order of use.)
  FSDP2: 4P/dp, freed after the step; every micro-batch is reduce-scattered, so accumulation holds nothing unsharded.
- FSDP2 at stage 1 gathers every layer and reduces its gradient once a step, which it holds whole until then.
- FSDP2 at stage 2 keeps every layer gathered until its backward pass. At stage 3 it frees a layer after its forward
  pass and gathers it again; the rest (embedding, norm, head) stays gathered. HSDP shards over dp / dp_replicate ranks.
- Master weights in bf16: 2P of weights and of gradients in all of these, which are exchanged in it.
- Optimizer in the backward pass: plain, one gradient at a time; FSDP2, the shards of the unit that is reduced.
- Optimizer on CPU: one parameter at a time, two temporaries of its size. On CUDA: fused, none.
- Tensor parallel: 1/tp of sharded parameters, all of replicated ones (norms); at start one parameter is whole. Between
  sharded modules a rank has 1/tp of the tokens (sequence_parallel.py).
- Context parallel: 1/cp of the tokens, parameters as over dp x cp ranks (contract/context.py).
- Expert parallel: of a layer's experts 1/ep are gathered, over dp/ep ranks (expert_parallel.py).
- Pipeline: see pipeline.py.
- A checkpoint is saved and loaded shard by shard in place: no copy of the model.
"""

from __future__ import annotations

import contextlib
import math
import warnings
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    FSDPModule,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from orchestrator.specs.choices import MasterWeights, Offload, Precision, ZeroStage
from orchestrator.specs.errors import SpecError, refuse_unknown
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.mechanics import Fsdp2, Replicated, ScriptFsdp, Zero
from orchestrator.specs.plan import Plan, can_share_heads
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint.fragment import get_local_part
from orchestrator.training.contract import loss_scale
from orchestrator.training.contract.context import Context
from orchestrator.training.contract.engine import State
from orchestrator.training.contract.loss_scale import LossScale
from orchestrator.training.contract.precision import LOW_PRECISION
from orchestrator.training.contract.recipe import Batch, Recipe, materialise
from orchestrator.training.contract.results import StepResult
from orchestrator.training.engines.expert_parallel import ExpertParallel
from orchestrator.training.engines.freezing import freeze_parameters
from orchestrator.training.engines.optimizers import (
    OptimizerUpdates,
    compute_clipping_factor,
    get_optimizer_state_device,
    scale_gradients,
)
from orchestrator.training.engines.randomness import Randomness
from orchestrator.training.engines.tensor_parallel import (
    TensorParallel,
    is_sequence_parallel,
    shard_recipe,
)

if TYPE_CHECKING:
    from orchestrator.training.engines.pipeline import Pipeline, StageShare

HEADS = ("num_attention_heads", "num_key_value_heads")  # of `Recipe.tensor_parallel_sizes`


class TorchEngine:
    """The engine of a module under plain PyTorch, DDP or FSDP2, with its optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        training: TrainingSpec,
        device: torch.device,
        resume_from: checkpoint.SavedCheckpoint | None,
    ) -> None:
        self._recipe = recipe
        self._plan = plan
        self._device = device
        self._clip_norm = training.clip_norm
        self._mesh = make_device_mesh(plan, device)
        self._context = _join_context_group(recipe, plan) if plan.layout.cp > 1 else None
        self._experts = ExpertParallel(recipe, plan, device) if plan.expert_parallel > 1 else None
        part = self._context.rank if self._context else 0
        if plan.layout.tp > 1 and is_sequence_parallel(recipe):
            part = part * plan.layout.tp + self._mesh["tp"].get_local_rank()
        self._randomness = Randomness(recipe, training.seed, part)
        self._loss_scale = LossScale() if plan.precision is Precision.FP16 else None
        step = resume_from.cursor.step if resume_from else 0
        self._changing = freeze_parameters(recipe.module, training.freeze, step)
        self._build_callable_model()
        names = self._share.names if self._share else {}  # of checkpoints
        self._named = {
            names.get(name, name): parameter for name, parameter in recipe.module.named_parameters()
        }
        self._partial = dict.fromkeys(
            self._cut.select_partial_gradients(self._named) if self._cut else ()
        )
        self._step = step
        is_rounded = plan.master_weights is MasterWeights.BF16
        seed = (
            (lambda name: self._randomness.begin_update(self._step, name)) if is_rounded else None
        )
        self._updates = OptimizerUpdates(
            self._named.items(), training, get_optimizer_state_device(plan, device), step, seed
        )
        self._updates.allocate()
        self._trained = list(self._updates.parameters.values())
        self._spread = (
            self._experts.select_experts(self._updates.parameters) if self._experts else ()
        )
        shared = self._share.shared if self._share else ()
        self._shared = [self._named[name] for name in shared if self._named[name].requires_grad]
        counted = self._updates.parameters.items()
        # counted by the first stage
        again = shared if self._pipeline and self._pipeline.is_last else ()
        self._by_copies = _group_by_copies(
            [parameter for name, parameter in counted if name not in again], plan
        )
        self._squared = torch.zeros(
            (), dtype=torch.float64, device=device
        )  # of gradients that are gone
        if plan.optimizer_in_backward:
            assert training.clip_norm is None, (
                "planning/strategies.py offers it to jobs that do not clip"
            )
            self._copies = {
                parameter: copies for copies, some in self._by_copies.items() for parameter in some
            }
            self._updates.update_in_backward(self._add_norm_of)
        if resume_from:
            checkpoint.load_state(resume_from.path, self._state(moments_until_step=step))
            self._updates.copy_steps_to_optimizer()

    def _build_callable_model(self) -> None:
        """Build what a step calls: the whole model, or the rank's pipeline stages."""
        recipe = self._recipe
        plan = self._plan
        mesh = self._mesh
        self._model: nn.Module = recipe.module
        self._share: StageShare | None = None
        self._pipeline: Pipeline | None = None
        self._cut = cut = None
        if plan.layout.tp > 1:
            length = recipe.dataset.batch([0])[0].shape[1] // plan.layout.cp
            self._cut = cut = shard_recipe(recipe, mesh["tp"], plan.micro_batch_size, length)
        if plan.layout.pp == 1:
            self._model = _wrap_module(
                recipe, recipe.module, plan, mesh, self._device, cut, self._experts
            )
            if cut:
                cut.spread_tokens(recipe.layers)
            return
        # Only here: importing torch.distributed.pipelining takes a quarter of a rank's start.
        from orchestrator.training.engines import pipeline

        rank = mesh["pp"].get_local_rank()
        self._share = pipeline.split_model(recipe, plan, rank)
        roots = []
        for turn, stage in enumerate(self._share.stages, start=1):
            is_last = rank == plan.layout.pp - 1 and turn == len(self._share.stages)
            tokens = cut.tokens if cut and rank + turn > 1 else None
            root = pipeline.Stage(stage, self._autocast, is_last=is_last, token_split=tokens)
            roots.append(_wrap_module(stage, root, plan, mesh, self._device, cut))
            if cut:
                cut.spread_tokens(stage.layers)
        self._pipeline = pipeline.Pipeline(roots, plan, mesh["pp"], self._device, self._randomness)

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        layout = self._plan.layout
        turns = self._plan.gradient_accumulation_steps
        factor = self._loss_scale.factor if self._loss_scale else 1.0
        scale = factor * layout.dp_cp / tokens  # DDP and FSDP2 average gradients over so many ranks
        first = layout.data_parallel_index_of(dist.get_rank()) * turns
        if self._context:
            micro_batches = (tuple(map(self._context.own, batch)) for batch in micro_batches)
        self._step = step
        self._updates.prepare(step)
        if self._pipeline:
            loss = self._pipeline.step(step, first, micro_batches, scale)
            self._pipeline.sum_shared_gradients(
                parameter.grad for parameter in self._shared if parameter.grad is not None
            )
        else:
            loss = torch.zeros((), dtype=torch.float64, device=self._device)
            for turn, batch in enumerate(micro_batches):
                self._randomness.begin(step, first + turn)
                with self._sync_only_if_last(is_last=turn == turns - 1):
                    loss += self._forward_backward(batch, scale)
        norm = self._clip_and_update(factor)
        counts = dist.get_rank() % layout.tp == 0  # tensor-parallel ranks have the same loss
        return StepResult(loss=loss.item() / tokens if counts else 0.0, grad_norm=norm)

    def state(self) -> State:
        return self._state()

    def _state(self, moments_until_step: int | None = None) -> State:
        scale = {loss_scale.STATE: self._loss_scale.state} if self._loss_scale else {}
        model = checkpoint.collect_model_state(self._recipe.module, self._changing)
        if self._share:  # a shared parameter's name on the last stage is not its first name
            named = self._changing & self._named.keys()
            model |= {
                f"model.{name}": checkpoint.prepare_weight_for_saving(self._named[name])
                for name in named
            }
        state = model | self._updates.state(only_unfrozen_before_step=moments_until_step) | scale
        return checkpoint.add_recipe_prefix(self._recipe.name, state)

    def _forward_backward(self, batch: Batch, scale: float) -> Tensor:
        batch = tuple(tensor.to(self._device, non_blocking=True) for tensor in batch)
        with self._autocast():
            loss_sum = self._recipe.loss_sum(self._model, batch)
        (loss_sum * scale).backward()  # type: ignore[no-untyped-call]
        return loss_sum.detach().double()

    def _clip_and_update(self, loss_factor: float) -> float:
        """Clip the gradients and update the parameters; return the gradients' norm without
        `loss_factor`.

        An overflowed fp16 step is skipped.
        """
        if self._plan.optimizer_in_backward:
            norm = self._compute_norm_over_all_ranks(self._squared)
            self._squared.zero_()
            self._updates.count()
            return norm
        if self._cut:
            _redistribute_gradients(self._trained)
            self._cut.add_up(self._partial)
        scale_gradients(
            self._spread, 1 / self._plan.expert_parallel
        )  # FSDP2 averaged over the ranks that share them
        norm = self._compute_gradient_norm() / loss_factor
        if self._loss_scale is None or self._loss_scale.update(norm):
            scale_gradients(
                self._trained, compute_clipping_factor(norm, self._clip_norm) / loss_factor
            )
            self._updates.update()
        self._updates.optimizer.zero_grad(set_to_none=True)
        return norm

    def _compute_gradient_norm(self) -> float:
        """Return the global norm of the gradients, bitwise equal on all ranks, since it decides
        whether an fp16 step is skipped.
        """
        squared = torch.zeros((), dtype=torch.float64, device=self._device)
        for copies, parameters in self._by_copies.items():
            gradients = [
                get_local_part(parameter.grad)
                for parameter in parameters
                if parameter.grad is not None
            ]
            if gradients:
                norms = torch.stack(torch._foreach_norm(gradients, dtype=torch.float32))
                squared += norms.to(squared).square().sum() / copies
        return self._compute_norm_over_all_ranks(squared)

    def _add_norm_of(self, parameter: nn.Parameter) -> None:
        """Redistribute the parameter's gradient, and add its squared norm to the step's, before the
        gradient is freed.
        """
        if self._cut:
            _redistribute_gradients([parameter])
            self._cut.add_up((parameter,) if parameter in self._partial else ())
        assert parameter.grad is not None
        norm = torch.linalg.vector_norm(get_local_part(parameter.grad), dtype=torch.float32)
        self._squared += norm.to(self._squared) ** 2 / self._copies[parameter]

    def _compute_norm_over_all_ranks(self, squared_sum: Tensor) -> float:
        """Return the norm over all ranks. `squared_sum` is this rank's sum of squares, each divided
        by the ranks with the same part.
        """
        if set(self._by_copies) == {self._plan.world_size}:
            return squared_sum.mul(self._plan.world_size).sqrt().item()
        squared_sum = squared_sum.clone()
        dist.all_reduce(squared_sum)
        return squared_sum.sqrt().item()

    def _autocast(self) -> contextlib.AbstractContextManager[object]:
        """Return an autocast context if weights stay fp32, else an empty context; FSDP2 casts
        gathered weights itself.
        """
        is_held_low = self._plan.master_weights is MasterWeights.BF16
        if (
            self._plan.precision in LOW_PRECISION
            and self._plan.mechanics.autocasts
            and not is_held_low
        ):
            return torch.autocast(self._device.type, dtype=LOW_PRECISION[self._plan.precision])
        return contextlib.nullcontext()

    def _sync_only_if_last(self, *, is_last: bool) -> contextlib.AbstractContextManager[object]:
        if isinstance(self._model, DistributedDataParallel) and not is_last:
            return self._model.no_sync()
        if self._plan.mechanics.stage is ZeroStage.OPTIMIZER:
            assert isinstance(self._model, FSDPModule)
            self._model.set_requires_gradient_sync(is_last)
            self._model.set_reshard_after_backward(is_last)
        return contextlib.nullcontext()


def make_device_mesh(plan: Plan, device: torch.device) -> DeviceMesh:
    """Return the mesh of a plan: axes pp, dp_replicate, dp_shard, tp from the slowest to the fastest rank.

    Context-parallel ranks hold the same parameters, and are the fastest in dp_shard. Axes of one rank are left out,
    except dp_shard: each axis costs a communicator.
    """
    layout = plan.layout
    copies = plan.dp_replicate
    degrees = {
        "pp": layout.pp,
        "dp_replicate": copies,
        "dp_shard": layout.dp_cp // copies,
        "tp": layout.tp,
    }
    axes = {axis: degree for axis, degree in degrees.items() if degree > 1 or axis == "dp_shard"}
    return init_device_mesh(device.type, tuple(axes.values()), mesh_dim_names=tuple(axes))


def _join_context_group(recipe: Recipe, plan: Plan) -> Context:
    """Prepare the recipe's module for context parallelism, in place, and return the group of ranks
    that share its samples.

    Raises SpecError where the recipe does not support it.
    """
    layout = plan.layout
    path = "plan.layout.cp"
    if recipe.context_parallel is None:
        raise SpecError(
            "this model cannot share a context",
            path=path,
            got=layout.cp,
            allowed="1",
            hint="a factory may return a Recipe with `context_parallel`",
        )
    sizes = recipe.tensor_parallel_sizes
    length = recipe.dataset.batch([0])[0].shape[1]
    if length % layout.cp:
        raise SpecError(f"no divisor of sequence_length = {length}", path=path, got=layout.cp)
    heads, kv_heads = (sizes.get(name, layout.cp * layout.tp) for name in HEADS)
    if not can_share_heads(heads, kv_heads, layout):
        cut = ", ".join(f"{name} = {sizes[name]}" for name in HEADS if name in sizes)
        raise SpecError(
            f"ranks cannot share {cut}", path=path, got=f"{layout.cp}, and tp = {layout.tp}"
        )
    among = range(0, layout.cp * layout.tp, layout.tp)
    starts = (rank for rank in range(layout.world_size) if rank // layout.tp % layout.cp == 0)
    groups = [[start + step for step in among] for start in starts]
    group, _ = dist.new_subgroups_by_enumeration(groups)  # type: ignore[no-untyped-call]
    context = Context(group)
    recipe.context_parallel(context)
    return context


def _group_by_copies(
    parameters: Iterable[nn.Parameter], plan: Plan
) -> dict[int, list[nn.Parameter]]:
    """Return {number of ranks that hold the same part: parameters}."""
    by_copies: dict[int, list[nn.Parameter]] = {}
    for parameter in parameters:
        copies = plan.layout.dp_cp
        if isinstance(parameter, DTensor):
            mesh = parameter.device_mesh
            repeated = (
                axis
                for axis, placement in enumerate(parameter.placements)
                if placement.is_replicate()
            )
            copies = math.prod(mesh.size(axis) for axis in repeated)
        by_copies.setdefault(copies, []).append(parameter)
    return by_copies


def _redistribute_gradients(parameters: Iterable[nn.Parameter]) -> None:
    """Redistribute every gradient to its parameter's placements, in place, since torch's styles may
    leave partial sums.
    """
    for parameter in parameters:
        grad = parameter.grad
        if (
            isinstance(parameter, DTensor)
            and isinstance(grad, DTensor)
            and grad.placements != parameter.placements
        ):
            parameter.grad = grad.redistribute(placements=parameter.placements)


def _wrap_module(
    recipe: Recipe,
    root_module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    device: torch.device,
    tensor_parallel: TensorParallel | None,
    expert_parallel: ExpertParallel | None = None,
) -> nn.Module:
    """Return `root_module`, which contains the recipe's module, with parameters made, wrapped in
    DDP or FSDP2.
    """
    mechanics = plan.mechanics
    match mechanics:
        case Fsdp2():
            return _shard_module(
                recipe, root_module, plan, mechanics, mesh, device, tensor_parallel, expert_parallel
            )
        case Replicated():
            return _replicate_module(recipe, root_module, plan, mesh, device, tensor_parallel)
        case ScriptFsdp() | Zero():
            raise AssertionError(f"{mechanics} is not the torch engine's")
        case _:
            refuse_unknown(mechanics)


def _materialise_part(
    part: nn.Module,
    recipe: Recipe,
    plan: Plan,
    device: torch.device,
    tensor_parallel: TensorParallel | None,
    expert_parallel: ExpertParallel | None = None,
) -> None:
    """Allocate and initialise this rank's parts of the parameters of `part`."""
    cuts = tensor_parallel or expert_parallel
    dtype = torch.bfloat16 if plan.master_weights is MasterWeights.BF16 else None
    materialise(recipe.module, part, recipe, device, cuts.place if cuts else None, dtype)
    if tensor_parallel:
        tensor_parallel.finish(part)


def _replicate_module(
    recipe: Recipe,
    root_module: nn.Module,
    plan: Plan,
    mesh: DeviceMesh,
    device: torch.device,
    tensor_parallel: TensorParallel | None,
) -> nn.Module:
    _materialise_part(recipe.module, recipe, plan, device, tensor_parallel)
    root_module.to(device)
    trains = any(parameter.requires_grad for parameter in root_module.parameters())
    if mesh["dp_shard"].size() == 1 or not trains:
        return root_module
    with warnings.catch_warnings():
        # broadcast_buffers is deprecated in newer releases; older ones lack its replacement.
        warnings.simplefilter("ignore", FutureWarning)
        return DistributedDataParallel(
            root_module,
            device_ids=[device] if device.type == "cuda" else None,
            process_group=mesh["dp_shard"].get_group(),
            broadcast_buffers=False,  # equal at the start, and batch_norm.py keeps them equal
            gradient_as_bucket_view=True,
            init_sync=recipe.initialise
            is None,  # else already equal on every rank: saves the flat copy of a broadcast
        )


def _shard_module(
    recipe: Recipe,
    root_module: nn.Module,
    plan: Plan,
    fsdp: Fsdp2,
    mesh: DeviceMesh,
    device: torch.device,
    tensor_parallel: TensorParallel | None,
    expert_parallel: ExpertParallel | None,
) -> nn.Module:
    low = LOW_PRECISION.get(plan.precision) if plan.master_weights is MasterWeights.FP32 else None
    mixed = (
        MixedPrecisionPolicy(param_dtype=low, reduce_dtype=torch.float32)
        if low
        else MixedPrecisionPolicy()
    )
    offload = CPUOffloadPolicy(pin_memory=device.type == "cuda")
    for part in (*recipe.layers, root_module):
        _materialise_part(part, recipe, plan, device, tensor_parallel, expert_parallel)
        fully_shard(
            part,
            mesh=mesh["dp_replicate", "dp_shard"] if fsdp.copies > 1 else mesh["dp_shard"],
            reshard_after_forward=not fsdp.keeps_gathered and part is not root_module,
            mp_policy=mixed,
            offload_policy=offload if plan.offload is Offload.PARAMETERS else OffloadPolicy(),
            shard_placement_fn=expert_parallel.find_fsdp_placement if expert_parallel else None,
        )
    return root_module
