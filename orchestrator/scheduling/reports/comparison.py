"""What did each strategy of a comparison cost, and what did it give? A table, a verdict and a picture, from records."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite, sqrt
from statistics import mean, median, stdev

from orchestrator.memory.calibration.correction import corrected, predicted_peak_bytes
from orchestrator.memory.profiles import autocasts, profile_of
from orchestrator.planning.explain import nearest
from orchestrator.planning.frontier import Candidate, fitting, needed_bytes
from orchestrator.planning.picture import Mark, Picture, Point
from orchestrator.planning.search import frontier
from orchestrator.scheduling.base.node_groups import Group, groups_of
from orchestrator.scheduling.failures.observation import ran_out
from orchestrator.scheduling.options.job_options import learned
from orchestrator.scheduling.reports.cost import SECONDS_AN_HOUR
from orchestrator.specs.choices import AXES
from orchestrator.specs.cluster import DeviceKind, DeviceSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.pins import in_words
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.mechanics import Fsdp2
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import UNTIMED, MemoryEstimate
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import in_short, settings
from orchestrator.specs.state import State
from orchestrator.specs.str_enum import StrEnum
from orchestrator.specs.units import format_bytes

BACKWARD_FLOPS = 2.0  # times those of the forward pass (arXiv:2204.02311, appendix B: MFU counts no recomputation)
ALIKE = 1.03  # step times and costs that differ by less are called the same
REPEATS_MIN = 3  # of a strategy, from which on its interval tells something
# Student's t at 97.5 % for 1, 2, 3 ... degrees of freedom: the mean lies within so many standard errors (95 %)
STUDENT = (12.706, 4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)
REPEATS_MAX = 1 + len(STUDENT)
# What a strategy is; plans that differ in anything else differ in more than their strategies.
WAYS = (
    *AXES,
    "gpus",
    "engine",
    "dp_replicate",
    "expert_parallel",
    "zero_stage",
    "offload",
    "offload_target",
    "sharding",
)
DERIVED = ("gradient_accumulation_steps", "first_stage_layers", "last_stage_layers")  # they follow from the others
NAMED_MAX = 3  # strategies that a verdict names for one reason


class Outcome(StrEnum):
    """How the job of a strategy ended."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    DOES_NOT_FIT = "does not fit"
    NO_SUCH_PLAN = "no such plan"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PENDING = "pending"  # it waits or runs


MEASURED_MARKS = {Outcome.FINISHED: Mark.MEASURED, Outcome.OUT_OF_MEMORY: Mark.REFUTED}


