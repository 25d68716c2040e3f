"""The DeepSpeed engine: ZeRO 0 to 3, optimizer and parameters in host memory where the plan says so.

Some of the calls are private to DeepSpeed 0.19; each is marked, and each stage has a test.

What decides memory, in bytes, for the model of it (P parameters, dp ranks):
- Start: every rank makes the whole module, 4P; stage 3 makes and cuts a layer at a time. Adam's moments (8P/dp; stage
  0: 8P) are allocated before the first step. Stages 1 to 3 have fp32 masters (4P/dp) beside the weights, in fp32 too.
- Buckets: see Buckets. Stage 0 all-reduces one flat copy of all gradients, 4P.
- Optimizer on CPU: one flat tensor at a time, two temporaries of its size. On CUDA: fused, none.
- A checkpoint is written and read in place, piece by piece. In bf16 a start makes the exact weights again, one by one.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor, nn

from orchestrator.specs.errors import SpecError
from orchestrator.specs.model import TrainingSpec
from orchestrator.specs.plan import Offload, Plan, Precision, ZeroStage
from orchestrator.training import checkpoint
from orchestrator.training.fragment import Fragment
from orchestrator.training.freezing import freeze_for
from orchestrator.training.optimizers import (
    STEPS,
    Updates,
    clip_factor,
    gradient_norm,
    scale_gradients,
    state_names,
)
from orchestrator.training.randomness import Randomness
from orchestrator.training.recipe import Batch, Recipe, materialise
from orchestrator.training.results import StepResult


@dataclass(frozen=True, slots=True, kw_only=True)
class Buckets:
    """DeepSpeed's buffers and limits, in elements (not bytes)."""

    reduce: int
    allgather: int
    prefetch: int  # stage 3: gathered ahead of use
    live: int  # stage 3: gathered at a time, where prefetch and reuse would keep more
    reuse: int  # stage 3: a parameter used again within this distance stays gathered
    persistent: int  # stage 3: parameters smaller than this are never partitioned


