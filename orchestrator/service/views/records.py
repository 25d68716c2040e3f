"""Views of jobs, attempts and nodes, for tables and as JSON."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from math import isfinite
from typing import cast

from pydantic import TypeAdapter, ValidationError
from typing_extensions import TypedDict

from orchestrator.memory.calibration.correction import correct_estimate, get_predicted_peak_bytes
from orchestrator.planning.explain import list_highest_moments
from orchestrator.planning.picture import Picture
from orchestrator.scheduling.base.drain import list_active_suspensions
from orchestrator.scheduling.base.sentences import describe_status_with_holder
from orchestrator.scheduling.failures.observation import list_record_warnings
from orchestrator.scheduling.options.job_options import count_steps_left
from orchestrator.scheduling.reports.explain import explain_attempt, make_plan_chart
from orchestrator.service.views.columns import make_column_values
from orchestrator.service.views.expected import Range
from orchestrator.specs.attempt import Attempt, Heartbeat, Placement
from orchestrator.specs.cluster import DeviceSpec, Node, Window
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.recorded import list_recorded_settings
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.json_object import JsonObject
from orchestrator.specs.observation import Observation
from orchestrator.specs.policy import UNSHARED, PolicySpec
from orchestrator.specs.profile import MemoryEstimate
from orchestrator.specs.settings import format_plan
from orchestrator.specs.state import State


class MomentView(TypedDict):
    """Predicted bytes at one moment of a step at which the memory peak may lie, before correction."""

    name: str
    counted_bytes: int  # these follow from the parameter count
    activation_bytes: int  # these are corrected by measurements


class EstimateView(TypedDict):
    """Predicted bytes, at its peak, of the rank that needs most; they are corrected by what was
    measured.
    """

    source: str  # a Source
    moment: str
    by_cause: dict[str, int]
    by_moment: list[MomentView]  # the largest ones, in order of time
    allocated_bytes: int
    reserved_bytes: int
    device_bytes: int
    host_bytes: int


class ProgressView(TypedDict):
    """How far the live attempt is, by the last heartbeats of its ranks."""

    step: int
    max_steps: int | None  # None: a script without `steps`
    step_s: float | None
    peak_bytes: int
    phase: str
    loss: float | None  # None also if it is not finite: JSON has no such number
    at_s: float


class FailureView(TypedDict):
    """The failure of an attempt."""

    kind: str
    reason: str
    rank: int | None
    excerpt: str


class AttemptView(TypedDict):
    """An attempt (one launch of a job) with its plan, prediction, measurement and outcome."""

    number: int
    status: str
    outcome: str  # "launching", "running", "stopping", "succeeded", or a FailureKind
    plan: str
    settings: dict[str, str]
    placement: str
    device: str
    change: list[str]
    change_reason: str
    estimate: EstimateView
    correction: float
    predicted_bytes: int | None  # allocated peak predicted at launch; None if unknown
    # device bytes with margin, predicted at launch; None if measured before
    needed_bytes: int | None
    fit_probability: float | None
    predicted_step_s: float | None  # None of a script whose step times are assumed
    peak_bytes: int | None
    step_s: float | None
    steps_done: int | None
    checkpoint_step: int | None
    launched_at_s: float
    ended_at_s: float | None
    failure: FailureView | None
    exit_codes: list[
        int | None
    ]  # of each rank that was started: minus the signal number, None if unknown
    host_oom_kills: int  # how far the kernel's counters rose on its nodes
    warnings: list[str]  # limits of its record's validity


class JobView(TypedDict):
    """A job with its attempts."""

    id: str
    name: str
    status: str
    reason: str
    asks: str  # what a person has to allow before it goes on; "": it asks nothing
    answer: dict[str, str | int]  # the body of a retry that allows it
    cancelling: bool
    priority: int
    user: str  # "" if not given
    team: str | None  # None: the cluster file names no teams
    order: int
    submitted_at_s: float
    not_before_s: float
    global_batch_size: int
    gpus: str
    is_script: bool
    promise: PromiseView | None  # None: it asks for no guarantee
    held_by: str | None  # who holds it; None: nobody
    time_limit_s: float | None  # that its attempts may run together; None: any time
    deadline_s: float | None  # by when it should be done; None: at any time
    retry_of: str | None  # the ended job that it retries
    continues_from: str | None  # the job with whose newest checkpoint it began
    attempts: list[AttemptView]
    progress: ProgressView | None
    # what its figures rest on, by name; {} in a list of jobs
    provenance: dict[str, str]
    removed: list[str]  # what is not in its folder any more: when and why it was removed


class PromiseView(TypedDict):
    """The start time that was promised at submission to a job with a `guarantee`, or why none was."""

    gpus: int  # the speed of this many is guaranteed
    starts_by_s: float | None  # None: refused, or no cluster was seen yet
    refused: str  # the reason, or ""


class PointView(TypedDict):
    """A plan in a chart."""

    step_s: float
    needed_bytes: int
    mark: str  # a Mark
    label: str
    name: str
    within_s: Range | None


class PictureView(TypedDict):
    """A chart of a job's plans that no other plan beats, on one kind of device."""

    device: str
    capacity_bytes: int
    points: list[PointView]


