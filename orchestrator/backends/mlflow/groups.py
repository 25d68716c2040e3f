"""MLflow parent runs over several jobs: comparisons of strategies, and sweeps."""

from __future__ import annotations

import json
import threading
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from orchestrator.backends.attempts.metrics import iterate_metric_lines
from orchestrator.backends.mlflow.contact import Contact
from orchestrator.backends.mlflow.content import (
    describe_comparison,
    describe_sweep,
    make_comparison_key,
    make_comparison_url,
    make_sweep_key,
)
from orchestrator.backends.mlflow.frontier_png import draw_figure
from orchestrator.backends.ports import Lookups
from orchestrator.backends.redaction import Hide
from orchestrator.scheduling.reports.comparison import list_compared_job_ids, make_comparison
from orchestrator.scheduling.reports.comparison_rows import describe_strategy, parse_loss_curve
from orchestrator.scheduling.reports.sweep import SweepReport
from orchestrator.specs.attempt import Attempt
from orchestrator.specs.job_record import Job

if TYPE_CHECKING:
    from mlflow import MlflowClient
    from mlflow.entities import Run

COMPARISON_TAG = "orc.comparison"  # of the runs of strategies that are compared
SWEEP_TAG = "orc.sweep"  # of the runs of trials
SWEEP_OF_TAG = "orc.sweep_of"  # of the run of a sweep: its id
LINKED_MAX = 20  # trials that the link of a sweep compares: its address has all ids
RUNS_MAX = 1000  # of one comparison or sweep