# A virtual device is small: DeepSpeed's defaults (5e8 elements) would keep everything and hide what a stage saves.
CPU_BUCKETS = Buckets(reduce=2**19, allgather=2**19, prefetch=0, live=0, reuse=0, persistent=1_000)
# Reduce and gather: a tenth of the defaults, 0.2 GB in fp32, still large messages. The rest are the defaults
# (deepspeed/runtime/zero/config.py).
CUDA_BUCKETS = Buckets(
    reduce=50_000_000,
    allgather=50_000_000,
    prefetch=50_000_000,
    live=1_000_000_000,
    reuse=1_000_000_000,
    persistent=100_000,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Piece:
    """What one rank holds of a parameter's master: `count` elements from `start` on, at `offset` of a flat tensor."""

    name: str
    flat: Tensor
    offset: int
    start: int
    count: int

    def of(self, flat: Tensor) -> Tensor:
        """The same place in the flat master or in one of its moments, sharing memory."""
        return flat.detach().narrow(0, self.offset, self.count)


class DeepSpeedEngine:
    """A module under DeepSpeed, with its optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        plan: Plan,
        training: TrainingSpec,
        device: torch.device,
        resume_from: checkpoint.Saved | None,
    ) -> None:
        self._recipe, self._plan, self._training, self._device = recipe, plan, training, device
        self._module = recipe.module
        self._randomness = Randomness(recipe, training.seed)
        step = resume_from.cursor.step if resume_from else 0
        self._changing = freeze_for(recipe.module, training.freeze, step)
        self._shapes = {name: parameter.shape for name, parameter in self._module.named_parameters()}
        if not all(parameter.requires_grad for parameter in self._module.parameters()):
            raise SpecError("engine=deepspeed trains every parameter: this model has frozen ones", path="model.factory")
        _join_deepspeed(device)
        config = settings(plan, training, device)
        weights = self._exact_weights() if plan.precision is Precision.BF16 and not resume_from else None
        self._materialise(config)
        if resume_from:  # before DeepSpeed copies the weights into its masters
            checkpoint.load(resume_from.path, checkpoint.of_recipe(recipe.name, self._computed_with()))
        self._updates = Updates(self._module.named_parameters(), training, _optimizer_device(plan, device), step)
        self._engine, *_ = deepspeed.initialize(model=self._module, optimizer=self._updates.optimizer, config=config)
        self._updates.allocate(self._masters())
        if resume_from:
            checkpoint.load(resume_from.path, self.state())
            self._updates.set_steps()
        if weights:  # DeepSpeed took the masters from weights rounded to bf16: 1e-3 of loss
            for piece in self._pieces():
                piece.of(piece.flat).copy_(weights(piece.name).flatten().narrow(0, piece.start, piece.count))

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        plan = self._plan
        first = dist.get_rank() * plan.gradient_accumulation_steps
        self._updates.prepare(step)
        scale = plan.layout.dp * plan.gradient_accumulation_steps / tokens  # DeepSpeed divides by both
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        norm = 0.0
        for turn, batch in enumerate(micro_batches):
            self._randomness.begin(step, first + turn)
            loss_sum = self._recipe.loss_sum(self._engine, tuple(tensor.to(self._device) for tensor in batch))
            self._engine.backward(loss_sum * scale)
            loss += loss_sum.detach().double()
            del loss_sum
            if plan.zero_stage is ZeroStage.NONE and self._engine.is_gradient_accumulation_boundary():
                trained = self._updates.parameters.values()
                norm = gradient_norm(trained).item()
                scale_gradients(trained, clip_factor(norm, self._training.clip_norm))
            self._engine.step()
        self._updates.count()
        if plan.zero_stage is not ZeroStage.NONE:
            norm = float(self._engine.get_global_grad_norm())
        return StepResult(loss=loss.item() / tokens, grad_norm=norm)

    def state(self) -> checkpoint.State:
        return checkpoint.of_recipe(self._recipe.name, self._state())

    def _state(self) -> checkpoint.State:
        if self._plan.zero_stage is ZeroStage.NONE:
            return {**checkpoint.model_state(self._module, self._changing), **self._updates.state()}
        buffers = checkpoint.model_state(self._module, frozenset())
        return buffers | dict(self._fragments()) | {STEPS: self._updates.steps}

    def _masters(self) -> list[list[Tensor]] | None:
        """Per group of parameters, this rank's flat masters; None where the parameters themselves are updated."""
        zero = self._engine.optimizer
        if self._plan.zero_stage is ZeroStage.NONE:
            return None
        if self._plan.zero_stage is not ZeroStage.PARAMETERS:
            return [[flat] for flat in zero.single_partition_of_fp32_groups]  # private
        groups: list[list[Tensor]] = [[] for _ in self._updates.groups]
        for index, flat in enumerate(zero.fp32_partitioned_groups_flat):  # private
            groups[zero.sub_group_to_group_id[index]].append(flat)  # private
        return groups

    def _materialise(self, config: dict[str, Any]) -> None:
        """Make the parameters; at stage 3 layer by layer, each cut before the next is made."""
        recipe = self._recipe
        if self._plan.zero_stage is not ZeroStage.PARAMETERS:
            materialise(recipe.module, recipe.module, recipe, self._device)
            return
        for part in (*recipe.layers, recipe.module):
            materialise(recipe.module, part, recipe, self._device)
            if self._plan.precision is Precision.BF16:
                part.bfloat16()  # Init takes a module as it is, and nothing casts what is cut
            deepspeed.zero.Init(module=part, config_dict_or_path=config)

    def _computed_with(self) -> checkpoint.State:
        """Weights and buffers of forward and backward before `initialize`: whole, or this rank's runs at stage 3."""
        if self._plan.zero_stage is not ZeroStage.PARAMETERS:
            return checkpoint.model_state(self._module, self._changing)
        state: dict[str, Any] = {**checkpoint.model_state(self._module, frozenset())}
        for name, parameter in self._module.named_parameters():
            run, shape = parameter.ds_tensor, self._shapes[name]  # type: ignore[attr-defined]  # private
            start = min(dist.get_rank() * run.numel(), shape.numel())
            state[f"model.{name}"] = Fragment(run[: shape.numel() - start], start, shape)
        return state

    def _exact_weights(self) -> Callable[[str], Tensor]:
        """Initial fp32 weights by name: made again one by one where the recipe can, else from copies in host memory."""
        if self._recipe.initialise is None:
            copies = {name: weight.detach().to("cpu", copy=True) for name, weight in self._module.named_parameters()}
            return copies.__getitem__
        initialise = self._recipe.initialise

        def again(name: str) -> Tensor:
            weight = torch.empty(self._shapes[name], device=self._device)
            initialise(name, weight)
            return weight

        return again

    def _fragments(self) -> Iterator[tuple[str, Fragment]]:
        """What this rank holds of every master and moment."""
        for piece in self._pieces():
            shape, moments = self._shapes[piece.name], self._updates.optimizer.state[piece.flat]
            yield f"model.{piece.name}", Fragment(piece.of(piece.flat), piece.start, shape)
            for moment in state_names(self._training, shape):
                yield f"optim.state.{piece.name}.{moment}", Fragment(piece.of(moments[moment]), piece.start, shape)

    def _pieces(self) -> Iterator[Piece]:
        """This rank's pieces of the masters of all trained parameters."""
        locate = self._locate_partitioned if self._plan.zero_stage is ZeroStage.PARAMETERS else self._locate_flat
        for name, parameter in self._module.named_parameters():
            piece = locate(name, parameter) if parameter.requires_grad else None
            if piece:
                yield piece

    def _locate_flat(self, name: str, parameter: nn.Parameter) -> Piece | None:
        """Stages 1 and 2 cut the chain of all parameters into equal flat masters."""
        mapping = parameter._hp_mapping  # type: ignore[attr-defined]  # private
        if mapping is None:  # all of it is another rank's
            return None
        flat = self._engine.optimizer.single_partition_of_fp32_groups[mapping.param_group_index]
        master, whole = mapping.hp_fragment_address, mapping.lp_fragment_address
        return Piece(name=name, flat=flat, offset=master.start, start=whole.start, count=whole.numel)

    def _locate_partitioned(self, name: str, parameter: nn.Parameter) -> Piece | None:
        """Stage 3 cuts every parameter into equal runs, the last ones padded."""
        zero, total = self._engine.optimizer, parameter.ds_numel  # type: ignore[attr-defined]  # private
        group, offset, run = zero.grad_position[zero.get_param_id(parameter)]  # private
        start = min(dist.get_rank() * run, total)
        count = min(run, total - start)
        flat = zero.fp32_partitioned_groups_flat[group]
        return Piece(name=name, flat=flat, offset=offset, start=start, count=count) if count else None


def settings(plan: Plan, training: TrainingSpec, device: torch.device) -> dict[str, Any]:
    """The plan as a DeepSpeed configuration."""
    buckets = CUDA_BUCKETS if device.type == "cuda" else CPU_BUCKETS
    zero: dict[str, Any] = {
        "stage": int(plan.zero_stage),
        "reduce_bucket_size": buckets.reduce,
        "allgather_bucket_size": buckets.allgather,
        "overlap_comm": device.type == "cuda" and plan.zero_stage is ZeroStage.PARAMETERS,  # the default, said aloud
        "stage3_prefetch_bucket_size": buckets.prefetch,
        "stage3_max_live_parameters": buckets.live,
        "stage3_max_reuse_distance": buckets.reuse,
        "stage3_param_persistence_threshold": buckets.persistent,
    }
    host = {"device": "cpu", "pin_memory": device.type == "cuda"}
    if plan.offload is not Offload.NONE:
        zero["offload_optimizer"] = host
    if plan.offload is Offload.PARAMETERS:
        zero["offload_param"] = host
    return {
        "train_batch_size": plan.global_batch_size,
        "train_micro_batch_size_per_gpu": plan.micro_batch_size,
        "gradient_accumulation_steps": plan.gradient_accumulation_steps,
        "zero_optimization": zero,
        "bf16": {"enabled": plan.precision is Precision.BF16},
        # Explicit: unset means 1.0, not off. At stage 0 DeepSpeed does not tell the norm, so we clip ourselves.
        "gradient_clipping": training.clip_norm if plan.zero_stage is not ZeroStage.NONE else 0.0,
        "zero_allow_untested_optimizer": True,  # torch.optim.AdamW: DeepSpeed's own would be compiled at start
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 10**9,
    }


def _join_deepspeed(device: torch.device) -> None:
    """Let DeepSpeed use the process group that exists, without compiling anything."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = False  # private; else a C++ build at every start
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")


def _optimizer_device(plan: Plan, device: torch.device) -> torch.device:
    return device if plan.offload is Offload.NONE else torch.device("cpu")
