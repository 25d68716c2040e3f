"""`guarantee: requested`: at least the speed of the request from a told time on, or a refusal at submission."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.base import tuning
from orchestrator.scheduling.base.pending import get_pending_code
from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.scheduling.scheduling_pass.guarantees import START_WITHIN_S
from orchestrator.scheduling.scheduling_pass.index import OVERDUE
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Event, NodesSeen
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import parse_job
from orchestrator.specs.pending import Pending
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.state import State
from tests.scheduling.factories import node
from tests.scheduling.test_elastic import LONG, RESTED_S, elastic, left, moving
from tests.scheduling.test_queue import LAUNCH_S, gone, played, script, seen, submitted

SPEEDS = {1: 1000.0, 2: 900.0, 4: 800.0}
SMALL = {"parameters": 1000, "activations_per_sample": "1MiB"}  # without FLOPs
TEXT = """\
name: job
command: python train.py
global_batch_size: 8
steps: 10
speeds: {1: 100s, 2: 60s, 4: 40s}
"""


def guaranteed(
    seconds: dict[int, float], request: object = "requested", **fields: object
) -> JobSpec:
    return script(seconds, guarantee=request, **fields)


def run_events(events: list[Event]) -> State:
    return played(*events)[0]


def test_it_runs_as_fast_as_its_request_though_fewer_devices_would_be_better_for_all() -> None:
    crowd = [submitted(number, script({1: 5000.0})) for number in range(2, 6)]
    for spec, devices in (
        (script(SPEEDS), 1),
        (guaranteed(SPEEDS, {"gpus": 2}), 2),
        (guaranteed(SPEEDS), 4),
    ):
        _, launches = played(seen(node(devices=8)), *crowd, submitted(6, spec, 2.0))
        assert launches["job-6"].plan.world_size == devices


def test_fewer_devices_may_do_where_the_requested_plan_is_slow() -> None:
    """The requested plan takes 95 s a step on four devices; the fastest takes 90 s on two."""
    events = [seen(node(devices=2)), submitted(1, guaranteed(SPEEDS, {"gpus": 4, "step": "95s"}))]
    state, launches = played(*events)
    assert launches["job-1"].plan.world_size == 2
    assert state.jobs["job-1"].starts_by_s == 1.0


def test_it_is_promised_the_start_of_its_reservation_and_keeps_it_whoever_comes() -> None:
    """A job that cannot be moved holds the two devices until 1 + 30 + 600 s."""
    later = [
        submitted(3, script({1: 10.0}, priority=100), 3.0),
        submitted(4, script({2: 10.0}, priority=100), 3.0),
    ]
    events = [
        seen(node(devices=2)),
        submitted(1, script({2: 600.0})),
        submitted(2, guaranteed({2: 300.0}), 2.0),
        *later,
    ]
    state = run_events(events)
    assert state.jobs["job-2"].starts_by_s == pytest.approx(
        2.0 + OVERDUE * (1.0 + LAUNCH_S + 600.0 - 2.0)
    )
    _, launches = played(*events, *gone(1, 631.0))
    assert [*launches] == ["job-1", "job-2"]


def test_it_waits_for_the_nodes_of_its_request_while_they_are_away() -> None:
    whole = [node("node0", devices=2), node("node1", devices=2)]
    left_alone = NodesSeen(nodes=(whole[0],), declared=tuple(whole), at_s=3.0)
    events = [
        seen(*whole),
        submitted(1, script({4: 600.0})),
        submitted(2, guaranteed(SPEEDS), 2.0),
        left_alone,
        *gone(1, 631.0),
    ]
    state, launches = played(*events)
    assert ("job-2" in launches, state.jobs["job-2"].status) == (False, JobStatus.QUEUED)
    assert (
        describe_status(state.jobs["job-2"]) == "waits for nodes with virtual-256mib to come back"
    )
    assert get_pending_code(state.jobs["job-2"], state.at_s) is Pending.NODES_AWAY
    _, launches = played(*events, NodesSeen(nodes=tuple(whole), declared=tuple(whole), at_s=700.0))
    assert launches["job-2"].plan.world_size == 4


def test_several_make_way_for_it_together_once_each_has_run_for_long_enough() -> None:
    both = [submitted(number, elastic(LONG)) for number in (1, 2)]
    wide = guaranteed({2: 300.0})
    state = run_events([seen(node(devices=2)), *both, submitted(3, wide, 100.0)])
    assert moving(state) == {}
    assert state.reevaluate_at_s == RESTED_S
    events = [seen(node(devices=2)), *both, submitted(3, wide, 500.0)]
    state = run_events(events)
    assert moving(state) == dict.fromkeys(("job-1", "job-2"), "stopped to make way for job-3")
    state, launches = played(*events, *left(1, 510.0, 1), *left(2, 520.0, 1))
    assert launches["job-3"].launched_at_s == 520.0


def test_nobody_more_is_stopped_than_it_needs_nor_for_what_comes_free_soon() -> None:
    both = [submitted(number, elastic(LONG)) for number in (1, 2)]
    assert (
        len(
            moving(
                run_events(
                    [seen(node(devices=2)), *both, submitted(3, guaranteed({1: 300.0}), 500.0)]
                )
            )
        )
        == 1
    )
    soon = [
        submitted(1, script({1: 550.0})),
        submitted(2, elastic(LONG)),
        submitted(3, guaranteed({1: 300.0}), 500.0),
    ]
    assert moving(run_events([seen(node(devices=2)), *soon])) == {}


def test_nobody_is_stopped_who_is_guaranteed_a_speed_or_was_due_before() -> None:
    single = node(devices=1)
    submission = submitted(
        1, guaranteed(LONG, knobs={"resume_from": {"flag": "-r"}}, resume={"on_sigterm": True})
    )
    assert (
        moving(run_events([seen(single), submission, submitted(2, guaranteed({1: 10.0}), 5000.0)]))
        == {}
    )
    aging_limit_s = 1.0 + tuning.TUNING.aging_factor * (LAUNCH_S + 600.0)
    overdue = [
        submitted(1, script({1: aging_limit_s})),
        submitted(2, elastic({1: 600.0}), 1.0),
        *gone(1, aging_limit_s),
    ]
    assert (
        moving(
            run_events(
                [seen(single), *overdue, submitted(3, guaranteed({1: 10.0}), aging_limit_s + 200.0)]
            )
        )
        == {}
    )


def test_who_was_due_before_it_came_goes_first_whatever_the_priority() -> None:
    aging_limit_s = 1.0 + tuning.TUNING.aging_factor * (LAUNCH_S + 100.0)
    events = [
        seen(node(devices=1)),
        submitted(1, script({1: 5000.0})),
        submitted(2, script({1: 100.0}, priority=-5)),
    ]
    for comes_s, first in ((aging_limit_s - 10.0, "job-3"), (aging_limit_s + 10.0, "job-2")):
        late = submitted(3, guaranteed({1: 50.0}, priority=5), comes_s)
        assert [*played(*events, late, *gone(1, 5031.0))[1]] == ["job-1", first]


def refusals(events: list[Event]) -> dict[str, str]:
    """Why each job is refused that is."""
    return {
        job.id: job.reason
        for job in run_events(events).jobs.values()
        if job.status is JobStatus.REFUSED
    }


@pytest.mark.parametrize(
    ("spec", "says"),
    [
        (guaranteed({2: 100.0}, gpus={"min": 1, "max": 4}), "no plan fits on so many"),
        (
            guaranteed({1: 100.0}, {"step": "9s"}),
            "9 s a step: no plan that fits virtual-256mib is as fast",
        ),
        (
            guaranteed({}, {"step": "9s"}, probe="never", profile=SMALL),
            "nothing tells them; say `speeds`",
        ),
    ],
)
def test_what_no_plan_can_give_is_refused(spec: JobSpec, says: str) -> None:
    assert says in refusals([seen(node(devices=4)), submitted(1, spec)])["job-1"]


def test_a_start_later_than_a_day_is_no_promise_and_others_are_not_held_up_by_it() -> None:
    events = [
        seen(node(devices=1)),
        submitted(1, script({1: START_WITHIN_S})),
        submitted(2, guaranteed({1: 10.0}), 2.0),
    ]
    reasons = refusals(events)
    assert reasons["job-2"].startswith(
        "cannot be promised the speed of 1 device: could start only in 24.0 h; without"
    )


def test_a_team_is_promised_no_more_than_its_quota() -> None:
    policy = PolicySpec(
        teams=[
            {"name": "vision", "users": ["ada", "bob"], "quota": 2},
            {"name": "speech", "quota": 2},
        ]
    )
    nodes = (node(devices=4),)
    events: list[Event] = [NodesSeen(nodes=nodes, declared=nodes, policy=policy, at_s=0.0)]
    users = enumerate(("ada", "bob", "ada", "dan"), 1)
    events += [submitted(number, guaranteed({1: 500.0}, user=user)) for number, user in users]
    reasons = refusals(events)
    assert [*reasons] == ["job-3", "job-4"]
    assert (
        "2 of the 2 devices of team vision's quota are promised to its other jobs"
        in reasons["job-3"]
    )
    assert "0 of the 0 devices of team others's quota" in reasons["job-4"]
    assert [
        *refusals([*events, *gone(1, 531.0), submitted(5, guaranteed({1: 1.0}, user="bob"), 532.0)])
    ] == [*reasons]


@pytest.mark.parametrize(
    ("line", "says"),
    [
        ("guarantee: asked", "`requested`"),
        ("guarantee: {gpus: 8}", "`guarantee.gpus` is 8: `gpus` allows 1 to 4"),
        (
            "guarantee: requested\nstart_window: 22:00-08:00 UTC",
            "neither `depends_on` nor `start_window`",
        ),
        ("guarantee: requested\ndepends_on: [other-1]", "neither `depends_on` nor `start_window`"),
        ("guarantee: {step: 0s}", "greater than 0"),
    ],
)
def test_a_guarantee_that_cannot_be_given_is_a_clear_error(line: str, says: str) -> None:
    with pytest.raises(SpecError, match=says):
        parse_job(f"{TEXT}{line}\n", "job.yaml")
    with pytest.raises(SpecError, match="needs `steps`"):
        parse_job(TEXT.replace("steps: 10\n", "") + "guarantee: requested\n", "job.yaml")


def test_a_guarantee_is_written_as_it_is_read() -> None:
    spec = parse_job(f"{TEXT}guarantee: {{gpus: 2, step: 61s}}\n", "job.yaml")
    assert spec.model_dump(mode="json")["guarantee"] == {"gpus": 2, "step": "61s"}
    assert JobSpec.model_validate(spec.model_dump(mode="json")) == spec
    assert parse_job(f"{TEXT}guarantee: requested\n", "job.yaml").guaranteed_gpus == 4
