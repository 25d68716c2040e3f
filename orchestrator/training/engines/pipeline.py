"""Pipeline parallelism: layers per rank, and the schedule that runs them (torch.distributed.pipelining).

The plan says how many layers the first and the last stage have (specs/stages.py). Rank r of pp has the stages r, r+pp,
... (interleaved: Narayanan et al. 2021, arXiv:2104.04473, section 2.2). A rank's module keeps its structure, hence the
whole-model names.

Facts for its memory model:
- A rank has receive buffers for the hidden states of micro-batches in flight, and for gradients as they arrive.
- At 1F1B stage s holds the activations of min(n - s, micro-batches) micro-batches.
- The first step starts with a forward and a backward pass of one micro-batch through all stages, to infer shapes.
- Ranks with tokens of their own (sequence_parallel.py) hand on hidden states of these alone.
- FSDP2 holds a stage's gathered weights and unsharded gradients (fp32) until its last backward pass.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleInterleaved1F1B
from torch.nn.parallel import DistributedDataParallel

from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from orchestrator.specs.stages import list_stage_layer_ranges
from orchestrator.training.checkpoint.fragment import get_local_part
from orchestrator.training.contract.recipe import Batch, Recipe
from orchestrator.training.engines.randomness import Randomness
from orchestrator.training.engines.sequence_parallel import TokenSplit

Message = tuple[dist.Work, Tensor]  # that is being sent


@frozen
class StageShare:
    """A rank's part of a model that is split into pipeline stages."""

    stages: tuple[Recipe, ...]  # one per stage of the rank: its module and layers
    names: dict[
        str, str
    ]  # every whole-model name of a parameter -> its first name, which the checkpoint uses
    shared: tuple[str, ...]  # parameters that the first and the last stage both have


def split_model(recipe: Recipe, plan: Plan, pipeline_rank: int) -> StageShare:
    """Return this pipeline rank's part of the model. Other ranks' parts are removed from
    `recipe.module`, in place.

    Raises SpecError if the recipe cannot be split into that many stages.
    """
    count = plan.layout.pp * plan.pipeline_stages_per_rank
    if recipe.stages is None:
        raise SpecError(
            "this model defines no pipeline stages",
            path="plan.layout.pp",
            got=plan.layout.pp,
            allowed="1",
            hint="a factory may return a Recipe with `stages`",
        )
    ranges = list_stage_ranges(len(recipe.layers), plan)
    names, shared = _map_shared_names(recipe, ranges)
    stage_indices = range(pipeline_rank, count, plan.layout.pp)
    first = recipe.stages.first
    last = recipe.stages.last
    layer_names = _list_layer_names(recipe)
    initialise = recipe.initialise

    def by_first_name(name: str, values: Tensor) -> None:
        assert initialise
        initialise(names[name], values)

    names_of = {stage: [layer_names[index] for index in ranges[stage]] for stage in stage_indices}
    for stage in stage_indices:
        if stage == 0:
            names_of[stage] += first
        elif stage == count - 1:
            names_of[stage] += last
    whole = set().union(*names_of.values())
    left_out = {*layer_names, *first, *last} - whole
    parts = [recipe.module.get_submodule(name) for name in left_out]
    _replace_by_placeholders(recipe.module, left_out, first + last)
    _drop_tensors(parts, set(recipe.module.parameters()))
    stages = []
    for stage in stage_indices:
        module = recipe.module
        if len(stage_indices) > 1:
            module = _copy_parts(module, "", {*layer_names, *first, *last})
            _replace_by_placeholders(module, whole - set(names_of[stage]), first + last)
        layers = tuple(recipe.layers[index] for index in ranges[stage])
        made = by_first_name if initialise else None
        stages.append(replace(recipe, module=module, layers=layers, initialise=made))
    return StageShare(
        stages=tuple(stages),
        names=names,
        shared=shared if {0, count - 1} & set(stage_indices) else (),
    )


def list_stage_ranges(layers: int, plan: Plan) -> tuple[range, ...]:
    """Return the layer indices of each pipeline stage of the plan. Raises SpecError for a stage
    without layers.
    """
    count = plan.layout.pp * plan.pipeline_stages_per_rank
    try:
        return list_stage_layer_ranges(
            layers, count, plan.first_stage_layers, plan.last_stage_layers
        )
    except ValueError as error:
        raise SpecError(
            "every pipeline stage needs a layer", path="plan.layout.pp", got=str(error)
        ) from None


