"""Laws of a plan's settings: a declared setting changes bytes or seconds, reaches the run, and has a class."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from dataclasses import replace
from itertools import chain
from pathlib import Path
from typing import Any

import pytest

import orchestrator
from orchestrator.memory.estimate import estimate
from orchestrator.planning.cost import predict_step_s
from orchestrator.planning.families import list_requested_settings
from orchestrator.planning.profiles import find_profile
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.specs.choices import (
    Degradation,
    Engine,
    Optimizer,
    ParallelLayout,
    Precision,
    Sharding,
    ZeroStage,
)
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.plan_fields import PlanFields
from orchestrator.specs.settings import SETTINGS, Setting, find_strongest_degradation
from tests.planning.test_strategies import DECODER, MIXTURE, job, machine

MACHINE = machine(nvme_folder="/nvme")
BY_FSDP = Plan(
    engine=Engine.SCRIPT,
    layout=ParallelLayout(dp=2),
    zero_stage=ZeroStage.PARAMETERS,
    sharding=Sharding.FSDP,
    micro_batch_size=1,
    sequence_length=128,
)
IN_8_BITS = Plan(
    engine=Engine.TORCH,
    precision=Precision.BF16,
    optimizer=Optimizer.ADAMW_8BIT,
    micro_batch_size=1,
    sequence_length=128,
)
MODELS = {"expert_parallel": MIXTURE}  # of a setting that not every model has
OUTSIDE_TRAINING = {"phase_batch_sizes"}  # neither the step nor its peak depends on it
PACKAGE = Path(orchestrator.__file__).parent
RUNS_A_PLAN = (*(PACKAGE / "training").rglob("*.py"), PACKAGE / "planning" / "render.py")


def others(setting: Setting, plan: Plan) -> Iterator[Plan]:
    """Return legal plans that differ from `plan` in the setting alone."""
    value = getattr(plan, setting.name)
    choices: tuple[Any, ...] = tuple(setting.choices.values())
    if setting.kind is ParallelLayout:
        choices = (
            replace(value, dp=2 * value.dp),
            replace(value, tp=2 * value.tp),
            replace(value, pp=2 * value.pp),
        )
    elif not choices:
        choices = (2 * value,) if value else ()
    for choice in choices:
        if choice != value:
            try:
                yield replace(plan, **{setting.name: choice})
            except IllegalPlan:
                continue


@pytest.mark.parametrize("setting", SETTINGS, ids=lambda setting: setting.name)
def test_every_declared_setting_of_training_has_a_memory_or_a_cost_term(setting: Setting) -> None:
    spec = job(MODELS.get(setting.name, DECODER))
    is_known = any(
        costs(spec, plan) != costs(spec, other)
        for plan in chain(list_plans(read_plan_request(spec), MACHINE), (BY_FSDP, IN_8_BITS))
        for other in others(setting, plan)
    )
    assert is_known != (setting.name in OUTSIDE_TRAINING)


def costs(spec: JobSpec, plan: Plan) -> tuple[object, ...]:
    profile = find_profile(read_plan_request(spec), MACHINE, plan)
    return estimate(profile, plan, MACHINE.device), predict_step_s(profile, plan, MACHINE)


def test_every_declared_setting_is_read_by_what_runs_a_plan() -> None:
    trees = [ast.parse(path.read_text()) for path in RUNS_A_PLAN]
    read = {
        node.attr for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Attribute)
    }
    if "mechanics" in read:
        read |= set(PlanFields.mechanics.fget.__code__.co_names)
    assert {setting.name for setting in SETTINGS} - read == set()


@pytest.mark.parametrize("allow", ["exact", "numeric", "semantic"])
def test_the_class_of_a_candidate_is_that_of_the_settings_in_which_it_differs(allow: str) -> None:
    degrade = {"allow": allow, "sequence_lengths": (64,) if allow == "semantic" else ()}
    spec = job(degrade=degrade, precision=Precision.FP32)
    candidates = find_frontier(read_plan_request(spec), MACHINE).candidates
    assert {candidate.degradation for candidate in candidates} == set(
        range(Degradation[allow.upper()] + 1)
    )
    assert all(
        candidate.degradation
        == find_strongest_degradation(
            list_requested_settings(read_plan_request(spec)), candidate.plan
        )
        for candidate in candidates
    )
