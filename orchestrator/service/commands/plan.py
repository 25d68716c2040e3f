"""`orc plan` and `orc estimate`: the plans of a job on given hardware; nothing is started."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple, TypedDict

from orchestrator.memory.calibration.calibrate import (
    CONFIDENCE,
    Calibration,
    calibrate,
    estimate_needed_bytes_range,
    estimate_reported_fit_probability,
    get_step_time_correction,
    rests_on_measurements,
)
from orchestrator.memory.calibration.correction import correct_device_bytes, rests_on_facts
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import Hardware, estimate_busy_share, predict_step_s
from orchestrator.planning.explain import describe_rejected_fastest, explain_unfit_job
from orchestrator.planning.families import list_requested_settings
from orchestrator.planning.frontier import (
    Candidate,
    CandidateRoom,
    estimate_candidate_fit_probability,
    estimate_needed_device_bytes,
    estimate_node_host_bytes,
    find_likeliest_fitting,
    find_rejection_reason,
    fits_device,
)
from orchestrator.planning.layouts import count_splittable_layers, find_expert_parallel_obstacle
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.trust import Choice
from orchestrator.planning.ways_out import (
    Trace,
    UnfitJob,
    WayOut,
    list_adapter_changes,
    list_smaller_models,
    list_ways_out,
)
from orchestrator.scheduling.base.node_groups import NodeGroup, group_equal_nodes
from orchestrator.scheduling.options.job_options import make_choice_rule
from orchestrator.scheduling.options.probe import find_probe_plan, set_measured_memory
from orchestrator.service.commands.export import export_plan
from orchestrator.service.intake.profiling import TraceScope
from orchestrator.service.views.records import EstimateView, make_estimate_view
from orchestrator.specs.choices import (
    AXES,
    Degradation,
    Engine,
    Offload,
    OffloadTarget,
    Optimizer,
    ParallelLayout,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.cluster import Node
from orchestrator.specs.device_kind import DeviceTraits
from orchestrator.specs.errors import SpecError
from orchestrator.specs.group_values import group_values
from orchestrator.specs.job.pins import (
    GIVEN,
    SHORT,
    check_update_in_backward,
    make_unknown_setting_error,
    parse_setting_value,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.observation import Observation
from orchestrator.specs.parse import Override, join_problems
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import UNTIMED, WITHOUT_SECONDS, ModelProfile
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import find_strongest_degradation, format_plan, format_settings
from orchestrator.specs.stages import list_stage_layer_ranges
from orchestrator.specs.units import format_bytes
from orchestrator.specs.written import as_yaml

# Median error of predicted steps of 40 published configurations to which nothing was fitted (`make
# bench-cost`,
# 2026-11-26).
STEP_ERROR = 0.13
TORCH_ONLY = "dp_replicate", "expert_parallel"  # degrees beside the layout's


class CandidateView(TypedDict):
    """A plan with its predicted costs, and why it is rejected (None: it is accepted)."""

    plan: str
    settings: dict[str, str]
    degradation: str
    step_s: float  # predicted, times `step_factor`
    # measured / predicted of the steps of such plans so far, 1 if none was measured
    step_factor: float
    busy_share: float | None  # of a step in which a device runs kernels, estimated
    estimate: EstimateView
    correction: float  # of the activations
    needed_bytes: int  # corrected, with margin: compared with the capacity
    # minimum free bytes of the devices with the most free bytes, as many as it needs
    capacity_bytes: int
    fit_probability: float | None  # None: unknown, or surely, by a profile that nobody measured
    # (least, most) bytes that it may need, where nobody has measured what its job file declares
    band_bytes: tuple[int, int] | None
    reported_fit_probability: (
        float | None
    )  # of such a plan, by the error of predictions that others checked
    rejected: str | None


class WayOutView(TypedDict):
    """A change to the job with which a job that fits nowhere would fit."""

    label: str
    plan: str | None
    needed_bytes: int  # of each device
    degradation: str  # what changes of the training
    settings: dict[str, str]  # of `--set` options that make the change; {}: none do
    job: JsonObject | None  # content of the changed job file; None: no job file makes the change


class JobPlans(TypedDict):
    """The plans of a job on one kind of device that no other plan beats, fastest first, and the
    chosen one.
    """

    job: str
    device: str
    devices: int
    hardware: str  # nodes, network and host memory that the plan counts on, in one line
    global_batch_size: int
    steps: int | None  # of the whole training; None: the job file does not say
    price_per_hour: float | None  # of a device, as the cluster file says
    profile: str  # source of the model's costs
    chosen: int | None  # index into the frontier; if nothing fits, of the plan that may fit
    by_devices: list[int]  # of the plan that each number of devices would run, fewest first
    # the measuring attempt that runs first if the script's memory is unknown
    probe: CandidateView | None
    frontier: list[CandidateView]
    nothing_fits: str | None  # the breakdown, and what would make it fit
    ways_out: list[WayOutView]  # the changes in `nothing_fits`
    # why the chosen plan is taken instead of the fastest one; None where it is that
    passed_over: str | None
    # that other plans may be as fast, and how to find out; None where none is near
    unsure: str | None
    # which dimensions of the chosen plan no machine has run; None without any
    experimental: str | None


def plan_job(
    spec: JobSpec,
    nodes: Sequence[Node],
    observations: Sequence[Observation] = (),
    trace_model: Trace | None = None,
) -> JobPlans:
    """Return the job's plans on the first kind of device that it fits, or may fit; else on the
    fastest kind.

    `free_bytes` of the nodes is what a job could use there. If no plan fits even an empty device of
    any kind, a plan that may fit is chosen. Otherwise the job waits for memory, as the scheduler
    decides. `trace_model` returns a job with the profile of its model, which adds adapters to the advice.
    Raises SpecError if there are too few devices, or no kind can run the job.
    """
    return _plan_on_first_fitting_kind(spec, nodes, observations, trace_model).answer


def export_job(
    spec: JobSpec, nodes: Sequence[Node], observations: Sequence[Observation], folder: Path
) -> Path:
    """Write the job's plan as files that run without this service; return the path of `run.sh`.

    Raises SpecError where no plan fits, and as `export_plan`.
    """
    on_kind = _plan_on_first_fitting_kind(spec, nodes, observations, None)
    chosen = on_kind.answer["chosen"]
    if chosen is None:
        raise SpecError(on_kind.answer["nothing_fits"] or "no plan fits", source="--export")
    plan = on_kind.candidates[chosen].plan
    return export_plan(spec, plan, on_kind.hardware.devices_per_node, folder)


def _plan_on_first_fitting_kind(
    spec: JobSpec,
    nodes: Sequence[Node],
    observations: Sequence[Observation],
    trace_model: Trace | None,
) -> _KindPlans:
    groups = _group_nodes(nodes)
    large_enough = [group for group in groups if group.devices >= spec.gpus.min]
    if not large_enough:
        raise SpecError(
            "the job wants more devices of one kind than there are",
            source=spec.name,
            path="gpus.min",
            got=spec.gpus.min,
            allowed=f"at most {max(group.devices for group in groups)}",
        )
    forecasts = []
    errors = []
    for group in large_enough:
        try:
            forecasts.append(_plan_on_kind(spec, group, observations, trace_model))
        except SpecError as error:  # this kind of device cannot run the job
            errors.append(error)
    if not forecasts:
        raise errors[0]
    if not any(forecast.fits_empty_device for forecast in forecasts):
        forecasts = [
            replace(forecast, answer=_choose_likeliest_plan(forecast)) for forecast in forecasts
        ]
    fitting = (forecast for forecast in forecasts if forecast.answer["chosen"] is not None)
    return next(fitting, forecasts[0])


def _describe_hardware(hardware: Hardware) -> str:
    """Return a phrase with the nodes, the devices of each, the network between them, and the host
    memory.
    """
    network = f", {hardware.network_bandwidth / 1e9:.4g} GB/s between nodes" * (hardware.nodes > 1)
    nodes = f"{hardware.nodes} node{'s' * (hardware.nodes > 1)} of {hardware.devices_per_node}"
    return f"{nodes}{network}, {format_bytes(hardware.host_memory)} of host memory each"


def _describe_origin(spec: JobSpec, profile: ModelProfile, plan: Plan) -> str:
    if profile.source in UNTIMED and spec.training.optimizer is not Optimizer.ADAMW:
        return f"{profile.source}, whatever its optimizer is"
    attention = f", {profile.attention} attention" if profile.attention else ""
    compiled = ", as if not compiled: layers took up to 23 % less" * plan.compiled
    return f"{profile.source}{attention}{compiled}"


@dataclass(frozen=True, slots=True)
class _KindPlans:
    """The job's plans on one kind of device; only plans that fit its free memory may be chosen."""

    answer: JobPlans
    hardware: Hardware
    candidates: Sequence[Candidate]  # of the frontier, in its order
    calibrated: Calibration

    @property
    def fits_empty_device(self) -> bool:
        return any(
            fits_device(candidate, self.hardware.device.memory, self.calibrated)
            for candidate in self.candidates
        )