class Stage(nn.Module):
    """A pipeline stage as the schedule calls it: it returns hidden states, or on the last stage the
    loss sum [1].
    """

    def __init__(
        self,
        recipe: Recipe,
        autocast: Callable[[], contextlib.AbstractContextManager[object]],
        *,
        is_last: bool,
        token_split: TokenSplit | None,
    ) -> None:
        """Make the stage; `token_split` says how incoming hidden states are spread over ranks; None
        where they are whole, or none come.
        """
        super().__init__()
        assert recipe.stages
        self.module = recipe.module
        self._stages = recipe.stages
        self._tokens = token_split
        self._autocast = autocast
        self._is_last = is_last

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        with self._autocast():
            hidden = self._stages.hidden(
                self.module, self._tokens.make_stand_in(x) if self._tokens else x
            )
            if not self._is_last:
                return hidden
            assert labels is not None
            return torch.stack([self._stages.loss_sum(self.module, hidden, labels)])


class Pipeline:
    """The pipeline stages of a rank, with their schedule."""

    def __init__(
        self,
        stage_modules: Sequence[nn.Module],
        plan: Plan,
        pipeline_mesh: DeviceMesh,
        device: torch.device,
        randomness: Randomness,
    ) -> None:
        """Make the schedule of the rank's `stage_modules`, each a Stage or its wrapper; `pipeline_mesh`
        has the pipeline's ranks.
        """
        self._randomness = randomness
        self._place = (0, 0)
        self._device = device
        self._scale = 1.0
        self._replicated = [
            root for root in stage_modules if isinstance(root, DistributedDataParallel)
        ]
        self._rank = pipeline_mesh.get_local_rank()
        self._ranks = pipeline_mesh.size()
        self._group = pipeline_mesh.get_group()
        count = len(stage_modules) * self._ranks
        kind = _Stage if len(stage_modules) == 1 else _InterleavedStage
        stages = [
            kind(
                self._seed_micro_batch,
                root,
                self._rank + turn * self._ranks,
                count,
                device,
                group=self._group,
            )
            for turn, root in enumerate(stage_modules)
        ]
        self._stages = stages
        settings: dict[str, Any] = {"loss_fn": self._scale_loss, "scale_grads": False}
        turns = plan.gradient_accumulation_steps
        self._schedule: Schedule1F1B | ScheduleInterleaved1F1B = (
            Schedule1F1B(stages[0], turns, **settings)
            if len(stages) == 1
            else ScheduleInterleaved1F1B(list(stages), turns, **settings)
        )

    @property
    def is_last(self) -> bool:
        """Whether this rank has the last stage, hence the loss."""
        return self._rank == self._ranks - 1

    def step(
        self,
        steps_done: int,
        first_micro_batch: int,
        micro_batches: Iterable[Batch],
        loss_scale: float,
    ) -> Tensor:
        """Run forward and backward of all micro-batches; return their loss sum in float64, 0 on
        ranks without the last stage.

        `first_micro_batch` is the index of the first micro-batch in the global batch of the step
        after `steps_done` steps. Gradients are those of the loss sum times `loss_scale`.
        """
        self._place = (steps_done, first_micro_batch)
        self._scale = loss_scale
        inputs: list[Tensor] = []
        keywords: dict[str, Any] = {}
        target = None
        if self._rank == 0 or self.is_last:  # the others need no data
            batches = list(micro_batches)
            if self._rank == 0:
                inputs = [
                    torch.cat([batch[0] for batch in batches]).to(self._device, non_blocking=True)
                ]
            else:
                target = torch.cat([batch[1] for batch in batches]).to(
                    self._device, non_blocking=True
                )
                keywords["labels"] = target
        with unwrapping_out_of_memory(), contextlib.ExitStack() as quiet:
            for (
                root
            ) in self._replicated:  # the schedule itself reduces after the last backward pass
                quiet.enter_context(root.no_sync())
            losses = self._schedule.step(*inputs, target=target, **keywords)
            for stage in self._stages:
                stage.finish()
        return (
            losses.detach().double().sum() if self.is_last else torch.zeros((), dtype=torch.float64)
        )

    def sum_shared_gradients(self, gradients: Iterable[Tensor]) -> None:
        """Sum the gradients of parameters that the first and the last stage share, in place."""
        peer = dist.get_global_rank(self._group, 0 if self.is_last else self._ranks - 1)
        for gradient in gradients:
            local = get_local_part(gradient)
            others = torch.empty_like(local)
            exchange = [
                dist.P2POp(dist.isend, local, peer, self._group),
                dist.P2POp(dist.irecv, others, peer, self._group),
            ]
            for work in dist.batch_isend_irecv(exchange):
                work.wait()
            local += others

    def _seed_micro_batch(self, turn: int) -> None:
        step, first = self._place
        self._randomness.begin(step, first + turn)

    def _scale_loss(self, loss: Tensor, _target: Tensor) -> Tensor:
        return loss.sum() * self._scale


