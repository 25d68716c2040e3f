"""The credit of device-seconds from which stops for a gain are paid, so that moves never take more than a share.

It fills at CREDIT_SHARE of the cluster's device-seconds, up to those of CREDIT_S. Stops for a priority, a deadline, an
owner or a maintenance are not paid from it.
"""

from __future__ import annotations

from math import inf

from orchestrator.specs.replace import replace
from orchestrator.specs.state import State, StopCredit

CREDIT_SHARE = 0.02
CREDIT_S = 6 * 3600.0  # a cluster that was calm so long may move so much at once


def credit_from_s(state: State, devices: int, device_s: float) -> float:
    """Return from when on the credit covers `device_s`, in seconds since 1970; infinity: it never does."""
    rate = CREDIT_SHARE * devices
    if device_s > rate * CREDIT_S:
        return inf
    missing_s = max(0.0, device_s - _credit_device_s(state, devices)) / rate
    return state.at_s + missing_s


def pay_stops(state: State, devices: int, device_s: float) -> State:
    """Return the state after stops of this cost; unchanged without a cost."""
    if not device_s:
        return state
    left = _credit_device_s(state, devices) - device_s
    return replace(state, stop_credit=StopCredit(device_s=left, at_s=state.at_s))


def _credit_device_s(state: State, devices: int) -> float:
    rate, credit = CREDIT_SHARE * devices, state.stop_credit
    if credit is None:
        return rate * CREDIT_S
    return min(rate * CREDIT_S, credit.device_s + rate * (state.at_s - credit.at_s))
