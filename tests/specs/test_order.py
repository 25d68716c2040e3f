"""Orders of the queue that were removed: refused in a cluster file, readable in a journal."""

from __future__ import annotations

import pytest

from orchestrator.backends.journal.history import Codec, find_codec
from orchestrator.specs.errors import SpecError
from orchestrator.specs.order import REMOVED, Order
from orchestrator.specs.parse import parse_cluster
from orchestrator.specs.policy import PolicySpec
from orchestrator.specs.replace import replace
from orchestrator.specs.state import State

CLUSTER = "name: one\nnodes: [{{name: n, device: a100-80gb, devices: 1, host_memory: 64GiB}}]\npolicy: {{order: {}}}\n"


@pytest.mark.parametrize("name", REMOVED)
def test_a_removed_order_is_refused_in_a_cluster_file_with_what_to_take(name: str) -> None:
    with pytest.raises(SpecError, match=f"order '{name}' was removed: take 'adaptive' or 'fifo'"):
        parse_cluster(CLUSTER.format(name), "cluster")


@pytest.mark.parametrize("name", REMOVED)
def test_a_journal_that_names_a_removed_order_is_read_as_adaptive(name: str) -> None:
    codec: Codec = find_codec(State)
    fifo = replace(State(), policy=PolicySpec(order=Order.FIFO))
    text = codec.write(fifo, exclude={"jobs"})
    assert codec.read(text.replace('"fifo"', f'"{name}"')).policy.order is Order.ADAPTIVE
