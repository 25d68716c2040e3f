"""Rows of a comparison: predictions, measurements and costs of a strategy, over one job or several
repeats.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import field
from math import inf, isfinite
from statistics import geometric_mean, mean, median

from orchestrator.memory.calibration.correction import correct_estimate, get_predicted_peak_bytes
from orchestrator.memory.model_request import RankShare, read_model_request
from orchestrator.memory.profiles import find_rank_profile, uses_autocast
from orchestrator.planning.explain import find_fastest_fitting_or_lightest
from orchestrator.planning.frontier import Candidate, estimate_needed_device_bytes
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier
from orchestrator.scheduling.base.node_groups import NodeGroup, find_device_spec, group_equal_nodes
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.options.job_options import make_calibration_for_job
from orchestrator.scheduling.reports.cost import SECONDS_AN_HOUR
from orchestrator.scheduling.reports.intervals import Interval, compute_geometric_mean_interval
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.pins import format_pins
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.mechanics import Fsdp2
from orchestrator.specs.metric_row import parse_metric_row
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import WITHOUT_SECONDS
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import format_plan, format_settings
from orchestrator.specs.state import State
from orchestrator.specs.str_enum import StrEnum

# times those of the forward pass (arXiv:2204.02311, appendix B: MFU counts no recomputation)
BACKWARD_FLOPS = 2.0


class Outcome(StrEnum):
    """What became of a strategy's job in a comparison; `pending` while it waits or runs."""

    FINISHED = "finished"
    OUT_OF_MEMORY = "out of memory"
    DOES_NOT_FIT = "does not fit"
    NO_SUCH_PLAN = "no such plan"
    FAILED = "failed"
    CANCELLED = "cancelled"
    PENDING = "pending"  # it waits or runs


@frozen
class LossCurve:
    """The loss by step of a training, and the number of tokens of each step."""

    losses: Mapping[int, float]  # by step
    tokens: tuple[int, ...] = ()  # of each step


@frozen
class ComparisonRow:
    """What was predicted and measured for one strategy (a way to shard and offload) of a
    comparison.

    None means unknown.
    """

    job_id: str
    strategy: str
    plan: str  # as one line, or the pinned settings where no plan has them
    outcome: Outcome
    reason: str
    devices: int | None = None
    device: str | None = None
    capacity_bytes: int | None = None  # of one device
    predicted_peak_bytes: int | None = None  # allocated
    predicted_reserved_bytes: int | None = None
    predicted_device_bytes: int | None = None
    needed_bytes: int | None = None  # predicted for the device, with margin
    host_bytes: int | None = None  # predicted for one rank
    peak_bytes: int | None = None  # allocated; if it ran out, the live bytes then
    reserved_bytes: int | None = None
    predicted_step_s: float | None = None
    step_s: float | None = None
    samples_per_s: float | None = None
    tokens_per_s: float | None = None
    mfu: float | None = None  # share of the devices' peak FLOP/s that the model's FLOPs use
    loss: float | None = None  # of the last step; the mean over repeats
    loss_distance: float | None = None  # largest, from the first strategy with losses
    ooms: int = 0
    restarts: int = 0
    device_s: float = 0.0  # device-seconds of its attempts
    money: float | None = None  # for `device_s`, where the cluster file has prices
    settings: Mapping[str, str] = field(default_factory=dict)  # of its plan
    learning_rate: float | None = None  # None of a script that is told none
    repeats: int = 1  # that were timed
    seeds: tuple[int, ...] = ()  # of its repeats; () of a script
    steps_s: tuple[float, ...] = ()  # step time of each repeat that finished
    losses: tuple[float, ...] = ()  # of the last step of each repeat that finished
    step_within_s: Interval | None = None  # 95 % interval of the step time
    times_fastest: float | None = None  # its step time over that of the fastest strategy
    times_within: Interval | None = None  # 95 % interval of that

    @property
    def accumulation(self) -> str | None:
        """Number of micro-batches that a rank runs per optimizer step, as text."""
        return self.settings.get("gradient_accumulation_steps")

    @property
    def micro_batch(self) -> str | None:
        """Micro-batch size as text; None where unknown."""
        return self.settings.get("micro_batch_size")


def parse_loss_curve(json_lines: Iterable[str]) -> LossCurve:
    """Return the loss curve in the JSON lines of a job's metrics.jsonl files.

    Broken lines are skipped, and so are numbers that are not finite.
    """
    losses: dict[int, float] = {}
    tokens: list[int] = []
    for text in json_lines:
        row = parse_metric_row(text)
        step = row.get("step")
        if not isinstance(step, int):
            continue
        if isfinite(row.get("loss", inf)):
            losses[step] = float(row["loss"])
        if isinstance(row.get("tokens"), int):
            tokens.append(int(row["tokens"]))
    return LossCurve(losses=losses, tokens=tuple(tokens))


