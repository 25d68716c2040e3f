"""An end that nothing explains near the limit of its devices gets one attempt with less memory, and teaches nothing."""

from __future__ import annotations

import pytest

from orchestrator.scheduling.base.sentences import describe_status
from orchestrator.specs.attempt import Attempt, ErrorReport, Evidence, Heartbeat, OomReport, RankEnd
from orchestrator.specs.events import NodesSeen
from orchestrator.specs.state import State
from tests.scheduling.factories import MIB, decoder_spec
from tests.scheduling.test_step import NODES, finished, launches, released, run, submitted

CRASH = RankEnd(rank=0, exit_code=-11)
NEAR_MIB, FAR_MIB = 250, 100  # of the 256 MiB of a device


def beat(peak_mib: int) -> Heartbeat:
    return Heartbeat(
        rank=0, step=5, steps_done=5, step_s=0.1, peak_bytes=peak_mib * MIB,
        phase="forward", at_s=1.0, torch_version="2",
    )  # fmt: skip


def after(evidence: Evidence) -> tuple[State, Attempt, Attempt]:
    """The state after a first attempt with this evidence, that attempt, and the next one."""
    state, _ = run(NODES, submitted(decoder_spec(global_batch_size=64)))
    (first,) = state.jobs["lm-1"].attempts
    later = NodesSeen(nodes=NODES.nodes, at_s=10_000.0)
    state, actions = run(finished(evidence), released(), later, state=state)
    (following,) = launches(actions)
    ended = state.jobs["lm-1"].attempts[0]
    assert ended.plan == first.plan
    return state, ended, following


def test_an_unexplained_end_near_the_limit_is_tried_with_less_memory_once() -> None:
    evidence = Evidence(ranks=(CRASH,), heartbeats=(beat(NEAR_MIB),))
    state, first, second = after(evidence)
    assert first.failure is not None
    assert "unexplained, near its limit" in first.failure.reason
    assert second.estimate.device_bytes < first.estimate.device_bytes
    assert state.jobs["lm-1"].refuted == frozenset()
    later = NodesSeen(nodes=NODES.nodes, at_s=100_000.0)
    evidence = Evidence(ranks=(CRASH,), heartbeats=(beat(FAR_MIB),))
    state, actions = run(
        finished(evidence, 2, at_s=20_000.0), released(2, at_s=20_001.0), later, state=state
    )
    # no plan is refuted: the first may run again
    assert [entry.plan for entry in launches(actions)] in ([], [first.plan])
    assert state.jobs["lm-1"].attempts[1].failure is not None, describe_status(state.jobs["lm-1"])


def test_an_end_far_from_the_limit_keeps_its_plan() -> None:
    _, first, second = after(Evidence(ranks=(CRASH,), heartbeats=(beat(FAR_MIB),)))
    assert second.plan == first.plan
    assert first.failure is not None
    assert not first.failure.near_limit


@pytest.mark.parametrize("evidence", ["near", "caught"])
def test_nothing_is_learned_from_it(evidence: str) -> None:
    caught = OomReport(
        rank=0, step=5, steps_done=5, phase="forward", requested_bytes=MIB, live_bytes=MIB, capacity_bytes=256 * MIB
    )  # fmt: skip
    bug = ErrorReport(rank=0, step=5, phase="forward", type="KeyError", traceback="KeyError: 1")
    ended = {
        "near": Evidence(ranks=(CRASH,), heartbeats=(beat(NEAR_MIB),)),
        "caught": Evidence(
            ranks=(RankEnd(rank=0, exit_code=1),), caught=(caught,), errors=(bug,), heartbeats=(beat(FAR_MIB),)
        ),
    }[evidence]  # fmt: skip
    state, first, second = after(ended)
    assert first.failure is not None
    assert first.failure.near_limit
    assert second.estimate.device_bytes < first.estimate.device_bytes
    assert not any(observation.ran_out for observation in state.observations)