def _choose_likeliest_plan(kind_plans: _KindPlans) -> JobPlans:
    """Return the plans, with the one chosen that most likely fits an empty device.

    None is chosen where only the free memory is too small.
    """
    candidate = find_likeliest_fitting(
        (
            CandidateRoom(candidate, kind_plans.hardware.device.memory)
            for candidate in kind_plans.candidates
        ),
        kind_plans.calibrated,
    )
    if candidate is None:
        return kind_plans.answer
    chosen = kind_plans.candidates.index(candidate)
    least_bytes = correct_device_bytes(
        candidate.estimate,
        kind_plans.calibrated.compute_activation_factor(candidate.plan, candidate.estimate),
    )
    return {
        **kind_plans.answer,
        "chosen": chosen
        if least_bytes <= kind_plans.answer["frontier"][chosen]["capacity_bytes"]
        else None,
    }


def _plan_on_kind(
    spec: JobSpec,
    device_group: NodeGroup,
    observations: Sequence[Observation],
    trace_model: Trace | None,
) -> _KindPlans:
    hardware = device_group.hardware
    free_bytes = _list_free_bytes(device_group.nodes)
    calibrated = calibrate(observations, device=hardware.device.name, family=spec.family_name)
    spec = set_measured_memory(spec, calibrated)
    request = read_plan_request(spec)
    candidates = find_frontier(request, hardware, calibrated).candidates
    views = [_view_candidate(candidate, free_bytes, calibrated) for candidate in candidates]
    by_devices, chosen, passed_over = _choose_plans(spec, hardware, candidates, views, calibrated)
    nothing = None
    ways = tuple[WayOut, ...]()
    if chosen is None:
        capacity_bytes = free_bytes[spec.gpus.min - 1]
        if trace_model is not None and spec.traced and spec.degrade.limit < Degradation.NUMERIC:
            numeric = spec.degrade.model_copy(update={"allow": "numeric"})
            traced = trace_model(spec.model_copy(update={"degrade": numeric, "traced": ()})).traced
            spec = spec.model_copy(update={"traced": traced})
        case = UnfitJob(spec, hardware, capacity_bytes, calibrated)
        ways = list_ways_out(case)
        if trace_model is not None:
            ways = (
                *ways,
                *list_adapter_changes(case, trace_model),
                *list_smaller_models(case, trace_model),
            )
        nothing = explain_unfit_job(case, ways_out=ways)
    job = make_placeholder_job(spec)
    first = candidates[0].plan
    probe = find_probe_plan(job, hardware.device, calibrated, candidates)
    answer = JobPlans(
        job=spec.name,
        device=hardware.device.name,
        devices=len(free_bytes),
        hardware=_describe_hardware(hardware),
        global_batch_size=spec.global_batch_size,
        steps=spec.optimizer_steps,
        price_per_hour=hardware.device.price_per_hour,
        profile=_describe_origin(spec, find_profile(request, hardware, first), first),
        chosen=chosen,
        by_devices=by_devices,
        probe=None
        if probe is None or chosen is None
        else _view_candidate(probe, free_bytes, calibrated),
        frontier=views,
        nothing_fits=nothing,
        ways_out=[_view_way_out(way) for way in ways],
        passed_over=passed_over,
        unsure=None
        if chosen is None or probe is not None
        else _make_note_on_similar_plans(candidates, views, chosen),
        experimental=None
        if chosen is None
        else _note_on_experiments(candidates[chosen].plan, hardware.device.kind.traits),
    )
    return _KindPlans(answer, hardware, candidates, calibrated)


