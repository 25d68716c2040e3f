"""The morning report: results, costs and open tasks of the last night's jobs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import field

from orchestrator.memory.calibration.calibrate import MARGIN
from orchestrator.memory.calibration.correction import get_predicted_peak_bytes
from orchestrator.scheduling.base.drain import list_active_suspensions
from orchestrator.scheduling.base.sentences import describe_status_with_holder
from orchestrator.scheduling.failures.observation import ran_out_of_memory
from orchestrator.scheduling.reports.advice import advise_after_failure
from orchestrator.scheduling.reports.cost import list_hourly_price_by_device, sum_job_cost
from orchestrator.scheduling.reports.deadlines import describe_late_jobs
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind
from orchestrator.specs.cluster import describe_unreadable
from orchestrator.specs.engines import get_engine_facts
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.replace import replace
from orchestrator.specs.settings import format_plan
from orchestrator.specs.state import State
from orchestrator.specs.units import format_bytes, format_seconds

BUSY_MIN = 50.0  # percent of the time; full trainings kept an H200 busy 97 %, small ones 14 %
IDLE_S = 600.0  # a shorter attempt is mostly its start
NOT_LOST = (
    FailureKind.PROBED,
    FailureKind.MOVED,
    FailureKind.CANCELLED,
)  # ends that are no failures of the attempt


@frozen
class ReportLine:
    """A job in the morning report, with one sentence about it."""

    id: str
    name: str
    user: str
    sentence: str


ReportLines = tuple[ReportLine, ...]


@frozen
class MemoryMiss:
    """An attempt (one launch of a job) whose measured memory differed from the prediction."""

    attempt: str
    plan: str
    predicted_bytes: int
    measured_bytes: int  # allocated peak
    ran_out: bool  # it needed at least `measured_bytes`
    sentence: str

    @property
    def ratio(self) -> float:
        return self.measured_bytes / max(1, self.predicted_bytes)


@frozen
class OccupiedSpan:
    """Devices of one node that an attempt occupied, and from when to when within the report's time."""

    node: str
    devices: tuple[int, ...]
    from_s: float
    until_s: float
    job: str
    outcome: str  # "running", "succeeded", or a FailureKind


@frozen
class DeviceTimeCost:
    """Device-seconds within the report's time by what they were used for, and their price; None
    without prices.
    """

    trained_s: float  # by attempts that succeeded, run, or saved their progress
    lost_s: float  # by attempts that failed
    probing_s: float
    cancelled_s: float = 0.0  # by attempts that a person ended
    idle_s: float  # of the nodes that live now
    # part of `trained_s`: of jobs that succeeded after a failure, where the request would have
    # failed
    saved_s: float
    money: float | None  # for all device-seconds used, if every device has a price

    @property
    def held_s(self) -> float:
        return self.trained_s + self.lost_s + self.probing_s + self.cancelled_s


@frozen
class MorningReport:
    """What happened to jobs and devices between two times, in seconds since 1970.

    Its lists of jobs are in the order of submission.
    """

    since_s: float
    until_s: float
    summary: str  # in one sentence
    succeeded: ReportLines
    recovered: ReportLines  # succeeded jobs with failures and the changes that followed
    failed: ReportLines
    refused: ReportLines
    cancelled: ReportLines
    late: ReportLines
    running: ReportLines
    waiting: ReportLines
    sweeps: ReportLines  # with trials in this time: progress, best trial, and cost of all trials
    idle: ReportLines  # jobs that left their cards idle, and what would fill them
    misses: tuple[MemoryMiss, ...]  # predictions wrong by more than the margin, the worst first
    cost: DeviceTimeCost
    to_do: tuple[str, ...]
    stops: Mapping[str, int]  # of jobs that go on, by `StopCause`
    nodes: Mapping[str, int] = field(default_factory=dict)  # devices of each
    spans: tuple[OccupiedSpan, ...] = ()


def get_ended_at_s(job: Job) -> float:
    """Return when the job's last attempt ended, in seconds since 1970; the time of submission where
    none did.
    """
    return max(
        (attempt.ended_at_s for attempt in job.attempts if attempt.ended_at_s is not None),
        default=job.submitted_at_s,
    )


