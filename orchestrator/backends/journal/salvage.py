"""Placeholders for jobs whose rows cannot be read: id, owner, and the devices that they may occupy."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any

from orchestrator.specs.attempt import (
    Attempt,
    AttemptStatus,
    NodeDevices,
    Placement,
    count_devices,
    make_attempt_name,
)
from orchestrator.specs.choices import Engine, ParallelLayout, Precision
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.plan import Plan
from orchestrator.specs.profile import MemoryEstimate

DIGITS_MAX = 4  # of an attempt's number: every budget of restarts is far below
UNKNOWN_PROGRAM = "unreadable"


def salvage_job(
    job_id: str, body: str, reason: str, decision_texts: Iterable[str], release_texts: Iterable[str]
) -> Job:
    """Return a placeholder job that never starts, and that occupies the devices of its last
    recorded launch.

    `decision_texts` are recorded decisions that may name the job, oldest first. `release_texts` are texts of
    events that may free its devices. Only the id is trusted; other fields are used where they have
    the expected form.
    """
    raw = _parse_object(body)
    name, _, order = job_id.rpartition("-")
    launches = []
    for text in decision_texts:
        for line in text.splitlines():
            if launch := _parse_launch(job_id, line):
                launches.append(launch)
    number, placement = launches[-1] if launches else (0, ())
    is_free = any(_is_release_event(_parse_object(text), job_id, number) for text in release_texts)
    attempts = tuple(
        _make_placeholder_attempt(job_id, n, placement, released=n < number or is_free)
        for n in range(1, number + 1)
    )
    runs = bool(attempts) and not is_free
    return Job(
        id=job_id,
        spec=_make_placeholder_spec(name, raw.get("spec")),
        order=int(order) if order.isdecimal() else 0,
        submitted_at_s=_number_or_zero(raw.get("submitted_at_s")),
        status=JobStatus.RUNNING if runs else JobStatus.QUEUED,
        reason=f"its row cannot be read ({reason}); `orc cancel {job_id}` ends it and frees its devices",
        attempts=attempts,
        unreadable=reason,
    )


def salvage_submission(body: str, reason: str) -> Submitted | None:
    """Return an unreadable submission event with a placeholder job that never starts; None for
    other events.
    """
    raw = _parse_object(body)
    job_id = raw.get("job_id")
    order = raw.get("order")
    if raw.get("type") != "submitted" or not isinstance(job_id, str) or not isinstance(order, int):
        return None
    spec = _make_placeholder_spec(job_id.rpartition("-")[0], raw.get("spec"))
    return Submitted(
        job_id=job_id,
        order=order,
        spec=spec,
        at_s=_number_or_zero(raw.get("at_s")),
        unreadable=reason,
    )


def _parse_object(body: str) -> Mapping[str, Any]:
    try:
        raw = json.loads(body)
    except ValueError:
        return {}
    return raw if isinstance(raw, dict) else {}


def _number_or_zero(value: object) -> float:
    return float(value) if isinstance(value, int | float) else 0.0


def _make_placeholder_spec(job_name: str, raw: object) -> JobSpec:
    user = raw.get("user") if isinstance(raw, dict) else None
    spec = JobSpec(name="unreadable", command=(UNKNOWN_PROGRAM,), global_batch_size=1)
    return spec.model_copy(
        update={"name": job_name or "unreadable", "user": user if isinstance(user, str) else None}
    )


def _parse_launch(job_id: str, decision_line: str) -> tuple[int, Placement] | None:
    """Return (attempt number, placement) if the line records a launch of the job
    (`ports.format_decisions`); else None.
    """
    parts = decision_line.split(" ")
    if parts[:1] != ["launch"] or parts[2:3] != ["on"] or "as" not in parts:
        return None
    number = parts[1].removeprefix(f"{job_id}-")
    if (
        not number.isdecimal()
        or len(number) > DIGITS_MAX
        or parts[1] != make_attempt_name(job_id, int(number))
    ):
        return None
    nodes = (part.rpartition(":") for part in parts[3 : parts.index("as")])
    return int(number), tuple(
        NodeDevices(node=node, devices=tuple(map(int, ids.split(",")))) for node, _, ids in nodes
    )


def _is_release_event(raw: Mapping[str, Any], job_id: str, attempt_number: int) -> bool:
    return (raw.get("type"), raw.get("job_id"), raw.get("number")) == (
        "released",
        job_id,
        attempt_number,
    )


def _make_placeholder_attempt(
    job_id: str, attempt_number: int, placement: Placement, *, released: bool
) -> Attempt:
    devices = count_devices(placement)
    plan = Plan(
        engine=Engine.SCRIPT,
        layout=ParallelLayout(dp=max(1, devices)),
        micro_batch_size=1,
        precision=Precision.FP32,
    )
    nothing = MemoryEstimate(
        moment="", by_cause=(), allocated_bytes=0, reserved_bytes=0, device_bytes=0
    )
    return Attempt(
        job_id=job_id,
        number=attempt_number,
        plan=plan,
        placement=placement,
        device="",
        estimate=nothing,
        correction=1.0,
        step_s=0.0,
        status=AttemptStatus.ENDED if released else AttemptStatus.RUNNING,
        launched_at_s=0.0,
        released=released,
    )