class ParentRuns:
    """The parent runs in MLflow of a home's comparisons and sweeps."""

    def __init__(self, address: str, home: Path, lookups: Lookups) -> None:
        self._address = address
        self._home = home
        self._lookups = lookups
        self._sweeps: dict[str, str] = {}  # run -> id of each sweep that goes on
        self._lock = threading.Lock()  # jobs of one group may be sent at once

    def resume_sweep(self, run: Run) -> None:
        """Continue a sweep's parent run that an earlier process began; other runs are ignored."""
        tags = run.data.tags
        sweep = self._lookups.sweep(tags[SWEEP_OF_TAG]) if SWEEP_OF_TAG in tags else None
        if (
            sweep is not None
            and tags.get("orc.run") == f"sweep {make_sweep_key(sweep.id, sweep.submitted_at_s)}"
        ):
            self._sweeps.setdefault(run.info.run_id, sweep.id)  # else it is another home's

    def make_parent_tags(self, contact: Contact, job: Job) -> dict[str, str]:
        """Return the tags that put a job's runs below the parent run of its comparison or sweep; {}
        for other jobs.

        The parent run is created if it is missing.
        """
        if job.array is not None and job.spec.trial is not None:
            sweep = self._lookups.sweep(job.array)
            begun_s = job.submitted_at_s if sweep is None else sweep.submitted_at_s
            key = make_sweep_key(job.array, begun_s)
            tags = {"orc.run": f"sweep {key}", SWEEP_OF_TAG: job.array}
            run_id = self._find_or_create_run(contact, job.array, begun_s, tags)
            self._sweeps.setdefault(run_id, job.array)
            return {"mlflow.parentRunId": run_id, SWEEP_TAG: key}
        if job.array is None or not job.spec.is_compared:
            return {}
        key = make_comparison_key(job)
        tags = {"orc.run": f"comparison {key}", "orc.comparison_of": job.spec.family_name}
        return {
            "mlflow.parentRunId": self._find_or_create_run(
                contact, job.array, job.submitted_at_s, tags
            ),
            COMPARISON_TAG: key,
        }

    def _find_or_create_run(
        self, contact: Contact, run_name: str, begun_s: float, tags: dict[str, str]
    ) -> str:
        """Return the id of the parent run with the key `tags["orc.run"]`; create the run if it is
        missing.

        `begun_s` is its start in seconds since 1970.
        """
        key = tags["orc.run"]
        with self._lock:
            if key not in contact.run_ids:
                contact.run_ids[key] = contact.find_or_create_run(
                    key, int(1000 * begun_s), tags, run_name
                ).info.run_id
        return contact.run_ids[key]

    def end_sweeps(self, contact: Contact) -> None:
        """End the parent runs of finished sweeps once all of their trials' runs have ended; add a
        table of the trials.
        """
        for run_id, sweep_id in list(self._sweeps.items()):
            report = self._lookups.sweep(sweep_id)
            if report is None or not report.ended or report.live:
                continue
            key = make_sweep_key(sweep_id, report.submitted_at_s)
            runs = contact.client.search_runs(
                [contact.experiment_id], f"tags.`{SWEEP_TAG}` = '{key}'", max_results=RUNS_MAX
            )
            by_job = {
                run.data.tags.get("orc.job_id"): run
                for run in reversed(runs)
                if run.info.end_time is not None
            }
            if len(by_job) < len(report.trials):
                continue
            self._log_sweep(contact, run_id, report, by_job)
            contact.client.set_terminated(
                run_id, "FINISHED" if report.best is not None else "FAILED"
            )
            del self._sweeps[run_id]

    def _log_sweep(
        self,
        contact: Contact,
        run_id: str,
        report: SweepReport,
        run_by_job: Mapping[str | None, Run],
    ) -> None:
        for trial in report.trials:
            run = run_by_job[trial.job]
            if (
                trial.value is not None and report.metric not in run.data.metrics
            ):  # a script's, out of its log
                contact.client.log_metric(run.info.run_id, report.metric, trial.value)
            if trial.number == report.best and trial.value is not None:
                contact.client.log_metric(run_id, report.metric, trial.value)
                contact.client.set_tag(run_id, "best", trial.job)
        link = make_comparison_url(
            self._address,
            tuple(run_by_job[trial.job].info.run_id for trial in report.trials[:LINKED_MAX]),
            contact.experiment_id,
        )
        for name in ("method", "metric", "goal"):
            contact.client.log_param(run_id, name, getattr(report, name))
        contact.client.set_tag(run_id, "mlflow.note.content", describe_sweep(report, link))
        contact.client.log_text(run_id, json.dumps(asdict(report), indent=2), "sweep.json")

    def end_comparison(
        self, contact: Contact, job: Job, tags: Mapping[str, str], hide_secrets: Hide
    ) -> None:
        """If all jobs of the job's comparison have ended, end its parent run, with table, chart and
        result.
        """
        if job.spec.trial is None:
            with self._lock:
                self._end_comparison(contact, job, tags, hide_secrets)

    def _end_comparison(
        self, contact: Contact, job: Job, tags: Mapping[str, str], hide: Hide
    ) -> None:
        assert job.spec.member is not None, job.id
        key = tags[COMPARISON_TAG]
        run_id = tags["mlflow.parentRunId"]
        member_count = job.spec.member.of
        found_jobs = [
            job if job_id == job.id else self._lookups.job(job_id)
            for job_id in list_compared_job_ids(job)
        ]
        jobs = [member for member in found_jobs if member is not None]
        if len(jobs) < member_count or not all(member.status.ended for member in jobs):
            return
        runs = list_compared_runs(contact.client, contact.experiment_id, key)
        if (
            len({run.data.tags.get("orc.job_id") for run in runs if run.info.end_time is not None})
            < member_count
        ):
            return
        curves = {
            member.id: parse_loss_curve(iterate_metric_lines(self._home, member)) for member in jobs
        }
        report = make_comparison(self._lookups.state(), jobs, curves)
        link = make_comparison_url(
            self._address, tuple(run.info.run_id for run in reversed(runs)), contact.experiment_id
        )
        contact.client.set_tag(
            run_id, "mlflow.note.content", hide(describe_comparison(report, link))
        )
        rows = json.dumps([asdict(row) for row in report.rows], indent=2)
        contact.client.log_text(run_id, hide(rows), "comparison.json")
        if report.picture is not None:
            picture = draw_figure(f"Strategies of {report.name}", report.picture, "")
            contact.client.log_figure(run_id, picture, "comparison.png")
        contact.client.set_terminated(run_id, "FINISHED")


def make_attempt_run_name(job: Job, attempt: Attempt) -> str:
    """Return the name of an attempt's run within a comparison or sweep."""
    if job.spec.trial is None:
        member = job.spec.member
        strategy = describe_strategy(attempt.plan)
        return (
            f"{strategy}, repeat {member.repeat}"
            if member is not None and member.repeats > 1
            else strategy
        )
    return job.id if attempt.number == 1 else attempt.name


def list_trial_parameters(job: Job) -> dict[str, str]:
    """Return the hyperparameters of a trial's job, as parameters of its MLflow run; {} for other
    jobs.
    """
    return (
        {}
        if job.spec.trial is None
        else {name: str(value) for name, value in job.spec.trial.parameters}
    )


def list_compared_runs(client: MlflowClient, experiment_id: str, comparison_key: str) -> list[Run]:
    """Return the runs of a comparison's strategies, without the parent run."""
    return list(
        client.search_runs(
            [experiment_id], f"tags.`{COMPARISON_TAG}` = '{comparison_key}'", max_results=RUNS_MAX
        )
    )