class ExplanationView(TypedDict):
    """A job with explanations of each attempt, and a chart of its best plans as judged today."""

    job: JobView
    sooner: list[
        str
    ]  # of a job that waits for devices: when it starts, and what would start it sooner
    lessons: list[list[str]]  # of each attempt
    picture: PictureView | None


class SuspensionView(TypedDict):
    """A device or node that takes no new attempts, after unexplained failures or failed hardware."""

    device: int | None  # None: all of the node
    until_s: float
    reason: str


class NodeView(TypedDict):
    """A live node."""

    name: str
    device: JsonObject  # DeviceSpec, as in a cluster file
    free_bytes: list[int]
    driver_errors: list[
        str
    ]  # by device: why the driver cannot read it, "" where it can; [] where it can read all
    busy: list[int]  # devices that our attempts hold
    jobs: list[str]  # the jobs of these attempts
    drained: bool  # it accepts no new attempts
    suspended: list[SuspensionView]  # what of it accepts none for a while
    maintenance: list[Window]  # windows without jobs, in seconds since 1970
    host_free_bytes: int
    network_bandwidth: int  # bytes per second


class BatchAnswer(TypedDict):
    """The ids of jobs submitted together, in their order; its other fields are by job id."""

    ids: list[str]
    late: dict[str, str]
    promises: dict[str, PromiseView]
    refused: dict[str, str]  # why, by id, of jobs that nothing here can hold


def make_job_view(
    job: Job,
    heartbeats: Sequence[Heartbeat] = (),
    policy: PolicySpec = UNSHARED,
    unwatched_process: str = "",
    unread_sentences: Sequence[str] = (),
) -> JobView:
    """Return the job with its attempts as JSON, without the removals of its files.

    `heartbeats` are the last progress reports of the live attempt. `unwatched_process` names one of
    its processes without our guard; "" if there is none. `unread_sentences` are on files of its
    ranks that cannot be read.
    """
    view = JobView(
        id=job.id,
        name=job.spec.name,
        status=job.status.value,
        reason="; ".join(
            (
                describe_status_with_holder(job),
                *([f"unwatched: {unwatched_process}"] if unwatched_process else []),
                *unread_sentences,
            )
        ),
        asks="" if job.status.ended else job.asks,
        answer=dict(job.answer),
        cancelling=job.cancelling,
        priority=job.spec.priority,
        user=job.user,
        team=policy.find_team(job.user).name if policy.has_teams else None,
        order=job.order,
        submitted_at_s=job.submitted_at_s,
        not_before_s=job.not_before_s,
        global_batch_size=job.spec.global_batch_size,
        gpus=_format_span(job.spec.gpus.min, job.spec.gpus.max),
        is_script=job.spec.is_script,
        promise=make_promise_view(job),
        held_by=job.held_by,
        time_limit_s=job.spec.time_limit,
        deadline_s=job.deadline_s,
        retry_of=job.retry_of,
        continues_from=job.continues_from,
        attempts=[make_attempt_view(job.spec, attempt) for attempt in job.attempts],
        progress=_make_progress_view(job, heartbeats) if heartbeats else None,
        provenance={},
        removed=[],
    )
    return cast(JobView, view | make_column_values(job))


