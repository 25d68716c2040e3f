"""Runs sweeps: submits their trials, reports metric values to the study, and stops hopeless trials.

The journal has the trials and how they ended; files of the attempts have their curves. A study is made anew from these
after a restart.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from orchestrator.backends.journal.sweeps import Sweeps, TrialRow
from orchestrator.scheduling.reports.sweep import SweepReport, make_sweep_report, was_stopped_early
from orchestrator.service.server.controller import Controller
from orchestrator.service.server.polling import poll_until
from orchestrator.service.server.sweeps.study import Study
from orchestrator.service.server.sweeps.trial_curve import MetricCurve
from orchestrator.service.server.sweeps.trials import (
    ComingTrials,
    list_coming_trials,
    trace_model_of_trial,
)
from orchestrator.specs.errors import OrchestratorError, ServiceError, SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job.sweep import STOPPED_EARLY, SWEEP, Trial
from orchestrator.specs.job_record import Job, JobStatus
from orchestrator.specs.parse import make_trial

LOOK_S = 1.0  # between two looks at the curves of running trials
# first trials that all fail: the program is to blame (wandb/agents/pyagent.py has the same number)
FAILURES_MAX = 5
SHOWN_MAX = 50  # sweeps of a list, the newest first
ERRORS_MAX = 5
REASON_MAX = 500  # characters
FINISHED = "finished"
CANCELLED = "cancelled"

log = logging.getLogger(__name__)


@dataclass(slots=True)
class _Running:
    """A sweep that this process runs: its study, and the metric curves of its trials."""

    first: JobSpec
    trial: Trial  # the first
    study: Study
    curves: dict[int, MetricCurve] = field(
        default_factory=dict
    )  # of the trials that have not ended
    over: dict[int, JobStatus] = field(default_factory=dict)  # of the trials that have
    next_number: int = 0  # of the trial that the study proposes next


class Sweeper:
    """Runs a service's sweeps: submits their trials, and stops those that are worse. Every method
    is thread-safe.
    """

    def __init__(self, controller: Controller, sweeps: Sweeps, home: Path) -> None:
        """Make the sweeper; nothing is submitted before `advance_sweeps`."""
        self._controller = controller
        self._sweeps = sweeps
        self._home = home
        self._running: dict[str, _Running] = {}
        self._over: dict[str, SweepReport] = {}  # of the newest, those that do not change any more
        self._errors: dict[str, int] = {}  # in a row, by sweep
        self._lock = threading.Lock()

    def run(self, stop: threading.Event) -> None:
        """Call `advance_sweeps` every LOOK_S seconds until `stop` is set."""
        poll_until(stop, self.advance_sweeps, LOOK_S, log, "looking after sweeps failed")

    def make_first_trial(self, sweep_spec: JobSpec) -> JobSpec:
        """Return the first trial of a sweep that is being submitted, with its parameters filled
        in.
        """
        assert sweep_spec.trial is not None, sweep_spec.name
        if (
            sweep_spec.trial.of is not None
            or sweep_spec.trial.number > 0
            or sweep_spec.trial.parameters
        ):
            raise SpecError(
                "a trial of a sweep that exists is submitted by the service alone", path="sweep"
            )
        return trace_model_of_trial(
            make_trial(
                sweep_spec,
                None,
                0,
                Study("", sweep_spec.trial.sweep, None).propose_or_register_trial(),
            ),
            self._home,
        )

    def advance_sweeps(self) -> None:
        """Advance each open sweep: submit the trials for which it has room, and report new metric
        values to its study.

        A sweep that fails ERRORS_MAX times in succession is ended.
        """
        for sweep_id in self._sweeps.list_open_sweeps():
            with self._lock:
                if (
                    self._sweeps.find_end_reason(sweep_id) != ""
                ):  # somebody has cancelled it meanwhile
                    continue
                try:
                    self._advance_sweep(sweep_id)
                except ServiceError:
                    raise
                except Exception as error:  # the edge of a sweep: others go on
                    log.exception("sweep %s", sweep_id)
                    self._running.pop(sweep_id, None)  # made anew from what the journal has
                    self._errors[sweep_id] = self._errors.get(sweep_id, 0) + 1
                    if self._errors[sweep_id] >= ERRORS_MAX:
                        self._end_sweep(
                            sweep_id,
                            f"its search failed: {type(error).__name__}: {error}"[:REASON_MAX],
                        )
                else:
                    self._errors.pop(sweep_id, None)

    def cancel_sweep(self, sweep_id: str) -> list[str]:
        """End a sweep and cancel its live trials; return the ids of these. Raises ServiceError if
        it is ended or unknown.
        """
        with self._lock:
            ended = self._sweeps.find_end_reason(sweep_id)
            if ended is None:
                raise ServiceError(f"there is no sweep {sweep_id!r}: `orc queue` lists them")
            if ended:
                raise ServiceError(f"the sweep {sweep_id} has ended already: {ended}")
            self._end_sweep(sweep_id, CANCELLED)
            live = [
                job.id
                for job in self._find_jobs(self._sweeps.list_trials(sweep_id))
                if not job.status.ended
            ]
            return self._controller.cancel_jobs(live) if live else []

    def find_open_sweep_id(self, job_or_sweep_id: str) -> str | None:
        """Return the id of the open sweep with this id, or to which the job with this id belongs;
        None without one.
        """
        job = self._controller.find_job(job_or_sweep_id)
        sweep_id = (
            job_or_sweep_id if job is None else job.array if job.spec.trial is not None else None
        )
        return (
            sweep_id
            if sweep_id is not None and self._sweeps.find_end_reason(sweep_id) == ""
            else None
        )

    def has_sweep(self, sweep_id: str) -> bool:
        """Return whether a sweep with this id exists or existed."""
        return sweep_id.startswith(SWEEP) and self._sweeps.find_end_reason(sweep_id) is not None

    def make_report(self, sweep_id: str) -> SweepReport | None:
        """Return the report of a sweep, with its trials; None for an unknown sweep."""
        if sweep_id in self._over:
            return self._over[sweep_id]
        ended = self._sweeps.find_end_reason(sweep_id)
        if ended is None:
            return None
        rows = self._sweeps.list_trials(sweep_id)
        running = self._running.get(sweep_id)
        jobs = self._find_jobs(rows)
        values = {row.number: row.value for row in rows}
        if running is not None:
            values |= {
                number: curve.last
                for number, curve in dict(running.curves).items()
                if curve.last is not None
            }
        report = make_sweep_report(
            sweep_id, ended, jobs, values, self._controller.state, self._controller.get_now_s()
        )
        if ended and not report.live:
            self._over[sweep_id] = report
        return report

    def make_reports(self) -> list[SweepReport]:
        """Return the reports of the most recent sweeps, newest first."""
        newest = self._sweeps.list_newest_sweeps(SHOWN_MAX)
        reports = [
            report for sweep_id in newest if (report := self.make_report(sweep_id)) is not None
        ]
        self._over = {
            sweep_id: report for sweep_id, report in self._over.items() if sweep_id in newest
        }
        return reports

    def list_coming_trials(self) -> ComingTrials:
        """Return {id of open sweep: trials that it has yet to submit}."""
        return list_coming_trials(self._sweeps, self._controller.find_job, self._home)

    def _find_jobs(self, rows: Sequence[TrialRow]) -> list[Job]:
        jobs = (self._controller.find_job(row.job) for row in rows)
        return [job for job in jobs if job is not None]

    def _advance_sweep(self, sweep_id: str) -> None:
        rows = self._sweeps.list_trials(sweep_id)
        jobs = {
            row.number: self._controller.find_job(row.job)
            for row in rows
            if not self._is_trial_over(sweep_id, row.number)
        }
        if None in jobs.values():  # it is being committed
            return
        running = self._running.get(sweep_id) or self._resume_sweep(sweep_id, rows)
        for job in jobs.values():
            assert job is not None, sweep_id
            self._report_trial(running, job)
        over = list(running.over.values())
        if len(over) >= FAILURES_MAX and not {*over} - {JobStatus.FAILED, JobStatus.REFUSED}:
            self._end_sweep(sweep_id, f"its first {len(over)} trials failed")
            return
        live = len(rows) - len(over)
        number = len(rows)
        while number < running.trial.sweep.trials and live < running.trial.max_concurrent:
            if not self._submit_trial(running, sweep_id, number):
                return
            live = live + 1
            number = number + 1
        if not live:
            self._end_sweep(sweep_id, FINISHED)

    def _is_trial_over(self, sweep_id: str, trial_number: int) -> bool:
        return sweep_id in self._running and trial_number in self._running[sweep_id].over

    def _resume_sweep(self, sweep_id: str, rows: Sequence[TrialRow]) -> _Running:
        first = self._controller.find_job(rows[0].job)
        assert first is not None, sweep_id
        trial = first.spec.trial
        assert trial is not None, sweep_id
        running = _Running(
            first.spec, trial, Study(sweep_id, trial.sweep, first.spec.optimizer_steps)
        )
        self._running[sweep_id] = running
        return running

    def _submit_trial(self, running: _Running, sweep_id: str, trial_number: int) -> bool:
        """Submit the sweep's next trial, and return True; False where the sweep has ended
        instead.
        """
        assert running.next_number == trial_number, (running.next_number, trial_number)
        parameters = running.study.propose_or_register_trial()
        running.next_number += 1
        try:
            self._controller.submit(
                trace_model_of_trial(
                    make_trial(running.first, sweep_id, trial_number, parameters), self._home
                )
            )
        except OrchestratorError as error:
            self._running.pop(sweep_id, None)  # its study has a trial that the queue lacks
            if not isinstance(error, SpecError):
                raise
            self._end_sweep(
                sweep_id, f"trial {trial_number} was refused: {error}"[:REASON_MAX]
            )  # as by a deadline that is over
            return False
        return True

    def _report_trial(self, running: _Running, job: Job) -> None:
        """Report a trial's new metric values, and its end, to the study."""
        trial = job.spec.trial
        assert trial is not None, job.id
        if trial.number == running.next_number:
            running.study.propose_or_register_trial(dict(trial.parameters))
            running.next_number += 1
        curve = running.curves.setdefault(trial.number, MetricCurve(self._home, job.id))
        hopeless = [
            step
            for step, value in curve.iterate_new_points(job)
            if running.study.report_value(trial.number, step, value)
        ]
        if job.status.ended:
            value = curve.last if job.status is JobStatus.SUCCEEDED else None
            running.study.record_end(trial.number, value, was_stopped_early=was_stopped_early(job))
            if curve.last is not None:
                self._sweeps.store_metric_value(job.id, curve.last)
            running.over[trial.number] = job.status
            del running.curves[trial.number]
        elif hopeless and not job.cancelling:
            name = trial.sweep.metric.name
            self._controller.cancel_with_reason(
                job.id, f"{STOPPED_EARLY} at step {hopeless[0]}: other trials had a better {name}"
            )

    def _end_sweep(self, sweep_id: str, reason: str) -> None:
        self._sweeps.mark_ended(sweep_id, reason)
        self._running.pop(sweep_id, None)
        log.info("sweep %s has ended: %s", sweep_id, reason)