@dataclass(frozen=True, slots=True, kw_only=True)
class Curve:
    """What the training wrote of its steps."""

    losses: Mapping[int, float]  # by step
    tokens: tuple[int, ...] = ()  # of each step


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One strategy; None stands for what was neither said nor measured."""

    job_id: str
    strategy: str
    plan: str  # in a line, or the pinned settings where no plan has them
    outcome: Outcome
    reason: str
    devices: int | None
    device: str | None
    capacity_bytes: int | None  # of one device
    predicted_peak_bytes: int | None  # allocated
    predicted_reserved_bytes: int | None
    predicted_device_bytes: int | None
    needed_bytes: int | None  # predicted for the device, with margin
    host_bytes: int | None  # predicted for one rank
    peak_bytes: int | None  # allocated; of one that ran out, what was live then
    reserved_bytes: int | None
    predicted_step_s: float | None
    step_s: float | None
    samples_per_s: float | None
    tokens_per_s: float | None
    mfu: float | None  # share of the devices' peak FLOP/s that the model's FLOPs use
    loss: float | None  # of the last step
    loss_distance: float | None  # largest, from the first strategy with losses
    ooms: int
    restarts: int
    device_s: float  # that its attempts held
    money: float | None  # for `device_s`, where the cluster file has prices
    settings: Mapping[str, str] = field(default_factory=dict)  # of its plan
    repeats: int = 1  # that were timed
    step_within_s: tuple[float, float] | None = None  # 95 % interval of the mean step time

    @property
    def micro_batch(self) -> str | None:
        """Samples of a rank at a time."""
        return self.settings.get("micro_batch_size")


@dataclass(frozen=True, slots=True, kw_only=True)
class Comparison:
    """The strategies of one comparison, in the order in which they were asked for."""

    name: str
    rows: tuple[Row, ...]
    verdict: str
    notes: tuple[str, ...]  # what else differs, and what is not known
    picture: Picture | None  # None where no strategy has a prediction

    @property
    def is_complete(self) -> bool:
        """Whether every job has ended."""
        return all(row.outcome is not Outcome.PENDING for row in self.rows)


def compared_ids(job: Job) -> list[str]:
    """Ids of the jobs of the comparison that the job is of: they were submitted in one transaction."""
    member = job.spec.member
    assert member is not None, job.id
    first = job.order - member.number
    return [f"{job.spec.name}-{first + number}" for number in range(member.of)]


def comparison(state: State, jobs: Sequence[Job], curves: Mapping[str, Curve]) -> Comparison:
    """Return the comparison of these jobs; `curves` by job id. Jobs with the same pins are repeats of one strategy."""
    rows = [_row(state, job, curves.get(job.id)) for job in jobs]
    groups: dict[object, list[Row]] = {}
    for job, row in zip(jobs, rows, strict=True):
        groups.setdefault(job.spec.plan or job.id, []).append(row)
    firsts: dict[int, Mapping[int, float]] = {}  # losses of the first strategy that has any, of each repeat
    repeated = []
    for group in groups.values():
        distances = []
        for repeat, row in enumerate(group):
            curve = curves.get(row.job_id)
            if curve is not None and curve.losses:
                firsts.setdefault(repeat, curve.losses)
            distances.append(_distance(firsts.get(repeat, {}), curve))
        repeated.append(replace(_together(group), loss_distance=_largest(distances)))
    rows = _with_distinct_names(repeated)
    name = jobs[0].array or jobs[0].id
    return Comparison(
        name=name, rows=tuple(rows), verdict=verdict(rows), notes=tuple(_notes(rows)), picture=picture_of_rows(rows)
    )


def _together(group: Sequence[Row]) -> Row:
    """Return the row of a strategy from those of its repeats; one that did not finish says how the strategy ended."""
    timed = [row.step_s for row in group if row.step_s and _finished(row)]
    ended = next((row for row in group if not _finished(row)), group[0])
    if len(group) == 1:
        return group[0]
    step_s = mean(timed) if timed else None
    prices = [row.money for row in group if row.money is not None]
    return replace(
        ended,
        samples_per_s=_mean(row.samples_per_s for row in group),
        tokens_per_s=_mean(row.tokens_per_s for row in group),
        mfu=_mean(row.mfu for row in group),
        loss=_mean(row.loss for row in group),
        job_id=group[0].job_id,
        step_s=step_s,
        peak_bytes=max((row.peak_bytes for row in group if row.peak_bytes is not None), default=None),
        reserved_bytes=max((row.reserved_bytes for row in group if row.reserved_bytes is not None), default=None),
        ooms=sum(row.ooms for row in group),
        restarts=max(row.restarts for row in group),
        device_s=sum(row.device_s for row in group),
        money=sum(prices) if prices else None,
        repeats=len(timed),
        step_within_s=_interval(timed),
    )


def _mean(values: Iterable[float | None]) -> float | None:
    numbers = [value for value in values if value is not None]
    return mean(numbers) if numbers else None


def _largest(values: Iterable[float | None]) -> float | None:
    return max((value for value in values if value is not None), default=None)


def _interval(timed: Sequence[float]) -> tuple[float, float] | None:
    """Return the 95 % interval of the mean of some step times; None of fewer than two."""
    if len(timed) < 2:
        return None
    half = STUDENT[min(len(timed), REPEATS_MAX) - 2] * stdev(timed) / sqrt(len(timed))
    return mean(timed) - half, mean(timed) + half


def curve_of(lines: Iterable[str]) -> Curve:
    """The curve of a job from the lines of its attempts' metrics.jsonl; broken lines and odd numbers are left out."""
    losses: dict[int, float] = {}
    tokens: list[int] = []
    for text in lines:
        try:
            line = json.loads(text)
        except ValueError:  # a killed rank's last line
            continue
        if not isinstance(line, dict) or type(line.get("step")) is not int:
            continue
        if type(line.get("loss")) in (int, float) and isfinite(line["loss"]):
            losses[line["step"]] = float(line["loss"])
        if type(line.get("tokens")) is int:
            tokens.append(line["tokens"])
    return Curve(losses=losses, tokens=tuple(tokens))