def make_promise_view(job: Job) -> PromiseView | None:
    """Return as JSON the start that was promised to the job; None if it has no `guarantee`."""
    if job.spec.guarantee is None:
        return None
    refused = job.reason if job.status is JobStatus.REFUSED else ""
    return PromiseView(gpus=job.spec.guaranteed_gpus, starts_by_s=job.starts_by_s, refused=refused)


def make_attempt_view(spec: JobSpec, attempt: Attempt) -> AttemptView:
    """Return the attempt as JSON, with predictions and measurements."""
    evidence = attempt.facts
    failure = attempt.failure
    view = AttemptView(
        number=attempt.number,
        status=attempt.status.value,
        outcome=attempt.outcome,
        plan=format_plan(attempt.plan),
        settings=list_recorded_settings(spec, attempt.plan),
        placement=_format_placement(attempt.placement),
        device=attempt.device,
        change=[str(change) for change in attempt.change],
        change_reason=attempt.change_reason
        or ("a probe: it measures memory, and ends" if attempt.probe else ""),
        estimate=make_estimate_view(attempt.estimate, attempt.correction),
        correction=attempt.correction,
        predicted_bytes=get_predicted_peak_bytes(attempt),
        needed_bytes=attempt.needed_bytes,
        fit_probability=attempt.fit_probability,
        predicted_step_s=attempt.predicted_step_s,
        peak_bytes=attempt.peak_bytes,
        step_s=attempt.measured_step_s,
        steps_done=max((beat.steps_done for beat in attempt.heartbeats), default=None),
        checkpoint_step=evidence.checkpoint_step,
        launched_at_s=attempt.launched_at_s,
        ended_at_s=attempt.ended_at_s,
        failure=FailureView(
            kind=failure.kind.value,
            reason=failure.reason,
            rank=failure.rank,
            excerpt=failure.excerpt,
        )
        if failure
        else None,
        exit_codes=[end.exit_code for end in evidence.ranks],
        host_oom_kills=evidence.host_oom_kills,
        warnings=list(list_record_warnings(attempt)),
    )
    return cast(AttemptView, view | make_column_values(attempt))


def make_estimate_view(estimate: MemoryEstimate, activation_factor: float) -> EstimateView:
    """Return the memory estimate as JSON, causes largest first; activations are multiplied by
    `activation_factor`.
    """
    at_worst = correct_estimate(estimate, activation_factor)
    return EstimateView(
        source=estimate.source.value,
        moment=at_worst.moment,
        by_cause=dict(sorted(at_worst.by_cause, key=lambda cause: -cause[1])),
        by_moment=[cast(MomentView, asdict(moment)) for moment in list_highest_moments(estimate)],
        allocated_bytes=at_worst.allocated_bytes,
        reserved_bytes=at_worst.reserved_bytes,
        device_bytes=at_worst.device_bytes,
        host_bytes=estimate.host_bytes,
    )


def make_explanation_view(
    state: State, job: Job, start_sentences: Sequence[str]
) -> ExplanationView:
    """Return as JSON the predictions and measurements of the job's attempts, and why it waits.

    `start_sentences` are on when it starts, and what would start it sooner.
    """
    picture = make_plan_chart(state, job)
    return ExplanationView(
        job=make_job_view(job, policy=state.policy),
        sooner=[*start_sentences],
        lessons=[list(explain_attempt(state, job, attempt)) for attempt in job.attempts],
        picture=None if picture is None else make_picture_view(picture),
    )


def make_picture_view(picture: Picture) -> PictureView:
    """Return the chart as JSON."""
    return cast(PictureView, asdict(picture))


def parse_picture_view(view: PictureView) -> Picture:
    """Return the chart of a job's plans from its JSON."""
    return TypeAdapter(Picture).validate_python(view)


def make_observations_view(observations: Sequence[Observation]) -> list[JsonObject]:
    """Return the observations as JSON."""
    return _make_observations_adapter().dump_python(tuple(observations), mode="json")