def describe_strategy(plan: Plan) -> str:
    """Return a plan's sharding, recomputation, offload and number of devices as text, such as
    `ZeRO-3 (FSDP2) on 4`.
    """
    parts = [part for part in format_plan(plan).split(" · ")[2:] if not part.startswith("micro ")]
    if isinstance(plan.mechanics, Fsdp2):
        name = f"ZeRO-{int(plan.mechanics.stage)} (FSDP2)"
        details = ("reduced once a step", "weights kept gathered")
        parts = [name if word == "FSDP2" else word for word in parts if word not in details]
    if plan.world_size == 1:
        parts = [word for word in parts if word != "DDP"] or ["plain"]
    return f"{' + '.join(parts) or 'plain'} on {plan.world_size}"


def make_comparison_row(state: State, job: Job, loss_curve: LossCurve | None) -> ComparisonRow:
    """Return the comparison row of one job; a job that never ran has the predictions of the plan
    closest to fitting.
    """
    last = job.last
    if last is None:
        return _make_predicted_row(state, job)
    estimate = correct_estimate(last.estimate, last.correction)
    predicted_bytes = get_predicted_peak_bytes(last)
    is_known = predicted_bytes is not None
    device = find_device_spec(state, last.device)
    step_s = last.measured_step_s
    devices = last.plan.world_size
    losses = dict(loss_curve.losses) if loss_curve is not None else {}
    last_loss = losses[max(losses)] if losses else None
    tokens = median(loss_curve.tokens) if loss_curve is not None and loss_curve.tokens else None
    device_s = sum(
        attempt.plan.world_size * (attempt.ended_at_s - attempt.launched_at_s)
        for attempt in job.attempts
        if attempt.ended_at_s is not None
    )
    price = device.price_per_hour if device is not None else None
    return ComparisonRow(
        job_id=job.id,
        strategy=describe_strategy(last.plan),
        plan=format_plan(last.plan),
        outcome=_find_outcome(job),
        reason=describe_status(job),
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
        predicted_step_s=last.predicted_step_s,
        step_s=step_s,
        samples_per_s=job.spec.global_batch_size / step_s if step_s else None,
        tokens_per_s=tokens / step_s if tokens and step_s else None,
        mfu=compute_model_flops_utilisation(job, last.plan, device, step_s),
        loss=last_loss,
        ooms=sum(ran_out_of_memory(attempt) for attempt in job.attempts),
        restarts=len(job.attempts) - 1,
        device_s=device_s,
        money=None if price is None else price * device_s / SECONDS_AN_HOUR,
        settings=_list_known_settings(job.spec, last.plan),
        learning_rate=job.spec.learning_rate,
        seeds=_list_seeds(job),
        steps_s=(step_s,) if step_s else (),
        losses=() if last_loss is None else (last_loss,),
    )


def _list_known_settings(spec: JobSpec, plan: Plan) -> dict[str, str]:
    """Return the plan's settings as text by name, without a precision that nobody stated."""
    return {
        name: text
        for name, text in format_settings(plan).items()
        if name != "precision" or spec.is_precision_known
    }


def _make_predicted_row(state: State, job: Job) -> ComparisonRow:
    """Return the row of a job that never ran, with the predictions of the plan that is closest to
    fitting.
    """
    closest = _find_closest_plan_and_bytes(state, job)
    outcome = _find_outcome(job)
    pinned = format_pins(job.spec.plan)
    row = ComparisonRow(
        job_id=job.id,
        strategy=pinned,
        plan=pinned,
        outcome=outcome,
        reason=describe_status(job),
        learning_rate=job.spec.learning_rate,
        seeds=_list_seeds(job),
    )
    if closest is None and outcome is Outcome.DOES_NOT_FIT:
        return replace(row, outcome=Outcome.NO_SUCH_PLAN)
    if closest is None:
        return row
    group, candidate, needed = closest
    plan = candidate.plan
    estimate = candidate.estimate
    device = group.hardware.device
    return replace(
        row,
        strategy=describe_strategy(plan),
        plan=format_plan(plan),
        devices=plan.world_size,
        device=device.name,
        capacity_bytes=device.memory,
        predicted_peak_bytes=estimate.allocated_bytes,
        predicted_reserved_bytes=estimate.reserved_bytes,
        predicted_device_bytes=estimate.device_bytes,
        needed_bytes=needed,
        host_bytes=estimate.host_bytes,
        predicted_step_s=None if estimate.source in WITHOUT_SECONDS else candidate.step_s,
        settings=_list_known_settings(job.spec, plan),
    )


