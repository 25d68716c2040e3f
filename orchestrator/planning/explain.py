"""What people ask of a plan: what the bytes are, which plan comes closest, and what would make the job fit."""

from __future__ import annotations

from collections.abc import Iterator

from orchestrator.memory.calibration.calibrate import CONFIDENCE, Calibration
from orchestrator.memory.calibration.correction import corrected
from orchestrator.planning.cost import Hardware
from orchestrator.planning.frontier import Candidate, Frontier, fitting, needed_bytes, why_rejected
from orchestrator.planning.search import frontier
from orchestrator.specs.choices import Degradation
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.pins import in_words
from orchestrator.specs.job.sections import Degrade, GpuRange
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.trainer import Knob
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate, MomentBytes
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import in_short
from orchestrator.specs.units import format_bytes, format_probability

DEVICES_MAX = 4096  # as far as the search for a larger cluster goes
MOMENTS_SHOWN = 8
PINS_NAMED = 4  # of more, `closest` says which plan it is
BATCH_KNOBS = ("micro_batch_size", "gradient_accumulation_steps")
SEQUENCE_LENGTH_MIN = 16  # as far down as the search for shorter samples goes


def breakdown(estimate: MemoryEstimate) -> tuple[tuple[str, int], ...]:
    """Bytes by cause, the largest first, down to what the device must hold; they add up to `device_bytes`."""
    causes = sorted(estimate.by_cause, key=lambda cause: -cause[1])
    around = (
        ("allocator", estimate.reserved_bytes - estimate.allocated_bytes),
        ("context and communicators", estimate.device_bytes - estimate.reserved_bytes),
    )
    return (*causes, *((cause, count) for cause, count in around if count))


def by_moment(estimate: MemoryEstimate) -> tuple[MomentBytes, ...]:
    """The MOMENTS_SHOWN worst moments of a step in the order in which they come, each of the rank that it weighs on."""
    worst: dict[str, MomentBytes] = {}
    for moment in estimate.moments:
        if moment.name not in worst or _total(moment) > _total(worst[moment.name]):
            worst[moment.name] = moment
    shown = set(sorted(worst, key=lambda name: _total(worst[name]), reverse=True)[:MOMENTS_SHOWN])
    return tuple(moment for name, moment in worst.items() if name in shown)


def nearest(frontier: Frontier, calibrated: Calibration, refuted: frozenset[Plan] = frozenset()) -> Candidate | None:
    """The untried candidate that needs the least of a device, enough host memory first; None: all were refuted."""

    def missing(one: Candidate) -> tuple[object, ...]:
        return one.degradation, 0 if one.fits_host else one.host_bytes, needed_bytes(one, calibrated)

    untried = (candidate for candidate in frontier.candidates if candidate.plan not in refuted)
    return min(untried, key=missing, default=None)


def why_nothing_fits(
    spec: JobSpec,
    hardware: Hardware,
    capacity_bytes: int,
    calibrated: Calibration,
    refuted: frozenset[Plan] = frozenset(),
) -> str:
    """The plan that comes closest, its bytes by cause and what would make the job fit, as lines of text."""
    found = frontier(spec, hardware, calibrated.correction, calibrated.overhead)
    closest = nearest(found, calibrated, refuted) or nearest(found, calibrated)
    assert closest is not None, "a frontier is never empty"
    estimate = corrected(closest.estimate, calibrated.correction_of(closest.plan, closest.estimate))
    needed = needed_bytes(closest, calibrated)
    pinned = "" if not spec.plan else f" with {in_words(spec.plan)}" if len(spec.plan) <= PINS_NAMED else " as pinned"
    there = f"{format_bytes(capacity_bytes)} of {hardware.device.name}"
    if needed <= capacity_bytes and not closest.fits_host:
        why = why_rejected(closest, capacity_bytes, calibrated)
        lines = [f"no plan{pinned} fits {there} and its node", f"closest: {in_short(closest.plan)} {why}"]
    else:
        lines = [
            f"no plan{pinned} fits {there}",
            f"closest: {in_short(closest.plan)} needs {format_bytes(needed)} at its worst moment ({estimate.moment})",
            *(f"  {format_bytes(count):>12}  {cause}" for cause, count in breakdown(estimate)),
            f"  {format_bytes(needed - estimate.device_bytes):>12}  margin",
        ]
    lines += [f"would fit: {sentence}" for sentence in what_would_fit(spec, hardware, capacity_bytes, calibrated)]
    lines += _missing_knobs(spec, hardware, capacity_bytes, calibrated, refuted)
    return "\n".join(lines)


def _missing_knobs(
    spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration, refuted: frozenset[Plan]
) -> Iterator[str]:
    """What to write of a batch knob that the job leaves out, where a plan that turns it would fit."""
    knobs = spec.knobs
    if not spec.is_script or (knobs.micro_batch_size is not None and knobs.gradient_accumulation_steps is not None):
        return
    derived = knobs.model_copy(
        update={"micro_batch_size": knobs.micro_batch_size or Knob(flag="--"), "gradient_accumulation_steps": "derived"}
    )
    best = _first_fit(_with(spec, knobs=derived), hardware, capacity_bytes, calibrated, refuted)
    if best is None:
        return
    own = {one.plan.micro_batch_size for one in frontier(spec, hardware).candidates}
    missing = [f"knobs.{name}" for name in BATCH_KNOBS if getattr(knobs, name) is None]
    said = "is not given" if len(missing) == 1 else "are not given"
    cut = f"no plan may cut the micro-batch of {min(own)} ({in_short(best.plan)} fits)"
    yield f"{' and '.join(missing)} {said}, so {cut}"
    if knobs.micro_batch_size is None:
        yield "  to do:   knobs.micro_batch_size: {flag: --FLAG, default: N}, its own flag for samples per rank"
    if knobs.gradient_accumulation_steps is None:
        yield "  to do:   knobs.gradient_accumulation_steps: {flag: --FLAG}, its own flag for accumulation steps;"
        yield "           or `derived`, where the script itself divides its global batch by the micro-batch"


