"""Laws of the choice among plans that are predicted alike."""

from __future__ import annotations

import math
from itertools import pairwise, product
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from orchestrator.planning.trust import (
    OTHER_SPREAD,
    RECOVERY_SPREAD,
    SPREAD_MAX,
    TIGHT,
    Choice,
    ChoiceRule,
    estimate_step_ratio_spread,
    make_plan_kind,
    rate_trust,
)
from orchestrator.service.commands.cards import parse_cards
from orchestrator.service.commands.plan import plan_job
from orchestrator.service.intake.intake import read_job
from orchestrator.specs.choices import (
    ActivationCheckpointing,
    Engine,
    Offload,
    ParallelLayout,
    Precision,
    ZeroStage,
)
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.errors import IllegalPlan
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.plan import Plan


def every_plan() -> list[Plan]:
    """Return legal plans on eight devices that differ in engine, sharding, layout, offload, recomputation and batch."""
    layouts = [
        ParallelLayout(dp=8),
        ParallelLayout(dp=4, tp=2),
        ParallelLayout(dp=4, pp=2),
        ParallelLayout(dp=4, cp=2),
    ]
    plans = []
    for engine, layout, stage, offload, mode, micro in product(
        (Engine.TORCH, Engine.DEEPSPEED),
        layouts,
        ZeroStage,
        Offload,
        ActivationCheckpointing,
        (1, 4),
    ):
        try:
            plans.append(
                Plan(
                    engine=engine,
                    layout=layout,
                    zero_stage=stage,
                    offload=offload,
                    activation_checkpointing=mode,
                    precision=Precision.BF16,
                    micro_batch_size=micro,
                    gradient_accumulation_steps=8 // micro,
                )
            )
        except IllegalPlan:
            continue
    return plans


PLANS = every_plan()
choices = st.lists(
    st.builds(
        Choice, st.sampled_from(PLANS), st.floats(1.0, 1.5), st.floats(0.1, 1.0), st.just(False)
    ),
    min_size=1,
    max_size=12,
    unique_by=lambda choice: choice.plan,
)


@given(choices)
def test_what_is_taken_is_never_slower_than_the_fastest_beyond_the_error_of_their_ratio(
    drawn: list[Choice],
) -> None:
    taken, fastest = (
        drawn[ChoiceRule().choose_plan_index(drawn)],
        min(drawn, key=lambda choice: choice.seconds),
    )
    assert math.log(taken.seconds / fastest.seconds) <= SPREAD_MAX + 1e-9


@given(choices)
def test_nothing_within_the_error_of_the_fastest_is_trusted_more_than_what_is_taken(
    drawn: list[Choice],
) -> None:
    taken, fastest = (
        drawn[ChoiceRule().choose_plan_index(drawn)],
        min(drawn, key=lambda choice: choice.seconds),
    )
    for choice in drawn:
        if math.log(choice.seconds / fastest.seconds) < estimate_step_ratio_spread(
            choice.plan, fastest.plan
        ):
            assert rate_trust(choice.plan) >= rate_trust(taken.plan)


@given(choices, st.randoms(use_true_random=False))
def test_the_order_in_which_plans_come_changes_nothing(drawn: list[Choice], random: object) -> None:
    seconds = {choice.seconds for choice in drawn}
    shuffled = list(drawn)
    random.shuffle(shuffled)  # type: ignore[attr-defined]
    if len(seconds) == len(drawn):
        assert (
            shuffled[ChoiceRule().choose_plan_index(shuffled)].plan
            == drawn[ChoiceRule().choose_plan_index(drawn)].plan
        )


@given(choices, st.floats(0.3, 1.0))
def test_a_first_plan_leaves_room_where_that_costs_little_and_moves_nothing_to_the_host(
    drawn: list[Choice], room: float
) -> None:
    taken = drawn[ChoiceRule(room=room).choose_plan_index(drawn)]
    tight = drawn[ChoiceRule().choose_plan_index(drawn)]
    limit_s = min(choice.seconds for choice in drawn) * math.exp(RECOVERY_SPREAD)
    roomy = [
        choice
        for choice in drawn
        if choice.fill <= room
        and choice.seconds <= limit_s
        and choice.plan.offload is Offload.NONE
        and choice.plan.layout.world_size == choice.plan.layout.dp
    ]
    assert taken.fill <= max(room, tight.fill)
    if roomy:
        assert taken.fill <= room
    if tight.fill <= room:
        assert taken == tight
    assert taken.seconds <= max(limit_s, tight.seconds)


@given(choices, st.floats(0.3, 1.0), st.data())
def test_no_plan_that_ran_here_leaves_for_more_room(
    drawn: list[Choice], room: float, data: st.DataObject
) -> None:
    ran = frozenset({data.draw(st.sampled_from(drawn)).plan})
    tight = drawn[ChoiceRule(incumbents=ran).choose_plan_index(drawn)]
    if tight.plan in ran:
        assert drawn[ChoiceRule(incumbents=ran, room=room).choose_plan_index(drawn)] == tight


