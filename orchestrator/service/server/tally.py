"""Counters over events since the service's start, for `/metrics`. The journal has the events themselves."""

from __future__ import annotations

from bisect import bisect_left
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from orchestrator.backends.ports import Totals
from orchestrator.memory.calibration.correction import get_predicted_peak_bytes
from orchestrator.specs.actions import Action, Launch, Record
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind, count_devices
from orchestrator.specs.events import Event, Finished
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job_record import Job
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State

SUCCEEDED = "succeeded"
OUTCOMES = (SUCCEEDED, *(kind.value for kind in FailureKind))
WAIT_S = (1.0, 10.0, 60.0, 300.0, 900.0, 3600.0, 4 * 3600.0, 12 * 3600.0, 24 * 3600.0)
DECISION_S = (0.0001, 0.0003, 0.001, 0.003, 0.01, 0.03, 0.1, 0.3, 1.0)
PEAK_RATIO = (0.25, 0.5, 0.7, 0.8, 0.9, 0.95, 1.0, 1.05, 1.1, 1.25, 1.5, 2.0)


class Distribution:
    """A histogram as in Prometheus: each bucket counts the values up to its bound."""

    def __init__(self, bucket_bounds: Sequence[float]) -> None:
        self.bounds = tuple(bucket_bounds)
        self.counts = [0] * (
            len(bucket_bounds) + 1
        )  # of each bucket alone; the last has what is above all bounds
        self.sum = 0.0

    def count_value(self, value: float) -> None:
        """Count one value."""
        self.counts[bisect_left(self.bounds, value)] += 1
        self.sum += value


@dataclass(slots=True)
class Tally:
    """Counts what happened in committed events since the service's start. Calls must not overlap."""

    wait_s: Distribution = field(
        default_factory=lambda: Distribution(WAIT_S)
    )  # submission to first launch
    decision_s: Distribution = field(default_factory=lambda: Distribution(DECISION_S))
    peak_ratio: Distribution = field(
        default_factory=lambda: Distribution(PEAK_RATIO)
    )  # measured / predicted
    outcomes: Counter[str] = field(default_factory=Counter)  # ended attempts
    device_s: defaultdict[str, float] = field(
        default_factory=lambda: defaultdict(float)
    )  # of ended attempts, by team

    def count_event(
        self, event: Event, actions: Sequence[Action], decision_s: float, policy: PolicySpec
    ) -> None:
        """Count a committed event with its actions. The decision on it took `decision_s` seconds."""
        self.decision_s.count_value(decision_s)
        ended = (event.job_id, event.number) if isinstance(event, Finished) else None
        for action in actions:
            if isinstance(action, Launch) and action.attempt.number == 1:
                self.wait_s.count_value(max(0.0, event.at_s - action.job.submitted_at_s))
            if (
                isinstance(action, Record)
                and action.attempt
                and (action.job.id, action.attempt.number) == ended
            ):
                self._count_ended_attempt(action.job, action.attempt, policy)

    def _count_ended_attempt(self, job: Job, attempt: Attempt, policy: PolicySpec) -> None:
        assert attempt.status is AttemptStatus.ENDED, attempt.name
        assert attempt.ended_at_s is not None, attempt.name
        self.outcomes[attempt.failure.kind.value if attempt.failure else SUCCEEDED] += 1
        self.device_s[policy.find_team(job.user).name] += compute_device_s(
            attempt, attempt.ended_at_s
        )
        predicted = get_predicted_peak_bytes(attempt)
        measured = attempt.peak_bytes
        if predicted and measured:
            self.peak_ratio.count_value(measured / predicted)


@frozen
class Figures:
    """The numbers of a service at one moment: its state, the journal's counts, and the counters
    since its start.
    """

    at_s: float
    state: State
    totals: Totals
    ends_s: Mapping[str, float]  # expected, of each running job
    tally: Tally


def compute_device_s(attempt: Attempt, until_s: float) -> float:
    """Return the attempt's device-seconds: its devices times the seconds from its launch to its
    release, at most `until_s`.
    """
    devices = count_devices(attempt.placement)
    return devices * max(0.0, until_s - attempt.launched_at_s)