def _find_closest_plan_and_bytes(state: State, job: Job) -> tuple[NodeGroup, Candidate, int] | None:
    """Return (node group, plan, needed bytes per device) of the first plan that fits.

    Where none fits, it is the plan that needs least; None where the job has no plans.
    """
    for group in (*group_equal_nodes(state.nodes), *group_equal_nodes(state.declared)):
        calibrated = make_calibration_for_job(state, job, group.hardware.device.name)
        try:
            candidates = find_frontier(read_plan_request(job.spec), group.hardware, calibrated)
        except SpecError:
            continue
        candidate = find_fastest_fitting_or_lightest(
            candidates, group.hardware.device.memory, calibrated
        )
        if candidate is not None:
            estimate = correct_estimate(
                candidate.estimate,
                calibrated.compute_activation_factor(candidate.plan, candidate.estimate),
            )
            return (
                group,
                replace(candidate, estimate=estimate),
                estimate_needed_device_bytes(candidate, calibrated),
            )
    return None


def _find_outcome(job: Job) -> Outcome:
    """Return what became of the strategy's job."""
    match job.status:
        case JobStatus.SUCCEEDED:
            return Outcome.FINISHED
        case JobStatus.REFUSED:
            return Outcome.DOES_NOT_FIT
        case JobStatus.CANCELLED:
            return Outcome.CANCELLED
        case JobStatus.FAILED:
            return (
                Outcome.OUT_OF_MEMORY
                if job.last is not None and ran_out_of_memory(job.last)
                else Outcome.FAILED
            )
        case _:
            return Outcome.PENDING


def compute_model_flops_utilisation(
    job: Job, plan: Plan, device: DeviceSpec | None, step_s: float | None
) -> float | None:
    """Return the model FLOPs utilisation (arXiv:2204.02311, appendix B); None where the FLOPs or
    the precision are unknown.
    """
    share = RankShare(
        precision=plan.precision,
        sequence_length=plan.sequence_length,
        autocast=uses_autocast(plan),
        cuda=device is not None and device.kind.traits.traces_as_cuda,
    )
    profile = find_rank_profile(read_model_request(job.spec), share)
    if device is None or not step_s or profile is None or not profile.forward_flops:
        return None
    if not job.spec.is_precision_known:
        return None
    if profile.source in WITHOUT_SECONDS:
        return None
    flops = (1 + BACKWARD_FLOPS) * profile.forward_flops * job.spec.global_batch_size
    return flops / (step_s * plan.world_size * device.get_peak_flops(plan.precision))


def merge_rows_of_repeats(repeat_rows: Sequence[ComparisonRow]) -> ComparisonRow:
    """Return one row for the repeats of a strategy; a repeat that did not finish decides the
    outcome.

    Step times and rates are geometric means over the repeats that finished; the loss is their mean.
    """
    if len(repeat_rows) == 1:
        return repeat_rows[0]
    finished = [row for row in repeat_rows if is_finished(row)]
    steps_s = tuple(row.step_s for row in finished if row.step_s)
    losses = tuple(row.loss for row in finished if row.loss is not None)
    prices = [row.money for row in repeat_rows if row.money is not None]
    return replace(
        next((row for row in repeat_rows if not is_finished(row)), repeat_rows[0]),
        samples_per_s=_compute_geometric_mean_of_known(row.samples_per_s for row in finished),
        tokens_per_s=_compute_geometric_mean_of_known(row.tokens_per_s for row in finished),
        mfu=_compute_geometric_mean_of_known(row.mfu for row in finished),
        loss=mean(losses) if losses else None,
        job_id=repeat_rows[0].job_id,
        step_s=geometric_mean(steps_s) if steps_s else None,
        peak_bytes=max(
            (row.peak_bytes for row in repeat_rows if row.peak_bytes is not None), default=None
        ),
        reserved_bytes=max(
            (row.reserved_bytes for row in repeat_rows if row.reserved_bytes is not None),
            default=None,
        ),
        ooms=sum(row.ooms for row in repeat_rows),
        restarts=max(row.restarts for row in repeat_rows),
        device_s=sum(row.device_s for row in repeat_rows),
        money=sum(prices) if prices else None,
        repeats=len(steps_s),
        seeds=tuple(seed for row in repeat_rows for seed in row.seeds),
        steps_s=steps_s,
        losses=losses,
        step_within_s=compute_geometric_mean_interval(steps_s),
    )


def _compute_geometric_mean_of_known(values: Iterable[float | None]) -> float | None:
    """Return the geometric mean of the values that are neither None nor 0; None without any."""
    numbers = [value for value in values if value]
    return geometric_mean(numbers) if numbers else None


def _list_seeds(job: Job) -> tuple[int, ...]:
    """Return the job's random seed as a tuple; () for a script."""
    return () if job.spec.is_script else (job.spec.training.seed,)


def find_largest_known(values: Iterable[float | None]) -> float | None:
    """Return the largest of the values that are not None; None without any."""
    return max((value for value in values if value is not None), default=None)


def is_finished(row: ComparisonRow) -> bool:
    """Return whether the strategy's job, and every repeat of it, finished."""
    return row.outcome is Outcome.FINISHED
