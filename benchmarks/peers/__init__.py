"""Published queue policies that `adaptive` is measured against. A service has none of them.

Importing this package registers them, so that `cluster.replace_order(Peer.EASY)` can be simulated.
"""

from __future__ import annotations

from enum import StrEnum

from benchmarks.peers.easy import EasyPolicy
from benchmarks.peers.edf import EdfPolicy
from benchmarks.peers.sjf import SjfPolicy
from benchmarks.peers.tiresias import TiresiasPolicy
from orchestrator.scheduling.policies.registry import POLICIES


class Peer(StrEnum):
    """Orders of the queue beside those of `specs/order.py`."""

    EASY = "easy"
    EDF = "edf"
    SJF = "sjf"
    TIRESIAS = "tiresias"


POLICIES.update(
    {
        Peer.EASY: EasyPolicy,
        Peer.EDF: EdfPolicy,
        Peer.SJF: SjfPolicy,
        Peer.TIRESIAS: TiresiasPolicy,
    }
)
