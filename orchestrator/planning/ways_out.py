"""Ways out: changes with which a job that fits no device would fit, each planned and ready for
`--set`.
"""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from orchestrator.memory.calibration.calibrate import Calibration
from orchestrator.memory.model_request import TRANSFORMERS_TRAINERS
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import (
    Candidate,
    Frontier,
    estimate_needed_device_bytes,
    list_fitting,
)
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.planning.work import (
    ALL_OTHER_PLANS_MAX,
    OTHER_PLANS_MAX,
    PlanCounter,
    TooManyPlans,
)
from orchestrator.specs.choices import Degradation, Optimizer
from orchestrator.specs.cluster import find_catalogue_device
from orchestrator.specs.devices import load_devices
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.model import LoraSpec
from orchestrator.specs.job.sections import Degrade, GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob, Knobs
from orchestrator.specs.parse import apply_remedy
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import Source
from orchestrator.specs.published import list_smaller_siblings, load_published_config
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import format_plan
from orchestrator.specs.units import format_bytes

Trace = Callable[[JobSpec], JobSpec]  # returns the job with the profile of its model
DEVICES_MAX = 4096  # as far as the search for a larger cluster goes
SEQUENCE_LENGTH_MIN = 16  # as far down as the search for shorter samples goes
CARDS_NAMED = 3  # of the catalogue, the smallest that hold the job
DEVICES_PER_NODE = 8
ADAPTER_RANK = 16  # that of QLoRA's and LLaMA-Factory's examples
# what a job of our engines does not say
SCRIPT_KEYS = (
    *("command", "python", "trains", "trainer", "launch", "workdir", "knobs", "config"),
    *("success", "resume", "progress", "phases", "remedies", "hang_timeout"),
)
BATCH_KNOBS = ("micro_batch_size", "gradient_accumulation_steps")


@dataclass(frozen=True, slots=True)
class UnfitJob:
    """A job of which no plan fits `capacity_bytes` of each device."""

    spec: JobSpec
    hardware: Hardware
    capacity_bytes: int
    calibrated: Calibration
    refuted: frozenset[Plan] = frozenset()
    work: PlanCounter = field(
        default_factory=PlanCounter, compare=False
    )  # of all searches for it, also with changes

    @property
    def frontier(self) -> Frontier:
        """The plans of the job, none of which fits."""
        return find_frontier(read_plan_request(self.spec), self.hardware, self.calibrated)

    @property
    def tried_memory_text(self) -> str:
        """Text that names the memory of each device that was tried, such as `24 GiB of rtx-3090`."""
        return f"{format_bytes(self.capacity_bytes)} of {self.hardware.device.name}"

    @property
    def is_search_exhausted(self) -> bool:
        """Whether the search for changes must stop: it has examined ALL_OTHER_PLANS_MAX plans."""
        return self.work.looked >= ALL_OTHER_PLANS_MAX


@frozen
class WayOut:
    """A change with which the job would fit, and the plan that it would then have."""

    label: str
    settings: Mapping[str, str] = field(
        default_factory=dict
    )  # key of the job file: value, as `--set` takes them
    plan: Plan | None = None
    # the changed job; None: no job file makes the change, as of other devices
    job: JobSpec | None = None
    needed_bytes: int  # of each device
    degradation: Degradation = Degradation.EXACT  # what changes of the training

    @property
    def options(self) -> str:
        """The change as `--set` options of a command line; "" where no key of the job file makes
        the change.
        """
        return " ".join(
            shlex.join(["--set", f"{key}={value}"]) for key, value in self.settings.items()
        )

    @property
    def sentence(self) -> str:
        """The change in one line: what changes, its plan and bytes, its class, and the options for
        it.
        """
        plan = f" ({format_plan(self.plan)})" if self.plan is not None else ""
        kind = "" if self.degradation is Degradation.EXACT else f", {self.degradation.name.lower()}"
        options = f": {self.options}" if self.settings else ""
        needed = format_bytes(self.needed_bytes)
        needs = "" if needed in self.label else f": {needed} each"
        return f"{self.label}{plan}{needs}{kind}{options}"


