"""A job whose file allows a smaller global batch goes on with it, and its learning rate follows; others ask."""

from __future__ import annotations

import pytest
import yaml

from orchestrator.planning.render import render_script_command
from orchestrator.planning.request import read_script_request
from orchestrator.scheduling.options.asks import apply_permissions, set_global_batch
from orchestrator.specs.actions import Archive
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import CancelRequested, RetryRequested
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import parse_job_data
from tests.scheduling.test_probe import Night, unknown

KNOBS = {
    "micro_batch_size": {"flag": "--batch", "default": 16},
    "learning_rate": {"flag": "--lr", "default": 0.1},
}


def smaller(allow: str = "semantic", least: int = 4, learning_rate: str = "linear") -> JobSpec:
    """Return a script without accumulation, of which 15 samples fit a device of 512 MiB."""
    degrade = {
        "allow": allow,
        "global_batch_size": {"least": least, "learning_rate": learning_rate},
    }
    return unknown(global_batch_size=16, knobs=KNOBS, degrade=degrade)


@pytest.mark.parametrize("is_carried", [True, False])
@pytest.mark.parametrize(
    ("rule", "rate"), [("linear", "0.05"), ("sqrt", "0.0707107"), ("same", "0.1")]
)
def test_a_job_goes_on_with_half_its_batch_and_the_learning_rate_that_follows(
    rule: str, rate: str, is_carried: bool
) -> None:
    night = Night(fixed=40, sample=30, is_carried=is_carried)
    night.submit(smaller(learning_rate=rule))
    night.end()
    job, (first, second) = night.job(), night.launched
    assert (first.plan.global_batch_size, second.plan.global_batch_size) == (16, 8)
    changes = {change.setting: (change.before, change.after) for change in second.change}
    assert len(changes) == len(second.change), "each setting once"
    assert changes["global_batch_size"] == ("16", "8")
    assert changes.get("learning_rate") == (None if rule == "same" else ("0.1", rate))
    command = render_script_command(
        read_script_request(job.spec),
        second.plan,
        output_dir="o",
        resume_from=None,
        deepspeed_config_path=None,
    )
    assert command.arguments[command.arguments.index("--lr") + 1] == rate
    night.end()
    assert "unknown-1" not in night.state.jobs, "it has ended"


def test_no_batch_is_cut_below_the_least_that_the_file_allows() -> None:
    night = Night(fixed=40, sample=100)
    night.submit(smaller(least=8))
    night.end()
    night.end()
    assert [attempt.plan.global_batch_size for attempt in night.launched] == [16, 8]
    assert not night.state.jobs, "it has failed"


def test_a_batch_is_cut_as_often_as_it_takes() -> None:
    night = Night(fixed=40, sample=100)
    night.submit(smaller(least=4))
    night.end()
    night.end()
    night.end()
    assert [attempt.plan.global_batch_size for attempt in night.launched] == [16, 8, 4]
    assert not night.state.jobs, "it has ended"


def test_a_job_that_does_not_allow_another_training_asks_and_goes_on_by_its_rule_once_allowed() -> (
    None
):
    night = Night(fixed=40, sample=30)
    night.submit(smaller(allow="exact"))
    night.end()
    job = night.job()
    assert job.status is JobStatus.QUEUED
    assert "`orc retry unknown-1 --allow semantic`" in job.asks
    assert "8 samples a step and a smaller learning rate 0.05" in job.asks
    assert job.answer == (("allow", "semantic"),)
    allowed = apply_permissions(job.spec, "semantic", None)
    night.tell(RetryRequested(job_id=job.id, spec=allowed, at_s=night.tick()))
    assert night.launched[-1].plan.global_batch_size == 8
    assert night.job().spec.learning_rate == pytest.approx(0.05)


def test_a_question_names_the_knob_by_which_the_same_training_would_go_on() -> None:
    night = Night(fixed=40, sample=30)
    night.submit(smaller(allow="exact"))
    night.end()
    knob = "with `gradient_accumulation_steps` as a knob the same training goes on"
    assert night.job().asks.startswith(
        f"no plan of the same training is left: {knob}. `orc retry unknown-1 --allow"
    )