def make_morning_report(
    state: State,
    ended_jobs: Iterable[Job],
    since_s: float,
    until_s: float,
    sweeps: Iterable[SweepReport] = (),
) -> MorningReport:
    """Return the report on the time from `since_s` to `until_s`, in seconds since 1970.

    Jobs that ended before, and sweeps without a trial in this time, are left out.
    """
    by_id = {job.id: job for job in (*ended_jobs, *state.jobs.values())}
    jobs = sorted(
        (job for job in by_id.values() if not job.status.ended or get_ended_at_s(job) >= since_s),
        key=lambda job: job.order,
    )
    by_status: dict[JobStatus, list[Job]] = {status: [] for status in JobStatus}
    for job in jobs:
        # a strategy without a plan is what a comparison has found out
        if not (job.status is JobStatus.REFUSED and job.spec.is_compared):
            by_status[job.status].append(job)
    missed = _make_lines_of_late_jobs(state, jobs)
    ids = {job.id for job in jobs}
    recovered = [job for job in by_status[JobStatus.SUCCEEDED] if _list_failed_attempts(job)]
    spans = tuple(_list_occupied_spans(jobs, since_s, until_s))
    nodes = {node.name: node.devices for node in state.nodes}
    for span in spans:
        nodes[span.node] = max(nodes.get(span.node, 0), 1 + max(span.devices, default=-1))
    report = MorningReport(
        since_s=since_s,
        until_s=until_s,
        summary="",
        succeeded=_make_report_lines(by_status[JobStatus.SUCCEEDED], _describe_success),
        recovered=_make_report_lines(recovered, _describe_recovery),
        failed=_make_report_lines(by_status[JobStatus.FAILED], _describe_reason),
        refused=_make_report_lines(by_status[JobStatus.REFUSED], _describe_reason),
        cancelled=_make_report_lines(by_status[JobStatus.CANCELLED], _describe_reason),
        late=missed,
        running=_make_report_lines(by_status[JobStatus.RUNNING], _describe_progress),
        waiting=_make_report_lines(by_status[JobStatus.QUEUED], _describe_reason),
        sweeps=tuple(
            _describe_sweep(sweep)
            for sweep in sweeps
            if not ids.isdisjoint(trial.job for trial in sweep.trials)
        ),
        idle=_make_report_lines(
            (job for job in jobs if _left_cards_idle(job, since_s)), _describe_idle
        ),
        misses=tuple(_list_memory_misses(jobs, since_s)),
        cost=_sum_device_time(state, jobs, spans, since_s, until_s, {job.id for job in recovered}),
        to_do=tuple(
            _describe_things_to_do(
                state, by_status, missed, {job.retry_of for job in by_id.values()}
            )
        ),
        stops=_count_stops_by_cause(jobs, since_s, until_s),
        nodes=dict(sorted(nodes.items())),
        spans=spans,
    )
    return replace(report, summary=_write_summary(report))


def _count_stops_by_cause(jobs: Iterable[Job], since_s: float, until_s: float) -> dict[str, int]:
    """Return {cause: number} of the stops by the scheduler within this time."""
    counts: Counter[str] = Counter()
    for job in jobs:
        for attempt in job.attempts:
            is_within = since_s <= attempt.end_or(until_s) <= until_s
            if attempt.stop_cause is not None and is_within:
                counts[attempt.stop_cause] += 1
    return dict(sorted(counts.items()))


# -------------------------------------------------------------------------------------------------------------- lines


def _make_report_lines(jobs: Iterable[Job], describe_job: Callable[[Job], str]) -> ReportLines:
    """Return a report line per job, with the sentence that `describe_job` returns."""
    return tuple(
        ReportLine(id=job.id, name=job.spec.name, user=job.user, sentence=describe_job(job))
        for job in jobs
    )


def _describe_reason(job: Job) -> str:
    return describe_status_with_holder(job).partition("\n")[0]


def _describe_success(job: Job) -> str:
    last = job.last
    if last is None:
        return _describe_reason(job)
    tried = f", attempt {last.number}" if last.number > 1 else ""
    return f"{format_plan(last.plan)} in {format_seconds(job.ran_s)}{tried}"


def _describe_progress(job: Job) -> str:
    last = job.last
    return (
        _describe_reason(job)
        if last is None
        else f"attempt {last.number}: {format_plan(last.plan)}"
    )


def _list_failed_attempts(job: Job) -> list[Attempt]:
    return [
        attempt
        for attempt in job.attempts
        if attempt.failure is not None and attempt.failure.kind not in NOT_LOST
    ]


def _describe_recovery(job: Job) -> str:
    """Return text with each failure of the job and the change that followed: `device_oom:
    micro_batch_size 8 -> 4`.
    """
    sentences = []
    for failed in _list_failed_attempts(job):
        after = next((attempt for attempt in job.attempts if attempt.number > failed.number), None)
        change = (
            "" if after is None or not after.change else f": {', '.join(map(str, after.change))}"
        )
        assert failed.failure is not None, failed.name
        sentences.append(f"{failed.failure.kind.value}{change}")
    return "; then ".join(sentences)


