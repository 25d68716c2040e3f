"""Content of MLflow runs of a job and its attempts, as plain data. Pure functions: no server is called."""

from __future__ import annotations

import importlib.metadata
import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import NamedTuple
from urllib.parse import quote

from pydantic import TypeAdapter

from orchestrator.backends.redaction import Hide
from orchestrator.backends.text_templates import load_text_template
from orchestrator.memory.calibration.correction import correct_estimate, get_predicted_peak_bytes
from orchestrator.planning.picture import Picture
from orchestrator.scheduling.base.sentences import describe_status_with_holder
from orchestrator.scheduling.failures.observation import list_record_warnings
from orchestrator.scheduling.failures.out_of_memory import count_caught_errors
from orchestrator.scheduling.reports.comparison import Comparison
from orchestrator.scheduling.reports.comparison_rows import compute_model_flops_utilisation
from orchestrator.scheduling.reports.cost import SECONDS_AN_HOUR
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.attempt import Attempt, AttemptStatus, FailureKind
from orchestrator.specs.cluster import DeviceSpec
from orchestrator.specs.frozen import frozen
from orchestrator.specs.job.recorded import find_recorded_precision, list_recorded_settings
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.metric_row import parse_metric_row
from orchestrator.specs.observation import Observation

ENDED_FROM_OUTSIDE = (
    FailureKind.CANCELLED,
    FailureKind.PREEMPTED,
    FailureKind.MOVED,
    FailureKind.PROBED,
    FailureKind.TIME_LIMIT,
)
TEXT_MAX = 7_900  # of a tag: MLflow takes 8,000 characters (mlflow/utils/validation.py)
ARTIFACT_MAX = 65_536  # characters of a log tail or a traceback
ELAPSED_MS_MAX = 1e15  # MLflow takes 64 bits
LOGS_MAX = 8  # failed ranks whose logs are kept
NOTED_ATTEMPTS = 20
# of an attempt's run: its Observation as JSON, for other homes to learn from
OUTCOME_TAG = "orc.outcome"
OWN_PROGRAM = "orchestrator.training.main"  # of jobs without a script
METRIC_NAME = re.compile(r"[\w./ -]{1,250}")


@frozen
class RunContent:
    """The content of an MLflow run (tags, parameters, metrics, texts), without its curves."""

    name: str
    start_ms: int
    end_ms: int | None  # None: it goes on
    status: str  # MLflow's word
    tags: Mapping[str, str]
    params: Mapping[str, str]  # never change once sent
    metrics: Mapping[str, float]
    texts: Mapping[str, str]  # artifacts by path
    picture: Picture | None = None  # of the frontier


def run_key(job: Job, attempt_number: int) -> str:
    """Return the key in the tag `orc.run` of an attempt's run; number 0 means the job's own run."""
    return f"{job.key}/{attempt_number}"


def make_comparison_key(job: Job) -> str:
    """Return the key of the comparison to which the job belongs. It is unique across homes."""
    return f"{job.array}@{job.submitted_at_s!r}"


def make_sweep_key(sweep_id: str, submitted_at_s: float) -> str:
    """Return the key of the sweep that was submitted at this time (seconds since 1970). It is
    unique across homes.
    """
    return f"{sweep_id}@{submitted_at_s!r}"


def make_job_run_content(
    job: Job, hide_secrets: Hide, make_comparison_url: str, picture: Picture | None = None
) -> RunContent:
    """Return the content of the run of a whole job.

    `make_comparison_url` is the URL of MLflow's page with its attempts side by side, or "".
    """
    ends = [attempt.ended_at_s for attempt in job.attempts if attempt.ended_at_s is not None]
    end_s = max(ends, default=job.submitted_at_s) if job.status.ended else None
    metrics = {"attempts": float(len(job.attempts))}
    if end_s is not None:
        metrics["total_s"] = end_s - job.submitted_at_s
    spec = job.spec.model_dump(mode="json", exclude={"env"}, exclude_defaults=True)
    if job.spec.env:
        spec |= {"env": {name: "(not shown)" for name, _ in job.spec.env}}
    tags = {
        "status": job.status,
        "reason": hide_secrets(describe_status_with_holder(job)),
        "job_spec": hide_secrets(json.dumps(spec)),
        "mlflow.note.content": hide_secrets(_describe_job(job, make_comparison_url)),
        **make_source_tags(job, hide_secrets),
    }
    params = {
        "family": job.spec.family_name,
        "kind": "script" if job.spec.is_script else "model",
        **find_recorded_precision(job.spec),
        "gpus": f"{job.spec.gpus.min}-{job.spec.gpus.max}",
        "priority": str(job.spec.priority),
    }
    if job.status.ended:  # until then a restart may cut it
        params["global_batch_size"] = str(job.spec.global_batch_size)
    return RunContent(
        name=job.id,
        start_ms=_convert_to_milliseconds(job.submitted_at_s),
        end_ms=None if end_s is None else _convert_to_milliseconds(end_s),
        status={JobStatus.SUCCEEDED: "FINISHED", JobStatus.CANCELLED: "KILLED"}.get(
            job.status, "FAILED"
        ),
        tags=_cut_texts(tags),
        params=_cut_texts(params),
        metrics=metrics,
        texts={},
        picture=picture,
    )