def test_a_job_that_is_cancelled_while_it_asks_keeps_the_words_of_its_last_failure() -> None:
    night = Night(fixed=40, sample=30)
    night.submit(smaller(allow="exact"))
    night.end()
    assert night.job().asks
    failure = night.job().attempts[-1].failure
    assert failure is not None
    actions = night.scheduler.step(CancelRequested(job_id="unknown-1", at_s=night.tick()))
    (ended,) = [action.job for action in actions if isinstance(action, Archive)]
    assert ended.status is JobStatus.CANCELLED
    assert ended.reason == f"cancelled after attempt 1: device_oom: {failure.reason}"


@pytest.mark.parametrize(
    ("knob", "path"),
    [
        (None, "degrade.global_batch_size.learning_rate"),
        ({"flag": "--lr"}, "degrade.global_batch_size.learning_rate"),
        ({"flag": "--lr", "default": "fast"}, "knobs.learning_rate.default"),
        ({"flag": "--lr", "default": 0}, "knobs.learning_rate.default"),
        ({"flag": "--lr", "default": float("inf")}, "knobs.learning_rate.default"),
    ],
)
def test_a_learning_rate_that_nothing_tells_the_script_is_refused(
    knob: dict[str, object] | None, path: str
) -> None:
    knobs = {"micro_batch_size": KNOBS["micro_batch_size"]} | (
        {"learning_rate": knob} if knob else {}
    )
    rule = {"allow": "semantic", "global_batch_size": {"least": 4, "learning_rate": "linear"}}
    data = {
        "name": "a",
        "command": "python train.py",
        "global_batch_size": 16,
        "knobs": knobs,
        "degrade": rule,
    }
    with pytest.raises(SpecError) as refused:
        parse_job_data(data, "job")
    assert path in str(refused.value)


def test_who_allows_a_smaller_batch_is_told_the_learning_rate_that_follows_and_gets_it() -> None:
    night = Night(fixed=40, sample=30)
    night.submit(unknown(global_batch_size=16, knobs=KNOBS))
    night.end()
    job = night.job()
    assert job.asks is not None
    assert "--global-batch-size 8` goes on with 8 samples a step and the same" in job.asks
    assert "`--learning-rate linear` beside it makes that 0.05" in job.asks
    spec = apply_permissions(job.spec, None, 8, "linear")
    assert spec.learning_rate == 0.05
    night.tell(RetryRequested(job_id=job.id, spec=spec, at_s=night.tick()))
    changes = {change.setting: change.after for change in night.launched[-1].change}
    assert changes["learning_rate"] == "0.05"
    assert changes["global_batch_size"] == "8"


@pytest.mark.parametrize(
    ("batch", "what"), [(None, "a learning rate follows a batch"), (8, "nothing tells the script")]
)
def test_a_rule_of_the_learning_rate_without_effect_is_refused(
    batch: int | None, what: str
) -> None:
    spec = unknown(global_batch_size=16, knobs={"micro_batch_size": KNOBS["micro_batch_size"]})
    with pytest.raises(SpecError, match=what):
        apply_permissions(spec, None if batch else "semantic", batch, "linear")


def test_the_learning_rate_of_our_own_training_follows_with_the_end_of_its_schedule() -> None:
    spec = JobSpec.model_validate(
        {
            "name": "own",
            "global_batch_size": 64,
            "model": {"factory": "model.py:make"},
            "training": {"learning_rate": 0.4, "min_learning_rate": 0.04, "schedule": "cosine"},
            "degrade": {
                "allow": "semantic",
                "global_batch_size": {"least": 1, "learning_rate": "sqrt"},
            },
        }
    )
    cut = set_global_batch(spec, 16)
    assert (cut.global_batch_size, cut.training.learning_rate) == (16, pytest.approx(0.2))
    assert cut.training.min_learning_rate == pytest.approx(0.02)


@pytest.mark.parametrize("rate", [5e-5, 1e-3, 0.1, 2.5e-7, 1e20])
def test_a_learning_rate_is_a_number_for_every_reader_of_yaml(rate: float) -> None:
    knobs = {**KNOBS, "learning_rate": {"flag": "--lr", "default": rate}}
    night = Night(fixed=40, sample=10)
    night.submit(unknown(global_batch_size=16, knobs=knobs))
    command = render_script_command(
        read_script_request(night.job().spec), night.launched[-1].plan, output_dir="o", resume_from=None,
        deepspeed_config_path=None,
    )  # fmt: skip
    word = command.arguments[command.arguments.index("--lr") + 1]
    assert yaml.safe_load(word) == pytest.approx(rate)
