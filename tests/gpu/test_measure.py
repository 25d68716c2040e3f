"""Laws of the measurements on a GPU: they run on a virtual device first."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

pytest.importorskip("pydantic", reason="the planner reads job files with pydantic")
pytest.importorskip("transformers")

from orchestrator.specs.choices import ActivationCheckpointing, Optimizer, Precision, ZeroStage
from orchestrator.specs.device_kind import DeviceKind
from tests.gpu import measure
from tests.gpu.configurations import GIB, Measurement, on_cpu, on_cuda

TOLERANCE = 0.03  # of a closed form, on a virtual device
TOLERANCE_ON_CUDA = 0.1


def test_at_least_sixty_trainings_show_everything_that_a_plan_chooses_between() -> None:
    every = list(on_cuda())
    assert len({measure.name_of(case) for case in every}) == len(every) >= 60
    plans = [case.plan for case in every]
    assert {plan.precision for plan in plans} == set(Precision)
    assert {plan.activation_checkpointing for plan in plans} == set(ActivationCheckpointing)
    assert {plan.optimizer for plan in plans} == set(Optimizer)
    assert {plan.zero_stage for plan in plans} == {ZeroStage.NONE, ZeroStage.PARAMETERS}
    assert {case.capacity_bytes // GIB for case in every} == {24, 40, 78, 138}
    assert {case.name.split()[0] for case in every} == {"0.1B", "0.4B", "1.3B", "3B", "8B"}
    assert {"3B LoRA", "8B QLoRA"} <= {case.name for case in every}
    beyond = [case for case in every if not case.fits(DeviceKind.CUDA)]
    assert 10 <= len(beyond) <= len(every) // 4, (
        "most are to run, some to show whether refusals were right"
    )


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=[pytest.mark.long] * (number == 0))
        for number, case in enumerate(on_cpu())
    ],
    ids=measure.name_of,
)
def test_a_training_is_measured_beside_what_was_predicted(case: Measurement) -> None:
    line = measure_or_skip(case, DeviceKind.VIRTUAL)
    assert line["outcome"] == (measure.RAN if line["fits"] else measure.RAN_OUT)
    if line["fits"]:
        assert line["measured"]["allocated_bytes"] == pytest.approx(
            line["predicted"]["allocated_bytes"], rel=TOLERANCE
        )
    else:
        assert line["asked_bytes"] + line["measured"]["allocated_bytes"] > case.capacity_bytes


@pytest.mark.parametrize(
    "case", [case for case in on_cuda() if case.name in ("0.4B", "3B")], ids=measure.name_of
)
def test_the_peak_on_a_cuda_device_is_as_predicted(case: Measurement) -> None:
    """Check some trainings before any calibration; `make bench-gpu` reports all, and what the device holds beside."""
    line = measure_or_skip(case, DeviceKind.CUDA)
    assert line["outcome"] in measure.OUTCOMES
    if line["outcome"] == measure.RAN:
        predicted_bytes = line["predicted"]["allocated_bytes"]
        assert line["measured"]["allocated_bytes"] == pytest.approx(
            predicted_bytes, rel=TOLERANCE_ON_CUDA
        )


def measure_or_skip(case: Measurement, kind: DeviceKind) -> measure.Line:
    facts = measure.device_facts(kind)
    if facts is None or facts["total_bytes"] < case.capacity_bytes:
        pytest.skip("needs a CUDA device with as much memory")
    return measure.measure_training(case, kind, facts)


def test_what_was_measured_before_is_not_measured_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    predicted = {f"{what}_bytes": 110 for what in ("allocated", "reserved", "overhead")}
    measurements = {"allocated_bytes": 100, "reserved_bytes": 220, "overhead_bytes": None}
    ends = (measure.RAN, measure.RAN_OUT)
    lines = [
        {
            "id": measure.name_of(case),
            "fits": True,
            "outcome": end,
            "predicted": predicted,
            "measured": measurements,
        }
        for case, end in zip(on_cpu(), ends, strict=True)
    ]
    file = tmp_path / "lines.jsonl"
    file.write_text("".join(json.dumps(line) + "\n" for line in lines))
    assert measure.main([str(file), "--cpu"]) == 0
    assert measure.read(file) == lines
    figures = {
        row["figure"]: (row["value"], row["holds"])
        for row in json.loads(measure.FIGURES.read_text())
    }
    assert figures["allocated: mean error"] == (pytest.approx(10.0), True)
    assert figures["reserved: furthest below"] == (pytest.approx(-50.0), True)
    assert "overhead: mean error" not in figures
    assert figures["said to fit, ran out of memory"] == (1, False)
    assert "NO" in capsys.readouterr().out
    file.write_text(json.dumps(lines[0]) + "\n")
    assert measure.main([str(file), "--cpu", "--seconds", "0"]) == 1, "time ran out"
    assert len(measure.read(file)) == 1