def list_ways_out(case: UnfitJob) -> tuple[WayOut, ...]:
    """Return the changes with which the job would fit, the mildest first; () where none helps.

    Each changes one setting. Where no single setting helps on these devices, two are tried
    together. No model is traced anew, since the scheduler asks for these changes in its decisions,
    too: `orc plan` adds adapters.
    """
    if _has_assumed_memory(case):
        return ()  # no bytes are known that a change could lower
    single = (
        _find_other_settings,
        _find_numeric_change,
        _find_eight_bit_change,
        _find_fewer_batch_norm_samples,
        _find_smaller_batch,
        _find_shorter_samples,
    )
    here = [*_list_remedies(case), *(find(case) for find in single)]
    if not any(here) and (degrade := _allow_numeric_changes(case.spec)) is not None:
        here = [_find_smaller_batch(case, degrade=degrade)]
    more = _find_more_devices(case) or _find_more_devices_and_smaller_batch(case)
    others = (*here, more, _find_larger_devices(case), _find_more_host_memory(case))
    return tuple(way for way in others if way is not None)


def list_adapter_changes(case: UnfitJob, trace: Trace) -> Iterator[WayOut]:
    """Yield changes to low-rank adapters with which the job would fit: beside frozen weights, then
    beside 4-bit ones.

    `trace` returns a job with its model's profile; where it raises SpecError, that change is left
    out. A script needs its own switch for adapters, since we cannot give it one. Where that does
    not help, the same training by one of our engines may.
    """
    spec = case.spec
    model = case.spec.known_model
    if model is None or model.hf is None or model.lora is not None:
        return
    if not spec.is_script:
        for in_4_bits in (False, True):
            yield from _list_adapted_jobs(case, trace, in_4_bits=in_4_bits)
        return
    ways = list(
        _list_adapted_jobs(case, trace, in_4_bits=False)
    )  # a script quantises by its own code
    if ways:
        yield from ways
        return
    defaults = {key: JobSpec.model_fields[key].get_default() for key in SCRIPT_KEYS}
    changes = {
        **defaults,
        "model": replace(model, weights=None),
        "data": replace(spec.data, text=("text.txt",)),  # a file that nothing reads here
    }
    for way in list_adapter_changes(replace(case, spec=spec.model_copy(update=changes)), trace):
        label = (
            "a job with `model: {hf: ...}` and your own `data` in place of `command` and `trains`, "
            f"with {way.label}"
        )
        yield replace(way, label=label, settings={})


def _list_adapted_jobs(case: UnfitJob, trace: Trace, *, in_4_bits: bool) -> Iterator[WayOut]:
    spec = case.spec
    model = spec.known_model
    assert model is not None
    key = "trains" if spec.is_script else "model"
    lora = LoraSpec(rank=ADAPTER_RANK, quantise_base=in_4_bits)
    settings = {f"{key}.lora.rank": str(ADAPTER_RANK)} | (
        {f"{key}.lora.quantise_base": "true"} if in_4_bits else {}
    )
    label = f"adapters of rank {ADAPTER_RANK}" + (" beside weights in 4 bits" if in_4_bits else "")
    if spec.is_script:
        label += ", where its trainer has a switch for them"
    try:
        adapted = trace(spec.model_copy(update={key: replace(model, lora=lora), "traced": ()}))
    except SpecError:
        return
    changed = replace(case, spec=adapted)
    way = _make_way_out(changed, label, settings) or _find_smaller_batch(changed)
    if way is None:
        return
    if way.settings != settings:
        label = f"{label}, and {way.label}"
    # a script gets no adapters from its job file
    settings = {} if spec.is_script else {**settings, **way.settings}
    job = None if spec.is_script else way.job
    yield replace(way, label=label, settings=settings, job=job, degradation=Degradation.SEMANTIC)


