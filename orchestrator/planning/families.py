"""The plans that a job allows on some hardware, in families that differ only in checkpointing and
micro-batch size.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from itertools import chain, product
from math import inf
from typing import Any, NamedTuple

from orchestrator.memory.estimate import CHECKPOINTING
from orchestrator.memory.profiles import uses_autocast
from orchestrator.planning.cost import Hardware
from orchestrator.planning.ends import EndStageLayers, choose_end_stage_layers
from orchestrator.planning.layouts import count_splittable_layers, list_layouts
from orchestrator.planning.request import PlanRequest
from orchestrator.planning.strategies import (
    OFFLOADED_MIN,
    BatchCut,
    PlanStrategy,
    compute_layer_inputs_bytes,
    list_batch_cuts,
    list_checkpointing_modes,
    list_full_layer_counts,
    list_strategies,
)
from orchestrator.planning.work import PlanCounter
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Degradation,
    Offload,
    ParallelLayout,
    Precision,
    Sharding,
)
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.engines import find_pipeline_stall
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.pins import matches_pins
from orchestrator.specs.mechanics import Fsdp2
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import SETTINGS, Setting
from orchestrator.specs.stages import count_stage_layers


class LayerRecomputation(NamedTuple):
    """How the layers of a stage are recomputed in the backward pass."""

    checkpointing: ActivationCheckpointing
    full_layers: int = 0  # the first ones, which are recomputed in full
    on_host: bool = False  # the inputs of all layers wait in host memory


ON_HOST = LayerRecomputation(ActivationCheckpointing.FULL, on_host=True)
BATCH = ("micro_batch_size", "gradient_accumulation_steps")
ENDS = ("first_stage_layers", "last_stage_layers")
STRATEGY = tuple(field.name for field in fields(PlanStrategy))


@frozen
class SettingsVariant:
    """Values of the settings that `degrade` may change, and how much they alter the training."""

    values: Mapping[str, Any]  # by the setting's name
    degradation: Degradation


def list_variants(request: PlanRequest, hardware: Hardware) -> list[SettingsVariant]:
    """Return the settings that the user asked for, then those that `degrade` allows and the devices
    can compute.
    """
    original = list_requested_settings(request)
    device = hardware.device
    pins = request.pins
    touched = [setting for setting in SETTINGS if setting.degradation is not Degradation.EXACT]
    choices = [
        [
            (original[setting.name], Degradation.EXACT),
            *_list_alternatives(request, device, setting, original[setting.name]),
        ]
        for setting in touched
    ]
    variants = []
    for chosen in product(*choices):
        values = {setting.name: value for setting, (value, _) in zip(touched, chosen, strict=True)}
        if any(pins.get(name, value) != value for name, value in values.items()):
            continue
        if device.supports(values["precision"]):
            variants.append(
                SettingsVariant(
                    values=values, degradation=max(degradation for _, degradation in chosen)
                )
            )
    return variants


def list_requested_settings(request: PlanRequest) -> dict[str, Any]:
    """Return {setting: requested value} of the settings that `degrade` may change.

    Keys of the job count before its `plan:`.
    """
    pins = request.pins
    values = {
        setting.name: pins.get(setting.name, setting.usual)
        for setting in SETTINGS
        if setting.degradation is not Degradation.EXACT
    }
    return values | {
        "precision": request.precision,
        "optimizer": request.training.optimizer,
        "compiled": pins.get("compiled", request.training.compile),
        "sequence_length": request.own_length,
    }


def _list_alternatives(
    request: PlanRequest, device: DeviceSpec, setting: Setting, requested_value: Any
) -> Iterator[tuple[Any, Degradation]]:
    """Yield (value, kind of change) for each value that may replace the requested one under the
    job's `degrade`.

    A numeric setting (such as precision) yields one value: the best cheaper one that the device
    supports. A semantic setting yields the values in `degrade.<setting>s`. A setting that the
    script cannot be given yields nothing.
    """
    is_turnable = (
        request.model is not None or getattr(request.knobs, setting.name, None) is not None
    )
    # master weights are small where only a few of the job's weights are trained
    is_frozen = request.freezes or (request.model is not None and request.model.lora is not None)
    if setting.name == "master_weights" and is_frozen:
        return
    if not is_turnable or request.degrade.limit < setting.degradation:
        return
    if setting.degradation is Degradation.NUMERIC:
        able = [
            value
            for value in setting.cheaper
            if not isinstance(value, Precision) or device.supports(value)
        ]
        others = able[:1] if requested_value == setting.usual else []
    else:
        others = [
            value
            for value in getattr(request.degrade, f"{setting.name}s", ())
            if value != requested_value
        ]
    for value in others:
        yield value, setting.degradation


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PlanFamily:
    """Plans that differ only in checkpointing, micro-batch size and accumulation; smaller
    micro-batches first.
    """

    # plan of the smallest batch that fills the pipeline, with all settings that the family shares
    example: Plan
    alike: tuple[LayerRecomputation, ...]  # checkpointing modes that all layers share
    partial: tuple[
        LayerRecomputation, ...
    ]  # modes in which only the first layers are recomputed in full
    offloads_to: float  # largest micro-batch whose layer inputs may wait in host memory; 0: none
    cuts: tuple[BatchCut, ...]  # those that keep the pipeline busy, all legal

    def __iter__(self) -> Iterator[Plan]:
        return chain.from_iterable(
            self.list_plans_of_batch(
                micro, accumulation, (*self.list_uniform_modes(micro), *self.partial)
            )
            for micro, accumulation in self.cuts
        )

    def list_uniform_modes(self, micro_batch_size: int) -> tuple[LayerRecomputation, ...]:
        """Return the kinds of recomputation that all layers may have at this micro-batch size."""
        return (*self.alike, ON_HOST) if micro_batch_size <= self.offloads_to else self.alike

    def list_plans_of_batch(
        self, micro_batch_size: int, accumulation: int, modes: Iterable[LayerRecomputation]
    ) -> Iterator[Plan]:
        """Yield the legal plans with this micro-batch size and accumulation, one for each of
        `modes`, in their order.
        """
        for mode, first_layers, offload in modes:
            plan = copy_if_legal(
                self.example,
                micro_batch_size=micro_batch_size,
                gradient_accumulation_steps=accumulation,
                activation_checkpointing=mode,
                full_checkpointing_layers=first_layers,
                activation_offload=offload,
            )
            if plan is not None:
                yield plan


def _ran_when_traced(request: PlanRequest, plan: Plan) -> bool:
    """Return whether the model's code ran with the plan's dtypes when it was traced; True if it was
    not traced.
    """
    traced = {(entry.profile.precision, entry.autocast) for entry in request.traced}
    return not traced or (plan.precision, uses_autocast(plan)) in traced


def copy_if_legal(plan: Plan, **changes: Any) -> Plan | None:
    """Return the plan with these settings changed; None where the result is illegal."""
    try:
        return replace(plan, **changes)
    except IllegalPlan:
        return None


def list_families(
    request: PlanRequest,
    hardware: Hardware,
    variant: SettingsVariant,
    profile_of: Callable[[Plan], ModelProfile],
    plan_counter: PlanCounter,
) -> Iterator[PlanFamily]:
    """Yield the families of legal plans that agree with every setting that the job pins.

    A plan that differs from a pin is left out, even where it is better. Raises TooManyPlans beyond
    the limit of `plan_counter`.
    """
    pins = request.pins
    pinned_mode, first_layers, offload = (pins.get(name) for name in CHECKPOINTING)
    inputs_bytes = compute_layer_inputs_bytes(request, hardware)
    for layout in list_layouts(request, hardware, plan_counter):
        if not matches_pins(layout, pins):
            continue
        cuts = _list_batch_cuts(request, layout)
        for strategy in list_strategies(request, hardware, layout) if cuts else ():
            plan_counter.count_examined()
            if not matches_pins(strategy, pins) or not _can_have_pinned_end_layers(
                request, strategy
            ):
                continue
            example = _make_example_plan(strategy, variant)
            if example is None or not _ran_when_traced(request, example):
                continue
            at_work = _select_busy_batch_cuts(cuts, strategy)
            modes = list_checkpointing_modes(request, strategy)
            if pinned_mode is not None:
                modes = tuple(mode for mode in modes if mode is pinned_mode)
            if modes and at_work:
                first, last = _choose_end_layers(request, hardware, example, modes, profile_of)
                ended = copy_if_legal(example, first_stage_layers=first, last_stage_layers=last)
                if ended is None:
                    continue
                example = ended
            yield PlanFamily(
                example=example,
                alike=() if first_layers or offload else tuple(map(LayerRecomputation, modes)),
                partial=()
                if offload
                else _list_partial_modes(request, strategy, modes, first_layers),
                offloads_to=_find_largest_offloaded_micro_batch(
                    at_work, modes, inputs_bytes / layout.ranks_of_a_sample, hardware, pins
                ),
                cuts=at_work,
            )


def _make_example_plan(strategy: PlanStrategy, variant: SettingsVariant) -> Plan | None:
    """Return a plan of the strategy, with the smallest batch that fills the pipeline; None where it
    is illegal.
    """
    settings = {name: getattr(strategy, name) for name in STRATEGY}
    fewest = max(strategy.layout.pp, 2 if _accumulates_gradients(strategy) else 1)
    try:
        return Plan(
            **settings, **variant.values, micro_batch_size=1, gradient_accumulation_steps=fewest
        )
    except IllegalPlan:
        return None


def _accumulates_gradients(strategy: PlanStrategy) -> bool:
    """Return whether gradients of several micro-batches accumulate before they are reduced."""
    return isinstance(strategy.mechanics, Fsdp2) and strategy.mechanics.once_a_step


def _select_busy_batch_cuts(
    cuts: Sequence[BatchCut], strategy: PlanStrategy
) -> tuple[BatchCut, ...]:
    """Return those batch cuts (micro-batch size, micro-batches per step) that keep the strategy's
    pipeline busy and are legal with it.
    """
    pipeline = strategy.layout.pp, strategy.pipeline_stages_per_rank
    at_work = tuple(cut for cut in cuts if find_pipeline_stall(*pipeline, cut.accumulation) is None)
    if _accumulates_gradients(strategy):
        at_work = tuple(cut for cut in at_work if cut.accumulation > 1)
    on_host = strategy.sharding is Sharding.FSDP and strategy.offload is not Offload.NONE
    if strategy.optimizer_in_backward or on_host:
        at_work = tuple(cut for cut in at_work if cut.accumulation == 1)
    return at_work


def _list_batch_cuts(request: PlanRequest, layout: ParallelLayout) -> tuple[BatchCut, ...]:
    """Return the possible batch cuts (micro-batch size, micro-batches per step) of this layout that
    agree with the job's pins.

    () where context parallelism gains nothing: with whole samples for each rank, data parallelism
    needs no messages.
    """
    pins = request.pins
    cuts = list_batch_cuts(request, layout.dp)
    if layout.cp > 1 and "cp" not in pins and request.global_batch_size % layout.dp_cp == 0:
        cuts = tuple(cut for cut in cuts if cut.micro % layout.cp)
    micro, steps = (pins.get(name) for name in BATCH)
    return tuple(
        cut for cut in cuts if micro in (None, cut.micro) and steps in (None, cut.accumulation)
    )


def _find_largest_offloaded_micro_batch(
    cuts: Sequence[BatchCut],
    modes: Sequence[ActivationCheckpointing],
    sample_bytes: float,
    hardware: Hardware,
    pins: Mapping[str, Any],
) -> float:
    """Return the largest micro-batch size whose layer inputs may wait in host memory; infinity
    where the job pins that, 0 for none.

    Only the smallest micro-batch may, where its inputs fill much of a device. Elsewhere a smaller
    micro-batch saves as much without a copy. `sample_bytes` are the layer inputs of one sample on a
    rank.
    """
    offload = pins.get("activation_offload")
    first_layers = pins.get("full_checkpointing_layers")
    if ActivationCheckpointing.FULL not in modes or first_layers or offload is False or not cuts:
        return 0.0
    smallest = cuts[0].micro
    is_worth_it = smallest * sample_bytes >= OFFLOADED_MIN * hardware.device.memory
    if offload:
        return inf
    if is_worth_it:
        return smallest
    return 0.0


def _can_have_pinned_end_layers(request: PlanRequest, strategy: PlanStrategy) -> bool:
    """Return whether the first and last pipeline stage can have the pinned numbers of layers; True
    without such pins.
    """
    first, last = (request.pins.get(name, 0) for name in ENDS)
    if not first and not last:
        return True
    if strategy.layout.pp == 1:
        return False
    layers = count_splittable_layers(request)
    stages = strategy.layout.pp * strategy.pipeline_stages_per_rank
    sizes = count_stage_layers(layers, stages, first, last)
    return min(sizes) > 0 and sum(sizes) == layers


def _choose_end_layers(
    request: PlanRequest,
    hardware: Hardware,
    example: Plan,
    modes: Sequence[ActivationCheckpointing],
    profile_of: Callable[[Plan], ModelProfile],
) -> EndStageLayers:
    """Return the numbers of layers of a family's first and last pipeline stage: as pinned, or the
    fastest.

    All plans of the family share these numbers, whatever they checkpoint. They are timed with the
    second-heaviest of `modes`. Full recomputation would balance stages in another way: a layer
    takes a quarter more time, and the head does not.
    """
    pins = request.pins
    if example.layout.pp == 1 or any(name in pins for name in ENDS):
        return EndStageLayers(*(pins.get(name, 0) for name in ENDS))
    plan = copy_if_legal(example, activation_checkpointing=modes[-2:][0]) or example
    return choose_end_stage_layers(profile_of(example), plan, hardware)


def _list_partial_modes(
    request: PlanRequest,
    strategy: PlanStrategy,
    modes: Sequence[ActivationCheckpointing],
    pinned_full_layers: int | None,
) -> tuple[LayerRecomputation, ...]:
    """Return the modes in which only a stage's first layers are fully recomputed: with the pinned
    number of layers, else all worth trying.
    """
    others = (
        ActivationCheckpointing.NONE if request.is_script else ActivationCheckpointing.SELECTIVE
    )
    if others not in modes:
        return ()
    layers, tried = list_full_layer_counts(request, strategy)
    chosen = tried if pinned_full_layers is None else (pinned_full_layers,)
    return tuple(LayerRecomputation(others, count) for count in chosen if 0 < count < layers)
