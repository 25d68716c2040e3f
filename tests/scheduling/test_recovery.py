"""However wrong its prediction was, a job comes to a plan that fits before its retries are spent."""

from __future__ import annotations

import pytest

from orchestrator.memory.calibration.correction import (
    correct_allocated_bytes,
    correct_device_bytes,
)
from orchestrator.scheduling.step import step
from orchestrator.specs.actions import Action, Launch
from orchestrator.specs.attempt import Attempt, Evidence, OomReport, RankEnd
from orchestrator.specs.cluster import make_idle_nodes
from orchestrator.specs.events import Finished, Released, Submitted
from orchestrator.specs.job.sections import Retries
from orchestrator.specs.job.spec import JobSpec
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.run import OOM_EXIT_CODE
from orchestrator.specs.state import State

NODES = make_idle_nodes(
    parse_cluster(
        "name: here\nnodes: [{name: n, devices: 4, device: a100-80gb, host_memory: 1TiB}]", "here"
    )
)
SIZES = {
    "vocab_size": 32000,
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_hidden_layers": 32,
}
LLAMA_7B = JobSpec.model_validate(
    {
        "name": "lm",
        "gpus": 4,
        "global_batch_size": 64,
        "precision": "bf16",
        "model": {"decoder": SIZES | {"num_attention_heads": 32}},
        "data": {"text": ["text"], "sequence_length": 4096},
    }
)


def launched(actions: tuple[Action, ...]) -> Attempt | None:
    return next((action.attempt for action in actions if isinstance(action, Launch)), None)


def ran_out(attempt: Attempt, true: float) -> Evidence | None:
    """Return the ranks' report where activations are `true` times the prediction, or None for a success."""
    memory = NODES[0].device.memory
    if correct_device_bytes(attempt.estimate, true) <= memory:
        return None
    around = attempt.estimate.device_bytes - attempt.estimate.allocated_bytes
    live_bytes = min(correct_allocated_bytes(attempt.estimate, true), memory - around)
    report = OomReport(
        rank=0,
        step=2,
        phase="backward",
        requested_bytes=1,
        live_bytes=live_bytes,
        capacity_bytes=memory,
    )
    return Evidence(ranks=(RankEnd(rank=0, exit_code=OOM_EXIT_CODE),), ooms=(report,))


@pytest.mark.parametrize("true", [1.2, 2.0, 4.0, 8.2, 10.8, 13.3, 16.6, 19.8])
def test_a_plan_that_fits_is_found_before_the_retries_are_spent(true: float) -> None:
    state, actions = step(
        State(nodes=NODES), Submitted(job_id="lm-1", order=1, spec=LLAMA_7B, at_s=0.0)
    )
    for number in range(1, Retries().oom):
        attempt = launched(actions)
        assert attempt is not None, state.jobs["lm-1"].reason
        evidence = ran_out(attempt, true)
        if evidence is None:
            return
        state, _ = step(
            state, Finished(job_id="lm-1", number=number, evidence=evidence, at_s=10.0 * number)
        )
        state, actions = step(state, Released(job_id="lm-1", number=number, at_s=10.0 * number + 1))
    raise AssertionError(f"{Retries().oom} plans ran out of memory")
