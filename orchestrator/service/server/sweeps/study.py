"""Optuna's study of one sweep: it proposes parameters and stops trials early."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from orchestrator.specs.job.sweep import EarlyTerminate, Parameter, Sweep, Value

if TYPE_CHECKING:
    import optuna

REPORTS = 100  # of one trial, at steps that all trials share
REPORTED_STEPS = 1000  # where the length of a trial is not known: its first ones


class Study:
    """Optuna's study of one sweep, in memory. Equal trials in equal order give equal proposals."""

    def __init__(self, sweep_name: str, sweep: Sweep, trial_steps: int | None) -> None:
        """Make the study. `trial_steps` is the number of optimizer steps of a trial, None if
        unknown.

        `sweep_name` decides Hyperband's brackets.
        """
        import optuna

        optuna.logging.set_verbosity(optuna.logging.WARNING)
        self._optuna = optuna
        self._sweep = sweep
        self._steps = trial_steps
        self._study = optuna.create_study(
            study_name=sweep_name,
            direction=sweep.metric.goal,
            pruner=_make_pruner(sweep.early_terminate, trial_steps),
        )
        self._trials: list[optuna.Trial] = []
        self._reported: dict[int, int] = {}  # last step by number
        self._distributions = {
            sweep_name: _make_distribution(parameter) for sweep_name, parameter in sweep.parameters
        }

    def propose_or_register_trial(
        self, earlier_parameters: Mapping[str, Value] | None = None
    ) -> dict[str, Value]:
        """Return the parameters of the next trial.

        With `earlier_parameters`, register a trial that had these before a restart, and return
        them.
        """
        number = len(self._trials)
        if self._sweep.method == "grid" and earlier_parameters is None:
            earlier_parameters = self._sweep.compute_grid_parameters(number)
        if earlier_parameters is not None:
            self._study.enqueue_trial(dict(earlier_parameters))
        self._study.sampler = self._make_sampler(number)
        trial = self._study.ask(self._distributions)
        self._trials.append(trial)
        return dict(trial.params)

    def report_value(self, trial_number: int, step: int, value: float) -> bool:
        """Report the value of a trial's metric at a step; return whether the trial should be
        stopped early.
        """
        if (
            self._sweep.early_terminate is None
            or not self._are_trials_compared_at(step)
            or step <= self._reported.get(trial_number, -1)
        ):
            return False
        self._reported[trial_number] = step
        self._trials[trial_number].report(value, step)
        return bool(self._trials[trial_number].should_prune())

    def record_end(
        self, trial_number: int, value: float | None, *, was_stopped_early: bool = False
    ) -> None:
        """Record that a trial ended: with a value, stopped early, or without a value (None)."""
        states = self._optuna.trial.TrialState
        if was_stopped_early:
            self._study.tell(self._trials[trial_number], state=states.PRUNED)
        elif value is None or value != value:
            self._study.tell(self._trials[trial_number], state=states.FAIL)
        else:
            self._study.tell(self._trials[trial_number], value)

    def _are_trials_compared_at(self, step: int) -> bool:
        """Return whether trials are compared at this step, to stop the worse ones; never at the
        last step.
        """
        if self._steps is None:
            return step <= REPORTED_STEPS
        return step < self._steps and step % max(1, self._steps // REPORTS) == 0

    def _make_sampler(self, trial_number: int) -> optuna.samplers.BaseSampler:
        """Return a sampler that is seeded by the trial's number, so that a restart changes
        nothing.
        """
        seed = self._sweep.seed + trial_number
        if self._sweep.method == "bayes":
            return self._optuna.samplers.TPESampler(seed=seed)
        return self._optuna.samplers.RandomSampler(seed=seed)


def _make_pruner(rule: EarlyTerminate | None, steps: int | None) -> Any:
    import optuna

    if rule is None:
        return optuna.pruners.NopPruner()
    if rule.type == "median":
        return optuna.pruners.MedianPruner(
            n_startup_trials=rule.startup_trials, n_warmup_steps=rule.min_iter
        )
    most = steps if rule.max_iter is None else rule.max_iter
    return optuna.pruners.HyperbandPruner(
        min_resource=rule.min_iter,
        max_resource="auto" if most is None else most,
        reduction_factor=rule.eta,
    )


def _make_distribution(parameter: Parameter) -> Any:
    import optuna

    if parameter.choices:
        return optuna.distributions.CategoricalDistribution(parameter.choices)
    low, high = parameter.extremes
    is_log = parameter.distribution == "log_uniform_values"
    if parameter.is_whole:
        return optuna.distributions.IntDistribution(int(low), int(high), log=is_log)
    return optuna.distributions.FloatDistribution(float(low), float(high), log=is_log)
