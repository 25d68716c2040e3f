"""`GET /metrics` for Prometheus, computed from one consistent view of the service.

Labels are bounded: nodes and teams by the cluster file, `job_id` by running attempts. `job` is Prometheus' own.
Counters and histograms restart at 0 with each start of the service; `rate()` and `increase()` expect that.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from importlib.metadata import version
from math import isfinite

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest
from prometheus_client.metrics_core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    Metric,
)
from prometheus_client.registry import Collector

from orchestrator.memory.calibration.correction import get_predicted_peak_bytes
from orchestrator.scheduling.base.held_devices import map_held_device_to_job_id
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.service.server.tally import OUTCOMES, Distribution, Figures, compute_device_s
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind, Heartbeat
from orchestrator.specs.errors import ServiceError
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.pending import Pending
from orchestrator.specs.state import State

MEDIA_TYPE = CONTENT_TYPE_PLAIN_0_0_4
DEVICE_STATES = ("held", "free", "drained", "unreadable", "absent")

LEASE = ("orc_journal_lease_held", "1 while this service owns its journal.")

Beats = Callable[[Job], Sequence[Heartbeat]]


@frozen
class RunningAttempt:
    """A live attempt, with the last heartbeats (progress reports) of its ranks."""

    job: Job
    attempt: Attempt
    beats: Sequence[Heartbeat]

    @property
    def peak_bytes(self) -> int | None:
        return max((beat.peak_bytes for beat in self.beats), default=None)

    @property
    def step_s(self) -> float | None:
        return max((beat.step_s for beat in self.beats if beat.step_s), default=None)


class Metrics(Collector):
    """Collects a service's numbers for Prometheus, all of one moment."""

    def __init__(
        self,
        read_figures: Callable[[], Figures],
        confirm: Callable[[], None],
        read_heartbeats: Beats,
    ) -> None:
        """Make the collector.

        `confirm` raises ServiceError where the service does not own its journal. `read_heartbeats`
        returns a running job's newest progress reports.
        """
        self._figures = read_figures
        self._confirm = confirm
        self._beats = read_heartbeats
        self._version = version("orchestrator")
        self._registry = CollectorRegistry()
        self._registry.register(self)
        ProcessCollector(registry=self._registry)

    def make_scrape_answer(self) -> bytes:
        """Return the metrics as text in the format that Prometheus scrapes, of MEDIA_TYPE."""
        return generate_latest(self._registry)

    def describe(self) -> list[Metric]:
        """Return an empty list, so that registration of the collector reads nothing."""
        return []

    def collect(self) -> Iterator[Metric]:
        """Yield every metric; only the metric that says so if this service does not own its
        journal.
        """
        yield _make_metric(
            "orc_build_info", "Version of the service.", {self._version: 1.0}, "version"
        )
        try:
            self._confirm()
            figures = self._figures()
        except ServiceError:
            yield GaugeMetricFamily(*LEASE, value=0.0)
            return
        yield GaugeMetricFamily(*LEASE, value=1.0)
        live = [
            RunningAttempt(job=job, attempt=job.last, beats=self._beats(job))
            for job in figures.state.jobs.values()
            if job.last is not None and job.last.status is not AttemptStatus.ENDED
        ]
        yield from _iterate_job_metrics(figures)
        yield from _iterate_running_metrics(figures, live)
        yield from _iterate_device_metrics(figures.state)
        yield from _iterate_metrics_since_start(figures, live)
        yield _make_metric(
            "orc_tracker_pending_records",
            "Records that a tracker has yet to get.",
            figures.totals.undelivered,
            "tracker",
        )
        yield _make_metric(
            "orc_notify_pending_notices",
            "Notices that a target has yet to get.",
            figures.totals.notices,
            "target",
        )
        yield _make_metric(
            "orc_notify_oldest_timestamp_seconds",
            "When the oldest of them was made.",
            figures.totals.oldest_notices_s,
            "target",
        )


def _iterate_job_metrics(figures: Figures) -> Iterator[Metric]:
    counts = Counter(job.status.value for job in figures.state.jobs.values())
    counts.update(figures.totals.ended)
    by_status = {status.value: counts[status.value] for status in JobStatus}
    yield _make_metric(
        "orc_jobs",
        "Jobs by status, the ended ones of the whole journal included.",
        by_status,
        "status",
    )
    queued = [job for job in figures.state.jobs.values() if job.status is JobStatus.QUEUED]
    reasons = Counter(get_pending_code(job, figures.at_s) for job in queued)
    by_reason = {reason.value: reasons[reason] for reason in Pending}
    yield _make_metric("orc_pending_jobs", "Queued jobs by why they wait.", by_reason, "reason")
    yield GaugeMetricFamily(
        "orc_pending_oldest_timestamp_seconds",
        "When the oldest queued job was submitted.",
        min((job.submitted_at_s for job in queued), default=None),
    )


