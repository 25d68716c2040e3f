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

ToCome = Mapping[str, Sequence[JobSpec]]  # trials still to submit, by the id of their open sweep


def with_costs(spec: JobSpec, home: Path) -> JobSpec:
    """Return the job with its model's traced costs if it needs a trace, since parameters may change them.

    Raises SpecError where the trace fails.
    """
    bare = spec.model_copy(update={"traced": ()})
    if spec.known_model is None or is_memory_known(bare):
        return spec
    return spec.model_copy(update={"traced": trace_model(bare, home, spec.name, TraceScope())})


def trials_of(
    first: JobSpec, sweep_id: str, home: Path, begun: Sequence[JobSpec] = ()
) -> tuple[JobSpec, ...]:
    """Return the trials of a sweep without those in `begun`, up to the first with illegal parameters.

    Choices of method `bayes` depend on unknown values, so random ones are drawn. Raises SpecError where the first trial
    still to come is illegal.
    """
    assert first.trial is not None, first.name
    study = Study(sweep_id, first.trial.sweep, None)
    specs = list[JobSpec]()
    for spec in begun:
        assert spec.trial is not None, spec.name
        study.ask(dict(spec.trial.parameters))
    for number in range(len(begun), first.trial.sweep.trials):
        try:
            specs.append(with_costs(make_trial(first, sweep_id, number, study.ask()), home))
        except SpecError:
            if not begun and not specs:
                raise
            break  # as the sweep ends there
    return tuple(specs)


def to_come(sweeps: Sweeps, job: Callable[[str], Job | None], home: Path) -> ToCome:
    """Return {open sweep id: trials still to submit}."""
    trials = {}
    for sweep_id in sweeps.open():
        begun = [
            trial.spec for row in sweeps.trials(sweep_id) if (trial := job(row.job)) is not None
        ]
        trials[sweep_id] = trials_of(begun[0], sweep_id, home, begun)
    return trials
