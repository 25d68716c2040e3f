"""Every reader of plans refuses an engine, or a way to share state, that is not described."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import inf
from typing import Any

import pytest
import torch

from orchestrator.memory.calibration.calibrate import calibrate
from orchestrator.memory.engines.overhead import estimate_overhead_bytes
from orchestrator.memory.engines.widths import compute_exchanged_bytes_per_gradient
from orchestrator.memory.estimate import estimate
from orchestrator.memory.profiles import uses_autocast
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.pareto import TimedPlan, find_pareto_front
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.render import (
    render_accelerate_config,
    render_deepspeed_config,
    render_script_command,
)
from orchestrator.planning.request import read_plan_request, read_script_request
from orchestrator.planning.search import list_plans
from orchestrator.planning.trust import rate_trust
from orchestrator.scheduling.base.shape import find_gang_shape
from orchestrator.scheduling.failures.degrade import estimate_bytes_per_parameter
from orchestrator.specs.choices import Engine, Precision, ZeroStage
from orchestrator.specs.device_kind import DeviceKind
from orchestrator.specs.engines import ENGINES
from orchestrator.specs.job.model import DataSpec, ModelSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.plan_fields import PlanFields
from orchestrator.specs.replace import replace
from orchestrator.specs.run import TrainingRun
from orchestrator.specs.settings import format_plan
from orchestrator.training import build
from orchestrator.training.engines import torch_engine
from tests.planning.test_search import SCRIPT, SIZES, job, machine
from tests.scheduling.factories import DEVICE, observation
from tests.training.gang import DECODER, TRAINING

MODEL_JOB, SCRIPT_JOB = (
    job({"model": {"decoder": SIZES}}, 4, (1, 0), "exact"),
    job(SCRIPT, 4, (1, 0), "exact"),
)
MACHINE = machine(DeviceKind.CUDA, 8, 1, "80GiB", nvme=False)
PLAN = Plan(engine=Engine.TORCH, precision=Precision.BF16, micro_batch_size=4, sequence_length=128)
PROFILE = find_profile(read_plan_request(MODEL_JOB), MACHINE, PLAN)
ESTIMATE = estimate(PROFILE, PLAN, MACHINE.device)
NOTHING: Any = None  # what is not looked at before the refusal


def loop(plan: Plan) -> object:
    model, data = ModelSpec(decoder=DECODER), DataSpec(text=("text",))
    folders = {"job_folder": "", "attempt_folder": ""}
    run = TrainingRun(
        model=model, data=data, training=TRAINING, plan=plan, epoch=1, device="cpu", **folders
    )
    return build._build_one_engine(NOTHING, run, NOTHING, torch.device("cpu"), None)


Reader = Callable[[Plan], object]
FORMULAS: dict[
    str, Reader
] = {  # which follow from the kind of mechanics, and not from what it states
    "bytes": lambda plan: estimate(PROFILE, plan, MACHINE.device),
    "seconds": lambda plan: predict_step_s(PROFILE, plan, MACHINE),
    "words": format_plan,
    "trust": rate_trust,
    "accelerate's file": lambda plan: render_accelerate_config(
        SCRIPT_JOB.knobs, plan, deepspeed_config_path=None
    ),
    "DeepSpeed's file": lambda plan: render_deepspeed_config(plan, clip_norm=None),
    "wrapped model": lambda plan: torch_engine._wrap_module(
        NOTHING, NOTHING, plan, NOTHING, NOTHING, None
    ),
}
STATEMENTS: dict[str, Reader] = {
    "overhead": estimate_overhead_bytes,
    "casts": uses_autocast,
    "bytes after an out-of-memory failure": estimate_bytes_per_parameter,
    "calibration": lambda plan: calibrate(
        [observation(plan=plan, step_ratio=1.0)], device=DEVICE.name, family="lm"
    ),
}
ENUMERATIONS: dict[str, Reader] = {
    "search of a model": lambda _: [*list_plans(read_plan_request(MODEL_JOB), MACHINE)],
    "loop": loop,
}
ROWS: dict[str, Reader] = {
    "legality": lambda plan: replace(plan, micro_batch_size=2),
    "width of gradients": compute_exchanged_bytes_per_gradient,
    "order": lambda plan: find_pareto_front(
        [TimedPlan(plan, 1.0, 1, 0.0), TimedPlan(plan, 2.0, 1, 0.0)], lambda _: ESTIMATE, inf
    ),
    "shape on nodes": lambda plan: find_gang_shape(plan, 8, 1),
    "script's command": lambda plan: render_script_command(
        read_script_request(SCRIPT_JOB),
        plan,
        output_dir="",
        resume_from=None,
        deepspeed_config_path=None,
    ),
    "search of a script": lambda _: [*list_plans(read_plan_request(SCRIPT_JOB), MACHINE)],
}


@dataclass(frozen=True)
class Invented:
    """A way to share state that states everything, and that no formula knows."""

    shards: int = 1
    stage: ZeroStage = ZeroStage.NONE
    autocasts: bool = False
    has_fp32_states: bool = False
    talks_alone: bool = False


@dataclass(frozen=True)
class Silent:
    """A way to share state that states nothing."""


@pytest.fixture
def plan(monkeypatch: pytest.MonkeyPatch) -> Plan:
    """Return a plan of an invented engine, which `Engine` lists."""
    engine = str.__new__(Engine, "invented")
    engine._name_, engine._value_ = "INVENTED", "invented"
    monkeypatch.setitem(Engine._member_map_, "INVENTED", engine)
    monkeypatch.setattr(Engine, "_member_names_", [*Engine._member_names_, "INVENTED"])
    plan = replace(PLAN)
    object.__setattr__(plan, "engine", engine)
    return plan


def test_every_engine_has_a_row() -> None:
    assert set(ENGINES) == set(Engine)


@pytest.mark.parametrize(
    "read", [*(FORMULAS | STATEMENTS | ENUMERATIONS | ROWS).items()], ids=lambda pair: pair[0]
)
def test_an_engine_without_a_row_is_refused(plan: Plan, read: tuple[str, Reader]) -> None:
    with pytest.raises(AssertionError, match="invented"):
        read[1](plan)


@pytest.mark.parametrize(
    "read", [*(FORMULAS | STATEMENTS | ENUMERATIONS).items()], ids=lambda pair: pair[0]
)
def test_an_engine_without_mechanics_is_refused(
    plan: Plan, read: tuple[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(ENGINES, plan.engine, ENGINES[Engine.TORCH])
    with pytest.raises(AssertionError, match="invented"):
        read[1](plan)


@pytest.mark.parametrize("read", [*FORMULAS.items()], ids=lambda pair: pair[0])
def test_mechanics_that_no_formula_knows_are_refused(
    read: tuple[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanFields, "mechanics", Invented())
    with pytest.raises(AssertionError, match="Invented"):
        read[1](PLAN)


@pytest.mark.parametrize("read", [*(FORMULAS | STATEMENTS).items()], ids=lambda pair: pair[0])
def test_mechanics_that_state_nothing_are_refused(
    read: tuple[str, Reader], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(PlanFields, "mechanics", Silent())
    with pytest.raises((AssertionError, AttributeError), match="Silent"):
        read[1](PLAN)