def strategy_of(plan: Plan) -> str:
    """Return what a plan shards, recomputes and offloads, and on how many devices: `ZeRO-3 (FSDP2) on 4`."""
    words = [part for part in in_short(plan).split(" · ")[2:] if not part.startswith("micro ")]
    if isinstance(plan.mechanics, Fsdp2):
        name = f"ZeRO-{int(plan.mechanics.stage)} (FSDP2)"
        details = ("reduced once a step", "weights kept gathered")
        words = [name if word == "FSDP2" else word for word in words if word not in details]
    if plan.world_size == 1:
        words = [word for word in words if word != "DDP"] or ["plain"]
    return f"{' + '.join(words) or 'plain'} on {plan.world_size}"


def verdict(rows: Sequence[Row]) -> str:
    """Return one sentence: the fastest strategy, by how much and at what cost, and which ones memory excludes.

    No difference is claimed within 95 % intervals.
    """
    parts = []
    timed = sorted((row for row in rows if row.step_s and _finished(row)), key=lambda row: row.step_s or 0.0)
    if len(timed) > 1:
        fastest = timed[0]
        cheapest = min(timed, key=_step_cost)
        other = cheapest if _step_cost(cheapest) * ALIKE < _step_cost(fastest) else timed[1]
        times = (other.step_s or 0.0) / (fastest.step_s or 1.0)
        overlap = _overlap(fastest, other)
        faster = "about as fast as" if times < ALIKE or overlap else f"{times:.2f}x faster than"
        cost = _step_cost(fastest) / _step_cost(other)
        is_same_cost = max(cost, 1 / cost) < ALIKE or (overlap and fastest.devices == other.devices)
        at = "" if is_same_cost else f" at {cost:.2g}x the cost"
        sure = " (95 % intervals overlap)" if overlap else ""
        parts.append(f"{fastest.strategy} is {faster} {other.strategy}{at}{sure}")
    elif timed:
        parts.append(f"Only {timed[0].strategy} finished")
    parts += _excluded([row for row in rows if row.outcome is Outcome.OUT_OF_MEMORY], "ran out of memory")
    parts += _excluded([row for row in rows if row.outcome is Outcome.DOES_NOT_FIT], "does not fit", "do not fit")
    pending = sum(row.outcome is Outcome.PENDING for row in rows)
    parts += [f"{pending} of {len(rows)} have not ended"] if pending else []
    return f"{'; '.join(parts) or 'No strategy finished'}."


def _notes(rows: Sequence[Row]) -> Iterator[str]:
    """Yield what differs beside the strategies, and how sure their times are."""
    timed = [row for row in rows if row.step_s and _finished(row)]
    names = dict.fromkeys(name for row in timed for name in row.settings if name not in (*WAYS, *DERIVED))
    values = {name: list(dict.fromkeys(row.settings.get(name, "-") for row in timed)) for name in names}
    differing = [f"{name} ({', '.join(told)})" for name, told in values.items() if len(told) > 1]
    if differing:
        yield f"They differ in more than their strategies: {'; '.join(differing)}. `--plan` pins a setting of all."
    least = min((row.repeats for row in timed), default=REPEATS_MIN)
    if least < REPEATS_MIN and len(timed) > 1:
        times = "once" if least == 1 else "twice"
        yield f"Measured {times}: differences may be noise. `--repeats {REPEATS_MIN}` gives 95 % intervals."


def _overlap(row: Row, other: Row) -> bool:
    """Whether both have intervals that overlap."""
    if row.step_within_s is None or other.step_within_s is None:
        return False
    return row.step_within_s[1] >= other.step_within_s[0] and other.step_within_s[1] >= row.step_within_s[0]


def picture_of_rows(rows: Sequence[Row]) -> Picture | None:
    """Device memory against step time, predicted and measured; labels are the rows' numbers, from 1."""
    first = next((row for row in rows if row.capacity_bytes), None)
    if first is None:
        return None
    points = []
    for number, row in enumerate(rows, 1):
        if row.device != first.device or not row.predicted_device_bytes or not row.predicted_step_s:
            continue
        mark = Mark.TOO_BIG if row.outcome is Outcome.DOES_NOT_FIT else Mark.PREDICTED
        measured, ended = _measured_device_bytes(row), MEASURED_MARKS.get(row.outcome)
        is_measured = measured is not None and ended is not None
        label = "" if is_measured else str(number)
        points.append(
            Point(step_s=row.predicted_step_s, needed_bytes=row.predicted_device_bytes, mark=mark, label=label)
        )
        if measured is not None and ended is not None:
            step_s = row.step_s or row.predicted_step_s
            points.append(Point(step_s=step_s, needed_bytes=measured, mark=ended, label=str(number)))
    assert first.capacity_bytes is not None, first
    if not points:
        return None
    return Picture(device=first.device or "", capacity_bytes=first.capacity_bytes, points=tuple(points))