def list_smaller_models(case: UnfitJob, trace: Trace) -> Iterator[WayOut]:
    """Yield the change to the largest smaller model of the same model line with which the job would
    fit; nothing for scripts.
    """
    model = case.spec.model
    if model is None or not isinstance(model.hf, str):
        return
    for name in list_smaller_siblings(model.hf):
        sibling = replace(model, hf=name, config=load_published_config(name))
        try:
            smaller = trace(case.spec.model_copy(update={"model": sibling, "traced": ()}))
        except SpecError:
            continue
        settings = {"model.hf": name}
        way = _make_way_out(replace(case, spec=smaller), "a smaller model of its line", settings)
        if way is not None:
            yield replace(way, degradation=Degradation.SEMANTIC)
            return


class WithKnobs(NamedTuple):
    """A job to which missing knobs (options of its script) were added, and their names."""

    missing: tuple[str, ...]
    spec: JobSpec


def add_batch_knobs(spec: JobSpec) -> WithKnobs:
    """Return the job with the batch knobs (options of its script) that it lacks, and their names.
    Our own trainings lack none.
    """
    knobs = spec.knobs
    missing = tuple(name for name in BATCH_KNOBS if getattr(spec.knobs, name) is None)
    if not spec.is_script or not missing:
        return WithKnobs((), spec)
    accumulation = knobs.gradient_accumulation_steps or "derived"
    batch = {
        "micro_batch_size": knobs.micro_batch_size or Knob(flag="--"),
        "gradient_accumulation_steps": accumulation,
    }
    changed = spec.model_copy(update={"knobs": knobs.model_copy(update=batch)})
    return WithKnobs(missing, changed)


def describe_missing_knobs(case: UnfitJob) -> Iterator[str]:
    """Yield text on each knob (option of the script) that the job file lacks and with which the job
    would fit.

    Where no single knob helps, the text names all that are missing.
    """
    if case.spec.is_script:
        helpful = [
            *_describe_missing_batch_knobs(case),
            *_describe_missing_checkpointing_knob(case),
        ]
        yield from helpful or _describe_unhelpful_knobs(case)


def _describe_missing_batch_knobs(case: UnfitJob) -> Iterator[str]:
    spec = case.spec
    knobs = case.spec.knobs
    missing, with_them = add_batch_knobs(spec)
    best = _find_first_fit(case, knobs=with_them.knobs) if missing else None
    if best is None:
        return
    plans = find_frontier(read_plan_request(spec), case.hardware).candidates
    sizes = {candidate.plan.micro_batch_size for candidate in plans}
    verb = "is" if len(missing) == 1 else "are"
    cut = f"no plan may cut the micro-batch of {min(sizes)} ({format_plan(best.plan)} fits)"
    yield f"{' and '.join(f'knobs.{name}' for name in missing)} {verb} not given, so {cut}"
    if knobs.micro_batch_size is None:
        yield "  to do:   knobs.micro_batch_size: {flag: --FLAG, default: N}, its own flag for samples per rank"
    if knobs.gradient_accumulation_steps is None:
        yield "  to do:   knobs.gradient_accumulation_steps: {flag: --FLAG}, its own flag for accumulation steps;"
        yield "           or `derived`, where the script itself divides its global batch by the micro-batch"


def _describe_missing_checkpointing_knob(case: UnfitJob) -> Iterator[str]:
    knobs = case.spec.knobs
    best = (
        _find_first_fit(case, knobs=_add_checkpointing_knob(knobs))
        if knobs.activation_checkpointing is None
        else None
    )
    if best is not None:
        yield f"knobs.activation_checkpointing is not given ({format_plan(best.plan)} fits)"
        yield "  to do:   knobs.activation_checkpointing: {switch: --FLAG}, its own flag for gradient checkpointing"


