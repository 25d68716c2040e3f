"""A rule of legality stands once, in specs.engines: search, copies and degradation obey a new one at once."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings

from orchestrator.planning import search
from orchestrator.planning.cost import Hardware
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.specs.choices import ActivationCheckpointing, Engine, ZeroStage
from orchestrator.specs.engines import find_plan_violation
from orchestrator.specs.errors import IllegalPlan, SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.plan import Plan
from orchestrator.specs.replace import replace
from tests.planning.test_search import jobs, machines

PLANTED: dict[str, Callable[[Plan], bool]] = {
    "of the batch": lambda plan: plan.micro_batch_size == 4,
    "of the layout": lambda plan: plan.layout.dp == 2,
    "of checkpointing": lambda plan: (
        plan.activation_checkpointing is ActivationCheckpointing.SELECTIVE
    ),
    "of sharding": lambda plan: plan.zero_stage is ZeroStage.GRADIENTS,
    "of a part of the layers": lambda plan: plan.full_checkpointing_layers % 2 == 1,
    "of the ends of a pipeline": lambda plan: plan.first_stage_layers > 0,
    "of two settings": lambda plan: (
        plan.gradient_accumulation_steps > 1 and plan.activation_offload
    ),
}


def plant(monkeypatch: pytest.MonkeyPatch, is_illegal: Callable[[Plan], bool]) -> None:
    judge = find_plan_violation
    monkeypatch.setattr(
        "orchestrator.specs.plan.find_plan_violation",
        lambda plan: "planted" if is_illegal(plan) else judge(plan),
    )


def forget() -> None:
    """Clear the frontiers that other rules made."""
    search._get_cached_frontier.cache_clear()
    search._build_frontier_at_speeds.cache_clear()


@pytest.mark.parametrize("rule", PLANTED)
@settings(
    max_examples=8,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(spec=jobs, hardware=machines)
def test_a_planted_rule_is_obeyed_by_the_search_at_once(
    rule: str, spec: JobSpec, hardware: Hardware
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        forget()
        plant(patch, PLANTED[rule])
        try:
            offered = [
                *list_plans(read_plan_request(spec), hardware),
                *(
                    candidate.plan
                    for candidate in find_frontier(read_plan_request(spec), hardware).candidates
                ),
            ]
        except SpecError:  # no batch of it can be cut, or no legal plan is left
            return
        finally:
            forget()
    assert [plan for plan in offered if PLANTED[rule](plan)] == []


def test_a_copy_of_a_plan_is_judged(monkeypatch: pytest.MonkeyPatch) -> None:
    plan = Plan(engine=Engine.TORCH, micro_batch_size=2)
    plant(monkeypatch, PLANTED["of the batch"])
    with pytest.raises(IllegalPlan, match="planted"):
        replace(plan, micro_batch_size=4)
    assert replace(plan, micro_batch_size=8).micro_batch_size == 8