def _view_way_out(way_out: WayOut) -> WayOutView:
    return WayOutView(
        label=way_out.label,
        plan=None if way_out.plan is None else format_plan(way_out.plan),
        needed_bytes=way_out.needed_bytes,
        degradation=way_out.degradation.name.lower(),
        settings=dict(way_out.settings),
        job=None if way_out.job is None else way_out.job.as_job_file(),
    )


def make_job_file_of_way_out(plans: JobPlans, way_out_number: int) -> str:
    """Return the text of a job file with the change of this number, counted from 1, with which the
    job would fit.

    Raises SpecError where there is no such change.
    """
    ways = [way for way in plans["ways_out"] if way["job"] is not None]
    if not 1 <= way_out_number <= len(ways):
        raise SpecError(
            "no such way out",
            source="--way-out",
            got=way_out_number,
            allowed=f"1 to {len(ways)}" if ways else "none: the plan has no numbered way out",
            hint="`orc plan` without `--way-out` names them",
        )
    way = ways[way_out_number - 1]
    head = f"# {plans['job']} with {way['label']}: {way['degradation']}. Paths are absolute.\n"
    return head + as_yaml(way["job"])


def make_placeholder_job(spec: JobSpec) -> Job:
    return Job(id=spec.name, spec=spec, order=1, submitted_at_s=0.0)


