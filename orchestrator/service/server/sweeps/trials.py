"""The trials of a sweep, and those still to submit."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from orchestrator.backends.journal.sweeps import Sweeps
from orchestrator.memory.profiles import is_memory_known
from orchestrator.service.intake.profiling import TraceScope, trace_model
from orchestrator.service.server.sweeps.study import Study
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import Job
from orchestrator.specs.parse import make_trial

ComingTrials = Mapping[
    str, Sequence[JobSpec]
]  # trials still to submit, by the id of their open sweep


def trace_model_of_trial(spec: JobSpec, home: Path) -> JobSpec:
    """Return the trial with the traced memory of its model, if that needs a trace: parameters may
    change the model.

    Raises SpecError where the trace fails.
    """
    bare = spec.model_copy(update={"traced": ()})
    if spec.known_model is None or is_memory_known(bare):
        return spec
    return spec.model_copy(update={"traced": trace_model(bare, home, spec.name, TraceScope())})


def list_remaining_trials(
    first_trial: JobSpec, sweep_id: str, home: Path, begun_trials: Sequence[JobSpec] = ()
) -> tuple[JobSpec, ...]:
    """Return the trials of a sweep except `begun_trials`, up to the first one with illegal
    parameters.

    Choices of method `bayes` depend on unknown values, so random ones are drawn. Raises SpecError
    where the first trial still to be submitted is illegal.
    """
    assert first_trial.trial is not None, first_trial.name
    study = Study(sweep_id, first_trial.trial.sweep, None)
    specs = list[JobSpec]()
    for spec in begun_trials:
        assert spec.trial is not None, spec.name
        study.propose_or_register_trial(dict(spec.trial.parameters))
    for number in range(len(begun_trials), first_trial.trial.sweep.trials):
        try:
            specs.append(
                trace_model_of_trial(
                    make_trial(first_trial, sweep_id, number, study.propose_or_register_trial()),
                    home,
                )
            )
        except SpecError:
            if not begun_trials and not specs:
                raise
            break  # as the sweep ends there
    return tuple(specs)


def list_coming_trials(
    sweeps: Sweeps, find_job: Callable[[str], Job | None], home: Path
) -> ComingTrials:
    """Return {id of open sweep: trials that it has yet to submit}."""
    trials = {}
    for sweep_id in sweeps.list_open_sweeps():
        begun = [
            trial.spec
            for row in sweeps.list_trials(sweep_id)
            if (trial := find_job(row.job)) is not None
        ]
        trials[sweep_id] = list_remaining_trials(begun[0], sweep_id, home, begun)
    return trials
