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
    """A credit's share of the cluster's device-seconds; it fills up to those of `span_s` seconds."""

    name: str
    share: float
    span_s: float

    def full_device_s(self, devices: int) -> float:
        """Return the device-seconds of this fund's full credit on a cluster of `devices` devices."""
        return self.share * devices * self.span_s


STOPS = CreditFund(name="stops", share=0.02, span_s=6 * 3600.0)
# Starts of jobs past their aging limits, which then end in time: with all of the device-seconds a lasting backlog is
# first come, first served. Shares of 0.1, 0.25, 0.4, mean completion over that of shortest first on gavel_2869ce and
# sia_rate50_3 of benchmarks/traces: 1.10 and 1.12, 1.09 and 1.14, 1.18 and 1.15; worst slowdown 1.9 and 1.8, 0.6 and
# 1.8, 1.6 and 2.1. All of it: 2.29 and 1.11, 17.4 and 2.8.
AGED = CreditFund(name="aged", share=0.25, span_s=3600.0)
# Starts of jobs whose deadlines are urgent. Shares of 0.5, 0.75 and all, deadlines met on cluster05: 0.802, 0.793,
# 0.798; mean completion of sia_rate50_3 where half have deadlines 26,300, 30,900, 41,100 s (none: 23,100).
PRESSING = CreditFund(name="pressing", share=0.5, span_s=4 * 3600.0)


def credit_device_s(state: State, fund: CreditFund, devices: int) -> float:
    """Return the device-seconds that the fund's credit holds at the state's time; below zero in
    debt.
    """
    full_device_s = fund.full_device_s(devices)
    credit = next((credit for credit in state.credits if credit.fund == fund.name), None)
    if credit is None:
        return full_device_s
    filled_device_s = fund.share * devices * (state.at_s - credit.at_s)
    return min(full_device_s, credit.device_s + filled_device_s)


def credit_suffices_from_s(state: State, fund: CreditFund, devices: int, device_s: float) -> float:
    """Return when the fund's credit will cover `device_s` device-seconds, in seconds since 1970.

    Infinity means that even a full credit is too small.
    """
    if device_s > fund.full_device_s(devices):
        return inf
    missing_device_s = max(0.0, device_s - credit_device_s(state, fund, devices))
    return state.at_s + missing_device_s / (fund.share * devices)


def spend_credit(state: State, fund: CreditFund, devices: int, device_s: float) -> State:
    """Return the state with `device_s` device-seconds taken from the fund's credit; unchanged for
    0.
    """
    if not device_s:
        return state
    left = credit_device_s(state, fund, devices) - device_s
    others = (credit for credit in state.credits if credit.fund != fund.name)
    return replace(state, credits=(*others, Credit(fund=fund.name, device_s=left, at_s=state.at_s)))