def _describe_unhelpful_knobs(case: UnfitJob) -> Iterator[str]:
    """Yield text on all knobs (options of the script) that the job lacks, and on what all of them
    together would do.

    It is for a job that no single knob helps.
    """
    missing, with_them = add_batch_knobs(case.spec)
    knobs = with_them.knobs
    if knobs.activation_checkpointing is None:
        missing = (*missing, "activation_checkpointing")
        knobs = _add_checkpointing_knob(knobs)
    if not missing:
        return
    best = _find_first_fit(case, knobs=knobs)
    if case.is_search_exhausted:
        return
    try:
        changed = case.spec.model_copy(update={"knobs": knobs})
        searched = find_frontier(read_plan_request(changed), case.hardware)
    except SpecError:  # it would have too many plans
        return
    case.work.looked += searched.looked
    least = min(
        estimate_needed_device_bytes(candidate, case.calibrated)
        for candidate in searched.candidates
    )
    together = f"each device needs {format_bytes(least)}"
    if best is not None:
        together = f"{format_plan(best.plan)} fits"
    elif _has_assumed_memory(case):
        together = "a lighter plan could be tried"
    levers = " and ".join(name.removesuffix("_steps").replace("_", " ") for name in missing)
    keys = ", ".join(f"`knobs.{name}`" for name in missing)
    with_all = "it" if len(missing) == 1 else "all of them"
    yield f"the script has no knob for {levers} ({keys}): with {with_all} {together}"


def _add_checkpointing_knob(knobs: Knobs) -> Knobs:
    return knobs.model_copy(update={"activation_checkpointing": Knob(switch="--FLAG")})


def _has_assumed_memory(case: UnfitJob) -> bool:
    return case.frontier.candidates[0].estimate.source is Source.ASSUMED


def number_ways_out(ways_out: Sequence[WayOut]) -> list[str]:
    """Return a line of text for each way out; those that a job file can make are numbered, for
    `--way-out`.
    """
    lines = []
    number = 0
    for way in ways_out:
        number += way.job is not None
        mark = f"would fit ({number})" if way.job is not None else "would fit"
        lines.append(f"{mark}: {way.sentence}")
    return lines


def _list_remedies(case: UnfitJob) -> Iterator[WayOut]:
    """Yield the changes that the job file offers as `remedies`, alone or with a smaller global
    batch.
    """
    for remedy in case.spec.remedies:
        changed = replace(case, spec=apply_remedy(case.spec, remedy))
        settings = {} if remedy.arguments else dict(remedy.set)
        way = _make_way_out(changed, remedy.label, settings) or _find_smaller_batch(changed)
        if way is None:
            continue
        label = remedy.label
        if way.label != label:
            label = f"{label}, and {way.label} of {way.settings['global_batch_size']}"
        worst = max(way.degradation, Degradation[remedy.changes.upper()])
        settings = {} if remedy.arguments else {**settings, **way.settings}
        yield replace(way, label=label, settings=settings, degradation=worst)


def _find_other_settings(case: UnfitJob) -> WayOut | None:
    return (
        _make_way_out(case, "another `plan`", {"plan": "{}"}, plan=()) if case.spec.plan else None
    )


def _find_numeric_change(case: UnfitJob) -> WayOut | None:
    degrade = _allow_numeric_changes(case.spec)
    if degrade is None:
        return None
    return _make_way_out(case, "other arithmetic", {"degrade.allow": "numeric"}, degrade=degrade)


def _find_eight_bit_change(case: UnfitJob) -> WayOut | None:
    """Return the change of a script's AdamW to 8-bit moments; None where its trainer has no switch
    for that.

    A job file cannot make this change, since the script decides. A plan of our engines has 8-bit
    moments under `degrade`.
    """
    spec = case.spec
    if spec.trainer not in TRANSFORMERS_TRAINERS or spec.training.optimizer is not Optimizer.ADAMW:
        return None
    label = (
        "AdamW in 8 bits: `--optim adamw_8bit` in its command, and `training.optimizer: adamw_8bit`"
    )
    training = replace(spec.training, optimizer=Optimizer.ADAMW_8BIT)
    command = (*(spec.command or ()), "--optim", Optimizer.ADAMW_8BIT.value)
    way = _make_way_out(case, label, {}, training=training, command=command)
    return way and replace(way, degradation=Degradation.NUMERIC)