FINETUNE = Path(__file__).parents[2] / "jobs" / "finetune" / "llama3_8b_lora.yaml"
SMALL = {
    "model_type": "llama",
    "vocab_size": 32000,
    "hidden_size": 2048,
    "intermediate_size": 5632,
    "num_hidden_layers": 22,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
}


def test_a_family_that_nobody_measured_leaves_room_and_names_the_tighter_plan() -> None:
    spec = read_job(FINETUNE, [("gpus", "2")], to_run=False)
    reply = plan_job(spec, make_idle_nodes(parse_cards("2xrtx3090-24gb")))
    assert reply["chosen"] is not None
    taken = reply["frontier"][reply["chosen"]]
    assert taken["needed_bytes"] <= TIGHT * taken["capacity_bytes"]
    assert "dp2 · FSDP2" in taken["plan"]  # as people run it there
    assert reply["passed_over"] is not None
    assert "more room" in reply["passed_over"]
    assert "of a device" in reply["passed_over"]


def test_a_model_that_fills_its_card_is_not_moved_to_the_host_for_room() -> None:
    job = {
        "name": "small",
        "model": {"hf": SMALL},
        "data": {"text": ["text"], "sequence_length": 2048},
        "global_batch_size": 64,
        "precision": "bf16",
    }
    reply = plan_job(parse_job_data(job, "test"), make_idle_nodes(parse_cards("rtx3090-24gb")))
    assert reply["chosen"] is not None
    assert reply["frontier"][reply["chosen"]]["settings"]["offload"] == "none"


@given(choices, st.data())
def test_a_plan_that_ran_here_stays_until_another_is_faster_beyond_the_error(
    drawn: list[Choice], data: st.DataObject
) -> None:
    ran = data.draw(st.sampled_from(drawn))
    taken, fastest = (
        drawn[ChoiceRule(incumbents=frozenset({ran.plan})).choose_plan_index(drawn)],
        min(drawn, key=lambda choice: choice.seconds),
    )
    stays = math.log(ran.seconds / fastest.seconds) <= estimate_step_ratio_spread(
        ran.plan, fastest.plan
    )
    assert (taken.plan == ran.plan) == stays


@given(choices, st.sampled_from(PLANS))
def test_after_an_out_of_memory_failure_engine_and_mechanics_stay_where_that_costs_little(
    drawn: list[Choice], before: Plan
) -> None:
    fastest = min(drawn, key=lambda choice: choice.seconds)
    taken = drawn[ChoiceRule(before=before).choose_plan_index(drawn)]
    alike = [choice for choice in drawn if make_plan_kind(choice.plan) == make_plan_kind(before)]
    if any(math.log(choice.seconds / fastest.seconds) < RECOVERY_SPREAD for choice in alike):
        assert make_plan_kind(taken.plan) == make_plan_kind(before)


@given(choices)
def test_who_wants_the_fastest_plan_gets_it(drawn: list[Choice]) -> None:
    taken = drawn[ChoiceRule(is_fastest=True).choose_plan_index(drawn)]
    assert taken.seconds == min(choice.seconds for choice in drawn)


@given(choices)
def test_across_nodes_only_plans_of_the_fastest_ones_kind_are_near(drawn: list[Choice]) -> None:
    crossing = [choice._replace(crosses_nodes=True) for choice in drawn]
    taken, fastest = (
        crossing[ChoiceRule().choose_plan_index(crossing)],
        min(crossing, key=lambda choice: choice.seconds),
    )
    assert (
        make_plan_kind(taken.plan) == make_plan_kind(fastest.plan)
        or taken.seconds == fastest.seconds
    )


@given(st.lists(st.floats(1.0, 100.0), min_size=1, max_size=6))
def test_more_devices_are_kept_where_they_gain_more_than_half_of_the_error(
    seconds: list[float],
) -> None:
    widths = [
        Choice(
            Plan(engine=Engine.TORCH, layout=ParallelLayout(dp=2**index), micro_batch_size=1),
            choice_s,
        )
        for index, choice_s in enumerate(seconds)
    ]
    indices = ChoiceRule().choose_indices_worth_devices(widths)
    assert indices[0] == 0
    for narrow, wide in pairwise(indices):
        spread = estimate_step_ratio_spread(widths[wide].plan, widths[narrow].plan)
        assert widths[wide].seconds * math.exp(spread / 2) < widths[narrow].seconds


@pytest.mark.parametrize("plan", PLANS[:40], ids=str)
def test_the_error_of_a_ratio_is_the_same_both_ways_and_within_what_was_measured(
    plan: Plan,
) -> None:
    for other in PLANS[::7]:
        assert (
            estimate_step_ratio_spread(plan, other)
            == estimate_step_ratio_spread(other, plan)
            <= max(OTHER_SPREAD, SPREAD_MAX)
        )
