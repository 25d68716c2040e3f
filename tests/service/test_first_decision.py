"""Laws of work: no job makes a decision look at more than PLANS_MAX, and one that cannot end ends a child alone."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import closing
from typing import Any, ClassVar

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from orchestrator.planning import search
from orchestrator.planning.work import PLANS_MAX, PlanCounter
from orchestrator.scheduling.scheduler import Scheduler
from orchestrator.service.server.first_decision import FirstDecisions
from orchestrator.specs.cluster import ClusterSpec, NodeSpec, make_idle_nodes
from orchestrator.specs.errors import SpecError
from orchestrator.specs.events import Submitted
from orchestrator.specs.job.model import (
    BATCH_MAX,
    HEADS_MAX,
    LAYERS_MAX,
    LENGTH_MAX,
    TABLE_MAX,
    WIDTH_MAX,
)
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.job_record import JobStatus
from orchestrator.specs.parse import parse_job_data
from orchestrator.specs.state import State


def state(nodes: int, devices: int = 8) -> State:
    node = NodeSpec(name="n", count=nodes, devices=devices, device="h100-80gb", host_memory="1TiB")
    return State(nodes=make_idle_nodes(ClusterSpec(name="c", nodes=[node])))


def decoder(**changes: Any) -> JobSpec:
    sizes = {
        "vocab_size": 128256,
        "hidden_size": 16384,
        "intermediate_size": 53248,
        "num_hidden_layers": 126,
    }
    sizes |= {"num_attention_heads": 128, "num_key_value_heads": 8} | changes.pop("decoder", {})
    data = {
        "name": "a",
        "global_batch_size": 2048,
        "precision": "bf16",
        "gpus": {"min": 1, "max": 4096},
    }
    data |= {
        "model": {"decoder": sizes},
        "data": {"text": ["x"], "sequence_length": 8192},
    } | changes
    return parse_job_data(data, "job")


class Counted(PlanCounter):
    """Work whose totals are kept."""

    totals: ClassVar[list[PlanCounter]] = []

    def __init__(self, plans_max: int) -> None:
        super().__init__(plans_max)
        self.totals.append(self)


@pytest.fixture
def totals(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[PlanCounter]]:
    monkeypatch.setattr(search, "PlanCounter", Counted)
    yield Counted.totals
    Counted.totals.clear()


LOOKED_MAX = 4 * PLANS_MAX  # of one decision: its own search, and those that say what would fit
DIVISIBLE = (1, 720, 720720, 8648640, BATCH_MAX, 2**23 + 1)


def look(
    totals: list[PlanCounter],
    batch: int,
    layers: int,
    heads: int,
    width: int,
    nodes: int,
    gpus: int,
) -> int:
    """Decide on one job; return how many plans all searches of the decision looked at."""
    sizes = {
        "hidden_size": max(width, 2 * heads),
        "intermediate_size": WIDTH_MAX,
        "num_hidden_layers": layers,
    }
    sizes |= {"num_attention_heads": heads, "num_key_value_heads": heads, "vocab_size": TABLE_MAX}
    data = {"text": ["x"], "sequence_length": LENGTH_MAX}
    spec = decoder(decoder=sizes, global_batch_size=batch, gpus={"min": 1, "max": gpus}, data=data)
    search._get_cached_frontier.cache_clear()
    search._build_frontier_at_speeds.cache_clear()
    totals.clear()
    Scheduler(state(nodes)).step(Submitted(job_id="a-1", order=1, spec=spec, at_s=0.0))
    return sum(work.looked for work in totals)


@pytest.mark.long
def test_the_largest_jobs_make_no_decision_look_at_more_than_its_limit(
    totals: list[PlanCounter],
) -> None:
    assert 0 < look(totals, 8648640, 720, HEADS_MAX, WIDTH_MAX, 64, 2**22) <= LOOKED_MAX
    assert 0 < look(totals, 720720, LAYERS_MAX, 2**7, 2**8, 1, 8) <= LOOKED_MAX


@pytest.mark.long
@pytest.mark.timeout(1800)
@settings(
    max_examples=40,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
@given(
    batch=st.sampled_from(DIVISIBLE) | st.integers(1, BATCH_MAX),
    layers=st.sampled_from((1, 720, 840, LAYERS_MAX)),
    heads=st.sampled_from((1, 2**7, HEADS_MAX)),
    width=st.sampled_from((2**8, WIDTH_MAX)),
    nodes=st.sampled_from((1, 64, 8192)),
    gpus=st.sampled_from((1, 720, 2**22)),
)
def test_no_bounded_job_makes_a_decision_look_at_more_than_its_limit(
    totals: list[PlanCounter], **drawn: int
) -> None:
    assert look(totals, **drawn) <= LOOKED_MAX  # 0 where the first family of plans has too many


def test_a_job_with_too_many_plans_is_refused_with_the_number_and_what_to_pin() -> None:
    large = decoder(global_batch_size=720720)
    pinned = decoder(
        global_batch_size=720720,
        plan={"tp": 8, "pp": 1, "micro_batch": 1},
        gpus={"min": 8, "max": 64},
    )
    with closing(FirstDecisions()) as first:
        with pytest.raises(SpecError, match=rf"more than {PLANS_MAX:,}") as refused:
            first.check_job(state(512), large)
        assert "`plan:" in refused.value.hint
        first.check_job(state(512), pinned)


def test_a_decision_that_takes_too_long_ends_a_child_and_nothing_else() -> None:
    large = decoder(decoder={"num_hidden_layers": 720}, global_batch_size=5040)
    with closing(
        FirstDecisions(cpu_s=1.0)
    ) as first:  # the large job takes 3.4 s, the small one 0.2 s
        with pytest.raises(SpecError, match="exceeds the limits of a decision"):
            first.check_job(state(64), large)
        first.check_job(
            state(1), decoder(gpus=1, plan={"micro_batch": 1, "zero_stage": 0})
        )  # in a child of its own


def test_before_any_node_is_seen_the_declared_ones_count() -> None:
    declared = State(declared=state(512).nodes)
    with closing(FirstDecisions()) as first, pytest.raises(SpecError, match="more than"):
        first.check_job(declared, decoder(global_batch_size=720720))


def test_a_child_that_never_answers_is_ended() -> None:
    first = FirstDecisions(program="tests.service.never_decides", answer_s=1.0)
    with pytest.raises(SpecError, match="exceeds the limits of a decision"):
        first.check_job(state(1), decoder(gpus=8))


def test_a_job_that_comes_while_an_idle_child_ends_is_asked_of_another() -> None:
    ends_slowly = "import os, sys, time; os.close(1); sys.stdin.readline(); time.sleep(0.5)"
    with closing(FirstDecisions()) as first:
        first._child = subprocess.Popen(
            [sys.executable, "-c", ends_slowly],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )
        first.check_job(state(1), decoder(gpus=1))


def test_a_published_configuration_with_absurd_numbers_is_refused_at_once() -> None:
    sizes = {"hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "vocab_size": 99}
    hf = {"model_type": "llama", "num_hidden_layers": 2**53 - 111, **sizes}
    *_, last = Scheduler(state(1)).step(
        Submitted(job_id="a-1", order=1, spec=decoder(model={"hf": hf}), at_s=0.0)
    )
    job = last.job
    assert job.status is JobStatus.REFUSED
    assert "too many layers" in job.reason


def test_a_shape_is_tried_once(monkeypatch: pytest.MonkeyPatch) -> None:
    with closing(FirstDecisions()) as first:
        specs: list[JobSpec] = []
        ask = first._ask_child
        monkeypatch.setattr(
            first, "_ask_child", lambda state, spec: specs.append(spec) or ask(state, spec)
        )
        for rate in (1e-3, 1e-4):  # what no plan depends on is no other shape
            first.check_job(
                state(1), decoder(gpus=1, training={"learning_rate": rate}, name=f"lr{rate:g}")
            )
        assert len(specs) == 1
        first.check_job(state(1), decoder(gpus=2))
        first.check_job(state(2), decoder(gpus=2))  # other devices: other plans
        assert len(specs) == 3


def test_a_job_that_comes_after_another_is_tried_as_if_that_were_over() -> None:
    """The child knows no other jobs."""
    after = parse_job_data(
        {
            "name": "after",
            "global_batch_size": 8,
            "command": "python train.py",
            "depends_on": ["before-1"],
        },
        "job",
    )
    with closing(FirstDecisions()) as first:
        first.check_job(state(1), after)


def test_a_bug_of_the_decision_is_called_one_and_no_limit() -> None:
    with closing(FirstDecisions(program="tests.service.fails_to_decide")) as first:
        for _ in range(2):  # the child goes on
            with pytest.raises(SpecError, match="planning this job failed: KeyError") as error:
                first.check_job(state(1), decoder())
    assert "limits" not in str(error.value)