def _find_fewer_batch_norm_samples(case: UnfitJob) -> WayOut | None:
    """Return the change to the largest number of samples for BatchNorm's statistics with which the
    job fits; None for none.

    It is for a job that sets no number.
    """
    spec = case.spec
    samples = case.spec.global_batch_size
    if not read_plan_request(spec).has_batch_norm or spec.training.batch_norm_samples is not None:
        return None
    while samples := samples // 2:
        label = f"BatchNorm over {samples} samples"
        settings = {"training.batch_norm_samples": str(samples)}
        training = replace(spec.training, batch_norm_samples=samples)
        way = _make_way_out(case, label, settings, training=training)
        if way is not None:
            return replace(way, degradation=Degradation.SEMANTIC)
    return None


def _find_smaller_batch(case: UnfitJob, **job_changes: object) -> WayOut | None:
    """Return the change to the largest half, quarter or smaller part of the global batch with which
    the job fits; None for none.

    `job_changes` are further changes of the job.
    """
    numeric = {"degrade.allow": "numeric"} if "degrade" in job_changes else {}
    label = "a smaller global batch" + (" and other arithmetic" if numeric else "")
    batch_size = case.spec.global_batch_size
    while (batch_size := batch_size // 2) >= case.spec.gpus.min:
        settings = {"global_batch_size": str(batch_size), **numeric}
        way = _make_way_out(case, label, settings, global_batch_size=batch_size, **job_changes)
        if way is not None:
            return replace(way, degradation=Degradation.SEMANTIC)
    return None


def _find_shorter_samples(case: UnfitJob) -> WayOut | None:
    spec = case.spec
    if spec.model is None or spec.model.decoder is None:
        return None
    length = spec.data.sequence_length
    while (length := length // 2) >= SEQUENCE_LENGTH_MIN:
        settings = {"degrade.allow": "semantic", "degrade.sequence_lengths": f"[{length}]"}
        allowed = Degrade(allow="semantic", sequence_lengths=(length,))
        way = _make_way_out(case, f"samples of {length} tokens", settings, degrade=allowed)
        if way is not None:
            return way if way.degradation is Degradation.SEMANTIC else None
    return None


def _find_more_devices(case: UnfitJob) -> WayOut | None:
    spec = case.spec
    hardware = case.hardware
    if spec.is_script and spec.knobs.micro_batch_size is None:
        return None
    devices = there = min(spec.gpus.max, hardware.devices)
    while (devices := devices * 2) <= DEVICES_MAX:
        gpus = GpuRange(min=devices, max=devices)
        for larger in _list_hardware_with(hardware, devices):
            label = f"{devices} devices instead of {there}" + (
                f", on {larger.nodes} nodes" * (larger.nodes > 1)
            )
            larger_case = replace(case, hardware=larger)
            way = _make_way_out(larger_case, label, {"gpus": str(devices)}, gpus=gpus)
            if way is not None:
                return way
    return None


def _find_more_devices_and_smaller_batch(case: UnfitJob) -> WayOut | None:
    """Return the change to more devices and a smaller global batch, for a script that cannot
    accumulate; None where none fits.
    """
    spec = case.spec
    there = case.hardware.devices
    if not spec.is_script or spec.knobs.micro_batch_size is None:
        return None
    for devices in (there * 2, there * 4, there * 8):
        larger = replace(case, hardware=next(_list_hardware_with(case.hardware, devices)))
        way = _find_smaller_batch(larger, gpus=GpuRange(min=devices, max=devices))
        if way is not None:
            label = f"{devices} devices instead of {there}, and {way.label}"
            return replace(way, label=label, settings={"gpus": str(devices), **way.settings})
    return None


def _list_hardware_with(hardware: Hardware, device_count: int) -> Iterator[Hardware]:
    """Yield hardware with this many devices: in one node where it has at most 8, then in several
    nodes.

    One node comes first, since not every launcher knows several nodes.
    """
    if hardware.nodes == 1 and device_count <= DEVICES_PER_NODE:
        yield replace(hardware, devices_per_node=max(device_count, hardware.devices_per_node))
    yield replace(
        hardware, nodes=max(hardware.nodes, -(-device_count // hardware.devices_per_node))
    )


def _find_larger_devices(case: UnfitJob) -> WayOut | None:
    exact = [
        candidate
        for candidate in case.frontier.candidates
        if candidate.degradation is Degradation.EXACT
    ]
    least = min(
        exact,
        key=lambda candidate: (
            not candidate.fits_host,
            estimate_needed_device_bytes(candidate, case.calibrated),
        ),
    )
    needed = estimate_needed_device_bytes(least, case.calibrated)
    if needed <= case.capacity_bytes:
        return None
    cards = list_cards_with(needed)
    label = f"devices with at least {format_bytes(needed)} free" + (
        f", such as {', '.join(cards)}" if cards else ""
    )
    return WayOut(label=label, plan=least.plan, needed_bytes=needed)


def list_cards_with(least_bytes: int) -> list[str]:
    """Return the names of the catalogue's smallest GPUs with at least this much memory, CARDS_NAMED
    at most.
    """
    cards = map(find_catalogue_device, load_devices())
    large = sorted((card.memory, card.name) for card in cards if card.memory >= least_bytes)
    return [name for _, name in large[:CARDS_NAMED]]


def _find_more_host_memory(case: UnfitJob) -> WayOut | None:
    short = [
        candidate
        for candidate in case.frontier.candidates
        if not candidate.fits_host
        and estimate_needed_device_bytes(candidate, case.calibrated) <= case.capacity_bytes
    ]
    if not short:
        return None
    least = min(short, key=lambda candidate: (candidate.degradation, candidate.host_bytes))
    has = format_bytes(case.hardware.host_memory)
    label = f"nodes with {format_bytes(least.host_bytes)} of host memory instead of {has}"
    needed = estimate_needed_device_bytes(least, case.calibrated)
    return WayOut(label=label, plan=least.plan, needed_bytes=needed)


def _make_way_out(
    case: UnfitJob, label: str, settings: Mapping[str, str], **job_changes: object
) -> WayOut | None:
    """Return the job with these `job_changes` as a way out; None where no plan then fits."""
    best = _find_first_fit(case, **job_changes)
    if best is None:
        return None
    return WayOut(
        label=label,
        settings=settings,
        plan=best.plan,
        job=case.spec.model_copy(update=job_changes),
        needed_bytes=estimate_needed_device_bytes(best, case.calibrated),
        degradation=best.degradation,
    )


def _find_first_fit(case: UnfitJob, **job_changes: object) -> Candidate | None:
    spec = case.spec.model_copy(update=job_changes)
    calibrated = case.calibrated
    if case.is_search_exhausted:
        return None
    try:
        request = read_plan_request(spec)
        candidates = find_frontier(request, case.hardware, calibrated, skips_oversized=True)
        case.work.looked += candidates.looked
        return next(list_fitting(candidates, case.capacity_bytes, calibrated, case.refuted), None)
    except TooManyPlans:
        case.work.looked += OTHER_PLANS_MAX
        return None
    except (
        SpecError,
        ValueError,
    ):  # so many devices cannot share the global batch, or have too many plans
        return None


def _allow_numeric_changes(spec: JobSpec) -> Degrade | None:
    """Return the job's `degrade` with changes of class `numeric` (such as a lower precision)
    allowed; None where they are already.
    """
    if spec.degrade.limit >= Degradation.NUMERIC:
        return None
    return spec.degrade.model_copy(update={"allow": "numeric"})