def _iterate_running_metrics(
    figures: Figures, attempts: Sequence[RunningAttempt]
) -> Iterator[Metric]:
    values: dict[str, tuple[str, dict[str, float]]] = {
        "orc_memory_predicted_bytes": (
            "Predicted allocated peak of the worst rank of a running job.",
            {},
        ),
        "orc_memory_peak_bytes": (
            "Measured allocated peak of the worst rank of a running job.",
            {},
        ),
        "orc_step_predicted_seconds": (
            "Predicted seconds of an optimizer step of a running job.",
            {},
        ),
        "orc_step_seconds": (
            "Measured seconds of an optimizer step of a running job's slowest rank.",
            {},
        ),
        "orc_job_expected_end_timestamp_seconds": ("When a running job is expected to end.", {}),
        "orc_job_deadline_timestamp_seconds": ("Deadline of a running job.", {}),
        "orc_job_heartbeat_timestamp_seconds": (
            "When the quietest rank of a running job last reported.",
            {},
        ),
    }
    for running in attempts:
        row = (
            get_predicted_peak_bytes(running.attempt),
            running.peak_bytes,
            running.attempt.predicted_step_s,
            running.step_s,
            figures.ends_s.get(running.job.id),
            running.job.deadline_s,
            min((beat.at_s for beat in running.beats), default=None),
        )
        for (_, by_job), value in zip(values.values(), row, strict=True):
            if value is not None and isfinite(value):
                by_job[running.job.id] = value
    for name, (help_text, by_job) in values.items():
        yield _make_metric(name, help_text, by_job, "job_id")


def _iterate_device_metrics(state: State) -> Iterator[Metric]:
    job_ids = map_held_device_to_job_id(state)
    held_devices = Counter(node for node, _ in job_ids)
    unreadable_devices = Counter(
        node.name
        for node in state.nodes
        for index in node.unreadable
        if (node.name, index) not in job_ids
    )
    alive = {node.name: len(node.free_bytes) for node in state.nodes}
    devices_by_node = {node.name: len(node.free_bytes) for node in state.declared} | alive
    family = GaugeMetricFamily(
        "orc_devices", "Devices of each node by state.", labels=("node", "state")
    )
    for name, devices in devices_by_node.items():
        unreadable = unreadable_devices[name] if name not in state.drained else 0
        idle = max(0, devices - held_devices[name] - unreadable)
        rest = "absent" if name not in alive else "drained" if name in state.drained else "free"
        counts = {"held": min(devices, held_devices[name]), "unreadable": unreadable, rest: idle}
        for word in DEVICE_STATES:
            family.add_metric((name, word), counts.get(word, 0))
    yield family


def _iterate_metrics_since_start(
    figures: Figures, attempts: Sequence[RunningAttempt]
) -> Iterator[Metric]:
    tally = figures.tally
    policy = figures.state.policy
    ended = {outcome: tally.outcomes[outcome] for outcome in OUTCOMES}
    yield _make_metric(
        "orc_attempts_ended",
        "Attempts that ended since the start, by outcome.",
        ended,
        "outcome",
        CounterMetricFamily,
    )
    preempted = {
        "scheduler": tally.outcomes[FailureKind.MOVED.value],
        "outside": tally.outcomes[FailureKind.PREEMPTED.value],
    }
    yield _make_metric(
        "orc_preemptions",
        "Attempts since the start that were ended so that others run.",
        preempted,
        "by",
        CounterMetricFamily,
    )
    names = {team.name for team in policy.teams} | {policy.find_team("").name} | set(tally.device_s)
    used = {name: tally.device_s.get(name, 0.0) for name in sorted(names)}
    for running in attempts:
        used[policy.find_team(running.job.user).name] += compute_device_s(
            running.attempt, figures.at_s
        )
    yield _make_metric(
        "orc_team_usage_device_seconds",
        "Device-seconds since the start, by team.",
        used,
        "team",
        CounterMetricFamily,
    )
    yield _make_histogram(
        "orc_job_wait_seconds", "Seconds from submission to first launch.", tally.wait_s
    )
    yield _make_histogram(
        "orc_decision_seconds", "Seconds to decide what follows from an event.", tally.decision_s
    )
    yield _make_histogram(
        "orc_memory_peak_ratio", "Measured over predicted peak of ended attempts.", tally.peak_ratio
    )


def _make_metric(
    metric_name: str,
    help_text: str,
    values: Mapping[str, float],
    label: str,
    family_class: type[GaugeMetricFamily | CounterMetricFamily] = GaugeMetricFamily,
) -> Metric:
    """Return the metric with these values, each under the value of its label."""
    family = family_class(metric_name, help_text, labels=[label])
    for label_value, value in values.items():
        family.add_metric([label_value], value)
    return family


def _make_histogram(metric_name: str, help_text: str, distribution: Distribution) -> Metric:
    buckets = []
    below = 0
    for bound, count in zip(
        (*map(str, distribution.bounds), "+Inf"), distribution.counts, strict=True
    ):
        below += count
        buckets.append((bound, float(below)))
    family = HistogramMetricFamily(metric_name, help_text)
    family.add_metric([], buckets, distribution.sum)
    return family