class _Stage(PipelineStage):
    """Seeds before every micro-batch, and has a receive buffer only from the post of a receive to its use.

    PipelineStage allocates the buffers of all micro-batches of a step at its start (torch 2.13.0,
    torch/distributed/pipelining/stage.py). Many micro-batches, which fill a pipeline best, would need the most memory.
    The stage counts the micro-batches itself: reading the number from an input would sync the device.
    """

    def __init__(self, seed: Callable[[int], None], *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._seed = seed

    def finish(self) -> None:
        """Wait until all pending sends are complete."""

    def forward_one_chunk(self, fwd_chunk_id: int, *args: Any, **kwargs: Any) -> Any:
        self._seed(fwd_chunk_id)
        output = super().forward_one_chunk(fwd_chunk_id, *args, **kwargs)
        # `fwd_cache` keeps the input for the backward pass
        self._allocate_buffers(self.args_recv_info[fwd_chunk_id], "meta")
        return output

    def backward_one_chunk(
        self,
        bwd_chunk_id: int,
        loss: Tensor | None = None,
        full_backward: bool = True,
        last_backward: bool = False,
    ) -> None:
        super().backward_one_chunk(bwd_chunk_id, loss, full_backward, last_backward)
        self._allocate_buffers(self.grad_recv_info[bwd_chunk_id], "meta")
        if loss is not None:
            loss.detach_()  # the schedule keeps it, and with it the inputs of recomputed layers

    def get_fwd_recv_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate_buffers(
            self.args_recv_info[fwd_chunk_id], self.device, trained=self.has_backward
        )
        return super().get_fwd_recv_ops(fwd_chunk_id)

    def get_bwd_recv_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._allocate_buffers(self.grad_recv_info[bwd_chunk_id], self.device)
        return super().get_bwd_recv_ops(bwd_chunk_id)

    def _setup_forward_recv_info(self, num_microbatches: int, has_backward: bool) -> None:
        super()._setup_forward_recv_info(1, has_backward)
        self._describe(self.args_recv_info, num_microbatches)

    def _setup_backward_recv_info(self, num_microbatches: int) -> None:
        super()._setup_backward_recv_info(1)
        self.chunks = num_microbatches
        self._describe(self.grad_recv_info, num_microbatches)

    if not hasattr(PipelineStage, "_setup_forward_recv_info"):  # torch 2.11 has it within these two

        def _prepare_forward_infra(self, num_microbatches: int, *inputs: Any) -> Any:
            outputs = super()._prepare_forward_infra(1, *inputs)
            self._describe(self.args_recv_info, num_microbatches)
            return outputs

        def _prepare_backward_infra(self, num_microbatches: int, *others: Any) -> Any:
            super()._prepare_backward_infra(1, *others)
            self.chunks = num_microbatches
            self._describe(self.grad_recv_info, num_microbatches)

    def _describe(self, infos: dict[int, tuple[Any, ...]], num_microbatches: int) -> None:
        """Make the first micro-batch's buffers shapes without memory, and give every micro-batch
        buffers of these shapes.
        """
        self._allocate_buffers(infos[0], "meta")
        for chunk in range(1, num_microbatches):
            infos[chunk] = tuple(copy.copy(info) for info in infos[0])

    def _allocate_buffers(
        self, infos: Iterable[Any], device: torch.device | str, *, trained: bool = False
    ) -> None:
        """Allocate the buffers anew on a device; on "meta" they have no memory."""
        for info in infos:
            # torch 2.11: what the schedule is handed has none at all
            if getattr(info, "buffer", None) is not None:
                info.buffer = torch.empty_like(info.buffer, device=device, requires_grad=trained)


class _InterleavedStage(_Stage):
    """A stage of several on a rank: at most one message to either neighbour is being sent at a time.

    Interleaved schedules keep all that a step sends until its end. Waiting for the message before cannot deadlock: the
    schedule lists every receive beside its send, and posting a receive blocks no rank
    (`_add_send_recv` in torch/distributed/pipelining/schedules.py, torch 2.13.0).
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._forward: list[Message] = []  # messages that are being sent
        self._backward: list[Message] = []

    def get_fwd_send_ops(self, fwd_chunk_id: int) -> list[dist.P2POp]:
        self._forward = _send_after(super().get_fwd_send_ops(fwd_chunk_id), self._forward)
        return []

    def get_bwd_send_ops(self, bwd_chunk_id: int) -> list[dist.P2POp]:
        self._backward = _send_after(super().get_bwd_send_ops(bwd_chunk_id), self._backward)
        return []

    def finish(self) -> None:
        self._forward = _send_after([], self._forward)
        self._backward = _send_after([], self._backward)


def _send_after(send_ops: Iterable[dist.P2POp], pending_sends: Iterable[Message]) -> list[Message]:
    """Start sending once the messages sent before have arrived; return the handles of the sends
    that are under way.
    """
    for work, _ in pending_sends:
        work.wait()
    return [
        (op.op(op.tensor, group=op.group, tag=op.tag, group_dst=op.group_peer), op.tensor)
        for op in send_ops
    ]


@contextlib.contextmanager
def unwrapping_out_of_memory() -> Iterator[None]:
    """Open a context that re-raises a wrapped out-of-memory error itself, since the schedule wraps
    exceptions.
    """
    try:
        yield
    except RuntimeError as error:
        if isinstance(error.__cause__, torch.OutOfMemoryError):
            raise error.__cause__ from None
        raise


def _list_layer_names(recipe: Recipe) -> list[str]:
    names = {module: name for name, module in recipe.module.named_modules()}
    return [names[layer] for layer in recipe.layers]


def _map_shared_names(
    recipe: Recipe, ranges: Sequence[range]
) -> tuple[dict[str, str], tuple[str, ...]]:
    """Return ({name: first name of the same parameter}, names of parameters that both end stages
    share).

    Raises SpecError if shared parameters forbid the split.
    """
    assert recipe.stages
    layers = _list_layer_names(recipe)
    count = len(ranges)
    stage_of = {}
    for number, indices in enumerate(ranges):
        for index in indices:
            stage_of[layers[index]] = number
    stage_of |= dict.fromkeys(recipe.stages.first, 0) | dict.fromkeys(recipe.stages.last, count - 1)
    names: dict[str, str] = {}
    first_names: dict[nn.Parameter, str] = {}
    holders: dict[str, set[int]] = {}
    for name, parameter in recipe.module.named_parameters(remove_duplicate=False):
        names[name] = first_names.setdefault(parameter, name)
        stage = next(
            (stage for part, stage in stage_of.items() if name.startswith(f"{part}.")), None
        )
        if stage is None:
            raise SpecError(
                "a parameter belongs to no pipeline stage",
                path="plan.layout.pp",
                got=name,
                allowed="pp = 1",
            )
        holders.setdefault(names[name], set()).add(stage)
    for name, stages in holders.items():
        if len(stages) > 1 and stages != {0, count - 1}:
            raise SpecError(
                "only the first and the last stage may share a parameter",
                path="plan.layout.pp",
                got=f"{name}, of stages {sorted(stages)}",
            )
    return names, tuple(name for name, stages in holders.items() if len(stages) > 1)


class _SkippedLayer(nn.Module):
    """The placeholder for a layer of another stage, which returns its first input."""

    def forward(self, x: Tensor, *_: Any, **__: Any) -> Tensor:
        return x


def _replace_by_placeholders(
    module: nn.Module, layer_names: Iterable[str], end_names: Sequence[str]
) -> None:
    """Replace the named layers by placeholders, and the named end parts by None, in place."""
    for name in layer_names:
        around, _, key = name.rpartition(".")
        module.get_submodule(around)._modules[key] = None if name in end_names else _SkippedLayer()


def _drop_tensors(parts: Iterable[nn.Module], kept_parameters: set[nn.Parameter]) -> None:
    """Drop the tensors of `parts` except those in `kept_parameters`, since the recipe still references the
    modules.
    """
    for module in (module for part in parts for module in part.modules()):
        for key, parameter in module._parameters.items():
            module._parameters[key] = parameter if parameter in kept_parameters else None
        module._buffers.clear()


def _copy_parts(module: nn.Module, module_name: str, part_names: set[str]) -> nn.Module:
    """Return a shallow copy of the module structure around the named parts; everything else is
    shared with the original.
    """
    twin = copy.copy(module)
    twin._parameters = dict(module._parameters)
    twin._buffers = dict(module._buffers)
    twin._modules = {}
    for key, child in module._modules.items():
        path = f"{module_name}.{key}".lstrip(".")
        around = child is not None and any(part.startswith(f"{path}.") for part in part_names)
        twin._modules[key] = (
            _copy_parts(child, path, part_names) if child is not None and around else child
        )
    return twin