def _row(state: State, job: Job, curve: Curve | None) -> Row:
    last = job.last
    if last is None:
        return _planned(state, job)
    estimate = corrected(last.estimate, last.correction)
    predicted_bytes = predicted_peak_bytes(last)
    is_known = predicted_bytes is not None
    device = _device(state, last.device)
    step_s, devices = last.measured_step_s, last.plan.world_size
    losses = dict(curve.losses) if curve is not None else {}
    tokens = median(curve.tokens) if curve is not None and curve.tokens else None
    device_s = sum(
        one.plan.world_size * (one.ended_at_s - one.launched_at_s) for one in job.attempts if one.ended_at_s is not None
    )
    price = device.price_per_hour if device is not None else None
    return Row(
        job_id=job.id,
        strategy=strategy_of(last.plan),
        plan=in_short(last.plan),
        outcome=_outcome(job),
        reason=job.reason,
        devices=devices,
        device=last.device,
        capacity_bytes=None if device is None else device.memory,
        predicted_peak_bytes=predicted_bytes,
        predicted_reserved_bytes=estimate.reserved_bytes if is_known else None,
        predicted_device_bytes=estimate.device_bytes if is_known else None,
        needed_bytes=last.needed_bytes if is_known else None,
        host_bytes=estimate.host_bytes if is_known else None,
        peak_bytes=last.peak_bytes,
        reserved_bytes=last.reserved_bytes,
        predicted_step_s=last.step_s if last.estimate.source not in UNTIMED else None,
        step_s=step_s,
        samples_per_s=job.spec.global_batch_size / step_s if step_s else None,
        tokens_per_s=tokens / step_s if tokens and step_s else None,
        mfu=_mfu(job, last.plan, device, step_s),
        loss=losses[max(losses)] if losses else None,
        loss_distance=None,
        ooms=sum(ran_out(one) for one in job.attempts),
        restarts=len(job.attempts) - 1,
        device_s=device_s,
        money=None if price is None else price * device_s / SECONDS_AN_HOUR,
        settings=settings(last.plan),
    )


def _planned(state: State, job: Job) -> Row:
    """Of a job that never ran: what was predicted of the plan that comes closest."""
    found = _closest(state, job)
    plan = None if found is None else found[1].plan
    estimate: MemoryEstimate | None = None if found is None else found[1].estimate
    outcome = _outcome(job)
    if outcome is Outcome.DOES_NOT_FIT and found is None:
        outcome = Outcome.NO_SUCH_PLAN
    device = None if found is None else found[0].hardware.device
    return Row(
        job_id=job.id,
        strategy=in_words(job.spec.plan) if plan is None else strategy_of(plan),
        plan=in_words(job.spec.plan) if plan is None else in_short(plan),
        outcome=outcome,
        reason=job.reason,
        devices=None if plan is None else plan.world_size,
        device=None if device is None else device.name,
        capacity_bytes=None if device is None else device.memory,
        predicted_peak_bytes=None if estimate is None else estimate.allocated_bytes,
        predicted_reserved_bytes=None if estimate is None else estimate.reserved_bytes,
        predicted_device_bytes=None if estimate is None else estimate.device_bytes,
        needed_bytes=None if found is None else found[2],
        host_bytes=None if estimate is None else estimate.host_bytes,
        peak_bytes=None,
        reserved_bytes=None,
        predicted_step_s=None if found is None or found[1].estimate.source in UNTIMED else found[1].step_s,
        step_s=None,
        samples_per_s=None,
        tokens_per_s=None,
        mfu=None,
        loss=None,
        loss_distance=None,
        ooms=0,
        restarts=0,
        device_s=0.0,
        money=None,
        settings={} if plan is None else settings(plan),
    )


