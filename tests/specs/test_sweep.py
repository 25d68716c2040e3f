"""Laws of sweeps in job files: all is checked before anything is stored, and each trial is the job with its values."""

from __future__ import annotations

from typing import Any

import pytest

from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import make_trial, parse_job, parse_job_data, parse_jobs

MODEL = """\
name: tune-{lr}
global_batch_size: 8
model:
  decoder: {vocab_size: 64, hidden_size: "{width}", intermediate_size: 64, num_hidden_layers: 1, num_attention_heads: 2}
data: {text: [/corpus.txt], sequence_length: 16}
training: {max_steps: 100, learning_rate: "{lr}"}
max_concurrent: 2
sweep:
  method: bayes
  metric: {name: loss, goal: minimize}
  parameters:
    lr: {min: 1e-5, max: 1e-2, distribution: log_uniform_values}
    width: {values: [32, 64]}
  max_trials: 20
  early_terminate: {type: hyperband, min_iter: 10}
"""
SCRIPT = """\
name: tune
global_batch_size: 8
command: python train.py --lr {lr} --tag run-{index}
sweep:
  method: grid
  metric: {name: accuracy, goal: maximize, log: "accuracy=(\\\\S+)"}
  parameters: {lr: {values: [0.1, 0.2]}}
"""


def first(text: str) -> JobSpec:
    (spec,) = parse_jobs(text, "sweep.yaml")
    return spec


def test_a_file_with_a_sweep_is_its_first_trial_and_makes_the_others() -> None:
    spec = first(MODEL)
    assert spec.trial is not None
    assert (spec.family_name, spec.trial.sweep.trials, spec.trial.max_concurrent) == ("tune", 20, 2)
    other = make_trial(spec, "sweep-tune-1", 3, {"lr": 0.004, "width": 64})
    assert other.trial is not None
    assert other.model is not None
    assert other.model.decoder is not None
    assert (other.name, other.training.learning_rate, other.model.decoder.hidden_size) == (
        "tune-0.004",
        0.004,
        64,
    )
    assert (other.trial.of, other.trial.number, dict(other.trial.parameters)) == (
        "sweep-tune-1",
        3,
        {"lr": 0.004, "width": 64},
    )
    assert parse_job_data(other.model_dump(mode="json"), "the journal") == other
    assert make_trial(other, "sweep-tune-1", 0, {"lr": 1e-5, "width": 32}).training == spec.training


def test_a_trial_of_a_script_has_its_values_and_its_number_in_the_command() -> None:
    spec = make_trial(first(SCRIPT), "sweep-tune-1", 1, {"lr": 0.2})
    assert spec.command == ("python", "train.py", "--lr", "0.2", "--tag", "run-1")


def test_a_grid_is_every_combination_in_the_order_of_an_array() -> None:
    text = SCRIPT.replace(
        "{lr: {values: [0.1, 0.2]}}", "{lr: {values: [0.1, 0.2]}, seed: {values: [0, 1, 2]}}"
    )
    sweep = first(text.replace("--tag", "--seed {seed} --tag")).trial.sweep  # type: ignore[union-attr]
    assert sweep.trials == 6
    combinations = [sweep.compute_grid_parameters(number) for number in range(6)]
    assert combinations == [{"lr": lr, "seed": seed} for lr in (0.1, 0.2) for seed in (0, 1, 2)]


def changed(text: str, *pairs: tuple[str, str]) -> str:
    for before, after in pairs:
        assert before in text, before
        text = text.replace(before, after)
    return text


WRONG: dict[str, tuple[str, tuple[str, str], str]] = {
    "method": (MODEL, ("bayes", "magic"), "not one of the possible values"),
    "no trials": (MODEL, ("max_trials: 20", "seed: 1"), "`bayes` needs `max_trials`"),
    "unused": (MODEL, ('"{width}"', "32"), "no part of the job says this parameter"),
    "range of a grid": (
        SCRIPT,
        ("{values: [0.1, 0.2]}", "{min: 0.1, max: 0.2}"),
        "a grid needs `values` of lr",
    ),
    "empty range": (MODEL, ("max: 1e-2", "max: 1e-6"), "a range needs `min` below `max`"),
    "log of zero": (MODEL, ("min: 1e-5", "min: 0"), "needs `min` above 0"),
    "two ways": (
        SCRIPT,
        ("{values: [0.1, 0.2]}", "{values: [0.1], min: 0.1, max: 0.2}"),
        "a parameter says `values`",
    ),
    "an extreme that no job has": (MODEL, ("values: [32, 64]", "values: [32, -1]"), "hidden_size"),
    "a path": (
        SCRIPT,
        ("--tag run-{index}", "\nworkdir: runs-{lr}"),
        "every trial has the same `workdir`",
    ),
    "a user": (
        SCRIPT,
        ("name: tune", "name: tune\nuser: ada{index}"),
        "every trial has the same `user`",
    ),
    "a script's metric": (
        SCRIPT,
        (', log: "accuracy=(\\\\S+)"', ""),
        "`sweep.metric.log` says which line",
    ),
    "a model's metric": (
        MODEL,
        ("name: loss", "name: accuracy"),
        "is one of loss, grad_norm, step_s",
    ),
    "a pattern": (SCRIPT, ("(\\\\S+)", "x"), "needs one group, around the value"),
    "an array too": (
        SCRIPT,
        ("sweep:", "array: {seed: [1]}\nsweep:"),
        "a file says `array` or `sweep`",
    ),
    "at once": (MODEL, ("max_concurrent: 2", "max_concurrent: 0"), "not a number of jobs"),
    "a key": (MODEL, ("max_trials", "max_trails"), "unknown key"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_what_is_wrong_is_said_at_once(wrong: str) -> None:
    text, change, message = WRONG[wrong]
    with pytest.raises(SpecError) as refused:
        parse_jobs(changed(text, change), "sweep.yaml")
    assert message in str(refused.value)


def test_a_sweep_is_no_single_job() -> None:
    with pytest.raises(SpecError, match="a sweep is many jobs"):
        parse_job(MODEL, "sweep.yaml")


def test_a_file_does_not_say_which_trial_it_is() -> None:
    data: Any = first(SCRIPT).model_dump(mode="json")["trial"]
    with pytest.raises(SpecError, match="which job of a sweep it is, is no setting"):
        parse_jobs(SCRIPT + f"trial: {data['number']}\n", "sweep.yaml")