def make_attempt_run_content(
    job: Job,
    attempt: Attempt,
    hide_secrets: Hide,
    explanation: Sequence[str] = (),
    observation: Observation | None = None,
    device: DeviceSpec | None = None,
) -> RunContent:
    """Return the content of the run of one attempt: plan, measurements, end, and how it differs
    from the attempt before.

    `explanation` has sentences on its end; `observation` has predicted and measured values;
    `device` is the kind it ran on.
    """
    failure = attempt.failure
    ended = attempt.status is AttemptStatus.ENDED
    changed = ", ".join(str(change) for change in attempt.change)
    tags = {
        "status": attempt.status,
        "outcome": failure.kind if failure else "succeeded" if ended else "",
        "reason": hide_secrets(failure.reason) if failure else "",
        "change": hide_secrets(
            f"{changed} ({attempt.change_reason})" if attempt.change_reason else changed
        ),
        "engine": attempt.plan.engine,
        "device": attempt.device,
        "family": job.spec.family_name,
        "peak_moment": attempt.estimate.moment,
        "orc_version": importlib.metadata.version("orchestrator"),
        **attempt.versions,
        **make_source_tags(job, hide_secrets),
    }
    if attempt.probe:
        tags["probe"] = "true"
    if attempt.facts.lost:
        tags["not_resumed"] = hide_secrets(", ".join(attempt.facts.lost))
    if doubts := list_record_warnings(attempt):
        tags["warnings"] = hide_secrets("; ".join(doubts))[-TEXT_MAX:]
    if attempt.facts.unwatched:
        tags["unwatched"] = hide_secrets(attempt.facts.unwatched[0])
    if caught := count_caught_errors(attempt.facts):
        tags["caught_ooms"] = str(caught)
    if failure and failure.excerpt:
        tags["excerpt"] = hide_secrets(failure.excerpt)[-TEXT_MAX:]
    outcome = (
        "" if observation is None else TypeAdapter(Observation).dump_json(observation).decode()
    )
    if 0 < len(outcome) <= TEXT_MAX:
        tags[OUTCOME_TAG] = outcome
    place = "; ".join(
        f"{part.node}: {','.join(map(str, part.devices))}" for part in attempt.placement
    )
    status = "FINISHED"
    if failure is not None:
        status = "KILLED" if failure.kind in ENDED_FROM_OUTSIDE else "FAILED"
    return RunContent(
        name=attempt.name,
        start_ms=_convert_to_milliseconds(attempt.launched_at_s),
        end_ms=_convert_to_milliseconds(
            attempt.launched_at_s if attempt.ended_at_s is None else attempt.ended_at_s
        )
        if ended
        else None,
        status=status,
        tags=_cut_texts(tags),
        params=_cut_texts(
            {
                **list_recorded_settings(job.spec, attempt.plan),
                **_list_training_parameters(job.spec),
                "placement": place,
            }
        ),
        metrics={
            **_list_attempt_metric_values(attempt, observation),
            **_compute_rate_metrics(job, attempt, device),
        },
        texts=_list_attempt_texts(attempt, hide_secrets)
        | ({"explanation.txt": hide_secrets("\n".join(explanation))} if explanation else {}),
    )


