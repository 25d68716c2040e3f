"""A `policy:` says who shares the cluster; what it says wrongly is one clear error."""

from __future__ import annotations

import pytest

from orchestrator.service.intake.intake import EMBEDDED_CLUSTER
from orchestrator.specs.errors import SpecError
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.policy import Objective

POLICY = """
policy:
  half_life: 2d
  teams:
    - name: vision
      shares: 3
      users: [ada, bob]
"""


def test_users_are_in_the_team_that_names_them_and_all_others_in_one() -> None:
    policy = parse_cluster(EMBEDDED_CLUSTER + POLICY, "c.yaml").policy
    assert policy.half_life == 2 * 86_400
    assert [policy.find_team(user).name for user in ("ada", "bob", "cyd", "")] == [
        "vision",
        "vision",
        "others",
        "others",
    ]
    assert policy.find_team("cyd").shares == 1
    more = parse_cluster(
        EMBEDDED_CLUSTER + POLICY + "    - {name: others, shares: 5}\n", "c.yaml"
    ).policy
    assert more.find_team("cyd").shares == 5


def test_a_cluster_is_shared_where_teams_are_named() -> None:
    assert parse_cluster(EMBEDDED_CLUSTER + POLICY, "c.yaml").policy.has_teams
    assert not parse_cluster(EMBEDDED_CLUSTER, "c.yaml").policy.has_teams
    assert not parse_cluster(
        EMBEDDED_CLUSTER + "\npolicy: {objective: makespan}\n", "c.yaml"
    ).policy.has_teams


def test_the_queue_aims_at_the_mean_completion_unless_the_file_says_the_makespan() -> None:
    assert (
        parse_cluster(EMBEDDED_CLUSTER + POLICY, "c.yaml").policy.objective is Objective.COMPLETION
    )
    policy = parse_cluster(EMBEDDED_CLUSTER + POLICY + "  objective: makespan\n", "c.yaml").policy
    assert policy.objective is Objective.MAKESPAN
    with pytest.raises(SpecError) as refused:
        parse_cluster(EMBEDDED_CLUSTER + "\npolicy: {objective: makespam}\n", "c.yaml")
    for phrase in ("policy.objective", "'completion' or 'makespan'", "did you mean 'makespan'?"):
        assert phrase in str(refused.value)


def test_a_half_life_without_teams_is_refused() -> None:
    with pytest.raises(SpecError, match="name `teams`, or leave it out"):
        parse_cluster(EMBEDDED_CLUSTER + "\npolicy: {half_life: 2d}\n", "c.yaml")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("    - {name: speech, users: [ada]}\n", "user 'ada' is said twice"),
        ("    - {name: vision}\n", "team 'vision' is said twice"),
        ("    - {name: speech, shares: 0}\n", "shares"),
        ("    - {name: speech, share: 1}\n", "did you mean 'shares'?"),
        ("    - {name: speech, users: ['a b']}\n", "users"),
    ],
)
def test_a_mistake_in_a_policy_is_one_clear_error(text: str, message: str) -> None:
    with pytest.raises(SpecError, match=r"c\.yaml") as refused:
        parse_cluster(EMBEDDED_CLUSTER + POLICY + text, "c.yaml")
    assert message in str(refused.value)


@pytest.mark.parametrize(
    ("level", "priority"), [("high", 100), ("normal", 0), ("low", -100), (7, 7), ("7", 7)]
)
def test_priority_is_a_class_or_a_number(level: object, priority: int) -> None:
    spec = JobSpec.model_validate(
        {"name": "j", "command": "x", "global_batch_size": 1, "priority": level}
    )
    assert spec.priority == priority
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
