"""A record holds what the job file or a knob says, and what was measured: no default of ours."""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from orchestrator.backends.mlflow.content import make_attempt_run_content, make_job_run_content
from orchestrator.specs.attempt import Evidence, Heartbeat, OomReport
from orchestrator.specs.choices import Engine, Offload, Precision, ZeroStage
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from tests.scheduling.factories import DEVICE, attempt, decoder_spec, job, script_spec

PLAN = Plan(engine=Engine.SCRIPT, micro_batch_size=32)
OF_THE_LAUNCH = {"engine", "gpus", "dp", "tp", "pp", "global_batch_size", "placement"}
REPORT = OomReport(
    rank=0,
    step=3,
    phase="forward",
    requested_bytes=8,
    live_bytes=250,
    capacity_bytes=256,
    steps_done=3,
    count=1,
)


def params(spec: JobSpec, plan: Plan = PLAN) -> tuple[Mapping[str, str], Mapping[str, str]]:
    """The params of the job's run, and of an attempt's."""
    of_job, of_plan = job(spec), replace(attempt(), plan=plan)
    return make_job_run_content(of_job, str, "").params, make_attempt_run_content(
        of_job, of_plan, str
    ).params


def test_a_script_that_says_nothing_is_recorded_without_defaults() -> None:
    of_job, of_attempt = params(script_spec())
    assert set(of_attempt) == OF_THE_LAUNCH
    assert "precision" not in of_job


@pytest.mark.parametrize(
    ("changes", "plan", "recorded"),
    [
        ({"knobs": {"micro_batch_size": {"flag": "-b"}}}, {}, {"micro_batch_size": "32"}),
        ({"knobs": {"precision": {"flag": "--dtype"}}}, {}, {"precision": "fp32"}),
        ({"precision": "bf16"}, {"precision": Precision.BF16}, {"precision": "bf16"}),
        ({"plan": {"zero_stage": 0}}, {}, {"zero_stage": "0"}),
        (
            {"knobs": {"deepspeed_config": {"flag": "--ds"}}},
            {"zero_stage": ZeroStage.OPTIMIZER, "offload": Offload.OPTIMIZER},
            {"zero_stage": "1", "offload": "optimizer", "offload_target": "cpu"},
        ),
    ],
)
def test_what_the_job_file_or_a_knob_says_of_a_script_is_recorded(
    changes: dict[str, object], plan: dict[str, object], recorded: dict[str, str]
) -> None:
    spec = JobSpec.model_validate(
        {"name": "script", "global_batch_size": 32, "command": "python train.py", **changes}
    )
    of_job, of_attempt = params(spec, replace(PLAN, **plan))  # type: ignore[arg-type]
    assert {
        name: value for name, value in of_attempt.items() if name not in OF_THE_LAUNCH
    } == recorded
    assert of_job.get("precision") == recorded.get("precision")


def test_every_setting_of_our_engines_is_recorded() -> None:
    of_job, of_attempt = params(
        decoder_spec(), replace(PLAN, engine=Engine.TORCH, micro_batch_size=8)
    )
    assert {
        "optimizer",
        "precision",
        "micro_batch_size",
        "activation_checkpointing",
        "offload",
    } <= set(of_attempt)
    assert of_job["precision"] == "fp32"


@pytest.mark.parametrize(
    ("raised", "fatal", "recorded"),
    [((1,), (0,), None), ((4,), (0,), "3"), ((2,), (), "2"), ((1, 1), (1,), "1"), ((), (), None)],
)
def test_an_error_that_ended_a_rank_does_not_count_as_caught(
    raised: tuple[int, ...], fatal: tuple[int, ...], recorded: str | None
) -> None:
    """`raised` errors by rank, of which the last ended each `fatal` rank."""
    evidence = Evidence(
        caught=tuple(replace(REPORT, rank=rank, count=count) for rank, count in enumerate(raised)),
        ooms=tuple(replace(REPORT, rank=rank) for rank in fatal),
    )
    content = make_attempt_run_content(
        job(script_spec()), replace(attempt(), plan=PLAN, evidence=evidence), str
    )
    assert content.tags.get("caught_ooms") == recorded


def test_a_measured_attempt_is_recorded_with_its_rates_its_device_seconds_and_what_it_was_trained_with() -> (
    None
):
    beats = (
        Heartbeat(
            rank=0, step=5, steps_done=5, step_s=0.5, peak_bytes=90, phase="forward", at_s=9.0
        ),
    )
    plan = Plan(engine=Engine.TORCH, micro_batch_size=8, sequence_length=128)
    measured_attempt = replace(
        attempt(), plan=plan, ended_at_s=11.0, evidence=Evidence(heartbeats=beats)
    )
    priced = DEVICE.model_copy(update={"price_per_hour": 3.6})
    content = make_attempt_run_content(job(decoder_spec()), measured_attempt, str, device=priced)
    held_s = 11.0 - measured_attempt.launched_at_s
    assert content.metrics["samples_per_s"] == 16.0
    assert content.metrics["tokens_per_s"] == 2048.0
    assert content.metrics["device_seconds"] == held_s
    assert content.metrics["cost"] == pytest.approx(3.6 * held_s / 3600)
    assert 0 < content.metrics["mfu"] < 1
    assert (content.params["learning_rate"], content.params["seed"]) == ("0.001", "0")
    assert (
        "learning_rate" not in make_attempt_run_content(job(script_spec()), attempt(), str).params
    )


ODD = (
    *("a", "é", "中", "\U0001f600", "\u202e", "\u2028", "\ufeff", "\x07", "\x1b[31m", "\r\n", "\t"),
    *("'", '"', "<script>", "%", "{", "}", "\\", "|", "`", "=HYPERLINK(", "; DROP TABLE runs;--"),
)


@pytest.mark.long
def test_whatever_stands_in_a_job_comes_back_from_mlflow_as_it_was_cut(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Draw texts for command, family, user and reason: no record is refused, and none comes back changed."""
    from mlflow.entities import Param, RunTag
    from mlflow.tracking import MlflowClient

    monkeypatch.setenv("MLFLOW_DISABLE_TELEMETRY", "true")
    client = MlflowClient(f"sqlite:///{tmp_path / 'mlflow.db'}")
    experiment = client.create_experiment("odd", artifact_location=str(tmp_path))
    draw = random.Random(11)
    for _ in range(60):
        text = "".join(draw.choices(ODD, k=draw.choice((1, 5, 40, 400, 9000))))
        changes = {"family": text[:200], "command": ("python", text), "user": text[:100]}
        record = job(decoder_spec())
        record = replace(record, spec=record.spec.model_copy(update=changes), reason=text)
        content = make_job_run_content(record, str, "")
        run = client.create_run(experiment).info.run_id
        tags = [RunTag(name, value) for name, value in content.tags.items()]
        params = [Param(name, value) for name, value in content.params.items()]
        client.log_batch(run, tags=tags, params=params)
        data = client.get_run(run).data
        assert content.tags.items() <= data.tags.items()
        assert data.params == content.params