def make_source_tags(job: Job, hide_secrets: Hide) -> dict[str, str]:
    """Return the run's tags of code and user, named as MLflow's context providers do
    (mlflow/tracking/context, 3.17).
    """
    command = job.spec.command
    source = job.spec.source
    script = (
        OWN_PROGRAM
        if command is None
        else next((word for word in command if word.endswith(".py")), command[0])
    )
    tags = {"mlflow.source.type": "LOCAL", "mlflow.source.name": hide_secrets(script)}
    if job.user:
        tags["mlflow.user"] = job.user
    if source is not None:
        tags |= {
            "mlflow.source.git.commit": source.commit,
            "mlflow.source.git.dirty": str(source.dirty).lower(),
            "mlflow.source.git.branch": hide_secrets(source.branch),
            "mlflow.source.git.repoURL": hide_secrets(source.repo_url),
        }
    return {name: value for name, value in tags.items() if value}


def make_comparison_url(mlflow_url: str, run_ids: tuple[str, ...], experiment_id: str) -> str:
    """Return the URL of an MLflow page that shows these runs side by side."""
    runs, experiments = (quote(json.dumps(ids)) for ids in (list(run_ids), [experiment_id]))
    # not the view of traces
    query = f"runs={runs}&experiments={experiments}&workflowType=machine_learning"
    return f"{mlflow_url.rstrip('/')}/#/compare-runs?{query}"


def run_url(mlflow_url: str, experiment_id: str, run_id: str) -> str:
    """Return the URL of a run's page on an MLflow server."""
    return f"{mlflow_url.rstrip('/')}/#/experiments/{experiment_id}/runs/{run_id}?workflowType=machine_learning"


class MetricPoint(NamedTuple):
    """A value of a curve at a step."""

    name: str
    value: float
    at_ms: int  # since 1970, or since launch where a function says so
    step: int


def parse_curves_and_elapsed_ms(
    metric_lines: str, elapsed_ms: float
) -> tuple[list[MetricPoint], float]:
    """Return (points with times since the launch, new elapsed milliseconds) from lines of
    `metrics.jsonl`.

    `elapsed_ms` is the sum of times of all earlier lines. Time is the sum of `step_s`, so that the
    same lines read again give the same points. Lines that are not JSON objects with a step are
    skipped: a killed rank leaves such lines.
    """
    points = []
    for text_line in metric_lines.splitlines():
        row = parse_metric_row(text_line)
        step = row.get("step")
        if not isinstance(step, int):
            continue
        elapsed_ms = min(elapsed_ms + 1000 * max(0.0, row.get("step_s", 0.0)), ELAPSED_MS_MAX)
        points += [
            MetricPoint(name, float(value), round(elapsed_ms), step)
            for name, value in row.items()
            if name != "step" and METRIC_NAME.fullmatch(name)
        ]
    return points, elapsed_ms


def parse_samples_and_next_number(
    sample_lines: str, first_number: int
) -> tuple[list[MetricPoint], int]:
    """Return (points with times since 1970, number of the next sample) from lines of system
    samples.

    Each sample's number is the step of its points; the first line has the number `first_number`.
    """
    points = []
    for text_line in sample_lines.splitlines():
        row = parse_metric_row(text_line)
        if "at_s" not in row:
            continue
        at_ms = _convert_to_milliseconds(row["at_s"])
        points += [
            MetricPoint(name, float(value), at_ms, first_number)
            for name, value in row.items()
            if name != "at_s" and METRIC_NAME.fullmatch(name)
        ]
        first_number += 1
    return points, first_number


def _list_attempt_metric_values(
    attempt: Attempt, observation: Observation | None
) -> dict[str, float]:
    predicted = get_predicted_peak_bytes(attempt)
    overhead_bytes = None if observation is None else observation.overhead_bytes
    evidence = attempt.evidence
    reserved_bytes = (
        None
        if predicted is None
        else correct_estimate(attempt.estimate, attempt.correction).reserved_bytes
    )
    metrics: dict[str, float | None] = {
        "predicted_peak_bytes": predicted,
        "predicted_step_s": attempt.predicted_step_s,
        "measured_busy_percent": None if evidence is None else evidence.busy_percent,
        "predicted_busy_percent": None if attempt.busy_share is None else 100 * attempt.busy_share,
        "correction": attempt.correction,
        "needed_bytes": attempt.needed_bytes,
        "fit_probability": attempt.fit_probability,
        "measured_peak_bytes": attempt.peak_bytes,
        "predicted_reserved_bytes": reserved_bytes,
        "measured_reserved_bytes": attempt.reserved_bytes,
        "measured_overhead_bytes": overhead_bytes,
        "measured_step_s": attempt.measured_step_s,
        "predicted_over_measured": predicted / attempt.peak_bytes
        if predicted and attempt.peak_bytes
        else None,
    }
    return {name: float(value) for name, value in metrics.items() if value is not None}


