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
    layer_inputs_bytes,
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
from orchestrator.specs.engines import why_pipeline_stalls
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.pins import matches_pins
from orchestrator.specs.mechanics import Fsdp2
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import SETTINGS, Setting
from orchestrator.specs.stages import stage_layers


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
        if device.has(values["precision"]):
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
    request: PlanRequest, device: DeviceSpec, setting: Setting, original: Any
) -> Iterator[tuple[Any, Degradation]]:
    """Yield (value, kind of change) for each value that may replace the setting's under `degrade`.

    A numeric setting, such as precision, has one: the best cheaper value that the device computes. A
    semantic setting has those of the job's `degrade.<setting>s`. A script without a knob for the
    setting has none.
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
            if not isinstance(value, Precision) or device.has(value)
        ]
        others = able[:1] if original == setting.usual else []
    else:
        others = [
            value for value in getattr(request.degrade, f"{setting.name}s", ()) if value != original
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
            self.list_plans_of_cut(micro, accumulation, (*self.uniform_modes(micro), *self.partial))
            for micro, accumulation in self.cuts
        )

    def uniform_modes(self, micro: int) -> tuple[LayerRecomputation, ...]:
        """Return the ways to recompute that all layers may share at this micro-batch size."""
        return (*self.alike, ON_HOST) if micro <= self.offloads_to else self.alike

    def list_plans_of_cut(
        self, micro_batch_size: int, accumulation: int, modes: Iterable[LayerRecomputation]
    ) -> Iterator[Plan]:
        """Yield the legal plans with this micro-batch size and accumulation, in the order of
        `modes`.
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


def _can_start(request: PlanRequest, plan: Plan) -> bool:
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
    work: PlanCounter,
) -> Iterator[PlanFamily]:
    """Yield the families of plans that have the job's pinned settings.

    Plans without a pin are left out, even where they are better. Raises TooManyPlans beyond the
    limit of `work`.
    """
    pins = request.pins
    pinned_mode, first_layers, offload = (pins.get(name) for name in CHECKPOINTING)
    inputs_bytes = layer_inputs_bytes(request, hardware)
    for layout in list_layouts(request, hardware, work):
        if not matches_pins(layout, pins):
            continue
        cuts = _list_batch_cuts(request, layout)
        for strategy in list_strategies(request, hardware, layout) if cuts else ():
            work.count_examined()
            if not matches_pins(strategy, pins) or not _can_split_ends(request, strategy):
                continue
            example = _make_example_plan(strategy, variant)
            if example is None or not _can_start(request, example):
                continue
            at_work = _keep_busy_cuts(cuts, strategy)
            modes = list_checkpointing_modes(request, strategy)
            if pinned_mode is not None:
                modes = tuple(mode for mode in modes if mode is pinned_mode)
            if modes and at_work:
                first, last = _choose_ends(request, hardware, example, modes, profile_of)
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
                offloads_to=_largest_offloaded_micro(
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


def _keep_busy_cuts(cuts: Sequence[BatchCut], strategy: PlanStrategy) -> tuple[BatchCut, ...]:
    """Return those batch cuts that keep the strategy's pipeline busy and are legal with it."""
    pipeline = strategy.layout.pp, strategy.pipeline_stages_per_rank
    at_work = tuple(cut for cut in cuts if why_pipeline_stalls(*pipeline, cut.accumulation) is None)
    if _accumulates_gradients(strategy):
        at_work = tuple(cut for cut in at_work if cut.accumulation > 1)
    on_host = strategy.sharding is Sharding.FSDP and strategy.offload is not Offload.NONE
    if strategy.optimizer_in_backward or on_host:
        at_work = tuple(cut for cut in at_work if cut.accumulation == 1)
    return at_work


def _list_batch_cuts(request: PlanRequest, layout: ParallelLayout) -> tuple[BatchCut, ...]:
    """Return the pinned or possible batch cuts of this layout; () where splitting samples gains
    nothing.

    Where each rank could have whole samples of its own, dp in the place of cp is the same without
    messages.
    """
    pins = request.pins
    cuts = list_batch_cuts(request, layout.dp)
    if layout.cp > 1 and "cp" not in pins and request.global_batch_size % layout.dp_cp == 0:
        cuts = tuple(cut for cut in cuts if cut.micro % layout.cp)
    micro, steps = (pins.get(name) for name in BATCH)
    return tuple(
        cut for cut in cuts if micro in (None, cut.micro) and steps in (None, cut.accumulation)
    )


def _largest_offloaded_micro(
    cuts: Sequence[BatchCut],
    modes: Sequence[ActivationCheckpointing],
    sample_bytes: float,
    hardware: Hardware,
    pins: Mapping[str, Any],
) -> float:
    """Return the largest micro-batch whose layer inputs may wait in host memory; infinity where
    that is pinned.

    It is the smallest one, where its inputs fill much of a device: else a smaller micro-batch saves
    as much without a copy. `sample_bytes` are the inputs of one sample on a rank.
    """
    offload = pins.get("activation_offload")
    first_layers = pins.get("full_checkpointing_layers")
    if ActivationCheckpointing.FULL not in modes or first_layers or offload is False or not cuts:
        return 0.0
    smallest = cuts[0].micro
    is_worth_it = smallest * sample_bytes >= OFFLOADED_MIN * hardware.device.memory
    return inf if offload else smallest if is_worth_it else 0.0


def _can_split_ends(request: PlanRequest, strategy: PlanStrategy) -> bool:
    """Return whether the end stages of a pipeline may have the pinned numbers of layers."""
    first, last = (request.pins.get(name, 0) for name in ENDS)
    if not first and not last:
        return True
    if strategy.layout.pp == 1:
        return False
    layers = count_splittable_layers(request)
    stages = strategy.layout.pp * strategy.pipeline_stages_per_rank
    sizes = stage_layers(layers, stages, first, last)
    return min(sizes) > 0 and sum(sizes) == layers


def _choose_ends(
    request: PlanRequest,
    hardware: Hardware,
    example: Plan,
    modes: Sequence[ActivationCheckpointing],
    profile_of: Callable[[Plan], ModelProfile],
) -> EndStageLayers:
    """Return the numbers of layers of the first and last stage of a family: as pinned, or the
    fastest.

    All kinds of checkpointing have one cut, since plans lie between them: the cut for the kind
    before the last, which keeps a part. In full recomputation a layer takes a quarter more beside
    the same head.
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
    pinned: int | None,
) -> tuple[LayerRecomputation, ...]:
    """Return the modes in which only a stage's first layers are fully recomputed: as pinned, or
    worth trying.
    """
    others = (
        ActivationCheckpointing.NONE if request.is_script else ActivationCheckpointing.SELECTIVE
    )
    if others not in modes:
        return ()
    layers, tried = list_full_layer_counts(request, strategy)
    chosen = tried if pinned is None else (pinned,)
    return tuple(LayerRecomputation(others, count) for count in chosen if 0 < count < layers)
