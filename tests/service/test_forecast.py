"""Laws of `orc plan` and `orc estimate`: they use observations, and every plan on offer can be estimated."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest

from orchestrator.memory.calibration.calibrate import CONFIDENCE
from orchestrator.planning.request import read_plan_request
from orchestrator.planning.search import find_frontier, list_plans
from orchestrator.scheduling.base.node_groups import group_equal_nodes
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import GIVEN, estimate_plan, parse_plan, plan_job
from orchestrator.specs.choices import Engine, Optimizer
from orchestrator.specs.cluster import Node, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.plan import Plan
from orchestrator.specs.settings import format_settings
from tests.planning.test_strategies import DECODER, MIXTURE, job, machine
from tests.scheduling.factories import MIB, decoder_spec, node, observation
from tests.scheduling.test_probe import Night, unknown
from tests.scheduling.world import CLUSTERS

FOLLOWS = {"gpus", "optimizer", "global_batch_size"}  # from the layout and the job


@pytest.mark.parametrize(
    ("model", "optimizer"),
    [(DECODER, Optimizer.ADAMW), (DECODER, Optimizer.SGD), (MIXTURE, Optimizer.ADAMW)],
)
def test_every_offered_plan_can_be_given_by_its_settings(
    model: dict[str, Any], optimizer: Optimizer
) -> None:
    spec = job(model, training={"optimizer": optimizer})
    offered = list(list_plans(read_plan_request(spec), machine(nvme_folder="/nvme")))
    assert len(offered) > 1000
    for plan in offered:
        pins = {name: text for name, text in format_settings(plan).items() if name not in FOLLOWS}
        assert pins.keys() <= set(GIVEN)
        assert parse_plan(spec, tuple(pins.items())) == plan


@pytest.mark.parametrize(
    ("model", "ep", "message"),
    [
        (DECODER, 2, "no experts of this model are known"),
        (MIXTURE, 4, "4 does not divide its 6 experts"),
    ],
)
def test_a_given_plan_spreads_only_experts_that_ranks_can_share(
    model: dict[str, Any], ep: int, message: str
) -> None:
    pins = (("dp", "4"), ("zero_stage", "3"), ("ep", str(ep)))
    with pytest.raises(SpecError, match=message):
        estimate_plan(job(model), pins, [node(devices=4)])


@pytest.mark.parametrize("model", [DECODER, MIXTURE])
def test_the_engine_is_derived_if_only_one_can_run_a_plan(model: dict[str, Any]) -> None:
    spec, engines = job(model), dict[Plan, list[Engine]]()
    for plan in list_plans(read_plan_request(spec), machine(nvme_folder="/nvme")):
        pins = {
            name: text
            for name, text in format_settings(plan).items()
            if name not in FOLLOWS | {"engine"}
        }
        engines.setdefault(parse_plan(spec, tuple(pins.items())), []).append(plan.engine)
    for engine, able in engines.items():
        assert engine.engine in able


def test_a_forecast_says_where_plans_of_another_kind_are_too_near_to_tell_and_proposes_to_compare() -> (
    None
):
    forecast = plan_job(job(gpus={"min": 2, "max": 2}), [node(devices=2)])
    assert forecast["chosen"] is not None
    taken = forecast["frontier"][forecast["chosen"]]
    near = [
        point
        for point in forecast["frontier"]
        if point["rejected"] is None and point["step_s"] <= 1.16 * taken["step_s"]
    ]
    kinds = {
        tuple(point["settings"][name] for name in ("engine", "dp", "tp", "pp", "zero_stage"))
        for point in near
    }
    assert len(kinds) > 1
    assert forecast["unsure"] is not None
    assert "orc compare" in forecast["unsure"]
    alone = plan_job(
        job(gpus={"min": 2, "max": 2}, plan={"dp": 2, "zero_stage": 3, "engine": "torch"}),
        [node(devices=2)],
    )
    assert alone["chosen"] is not None
    assert alone["unsure"] is None


@pytest.mark.parametrize(
    ("pins", "nodes", "experimental"),
    [
        ({"tp": 2}, make_idle_nodes(parse_cards("2xa100-80gb")), "tp"),
        ({"pp": 2}, make_idle_nodes(parse_cards("2xa100-80gb")), "pp"),
        ({"dp": 2}, make_idle_nodes(parse_cards("2xa100-80gb")), None),
        ({"tp": 2}, [node(devices=2)], None),
    ],
)
def test_a_plan_says_which_of_its_dimensions_no_machine_has_run(
    pins: dict[str, int], nodes: Sequence[Node], experimental: str | None
) -> None:
    plans = plan_job(job(gpus={"min": 2, "max": 2}, plan=pins), nodes)
    assert plans["chosen"] is not None
    if experimental is None:
        assert plans["experimental"] is None
    else:
        assert f"`--set plan.{experimental}=1` plans without" in str(plans["experimental"])


def test_measured_steps_scale_the_forecast_of_their_engine_alone() -> None:
    spec, nodes = decoder_spec(), [node()]
    taken = [
        observation(number=number, at_s=float(number), step_ratio=ratio)
        for number, ratio in enumerate((1.4, 1.5))
    ]
    plain, learned = plan_job(spec, nodes), plan_job(spec, nodes, taken)
    factors = {Engine.TORCH.value: 1.45, Engine.DEEPSPEED.value: 1.0}
    assert {point["settings"]["engine"] for point in plain["frontier"]} <= set(factors)
    for before, after in zip(plain["frontier"], learned["frontier"], strict=True):
        assert after["step_factor"] == pytest.approx(factors[before["settings"]["engine"]])
        assert after["step_s"] == pytest.approx(before["step_s"] * after["step_factor"])


def test_a_forecast_gives_fit_probabilities_and_never_takes_a_refuted_plan() -> None:
    spec, nodes = decoder_spec(), [node()]
    plain = plan_job(spec, nodes)
    assert plain["chosen"] is not None
    for point in plain["frontier"]:
        assert (point["rejected"] is None) == (point["fit_probability"] >= CONFIDENCE)
    first = next(
        candidate
        for candidate in find_frontier(
            read_plan_request(spec), group_equal_nodes(nodes)[0].hardware
        ).candidates
    )
    failed = observation(
        plan=first.plan,
        moments=(),
        predicted_bytes=first.estimate.allocated_bytes,
        measured_bytes=257 * MIB,
        ran_out=True,
    )
    kind = [observation(number=number, at_s=float(number)) for number in range(2, 9)]
    refuted = plan_job(spec, nodes, [failed, *kind])
    assert refuted["frontier"][0]["fit_probability"] == 0.0
    assert (
        refuted["frontier"][0]["rejected"]
        == "ran out of memory before, in another job of this family"
    )
    assert refuted["chosen"] != 0


def test_the_announced_probe_is_what_the_queue_launches_first() -> None:
    night, nodes = Night(), make_idle_nodes(CLUSTERS[0])
    spec = unknown()
    foretold = plan_job(spec, nodes)["probe"]
    night.submit(spec)
    assert night.launched[0].probe
    assert foretold is not None
    assert foretold["settings"] == format_settings(night.launched[0].plan)
    for _ in range(2):
        night.end()
    assert plan_job(spec, nodes, night.state.observations)["probe"] is None, "it is known by then"
    assert plan_job(unknown(probe="never"), nodes)["probe"] is None
    assert plan_job(decoder_spec(), nodes)["probe"] is None