def _describe_sweep(sweep: SweepReport) -> ReportLine:
    best = (
        f"best {sweep.best_text}"
        if sweep.best_text
        else "no trial succeeded"
        if sweep.ended
        else "no best yet"
    )
    return ReportLine(
        id=sweep.id,
        name=sweep.name,
        user=sweep.user,
        sentence="; ".join((sweep.state, best, sweep.cost_text)),
    )


def _make_lines_of_late_jobs(state: State, jobs: Iterable[Job]) -> ReportLines:
    """Return lines of the jobs that ended after their deadlines, and of live jobs that are expected
    to.
    """
    sentences = dict(describe_late_jobs(state, [job.id for job in jobs if not job.status.ended]))
    for job in jobs:
        if job.deadline_s is None or job.status is not JobStatus.SUCCEEDED:
            continue
        late_s = get_ended_at_s(job) - job.deadline_s
        if late_s > 0:
            sentences[job.id] = f"ended {format_seconds(late_s)} after its deadline"
    return _make_report_lines(
        (job for job in jobs if job.id in sentences), lambda job: sentences[job.id]
    )


# ------------------------------------------------------------------------------------------------- measured and spent


def _list_memory_misses(jobs: Iterable[Job], since_s: float) -> Iterator[MemoryMiss]:
    """Yield the attempts whose memory prediction was wrong by more than the margin, the worst
    first.
    """
    misses = []
    for job in jobs:
        for attempt in job.attempts:
            predicted = get_predicted_peak_bytes(attempt)
            measured = attempt.peak_bytes
            if predicted is None or not measured or attempt.end_or(since_s) < since_s:
                continue
            miss = MemoryMiss(
                attempt=attempt.name,
                plan=format_plan(attempt.plan),
                predicted_bytes=predicted,
                measured_bytes=measured,
                ran_out=ran_out_of_memory(attempt),
                sentence=_describe_memory_difference(
                    predicted, measured, ran_out_of_memory(attempt)
                ),
            )
            if miss.ratio > MARGIN or (
                # its peak is that of whole steps
                miss.ratio < 1 / MARGIN and not miss.ran_out and attempt.measured_step_s is not None
            ):
                misses.append(miss)
    yield from sorted(misses, key=lambda miss: -max(miss.ratio, 1 / max(miss.ratio, 1e-9)))


def _left_cards_idle(job: Job, since_s: float) -> bool:
    """Return whether the job's last attempt ran for IDLE_S or longer but kept its cards busy for
    less than BUSY_MIN.
    """
    last = job.last
    if last is None or last.ended_at_s is None or last.started_at_s is None:
        return False
    busy_percent = last.facts.busy_percent
    lasted_s = last.ended_at_s - max(since_s, last.started_at_s)
    return busy_percent is not None and busy_percent < BUSY_MIN and lasted_s >= IDLE_S


def _describe_idle(job: Job) -> str:
    """Return text on what percentage of the time the job's cards were busy, and which settings
    would use them better.
    """
    assert job.last is not None, job.id
    plan = job.last.plan
    fills = []
    if plan.gradient_accumulation_steps > 1:
        fills.append(f"a micro-batch above {plan.micro_batch_size}, where memory allows it")
    if get_engine_facts(plan.engine).is_ours:
        fills += ["`training.compile: true`"] * (not plan.compiled)
    else:
        fills.append("more workers of its data loader")
    rest = " or ".join(fills) or "a larger batch (another training)"
    return f"its cards were busy {job.last.facts.busy_percent:.0f} % of the time, measured; {rest} may fill them"


def _describe_memory_difference(predicted_bytes: int, measured_bytes: int, ran_out: bool) -> str:
    """Return both bytes and their ratio as text, such as `predicted 61.8 MiB, measured at least 254
    MiB (4.12 x)`.
    """
    least = "at least " if ran_out else ""
    ratio = measured_bytes / max(1, predicted_bytes)
    return f"predicted {format_bytes(predicted_bytes)}, measured {least}{format_bytes(measured_bytes)} ({ratio:.2f} x)"


def _list_occupied_spans(
    jobs: Iterable[Job], since_s: float, until_s: float
) -> Iterator[OccupiedSpan]:
    """Yield the devices and times within the report's time that each attempt of these jobs
    occupied.
    """
    for job in jobs:
        for attempt in job.attempts:
            from_s = max(since_s, attempt.launched_at_s)
            to_s = min(until_s, attempt.end_or(until_s))
            if from_s >= to_s:
                continue
            outcome = "running" if attempt.status is not AttemptStatus.ENDED else "succeeded"
            if attempt.failure:
                outcome = attempt.failure.kind.value
            for part in attempt.placement:
                yield OccupiedSpan(
                    node=part.node,
                    devices=part.devices,
                    from_s=from_s,
                    until_s=to_s,
                    job=job.id,
                    outcome=outcome,
                )