class _ChosenPlans(NamedTuple):
    """Indices, among a job's candidate plans, of those that the scheduler would choose on an idle
    cluster.
    """

    by_devices: list[int]  # on each number of devices, fewest first
    chosen: int | None  # of all of them
    passed_over: str | None  # why that is not the fastest on as many devices


def _choose_plans(
    spec: JobSpec,
    hardware: Hardware,
    candidates: Sequence[Candidate],
    views: Sequence[CandidateView],
    calibration: Calibration,
) -> _ChosenPlans:
    """Return the indices of the plans that the scheduler would choose: per number of devices, and
    of all.
    """
    fitting = [index for index, view in enumerate(views) if view["rejected"] is None]
    if not fitting:
        return _ChosenPlans([], None, None)
    rule = make_choice_rule(make_placeholder_job(spec), "", calibration, candidates[fitting[0]])
    by_width = group_values(
        (candidates[index].plan.world_size, index)
        for index in fitting
        if candidates[index].degradation is candidates[fitting[0]].degradation
    )

    def choice(index: int) -> Choice:
        view = views[index]
        plan = candidates[index].plan
        fill = view["needed_bytes"] / view["capacity_bytes"]
        return Choice(plan, view["step_s"], fill, plan.world_size > hardware.devices_per_node)

    best = [
        indices[rule.choose_plan_index([choice(index) for index in indices])]
        for _, indices in sorted(by_width.items())
    ]
    chosen = best[rule.choose_indices_worth_devices([choice(index) for index in best])[-1]]
    fastest = min(
        by_width[candidates[chosen].plan.world_size], key=lambda index: views[index]["step_s"]
    )
    return _ChosenPlans(best, chosen, describe_rejected_fastest(choice(chosen), choice(fastest)))


