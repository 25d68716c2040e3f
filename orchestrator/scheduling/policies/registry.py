"""Lookup of queue policies by their names in a cluster file."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from orchestrator.scheduling.policies.adaptive import AdaptivePolicy
from orchestrator.scheduling.policies.easy import EasyPolicy
from orchestrator.scheduling.policies.edf import EdfPolicy
from orchestrator.scheduling.policies.fifo import FifoPolicy
from orchestrator.scheduling.policies.sjf import SjfPolicy
from orchestrator.scheduling.policies.tiresias import TiresiasPolicy
from orchestrator.scheduling.queue.policy import QueuePolicy
from orchestrator.scheduling.scheduling_pass.index import SchedulerIndex
from orchestrator.specs.order import Order
from orchestrator.specs.state import State

POLICIES: Mapping[Order, Callable[[SchedulerIndex], QueuePolicy]] = {
    Order.ADAPTIVE: AdaptivePolicy,
    Order.FIFO: FifoPolicy,
    Order.EASY: EasyPolicy,
    Order.EDF: EdfPolicy,
    Order.SJF: SjfPolicy,
    Order.TIRESIAS: TiresiasPolicy,
}


def index_of(state: State) -> SchedulerIndex:
    """Return a new scheduler index of a state, with the policy that its cluster file names."""
    return SchedulerIndex(state, lambda index: POLICIES[index.state.policy.order](index))