def why_taken(fit_probability: float | None) -> str:
    """What made a job's first plan the one to run; None: nothing is known of its memory."""
    if fit_probability is None or fit_probability >= CONFIDENCE:
        return "the fastest plan that fits"
    return f"the plan that most probably fits ({format_probability(fit_probability)})"


def what_would_fit(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> tuple[str, ...]:
    """Changes by which the job would fit, each one really planned; empty where none of them helps."""
    ways = (_other_settings, _more_devices, _larger_devices, _more_host_memory, _lower_precision, _shorter_samples)
    return tuple(sentence for way in ways for sentence in way(spec, hardware, capacity_bytes, calibrated))


def _other_settings(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    best = _first_fit(_with(spec, plan=()), hardware, capacity_bytes, calibrated) if spec.plan else None
    if best is not None:
        yield f"another `plan` ({in_short(best.plan)}): {format_bytes(needed_bytes(best, calibrated))} each"


def _more_devices(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    if spec.is_script and spec.knobs.micro_batch_size is None:
        return
    devices = there = min(spec.gpus.max, hardware.nodes * hardware.devices_per_node)
    while (devices := devices * 2) <= DEVICES_MAX:
        larger = _more(hardware, devices)
        best = _first_fit(_with(spec, gpus=GpuRange(min=devices, max=devices)), larger, capacity_bytes, calibrated)
        if best is not None:
            needed = format_bytes(needed_bytes(best, calibrated))
            yield f"{devices} devices instead of {there} ({in_short(best.plan)}): {needed} each"
            return


def _larger_devices(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    found = frontier(spec, hardware, calibrated.correction, calibrated.overhead).candidates
    own = [candidate for candidate in found if candidate.degradation is Degradation.EXACT]
    least = min(own, key=lambda one: (not one.fits_host, needed_bytes(one, calibrated)))
    if (needed := needed_bytes(least, calibrated)) > capacity_bytes:
        yield f"devices with at least {format_bytes(needed)} free ({in_short(least.plan)})"


def _more_host_memory(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    found = frontier(spec, hardware, calibrated.correction, calibrated.overhead).candidates
    short = [one for one in found if not one.fits_host and needed_bytes(one, calibrated) <= capacity_bytes]
    if short:
        least = min(short, key=lambda one: (one.degradation, one.host_bytes))
        has = format_bytes(hardware.host_memory)
        yield f"nodes with {format_bytes(least.host_bytes)} of host memory instead of {has} ({in_short(least.plan)})"


def _lower_precision(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    if spec.degrade.limit >= Degradation.NUMERIC:
        return
    best = _first_fit(_with(spec, degrade=Degrade(allow="numeric")), hardware, capacity_bytes, calibrated)
    if best is not None and best.degradation is Degradation.NUMERIC:
        needed = format_bytes(needed_bytes(best, calibrated))
        yield f"degrade.allow: numeric ({in_short(best.plan)}): {needed} each"


def _shorter_samples(spec: JobSpec, hardware: Hardware, capacity_bytes: int, calibrated: Calibration) -> Iterator[str]:
    if spec.model is None or spec.model.decoder is None:
        return
    length = spec.data.sequence_length
    while (length := length // 2) >= SEQUENCE_LENGTH_MIN:
        allowed = Degrade(allow="semantic", sequence_lengths=(length,))
        best = _first_fit(_with(spec, degrade=allowed), hardware, capacity_bytes, calibrated)
        if best is not None and best.degradation is Degradation.SEMANTIC:
            needed = format_bytes(needed_bytes(best, calibrated))
            yield f"degrade.sequence_lengths: [{length}] with degrade.allow: semantic: {needed} each"
        if best is not None:
            return


def _first_fit(
    spec: JobSpec,
    hardware: Hardware,
    capacity_bytes: int,
    calibrated: Calibration,
    refuted: frozenset[Plan] = frozenset(),
) -> Candidate | None:
    try:
        plans = frontier(spec, hardware, calibrated.correction, calibrated.overhead, within_reach=True)
        return next(fitting(plans, capacity_bytes, calibrated, refuted), None)
    except SpecError:  # so many devices cannot share the global batch, or have too many plans
        return None


def _with(spec: JobSpec, **changed: object) -> JobSpec:
    return spec.model_copy(update=changed)


def _more(hardware: Hardware, devices: int) -> Hardware:
    nodes = max(hardware.nodes, -(-devices // hardware.devices_per_node))
    return replace(hardware, nodes=nodes)


def _total(moment: MomentBytes) -> int:
    return moment.counted_bytes + moment.activation_bytes