def _make_note_on_similar_plans(
    candidates: Sequence[Candidate], views: Sequence[CandidateView], chosen_index: int
) -> str | None:
    """Return a note on other strategies on as many devices with nearly the same predicted step
    time; None without any.
    """
    best = candidates[chosen_index].plan
    far_s = views[chosen_index]["step_s"] * (1 + STEP_ERROR)
    near = sum(
        view["rejected"] is None
        and view["step_s"] <= far_s
        and view["degradation"] == views[chosen_index]["degradation"]
        and candidate.plan.world_size == best.world_size
        and _strategy_key(candidate.plan) != _strategy_key(best)
        for candidate, view in zip(candidates, views, strict=True)
    )
    if not near or candidates[chosen_index].estimate.source in WITHOUT_SECONDS:
        return None
    others = "Another plan" if near == 1 else f"{near} other plans"
    return (
        f"{others} on as many devices may be as fast: predicted within {STEP_ERROR:.0%}, which is how far predictions "
        "are off in the median. `orc compare FILE --strategies frontier` measures them."
    )


def _note_on_experiments(plan: Plan, traits: DeviceTraits) -> str | None:
    """Return a note on dimensions of the plan that no machine with several GPUs has run, and how to
    plan without them; None without any. Virtual devices have run them all.
    """
    layout = plan.layout
    ranks = {"tp": layout.tp, "pp": layout.pp, "cp": layout.cp, "ep": plan.expert_parallel}
    used = [dimension for dimension, count in ranks.items() if count > 1]
    if not used or traits.is_virtual:
        return None
    pins = " ".join(f"--set plan.{dimension}=1" for dimension in used)
    return (
        f"Experimental: {', '.join(used)}. No machine with several GPUs has run it yet. "
        f"`{pins}` plans without."
    )


def _strategy_key(plan: Plan) -> tuple[object, ...]:
    """Return the settings of a plan that define its strategy: all but micro-batch and
    recomputation.
    """
    return (
        plan.engine,
        plan.layout,
        plan.zero_stage,
        plan.dp_replicate,
        plan.expert_parallel,
        plan.offload,
    )


def _view_candidate(
    candidate: Candidate, free_bytes: Sequence[int], calibration: Calibration
) -> CandidateView:
    """Return a candidate plan with its costs and its verdict, as JSON. The plan must fit the
    smallest of the devices that it uses.

    `free_bytes` are those of all devices, largest first.
    """
    plan = candidate.plan
    estimate = candidate.estimate
    capacity_bytes = free_bytes[plan.world_size - 1]
    factor = get_step_time_correction(plan, calibration.step_factors)
    correction = calibration.compute_activation_factor(plan, estimate)
    is_memory_known = rests_on_facts(estimate, correction)
    measured = rests_on_measurements(plan, estimate, calibration)
    chance = (
        estimate_candidate_fit_probability(candidate, capacity_bytes, calibration)
        if is_memory_known
        else None
    )
    if chance is not None and chance >= CONFIDENCE and not measured:
        chance = None
    return CandidateView(
        plan=format_plan(plan),
        settings=format_settings(plan),
        degradation=candidate.degradation.name.lower(),
        step_s=candidate.step_s * factor,
        step_factor=factor,
        busy_share=candidate.busy_share,
        estimate=make_estimate_view(estimate, correction),
        correction=correction,
        needed_bytes=estimate_needed_device_bytes(candidate, calibration),
        capacity_bytes=capacity_bytes,
        fit_probability=chance,
        band_bytes=None if measured else estimate_needed_bytes_range(plan, estimate, calibration),
        reported_fit_probability=estimate_reported_fit_probability(
            plan, estimate, calibration, capacity_bytes
        ),
        rejected=find_rejection_reason(candidate, capacity_bytes, calibration),
    )


