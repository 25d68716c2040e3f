"""Lookup of queue policies by their names in a cluster file."""

from __future__ import annotations

from collections.abc import Callable

from orchestrator.scheduling.policies.adaptive import AdaptivePolicy
from orchestrator.scheduling.policies.fifo import FifoPolicy
from orchestrator.scheduling.queue.policy import QueuePolicy
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.order import Order
from orchestrator.specs.state import State

POLICIES: dict[str, Callable[[SchedulerIndex], QueuePolicy]] = {  # by `policy.order`
    Order.ADAPTIVE: AdaptivePolicy,
    Order.FIFO: FifoPolicy,
}


def make_index(state: State) -> SchedulerIndex:
    """Return a new scheduler index for the state, with the queue policy that its cluster file
    names.
    """
    return SchedulerIndex(state, lambda index: POLICIES[index.state.policy.order](index))