def _closest(state: State, job: Job) -> tuple[Group, Candidate, int] | None:
    """The first plan that fits a kind of device, else the one that needs least, corrected, with its needed bytes."""
    for group in (*groups_of(state.nodes), *groups_of(state.declared)):
        calibrated = learned(state, job, group.hardware.device.name)
        try:
            found = frontier(job.spec, group.hardware, calibrated.correction, calibrated.overhead)
        except SpecError:
            continue
        one = next(fitting(found, group.hardware.device.memory, calibrated), None) or nearest(found, calibrated)
        if one is not None:
            estimate = corrected(one.estimate, calibrated.correction_of(one.plan, one.estimate))
            return group, replace(one, estimate=estimate), needed_bytes(one, calibrated)
    return None


def _outcome(job: Job) -> Outcome:
    match job.status:
        case JobStatus.SUCCEEDED:
            return Outcome.FINISHED
        case JobStatus.REFUSED:
            return Outcome.DOES_NOT_FIT
        case JobStatus.CANCELLED:
            return Outcome.CANCELLED
        case JobStatus.FAILED:
            return Outcome.OUT_OF_MEMORY if job.last is not None and ran_out(job.last) else Outcome.FAILED
        case _:
            return Outcome.PENDING


def _mfu(job: Job, plan: Plan, device: DeviceSpec | None, step_s: float | None) -> float | None:
    """Model FLOPs utilisation (arXiv:2204.02311, appendix B); None where the model's FLOPs are not known."""
    profile = profile_of(
        job.spec,
        precision=plan.precision,
        sequence_length=plan.sequence_length,
        autocast=autocasts(plan),
        cuda=device is not None and device.kind is DeviceKind.CUDA,
    )
    if device is None or not step_s or profile is None or profile.source in UNTIMED or not profile.forward_flops:
        return None
    flops = (1 + BACKWARD_FLOPS) * profile.forward_flops * job.spec.global_batch_size
    return flops / (step_s * plan.world_size * device.peak_flops(plan.precision))


def _device(state: State, name: str) -> DeviceSpec | None:
    groups = (*groups_of(state.nodes), *groups_of(state.declared))
    return next((group.hardware.device for group in groups if group.hardware.device.name == name), None)


def _distance(first: Mapping[int, float], curve: Curve | None) -> float | None:
    """Largest difference of two losses at the same step."""
    shared = [] if curve is None else [step for step in curve.losses if step in first]
    if curve is None or not shared:
        return None
    return max(abs(curve.losses[step] - first[step]) for step in shared)


def _with_distinct_names(rows: Sequence[Row]) -> list[Row]:
    """Strategies of one name get the cut of their batch beside it."""
    counts = Counter(row.strategy for row in rows)
    named = []
    for row in rows:
        cut = next((part for part in row.plan.split(" · ") if part.startswith("micro ")), "")
        named.append(replace(row, strategy=f"{row.strategy} ({cut})") if counts[row.strategy] > 1 and cut else row)
    return named


def _finished(row: Row) -> bool:
    return row.outcome is Outcome.FINISHED


def _step_cost(row: Row) -> float:
    """Device-seconds of a step."""
    return (row.step_s or 0.0) * (row.devices or 1)


def _measured_device_bytes(row: Row) -> int | None:
    """The measured peak, and what the device is predicted to hold around it."""
    if row.peak_bytes is None or row.predicted_device_bytes is None or row.predicted_peak_bytes is None:
        return None
    return row.peak_bytes + row.predicted_device_bytes - row.predicted_peak_bytes


def _excluded(rows: Sequence[Row], one: str, several: str = "") -> Iterator[str]:
    """What memory excludes, each with the bytes that it needs and those that there are."""
    if not rows:
        return
    named = [f"{row.strategy}{_of_capacity(row)}" for row in rows[:NAMED_MAX]]
    rest = f" and {len(rows) - NAMED_MAX} more" if len(rows) > NAMED_MAX else ""
    if len(rows) == 1:
        yield f"{rows[0].strategy} {one}{_of_capacity(rows[0], ': {} of {}')}"
    else:
        yield f"{', '.join(named)}{rest} {several or one}"


def _of_capacity(row: Row, form: str = " ({} of {})") -> str:
    needed = row.needed_bytes if row.outcome is Outcome.DOES_NOT_FIT else row.peak_bytes
    if needed is None or row.capacity_bytes is None:
        return ""
    return form.format(format_bytes(needed), format_bytes(row.capacity_bytes))