def _sum_device_time(
    state: State,
    jobs: Sequence[Job],
    spans: Iterable[OccupiedSpan],
    since_s: float,
    until_s: float,
    recovered_job_ids: Set[str],
) -> DeviceTimeCost:
    """Return the device-seconds of these spans by use, the idle ones, and their price."""
    saved_s = 0.0
    by_use = {"trained": 0.0, "lost": 0.0, "probing": 0.0, "cancelled": 0.0}
    for span in spans:
        device_s = len(span.devices) * (span.until_s - span.from_s)
        by_use[_classify_use(span.outcome)] += device_s
        if span.job in recovered_job_ids and _classify_use(span.outcome) == "trained":
            saved_s += device_s
    capacity_s = sum(node.devices for node in state.nodes) * max(0.0, until_s - since_s)
    return DeviceTimeCost(
        trained_s=by_use["trained"],
        lost_s=by_use["lost"],
        probing_s=by_use["probing"],
        cancelled_s=by_use["cancelled"],
        idle_s=max(0.0, capacity_s - sum(by_use.values())),
        saved_s=saved_s,
        money=sum_job_cost(jobs, list_hourly_price_by_device(state), until_s, since_s).money,
    )


def _classify_use(outcome: str) -> str:
    """Return what device-seconds of an attempt with this outcome were: trained, lost, probing or
    cancelled.
    """
    if outcome == FailureKind.PROBED:
        return "probing"
    if outcome == FailureKind.CANCELLED:
        return "cancelled"
    return "trained" if outcome in ("running", "succeeded", FailureKind.MOVED) else "lost"


# --------------------------------------------------------------------------------------------------------------- to do


def _describe_things_to_do(
    state: State,
    jobs_by_status: Mapping[JobStatus, list[Job]],
    late_lines: ReportLines,
    retried_job_ids: Set[str | None],
) -> Iterator[str]:
    """Yield sentences on what a person can do, each with the command; jobs that were retried need
    nothing.
    """
    for job in jobs_by_status[JobStatus.FAILED]:
        if job.id in retried_job_ids:
            continue
        if job.last is None:
            yield f"{job.id}: `orc show {job.id}`"
            continue
        advice = advise_after_failure(job.last.failure).replace(
            "`orc retry`", f"`orc retry {job.id}`"
        )
        yield f"{job.id}: {advice}: `orc logs {job.id}`"
    for job in state.jobs.values():
        if job.asks:
            yield f"{job.id} asks: {job.asks}"
    for job in jobs_by_status[JobStatus.REFUSED]:
        yield f"{job.id}: change the job or the hardware: `orc show {job.id}` says what would fit"
    for line in late_lines:
        job_is_live = line.id in state.jobs and not state.jobs[line.id].status.ended
        if job_is_live:
            yield f"{line.id}: raise its priority, or move its deadline"
    for entry in list_active_suspensions(state):
        trust = f"`orc drain {entry.node} --undo` trusts it again"
        yield f"{entry.place} takes nothing new for now ({entry.reason}): look at it; {trust}"
    if places := describe_unreadable(state.nodes):
        yield f"the driver cannot read {places}: nothing new starts there; look at `nvidia-smi` there"
    for node in state.drained:
        yield f"{node} is drained: `orc drain {node} --undo` lets it accept jobs again"


def _write_summary(report: MorningReport) -> str:
    """Return the report as one sentence: `12 of 14 ended jobs succeeded, 3 of them after a failure;
    1 failed.`
    """
    ended = len(report.succeeded) + len(report.failed) + len(report.refused) + len(report.cancelled)
    if not ended:
        sentence = "no job ended"
    else:
        sentence = f"{len(report.succeeded)} of {ended} ended jobs succeeded"
        if report.recovered:
            sentence += f", {len(report.recovered)} of them after a failure"
    groups = {
        "failed": report.failed,
        "refused": report.refused,
        "cancelled": report.cancelled,
        "late": report.late,
    }
    groups |= {"running": report.running, "waiting": report.waiting}
    rest = [f"{len(lines)} {word}" for word, lines in groups.items() if lines]
    return f"{'; '.join([sentence, ', '.join(rest)]) if rest else sentence}."
