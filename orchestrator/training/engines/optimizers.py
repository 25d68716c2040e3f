"""A job's optimizer, and the parts that all engines share: states, learning rate, clipping."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from orchestrator.specs.choices import Offload, Optimizer
from orchestrator.specs.job.model import TrainingSpec
from orchestrator.specs.plan import Plan
from orchestrator.training.checkpoint.fragment import Chunks
from orchestrator.training.engines import eight_bit
from orchestrator.training.engines.freezing import find_thaw_step, list_thaw_steps
from orchestrator.training.engines.schedule import compute_learning_rate_after

# canonical name: updates done by each group of parameters that thaw together, ascending
STEPS = "optim.steps"


Named = dict[str, nn.Parameter]  # parameters by whole-model name


class _SingleParameterOptimizer(NamedTuple):
    """An optimizer of one parameter, with its own states."""

    name: str
    optimizer: Any


class OptimizerUpdates:
    """The optimizer of the parameters that are trained until the next unfreezing.

    `groups`: step of unfreezing -> whole-model name -> parameter. `optimizer` has a parameter group
    for each. `steps` counts updates.
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        training: TrainingSpec,
        device: torch.device,
        steps_done: int,
        seed_update: Callable[[str], None] | None = None,
    ) -> None:
        """Make the optimizer. `named_parameters` are all, frozen as `freeze_parameters` leaves
        them; `device` holds the states.

        Where updates are rounded stochastically, `seed_update` is called with a parameter's name
        before its update.
        """
        self._training = training
        self._thaws = list_thaw_steps(training.freeze)
        groups: dict[int, Named] = {}
        for name, parameter in named_parameters:
            thaw = find_thaw_step(name, training.freeze)
            if parameter.requires_grad:
                assert thaw is not None, f"{name} was to be frozen"
                groups.setdefault(thaw, {})[name] = parameter
        self.groups = dict(sorted(groups.items()))
        self.steps = torch.tensor([float(max(0, steps_done - thaw)) for thaw in self._thaws])
        self._thawed = torch.tensor(
            [thaw <= steps_done for thaw in self._thaws]
        )  # a pipeline stage may have none of a group
        self.optimizer = _make_optimizer(self.groups, training, device)
        self._alone: dict[nn.Parameter, _SingleParameterOptimizer] = {}
        self._device = device
        self._seed = seed_update
        if seed_update:
            self._make_single_optimizers()

    @property
    def parameters(self) -> Named:
        """The trained parameters by whole-model name."""
        return {
            name: parameter for group in self.groups.values() for name, parameter in group.items()
        }

    def allocate(self, tensors_by_group: Sequence[Sequence[Tensor]] | None = None) -> None:
        """Allocate zero states for every updated tensor, so that the first update needs no more
        memory than later ones.

        `tensors_by_group` are the tensors that an engine updates in place of each group's
        parameters; None: the parameters.
        """
        self._updated = tensors_by_group or [list(group.values()) for group in self.groups.values()]
        for tensor in (tensor for group in self._updated for tensor in group):
            self.optimizer.state[tensor] = _new_state(self.optimizer, self._training, tensor)
        self.copy_steps_to_optimizer()

    def state(self, *, only_unfrozen_before_step: int | None = None) -> dict[str, Any]:
        """Return {`optim.state.<name>.<state>`: tensor} and the update counts, by reference.

        With `only_unfrozen_before_step`, states of parameters that unfreeze at that step or later
        are left out.
        """
        return {
            f"optim.state.{name}.{key}": self._prepare_for_saving(
                self.optimizer.state[parameter][key]
            )
            for thaw, group in self.groups.items()
            if only_unfrozen_before_step is None or thaw < only_unfrozen_before_step
            for name, parameter in group.items()
            for key in list_state_names(self._training, parameter.shape)
        } | {STEPS: self.steps}

    def copy_steps_to_optimizer(self) -> None:
        """Set the optimizer's own step counters to `steps`, as needed after a checkpoint was
        loaded.
        """
        for thaw, group in zip(self.groups, self._updated, strict=True):
            done = float(self.steps[self._thaws.index(thaw)])
            for state in (self.optimizer.state[tensor] for tensor in group):
                if "step" in state:
                    state["step"].fill_(done)

    def update_in_backward(self, before_update: Callable[[nn.Parameter], None]) -> None:
        """Switch to updates in the backward pass: each parameter is updated once its gradient is
        complete.

        The gradient is then dropped. Before the update, `before_update` is called with the
        parameter. FSDP2 runs the hook with a reduced shard (foreach_reduce in
        torch/distributed/fsdp/_fully_shard/_fsdp_collectives.py, torch 2.13.0).
        """

        def update(parameter: Tensor) -> None:
            assert isinstance(parameter, nn.Parameter)
            before_update(parameter)
            self._step_single(self._alone[parameter])
            parameter.grad = None

        if not self._alone:
            self._make_single_optimizers()
        for parameter in self._alone:
            parameter.register_post_accumulate_grad_hook(update)  # type: ignore[no-untyped-call]

    def prepare(self, steps_done: int) -> None:
        """Set the learning rate of the update that follows `steps_done` optimizer steps."""
        for optimizer in (self.optimizer, *(alone.optimizer for alone in self._alone.values())):
            for group in optimizer.param_groups:
                rate = compute_learning_rate_after(self._training, steps_done)
                if isinstance(group["lr"], Tensor):  # of a compiled update
                    group["lr"].fill_(rate)
                else:
                    group["lr"] = rate

    def update(self) -> None:
        """Update every parameter with its gradient."""
        if self._alone:
            for alone in self._alone.values():
                self._step_single(alone)
        else:
            self._step(self.optimizer)
        self.count()

    def count(self) -> None:
        """Add one to the number of updates of each group that is trained now."""
        self.steps[self._thawed] += 1

    def _make_single_optimizers(self) -> None:
        """Give each parameter its own optimizer."""
        for thaw, group in self.groups.items():
            for name, parameter in group.items():
                optimizer = _make_optimizer({thaw: {name: parameter}}, self._training, self._device)
                # one dictionary: a checkpoint fills it, counters are set in it
                optimizer.state = self.optimizer.state
                self._alone[parameter] = _SingleParameterOptimizer(name, optimizer)

    def _step_single(self, single: _SingleParameterOptimizer) -> None:
        if self._seed:
            self._seed(single.name)
        self._step(single.optimizer)

    def _step(self, optimizer: Any) -> None:
        with (
            eight_bit.make_compilation_context(self._device)
            if self._is_eight_bit
            else contextlib.nullcontext()
        ):
            optimizer.step()

    def _prepare_for_saving(self, state: Tensor) -> Tensor | Chunks:
        return eight_bit.prepare_moment_for_saving(state) if self._is_eight_bit else state

    @property
    def _is_eight_bit(self) -> bool:
        return self._training.optimizer is Optimizer.ADAMW_8BIT