def _group_nodes(nodes: Sequence[Node]) -> list[NodeGroup]:
    """Return the nodes' groups of equal devices, as `group_equal_nodes` does. Raises SpecError without
    nodes.
    """
    if not nodes:
        raise SpecError("the cluster has no live node", hint="`orc doctor` says what is missing")
    return group_equal_nodes(nodes)


def _list_free_bytes(nodes: Iterable[Node]) -> list[int]:
    """Return the free bytes of each device of these nodes, largest first."""
    return sorted((free for node in nodes for free in node.free_bytes), reverse=True)


def make_trace_scope(
    nodes: Sequence[Node], spec: JobSpec, plan_settings: Sequence[Override] | None = None
) -> TraceScope:
    """Return which plans a trace of the model must cover.

    They are all plans on the devices of these nodes, or only the plan in `plan_settings`.
    """
    cuda = {group.hardware.device.kind.traits.traces_as_cuda for group in _group_nodes(nodes)}
    return TraceScope(
        cuda=tuple(sorted(cuda)),
        plan=None if plan_settings is None else parse_plan(spec, plan_settings),
        numeric=spec.degrade.limit >= Degradation.NUMERIC,
    )


# ---------------------------------------------------------------------------------------------------- one given plan


def estimate_plan(
    spec: JobSpec,
    plan_settings: Sequence[Override],
    nodes: Sequence[Node],
    observations: Sequence[Observation] = (),
) -> CandidateView:
    """Return the costs of the plan in `plan_settings` on the fastest kind of device of which there
    are enough.

    Raises SpecError for an unknown or impossible setting, or for more devices than any kind has,
    and IllegalPlan if no engine can run the combination.
    """
    plan = parse_plan(spec, plan_settings)
    _check_pipeline_and_expert_degrees(spec, plan)
    groups = _group_nodes(nodes)
    group = next(
        (candidate for candidate in groups if candidate.devices >= plan.world_size), groups[0]
    )
    if plan.world_size > group.devices:
        raise SpecError(
            "the plan wants more devices of one kind than there are",
            source="--set",
            path="dp",
            got=plan.world_size,
            allowed=f"at most {group.devices}",
        )
    free_bytes = _list_free_bytes(group.nodes)
    hardware = group.hardware
    calibrated = calibrate(observations, device=hardware.device.name, family=spec.family_name)
    profile = find_profile(read_plan_request(set_measured_memory(spec, calibrated)), hardware, plan)
    memory = estimate(profile, plan, hardware.device, calibrated.overhead)
    requested = list_requested_settings(read_plan_request(spec))
    if spec.is_script:  # whose sequence length is unknown
        requested["sequence_length"] = plan.sequence_length
    candidate = Candidate(
        plan=plan,
        estimate=memory,
        step_s=predict_step_s(profile, plan, hardware),
        degradation=find_strongest_degradation(requested, plan),
        busy_share=estimate_busy_share(profile, plan, hardware),
        host_bytes=estimate_node_host_bytes(plan, memory, hardware),
        host_memory=hardware.host_memory,
    )
    return _view_candidate(candidate, free_bytes, calibrated)


def _check_pipeline_and_expert_degrees(spec: JobSpec, plan: Plan) -> None:
    """Raise SpecError where a pipeline stage would have no layer, or experts cannot be spread over
    so many ranks.
    """
    stages = plan.layout.pp * plan.pipeline_stages_per_rank
    experts = plan.expert_parallel
    if plan.layout.pp > 1:
        try:
            layers = count_splittable_layers(read_plan_request(spec))
            list_stage_layer_ranges(layers, stages, plan.first_stage_layers, plan.last_stage_layers)
        except ValueError as error:
            raise SpecError(
                "every pipeline stage needs a layer", source="--set", path="pp", got=str(error)
            ) from None
    if experts > 1 and (
        why := find_expert_parallel_obstacle(read_plan_request(spec), plan.layout.dp, experts)
    ):
        raise SpecError(why, source="--set", path="expert_parallel", got=experts)