def _list_training_parameters(spec: JobSpec) -> dict[str, str]:
    """Return a model's learning rate, seed and steps as parameters of its run; {} for a script,
    whose command has them.
    """
    if spec.is_script:
        return {}
    training = spec.training
    values = {
        "learning_rate": training.learning_rate,
        "seed": training.seed,
        "max_steps": training.max_steps,
    }
    return {
        name: f"{value:g}" if isinstance(value, float) else str(value)
        for name, value in values.items()
    }


def _compute_rate_metrics(
    job: Job, attempt: Attempt, device: DeviceSpec | None
) -> dict[str, float]:
    """Return metrics by name: samples and tokens per second, utilisation, device-seconds and cost,
    as far as known.

    Tokens are those of full samples of a model; the curve has the tokens that were really trained.
    """
    plan = attempt.plan
    step_s = attempt.measured_step_s
    metrics: dict[str, float | None] = {}
    if step_s:
        samples_per_s = plan.global_batch_size / step_s
        metrics["samples_per_s"] = samples_per_s
        if not job.spec.is_script and plan.sequence_length:
            metrics["tokens_per_s"] = samples_per_s * plan.sequence_length
        metrics["mfu"] = compute_model_flops_utilisation(job, plan, device, step_s)
    if attempt.ended_at_s is not None:
        device_s = plan.world_size * (attempt.ended_at_s - attempt.launched_at_s)
        metrics["device_seconds"] = device_s
        if device is not None and device.price_per_hour is not None:
            metrics["cost"] = device.price_per_hour * device_s / SECONDS_AN_HOUR
    return {name: value for name, value in metrics.items() if value is not None}


def _list_attempt_texts(attempt: Attempt, hide: Hide) -> dict[str, str]:
    estimate = correct_estimate(attempt.estimate, attempt.correction)
    totals = {
        name: getattr(estimate, name)
        for name in ("allocated_bytes", "reserved_bytes", "device_bytes")
    }
    texts = {
        "memory_estimate.json": json.dumps(
            {"moment": estimate.moment, "bytes_by_cause": dict(estimate.by_cause), **totals},
            indent=2,
        )
    }
    if attempt.evidence is None or attempt.failure is None:
        return texts
    failed = [end for end in attempt.evidence.ranks if end.exit_code != 0 and end.log_tail]
    texts |= {
        f"logs/rank{end.rank}.txt": hide(end.log_tail)[-ARTIFACT_MAX:] for end in failed[:LOGS_MAX]
    }
    errors = attempt.evidence.errors[:LOGS_MAX]
    texts |= {
        f"tracebacks/rank{error.rank}.txt": hide(error.traceback)[-ARTIFACT_MAX:]
        for error in errors
    }
    return texts


def _describe_job(job: Job, compare: str) -> str:
    """Return the job's description in Markdown, which MLflow shows above its run."""
    last = job.attempts[-NOTED_ATTEMPTS:]
    return _fill_template(
        "job", job, describe_status_with_holder(job), compare, last, get_predicted_peak_bytes
    )


def describe_comparison(comparison: Comparison, mlflow_link: str) -> str:
    """Return the Markdown description of a comparison's run: its result, and a table of its
    strategies.
    """
    return _fill_template("comparison", comparison, mlflow_link)[:TEXT_MAX]


def describe_sweep(report: SweepReport, mlflow_link: str) -> str:
    """Return the Markdown description of a sweep's run: its best trial, and a table of its trials."""
    return _fill_template("sweep", report, mlflow_link)[:TEXT_MAX]


def _fill_template(template: str, *values: object) -> str:
    return str(getattr(_load_templates(), template)(*values)).rstrip("\n")


@cache
def _load_templates() -> object:
    return load_text_template("orchestrator.backends.mlflow", "notes").module


def _cut_texts(texts: Mapping[str, str]) -> dict[str, str]:
    return {name: str(text)[:TEXT_MAX] for name, text in texts.items()}


def _convert_to_milliseconds(seconds: float) -> int:
    return int(1000 * seconds)
