"""A sweep (hyperparameter search) as JSON: its trials, and the best of them."""

from __future__ import annotations

from dataclasses import asdict

from typing_extensions import TypedDict

from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.job.sweep import Value


class TrialView(TypedDict):
    """A trial of a sweep, with its job and its metric."""

    number: int
    job: str
    parameters: dict[str, Value]
    text: str  # its parameters in words
    status: str  # of the job, or "stopped early"
    reason: str
    plan: str  # of its last attempt; "" before the first
    value: float | None  # last of its metric


class SweepView(TypedDict):
    """Progress of a sweep, with all of its trials."""

    id: str
    name: str
    user: str
    method: str
    metric: str
    goal: str
    submitted_at_s: float
    ended: str  # why; "" while it goes on
    state: str  # how far it is, in words
    max_trials: int
    live: int  # trials that have not ended
    best: int | None  # number of the best trial that has succeeded
    best_text: str  # that trial in words; "" before there is one
    device_s: float  # that its trials held
    money: float | None  # for these, where the cluster file has prices
    cost_text: str
    trials: list[TrialView]


def sweep_view(report: SweepReport) -> SweepView:
    """Return the sweep as JSON."""
    view: SweepView = asdict(report)  # type: ignore[assignment]
    return view
