"""Laws of `orc estimate`: every plan that can be taken can also be asked about."""

from __future__ import annotations

import pytest

from orchestrator.planning.search import plans
from orchestrator.service.forecast import SETTINGS, given_plan
from orchestrator.specs.plan import Engine, Optimizer, Plan, settings
from tests.planning.test_strategies import job, machine

FOLLOWS = {"gpus", "optimizer", "global_batch_size"}  # from the layout and the job


@pytest.mark.parametrize("optimizer", [Optimizer.ADAMW, Optimizer.SGD])
def test_every_plan_that_is_offered_can_be_said_setting_by_setting(optimizer: Optimizer) -> None:
    spec = job(training={"optimizer": optimizer})
    offered = list(plans(spec, machine(nvme_folder="/nvme")))
    assert len(offered) > 1000
    for plan in offered:
        said = {name: text for name, text in settings(plan).items() if name not in FOLLOWS}
        assert said.keys() <= set(SETTINGS)
        assert given_plan(spec, tuple(said.items())) == plan


def test_the_engine_follows_where_only_one_can_run_a_plan() -> None:
    spec, engines = job(), dict[Plan, list[Engine]]()
    for plan in plans(spec, machine(nvme_folder="/nvme")):
        said = {name: text for name, text in settings(plan).items() if name not in FOLLOWS | {"engine"}}
        engines.setdefault(given_plan(spec, tuple(said.items())), []).append(plan.engine)
    for found, able in engines.items():
        assert found.engine in able