def parse_observations_view(view: object) -> tuple[Observation, ...]:
    """Return the observations from their JSON. Raises SpecError if it is malformed."""
    try:
        return _make_observations_adapter().validate_python(view)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        path = ".".join(map(str, first["loc"]))
        raise SpecError(first["msg"], source="outcomes", path=path) from None


def make_node_view(
    node: Node, job_by_device: Mapping[tuple[str, int], str], state: State
) -> NodeView:
    """Return the node as JSON, its device as in a cluster file; `job_by_device` is {(node, device
    index): job id}.
    """
    busy = {index: job for (name, index), job in job_by_device.items() if name == node.name}
    view = NodeView(
        name=node.name,
        device=node.device.model_dump(mode="json"),
        free_bytes=list(node.free_bytes),
        driver_errors=list(node.driver_errors),
        busy=sorted(busy),
        jobs=sorted(set(busy.values())),
        drained=node.name in state.drained,
        suspended=[
            SuspensionView(device=entry.device, until_s=entry.until_s, reason=entry.reason)
            for entry in list_active_suspensions(state)
            if entry.node == node.name
        ],
        maintenance=list(node.maintenance),
        host_free_bytes=node.host_free_bytes,
        network_bandwidth=node.network_bandwidth,
    )
    return cast(NodeView, view | make_column_values(node))


def parse_node_view(view: NodeView) -> Node:
    """Return the node for planning, from its JSON. Busy and unreadable devices count as free: a job
    may wait for them.
    """
    device = DeviceSpec.model_validate(view["device"])
    errors = view.get("driver_errors", ())  # an older service has none
    unreadable = {index for index, error in enumerate(errors) if error}
    waited_for = {*view["busy"], *unreadable}
    free_bytes = (
        device.memory if index in waited_for else free
        for index, free in enumerate(view["free_bytes"])
    )
    return Node(
        name=view["name"],
        device=device,
        free_bytes=tuple(free_bytes),
        host_free_bytes=view["host_free_bytes"],
        network_bandwidth=view["network_bandwidth"],
    )


def get_failure_excerpt(job: JobView) -> str:
    """Return the log lines of the job's last failure; "" without one."""
    failures = [attempt["failure"] for attempt in job["attempts"] if attempt["failure"]]
    return failures[-1]["excerpt"] if failures else ""


def sort_jobs_for_display(jobs: Iterable[Job]) -> list[Job]:
    """Return the jobs in the order of display: ended ones, running ones, then waiting ones by
    priority; newest last.
    """
    return sorted(jobs, key=make_display_sort_key)


def make_display_sort_key(job: Job) -> tuple[int, int, int]:
    """Return the key by which jobs are sorted for display: ended, running, then waiting by
    priority.
    """
    if job.status.ended:
        return 0, 0, job.order
    return (1, 0, job.order) if job.attempts else (2, -job.spec.priority, job.order)


def _format_placement(placement: Placement) -> str:
    return ", ".join(
        f"{part.node}[{','.join(str(device) for device in part.devices)}]" for part in placement
    )


@cache
def _make_observations_adapter() -> TypeAdapter[tuple[Observation, ...]]:
    return TypeAdapter(tuple[Observation, ...])


def _format_span(low: int, high: int) -> str:
    return str(low) if low == high else f"{low}-{high}"


def _make_progress_view(job: Job, heartbeats: Sequence[Heartbeat]) -> ProgressView:
    behind = min(heartbeats, key=lambda beat: beat.step)
    steps = [beat.step_s for beat in heartbeats if beat.step_s]
    left = count_steps_left(job, job.last) if job.spec.is_script else None
    # a script counts from its checkpoint on
    begin = 0 if left is None else (job.spec.optimizer_steps or 0) - left
    return ProgressView(
        step=begin + behind.step,
        max_steps=job.spec.optimizer_steps,
        step_s=max(steps, default=None),
        peak_bytes=max(beat.peak_bytes for beat in heartbeats),
        phase=behind.phase,
        loss=next(
            (beat.loss for beat in heartbeats if beat.loss is not None and isfinite(beat.loss)),
            None,
        ),
        at_s=max(beat.at_s for beat in heartbeats),
    )
