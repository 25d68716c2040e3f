"""The morning report as JSON, the source of every form in which people read it."""

from __future__ import annotations

from dataclasses import asdict

from typing_extensions import TypedDict

from orchestrator.scheduling.reports.morning import MorningReport, summary


class LineView(TypedDict):
    """A job in the report, with a sentence about it."""

    id: str
    name: str
    user: str
    sentence: str


class MissView(TypedDict):
    """An attempt (one launch of a job) whose measured memory differed from the prediction."""

    attempt: str
    plan: str
    predicted_bytes: int
    measured_bytes: int  # allocated peak
    ran_out: bool  # it needed at least `measured_bytes`
    sentence: str


class CostView(TypedDict):
    """Device-seconds within the report's time, by use, and their price; null without prices."""

    trained_s: float
    lost_s: float  # by attempts that failed
    probing_s: float
    idle_s: float
    saved_s: float  # of `trained_s`, by jobs that succeeded though they had failed
    money: float | None  # for all that was held, where every device has a price


class SpanView(TypedDict):
    """Devices of one node that an attempt occupied, clipped to the report's time."""

    node: str
    devices: list[int]
    from_s: float
    until_s: float
    job: str
    outcome: str  # "running", "succeeded", or a FailureKind


class ReportView(TypedDict):
    """The morning report."""

    since_s: float  # since 1970
    until_s: float
    summary: str
    succeeded: list[LineView]
    recovered: list[LineView]  # of those that succeeded
    failed: list[LineView]
    refused: list[LineView]
    cancelled: list[LineView]
    late: list[LineView]
    running: list[LineView]
    waiting: list[LineView]
    sweeps: list[
        LineView
    ]  # that had trials within it: how far, the best trial, and what all trials cost
    misses: list[MissView]
    cost: CostView
    to_do: list[str]
    stops: dict[str, int]  # of jobs that go on, by cause
    nodes: dict[str, int]  # devices of each
    spans: list[SpanView]


def report_view(report: MorningReport) -> ReportView:
    """Return the report as JSON."""
    misses = [{**asdict(miss), "sentence": miss.sentence} for miss in report.misses]
    view: ReportView = {**asdict(report), "summary": summary(report), "misses": misses}  # type: ignore[typeddict-item]
    return view
