"""The DeepSpeed engine: ZeRO 0 to 3, optimizer and parameters optionally in host memory or files.

Some calls are private to DeepSpeed 0.19; each is marked, and each stage has a test.

Facts for its memory model, in bytes (P parameters, dp ranks):
- Start: every rank makes the whole module, 4P; stage 3 makes and partitions a layer at a time. Adam's moments (8P/dp;
  stage 0: 8P) are allocated before the first step. Stages 1 to 3 have fp32 masters (4P/dp) even beside fp32 weights.
- Buckets: see Buckets. Stage 0 all-reduces one flat copy of all gradients, 4P.
- Optimizer on CPU: one flat tensor at a time, two temporaries of its size. On CUDA: fused, none.
  Offloaded to files: one sub-group at a time, with its gradient and moments (see deepspeed_settings.Buckets.swapped).
- A checkpoint is written and read in place, piece by piece; with offload to files, through host copies of 12P/dp.
- In low precision a start makes the fp32 weights again, one by one; parameters that thaw later hold 4P/dp on the host.
- DeepSpeed flattens in host memory if the device cannot hold the module and its flat copy (stage_1_and_2.py).
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import deepspeed
import deepspeed.ops
import torch
import torch.distributed as dist
from torch import Tensor

from orchestrator.specs.choices import Offload, OffloadTarget, Precision, ZeroStage
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.run import TrainingRun
from orchestrator.training.checkpoint import checkpoint
from orchestrator.training.checkpoint.fragment import Fragment
from orchestrator.training.contract import loss_scale
from orchestrator.training.contract.engine import State
from orchestrator.training.contract.loss_scale import LossScale
from orchestrator.training.contract.precision import LOW_PRECISION, make_input_cast_hook
from orchestrator.training.contract.recipe import Batch, Recipe, materialise
from orchestrator.training.contract.results import StepResult
from orchestrator.training.engines import deepspeed_nvme
from orchestrator.training.engines.deepspeed_masters import (
    MasterPiece,
    compute_own_start_and_length,
    list_masters,
    list_pieces,
)
from orchestrator.training.engines.deepspeed_release import dismantle_after
from orchestrator.training.engines.deepspeed_settings import make_deepspeed_settings
from orchestrator.training.engines.freezing import freeze_parameters
from orchestrator.training.engines.optimizers import (
    STEPS,
    OptimizerUpdates,
    compute_clipping_factor,
    compute_gradient_norm,
    get_optimizer_state_device,
    list_state_names,
    scale_gradients,
)
from orchestrator.training.engines.randomness import Randomness
from orchestrator.training.guard.virtual_device import use_host_memory


class DeepSpeedEngine:
    """The engine of a module under DeepSpeed, with its optimizer."""

    def __init__(
        self,
        recipe: Recipe,
        run: TrainingRun,
        training: TrainingSpec,
        device: torch.device,
        resume_from: checkpoint.SavedCheckpoint | None,
    ) -> None:
        """Make the engine. `training` is the run's, or the settings of one recipe. Raises SpecError
        where files cannot take the offload.
        """
        plan = run.plan
        self._recipe = recipe
        self._plan = plan
        self._training = training
        self._device = device
        self._module = recipe.module
        self._randomness = Randomness(recipe, training.seed)
        self._loss_scale = LossScale() if plan.precision is Precision.FP16 else None
        self._shapes = {
            name: parameter.shape for name, parameter in self._module.named_parameters()
        }
        step = resume_from.cursor.step if resume_from else 0
        self._changing = freeze_parameters(recipe.module, training.freeze, step)
        _make_deepspeed_join_process_group(device)
        config = make_deepspeed_settings(
            plan, training, device, self._make_file_offload_settings(run)
        )
        exact = self._make_initial_weights() if self._keeps_copies and not resume_from else None
        self._make_parameters(config, resume_from)
        if resume_from:  # before DeepSpeed copies the weights into its masters
            self._load(resume_from, self._collect_weights_in_use())
        self._updates = OptimizerUpdates(
            self._module.named_parameters(),
            training,
            get_optimizer_state_device(plan, device),
            step,
        )
        self._trained = self._updates.parameters
        self._waiting = tuple(self._make_frozen_copies())
        self._engine = self._initialise_deepspeed(config)
        dismantle_after(self, self._engine, self._updates.optimizer)
        self._updates.allocate(self._list_masters())
        self._initialise_states(resume_from, exact)

    def step(self, step: int, micro_batches: Iterable[Batch], tokens: int) -> StepResult:
        plan = self._plan
        engine = self._engine
        first = dist.get_rank() * plan.gradient_accumulation_steps
        self._updates.prepare(step)
        if self._loss_scale:
            engine.optimizer.override_loss_scale(self._loss_scale.factor)
        # DeepSpeed divides by both
        scale = plan.layout.dp * plan.gradient_accumulation_steps / tokens
        loss = torch.zeros((), dtype=torch.float64, device=self._device)
        norm = 0.0
        for turn, batch in enumerate(micro_batches):
            self._randomness.begin(step, first + turn)
            loss_sum = self._recipe.loss_sum(
                engine, tuple(tensor.to(self._device) for tensor in batch)
            )
            engine.backward(loss_sum * scale)
            loss += loss_sum.detach().double()
            del loss_sum
            if plan.zero_stage is ZeroStage.NONE and engine.is_gradient_accumulation_boundary():
                norm = self._clip_gradients()
            engine.step()
        if plan.zero_stage is not ZeroStage.NONE:
            norm = float(engine.get_global_grad_norm())
            # bf16: DeepSpeed returns -1 for a non-finite norm
            norm = norm if norm >= 0 else math.nan
        if engine.was_step_applied():
            self._updates.count()
        if self._loss_scale:
            self._loss_scale.update(norm)
        return StepResult(loss=loss.item() / tokens, grad_norm=norm)

    def state(self) -> State:
        return checkpoint.add_recipe_prefix(
            self._recipe.name, self._state(self._copy_swapped_to_host())
        )

    def _initialise_states(
        self,
        resume_from: checkpoint.SavedCheckpoint | None,
        initial_weight: Callable[[str], Tensor] | None,
    ) -> None:
        """Initialise fp32 masters, moments and counters: from the checkpoint, else from
        `initial_weight(name)` where given.
        """
        if self._is_swapped:
            deepspeed_nvme.write_zero_moments(self._engine.optimizer, self._moments)
        values = self._copy_swapped_to_host()
        if resume_from:
            self._load(resume_from, self._state(values, moments_until_step=resume_from.cursor.step))
            self._updates.copy_steps_to_optimizer()
        if (
            initial_weight
        ):  # DeepSpeed derives the masters from rounded weights, which changes the loss by 1e-3
            for piece in (*self._waiting, *self._list_master_pieces()):
                master = (
                    values[id(piece.flat)][deepspeed_nvme.MASTER]
                    if id(piece.flat) in values
                    else piece.flat
                )
                piece.view_in(master).copy_(
                    initial_weight(piece.name).flatten().narrow(0, piece.start, piece.count)
                )
        if self._is_swapped:
            deepspeed_nvme.write_back(self._engine.optimizer, self._moments, values)

    def _load(self, saved_checkpoint: checkpoint.SavedCheckpoint, state: State) -> None:
        checkpoint.load_state(
            saved_checkpoint.path, checkpoint.add_recipe_prefix(self._recipe.name, state)
        )

    def _copy_swapped_to_host(self) -> deepspeed_nvme.Swapped:
        """Return host copies of the masters and moments that are offloaded to files; empty without
        such offload.
        """
        return (
            deepspeed_nvme.copy_swapped(self._engine.optimizer, self._moments)
            if self._is_swapped
            else {}
        )

    def _state(
        self, swapped: deepspeed_nvme.Swapped, moments_until_step: int | None = None
    ) -> State:
        """Return the tensors of the canonical checkpoint by reference, offloaded ones from
        `swapped`.

        With `moments_until_step`, moments of parameters that unfreeze only at that step or later
        are left out.
        """
        if self._plan.zero_stage is ZeroStage.NONE:
            return checkpoint.collect_model_state(
                self._module, self._changing
            ) | self._updates.state(only_unfrozen_before_step=moments_until_step)
        state: dict[str, Any] = dict(
            checkpoint.collect_model_state(self._module, frozenset())
        )  # buffers
        state |= (
            dict(self._collect_weights_that_unfreeze_later())
            | dict(self._iterate_fragments(swapped, moments_until_step))
            | {STEPS: self._updates.steps}
        )
        return state | {loss_scale.STATE: self._loss_scale.state} if self._loss_scale else state

    def _clip_gradients(self) -> float:
        """Clip the gradients of the parameters at stage 0, and return their norm before clipping."""
        norm = compute_gradient_norm(self._trained.values()).item()
        scale_gradients(
            self._trained.values(), compute_clipping_factor(norm, self._training.clip_norm)
        )
        return norm

    def _initialise_deepspeed(self, config: JsonObject) -> Any:
        """Return DeepSpeed's engine. In low precision, inputs are cast as FSDP2 does, and buffers
        keep their dtype.
        """
        buffers = [
            (
                module,
                {
                    name: value if value is None else value.to(self._device)
                    for name, value in module._buffers.items()
                },
            )
            for module in self._module.modules()
        ]
        engine, *_ = deepspeed.initialize(
            model=self._module, optimizer=self._updates.optimizer, config=config
        )
        for module, originals in buffers:
            module._buffers.update(originals)
        if self._plan.precision in LOW_PRECISION:
            rounded = make_input_cast_hook(LOW_PRECISION[self._plan.precision])
            self._module.register_forward_pre_hook(rounded, with_kwargs=True)
        return engine

    def _list_masters(self) -> list[list[Tensor]] | None:
        """Return this rank's flat master weights, per group of parameters; None at stage 0, which
        updates the parameters themselves.
        """
        if self._plan.zero_stage is ZeroStage.NONE:
            return None
        return list_masters(
            self._engine.optimizer, self._plan.zero_stage, len(self._updates.groups)
        )

    def _list_master_pieces(self) -> Iterator[MasterPiece]:
        """Yield the rank's pieces of the master weights of all trained parameters, at stages 1 to
        3.
        """
        return list_pieces(self._engine.optimizer, self._plan.zero_stage, self._trained)

    def _make_parameters(
        self, config: JsonObject, resume_from: checkpoint.SavedCheckpoint | None
    ) -> None:
        """Allocate and initialise the parameters; at stage 3 layer by layer, each partitioned
        before the next.
        """
        recipe = self._recipe
        low = LOW_PRECISION.get(self._plan.precision)
        if self._plan.zero_stage is not ZeroStage.PARAMETERS:
            materialise(recipe.module, recipe.module, recipe, self._device)
            return
        swapper = None
        for part in (*recipe.layers, recipe.module):
            materialise(recipe.module, part, recipe, self._device)
            named = recipe.module.named_parameters()
            whole = {name: p for name, p in named if not p.is_meta and not hasattr(p, "ds_id")}
            if resume_from and self._weights_swapped:  # not accessible once partitioned
                state = {
                    f"model.{name}": p.detach()
                    for name, p in whole.items()
                    if name in self._changing
                }
                self._load(resume_from, state)
            for parameter in whole.values() if low else ():
                parameter.data = parameter.data.to(
                    low
                )  # zero.Init does not cast, nor does anything after it
            # One swapper for all parts: a second one would empty the folder.
            swapper = deepspeed.zero.Init(
                module=part, config_dict_or_path=config, param_swapper=swapper
            ).param_swapper

    def _collect_weights_in_use(self) -> State:
        """Return {name: weight or buffer} before DeepSpeed's `initialize`: whole, or at stage 3
        this rank's part.
        """
        if self._plan.zero_stage is not ZeroStage.PARAMETERS:
            return checkpoint.collect_model_state(self._module, self._changing)
        buffers = checkpoint.collect_model_state(self._module, frozenset())
        return (
            buffers
            if self._weights_swapped
            else buffers | self._collect_own_fragments(self._changing)
        )

    def _collect_own_fragments(self, names: Iterable[str]) -> dict[str, Any]:
        """Return {`model.<name>`: this rank's consecutive elements} of parameters that stage 3 has
        partitioned.
        """
        named = dict(self._module.named_parameters())
        runs = {}
        for name in names:
            start, count = compute_own_start_and_length(self._shapes[name].numel())
            run = named[name].ds_tensor[:count]  # type: ignore[attr-defined]  # private
            runs[f"model.{name}"] = Fragment(run, start, self._shapes[name])
        return runs

    def _make_initial_weights(self) -> Callable[[str], Tensor]:
        """Return a function that returns the initial fp32 weight of a parameter by its name.

        Weights are made again one by one if the recipe can, else they come from host copies.
        """
        if self._recipe.initialise is None:
            named = dict(self._module.named_parameters())
            with use_host_memory():
                copies = {
                    name: named[name].detach().to("cpu", copy=True) for name in self._changing
                }
            return copies.__getitem__
        initialise = self._recipe.initialise

        def again(name: str) -> Tensor:
            weight = torch.empty(self._shapes[name], device=self._device)
            initialise(name, weight)
            return weight

        return again

    def _make_frozen_copies(self) -> Iterator[MasterPiece]:
        """Yield buffers of zeros in host memory for this rank's fp32 copies of weights that
        unfreeze later; none where no copy is needed.
        """
        for name in sorted(self._changing - set(self._trained)) if self._keeps_copies else ():
            start, count = compute_own_start_and_length(self._shapes[name].numel())
            with use_host_memory():
                flat = torch.zeros(count)
            yield MasterPiece(name=name, flat=flat, offset=0, start=start, count=count)

    def _collect_weights_that_unfreeze_later(self) -> Mapping[str, Any]:
        """Return {`model.<name>`: weight} of parameters that unfreeze later: the fp32 copies, else
        the weights in use.
        """
        if self._keeps_copies:
            return {
                f"model.{p.name}": Fragment(p.flat, p.start, self._shapes[p.name])
                for p in self._waiting
            }
        names = self._changing - set(self._trained)
        if self._plan.zero_stage is ZeroStage.PARAMETERS:
            return self._collect_own_fragments(names)
        named = dict(self._module.named_parameters())
        return {f"model.{name}": named[name].detach() for name in names}

    def _iterate_fragments(
        self, swapped: deepspeed_nvme.Swapped, moments_until_step: int | None
    ) -> Iterator[tuple[str, Fragment]]:
        """Yield (name, fragment) of this rank's part of every master and moment.

        With `moments_until_step`, moments of parameters that unfreeze only at that step or later
        are left out.
        """
        thaws = {}
        for thaw, group in self._updates.groups.items():
            for name in group:
                thaws[name] = thaw
        for piece in self._list_master_pieces():
            flat = piece.flat
            shape = self._shapes[piece.name]
            values = swapped.get(id(flat)) or {
                deepspeed_nvme.MASTER: flat,
                **self._updates.optimizer.state[flat],
            }
            yield (
                f"model.{piece.name}",
                Fragment(piece.view_in(values[deepspeed_nvme.MASTER]), piece.start, shape),
            )
            if moments_until_step is not None and thaws[piece.name] >= moments_until_step:
                continue
            for moment in self._moments:
                yield (
                    f"optim.state.{piece.name}.{moment}",
                    Fragment(piece.view_in(values[moment]), piece.start, shape),
                )

    def _make_file_offload_settings(self, run: TrainingRun) -> JsonObject | None:
        """Return the part of DeepSpeed's configuration for offload to files; None without such
        offload.
        """
        if not self._is_swapped:
            return None
        folder = deepspeed_nvme.prepare_swap_folder(run) / (self._recipe.name or "model")
        run_elements = deepspeed_nvme.compute_largest_part_elements(
            list(self._shapes.values()), self._plan.layout.dp
        )
        return deepspeed_nvme.make_offload_settings(
            self._plan, folder, run_elements, pin_memory=self._device.type == "cuda"
        )

    @property
    def _is_swapped(self) -> bool:
        return self._plan.offload_target is OffloadTarget.NVME

    @property
    def _weights_swapped(self) -> bool:
        return self._is_swapped and self._plan.offload is Offload.PARAMETERS

    @property
    def _keeps_copies(self) -> bool:
        """Whether frozen weights need fp32 copies, because the weights in use are rounded or not
        accessible.
        """
        return self._plan.precision in LOW_PRECISION or self._weights_swapped

    @property
    def _moments(self) -> tuple[str, ...]:
        """Names of the optimizer's states for a flat master."""
        return list_state_names(self._training, (1,))


def _make_deepspeed_join_process_group(device: torch.device) -> None:
    """Make DeepSpeed use the existing process group, without compiling anything."""
    logging.getLogger("DeepSpeed").setLevel(logging.WARNING)
    if device.type == "cpu":
        deepspeed.ops.__compatible_ops__["deepspeed_shm_comm"] = (
            False  # private; else a C++ build at every start
        )
        # torch computes in fp16 on any CPU; DeepSpeed requires oneDNN's kernels, which need
        # AVX512-FP16.
        deepspeed.get_accelerator().is_fp16_supported = lambda: True
    deepspeed.init_distributed(dist_backend="nccl" if device.type == "cuda" else "gloo")