def list_state_names(training: TrainingSpec, shape: Sequence[int]) -> tuple[str, ...]:
    """Return the names of the optimizer's states for a parameter of this shape, as the optimizer's
    implementation names them.
    """
    if training.optimizer is Optimizer.SGD:
        return ("momentum_buffer",) if training.momentum else ()
    if training.optimizer is Optimizer.ADAFACTOR:
        return ("row_var", "col_var") if len(shape) > 1 else ("variance",)
    return ("exp_avg", "exp_avg_sq")


def compute_gradient_norm(parameters: Iterable[nn.Parameter]) -> Tensor:
    """Return the global norm of the gradients, a scalar; the norm of a DTensor gradient is over all
    its ranks.
    """
    norm = torch.nn.utils.get_total_norm(
        [parameter.grad for parameter in parameters if parameter.grad is not None]
    )
    return norm.full_tensor() if isinstance(norm, DTensor) else norm


def scale_gradients(parameters: Iterable[nn.Parameter], factor: float) -> None:
    """Multiply every gradient by `factor`, in place."""
    gradients = [parameter.grad for parameter in parameters if parameter.grad is not None]
    if gradients and factor != 1.0:
        torch._foreach_mul_(gradients, factor)


def compute_clipping_factor(norm: float, clip_norm: float | None) -> float:
    """Return the factor that scales gradients of this norm down to `clip_norm` (torch's formula); 1
    where that is None.
    """
    return 1.0 if clip_norm is None else min(1.0, clip_norm / (norm + 1e-6))


def get_optimizer_state_device(plan: Plan, device: torch.device) -> torch.device:
    """Return the device that holds the optimizer's states: the host's under offload."""
    return device if plan.offload is Offload.NONE else torch.device("cpu")


def _make_optimizer(groups: dict[int, Named], training: TrainingSpec, device: torch.device) -> Any:
    """Return the optimizer: fused on CUDA; on CPU one parameter at a time, since foreach needs more
    memory.
    """
    chosen = [{"params": list(group.values()), "thaw": thaw} for thaw, group in groups.items()] or [
        {"params": []}
    ]
    decay = training.weight_decay
    betas = (training.beta1, training.beta2)
    fused = device.type == "cuda"
    if training.optimizer is Optimizer.SGD:
        return torch.optim.SGD(
            chosen,
            lr=training.learning_rate,
            momentum=training.momentum,
            weight_decay=decay,
            foreach=False,
            fused=fused,
        )
    if training.optimizer is Optimizer.ADAFACTOR:
        return torch.optim.Adafactor(
            chosen, lr=training.learning_rate, weight_decay=decay, foreach=False
        )
    if training.optimizer is Optimizer.ADAMW_8BIT:
        return eight_bit.make_eight_bit_adamw(chosen, training)
    return torch.optim.AdamW(
        chosen,
        lr=training.learning_rate,
        betas=betas,
        weight_decay=decay,
        foreach=False,
        fused=fused,
    )


def _new_state(optimizer: Any, training: TrainingSpec, tensor: Tensor) -> dict[str, Any]:
    if training.optimizer is Optimizer.ADAMW_8BIT:
        return eight_bit.make_optimizer_state(tensor)
    names = list_state_names(training, tensor.shape)
    if training.optimizer is Optimizer.SGD:
        return {name: torch.zeros_like(tensor, requires_grad=False) for name in names}
    fused = bool(optimizer.defaults.get("fused"))
    counter = {"step": torch.tensor(0.0, device=tensor.device if fused else "cpu")}
    if training.optimizer is Optimizer.ADAFACTOR:
        factors = {
            "row_var": (*tensor.shape[:-1], 1),
            "col_var": (*tensor.shape[:-2], 1, *tensor.shape[-1:]),
        }
        moments = {
            name: tensor.detach().new_zeros(factors.get(name, tensor.shape)) for name in names
        }
        return {**counter, "row_var": None, "col_var": None, "variance": None, **moments}
    return counter | {name: torch.zeros_like(tensor, requires_grad=False) for name in names}
