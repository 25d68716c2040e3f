"""Credits of device-seconds: budgets that bound how much jobs which overtake others may take.

A credit fills at its share of the cluster's device-seconds, up to those of a span. Starts of
overdue and urgent jobs and stops for a gain of others are paid from credits. Stops for a priority,
a deadline, an owner or a maintenance are not paid for, and neither are guarantees.
"""

from __future__ import annotations

from math import inf

from orchestrator.specs.frozen import frozen
from orchestrator.specs.replace import replace
from orchestrator.specs.state import Credit, State


@frozen
class CreditFund:
    """A budget of device-seconds from which a kind of start or stop is paid, such as urgent starts.

    Its credit fills by `share` of the cluster's device-seconds, and at most to what `share` of the
    cluster yields in `span_s` seconds.
    """

    name: str
    share: float
    span_s: float

    def compute_full_device_s(self, cluster_device_count: int) -> float:
        """Return the most device-seconds that this fund's credit can hold, on a cluster of so many
        devices.
        """
        return self.share * cluster_device_count * self.span_s


STOPS = CreditFund(name="stops", share=0.02, span_s=6 * 3600.0)
# Starts of jobs past their aging limits, which then end in time: with all of the device-seconds a lasting backlog is
# first come, first served. Shares of 0.1, 0.25, 0.4, mean completion over that of shortest first on gavel_2869ce and
# sia_rate50_3 of benchmarks/traces: 1.10 and 1.12, 1.09 and 1.14, 1.18 and 1.15; worst slowdown 1.9 and 1.8, 0.6 and
# 1.8, 1.6 and 2.1. All of it: 2.29 and 1.11, 17.4 and 2.8.
AGED = CreditFund(name="aged", share=0.25, span_s=3600.0)
# Starts of jobs whose deadlines are urgent. Shares of 0.5, 0.75 and all, deadlines met on cluster05: 0.802, 0.793,
# 0.798; mean completion of sia_rate50_3 where half have deadlines 26,300, 30,900, 41,100 s (none: 23,100).
PRESSING = CreditFund(name="pressing", share=0.5, span_s=4 * 3600.0)


def compute_credit_device_s(state: State, fund: CreditFund, cluster_device_count: int) -> float:
    """Return the device-seconds in the fund's credit at the state's time; below zero where too much
    was spent.
    """
    full_device_s = fund.compute_full_device_s(cluster_device_count)
    credit = next((credit for credit in state.credits if credit.fund == fund.name), None)
    if credit is None:
        return full_device_s
    filled_device_s = fund.share * cluster_device_count * (state.at_s - credit.at_s)
    return min(full_device_s, credit.device_s + filled_device_s)


def compute_credit_suffices_at_s(
    state: State, fund: CreditFund, cluster_device_count: int, needed_device_s: float
) -> float:
    """Return the first time at which the fund's credit covers `needed_device_s`, in seconds since
    1970.

    It may be now. Infinity means that even a full credit is too small.
    """
    if needed_device_s > fund.compute_full_device_s(cluster_device_count):
        return inf
    missing_device_s = max(
        0.0, needed_device_s - compute_credit_device_s(state, fund, cluster_device_count)
    )
    return state.at_s + missing_device_s / (fund.share * cluster_device_count)


def spend_credit(
    state: State, fund: CreditFund, cluster_device_count: int, spent_device_s: float
) -> State:
    """Return the state with `spent_device_s` device-seconds subtracted from the fund's credit."""
    if not spent_device_s:
        return state
    left = compute_credit_device_s(state, fund, cluster_device_count) - spent_device_s
    others = (credit for credit in state.credits if credit.fund != fund.name)
    return replace(state, credits=(*others, Credit(fund=fund.name, device_s=left, at_s=state.at_s)))