def parse_plan(spec: JobSpec, plan_settings: Sequence[Override]) -> Plan:
    """Return the plan that `--set` pairs describe. Other settings come from the job, accumulation
    from the global batch.

    Raises SpecError (unknown or impossible setting) and IllegalPlan (settings that exclude each
    other).
    """
    texts = {SHORT.get(key, key): text for key, text in plan_settings}
    problems = [
        make_unknown_setting_error(key, text, "--set")
        for key, text in texts.items()
        if key not in GIVEN
    ]
    if problems:
        raise join_problems(problems, "--set")
    values = {
        key: parse_setting_value(GIVEN[key], key, text, "--set") for key, text in texts.items()
    }
    if values.get("optimizer_in_backward"):
        check_update_in_backward(spec.training.clip_norm, "--set optimizer_in_backward")
    layout = ParallelLayout(
        **{"dp": spec.gpus.min} | {axis: values.pop(axis) for axis in AXES if axis in values}
    )
    micro_batch_size = values.setdefault("micro_batch_size", 1)
    requested_steps = values.pop("gradient_accumulation_steps", None)
    length = spec.data.sequence_length if spec.model is not None else None
    is_sharded = values.get("zero_stage", ZeroStage.NONE) is not ZeroStage.NONE
    by_fsdp = spec.is_script and spec.knobs.is_sharded_by_fsdp and is_sharded
    defaults = {
        "precision": spec.precision,
        "optimizer": spec.training.optimizer,
        "sequence_length": length,
        "sharding": Sharding.FSDP if by_fsdp else Sharding.DEEPSPEED,
        "engine": _default_engine(spec, layout, values),
    }
    steps = _accumulation_steps(spec, requested_steps, micro_batch_size, layout.dp)
    return Plan(layout=layout, gradient_accumulation_steps=steps, **defaults | values)


def _default_engine(spec: JobSpec, layout: ParallelLayout, plan_settings: dict[str, Any]) -> Engine:
    """Return the engine for these settings: DeepSpeed where only it has one of them, or for ZeRO
    stages 1 and 2; else torch.

    Settings that only torch has give torch at any stage. For a script it is the engine for scripts.
    """
    if spec.is_script:
        return Engine.SCRIPT
    zero_stage = plan_settings.get("zero_stage", ZeroStage.NONE)
    torch_only = (
        max(layout.cp, layout.tp, layout.pp, *(plan_settings.get(name, 1) for name in TORCH_ONLY))
        > 1
    )
    offload = (plan_settings.get("offload"), plan_settings.get("offload_target"))
    deepspeed_only = any(
        value is needed
        for value, needed in zip(offload, (Offload.OPTIMIZER, OffloadTarget.NVME), strict=True)
    )
    either = zero_stage in (ZeroStage.OPTIMIZER, ZeroStage.GRADIENTS) and not torch_only
    return Engine.DEEPSPEED if deepspeed_only or either else Engine.TORCH


def _accumulation_steps(
    spec: JobSpec, requested: int | None, micro_batch_size: int, dp: int
) -> int:
    """Return the accumulation steps that give the global batch size. Raises SpecError where
    `requested` differs from that.
    """
    at_once = micro_batch_size * dp
    steps, remainder = divmod(spec.global_batch_size, at_once)
    if remainder or not steps:
        raise SpecError(
            "micro_batch_size x dp does not divide the global batch",
            source="--set",
            path="micro_batch_size",
            got=f"{micro_batch_size} x {dp} = {at_once}",
            allowed=f"a divisor of global_batch_size={spec.global_batch_size}",
        )
    if requested not in (None, steps):
        raise SpecError(
            "the global batch would change",
            source="--set",
            path="gradient_accumulation_steps",
            got=requested,
            allowed=f"{steps} = {spec.global_batch_size} / ({micro_batch_size} x {dp})",
            hint="leave it out: it follows from the global batch",
        )
    return steps
